"""Bounds: the largest accumulator that any input can cause, over the actual quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import EXACT_FLOAT32, Lost, Overflow, extremes, saturate, saturate_each, wrap
from hago.arithmetic.types import INT16, QParams
from hago.graph.graph import Graph, Node
from hago.hardware.hardware import Accumulator
from hago.ops._rule import Addends, IntegerForm, MatrixProduct, Operand, OpRule, TermsAt

#: Into how many partial sums a convolution is split at most; beyond, it runs in float64.
MOST_PARTS: Final = 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one integer node.

    Args:
        attrs: in integer units.
        targets: the qparams that operands arrive in.
        consts: centered integers of constant operands, by slot.
        limits: the largest |c| of each operand.
    """

    graph: Graph
    node: Node
    form: IntegerForm
    attrs: Mapping[str, Any]
    targets: Sequence[QParams | None]
    consts: Mapping[int, Tensor]
    limits: Sequence[float]

    def centered(self) -> float:
        """The largest |accumulator| of centered integers; 0 for a table, which has none."""
        if self.form.table:
            return 0.0
        return self._bound([self._operand(s, self.consts.get(s)) for s in range(len(self.targets))])

    def raw(self) -> float:
        """The same with zero points multiplied in, as a chip does that corrects for them at the end."""
        if self.form.table or all(t is None or not bool(t.zero_point.any()) for t in self.targets):
            return self.centered()
        return self._bound([self._raw(s, t) for s, t in enumerate(self.targets)])

    def parts(self) -> int:
        """The fewest parts of K whose sums all stay exact in float32; 1 where the whole does or none do."""
        if self.centered() < EXACT_FLOAT32 or self.form.split is None:
            return 1
        shapes = [self.graph[s].shape or () for s in self.node.inputs]
        whole = [self.consts.get(s, torch.empty(shape, device="meta")) for s, shape in enumerate(shapes)]
        for parts in range(2, MOST_PARTS + 1):
            chunks = self.form.split(self.attrs, whole, parts)
            if len(chunks) > 1 and all(self._chunk(c) < EXACT_FLOAT32 for c in chunks):
                return parts
        return 1

    def _bound(self, operands: Sequence[Operand]) -> float:
        return float(self.form.bound(self.attrs, operands).max())

    def _operand(self, slot: int, values: Tensor | None) -> Operand:
        largest = self.limits[slot]
        if values is not None:
            largest = max(map(abs, extremes(values)))
        shape = self.graph[self.node.inputs[slot]].shape or ()
        return Operand(values, torch.tensor(largest, dtype=torch.float64), shape)

    def _raw(self, slot: int, target: QParams | None) -> Operand:
        if target is None:
            return self._operand(slot, None)
        if slot in self.consts:
            c, zero = self.consts[slot], target.zero_point
            # in int64, since the small type that holds c need not hold q
            return self._operand(slot, c.to(torch.int64) + zero if bool(zero.any()) else c)
        largest = torch.tensor(float(max(abs(target.qmin), abs(target.qmax))), dtype=torch.float64)
        return replace(self._operand(slot, None), magnitude=largest)

    def _chunk(self, chunk: Sequence[Tensor]) -> float:
        operands = [
            replace(self._operand(slot, None if t.is_meta else t), shape=tuple(t.shape)) for slot, t in enumerate(chunk)
        ]
        return self._bound(operands)


def largest_centered(qparams: QParams) -> float:
    """The largest |q - zero_point|."""
    low = float((qparams.qmin - qparams.zero_point).abs().max())
    return max(low, float((qparams.qmax - qparams.zero_point).abs().max()))


