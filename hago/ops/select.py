"""select: one entry of an axis, which is dropped; also one part of an unbind."""

from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Ref, Refusal, Sample
from hago.ops._shared import axis_of


def _parse(call: Call) -> Parsed | None:
    index = call.arguments.get("index", call.item)
    if isinstance(index, Ref):
        return None
    return Parsed((call["self"],), {"axis": axis_of(call), "index": index})


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return x.select(attrs["axis"], attrs["index"])


RULE = OpRule(
    name="select",
    aten=("aten.select.int", "aten.unbind.int"),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(slots=("follow",)),
    moves_values=True,
    samples=(
        Sample(lambda x: x.select(1, 2), ((2, 3, 4),)),
        Sample(lambda x: x[..., -1], ((2, 3, 4),)),
        Sample(lambda x: x.unbind(2)[0], ((2, 3, 4),)),
    ),
    refuses=(Refusal({"axis": 1, "index": 3}, ((1, 3, 4),), "index"),),
)
