"""Count the values in which hago's requantization differs from exact integer and rational arithmetic.

Every form and rounding, on random accumulators, multipliers and shifts (and on ties, which random
ones rarely meet), against Python's own integers. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hago.arithmetic.multipliers import multiplier_and_shift
from hago.arithmetic.numerics import Requantize, requantize
from hago.arithmetic.rounding import ROUNDINGS, rounding_shift
from hago.arithmetic.types import INT8, INT16, INT32, DType, QParams
from hago.emulation import gemmlowp, tflite
from hago.emulation.tpu_mlir import numerics as tpu_mlir

#: Integers of Python in an array of numpy (dtype object): operators act on each, without a width.
Big = Any


@dataclass(frozen=True)
class Check:
    """One function and what it must equal, on columns of arguments."""

    name: str
    draw: Callable[[np.random.Generator, int], tuple[Tensor, ...]]
    got: Callable[..., Tensor]
    expected: Callable[..., Big]


def main() -> int:
    """Run every check; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="of each check")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'function':58} {'cases':>9} {'differ':>7} {'seconds':>8}")
    wrong = 0
    for check in checks():
        start = time.perf_counter()
        first = differences(check, options.cases, options.seed)
        wrong += len(first)
        print(f"{check.name:58} {options.cases:>9,} {len(first):>7,} {time.perf_counter() - start:>8.1f}", flush=True)
        for line in first[:3]:
            print(f"  {line}")
    return 1 if wrong else 0


def differences(check: Check, cases: int, seed: int) -> list[str]:
    """One line per case that differs."""
    arguments = check.draw(np.random.default_rng([seed, *check.name.encode()]), cases)
    got = big(check.got(*arguments))
    expected = check.expected(*(big(a) for a in arguments))
    return [
        f"arguments {[int(a[i]) for a in arguments]}: got {got[i]}, exact {expected[i]}"
        for i in np.flatnonzero(got != expected)
    ]


def big(t: Tensor) -> Big:
    """A tensor of integers as Python's integers."""
    return np.array([int(v) for v in t.reshape(-1).tolist()], dtype=object)


# ---------------------------------------------------------------- exact references
def round_half(numerator: Big, bits: Big | int, mode: str) -> Big:
    """`numerator / 2**bits` rounded to integers; bits may be negative."""
    return np.frompyfunc(partial(_round_one, mode=mode), 2, 1)(numerator, np.broadcast_to(bits, numerator.shape))


def _round_one(numerator: int, bits: int, mode: str) -> int:
    if bits <= 0:
        return numerator << -bits
    floor, rest = numerator >> bits, numerator & ((1 << bits) - 1)
    tie = 1 << (bits - 1)
    if mode == "floor":
        return floor
    if mode == "toward_zero":
        return floor + (rest != 0 and floor < 0)
    if rest != tie:
        return floor + (rest > tie)
    upper = {"half_even": floor % 2 == 1, "half_up": True, "half_down": False, "half_away": numerator > 0}
    return floor + upper[mode]


def wrap32(c: Big) -> Big:
    return (c + 2**31) % 2**32 - 2**31


