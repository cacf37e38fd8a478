"""reshape: also flatten and view; at most one size is left open (-1, the batch)."""

import torch
from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Refusal, Sample
from hago.ops._shared import has_ref, plain


def _parse(call: Call) -> Parsed | None:
    size = plain(call["size"] if "size" in call.arguments else call["shape"])
    if has_ref(size):
        return None
    return Parsed((call["self"],), {"shape": size})


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return x.reshape(attrs["shape"])


RULE = OpRule(
    name="reshape",
    aten=(
        *("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"),
        *("aten.flatten.using_ints", "aten.reshape_as.default"),
    ),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(slots=("follow",)),
    moves_values=True,
    samples=(
        Sample(lambda x: x.reshape(-1, 12), ((2, 3, 4),)),
        Sample(lambda x: torch.flatten(x, 1), ((2, 3, 4, 5),)),
    ),
    refuses=(Refusal({"shape": [-1, 7]}, ((1, 3, 4),), "shape"),),
    aliases=("flatten", "batch_flatten", "nn.batch_flatten"),
)
