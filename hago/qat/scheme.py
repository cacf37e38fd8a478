"""Training schemes: how ranges change and how gradients pass in training. Most are named after the system or the paper
that does so; docs/training.md compares them.

A scheme does not choose the integers. The hardware does, so that the trained model is the one that is shipped. To train
on the grid of another system, describe a hardware with that grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.fake_quantize import Slope
from hago.emulation.dorefa import DOREFAS, DoReFa
from hago.emulation.oneflow import MovingAverageMinMaxObserver
from hago.emulation.tensorflow import MovingAvgQuantize
from hago.errors import HagoError, did_you_mean
from hago.qat.batch_norm import NormStyle
from hago.qat.ranges import Average

#: A function from the number of channels of a range to its Average.
AverageOf = Callable[[int], Average]


class ZeroDebiasedAverage(Average):
    """The moving average of TensorFlow's MovingAvgQuantize, corrected for its start at 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # the names of attributes are in state dicts
        self.kept = MovingAvgQuantize(channels=channels)

    def update(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        self.kept.update(low.to(torch.float32), high.to(torch.float32))
        return self.kept.minimum.to(torch.float64), self.kept.maximum.to(torch.float64)


class RestartingAverage(Average):
    """The moving average of OneFlow's MovingAverageMinMaxObserver, which is set to the batch's value where it is 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(2, channels))
        self.kept = MovingAverageMinMaxObserver()

    def update(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        past = self.get_buffer("past")
        batch = torch.stack([low, high]).to(past.dtype)
        past.copy_(self.kept.average(past, batch))
        return past[0].to(torch.float64), past[1].to(torch.float64)


class ExponentialAverage(Average):
    """PyTorch's moving average `m += c * (v - m)` with c = 0.01, which starts at the value of the first batch."""

    _CONSTANT: Final = 0.01

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(2, channels))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def update(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        past, seen = self.get_buffer("past"), self.get_buffer("seen")
        batch = torch.stack([low, high]).to(past.dtype)
        past.copy_(torch.where(seen, past + self._CONSTANT * (batch - past), batch))
        seen.fill_(True)
        return past[0].to(torch.float64), past[1].to(torch.float64)


def last_range(channels: int) -> Average:
    """An Average that keeps the range of the last batch; for a weight, its present range."""
    return Average()


@dataclass(frozen=True, slots=True)
class Ranges:
    """The source of the ranges of activations, or of weights, in training; by default the strategy, unchanged.

    Args:
        learned: train them by gradients.
        average: observe them batch by batch, and combine them by this average.
    """

    learned: bool = False
    average: AverageOf | None = None


@dataclass(frozen=True, slots=True)
class TrainingScheme:
    """The way in which a model is trained: an entry of TRAINING_SCHEMES, or an object that the user passes to
    `hago.prepare_qat`.

    Args:
        name: of the scheme.
        activation, weight: the source of their ranges.
        slope: the gradient of fake quantization.
        norms: how batch norms are trained. `frozen` folds them before training, and trains the folded weight; the
            others train through the statistics of the batch, see `hago.qat.batch_norm.FoldedNorm`.
        dorefa: quantize weights, activations and gradients as DoReFa-Net does.

    References:
        docs/quantizers.md; the module of each system in `hago.emulation`.
    """

    name: str
    activation: Ranges = field(default_factory=Ranges)
    weight: Ranges = field(default_factory=Ranges)
    slope: Slope = field(default_factory=Slope)
    norms: NormStyle = "frozen"
    dorefa: DoReFa | None = None


_LAST: Final = Ranges(average=last_range)

TRAINING_SCHEMES: Final[Mapping[str, TrainingScheme]] = {
    s.name: s
    for s in (
        TrainingScheme("hago"),  # the strategy's ranges, unchanged
        TrainingScheme("lsq", Ranges(learned=True), Ranges(learned=True)),
        # ranges learn from clipped values alone: the gradient of TensorFlow's fake quantization, which nudges ranges
        TrainingScheme("nudged", Ranges(learned=True), _LAST, Slope(residual=False)),
        TrainingScheme("tensorflow", Ranges(average=ZeroDebiasedAverage), _LAST, norms="tensorflow"),
        TrainingScheme("oneflow", Ranges(average=RestartingAverage), _LAST, Slope(masked=False), "oneflow"),
        TrainingScheme("pytorch", Ranges(average=ExponentialAverage), _LAST),
        *(TrainingScheme(name, dorefa=options) for name, options in DOREFAS.items()),
    )
}


def training_scheme(spec: str | TrainingScheme) -> TrainingScheme:
    """Return the training scheme of this name, or a TrainingScheme itself.

    Raises:
        HagoError: the name is unknown.
    """
    if isinstance(spec, TrainingScheme):
        return spec
    if not isinstance(spec, str) or spec not in TRAINING_SCHEMES:
        raise HagoError(
            f"unknown training scheme {spec!r}; known: {', '.join(TRAINING_SCHEMES)}."
            + did_you_mean(str(spec), TRAINING_SCHEMES)
        )
    return TRAINING_SCHEMES[spec]


def scheme_settings(scheme: TrainingScheme) -> str | dict[str, Any]:
    """The name of a scheme, and what differs from the scheme of that name in TRAINING_SCHEMES, as JSON values.

    Returns:
        The name alone where nothing differs; fields of a scheme of another name are compared with their defaults.
    """
    named = asdict(TRAINING_SCHEMES.get(scheme.name, TrainingScheme(scheme.name)))
    changed = {key: value for key, value in asdict(scheme).items() if value != named[key]}
    for part in ("activation", "weight"):
        if part in changed and (average := changed[part]["average"]) is not None:
            changed[part]["average"] = getattr(average, "__qualname__", "custom")
    return {"name": scheme.name, **changed} if changed else scheme.name
