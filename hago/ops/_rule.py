"""An operator as a rule: one frozen OpRule per op, constructed once in the file that bears the op's name.

A rule is plain functions in a record: a misspelt field fails at import, nothing registers itself, and `hago.ops.OPS`
is built by reading the folder. Its integer side is an IntegerForm: how scales travel through the op, what it does to
centered integers, and how large they can get. An op without one (layer_norm) is float everywhere.

Reading order for a new op: `parse` (how torch spells it), `compute` (what it does to real values), `integer` (the
integer side), `forms` (other integer sides, where chips differ; a hardware file names the one that its chip computes).
A "Law" in a docstring is a property that tests check of every op (tests/ops/laws.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from hago.arithmetic.numerics import Order, Requantize, RequantizeForm
from hago.arithmetic.types import QParams
from hago.errors import HagoError, did_you_mean

Attrs = Mapping[str, Any]

#: Where the scale of an input slot comes from.
#: own: from the slot's own threshold.  common: one scale for all common slots of the op (the largest of theirs).
#: follow: from the producer, so that nothing is requantized where the dtype allows it.
#: bias: the product of the scales of slots 0 and 1.  plain: none; the slot is never quantized (indices, shapes, masks).
Slot = Literal["own", "common", "follow", "bias", "plain"]

#: The axes along which a scale may vary and still pass through an op unchanged: any, axis 1 alone (channels), or none.
PerChannelAxes = Literal["all", "axis1", "none"]


@dataclass(frozen=True, slots=True)
class Operand:
    """An integer operand before any data is seen; `IntegerForm.bound` reads it.

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
    """The slot that may have a scale per output channel, and the axis of it along which output channels lie.

    Args:
        sums_channels: whether an output adds up the products of all entries of its channel and of no other, and
            channels lie along axis 0, so that the entries of a channel may be cut into groups.
    """

    slot: int
    axis: int
    sums_channels: bool = False


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """An op as a product of matrices, for chips that saturate sums of two or four products.

    Args:
        to_matrices: from `(attrs, x, w, x_zero, w_zero)`, x and w centered, to stored integers of shapes (..., M, K)
            and (..., K, N), with K in the order in which chips multiply; w_zero broadcasts against w. Entries without a
            product hold 0.
        reshape_product: from `(attrs, product, x, w)` to the product in the shape of the op's output.
    """

    to_matrices: Callable[[Attrs, Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor]]
    reshape_product: Callable[[Attrs, Tensor, Tensor, Tensor], Tensor]


#: From n positions in an output (a tensor of indices for each axis) to the terms that are added up there: (n, K).
TermsAt = Callable[[tuple[Tensor, ...]], Tensor]
#: From what a layer reads to windows of it.
WindowsOf = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Addends:
    """The terms that an op adds up, for registers that saturate at every addition.

    Law (addends): over K, the terms of an entry and its bias add up to the op's exact result there.

    Args:
        terms: from `(attrs, operands, order)` to the terms of any entries, in the order of their addition
            (`numerics.Order`), without the bias; padding is 0. None for an op with one addition (add, sub) or none
            (mul, neg).
        bias_axis: the axis of the output along which a bias, the third operand, lies.
        windows_at: from `(attrs, shape, w, index)` to a function that takes out of any value x of this shape what the
            weights of a layer are multiplied with at n places of its output, (groups, n, K), along K as weights
            (output, *kernel, channels) have it; `index` is that of `terms` without the channel. None for other ops,
            and where outputs read windows of several shapes.
    """

    terms: Callable[[Attrs, Sequence[Tensor], Order], TermsAt] | None = None
    bias_axis: int = 1
    windows_at: Callable[[Attrs, Sequence[int], Tensor, tuple[Tensor, ...]], WindowsOf] | None = None


#: The addends of an op that adds two values at most.
ONE_ADDITION: Final = Addends()


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """The quantization around one node, on which the integer attributes of a form may depend.

    Made while a Plan is resolved, for `IntegerForm.integer_attrs`.

    Args:
        operands: the qparams of each operand; None for those that are not quantized.
        out: the qparams of the output; None if the node emits its accumulator.
        how: how the hardware requantizes.
    """

    operands: tuple[QParams | None, ...]
    out: QParams | None
    how: Requantize

    @property
    def scales(self) -> list[Tensor]:
        """The scales of the operands; 1 for those that are not quantized."""
        return [torch.ones((), dtype=torch.float64) if q is None else q.scale for q in self.operands]

    @property
    def source(self) -> QParams:
        """The first operand's qparams, for a form that reads them."""
        assert self.operands[0]
        return self.operands[0]

    @property
    def target(self) -> QParams:
        """The output's qparams, for a form that requantizes its output."""
        assert self.out
        return self.out