# ---------------------------------------------------------------- pairs
# Pairs: chips that add two neighbouring products in 16 bits before they go to the wide register.
# x86 without VNNI multiplies unsigned by signed bytes and saturates the sum of each pair at int16 (`vpmaddubsw`); Arm
# without dot products adds two products of signed bytes in 16 bits that wrap (`smull`, `smlal`). A chip multiplies
# what is stored, zero points included, and corrects for them afterwards in the wide register. So the exact sum of
# centered integers stays as it is, and what pairs lose is added to it:
#     held = sum(c_x * c_w) + sum over pairs (cut(p) - p),   p = q_x[k] * q_w[k] + q_x[k+1] * q_w[k+1]
# Only pairs that some input can push past 16 bits are looked at.

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
        amount = self.product.reshape_product(self.attrs, total.to(torch.int64), operands[0], operands[1])
        return Lost(amount, amount != 0, self.over)

    def _stored(self, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x, w = (c.to(torch.int64) for c in operands[:2])
        a, b = self.product.to_matrices(self.attrs, x, w, int(self.x.zero_point), int(self.w.zero_point.flatten()[0]))
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


# ---------------------------------------------------------------- additions
# Additions: registers that saturate at every addition, in the order in which the chip adds.
# Many signal processors accumulate products in a register that clamps after each of them. The result depends on the
# order of the additions, which the hardware file states together with the position of the bias:
#     held = 0;  for each addend in order: held = saturate(held + addend)      (N15)
# Addends are products of centered integers, or centered integers where the op has no weight. An addend of 0 leaves
# the register unchanged, so zeros from padding may stand anywhere in the order. Only few outputs are computed step by
# step: the sum of the magnitudes of all addends bounds every partial sum, and an output is clamped exactly where a
# partial sum of its exact addends leaves the register.

#: Addends that are held at once.
ENTRIES: Final = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Additions:
    """The sums of one node whose partial sums may leave the register.

    Args:
        addends: what the op adds up.
        attrs: of the op, in integer units.
        compute: the op on centered integers, without a register.
        register: saturates at every addition.
    """

    addends: Addends
    attrs: Mapping[str, Any]
    compute: Callable[..., Tensor]
    register: Accumulator

    def lost(self, operands: Sequence[Tensor]) -> Lost:
        """What saturation at every addition changes in every accumulator.

        Memory: chunks of outputs that have at most ENTRIES addends together.

        Args:
            operands: centered integers in any carrier.
        """
        dtype = self.register.dtype
        limit = min(dtype.max, -dtype.min)
        # sums of magnitudes never shrink, so that float32 holds those below 2**24 exactly, and others stay above
        exact = torch.float32 if limit < EXACT_FLOAT32 else torch.float64
        magnitudes = self.compute(self.attrs, *(c.to(exact).abs() for c in operands))
        found = Lost(torch.zeros(magnitudes.shape, dtype=torch.int64), torch.zeros(magnitudes.shape).bool(), 0.0)
        candidates = torch.nonzero(magnitudes > limit)
        if not len(candidates):
            return found
        carrier = torch.int32 if float(magnitudes.max()) < 2**30 else torch.int64
        addends_at, peak = self._in_order([c.to(carrier) for c in operands]), 0.0
        depth = addends_at(candidates[:1].unbind(1)).shape[1]
        step = max(1, ENTRIES // max(depth, 1))
        for start in range(0, len(candidates), step):
            index = candidates[start : start + step].unbind(1)
            addends = addends_at(index)
            partial = addends.cumsum(1, dtype=carrier)
            high, low = partial.amax(1), partial.amin(1)
            peak = max(peak, float(high.max()) / dtype.max, float(low.min()) / min(dtype.min, -1))
            clamped = (high > dtype.max) | (low < dtype.min)
            held, place = saturate_each(addends[clamped].T.contiguous(), dtype), tuple(i[clamped] for i in index)
            found.amount[place] = (held - partial[clamped, -1]).to(torch.int64)
            found.cut[place] = True
        return replace(found, peak=peak)

    def _in_order(self, operands: Sequence[Tensor]) -> TermsAt:
        """The addends of outputs, biases included, in the order of additions."""
        assert self.addends.terms is not None and self.register.order is not None
        terms_at = self.addends.terms(self.attrs, operands, self.register.order)
        if len(operands) < 3:
            return terms_at
        biases, axis = operands[2].flatten(), self.addends.bias_axis

        def addends_at(index: tuple[Tensor, ...]) -> Tensor:
            bias = biases[index[axis].remainder(len(biases))][:, None]  # one entry may stand for all
            terms = terms_at(index)
            return torch.cat([bias, terms] if self.register.bias == "first" else [terms, bias], 1)

        return addends_at


def additions_of(rule: OpRule, attrs: Mapping[str, Any], register: Accumulator, bound: float) -> Additions | None:
    """The sums of a node whose partial sums may leave the register.

    Args:
        rule: of the op, in the form that the hardware computes.
        attrs: in integer units.
        bound: the largest sum of the magnitudes of all addends that any input can cause.

    Returns:
        None where no input can make one leave it, where the op has a single addition, which is clamped as a whole, and
        where the register does something else.
    """
    addends = None if rule.integer is None else rule.integer.addends
    if register.overflow != "saturate_each" or addends is None or addends.terms is None:
        return None
    if register.dtype.signed and bound <= register.dtype.max:
        return None
    return Additions(addends, attrs, rule.compute_int, register)
