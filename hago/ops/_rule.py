"""What an operator is on integers: how scales travel through it, what it does to centered integers, and how large
they can get. One frozen IntegerForm; a rule (`_rule`) has one, and others by name where chips differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from hago.arithmetic.numerics import Form, Order, Requantize
from hago.arithmetic.types import QParams

Attrs = Mapping[str, Any]

#: How the scale of an input slot comes about.
#: own: from its own threshold.  common: one scale for all common slots of the op (their largest).
#: follow: the producer's, so that nothing is requantized where the dtype allows.
#: bias: the product of the scales of slots 0 and 1.  plain: never quantized (indices, shapes, masks).
Slot = Literal["own", "common", "follow", "bias", "plain"]

#: Along which axes a scale may vary and still pass through the op unchanged.
Crosses = Literal["all", "axis1", "none"]


@dataclass(frozen=True, slots=True)
class Operand:
    """What is known of an integer operand before it is computed.

    Args:
        values: the centered integers of a constant, else None.
        magnitude: the largest |c|, a float64 tensor that broadcasts against the value.
        shape: at batch 1.
    """

    values: Tensor | None
    magnitude: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """Which slot may have a scale per output channel, and along which of its axes."""

    slot: int
    axis: int


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """An op as a product of matrices, for chips that cut sums of a few products.

    Args:
        rows: `(attrs, x, w, x_zero, w_zero)`, centered, to stored integers (..., M, K) and (..., K, N);
            K in the order in which chips multiply. A place that nothing is multiplied for holds 0.
        restored: `(attrs, product, x, w)` to the shape of the op's output.
    """

    rows: Callable[[Attrs, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
    restored: Callable[[Attrs, Tensor, Tensor, Tensor], Tensor]


#: Places of n entries of an output (one tensor of indices per axis) to what is added there: (n, K).
TermsAt = Callable[[tuple[Tensor, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class Addends:
    """What an op adds up, for registers that saturate at every addition.

    Law (addends): over K, the terms of an entry and its bias add up to the op's exact result there.

    Args:
        terms: `(attrs, operands, order)` to what is added where, in the order of additions and without the bias;
            padding is 0. None where one addition is all there is: two operands, or a single product.
        bias_axis: the axis of the output that a bias, the third operand, stands along.
    """

    terms: Callable[[Attrs, Sequence[Tensor], Order], TermsAt] | None = None
    bias_axis: int = 1


#: Of an op that adds two values at most.
ONE_ADDITION: Final = Addends()


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Where a form runs: what its integer attributes may depend on.

    Args:
        operands: the qparams that each operand arrives in; None where it is not quantized.
        out: those of the output; None where the node emits its accumulator.
        how: how the hardware requantizes.
    """

    operands: tuple[QParams | None, ...]
    out: QParams | None
    how: Requantize

    @property
    def scales(self) -> list[Tensor]:
        """Of the operands; 1 where they are not quantized."""
        return [torch.ones((), dtype=torch.float64) if q is None else q.scale for q in self.operands]

    @property
    def target(self) -> QParams:
        """The output's qparams, of a form that lands there."""
        assert self.out
        return self.out


def _first_scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
    return scales[0]


def _same_attrs(attrs: Attrs, scales: Sequence[Tensor]) -> Attrs:
    return attrs


