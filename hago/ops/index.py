"""index: entries of one axis picked by a tensor of indices; also index_select."""

from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Ref, Refusal, Sample
from hago.ops._shared import as_index, axis_of


def _parse(call: Call) -> Parsed | None:
    if call.target == "aten.index_select.default":
        if len(call.shape_of("index")) != 1:
            return None  # a scalar index would keep its axis there, and drop it here
        return Parsed((call["self"], call["index"]), {"axis": axis_of(call)})
    picked = [(axis, index) for axis, index in enumerate(call["indices"]) if index is not None]
    if len(picked) != 1 or not isinstance(picked[0][1], Ref):
        return None
    return Parsed((call["self"], picked[0][1]), {"axis": picked[0][0]})


def _compute(attrs: Attrs, x: Tensor, index: Tensor) -> Tensor:
    return x[(slice(None),) * attrs["axis"] + (as_index(index),)]


RULE = OpRule(
    name="index",
    aten=("aten.index.Tensor", "aten.index_select.default"),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(slots=("follow", "plain")),
    moves_values=True,
    samples=(
        Sample(lambda x, i: x.index_select(1, i), ((2, 4, 5), (3,)), consts=(1,), high=4, indices=(1,)),
        Sample(lambda x, i: x[..., i], ((2, 3, 4), (2, 2)), consts=(1,), high=4, indices=(1,)),
    ),
    refuses=(Refusal({"axis": 3}, ((1, 3, 4), (2,)), "axis"),),
    aliases=("index_select", "take"),
)
