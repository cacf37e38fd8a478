"""Pairs: chips that add two neighbouring products in 16 bits before they go to the wide register.

x86 without VNNI multiplies unsigned by signed bytes and saturates the sum of each pair at int16
(`vpmaddubsw`); Arm without dot products adds two products of signed bytes in 16 bits that wrap (`smull`,
`smlal`). A chip multiplies what is stored, zero points included, and corrects for them afterwards in the
wide register. So the exact sum of centered integers stays as it is, and what pairs lose is added to it:

    held = sum(c_x * c_w) + sum over pairs (cut(p) - p),   p = q_x[k] * q_w[k] + q_x[k+1] * q_w[k+1]

Only pairs that some input can push past 16 bits are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.numerics import Lost, Overflow, saturate, wrap
from hago.ops._integer import MatrixProduct
from hago.types import INT16, QParams

#: What pairs do past 16 bits.
CUTS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "saturate_pairs": lambda p: saturate(p, INT16),
    "wrap_pairs": lambda p: wrap(p, INT16),
}


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of one node that 16 bits may not hold.

    Args:
        product: how the op is a matrix product in the chip's order of K.
        attrs: of the op.
        x, w: the qparams that the two operands arrive in.
        largest: the largest |pair| that any input can cause.
        overflow: `saturate_pairs` or `wrap_pairs`.
    """

    product: MatrixProduct
    attrs: Mapping[str, Any]
    x: QParams
    w: QParams
    largest: float
    overflow: Overflow

    @property
    def over(self) -> float:
        """The largest pair over what 16 bits hold; more than 1."""
        return self.largest / INT16.max

    def lost(self, operands: Sequence[Tensor]) -> Lost:
        """What the pairs lose of every accumulator: `sum(cut(p) - p)`.

        Args:
            operands: centered integers in any carrier; the third, a bias, is not multiplied.
        """
        cut = CUTS[self.overflow]
        a, b = self._stored(operands)
        if self.largest * a.shape[-1] < 2**31:  # whatever is lost in all
            a, b = a.to(torch.int32), b.to(torch.int32)
        reach = _reach(b, self.x)
        risky = (reach > INT16.max).reshape(-1, *reach.shape[-2:]).any(0)
        total = torch.zeros(_product_shape(a, b), dtype=a.dtype)
        for pair in torch.nonzero(risky.any(-1)).flatten().tolist():
            columns = torch.nonzero(risky[pair]).flatten()
            k = 2 * pair
            p = a[..., k, None] * b[..., None, k, columns] + a[..., k + 1, None] * b[..., None, k + 1, columns]
            total.index_add_(-1, columns, cut(p) - p)
        amount = self.product.restored(self.attrs, total.to(torch.int64), operands[0], operands[1])
        return Lost(amount, amount != 0, self.over)

    def _stored(self, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x, w = (c.to(torch.int64) for c in operands[:2])
        a, b = self.product.rows(self.attrs, x, w, int(self.x.zero_point), int(self.w.zero_point.flatten()[0]))
        if a.shape[-1] % 2:
            a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
        return a, b


def pairs_of(
    product: MatrixProduct,
    attrs: Mapping[str, Any],
    targets: Sequence[QParams | None],
    weight: Tensor | None,
    shapes: Sequence[tuple[int, ...]],
    overflow: Overflow,
) -> Pairs | None:
    """The pairs of a node, or None where no input can push one past 16 bits.

    Args:
        targets: the qparams that operands arrive in.
        weight: centered integers of the second operand where it is constant.
        shapes: of both operands, at batch 1.
    """
    x, w = targets[0], targets[1]
    assert x is not None and w is not None
    if weight is None:
        largest = 2.0 * max(abs(x.qmin), abs(x.qmax)) * max(abs(w.qmin), abs(w.qmax))
    else:
        found = Pairs(product, attrs, x, w, 0.0, overflow)
        blank = torch.zeros((1, *shapes[0][1:]), dtype=torch.int64)
        _, b = found._stored([blank, weight])
        largest = float(_reach(b, x).max()) if b.numel() else 0.0
    return Pairs(product, attrs, x, w, largest, overflow) if largest > INT16.max else None


def _reach(b: Tensor, x: QParams) -> Tensor:
    """The largest |pair| by pair and column, over all stored x: (..., K / 2, N)."""
    one, other = b * x.qmin, b * x.qmax
    ends = torch.maximum(one, other), torch.minimum(one, other)
    high, low = (e.reshape(*b.shape[:-2], -1, 2, b.shape[-1]).sum(-2) for e in ends)
    # -2**15 fits where 2**15 does not
    return torch.maximum(high, -low - 1)


def _product_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    both = a[..., :1, :1] + b[..., :1, :1]
    return (*both.shape[:-2], a.shape[-2], b.shape[-1])
