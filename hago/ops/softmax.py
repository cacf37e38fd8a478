"""softmax: `exp(x)` normalised along an axis; float, unless a hardware file names the form `dequantize`.

The attribute `scale`, which `graph.passes.open_attention` sets, multiplies x first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, Call, OpRule, Parsed, Sample
from hago.ops.forms.requantizing import dequantized


def _parse(call: Call) -> Parsed | None:
    if call.arguments.get("dtype") not in (None, torch.float32) or call.arguments.get("half_to_float"):
        return None
    return Parsed((call["self"],), {"axis": call["dim"]})


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    x.size(attrs["axis"])  # refuses a bad axis, which F.softmax accepts on the meta tensors of shape inference
    return F.softmax(x * attrs["scale"] if "scale" in attrs else x, attrs["axis"])


RULE = OpRule(
    name="softmax",
    aten=("aten.softmax.int", "aten._softmax.default"),
    parse=_parse,
    compute=_compute,
    forms={"dequantize": dequantized(_compute)},
    samples=(
        Sample(lambda x: F.softmax(x, -1), ((2, 3, 4),)),
        Sample(lambda x: F.softmax(x, 1), ((2, 3, 4),)),
    ),
    aliases=("nn.softmax",),
)
