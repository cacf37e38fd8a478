"""Bounds of accumulators, and the effect of registers that overflow at partial sums.

`NodeBuilder` makes a `Bounds` for every node plan that it builds. A node whose bound fits its register is proved to be
free of overflow. Most registers overflow, if at all, at the end of the sum. Some chips saturate or wrap partial sums:
for these, where some input can make a partial sum overflow, the node plan has a `ProductPairs` or a
`ClampedAdditions`. Its method `lost` returns the difference to the exact sum, which the simulator and the integer model
add to their accumulators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import EXACT_FLOAT32, OVERFLOWS, Lost, Overflow, extremes, saturate_each
from hago.arithmetic.types import INT16, QParams
from hago.hardware import Accumulator
from hago.ops import Addends, IntegerForm, MatrixProduct, Operand, OpRule, TermsAt

#: The most parts of K into which a sum is split to be exact in float32; one that needs more runs in float64.
MOST_PARTS: Final = 16
#: The most addends that `ClampedAdditions.lost` has in memory at once.
ADDENDS_AT_ONCE: Final = 1 << 21


@dataclass(frozen=True)
class Bounds:
    """Computes the bounds of one integer node from its quantized weights; lives while the node's plan is built.

    Args:
        attrs: attributes in integer units.
        targets: qparams of the operands.
        consts: centered integers of constant operands, by slot.
        limits: the largest |c| of each operand.
        shapes: of the operands at batch 1.
    """

    form: IntegerForm
    attrs: Mapping[str, Any]
    targets: Sequence[QParams | None]
    consts: Mapping[int, Tensor]
    limits: Sequence[float]
    shapes: Sequence[tuple[int, ...]]

    @functools.cached_property
    def centered(self) -> float:
        """The largest |accumulator| of centered integers; 0 for a table, which has none."""
        if self.form.table:
            return 0.0
        operands = enumerate(zip(self.limits, self.shapes, strict=True))
        return self._bound([_operand(self.consts.get(slot), limit, shape) for slot, (limit, shape) in operands])

    def raw(self) -> float:
        """The largest |accumulator| on a chip that multiplies stored integers, zero points included, and corrects for
        the zero points at the end."""
        if self.form.table or all(t is None or not bool(t.zero_point.any()) for t in self.targets):
            return self.centered
        return self._bound([self._raw(s, t) for s, t in enumerate(self.targets)])

    def parts(self) -> int:
        """The least number of parts of K such that the sum of each is exact in float32; 1 where the whole sum is exact,
        or where no number up to MOST_PARTS is enough."""
        if self.centered < EXACT_FLOAT32 or self.form.split is None:
            return 1
        operands = [self.consts.get(s, torch.empty(shape, device="meta")) for s, shape in enumerate(self.shapes)]
        for parts in range(2, MOST_PARTS + 1):
            chunks = self.form.split(self.attrs, operands, parts)
            if len(chunks) > 1 and all(self._chunk(c) < EXACT_FLOAT32 for c in chunks):
                return parts
        return 1

    def _bound(self, operands: Sequence[Operand]) -> float:
        return float(self.form.bound(self.attrs, operands).max())

    def _raw(self, slot: int, target: QParams | None) -> Operand:
        values, limit = self.consts.get(slot), self.limits[slot]
        if target is not None and values is None:
            limit = float(max(abs(target.qmin), abs(target.qmax)))
        elif target is not None and values is not None and bool(target.zero_point.any()):
            values = values.to(torch.int64) + target.zero_point  # the small type that holds c need not hold q
        return _operand(values, limit, self.shapes[slot])

    def _chunk(self, chunk: Sequence[Tensor]) -> float:
        operands = zip(chunk, self.limits, strict=False)  # the bias is in the first chunk alone
        return self._bound([_operand(None if t.is_meta else t, limit, tuple(t.shape)) for t, limit in operands])


def _operand(values: Tensor | None, limit: float, shape: tuple[int, ...]) -> Operand:
    """An operand with the values of a constant, or with this largest magnitude."""
    largest = limit if values is None else max(map(abs, extremes(values)))
    return Operand(values, torch.tensor(largest, dtype=torch.float64), shape)


def largest_centered(qparams: QParams) -> float:
    """The largest |q - zero_point|."""
    low, high = (int(zero) for zero in torch.aminmax(qparams.zero_point))
    return float(max(qparams.qmax - low, high - qparams.qmin, qparams.qmin - low, high - qparams.qmax))


# ---------------------------------------------------------------- pairs of products in 16 bits
# x86 without VNNI multiplies unsigned by signed bytes and saturates the sum of each pair at int16 (`vpmaddubsw`); Arm
# without dot products adds two products of signed bytes in 16 bits that wrap (`smull`, `smlal`). A chip multiplies the
# stored integers, zero points included, and corrects for these in the wide register. So the accumulator is the exact
# sum of centered products plus the change of every pair by its overflow:
#     accumulator = sum(c_x * c_w) + sum over pairs (cut(p) - p),   p = q_x[k] * q_w[k] + q_x[k+1] * q_w[k+1]
# Only the pairs that some input can make exceed 16 bits are computed. `cut` is `OverflowBehaviour.of_pair`.


@dataclass(frozen=True, slots=True, eq=False)
class ProductPairs:
    """The pairs of products of one node that may exceed 16 bits. Made by `pairs_of`; kept in the NodePlan.

    Args:
        product: the op as a matrix product in the chip's order of K.
        attrs: attributes of the op.
        x, w: qparams of the two operands.
        largest: the largest |pair| that any input can cause.
        overflow: one with `of_pair` in `OVERFLOWS`.
    """

    product: MatrixProduct
    attrs: Mapping[str, Any]
    x: QParams
    w: QParams
    largest: float
    overflow: Overflow

    @property
    def over(self) -> float:
        """The ratio of the largest pair to the largest int16; more than 1."""
        return self.largest / INT16.max

    def lost(self, operands: Sequence[Tensor]) -> Lost:
        """The change of every accumulator by its pairs: `sum(cut(p) - p)`.

        Args:
            operands: centered integers in any carrier; the third, a bias, is not multiplied.
        """
        cut = OVERFLOWS[self.overflow].of_pair
        assert cut is not None
        a, b = self._stored_matrices(operands)
        if self.largest * a.shape[-1] < 2**31:  # then the sum of all losses fits int32
            a, b = a.to(torch.int32), b.to(torch.int32)
        largest_pairs = _largest_pairs(b, self.x)
        may_exceed = (largest_pairs > INT16.max).reshape(-1, *largest_pairs.shape[-2:]).any(0)
        total = torch.zeros(_product_shape(a, b), dtype=a.dtype)
        for pair in torch.nonzero(may_exceed.any(-1)).flatten().tolist():
            columns = torch.nonzero(may_exceed[pair]).flatten()
            k = 2 * pair
            p = a[..., k, None] * b[..., None, k, columns] + a[..., k + 1, None] * b[..., None, k + 1, columns]
            total.index_add_(-1, columns, cut(p) - p)
        amount = self.product.reshape_product(self.attrs, total.to(torch.int64), operands[0], operands[1])
        return Lost(amount, amount != 0, self.over)

    def _stored_matrices(self, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The stored integers of both operands as matrices (..., M, K) and (..., K, N), with an even K."""
        x, w = (c.to(torch.int64) for c in operands[:2])
        zeros = self.w.spread_over(w.shape).zero_point
        a, b = self.product.to_matrices(self.attrs, x, w, int(self.x.zero_point), zeros)
        if a.shape[-1] % 2:
            a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
        return a, b


