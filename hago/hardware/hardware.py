"""Hardware: which dtypes each op takes on a chip, and how the chip computes.

Invariants: every op name is known; every signature's dtypes exist; rounding, overflow and forms are
those of `numerics`. Declaration order is preference. Reading and checking files: `hardware_file`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hago.arithmetic.numerics import BiasAt, Order, Overflow, Requantize
from hago.arithmetic.schemes import SCHEMES
from hago.arithmetic.types import DType, dtype
from hago.errors import HardwareError, as_strings, did_you_mean
from hago.ops import OPS, Ops, aliases
from hago.ops._rule import OpRule

Granularity = Literal["per_tensor", "per_channel"]
RequantizeAt = Literal["edge", "output"]
OtherOps = Literal["float32", "reject"]


@dataclass(frozen=True, slots=True)
class Accumulator:
    """The register that sums are made in, and what happens past its range.

    Args:
        order: in which products are added; stated with `saturate_each`, and with nothing else.
        bias: whether the bias is the first addend or the last; as `order`.

    Raises:
        HardwareError: `saturate_each` without an order or a place of the bias, another overflow with one, or one
            that is unknown.
    """

    dtype: DType
    overflow: Overflow = "wrap"
    order: Order | None = None
    bias: BiasAt | None = None

    def __post_init__(self) -> None:
        each = self.overflow == "saturate_each"
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
        """What happens past the range, in words: the overflow, and the order of additions where it counts."""
        return self.overflow if self.order is None else f"{self.overflow} ({self.order}, bias {self.bias})"


@dataclass(frozen=True, slots=True)
class FixedOut:
    """The qparams of an output that an engine does not take from calibration.

    Args:
        scale: exact in float32.
        zero_point: within the out dtype.
    """

    scale: float
    zero_point: int = 0


def _dtypes(names: str | DType | Sequence[str | DType]) -> tuple[DType, ...]:
    listed = [names] if isinstance(names, (str, DType)) else list(names)
    return tuple(d if isinstance(d, DType) else dtype(d) for d in listed)


@dataclass(frozen=True, slots=True)
class OpDesc:
    """One way the hardware can run an op: a signature.

    Args:
        in_dtypes: of each operand, as names or DTypes; the last repeats for further operands. A
            bias that is not listed has the accumulator's dtype.
        out_dtypes: one dtype (a single name is taken too).
        accumulator: the register sums are made in; the out dtype, wrapping, where not given.
        requantize_at: `edge`: the node emits its accumulator and each consumer requantizes;
            `output`: the node requantizes once, to `out_dtypes`.
        name: of the signature in the hardware file; two signatures that do the same are equal
            whatever they are called.
        min_bits, max_bits: what a search may choose for an operand.
        form: the way the op is computed where chips differ.
        fixed_out: scale and zero point of the output, where the hardware has them once and for all.
        cost: e.g. {"macs_per_cycle": 64}.

    Raises:
        HardwareError: no dtypes, an accumulator that is no integer for integer operands, integers and floats
            other than one integer operand of a float node (its weight), or a fixed output of a node that
            emits its accumulator.
    """

    in_dtypes: Any
    out_dtypes: Any
    accumulator: Accumulator | None = None
    requantize_at: RequantizeAt = "edge"
    name: str = field(default="", compare=False)
    min_bits: int = 4
    max_bits: int = 64
    form: str | None = None
    fixed_out: FixedOut | None = None
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

    @property
    def out_dtype(self) -> DType:
        return self.out_dtypes[0]  # type: ignore[no-any-return]

    @property
    def register(self) -> Accumulator:
        assert self.accumulator is not None
        return self.accumulator

    @property
    def is_integer(self) -> bool:
        return self.out_dtype.is_int

    @property
    def is_weight_only(self) -> bool:
        """Whether it computes in float, and one operand, the weight, rests as integers."""
        integers = sum(d.is_int for d in self.in_dtypes)
        return not (self.is_integer or self.register.dtype.is_int) and integers == 1 < len(self.in_dtypes)

    def in_dtype(self, slot: int) -> DType:
        """The dtype of operand `slot`; the last listed one repeats."""
        return self.in_dtypes[min(slot, len(self.in_dtypes) - 1)]  # type: ignore[no-any-return]

    @property
    def widths(self) -> tuple[object, ...]:
        """What signatures have in common that differ in signs only."""
        bits = tuple(d.bits for d in self.in_dtypes)
        return (bits, self.out_dtype.bits, self.register.dtype.bits, self.requantize_at, self.form)

    def bias_dtype(self, slot: int) -> DType:
        """The dtype of a bias in `slot`: the listed one, else the accumulator's."""
        return self.in_dtypes[slot] if slot < len(self.in_dtypes) else self.register.dtype

    def __str__(self) -> str:
        ins = ", ".join(map(str, self.in_dtypes))
        at = " requantized at output" if self.requantize_at == "output" else ""
        register = self.register
        acc = "" if register == Accumulator(self.out_dtype) else f" in {register.dtype} {register.on_overflow}"
        return f"({ins}) -> {self.out_dtype}{acc}{at}"


@dataclass(frozen=True, slots=True)
class TensorScheme:
    """How real ranges become integers: the scheme and whether scales are per tensor or per channel."""

    scheme: str = "hago"
    granularity: Granularity = "per_tensor"

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise HardwareError(
                f"unknown scheme {self.scheme!r}; known: {', '.join(SCHEMES)}." + did_you_mean(self.scheme, SCHEMES)
            )
        if self.granularity not in get_args(Granularity):
            raise HardwareError(f"unknown granularity {self.granularity!r}; expected per_tensor or per_channel")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a piece of hardware can run.

    Args:
        ops: signatures of each op, or the only one, in order of preference. The RFC's names are accepted.
        name: of the hardware.
        activation, weight: schemes of data and of constant weights.
        requantize: how integers move between scales.
        other_ops: what an unlisted op means, or a node that no listed signature fits (a clamp at
            1e-12, say): `float32` runs it in float, `reject` refuses it.
        cost: figures of the whole chip, e.g. {"clock_hz": 1e9, "bytes_per_cycle": 8}.
        sources: where the facts come from.
        notes: what could not be found in a source.
        processor: of a CPU that hago runs on, its family: `x86`, `arm`, or `cpu` for any; else empty.
        origin: the file that it was read from; empty where it was built in Python.
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
        """The rule of an op with the form that this hardware computes it in; None for an unknown op.

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

    def computes(self, ops: Ops) -> Ops:
        """The ops, each with the form that this hardware computes it in."""
        named = {op for op, descs in self.ops.items() if op in ops and any(d.form for d in descs)}
        return {**ops, **{op: rule for op in named if (rule := self.rule(op, ops))}} if named else ops

    def integer_descs(self, op: str) -> tuple[OpDesc, ...]:
        """The integer signatures of `op`, preferred first."""
        return tuple(d for d in self.ops.get(op, ()) if d.is_integer)

    def float_descs(self, op: str, fits: bool = True) -> tuple[OpDesc, ...]:
        """The float signatures of `op`.

        Where it has none, `other_ops: float32` is one for an op that is not listed, and for a node
        that the listed signatures do not fit (`fits=False`). Those whose weight rests as integers are no
        float signatures.
        """
        listed = tuple(d for d in self.ops.get(op, ()) if not (d.is_integer or d.is_weight_only))
        if listed or self.other_ops != "float32" or (fits and op in self.ops):
            return listed
        return (OpDesc("float32", "float32", name="other_ops"),)


def create_sample_hardware() -> Hardware:
    """The RFC's own listing: int8 convolutions into int32, adds and activations on int32.

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
