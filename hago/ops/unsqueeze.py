"""unsqueeze: a new axis of size 1."""

from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Refusal, Sample


def _parse(call: Call) -> Parsed | None:
    return Parsed((call["self"],), {"axis": call["dim"] % (len(call.shape_of("self")) + 1)})


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return x.unsqueeze(attrs["axis"])


RULE = OpRule(
    name="unsqueeze",
    aten=("aten.unsqueeze.default",),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(slots=("follow",)),
    moves_values=True,
    samples=(
        Sample(lambda x: x.unsqueeze(1), ((2, 3, 4),)),
        Sample(lambda x: x.unsqueeze(-1), ((2, 5),)),
    ),
    refuses=(Refusal({"axis": 4}, ((1, 3),), "axis"),),
    aliases=("expand_dims",),
)
