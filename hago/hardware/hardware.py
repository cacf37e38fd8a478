"""Hardware: the signatures in which a chip runs each op, and its arithmetic.

The classes check what they need, also of objects that users construct: that ops, dtypes and schemes are known, that a
signature does not mix integers and floats, and that an accumulator's options go together. Whether the forms, roundings
and figures of a hardware file exist and fit each other is checked by `hardware.validation`, when `hardware.file` reads
or writes it. Signatures are listed in order of preference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from hago.arithmetic.numerics import OVERFLOWS, BiasAt, Order, Overflow, Requantize
from hago.arithmetic.schemes import SCHEMES
from hago.arithmetic.types import DType, dtype
from hago.errors import HardwareError, as_strings, did_you_mean
from hago.hardware.table import HardwareTable, SignatureRow
from hago.ops import OPS, OpRule, Ops, aliases
from hago.serialization.summary import Summarized, Summary, names_text

Granularity = Literal["per_tensor", "per_channel"]
RequantizeAt = Literal["edge", "output"]
OtherOps = Literal["float32", "reject"]

#: The behaviours of accumulators that add up groups of weights.
GROUP_OVERFLOWS: Final = ("wrap", "saturate_end")
#: The bits that a search may choose for an operand where a signature does not say.
DEFAULT_MIN_BITS: Final = 4
DEFAULT_MAX_BITS: Final = 64
#: The most bits that an operand has, whatever its dtype: more are not exact in float64, in which they are simulated.
MOST_BITS: Final = 53
#: The most bits of what is looked up in a table, which has an entry for every integer.
MOST_TABLE_BITS: Final = 16


@dataclass(frozen=True, slots=True, repr=False)
class Accumulator(Summarized):
    """The register in which an op computes its sums, and its behaviour on overflow.

    Args:
        order: the order in which products are added; given with `saturate_each`, and only then.
        bias: whether the bias is the first addend or the last; given with `saturate_each`, and only then.

    Raises:
        HardwareError: there is no such overflow; `order` or `bias` is missing, unknown, or given with another overflow
            than `saturate_each`.
    """

    dtype: DType
    overflow: Overflow = "wrap"
    order: Order | None = None
    bias: BiasAt | None = None

    def __post_init__(self) -> None:
        if self.overflow not in OVERFLOWS:
            raise HardwareError(
                f"unknown overflow {self.overflow!r} of an accumulator; known: {', '.join(OVERFLOWS)}."
                f"{did_you_mean(self.overflow, OVERFLOWS)}"
            )
        each = OVERFLOWS[self.overflow].at_every_addition
        for key, got, known in (("order", self.order, get_args(Order)), ("bias", self.bias, get_args(BiasAt))):
            if each and got not in known:
                raise HardwareError(
                    f"an accumulator that saturates at every addition needs {key}, one of {', '.join(known)}; "
                    f"got {got!r}.{did_you_mean(str(got), known)}"
                )
            if not each and got is not None:
                raise HardwareError(f"{key} belongs to saturate_each; got {key} {got!r} with {self.overflow}")

    @property
    def on_overflow(self) -> str:
        """The behaviour on overflow in words, with the order of additions if it matters."""
        return self.overflow if self.order is None else f"{self.overflow} ({self.order}, bias {self.bias})"

    def summary(self) -> Summary:
        """Its dtype and behaviour on overflow."""
        return Summary(f"Accumulator {self}")

    def __str__(self) -> str:
        return f"{self.dtype} {self.on_overflow}"


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a weight, neighbouring entries of a channel that share a scale; see `hago.arithmetic.groups`.

    Where weights alone are quantized, the scale of a group is a float. Where the chip multiplies integers, it is the
    scale of the channel, or of the tensor, times an integer, by which the chip multiplies the sum of the group; see
    `hago.plan.weight_groups`.

    Args:
        size: the number of entries of a group; the last group of a channel may be shorter.
        multiplier_bits: the bits of these integers, which have no sign; None for weights alone.
        partial: the dtype of the register in which a group is added up, which overflows as the accumulator does; None
            if that is the accumulator itself, or for weights alone.

    Raises:
        HardwareError: a group has less than two entries, multipliers do not have 2 to 8 bits, or there is a partial
            register without multipliers, or one that holds no signed integers.
    """

    size: int
    multiplier_bits: int | None = None
    partial: DType | None = None

    def __post_init__(self) -> None:
        if self.size < 2:
            raise HardwareError(f"groups of {self.size} entries of a weight; expected 2 or more")
        if self.multiplier_bits is not None and not 2 <= self.multiplier_bits <= 8:
            raise HardwareError(f"multipliers of groups have {self.multiplier_bits} bits; expected 2 to 8")
        if self.partial is not None and (self.multiplier_bits is None or self.partial.kind != "int"):
            raise HardwareError(
                f"partial sums of groups in {self.partial}; expected a signed integer dtype, with multiplier_bits"
            )

    def largest_multiplier(self, *, power_of_two: bool) -> int:
        """The largest multiplier of a group, where these are powers of two or not."""
        assert self.multiplier_bits is not None
        return 1 << (self.multiplier_bits - 1) if power_of_two else (1 << self.multiplier_bits) - 1

    def __str__(self) -> str:
        partial = "" if self.partial is None else f" summed in {self.partial}"
        factor = "" if self.multiplier_bits is None else f"{partial} and multiplied by {self.multiplier_bits} bits"
        return f"weights in groups of {self.size}{factor}"


