"""Warn of inputs on another scale than those of training, which a batch norm remembers.

A batch norm holds the variances that its channels had in training. Up to the first of a network, most networks are
linear, so inputs that are a hundred times larger give values there that are a hundred times larger. Right inputs differ
from those of training by less than FACTOR: images of one kind, of another data set, or a few of them.

Nothing is said where nothing is known: of networks without batch norms, or that were not trained, and where a norm has
few values, or few of its channels agree.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from hago.errors import warn
from hago.serialization.text_table import counted

#: Variances that differ from those of training by less than this factor are not judged.
FACTOR: Final = 10.0
#: The part of the channels that must agree.
AGREEING: Final = 0.9
#: Channels with less than this part of the largest variance are not in use.
LEAST_VARIANCE: Final = 1e-6
#: The fewest batches of training; the running variance of one batch more has a weight of 0.1 by default.
LEAST_BATCHES: Final = 50
#: The fewest values per channel, and samples, that are judged. A single sample may be blank.
LEAST_VALUES: Final = 32
LEAST_SAMPLES: Final = 8


class _Reached(Exception):
    """Ends a pass at the first batch norm."""


def warn_of_scale(model: nn.Module, args: Sequence[Any], title: str) -> None:
    """Warn if the inputs of a model have another scale than those of training.

    Args:
        model: in eval mode.
        args: samples from all of the data, as the model takes a batch of them.
        title: the name of the data in the message.
    """
    found = _first_norm(model, args)
    if found is None:
        return
    name, norm, x = found
    trained = norm.running_var.to(torch.float64)
    used = trained > LEAST_VARIANCE * trained.max()
    if len(x) < LEAST_SAMPLES or x[:, 0].numel() < LEAST_VALUES or not bool(used.any()) or _is_new(norm):
        return
    values = x.to(torch.float64).transpose(0, 1).flatten(1)
    ratios = values.var(1)[used] / trained[used]
    low, middle, high = (float(ratios.quantile(q)) for q in (1.0 - AGREEING, 0.5, AGREEING))
    if low > FACTOR or high < 1.0 / FACTOR:
        warn(
            f"{title} is hardly scaled as in training: at batch norm {name!r}, its values have {middle**0.5:.3g} times "
            f"the standard deviation that they had there (the median of {counted(len(ratios), 'channel')}); normalize "
            "the inputs as in training, those of a folder of images with --mean and --std"
        )


def _is_new(norm: Any) -> bool:
    """Whether the variances of a batch norm are still those that it began with, or mostly so."""
    batches = getattr(norm, "num_batches_tracked", None)  # 0 of networks that were converted
    return bool((norm.running_var == 1.0).all()) or (batches is not None and 0 < int(batches) < LEAST_BATCHES)


def _first_norm(model: nn.Module, args: Sequence[Any]) -> tuple[str, Any, Tensor] | None:
    """The first batch norm that a model calls, with its name and its input; None if it calls none."""
    found: list[tuple[str, Any, Tensor]] = []

    def reach(name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim > 1:
                found.append((name, module, inputs[0].detach()))
                raise _Reached

        return enter

    norms = [(name, m) for name, m in model.named_modules() if isinstance(getattr(m, "running_var", None), Tensor)]
    handles = [module.register_forward_pre_hook(reach(name)) for name, module in norms]
    try:
        with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=()):
            warnings.simplefilter("ignore")
            # the pass ends by an exception, or the model fails on the samples, which is reported elsewhere
            with contextlib.suppress(Exception):
                if norms:
                    model(*args)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
