"""permute: the axes in another order; also transpose."""

from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Refusal, Sample
from hago.ops._shared import axis_of


def _parse(call: Call) -> Parsed | None:
    rank = len(call.shape_of("self"))
    if call.target == "aten.permute.default":
        return Parsed((call["self"],), {"axes": [int(d) % rank for d in call["dims"]]})
    axes = list(range(rank))
    if call.target == "aten.t.default":
        axes.reverse()
    else:
        a, b = axis_of(call, "dim0"), axis_of(call, "dim1")
        axes[a], axes[b] = axes[b], axes[a]
    return Parsed((call["self"],), {"axes": axes})


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return x.permute(attrs["axes"])


RULE = OpRule(
    name="permute",
    aten=("aten.permute.default", "aten.transpose.int", "aten.t.default"),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(slots=("follow",)),
    moves_values=True,
    samples=(
        Sample(lambda x: x.permute(0, 2, 3, 1), ((2, 3, 4, 5),)),
        Sample(lambda x: x.transpose(-1, 1), ((2, 3, 4, 5),)),
        Sample(lambda x: x.movedim(1, -1), ((2, 3, 4),)),
    ),
    refuses=(Refusal({"axes": [0, 1, 1]}, ((1, 3, 4),), "axes"),),
    aliases=("layout_transform", "transpose"),
)
