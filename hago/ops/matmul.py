"""matmul: `x @ w`, batched or not, and `x @ w + b`; either operand may be constant."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hago.arithmetic.numerics import Order
from hago.ops._rule import (
    Addends,
    Attrs,
    Call,
    IntegerForm,
    MatrixProduct,
    Operand,
    OpRule,
    Parsed,
    Refusal,
    Sample,
    TermsAt,
    Weight,
)
from hago.ops._shared import bias_bound, product_scale, split_k


def _parse(call: Call) -> Parsed | None:
    if call.target == "aten.addmm.default":
        if call["beta"] != 1 or call["alpha"] != 1 or len(call.shape_of("self")) != 1:
            return None
        return Parsed((call["mat1"], call["mat2"], call["self"]))
    second = "other" if "other" in call.arguments else "mat2"
    if min(len(call.shape_of("self")), len(call.shape_of(second))) < 2:
        return None  # the last axis of a vector is summed over: no scale per column there
    return Parsed((call["self"], call[second]))


def _compute(attrs: Attrs, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return torch.matmul(x, w) if b is None else torch.addmm(b, x, w)


def _bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    x, w = operands[0], operands[1]
    if w.values is not None:
        bound = w.values.to(torch.float64).abs().sum(-2, keepdim=True) * x.magnitude.max()
    elif x.values is not None:
        bound = x.values.to(torch.float64).abs().sum(-1, keepdim=True) * w.magnitude.max()
    else:
        bound = x.shape[-1] * x.magnitude.max() * w.magnitude.max()
    return bound if len(operands) == 2 else bound + bias_bound(operands[2])


def _to_matrices(attrs: Attrs, x: Tensor, w: Tensor, x_zero: int, w_zero: Tensor) -> tuple[Tensor, Tensor]:
    return x + x_zero, w + w_zero


def _reshape_product(attrs: Attrs, product: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return product


def _terms(attrs: Attrs, operands: Sequence[Tensor], order: Order) -> TermsAt:
    x, w = operands[:2]
    matrices = (x[..., 0, 0] + w[..., 0, 0]).shape
    columns = w.transpose(-1, -2).contiguous()
    rows, columns = x.expand(*matrices, *x.shape[-2:]), columns.expand(*matrices, *columns.shape[-2:])
    return lambda index: rows[index[:-1]] * columns[(*index[:-2], index[-1])]


def _macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return math.prod(out) * shapes[0][-1]


RULE = OpRule(
    name="matmul",
    aten=("aten.matmul.default", "aten.bmm.default", "aten.mm.default", "aten.addmm.default"),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(
        slots=("own", "own", "bias"),
        scale=product_scale,
        bound=_bound,
        split=split_k(-1, -2),
        starts_region=True,
        weight=Weight(slot=1, axis=-1),
        product=MatrixProduct(_to_matrices, _reshape_product),
        addends=Addends(_terms, bias_axis=-1),
    ),
    macs=_macs,
    samples=(
        Sample(torch.matmul, ((2, 3, 4, 5), (2, 3, 5, 6))),
        Sample(torch.bmm, ((2, 3, 4), (2, 4, 5))),
        Sample(torch.matmul, ((2, 4, 5), (5, 3)), consts=(1,)),
        Sample(torch.matmul, ((4, 5), (2, 5, 3)), consts=(0,)),
        Sample(torch.mm, ((2, 5), (5, 3)), consts=(1,)),
        Sample(lambda x, w, b: torch.addmm(b, x, w), ((2, 5), (5, 3), (3,)), consts=(1, 2)),
    ),
    refuses=(Refusal({}, ((1, 3, 4), (1, 5, 6)), "shape"),),
    aliases=("nn.batch_matmul", "batch_matmul", "bmm"),
)