@dataclass(frozen=True, slots=True)
class FixedOut:
    """Quantization parameters of an output that are fixed by the hardware instead of calibrated.

    Args:
        scale: exact in float32.
        zero_point: in the range of the output dtype.
    """

    scale: float
    zero_point: int = 0


def _dtypes(names: str | DType | Sequence[str | DType]) -> tuple[DType, ...]:
    listed = [names] if isinstance(names, (str, DType)) else list(names)
    return tuple(d if isinstance(d, DType) else dtype(d) for d in listed)


@dataclass(frozen=True, slots=True, repr=False)
class OpDesc(Summarized):
    """A signature: one combination of dtypes and arithmetic in which the hardware can run an op.

    Args:
        in_dtypes: the dtype of each operand, as names or DTypes; the last one is also that of further operands. A
            bias that is not listed has the accumulator's dtype.
        out_dtypes: exactly one dtype, in a sequence or by itself.
        accumulator: the register in which sums are computed; by default one of the output dtype that wraps.
        requantize_at: `edge` if the node emits its accumulator and each consumer requantizes it; `output` if the node
            requantizes it once, to `out_dtypes`.
        name: the name of the signature in the hardware file; ignored by ==.
        min_bits, max_bits: the bits that a search may choose for an operand, of at most MOST_BITS.
        form: the form of the op's arithmetic, if chips differ in it; see docs/hardware.md.
        fixed_out: the scale and zero point of the output, if the hardware fixes them.
        groups: the groups of the weight that have scales of their own; None if its scales are those of
            `Hardware.weight`. With multipliers where the signature computes in integers, and only there.
        cost: cost figures, e.g. {"macs_per_cycle": 64}.

    Raises:
        HardwareError: there are no dtypes, dtypes mix integers and floats (other than a float node with one integer
            operand, its weight), the output is fixed but not requantized at the output, or there are groups
            without a weight, or with multipliers in a signature that computes in float, or its accumulator saturates at
            partial sums of its own.
    """

    in_dtypes: Any
    out_dtypes: Any
    accumulator: Accumulator | None = None
    requantize_at: RequantizeAt = "edge"
    name: str = field(default="", compare=False)
    min_bits: int = DEFAULT_MIN_BITS
    max_bits: int = DEFAULT_MAX_BITS
    form: str | None = None
    fixed_out: FixedOut | None = None
    groups: Groups | None = None
    cost: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_dtypes", _dtypes(self.in_dtypes))
        object.__setattr__(self, "out_dtypes", _dtypes(self.out_dtypes))
        if not self.in_dtypes or len(self.out_dtypes) != 1:
            raise HardwareError(
                f"signature {self.name!r} needs in_dtypes and exactly one out_dtype; "
                f"got {len(self.in_dtypes)} and {len(self.out_dtypes)}"
            )
        if self.accumulator is None:
            object.__setattr__(self, "accumulator", Accumulator(self.out_dtype))
        kinds = {d.is_int for d in (*self.in_dtypes, self.out_dtype, self.register.dtype)}
        if len(kinds) != 1 and not self.is_weight_only:
            raise HardwareError(
                f"signature {self.name!r} mixes integer and float dtypes: "
                f"{', '.join(map(str, self.in_dtypes))} -> {self.out_dtype}; give two signatures, or one whose "
                "weight alone is an integer"
            )
        if self.fixed_out is not None and not (self.is_integer and self.requantize_at == "output"):
            raise HardwareError(
                f"signature {self.name!r} fixes its output; expected integers requantized at the output"
            )
        if self.groups is not None:
            self._check_groups(self.groups)

    def _check_groups(self, groups: Groups) -> None:
        integer = groups.multiplier_bits is not None
        if integer != self.is_integer or not (integer or self.is_weight_only):
            raise HardwareError(
                f"signature {self.name!r} has {groups}; expected multipliers where all operands are integers, and none "
                "where the weight alone is one"
            )
        if integer and self.register.overflow not in GROUP_OVERFLOWS:
            raise HardwareError(
                f"signature {self.name!r} has {groups} and an accumulator with {self.register.overflow}; expected "
                f"{' or '.join(GROUP_OVERFLOWS)}"
            )

    @property
    def out_dtype(self) -> DType:
        return self.out_dtypes[0]  # type: ignore[no-any-return]

    @property
    def register(self) -> Accumulator:
        """The accumulator, given or by default. `NodePlan.register` is the QParams of the integers that it holds."""
        assert self.accumulator is not None
        return self.accumulator

    @property
    def is_integer(self) -> bool:
        return self.out_dtype.is_int

    @property
    def is_weight_only(self) -> bool:
        """Whether the op computes in float, and one operand, the weight, is stored in integers."""
        integers = sum(d.is_int for d in self.in_dtypes)
        return not (self.is_integer or self.register.dtype.is_int) and integers == 1 < len(self.in_dtypes)

    def in_dtype(self, slot: int) -> DType:
        """The dtype of operand `slot`; the last listed one is also that of further operands."""
        return self.in_dtypes[min(slot, len(self.in_dtypes) - 1)]  # type: ignore[no-any-return]

    def bits_of(self, dtype: DType) -> range:
        """The bits that a search may choose for an operand, or an output, of a dtype."""
        most = min(dtype.bits, self.max_bits, MOST_BITS)
        return range(min(self.min_bits, most), most + 1)

    @property
    def widths(self) -> tuple[object, ...]:
        """A value that is equal for signatures that differ only in the signs of their dtypes."""
        bits = tuple(d.bits for d in self.in_dtypes)
        return (bits, self.out_dtype.bits, self.register.dtype.bits, self.requantize_at, self.form, self.groups)

    def bias_dtype(self, slot: int) -> DType:
        """The dtype of a bias in `slot`: the listed one, else the accumulator's."""
        return self.in_dtypes[slot] if slot < len(self.in_dtypes) else self.register.dtype

    def summary(self) -> Summary:
        """Its dtypes, register and place of requantization."""
        return Summary(" ".join(filter(None, ("OpDesc", self.name, str(self)))))

    def __str__(self) -> str:
        # a part of the key of a Plan, which logs hold: it cannot change
        ins = ", ".join(map(str, self.in_dtypes))
        at = " requantized at output" if self.requantize_at == "output" else ""
        register = self.register
        acc = "" if register == Accumulator(self.out_dtype) else f" in {register.dtype} {register.on_overflow}"
        groups = "" if self.groups is None else f", {self.groups}"
        return f"({ins}) -> {self.out_dtype}{acc}{at}{groups}"


