"""TrainingScheme: how ranges move and gradients pass in training, by the name of the system that does so.

A scheme does not choose the integers: they are the hardware's, so that what is trained is what is
shipped. Where a system has a grid of its own, give the hardware that grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from hago.emulation.dorefa import DOREFAS, DoReFa
from hago.emulation.oneflow import MovingAverageMinMaxObserver
from hago.emulation.tensorflow.fake_quantize import MovingAvgQuantize
from hago.errors import HagoError, did_you_mean
from hago.qat.batch_norm import Norms
from hago.qat.fake_quantize import Slope
from hago.qat.ranges import Average

#: Makes the average of a range of so many channels.
AverageOf = Callable[[int], Average]


class ZeroDebiased(Average):
    """TensorFlow's moving average; see MovingAvgQuantize."""

    def __init__(self, channels: int, decay: float = 0.999) -> None:
        super().__init__()
        self.kept = MovingAvgQuantize(ema_decay=decay, channels=channels)

    def update(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        self.kept.update(low.to(torch.float32), high.to(torch.float32))
        return self.kept.minimum.to(torch.float64), self.kept.maximum.to(torch.float64)


class Restarting(Average):
    """OneFlow's moving average, which starts anew where it is 0; see MovingAverageMinMaxObserver."""

    def __init__(self, channels: int, momentum: float = 0.95) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(2, channels))
        self.kept = MovingAverageMinMaxObserver(momentum=momentum)

    def update(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        past = self.get_buffer("past")
        batch = torch.stack([low, high]).to(past.dtype)
        past.copy_(self.kept.average(past, batch))
        return past[0].to(torch.float64), past[1].to(torch.float64)


class Drifting(Average):
    """PyTorch's moving average, `m += c * (v - m)`, whose first value is the batch's."""

    def __init__(self, channels: int, constant: float = 0.01) -> None:
        super().__init__()
        self.constant = constant
        self.register_buffer("past", torch.zeros(2, channels))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def update(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        past, seen = self.get_buffer("past"), self.get_buffer("seen")
        batch = torch.stack([low, high]).to(past.dtype)
        past.copy_(torch.where(seen, past + self.constant * (batch - past), batch))
        seen.fill_(True)
        return past[0].to(torch.float64), past[1].to(torch.float64)


def last(channels: int) -> Average:
    """The last batch's range; of weights, their range now."""
    return Average()


@dataclass(frozen=True, slots=True)
class Ranges:
    """How ranges of one kind come about in training.

    Args:
        learned: by gradient.
        average: observed, and averaged so; where neither, ranges stay those of the strategy.
    """

    learned: bool = False
    average: AverageOf | None = None


@dataclass(frozen=True, slots=True)
class TrainingScheme:
    """How a model is trained.

    Args:
        name: of the scheme.
        activation, weight: how their ranges come about.
        slope: how gradients pass.
        norms: what batch norms do: `frozen` folds them before training, and what is trained is the
            folded weight; the others train through the batch's statistics, see FoldedNorm.
        dorefa: quantize weights, activations and gradients as DoReFa-Net does.

    References:
        docs/quantizers.md; each system's own module.
    """

    name: str
    activation: Ranges = field(default_factory=Ranges)
    weight: Ranges = field(default_factory=Ranges)
    slope: Slope = field(default_factory=Slope)
    norms: Norms = "frozen"
    dorefa: DoReFa | None = None


_LAST: Final = Ranges(average=last)

TRAINING_SCHEMES: Final[Mapping[str, TrainingScheme]] = {
    s.name: s
    for s in (
        TrainingScheme("hago"),
        TrainingScheme("lsq", Ranges(learned=True), Ranges(learned=True)),
        TrainingScheme("nudged", Ranges(learned=True), _LAST, Slope(residual=False)),
        TrainingScheme("tensorflow", Ranges(average=ZeroDebiased), _LAST, norms="tensorflow"),
        TrainingScheme("oneflow", Ranges(average=Restarting), _LAST, Slope(masked=False), "oneflow"),
        TrainingScheme("pytorch", Ranges(average=Drifting), _LAST),
        *(TrainingScheme(name, dorefa=how) for name, how in DOREFAS.items()),
    )
}


def training_scheme(spec: str | TrainingScheme) -> TrainingScheme:
    """The scheme that `spec` means.

    Raises:
        HagoError: an unknown name.
    """
    if isinstance(spec, TrainingScheme):
        return spec
    if not isinstance(spec, str) or spec not in TRAINING_SCHEMES:
        raise HagoError(
            f"unknown training scheme {spec!r}; known: {', '.join(TRAINING_SCHEMES)}."
            + did_you_mean(str(spec), TRAINING_SCHEMES)
        )
    return TRAINING_SCHEMES[spec]