def pairs_of(
    form: IntegerForm,
    attrs: Mapping[str, Any],
    targets: Sequence[QParams | None],
    weight: Tensor | None,
    shapes: Sequence[tuple[int, ...]],
    overflow: Overflow,
) -> ProductPairs | None:
    """The pairs of a node; None where its register adds no pairs, its op is no product of matrices, or no input can
    make a pair exceed 16 bits.

    Args:
        targets: qparams of the operands.
        weight: centered integers of the second operand where it is constant.
        shapes: shapes of the operands at batch 1.
        overflow: of the register.
    """
    product = form.product
    if product is None or OVERFLOWS[overflow].of_pair is None:
        return None
    x, w = targets[0], targets[1]
    assert x is not None and w is not None
    if weight is None:
        largest = 2.0 * max(abs(x.qmin), abs(x.qmax)) * max(abs(w.qmin), abs(w.qmax))
    else:
        zeros = torch.zeros((1, *shapes[0][1:]), dtype=torch.int64)
        _, b = ProductPairs(product, attrs, x, w, 0.0, overflow)._stored_matrices([zeros, weight])
        largest = float(_largest_pairs(b, x).max()) if b.numel() else 0.0
    return ProductPairs(product, attrs, x, w, largest, overflow) if largest > INT16.max else None


