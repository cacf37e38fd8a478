"""sub: the difference of two operands, in the same forms as add."""

import operator
from dataclasses import replace

from torch import Tensor

from hago.ops._rule import ONE_ADDITION, Attrs, Call, IntegerForm, OpRule, Parsed, Refusal, Sample
from hago.ops._shared import binary, sum_bound
from hago.ops.forms.requantizing import dequantized
from hago.ops.forms.rescaled import rescaled_sum
from hago.ops.forms.tflite import tflite_sum
from hago.ops.forms.tpu_mlir import tpu_mlir_sum

_COMMON_SCALE = IntegerForm(slots=("common",), bound=sum_bound, addends=ONE_ADDITION)


def _parse(call: Call) -> Parsed | None:
    parsed = binary(call)
    if parsed is None or call.target != "aten.rsub.Scalar":
        return parsed
    return replace(parsed, inputs=parsed.inputs[::-1])  # rsub takes its first operand off its second


def _compute(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    return a - b


RULE = OpRule(
    name="sub",
    aten=("aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Scalar"),
    parse=_parse,
    compute=_compute,
    integer=_COMMON_SCALE,
    forms={
        "common_scale": _COMMON_SCALE,
        "rescaled": rescaled_sum(operator.sub),
        "tflite": tflite_sum((1, -1)),
        "tpu_mlir": tpu_mlir_sum((1, -1)),
        "dequantize": dequantized(_compute),
    },
    any_layout=True,
    samples=(
        Sample(operator.sub, ((2, 3, 4, 4), (2, 3, 4, 4))),
        Sample(operator.sub, ((2, 3, 4, 4), (3, 1, 1)), consts=(1,)),
        Sample(lambda x: x - 0.5, ((2, 5),)),
        Sample(lambda x: 1.5 - x, ((2, 5),)),
    ),
    refuses=(Refusal({}, ((1, 3), (1, 4)), "shape"),),
    aliases=("subtract",),
)
