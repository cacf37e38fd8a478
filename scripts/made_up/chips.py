"""Hardware made up for tests: every op with an integer form, on one kind of chip."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Final

from hago.arithmetic.numerics import BiasAt, Order, Overflow, Requantize
from hago.arithmetic.rounding import ROUNDINGS
from hago.arithmetic.types import DType, dtype
from hago.hardware import Accumulator, Groups, Hardware, OpDesc, TensorScheme
from hago.hardware.hardware import Granularity, RequantizeAt
from hago.ops import OPS, IntegerForm, OpRule, Ops

_FLOAT: Final = OpDesc("float32", "float32")


@dataclass(frozen=True)
class Chip:
    """The properties that a test varies.

    Args:
        operand: dtype of activations; weights are int8.
        register: dtype of sums.
        order, bias: where every addition saturates.
        floats: whether every op may run in float too.
        stored: dtype of weights of layers that compute in float, which are preferred where it is given.
        groups: of the weights of layers; with multipliers, of those that compute in integers.
    """

    operand: str = "int8"
    register: str = "int32"
    overflow: Overflow = "wrap"
    at: RequantizeAt = "edge"
    scheme: str = "hago"
    weight_scheme: str = "hago"
    granularity: Granularity = "per_tensor"
    requantize: Requantize = field(default_factory=Requantize)
    floats: bool = False
    min_bits: int = 3
    stored: str = ""
    order: Order | None = None
    bias: BiasAt | None = None
    groups: Groups | None = None

    def hardware(self, ops: Ops = OPS, name: str = "made_up") -> Hardware:
        """The Hardware that lists every op with an integer form."""
        listed = {n: self._in_groups(r, self._descs(r.integer)) for n, r in ops.items() if r.integer is not None}
        return Hardware(
            {n: (*self._weight_only(ops[n]), *d, *([_FLOAT] if self.floats else [])) for n, d in listed.items()},
            name=name,
            activation=TensorScheme(self.scheme),
            weight=TensorScheme(self.weight_scheme, self.granularity),
            requantize=self.requantize,
            known_ops=ops,
        )

    def _weight_only(self, rule: OpRule) -> tuple[OpDesc, ...]:
        if not (self.stored and has_weight(rule)):
            return ()
        return self._in_groups(rule, (weight_only(self.stored, self.min_bits),))

    def _in_groups(self, rule: OpRule, descs: tuple[OpDesc, ...]) -> tuple[OpDesc, ...]:
        """The signatures with the groups of the chip, where they have a weight that can have these."""
        groups = self.groups
        if groups is None or not has_groups(rule):
            return descs
        fits = [groups.multiplier_bits is not None if d.is_integer else groups.multiplier_bits is None for d in descs]
        return tuple(replace(d, groups=groups) if fit else d for d, fit in zip(descs, fits, strict=True))

    def _descs(self, form: IntegerForm) -> tuple[OpDesc, ...]:
        sums = Accumulator(dtype(self.register), self.overflow, self.order, self.bias)
        narrow = OpDesc(self.operand, self.operand, min_bits=self.min_bits)
        wide = OpDesc(
            self.register, self.register, sums, min_bits=self.min_bits, max_bits=min(23, dtype(self.register).bits)
        )
        into_sums = OpDesc(self.operand, self.register, sums, min_bits=self.min_bits)
        if form.table:
            return (OpDesc(self.operand, self.operand, requantize_at="output", min_bits=self.min_bits),)
        if form.slots == ("own", "plain"):
            return (narrow,)
        if form.slot(0) == "follow":
            return (narrow, wide) if form.outputs_fit_input_dtype else (into_sums, wide)
        if self.at == "output":
            listed = [self.operand] if form.slot(0) == "common" else [self.operand, "int8"]
            return (OpDesc(listed, self.operand, sums, "output", min_bits=self.min_bits),)
        if form.slot(0) == "common":
            return (narrow, wide) if form.outputs_fit_input_dtype else (wide,)
        return (OpDesc([self.operand, "int8"], self.register, sums, min_bits=self.min_bits),)


def has_weight(rule: OpRule) -> bool:
    """Whether an op reads a weight."""
    return rule.integer is not None and rule.integer.weight is not None


def has_groups(rule: OpRule) -> bool:
    """Whether the weight of an op can have groups."""
    return rule.weight is not None and rule.weight.sums_channels


def weight_only(stored: str, min_bits: int) -> OpDesc:
    """A signature in float whose weight, the second operand, rests as integers."""
    return OpDesc(["float32", stored], "float32", min_bits=min(min_bits, dtype(stored).bits))


def narrowed(desc: OpDesc, whole: DType, half: DType) -> list[OpDesc]:
    """A signature with fewer bits for its data, its result, or both."""
    first, *rest = desc.in_dtypes
    found = []
    for data, out in itertools.product(*((half, whole) if d == whole else (d,) for d in (first, desc.out_dtype))):
        emits = desc.requantize_at == "edge" and desc.out_dtype == whole
        if (data, out) != (first, desc.out_dtype) and (data == out or not emits):
            register = None if emits else desc.accumulator
            found.append(replace(desc, in_dtypes=(data, *rest), out_dtypes=out, accumulator=register))
    return found


_SHIFTS: Final = {
    f"shift_{r}": Chip("uint8" if r == "half_up" else "int8", requantize=Requantize("shift", r), floats=True)
    for r in ROUNDINGS
}
_MULTIPLIERS: Final = {
    f"multiplier_{r}": Chip(requantize=Requantize("multiplier_shift", r), granularity="per_channel") for r in ROUNDINGS
}
_FLOATS: Final = {
    f"float32_{r}": Chip(requantize=Requantize("float32", r), operand="uint8", granularity="per_channel")
    for r in ROUNDINGS
}
#: What the laws of exactness are tried on beside the hardware that ships.
CHIPS: Final = {
    **_SHIFTS,
    **_MULTIPLIERS,
    **_FLOATS,
    "affine_at_edge": Chip("uint8", scheme="affine", weight_scheme="symmetric", granularity="per_channel"),
    "affine_at_output": Chip("uint8", at="output", scheme="affine", weight_scheme="symmetric"),
    "hago_affine": Chip("uint8", scheme="hago_affine", granularity="per_channel"),
    "symmetric": Chip(scheme="symmetric", weight_scheme="symmetric"),
    "unsigned_symmetric": Chip("uint8", scheme="symmetric", weight_scheme="symmetric"),
    "at_output": Chip(at="output"),
    "unsigned_at_output": Chip("uint8", at="output", granularity="per_channel"),
    "two_stage": Chip(
        at="output",
        scheme="affine",
        weight_scheme="symmetric",
        granularity="per_channel",
        requantize=Requantize("multiplier_shift", "half_away", two_stage=True),
    ),
    "seven_bit_multiplier": Chip(requantize=Requantize("multiplier_shift", "half_up", multiplier_bits=7)),
    "shift_at_output": Chip(at="output", requantize=Requantize("shift", "half_up"), floats=True),
    "int16_wraps": Chip(register="int16"),
    "int16_saturates": Chip(register="int16", overflow="saturate_end", granularity="per_channel"),
    "int16_saturates_each": Chip(
        register="int16",
        overflow="saturate_each",
        order="channels_inner",
        bias="first",
        granularity="per_channel",
        floats=True,
    ),
    "uint8_saturates_each": Chip(
        "uint8", "int16", "saturate_each", "output", "affine", order="channels_outer", bias="last"
    ),
    "int24_wraps": Chip("uint8", "int24"),
    "wide_operands": Chip("int16", "int40"),
    "floats_too": Chip(floats=True),
    "groups": Chip("uint8", scheme="affine", weight_scheme="symmetric", granularity="per_channel", groups=Groups(4, 4)),
    "groups_in_int16": Chip(at="output", overflow="saturate_end", groups=Groups(3, 6, dtype("int16"))),
}
#: Those whose layers compute in float on weights that rest as integers.
STORED_CHIPS: Final = {
    "stored_int4": Chip(scheme="symmetric", weight_scheme="symmetric", granularity="per_channel", stored="int4"),
    "stored_uint8": Chip("uint8", scheme="affine", weight_scheme="affine", granularity="per_channel", stored="uint8"),
    "stored_shift": Chip(requantize=Requantize("shift", "half_up"), floats=True, stored="int8"),
    "stored_groups": Chip(weight_scheme="affine", granularity="per_channel", stored="uint4", groups=Groups(4)),
}


def only(hardware: Hardware, op: str) -> Hardware:
    """The hardware with nothing but the integer signatures of one op, which is then integer wherever it fits."""
    return replace(hardware, ops={op: hardware.integer_descs(op)})