@dataclass(frozen=True, slots=True)
class TensorScheme:
    """The scheme of activations or of weights, and whether scales are per tensor or per channel."""

    scheme: str = "hago"
    granularity: Granularity = "per_tensor"

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise HardwareError(
                f"unknown scheme {self.scheme!r}; known: {', '.join(SCHEMES)}." + did_you_mean(self.scheme, SCHEMES)
            )
        if self.granularity not in get_args(Granularity):
            raise HardwareError(f"unknown granularity {self.granularity!r}; expected per_tensor or per_channel")

    def text(self) -> str:
        """The scheme in words."""
        return f"scheme {self.scheme}, {self.granularity.replace('_', ' ')}"


@dataclass(frozen=True, slots=True, repr=False)
class Hardware(Summarized):
    """A piece of hardware: its ops with their signatures, and its arithmetic.

    `load_hardware` reads it from a file; users can also construct it. It is immutable.

    Args:
        ops: the signatures of each op in order of preference, or a single one. The RFC's op names are accepted.
        name: the name of the hardware.
        activation, weight: schemes of data and of constant weights.
        requantize: the arithmetic of requantization.
        other_ops: the treatment of ops that are not listed, and of nodes that no listed signature fits (e.g. a clamp
            at 1e-12): `float32` runs them in float, `reject` refuses them.
        cost: cost figures of the whole chip, e.g. {"clock_hz": 1e9, "bytes_per_cycle": 8}.
        sources: the documents from which the facts were taken.
        notes: remarks, e.g. which facts no source gives.
        processor: the family of the CPU if hago can run on the hardware: `x86`, `arm`, or `cpu` for any; else empty.
        origin: the file from which it was read; empty if it was constructed in Python.
        known_ops: the ops that it may list, with their rules; hago's own by default.
    """

    ops: Mapping[str, Sequence[OpDesc]]
    name: str = "custom"
    activation: TensorScheme = field(default_factory=TensorScheme)
    weight: TensorScheme = field(default_factory=TensorScheme)
    requantize: Requantize = field(default_factory=Requantize)
    other_ops: OtherOps = "float32"
    cost: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    processor: str = ""
    origin: str = field(default="", compare=False)
    known_ops: Ops = field(default_factory=lambda: OPS, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = aliases(self.known_ops)
        merged: dict[str, tuple[OpDesc, ...]] = {}
        for op, descs in self.ops.items():
            name = names.get(op, op)
            if name not in self.known_ops:
                raise HardwareError(
                    f"hardware {self.name!r} lists unknown op {op!r}." + did_you_mean(op, [*self.known_ops, *names])
                )
            merged[name] = merged.get(name, ()) + ((descs,) if isinstance(descs, OpDesc) else tuple(descs))
        object.__setattr__(self, "ops", merged)
        for listed in ("sources", "notes"):
            object.__setattr__(self, listed, as_strings(getattr(self, listed), listed))

    def rule(self, op: str, ops: Ops) -> OpRule | None:
        """The rule of an op, with the form in which this hardware computes it; None for an unknown op.

        Args:
            ops: the rules to take it from.

        Raises:
            HardwareError: the op has no such form.
        """
        rule, form = ops.get(op), next((d.form for d in self.integer_descs(op)), None)
        if rule is None or form is None:
            return rule
        if form not in rule.forms:
            raise HardwareError(
                f"hardware {self.name!r} computes {op} in the unknown form {form!r}; "
                f"known: {', '.join(rule.forms) or 'none'}." + did_you_mean(form, rule.forms)
            )
        return rule.with_form(form)

    def rules(self, ops: Ops) -> Ops:
        """The given rules of all ops, each with the form in which this hardware computes the op."""
        named = {op for op, descs in self.ops.items() if op in ops and any(d.form for d in descs)}
        return {**ops, **{op: rule for op in named if (rule := self.rule(op, ops))}} if named else ops

    def integer_descs(self, op: str) -> tuple[OpDesc, ...]:
        """The integer signatures of `op`, preferred first."""
        return tuple(d for d in self.ops.get(op, ()) if d.is_integer)

    def float_descs(self, op: str, integer_fits: bool = True) -> tuple[OpDesc, ...]:
        """The float signatures of `op`, without those whose weight is stored in integers.

        If there is none and `other_ops` is `float32`, a float32 signature is returned for an op that is not listed, and
        for a node that no integer signature fits.

        Args:
            integer_fits: whether an integer signature of the op fits the node in question.
        """
        listed = tuple(d for d in self.ops.get(op, ()) if not (d.is_integer or d.is_weight_only))
        if listed or self.other_ops != "float32" or (integer_fits and op in self.ops):
            return listed
        return (OpDesc("float32", "float32", name="other_ops"),)

    def summary(self) -> Summary:
        """Its schemes, requantization and ops."""
        integer = [op for op in self.ops if self.integer_descs(op)]
        rest = "run in float32" if self.other_ops == "float32" else "are refused"
        figures = ", ".join(f"{name} {value:g}" for name, value in self.cost.items())
        return Summary(
            f"Hardware {self.name}",
            {
                "activations": self.activation.text(),
                "weights": self.weight.text(),
                "requantize": f"{self.requantize_text()}, rounding {self.requantize.rounding}",
                "integer ops": f"{len(integer)}: {names_text(integer)}" if integer else "none",
                "other ops": f"{len(self.ops) - len(integer)} are listed in float; those not listed {rest}",
                "costs": figures or "no figures of the whole chip",
                "runs on": "any CPU" if self.processor == "cpu" else self.processor and f"{self.processor} CPUs",
                "file": self.origin,
            },
        )

    def requantize_text(self) -> str:
        """The form of requantization in words."""
        how = self.requantize
        if how.form != "multiplier_shift":
            return how.form
        stages = " in two stages" if how.two_stage else ""
        text = f"{how.form} of {how.multiplier_bits} bits{stages}"
        text += f" found by {how.search}" if how.search != "nearest" else ""
        text += f" rounded {how.shift_rounding}" if how.shift_rounding else ""
        return text + (f", {how.wide} for wide registers" if how.wide else "")

    def table(self) -> HardwareTable:
        """Every signature with its dtypes, register, requantization and the file that it comes from."""
        head = (
            f"{self.name}: activations {self.activation.scheme} {self.activation.granularity}, "
            f"weights {self.weight.scheme} {self.weight.granularity}, requantize {self.requantize_text()}, "
            f"rounding {self.requantize.rounding}, other ops {self.other_ops}"
        )
        rows = tuple(_row(op, desc) for op, descs in self.ops.items() for desc in descs)
        return HardwareTable(head, self.requantize.form, self.origin or "Python", rows)

    def __str__(self) -> str:
        return str(self.table())


def _row(op: str, desc: OpDesc) -> SignatureRow:
    integer, fixed = desc.is_integer, desc.fixed_out
    fixed_to = "" if fixed is None else f", fixed to {fixed.scale:g} {fixed.zero_point:+d}"
    return SignatureRow(
        op=op,
        operands=tuple(map(str, desc.in_dtypes)),
        result=str(desc.out_dtype),
        register=str(desc.register.dtype) if integer else "-",
        overflow=desc.register.on_overflow if integer else "-",
        requantize=f"{desc.requantize_at}{fixed_to}" if integer else "-",
        form=desc.form or "-",
        signature=desc.name,
        groups=str(desc.groups or ""),
    )


def create_sample_hardware() -> Hardware:
    """The sample hardware of the HAGO RFC: int8 convolutions into int32, adds and activations on int32.

    References:
        The HAGO RFC, `create_accelerator_description`; `hardware_specs/sample.json` is the same.
    """
    desc: dict[str, list[OpDesc]] = {}

    def take(ops: str, *signatures: tuple[Sequence[str], str]) -> None:
        for op in ops.split():
            desc[op] = [OpDesc(list(ins), out) for ins, out in signatures]

    f32, i8, i32 = (["float32"], "float32"), (["int8"], "int8"), (["int32"], "int32")
    take("conv2d", (["int8", "int8"], "int32"))
    take("add relu clamp max_pool2d", i32)
    take("concat", f32, i8, i32)
    take("pad permute", f32, i8)
    take("avg_pool2d adaptive_avg_pool2d reshape linear mul sub mean softmax", f32)
    return Hardware({op: tuple(d) for op, d in desc.items()}, name="sample")
