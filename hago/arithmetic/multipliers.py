"""Multipliers: real ratios of scales as an integer and a shift, `m * 2**-n`; one function for each way to choose them.

The numbered equations are in docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.rounding import round_half_away

#: Multipliers of 31 bits from here on would round up to 16 bits; they are cut to the largest of 15 bits.
_LARGEST_31: Final = 0x7FFF0000
_LARGEST_15: Final = 0x7FFF


def multiplier_and_shift(ratio: Tensor, bits: int = 31) -> tuple[Tensor, Tensor]:
    """Integers (m, n) with `m * 2**-n` nearest to `ratio`, m of exactly `bits` bits  (N4).

    References:
        TFLite `QuantizeMultiplier`: frexp, then the fraction rounded half away from zero.
    """
    fraction, exponent = torch.frexp(ratio.to(torch.float64))
    m = round_half_away(fraction * (1 << bits)).to(torch.int64)
    carry = m == 1 << bits
    m = torch.where(carry, m >> 1, m)
    return m, bits - (exponent.to(torch.int64) + carry)


def reduced_multiplier(ratio: Tensor, bits: int = 15) -> tuple[Tensor, Tensor]:
    """The nearest multiplier of 31 bits, rounded half up to 15 bits  (N4a).

    Args:
        bits: 15; no other number of bits is defined.

    References:
        TFLite `MultiplyByQuantizedMultiplier(int64_t, ...)`; CMSIS-NN `REDUCE_MULTIPLIER`.
    """
    m, n = multiplier_and_shift(ratio, 31)
    cut = torch.where(m >= _LARGEST_31, torch.full_like(m, _LARGEST_15), (m + (1 << 15)) >> 16)
    return cut, n - 16


def least_error_multiplier(ratio: Tensor, bits: int = 31, first: int = -32) -> tuple[Tensor, Tensor]:
    """The shift n from `first` to 30 with the least error, the first of equals, and `m = round(r * 2**n)`  (N4b).

    r is the ratio in float32; m rounds half away from zero and stays below `2**bits - 1`; the error
    `|m / 2**n - r|` is compared in float32. If no m fits, n is 0.

    References:
        TPU-MLIR `get_scale_and_shift` and `get_scale_and_shift_positive` (lib/Support/MathUtils.cpp).
    """
    shifts = torch.arange(first, 31, dtype=torch.float64)
    real = ratio.to(torch.float32).to(torch.float64)
    powers = torch.exp2(shifts)
    m = round_half_away(real.unsqueeze(-1) * powers)
    error = (m / powers - real.unsqueeze(-1)).abs().to(torch.float32)
    error = torch.where(m.abs() < (1 << bits) - 1, error, torch.inf)
    best = error.amin(-1, keepdim=True)
    chosen = torch.where((error == best) & torch.isfinite(best), shifts, torch.inf).amin(-1)
    chosen = torch.where(torch.isfinite(chosen), chosen, torch.zeros_like(chosen))
    return round_half_away(real * torch.exp2(chosen)).to(torch.int64), chosen.to(torch.int64)


def saturating_least_error_multiplier(ratio: Tensor, bits: int = 31) -> tuple[Tensor, Tensor]:
    """`least_error_multiplier`, but for a ratio that no m fits the largest m and the first n, which saturate every
    integer but 0, as the ratio would; TPU-MLIR has no such ratios."""
    first = -32
    m, n = least_error_multiplier(ratio, bits, first)
    beyond = (m < 0) | (m >= (1 << bits) - 1)  # below 0 beyond int64
    return torch.where(beyond, (1 << bits) - 1, m), torch.where(beyond, first, n)


MultiplierFunction = Callable[[Tensor, int], tuple[Tensor, Tensor]]

#: The functions by their names in hardware files; all give `ratio ~ m * 2**-n`.
MULTIPLIERS: Final[Mapping[str, MultiplierFunction]] = {
    "nearest": multiplier_and_shift,
    "reduced": reduced_multiplier,
    "least_error": saturating_least_error_multiplier,
}
