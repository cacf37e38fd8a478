"""squeeze: axes of size 1 dropped; never the batch."""

from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Refusal, Sample
from hago.ops._shared import axes_of


def _parse(call: Call) -> Parsed | None:
    shape = call.shape_of("self")
    every = call.target == "aten.squeeze.default"  # where export keeps an open batch
    axes = [a for a in (range(1, len(shape)) if every else axes_of(call)) if shape[a] == 1]
    left = tuple(s for a, s in enumerate(shape) if a not in axes)
    return None if 0 in axes or left != call.shape else Parsed((call["self"],), {"axes": axes})


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return x.squeeze(tuple(attrs["axes"]))


RULE = OpRule(
    name="squeeze",
    aten=("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(slots=("follow",)),
    moves_values=True,
    samples=(
        Sample(lambda x: x.squeeze(-1), ((2, 3, 4, 1),)),
        Sample(lambda x: x.squeeze((2, 3)), ((2, 3, 1, 1),)),
        Sample(lambda x: x.squeeze(), ((2, 3, 1, 1),)),
        Sample(lambda x: x.squeeze(1), ((2, 3, 4),)),
    ),
    refuses=(Refusal({"axes": [4]}, ((1, 3, 1),), "axes"),),
)
