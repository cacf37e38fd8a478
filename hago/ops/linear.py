"""linear: `x @ w.T + b` along the last axis."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.numerics import Order
from hago.ops._rule import (
    Addends,
    Attrs,
    IntegerForm,
    MatrixProduct,
    Operand,
    OpRule,
    Refusal,
    Sample,
    TermsAt,
    Weight,
    WindowsOf,
)
from hago.ops._shared import arguments, mac_bound, split_k

_WEIGHT = Weight(slot=1, axis=0, sums_channels=True)


def _compute(attrs: Attrs, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b)


def _scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
    w = scales[1]
    return scales[0] * (w.flatten() if w.numel() > 1 else w)


def _bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    return mac_bound(operands, _WEIGHT, operands[1].shape[1])


def _to_matrices(attrs: Attrs, x: Tensor, w: Tensor, x_zero: int, w_zero: Tensor) -> tuple[Tensor, Tensor]:
    return (x + x_zero).reshape(-1, x.shape[-1]), (w + w_zero).T


def _reshape_product(attrs: Attrs, product: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return product.reshape(*x.shape[:-1], -1)


def _windows_at(attrs: Attrs, shape: Sequence[int], w: Tensor, index: tuple[Tensor, ...]) -> WindowsOf:
    return lambda x: x[index].unsqueeze(0)


def _terms(attrs: Attrs, operands: Sequence[Tensor], order: Order) -> TermsAt:
    x, w = operands[:2]
    return lambda index: x[index[:-1]] * w[index[-1]]


def _macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return math.prod(out) * shapes[1][1]


RULE = OpRule(
    name="linear",
    aten=("aten.linear.default",),
    parse=arguments(("input", "weight", "bias")),
    compute=_compute,
    integer=IntegerForm(
        slots=("own", "own", "bias"),
        scale=_scale,
        bound=_bound,
        split=split_k(-1, 1),
        starts_region=True,
        weight=_WEIGHT,
        product=MatrixProduct(_to_matrices, _reshape_product),
        addends=Addends(_terms, bias_axis=-1, windows_at=_windows_at),
    ),
    macs=_macs,
    samples=(
        Sample(F.linear, ((2, 5), (4, 5), (4,)), consts=(1, 2)),
        Sample(F.linear, ((2, 3, 5), (4, 5)), consts=(1,)),
    ),
    refuses=(Refusal({}, ((1, 5), (4, 6)), "shape"),),
    aliases=("nn.dense", "dense"),
)
