"""pad: constant, reflect, replicate or circular; sizes as torch gives them, from the last axis on.

On integers, a constant pad is of 0 only. The form `constant` (TFLite's) rounds any constant to the input's integers.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Refusal, Sample
from hago.ops._shared import has_ref, plain
from hago.ops.forms.tflite import constant_pad


def _parse(call: Call) -> Parsed | None:
    sizes, value = plain(call["pad"]), call["value"]
    # sizes start at the last axis, so those past all other axes are the batch's
    batch = sizes[2 * (len(call.shape_of("self")) - 1) :]
    if has_ref([sizes, value]) or any(batch):
        return None
    attrs = {"pad": sizes, "mode": call.arguments.get("mode", "constant"), "value": float(value or 0)}
    return Parsed((call["self"],), attrs)


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    if attrs["mode"] == "constant":
        return F.pad(x, attrs["pad"], "constant", attrs["value"])
    return F.pad(x, attrs["pad"], attrs["mode"])


def _unsupported(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
    if attrs["mode"] != "constant" or attrs["value"] == 0:
        return None
    return f"pads with {attrs['value']}, which need not be among the input's integers"


RULE = OpRule(
    name="pad",
    aten=("aten.pad.default", "aten.constant_pad_nd.default"),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(slots=("follow",), unsupported=_unsupported),
    forms={"constant": constant_pad(_compute)},
    moves_values=True,
    samples=(
        Sample(lambda x: F.pad(x, (1, 2, 0, 3)), ((2, 3, 4, 5),)),
        Sample(lambda x: F.pad(x, (0, 0, 0, 0, 2, 2)), ((2, 3, 4, 5),)),
        Sample(lambda x: F.pad(x, (1, -1)), ((2, 5),)),
        Sample(lambda x: F.pad(x, (1, 2), value=-1.5), ((2, 5),)),
        Sample(lambda x: F.pad(x, (1, 2, 3, 1), "reflect"), ((2, 3, 4, 5),)),
        Sample(lambda x: F.pad(x, (1, 2, 3, 1), "circular"), ((2, 3, 4, 5),)),
        Sample(lambda x: F.pad(x, (2, 1), "replicate"), ((2, 3, 5),)),
    ),
    refuses=(
        Refusal({"pad": [1], "mode": "constant", "value": 0.0}, ((1, 3, 4),), "pad"),
        Refusal({"pad": [4, 4], "mode": "reflect", "value": 0.0}, ((1, 3, 4),), "pad"),
        Refusal({"pad": [1, 1], "mode": "mirror", "value": 0.0}, ((1, 3, 4),), "mode"),
    ),
    aliases=("nn.pad",),
)
