"""expand: axes of size 1 repeated to a shape; -1 keeps a size."""

from torch import Tensor

from hago.ops._rule import Attrs, IntegerForm, OpRule, Refusal, Sample
from hago.ops._shared import arguments


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return x.expand(attrs["size"])


RULE = OpRule(
    name="expand",
    aten=("aten.expand.default", "aten.expand_as.default"),
    parse=arguments(("self",), ("size",)),
    compute=_compute,
    integer=IntegerForm(slots=("follow",)),
    moves_values=True,
    samples=(
        Sample(lambda x: x.expand(-1, 4, -1, 3), ((2, 1, 5, 3),)),
        Sample(lambda x: x.expand(-1, 3), ((2, 1),)),
    ),
    refuses=(Refusal({"size": [-1, 4]}, ((1, 3),), "size"),),
    aliases=("broadcast_to",),
)