def _largest_pairs(b: Tensor, x: QParams) -> Tensor:
    """The largest |pair| that any stored x can cause, by pair and column of `b`: (..., K / 2, N)."""
    at_min, at_max = b * x.qmin, b * x.qmax
    ends = torch.maximum(at_min, at_max), torch.minimum(at_min, at_max)
    high, low = (e.reshape(*b.shape[:-2], b.shape[-2] // 2, 2, b.shape[-1]).sum(-2) for e in ends)
    # int16 holds -2**15 but not 2**15
    return torch.maximum(high, -low - 1)


def _product_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    both = a[..., :1, :1] + b[..., :1, :1]
    return (*both.shape[:-2], a.shape[-2], b.shape[-1])


# ---------------------------------------------------------------- saturation at every addition
# Many signal processors accumulate products in a register that clamps after each addition. The result depends on the
# order of the additions, which the hardware file states together with the position of the bias:
#     held = 0;  for each addend in order: held = saturate(held + addend)      (N15)
# Addends are products of centered integers, or centered integers where the op has no weight. An addend of 0 leaves the
# register unchanged, so that zeros from padding may be anywhere in the order. Only a few outputs are computed addend by
# addend: the sum of the magnitudes of all addends bounds every partial sum, and the register saturates only where a
# partial sum of the exact addends leaves it.


@dataclass(frozen=True, slots=True, eq=False)
class ClampedAdditions:
    """The additions of one node on a register that saturates at each of them, where a partial sum may leave it. Made by
    `additions_of`; kept in the NodePlan.

    Args:
        addends: the summands of the op.
        attrs: attributes of the op, in integer units.
        compute: the op on centered integers, without a register.
        register: saturates at every addition.
    """

    addends: Addends
    attrs: Mapping[str, Any]
    compute: Callable[..., Tensor]
    register: Accumulator

    def lost(self, operands: Sequence[Tensor]) -> Lost:
        """The change of every accumulator by saturation at every addition.

        Memory: chunks of outputs that have at most ADDENDS_AT_ONCE addends together.

        Args:
            operands: centered integers in any carrier.
        """
        dtype = self.register.dtype
        limit = min(dtype.max, -dtype.min)
        # sums of magnitudes never decrease, so float32 decides rightly: it is exact below 2**24, and a sum above stays
        # above
        exact = torch.float32 if limit < EXACT_FLOAT32 else torch.float64
        magnitudes = self.compute(self.attrs, *(c.to(exact).abs() for c in operands))
        result = Lost(torch.zeros(magnitudes.shape, dtype=torch.int64), torch.zeros(magnitudes.shape).bool(), 0.0)
        candidates = torch.nonzero(magnitudes > limit)
        if not len(candidates):
            return result
        carrier = torch.int32 if float(magnitudes.max()) < 2**30 else torch.int64
        addends_at, peak = self._in_order([c.to(carrier) for c in operands]), 0.0
        depth = addends_at(candidates[:1].unbind(1)).shape[1]
        step = max(1, ADDENDS_AT_ONCE // max(depth, 1))
        for start in range(0, len(candidates), step):
            index = candidates[start : start + step].unbind(1)
            addends = addends_at(index)
            partial = addends.cumsum(1, dtype=carrier)
            high, low = partial.amax(1), partial.amin(1)
            peak = max(peak, float(high.max()) / dtype.max, float(low.min()) / min(dtype.min, -1))
            clamped = (high > dtype.max) | (low < dtype.min)
            held, where = saturate_each(addends[clamped].T.contiguous(), dtype), tuple(i[clamped] for i in index)
            result.amount[where] = (held - partial[clamped, -1]).to(torch.int64)
            result.cut[where] = True
        return replace(result, peak=peak)

    def _in_order(self, operands: Sequence[Tensor]) -> TermsAt:
        """The addends of outputs, biases included, in the order of additions."""
        assert self.addends.terms is not None and self.register.order is not None
        terms_at = self.addends.terms(self.attrs, operands, self.register.order)
        if len(operands) < 3:
            return terms_at
        biases, axis = operands[2].flatten(), self.addends.bias_axis

        def addends_at(index: tuple[Tensor, ...]) -> Tensor:
            bias = biases[index[axis].remainder(len(biases))][:, None]  # a single bias is that of all channels
            terms = terms_at(index)
            return torch.cat([bias, terms] if self.register.bias == "first" else [terms, bias], 1)

        return addends_at


def additions_of(
    rule: OpRule, attrs: Mapping[str, Any], register: Accumulator, bound: float
) -> ClampedAdditions | None:
    """The additions of a node whose partial sums may leave the register.

    Args:
        rule: rule of the op, in the form that the hardware computes.
        attrs: attributes in integer units.
        bound: the largest sum of the magnitudes of all addends that any input can cause.

    Returns:
        None where no input can make a partial sum leave it, where the op has a single addition, whose result is clamped
        at the end, and where the register does not saturate at every addition.
    """
    addends = None if rule.integer is None else rule.integer.addends
    if not OVERFLOWS[register.overflow].at_every_addition or addends is None or addends.terms is None:
        return None
    if register.dtype.signed and bound <= register.dtype.max:
        return None
    return ClampedAdditions(addends, attrs, rule.compute_int, register)