def first_scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
    """The scale of an op that keeps that of its first input."""
    return scales[0]


def _same_attrs(attrs: Attrs, scales: Sequence[Tensor]) -> Attrs:
    return attrs


def _largest(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    return torch.stack([o.magnitude.max() for o in operands]).max()


def _always_supported(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
    return None


#: From attributes and input shapes to the reason why such a node cannot be integer, or None.
WhyUnsupported = Callable[[Attrs, Sequence[tuple[int, ...]]], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerForm:
    """An op on centered integers.

    Law (scale): `OpRule.compute(a, c_i * s_i) == compute(attrs(a, s), c_i) * scale(a, s)`, with `a` the attributes of
    the node, for scales that the slots allow.
    Law (bound): |compute(...)| <= bound(...), elementwise under broadcasting.

    Args:
        slots: the kind of each input; the last repeats.
        scale: the output's scale from those of the inputs (bias and plain slots: 1).
        compute: the op on centered integers held in any carrier (float32, float64, int64); None for the
            rule's own `compute`.
        attrs: the attributes in integer units (clamp limits, pad values).
        attrs_at: the same, for a form that depends on more than scales; `attrs` is then not called.
        requantizes_output: whether `compute` gives integers on the output's scale, so that the output stage only
            clips them.
        bound: the largest |output|, per channel if that is known. The default promises more: every output lies
            within the hull of the inputs and 0 (max pooling, reshape, relu), so it fits where they do. An op of
            which only the magnitude is known gives a bound of its own.
        split: cuts the inputs along K into tuples whose outputs add up to the whole; lets float32 carry sums
            beyond 2**24.
        accepts_per_channel: the axes along which the scale of an input may vary; see PerChannelAxes.
        starts_region: whether the op starts an integer region from float inputs (conv, linear, matmul).
        table: whether the op is a lookup table over all input integers; the output has its own threshold.
        weight: the operand that may have a scale per output channel.
        limits: for an op that is `clamp(x, low, high)` and nothing else: both limits, from integer attributes;
            None stands for no limit.
        unsupported: from attributes and input shapes to the reason why such a node cannot be integer, or None.
        fits_input_dtype: whether every output fits the dtype of the inputs although the op has a `bound` of its own.
        allows_early_clipping: whether the producer may clip its value to the range of this op's output.
            Law (early clipping): clipping the input to the output's range, 0 included, does not change the output.
        product: the op as a matrix product, if it is one.
        addends: the terms that the op adds up; without them, the op is refused on registers that saturate at every
            addition.
        required_requantize: the `Requantize.form` that the hardware must have; None for any.
        common: from the qparams of the operands to those of the integers that the op adds, for a form whose narrow
            operands keep scales of their own; see `hago.ops.forms.rescaled`.
    """

    slots: tuple[Slot, ...]
    scale: Callable[[Attrs, Sequence[Tensor]], Tensor] = first_scale
    compute: Callable[..., Tensor] | None = None
    attrs: Callable[[Attrs, Sequence[Tensor]], Attrs] = _same_attrs
    attrs_at: Callable[[Attrs, Site], Attrs] | None = None
    requantizes_output: bool = False
    bound: Callable[[Attrs, Sequence[Operand]], Tensor] = _largest
    split: Callable[[Attrs, Sequence[Tensor], int], list[tuple[Tensor, ...]]] | None = None
    accepts_per_channel: PerChannelAxes = "none"
    starts_region: bool = False
    table: bool = False
    weight: Weight | None = None
    limits: Callable[[Attrs], tuple[Any, Any]] | None = None
    unsupported: WhyUnsupported = _always_supported
    fits_input_dtype: bool = False
    allows_early_clipping: bool = True
    product: MatrixProduct | None = None
    addends: Addends | None = None
    required_requantize: RequantizeForm | None = None
    common: Callable[[Sequence[QParams]], QParams] | None = None

    def __post_init__(self) -> None:
        kinds = get_args(Slot)
        for slot in self.slots:
            if slot not in kinds:
                raise HagoError(
                    f"the slots of an integer form are {self.slots!r}; expected a tuple of {', '.join(kinds)}."
                    + did_you_mean(str(slot), kinds)
                )

    def integer_attrs(self, attrs: Attrs, site: Site) -> Attrs:
        """The attributes in integer units, for a node with this quantization around it."""
        return self.attrs_at(attrs, site) if self.attrs_at else self.attrs(attrs, site.scales)

    @property
    def outputs_fit_input_dtype(self) -> bool:
        """Whether every output fits the inputs' dtype: by the default `bound`, or because the form says so."""
        return self.bound is _largest or self.fits_input_dtype

    @property
    def has_no_additions(self) -> bool:
        """Whether the op only looks up, moves or compares values, so that no register can saturate at an addition."""
        return self.table or (self.bound is _largest and not self.requantizes_output)

    def slot(self, index: int) -> Slot:
        """The kind of the `index`-th input."""
        return self.slots[min(index, len(self.slots) - 1)]


# ---------------------------------------------------------------- rule


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument of a torch call: the name of the graph node that computes it."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call, made by the frontend and passed to a rule's `parse`.

    Args:
        target: the operator, e.g. "aten.conv2d.default".
        arguments: by schema name, with defaults filled in; tensors are `Ref`s.
        shapes: the shape at batch 1 of each tensor argument, by node name.
        shape: the shape of the result at batch 1; None if the result is not one tensor.
        item: the index of the result that the node stands for, of a call with several (split, batch norm).
        open_axes: by node name, the axes whose size depends on the batch; the other axes have their true size
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
    """A call as `parse` reads it: inputs (nodes, or tensors that become constants) and attributes."""

    inputs: tuple[Ref | Tensor, ...]
    attrs: Attrs = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """A call of torch that must import as exactly one node of this op; the laws in tests/ops run on it.

    Args:
        fn: takes the tensors in order.
        shapes: the shapes of the tensors; inputs at batch 2.
        consts: positions of tensors that are parameters of the model rather than inputs.
        low, high: the range from which random values are drawn.
        indices: positions of int64 indices, drawn from [0, high).
    """

    fn: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    consts: tuple[int, ...] = ()
    low: float = -2.0
    high: float = 2.0
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Attributes and input shapes that the op must refuse by an error that contains `names`."""

    attrs: Attrs
    shapes: tuple[tuple[int, ...], ...]
    names: str


def _no_macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """An operator.

    Args:
        name: the name in hardware files and node listings, which is the file's name.
        aten: the torch calls that `parse` reads, e.g. "aten.conv2d.default".
        parse: from a call to inputs and attributes, or None for a call that this rule cannot express (it becomes
            an opaque node, which torch computes in float).
        compute: `(attrs, *tensors) -> tensor` on real values; also runs on meta tensors, which is
            how shapes are inferred.
        integer: the integer side, or None for an op that is float everywhere.
        forms: other integer sides by name, which hardware files may ask for; an op that has only these is float
            unless a file names one.
        macs: multiply-accumulates at batch 1.
        samples: calls on which the laws in tests/ops are tested.
        refuses: attributes and shapes that must raise an error.
        aliases: other names (the RFC's, say) that hardware files may use.
        moves_values: whether every entry of the result is an entry of an operand, or padding: the op moves, picks,
            repeats or leaves out values and computes none.
            Law (moves): true if and only if this holds on all samples.
        clips_or_averages: whether every entry of the result is an operand's entry cut off at a limit, or an average
            of entries, so that it needs no range of its own where its operands have one.
        any_layout: whether `compute` gives equal values however its operands lie in memory, as exactly rounded
            arithmetic entry by entry does. Other ops are given contiguous tensors, so that every engine has one result.
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
    moves_values: bool = False
    clips_or_averages: bool = False
    any_layout: bool = False

    def __post_init__(self) -> None:
        # a single text would be read letter by letter
        given: dict[str, Any] = {"aten": self.aten, "aliases": self.aliases}
        for what, names in given.items():
            if isinstance(names, str):
                raise HagoError(f"{what} of the rule {self.name!r} is the text {names!r}; expected a tuple of texts")

    @property
    def weight(self) -> Weight | None:
        """The operand that may have a scale per output channel; None where the op has none, or no integer side."""
        return None if self.integer is None else self.integer.weight

    def with_form(self, form: str | None) -> OpRule:
        """The rule with the named form as its integer side; itself if `form` is None."""
        return self if form is None else replace(self, integer=self.forms[form])

    def compute_int(self, attrs: Attrs, *values: Tensor) -> Tensor:
        """The op on centered integers in any carrier."""
        assert self.integer is not None
        return (self.integer.compute or self.compute)(attrs, *values)

    def compute_int_in_parts(self, attrs: Attrs, values: Sequence[Any], parts: int) -> Tensor:
        """The exact result of the op on float carriers: in one pass, or in float32 along parts of K, whose sums are
        added in float64. Called by the simulator, and by the integer model for products that have no native kernel.

        Args:
            values: centered integers, in float32 if there is more than one part.
            parts: into how many sums over K the op is split; `NodePlan.parts` says how many keep every sum exact.
        """
        if parts == 1:
            return self.compute_int(attrs, *values)
        assert self.integer is not None and self.integer.split is not None
        chunks = self.integer.split(attrs, values, parts)
        total = self.compute_int(attrs, *chunks[0]).to(torch.float64)
        for chunk in chunks[1:]:
            total += self.compute_int(attrs, *chunk)
        return total
