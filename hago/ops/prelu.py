"""prelu: `x` where positive, else `slope * x`; on integers as a table with a single slope, and in forms with any."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, IntegerForm, OpRule, Refusal, Sample
from hago.ops._shared import arguments
from hago.ops.forms.tflite import tflite_prelu
from hago.ops.forms.tpu_mlir import tpu_mlir_prelu


def _compute(attrs: Attrs, x: Tensor, slope: Tensor) -> Tensor:
    return F.prelu(x, slope)


def _unsupported(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
    if math.prod(shapes[1]) == 1:
        return None
    return f"prelu with {math.prod(shapes[1])} slopes is no single table"


RULE = OpRule(
    name="prelu",
    aten=("aten.prelu.default",),
    parse=arguments(("self", "weight")),
    compute=_compute,
    integer=IntegerForm(slots=("own", "plain"), table=True, unsupported=_unsupported),
    forms={"tflite": tflite_prelu(), "tpu_mlir": tpu_mlir_prelu()},
    samples=(
        Sample(F.prelu, ((2, 3, 4, 4), (1,)), consts=(1,)),
        Sample(F.prelu, ((2, 3, 4, 4), (3,)), consts=(1,)),
    ),
    refuses=(Refusal({}, ((1, 3, 4), (2,)), "shape"),),
    aliases=("nn.prelu",),
)
