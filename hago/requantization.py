"""Requantize: how a piece of hardware moves an integer from one scale to another. `numerics` does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from hago.errors import HagoError, did_you_mean
from hago.multipliers import MULTIPLIERS
from hago.rounding import ROUNDINGS
from hago.types import DType

Form = Literal["float32", "onnxruntime", "multiplier_shift", "shift"]


@dataclass(frozen=True, slots=True)
class Requantize:
    """How a piece of hardware moves an integer from one scale to another.

    Args:
        form: `float32` multiplies by a float32 ratio of scales; `onnxruntime` by a float32 ratio of
            scales that are themselves float32; `multiplier_shift` by an integer and a right shift;
            `shift` by a power of two only.
        rounding: how ties (and, for the last two modes, everything) round.
        multiplier_bits: magnitude bits of the integer multiplier (31 in TFLite, 7 or 31 in TPU-MLIR).
        two_stage: TFLite's double rounding: a doubling high multiply, then a rounding shift.
        search: how the multiplier is found: a name in MULTIPLIERS.
        shift_rounding: how the shift of one stage rounds, where it differs from everything else.
        wide: `reduced`: registers of more than 32 bits take a multiplier cut to 15 bits, rounded half up
            once (TFLite, CMSIS-NN); None: they are as others.
    """

    form: Form = "float32"
    rounding: str = "half_even"
    multiplier_bits: int = 31
    two_stage: bool = False
    search: str = "nearest"
    shift_rounding: str | None = None
    wide: str | None = None

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise HagoError(f"unknown requantize form {self.form!r}." + did_you_mean(self.form, get_args(Form)))
        if self.rounding not in ROUNDINGS:
            raise HagoError(
                f"unknown rounding {self.rounding!r}; known: {', '.join(ROUNDINGS)}."
                + did_you_mean(self.rounding, ROUNDINGS)
            )
        if not 2 <= self.multiplier_bits <= 31:
            raise HagoError(f"multiplier_bits is {self.multiplier_bits}; expected 2 to 31")
        if self.wide not in (None, "reduced"):
            raise HagoError(f"unknown rule for wide registers {self.wide!r}; expected 'reduced'")
        if self.shift_rounding is not None and self.shift_rounding not in ROUNDINGS:
            raise HagoError(f"unknown rounding {self.shift_rounding!r}." + did_you_mean(self.shift_rounding, ROUNDINGS))
        if self.search not in MULTIPLIERS:
            raise HagoError(
                f"unknown search of a multiplier {self.search!r}; known: {', '.join(MULTIPLIERS)}."
                + did_you_mean(self.search, MULTIPLIERS)
            )

    @property
    def power_of_two(self) -> bool:
        """Whether only power-of-two ratios of scales can be expressed."""
        return self.form == "shift"

    def of_register(self, dtype: DType) -> Requantize:
        """What holds for integers that leave a register of that dtype."""
        if self.wide is None or dtype.bits <= 32:
            return self
        return Requantize(self.form, self.rounding, 15, False, "reduced", "half_up")

    def multiplier(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Integers (m, n) that stand for ratios of scales as `m * 2**-n`, in the form multiplier_shift."""
        return MULTIPLIERS[self.search](ratio, self.multiplier_bits)