def _largest(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    return torch.stack([o.magnitude.max() for o in operands]).max()


def _always_fits(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerForm:
    """An op on centered integers.

    Law (scale): `compute_real(c_i * s_i) == compute(attrs(s), c_i) * scale(s)` for scales that the
    slots allow. Law (bound): |compute(...)| <= bound(...), elementwise under broadcasting.

    Args:
        slots: the kind of each input; the last repeats.
        scale: the output's scale from those of the inputs (bias and plain slots: 1).
        compute: on centered integers held in any carrier (float32, float64, int64); None means the
            rule's own `compute`.
        attrs: attributes in integer units (clamp limits, pad values).
        attrs_at: the same for a form that must know more than scales; then `attrs` is not asked.
        lands: `compute` goes to the output's scale by itself; the output stage only clips.
        bound: the largest |output|, per channel where it is known. The default says more: every
            output lies within the hull of the inputs and 0 (max pooling, reshape, relu), and fits
            where they do. An op of which only the magnitude is known gives its own.
        split: input tuples, each a part of the sum over K, whose outputs add up to the whole;
            lets float32 carry sums beyond 2**24.
        crosses: see Crosses.
        seed: starts an integer region from float inputs (conv, linear, matmul).
        table: evaluated through a table over all input integers; the output has its own threshold.
        weight: where a scale per output channel may stand.
        limits: of an op that is `clamp(x, low, high)` and nothing else: both, from integer attributes;
            None stands for no limit.
        fits: None, or why this node cannot be integer.
        stays: every output fits where the inputs do, though `bound` says something else.
        hides: what lies outside the output's range cannot be told apart behind the op; a producer may take it.
            Law (hides): clipping the input to the output's range, 0 included, does not change the output.
        product: the op as a matrix product, where it is one.
        addends: what it adds up, one by one; without it, no register that saturates at every addition is simulated.
        goes_with: the requantize form that the hardware must have, of a form that uses it.
    """

    slots: tuple[Slot, ...]
    scale: Callable[[Attrs, Sequence[Tensor]], Tensor] = _first_scale
    compute: Callable[..., Tensor] | None = None
    attrs: Callable[[Attrs, Sequence[Tensor]], Attrs] = _same_attrs
    attrs_at: Callable[[Attrs, Site], Attrs] | None = None
    lands: bool = False
    bound: Callable[[Attrs, Sequence[Operand]], Tensor] = _largest
    split: Callable[[Attrs, Sequence[Tensor], int], list[tuple[Tensor, ...]]] | None = None
    crosses: Crosses = "none"
    seed: bool = False
    table: bool = False
    weight: Weight | None = None
    limits: Callable[[Attrs], tuple[Any, Any]] | None = None
    fits: Callable[[Attrs, Sequence[tuple[int, ...]]], str | None] = _always_fits
    stays: bool = False
    hides: bool = True
    product: MatrixProduct | None = None
    addends: Addends | None = None
    goes_with: Form | None = None

    def integer_attrs(self, attrs: Attrs, site: Site) -> Attrs:
        """The attributes in integer units."""
        return self.attrs_at(attrs, site) if self.attrs_at else self.attrs(attrs, site.scales)

    @property
    def within_hull(self) -> bool:
        """Whether every output lies between the smallest and largest input, or is 0, or fits their dtype anyway."""
        return self.bound is _largest or self.stays

    @property
    def adds_nothing(self) -> bool:
        """Whether it only looks values up, moves or compares them, so that the order of additions says nothing."""
        return self.table or (self.bound is _largest and not self.lands)

    def slot(self, index: int) -> Slot:
        """The kind of the `index`-th input."""
        return self.slots[min(index, len(self.slots) - 1)]


# ---------------------------------------------------------------- rule
# What an operator is: one frozen OpRule, constructed once in the file that bears the op's name.
# A rule is plain functions in a record. A misspelt field fails at import; nothing registers itself; `hago.ops.OPS` is
# built by reading the folder. `IntegerForm` (`_integer`) holds all that the integer world needs; an op without one
# (layer_norm) is float everywhere.
# Reading order for a new op: `parse` (how torch spells it), `compute` (what it does to real values), `integer` (how
# scales travel, what it does to centered integers, how large they can get), `forms` (the same where chips differ; a
# hardware file names the one that its chip computes).


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument of a torch call: the graph node that makes it."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call as the frontend hands it to a rule's `parse`.

    Args:
        target: e.g. "aten.conv2d.default".
        arguments: by schema name, defaults filled in; tensors are `Ref`s.
        shapes: of each tensor argument's node at batch 1, by node name.
        shape: of the result at batch 1; None where it is not one tensor.
        item: of a call that gives several tensors (split, batch norm), the one that is asked for.
        open_axes: by node name, the axes whose size depends on the batch; others have their true size
            in `shapes`.
    """

    target: str
    arguments: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...] | None]
    shape: tuple[int, ...] | None
    item: int = 0
    open_axes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def is_open(self, name: str, axis: int) -> bool:
        """Whether the size of that axis of the tensor argument `name` depends on the batch."""
        return axis in self.open_axes.get(self.arguments[name].name, (0,))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor argument `name`."""
        shape = self.shapes[self.arguments[name].name]
        assert shape is not None
        return shape


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a call means: inputs (a node, or a constant to be made one) and attributes."""

    inputs: tuple[Ref | Tensor, ...]
    attrs: Attrs = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """A call of torch that must import as exactly one node of this op.

    Args:
        fn: takes the tensors in order.
        shapes: of the tensors, at batch 2 for those that are inputs.
        consts: positions that are parameters of the model and not inputs.
        low, high: the range that random values are drawn from.
        indices: positions that hold int64 indices, drawn from [0, high).
    """

    fn: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    consts: tuple[int, ...] = ()
    low: float = -2.0
    high: float = 2.0
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Attributes and input shapes that the op must refuse, naming the attribute."""

    attrs: Attrs
    shapes: tuple[tuple[int, ...], ...]
    names: str


def _no_macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """An operator.

    Args:
        name: as hardware files and node listings spell it; the file's name.
        aten: the torch calls that `parse` reads, e.g. "aten.conv2d.default".
        parse: what a call means, or None where this rule cannot say it (it stays opaque then).
        compute: `(attrs, *tensors) -> tensor` on real values; also runs on meta tensors, which is
            how shapes are inferred.
        integer: the integer side, or None for an op that is float everywhere.
        forms: integer sides by name, which hardware files may ask for; an op with these alone is else float.
        macs: multiply-accumulates at batch 1.
        samples: calls that the law suite tests this file with.
        refuses: attributes that must raise, naming the attribute.
        aliases: other names (the RFC's, say) that hardware files may use.
        any_layout: whether `compute` gives the same bits however its values lie in memory, as exactly rounded
            arithmetic entry by entry does; others are given contiguous values, so that every engine has one result.
    """

    name: str
    aten: tuple[str, ...]
    parse: Callable[[Call], Parsed | None]
    compute: Callable[..., Any]
    integer: IntegerForm | None = None
    forms: Mapping[str, IntegerForm] = field(default_factory=dict)
    macs: Callable[[Attrs, Sequence[tuple[int, ...]], tuple[int, ...]], int] = _no_macs
    samples: tuple[Sample, ...] = ()
    refuses: tuple[Refusal, ...] = ()
    aliases: tuple[str, ...] = ()
    any_layout: bool = False

    def computed_as(self, form: str | None) -> OpRule:
        """The rule with one of its forms as its integer side; None leaves it as it is."""
        return self if form is None else replace(self, integer=self.forms[form])

    def compute_int(self, attrs: Attrs, *values: Tensor) -> Tensor:
        """The op on centered integers in any carrier."""
        assert self.integer is not None
        return (self.integer.compute or self.compute)(attrs, *values)
