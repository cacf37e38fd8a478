"""div: by a number, which on integers only divides the scale; by a tensor, in float.

The attribute `plus`, a number that is added to the divisor, is set by `graph.passes.fold_guards`.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Ref, Refusal, Sample


def _parse(call: Call) -> Parsed | None:
    a, b = call["self"], call["other"]
    return Parsed((a, b)) if isinstance(b, Ref) else Parsed((a,), {"divisor": float(b)})


def _compute(attrs: Attrs, a: Tensor, b: Tensor | None = None) -> Tensor:
    if b is None:
        return torch.div(a, attrs["divisor"])
    return torch.div(a, b + attrs["plus"] if "plus" in attrs else b)


def _unchanged(attrs: Attrs, c: Tensor) -> Tensor:
    return c


def _scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
    return torch.div(scales[0], attrs["divisor"])


def _unsupported(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
    if len(shapes) > 1:
        return "div by a tensor is not an integer operation"
    return None if attrs["divisor"] > 0 else f"div by {attrs['divisor']} gives no positive scale"


RULE = OpRule(
    name="div",
    aten=("aten.div.Tensor", "aten.div.Scalar"),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(
        slots=("follow",),
        scale=_scale,
        compute=_unchanged,
        accepts_per_channel="all",
        unsupported=_unsupported,
        allows_early_clipping=False,  # the quotient's range is not the dividend's
    ),
    any_layout=True,
    samples=(
        Sample(lambda x: x / 3.0, ((2, 3, 4, 4),)),
        Sample(lambda x: x / -2, ((2, 5),)),
        Sample(operator.truediv, ((2, 3, 4, 4), (3, 1, 1)), consts=(1,), low=0.5),
    ),
    refuses=(Refusal({}, ((1, 3), (1, 4)), "shape"),),
    aliases=("divide",),
)