def exact_high_mul(a: Big, b: Big, bits: int) -> Big:
    product = a * b
    nudge = np.where(product >= 0, 1 << (bits - 2), 1 - (1 << (bits - 2)))
    total = product + nudge
    high = np.where(total >= 0, abs(total) // 2 ** (bits - 1), -(abs(total) // 2 ** (bits - 1)))
    return np.minimum(high, 2 ** (bits - 1) - 1)


def exact_product(v: Big, m: Big, rshift: Big, mode: str) -> Big:
    return round_half(v * m, rshift, mode)


def exact_double(x: Big, m: Big, shift: Big) -> Big:
    left, right = np.maximum(shift, 0), np.maximum(-shift, 0)
    return round_half(exact_high_mul(wrap32(x * 2**left), m, 32), right, "half_away")


def exact_single(x: Big, m: Big, shift: Big) -> Big:
    return wrap32((x * m + 2 ** (30 - shift)) // 2 ** (31 - shift))


def exact_int64(x: Big, m: Big, shift: Big) -> Big:
    reduced = np.where(m >= 0x7FFF0000, 0x7FFF, (m + 2**15) // 2**16)
    return wrap32((x * reduced + 2 ** (14 - shift)) // 2 ** (15 - shift))


# ---------------------------------------------------------------- arguments
def _wide(rng: np.random.Generator, count: int, bits: int) -> Tensor:
    """Signed integers of every magnitude up to `bits` bits, the extremes among them."""
    widths = rng.integers(1, bits, count)
    values = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), count, dtype=np.int64) >> (bits - 1 - widths)
    edges = np.array([0, 1, -1, (1 << (bits - 1)) - 1, -(1 << (bits - 1)), 1 << (bits - 2)])
    where = rng.random(count) < 0.02
    values[where] = rng.choice(edges, int(where.sum()))
    return torch.from_numpy(values)


def _two_wide(rng: np.random.Generator, count: int, bits: int) -> tuple[Tensor, ...]:
    return _wide(rng, count, bits), _wide(rng, count, bits)


def _multipliers(rng: np.random.Generator, count: int) -> Tensor:
    """Mostly the 31-bit ones that engines have, some of any size, some powers of two (which give ties)."""
    m = rng.integers(1 << 30, 1 << 31, count)
    kind = rng.random(count)
    m = np.where(kind < 0.3, 1 << rng.integers(0, 31, count), m)
    return torch.from_numpy(np.where(kind > 0.9, rng.integers(0, 1 << 31, count), m).astype(np.int64))


def _shifts(rng: np.random.Generator, count: int, low: int, high: int) -> Tensor:
    return torch.from_numpy(rng.integers(low, high + 1, count))


def _signed(rng: np.random.Generator, t: Tensor) -> Tensor:
    return torch.where(torch.from_numpy(rng.random(t.numel()) < 0.2), -t, t)


# ---------------------------------------------------------------- the checks
def checks() -> Iterator[Check]:
    """Every function that this file knows how to check."""
    yield from engine_checks()
    for mode in ROUNDINGS:
        yield Check(
            f"rounding_shift {mode}",
            lambda rng, n: (_wide(rng, n, 62), _shifts(rng, n, 0, 62)),
            partial(rounding_shift, rounding=mode),
            partial(round_half, mode=mode),
        )
    for bits in (7, 15, 31):
        for mode in ROUNDINGS:
            yield requantize_check(Requantize("multiplier_shift", mode, bits))
    yield requantize_check(Requantize("multiplier_shift", "half_up", 31, two_stage=True))
    for mode in ROUNDINGS:
        yield requantize_check(Requantize("shift", mode))
        yield requantize_check(Requantize("float32", mode))


def engine_checks() -> Iterator[Check]:
    for bits in (16, 32):
        yield Check(
            f"gemmlowp SaturatingRoundingDoublingHighMul int{bits}",
            partial(_two_wide, bits=bits),
            partial(gemmlowp.saturating_rounding_doubling_high_mul, bits=bits),
            partial(exact_high_mul, bits=bits),
        )
    yield Check(
        "gemmlowp RoundingDivideByPOT",
        lambda rng, n: (_wide(rng, n, 32), _shifts(rng, n, 0, 31)),
        gemmlowp.rounding_divide_by_pot,
        partial(round_half, mode="half_away"),
    )
    for rounding, exact in (("double", exact_double), ("single", exact_single)):
        yield Check(
            f"tflite MultiplyByQuantizedMultiplier {rounding}",
            lambda rng, n: (_wide(rng, n, 32), _signed(rng, _multipliers(rng, n)), _shifts(rng, n, -31, 30)),
            partial(tflite.multiply_by_quantized_multiplier, rounding=rounding),  # type: ignore[arg-type]
            exact,
        )
    yield Check(
        "tflite MultiplyByQuantizedMultiplier int64",
        lambda rng, n: (_wide(rng, n, 48), _multipliers(rng, n), _shifts(rng, n, -31, 7)),
        tflite.multiply_by_quantized_multiplier_int64,
        exact_int64,
    )
    for mode in ROUNDINGS:
        yield Check(
            f"tpu-mlir applyMultiplierAndRShift {mode}",
            lambda rng, n: (_wide(rng, n, 31), _signed(rng, _multipliers(rng, n)), _shifts(rng, n, 0, 62)),
            partial(tpu_mlir.apply_multiplier_and_rshift, rounding=mode),
            partial(exact_product, mode=mode),
        )


def requantize_check(how: Requantize) -> Check:
    """hago's own requantize with a random ratio of scales, exact in float32, into a random width."""
    bits = f"{how.multiplier_bits} bits " if how.form == "multiplier_shift" else ""
    name = f"requantize {how.form} {bits}{'in two stages' if how.two_stage else how.rounding}"
    exact = partial(_exact_requantize, how=how)
    return Check(name, partial(_draw_ratio, how=how), partial(_requantize, how=how), exact)


_TARGETS: tuple[DType, ...] = (INT8, INT16, INT32)


def _draw_ratio(rng: np.random.Generator, n: int, how: Requantize) -> tuple[Tensor, ...]:
    """Accumulators, the 24-bit fraction and the exponent of a ratio, a zero point, and the target's index."""
    largest = 24 if how.form != "multiplier_shift" else 31
    fraction = np.where(rng.random(n) < 0.4, 1 << 23, rng.integers(1 << 23, 1 << 24, n))
    if how.power_of_two:
        fraction = np.full(n, 1 << 23)
    # Two stages shift left inside int32 first, so their ratios stay below 2; the others reach 128.
    exponent = _shifts(rng, n, 0 if how.two_stage else -6, 30)
    zero = torch.from_numpy(rng.integers(-128, 128, n))
    return _wide(rng, n, largest), torch.from_numpy(fraction), exponent, zero, _shifts(rng, n, 0, 2)


def _scale(fraction: Tensor, exponent: Tensor) -> Tensor:
    return fraction.to(torch.float64) / (1 << 23) * torch.exp2(-exponent.to(torch.float64))


def _requantize(c: Tensor, fraction: Tensor, exponent: Tensor, zero: Tensor, index: Tensor, how: Requantize) -> Tensor:
    out = torch.empty_like(c)
    for i, dtype in enumerate(_TARGETS):
        some = index == i
        source = QParams(_scale(fraction, exponent)[some], torch.zeros_like(c[some]), INT32.min, INT32.max, INT32)
        target = QParams(torch.ones(1, dtype=torch.float64), zero[some], dtype.min, dtype.max, dtype)
        out[some] = requantize(c[some], source, target, how)
    return out


def _exact_requantize(c: Big, fraction: Big, exponent: Big, zero: Big, index: Big, how: Requantize) -> Big:
    ratio = [Fraction(int(f), 1 << 23) / Fraction(2) ** int(e) for f, e in zip(fraction, exponent, strict=True)]
    if how.form == "multiplier_shift":
        real = torch.tensor([float(r) for r in ratio], dtype=torch.float64)
        m, n = (big(t) for t in multiplier_and_shift(real, how.multiplier_bits))
        _require_nearest(m, n, ratio, how.multiplier_bits)
        rounded = exact_double(c, m, 31 - n) if how.two_stage else round_half(c * m, n, how.rounding)
    elif how.form == "shift":
        rounded = round_half(c, exponent, how.rounding)
    else:
        # Two 24-bit factors multiply exactly in float64; float32 rounds that once, and then has 2**-149 steps.
        products = [np.float32(float(int(a)) * float(r)) for a, r in zip(c, ratio, strict=True)]
        numerators = np.array([int(Fraction(float(p)) * (1 << 149)) for p in products], dtype=object)
        rounded = round_half(numerators, 149, how.rounding)
    low = np.array([_TARGETS[i].min for i in index], dtype=object) - zero
    high = np.array([_TARGETS[i].max for i in index], dtype=object) - zero
    return np.minimum(np.maximum(rounded, low), high)


def _require_nearest(m: Big, n: Big, ratio: list[Fraction], bits: int) -> None:
    """The multiplier has exactly `bits` bits and is the nearest that has."""
    for mi, ni, r in zip(m, n, ratio, strict=True):
        error = abs(Fraction(int(mi)) - r * Fraction(2) ** int(ni))
        if not (1 << (bits - 1)) <= mi < (1 << bits) or error > Fraction(1, 2):
            raise AssertionError(f"{r} became {mi} / 2**{ni}, which is not the nearest of {bits} bits")


if __name__ == "__main__":
    sys.exit(main())
