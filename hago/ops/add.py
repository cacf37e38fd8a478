"""add: two operands on one scale."""

import operator

from torch import Tensor

from hago.ops._rule import Attrs, IntegerForm, OpRule, Refusal, Sample
from hago.ops._rules import binary, sum_bound


def _compute(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    return a + b


RULE = OpRule(
    name="add",
    aten=("aten.add.Tensor", "aten.add.Scalar"),
    parse=binary,
    compute=_compute,
    integer=IntegerForm(slots=("common",), bound=sum_bound),
    samples=(
        Sample(operator.add, ((2, 3, 4, 4), (2, 3, 4, 4))),
        Sample(operator.add, ((2, 3, 4, 4), (3, 1, 1)), consts=(1,)),
        Sample(lambda x: x + 1.5, ((2, 5),)),
    ),
    refuses=(Refusal({}, ((1, 3), (1, 4)), "shape"),),
)
