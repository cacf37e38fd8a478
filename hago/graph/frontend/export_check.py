"""Whether a Graph computes what its model does, on other samples than torch.export saw.

torch.export follows a model on two samples. What `forward` decides by the number of samples, or takes from a part of
the batch, is then fixed as it is for two, and what is random in eval mode is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hago.errors import DataError, shortened_to, warn
from hago.graph.execute import autocast_off, check_inputs, run_real
from hago.graph.graph import Graph
from hago.ops import OPS, Ops

#: The most samples that are compared. Of fewer than LEAST_SAMPLES, copies are added, up to COPIES.
SAMPLES: Final = 8
LEAST_SAMPLES: Final = 3
COPIES: Final = 4
#: Outputs that differ by more are refused, and such that differ by less than ALIKE are alike; both in dB of the model's
#: outputs over the difference. Folded batch norms and other orders of sums make differences below -80 dB.
REFUSED: Final = 30.0
ALIKE: Final = 40.0

_WHY: Final = (
    "torch.export follows a model on 2 samples, so what a sample gives must not depend on the size of the batch or on "
    "a part of it (x.chunk(2), x[:3], loops over samples, len(x) in place of x.shape[0]), and nothing may be random in "
    "eval mode (functional.dropout without training=self.training)"
)


def check_export(model: nn.Module, graph: Graph, args: Sequence[Any], title: str, ops: Ops = OPS) -> None:
    """Compare a Graph with its model on one batch; nothing is compared where the model fails on these samples.

    Args:
        args: the batch, nested as the model was exported with.
        title: the name of the data in messages.

    Raises:
        DataError: the graph fails on these samples, or its outputs are others. Small differences are a warning.
    """
    size = len(check_inputs(graph, pytree.tree_leaves(args))[0])
    wanted = min(size, SAMPLES) if size >= LEAST_SAMPLES else COPIES
    chosen = _samples(args, wanted)
    try:
        with torch.no_grad(), autocast_off(), torch.random.fork_rng(devices=()):
            expected = pytree.tree_leaves(model(*chosen))
    except Exception:  # whatever the user's code raises on as many samples
        return
    where = f"{title}: on {wanted} samples"
    found = _run(graph, chosen, ops, where)
    _run(graph, _samples(args, 1), ops, f"{title}: on 1 sample")
    expected, found = ([x for x in of if isinstance(x, Tensor)] for of in (expected, found))
    if len(expected) != len(found):
        return
    for index, (real, exported) in enumerate(zip(expected, found, strict=True)):
        if real.shape != exported.shape:
            shapes = f"shape {tuple(real.shape)}, and {tuple(exported.shape)} in its export"
            raise DataError(f"{where}, output {index} of the model has {shapes}; {_WHY}")
        alike = _decibels(real, exported)
        if alike < REFUSED:
            raise DataError(f"{where}, output {index} of the model and of its export differ ({alike:.1f} dB); {_WHY}")
        if alike < ALIKE:
            warn(f"{where}, output {index} of the model and of its export differ a little ({alike:.1f} dB); {_WHY}")


def _samples(args: Sequence[Any], count: int) -> tuple[Any, ...]:
    """The first samples of a batch, repeated where it has fewer."""

    def first(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        return torch.cat([x] * -(-count // len(x)))[:count] if len(x) < count else x[:count]

    chosen: tuple[Any, ...] = pytree.tree_map(first, tuple(args))
    return chosen


def _run(graph: Graph, args: Sequence[Any], ops: Ops, where: str) -> list[Any]:
    inputs = check_inputs(graph, pytree.tree_leaves(args))
    try:
        return run_real(graph, inputs, ops=ops)
    except Exception as error:  # whatever torch raises
        said = shortened_to(" ".join(str(error).split()), 160)
        raise DataError(f"{where}, the export of the model fails: {said}; {_WHY}") from None


def _decibels(real: Tensor, exported: Tensor) -> float:
    """The power of real outputs over that of their difference, in dB, where the model's are finite; infinite for others
    than real numbers."""
    if not (real.is_floating_point() and exported.is_floating_point()):
        return math.inf
    real, exported = real.to(torch.float64), exported.to(torch.float64)
    known = real.isfinite()
    signal, noise = float(real[known].square().sum()), float((real - exported)[known].square().sum())
    if not math.isfinite(noise):
        return -math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 and noise > 0.0 else math.inf
