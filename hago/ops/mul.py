"""mul: the elementwise product; the scale is the product of both."""

import operator

from torch import Tensor

from hago.ops._rule import ONE_ADDITION, Attrs, IntegerForm, OpRule, Refusal, Sample
from hago.ops._shared import binary, product_bound, product_scale
from hago.ops.forms.qlinear import qlinear_product
from hago.ops.forms.requantizing import dequantized
from hago.ops.forms.tflite import tflite_product
from hago.ops.forms.tpu_mlir import tpu_mlir_product


def _compute(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    return a * b


RULE = OpRule(
    name="mul",
    aten=("aten.mul.Tensor", "aten.mul.Scalar"),
    parse=binary,
    compute=_compute,
    integer=IntegerForm(slots=("own", "own"), scale=product_scale, bound=product_bound, addends=ONE_ADDITION),
    forms={
        "tflite": tflite_product(),
        "tpu_mlir": tpu_mlir_product(),
        "dequantize": dequantized(_compute),
        "qlinear": qlinear_product(),
    },
    any_layout=True,
    samples=(
        Sample(operator.mul, ((2, 3, 4, 4), (2, 3, 1, 1))),
        Sample(operator.mul, ((2, 3, 4, 4), (3, 1, 1)), consts=(1,)),
        Sample(lambda x: x * -0.5, ((2, 5),)),
        Sample(lambda x: x * x, ((2, 5),)),
    ),
    refuses=(Refusal({}, ((1, 3), (1, 4)), "shape"),),
    aliases=("multiply",),
)
