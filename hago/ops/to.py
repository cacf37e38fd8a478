"""to: a cast to another dtype; float everywhere."""

import torch
from torch import Tensor

from hago.arithmetic.types import TORCH_DTYPES
from hago.ops._rule import Attrs, Call, OpRule, Parsed, Refusal, Sample


def _parse(call: Call) -> Parsed | None:
    if call["dtype"] is None or any(call.arguments.get(a) is not None for a in ("layout", "device")):
        return None
    return Parsed((call["self"],), {"dtype": str(call["dtype"]).removeprefix("torch.")})


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    return x.to(TORCH_DTYPES[attrs["dtype"]])


RULE = OpRule(
    name="to",
    aten=("aten._to_copy.default", "aten.to.dtype"),
    parse=_parse,
    compute=_compute,
    samples=(
        Sample(lambda x: x.to(torch.float64), ((2, 3),)),
        Sample(lambda x: x.half(), ((2, 3),)),
        Sample(lambda i: i.float(), ((2, 3),), high=9, indices=(0,)),
    ),
    refuses=(Refusal({"dtype": "float31"}, ((1, 3),), "dtype"),),
    aliases=("cast",),
)
