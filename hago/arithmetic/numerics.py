"""The exact arithmetic of hago: round, wrap, saturate, quantize, requantize, dequantize.

Values are *centered integers* `c = q - zero_point`, held in an integer tensor (int64) or in a float tensor (the
simulator's carrier). Every function gives the same integers on both, so the simulator and the integer model agree.
The numbered equations are in docs/numerics.md.

Values are centered because every form rounds before it adds the zero point. So the zero point only moves the clipping
range, and padding is always 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from hago.arithmetic.groups import spread
from hago.arithmetic.multipliers import MULTIPLIERS
from hago.arithmetic.rounding import ROUNDINGS, rounding_shift, saturating_shift
from hago.arithmetic.types import INT16, DType, QParams, SimQ
from hago.arithmetic.types import dtype as named_dtype
from hago.errors import HagoError, did_you_mean

RequantizeForm = Literal["float32", "onnxruntime", "multiplier_shift", "shift"]


@dataclass(frozen=True, slots=True)
class Requantize:
    """The arithmetic with which a piece of hardware converts integers from one scale to another.

    Args:
        form: `float32` multiplies by a float32 ratio of scales; `onnxruntime` by a float32 ratio of
            scales that are themselves float32; `multiplier_shift` by an integer and a right shift;
            `shift` by a power of two only.
        rounding: the rounding of all conversions, a name in `rounding.ROUNDINGS`.
        multiplier_bits: magnitude bits of the integer multiplier (31 in TFLite, 7 or 31 in TPU-MLIR).
        two_stage: whether rounding is TFLite's: a doubling high multiply that rounds, then a rounding shift.
        search: the function that chooses the multiplier, a name in `multipliers.MULTIPLIERS`.
        shift_rounding: the rounding of the shift if there is one stage; None for `rounding`.
        wide: `reduced` if registers of more than 32 bits take a multiplier of 15 bits and one rounding half up
            (TFLite, CMSIS-NN); None if they take the same as other registers.
    """

    form: RequantizeForm = "float32"
    rounding: str = "half_even"
    multiplier_bits: int = 31
    two_stage: bool = False
    search: str = "nearest"
    shift_rounding: str | None = None
    wide: str | None = None

    def __post_init__(self) -> None:
        if self.form not in get_args(RequantizeForm):
            raise HagoError(
                f"unknown requantize form {self.form!r}." + did_you_mean(self.form, get_args(RequantizeForm))
            )
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
        """Whether ratios of scales must be powers of two."""
        return self.form == "shift"

    def of_register(self, dtype: DType) -> Requantize:
        """The arithmetic for integers that leave a register of that dtype."""
        if self.wide is None or dtype.bits <= 32:
            return self
        return Requantize(self.form, self.rounding, 15, False, "reduced", "half_up")

    def multiplier(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Integers (m, n) that represent ratios of scales as `m * 2**-n`, in the form multiplier_shift."""
        return MULTIPLIERS[self.search](ratio, self.multiplier_bits)


# ---------------------------------------------------------------- types and exact ranges

#: The name of a register's behaviour past its range; `OVERFLOWS` says what each does.
Overflow = Literal["wrap", "saturate_end", "saturate_pairs", "wrap_pairs", "saturate_each"]
#: The order in which products are added if every addition saturates: channel by channel, with all positions of the
#: window for each (channels_outer), or position by position, with all channels for each (channels_inner).
Order = Literal["channels_outer", "channels_inner"]
#: Whether the bias is the first addend or the last, if every addition saturates.
BiasAt = Literal["first", "last"]

#: From integers or real values to those of an edge's target.
Conversion = Callable[[Tensor], Tensor]

#: float32 holds every integer up to this one exactly.
EXACT_FLOAT32: Final = 1 << 24
#: And float64 up to this one. Simulations hold no larger sums.
EXACT_FLOAT64: Final = 1 << 53
#: Larger ratios of scales, which float32 may not hold, count as this one: it saturates every integer but 0, too.
MOST_RATIO: Final = 2.0**120
#: Values that are multiplied and shifted at a time, so that a dozen passes over them stay in a core's cache.
BLOCK: Final = 1 << 18
#: With a normalized multiplier of 31 bits, the high half of the product of a larger integer saturates.
_SATURATED: Final = 1 << 32
#: float64 holds the product of an integer below this one and a multiplier of 31 bits, plus a half, exactly.
_DIRECT: Final = (1 << 22) - 1


def extremes(c: Tensor) -> tuple[float, float]:
    """The smallest and the largest value; (0, 0) if there are no values."""
    if not c.numel():
        return 0.0, 0.0
    # in the order of memory: torch would copy a tensor of another layout
    low, high = torch.aminmax(c.permute(sorted(range(c.ndim), key=c.stride, reverse=True)))
    return float(low), float(high)


# ---------------------------------------------------------------- overflow
def wrap(c: Tensor, dtype: DType) -> Tensor:
    """Reduce `c` modulo 2**bits into the range of `dtype`, as two's complement registers do.

    Args:
        c: int64, or floats that hold integers exactly; NaN stays NaN.

    Returns:
        `c` itself if nothing wraps.
    """
    if dtype.bits == 64:
        return c
    size = 1 << dtype.bits
    if c.is_floating_point():
        low, high = extremes(c)
        if dtype.min <= low and high <= dtype.max:
            return c  # the check takes one pass over memory, wrapping takes four
        turns = (c / size).add_(0.5 if dtype.signed else 0.0).floor_()
        return torch.add(c, turns, alpha=-size)
    return torch.bitwise_and(c - dtype.min, size - 1) + dtype.min


def saturate(c: Tensor, dtype: DType) -> Tensor:
    """Clamp `c` to the range of `dtype`."""
    return c if dtype.bits == 64 else c.clamp(dtype.min, dtype.max)


def overflowed(c: Tensor, dtype: DType) -> Tensor:
    """The number of entries of `c` that do not fit `dtype`, as an int64 scalar."""
    return ((c < dtype.min) | (c > dtype.max)).sum()


@dataclass(frozen=True, slots=True)
class OverflowBehaviour:
    """The behaviour of a register past its range; an entry of `OVERFLOWS`.

    Args:
        verb: the behaviour in a message about the register: "wraps".
        of_sum: the value that the register holds after an exact sum.
        of_pair: for chips that add neighbouring products in 16 bits first: the value of such a sum, of which the
            register adds up the results. None for chips that add every product to the register.
        at_every_addition: whether the register saturates at every addition, so that the order of additions matters and
            hardware files state it.
        counts_zero_points: whether sums of stored integers, zero points included, must fit the register: what is lost
            of them cannot be corrected after the sum, as it can where registers wrap.
    """

    verb: str
    of_sum: Callable[[Tensor, DType], Tensor]
    of_pair: Callable[[Tensor], Tensor] | None = None
    at_every_addition: bool = False
    counts_zero_points: bool = False


#: The behaviours of registers past their range, by the name that hardware files give them.
OVERFLOWS: Final[Mapping[str, OverflowBehaviour]] = {
    "wrap": OverflowBehaviour("wraps", wrap),
    "saturate_end": OverflowBehaviour("saturates", saturate, counts_zero_points=True),
    "saturate_pairs": OverflowBehaviour("saturates in pairs", wrap, of_pair=lambda p: saturate(p, INT16)),
    "wrap_pairs": OverflowBehaviour("wraps in pairs", wrap, of_pair=lambda p: wrap(p, INT16)),
    "saturate_each": OverflowBehaviour("saturates at every addition", saturate, at_every_addition=True),
}


def overflow_behaviour(overflow: str) -> OverflowBehaviour:
    """The entry of `OVERFLOWS` with that name.

    Raises:
        HagoError: there is none.
    """
    if overflow not in OVERFLOWS:
        raise HagoError(
            f"unknown overflow {overflow!r}; known: {', '.join(OVERFLOWS)}." + did_you_mean(overflow, OVERFLOWS)
        )
    return OVERFLOWS[overflow]


def apply_overflow(c: Tensor, dtype: DType, overflow: Overflow) -> Tensor:
    """The value that a register of `dtype` holds after the exact sum `c`: saturated or wrapped.

    If pairs of products saturate, the register that adds them wraps. If every addition saturates, the sum of two
    values saturates once; longer sums are computed by `saturate_each`. See `hago.plan.accumulators`.

    Raises:
        HagoError: there is no such overflow.
    """
    return overflow_behaviour(overflow).of_sum(c, dtype)


def saturate_each(terms: Tensor, dtype: DType) -> Tensor:
    """The value of a register of `dtype` that starts at 0, adds the terms one by one and saturates each time  (N15).

    Args:
        terms: (K, ...), in the order of additions, in an integer type that holds the sum of their magnitudes.

    Returns:
        A new tensor of the shape of one term.
    """
    held = torch.zeros_like(terms[0])
    for term in terms:
        held = saturate(held.add_(term), dtype)
    return held


@dataclass(frozen=True, slots=True, eq=False)
class Lost:
    """The effect of partial sums that overflowed, on the accumulators of one node. Made by `NodePlan.lost`.

    Args:
        amount: int64, the difference of every accumulator from its exact sum.
        cut: whether a partial sum of the accumulator overflowed, even if the differences cancel out.
        peak: the largest partial sum, relative to the largest value of the register that holds it.
    """

    amount: Tensor
    cut: Tensor
    peak: float


# ---------------------------------------------------------------- requantization
def clip_range(target: QParams) -> tuple[Tensor | int, Tensor | int]:
    """The range of the centered integers: `qmin - zero_point` and `qmax - zero_point`."""
    if target.zero_point.numel() == 1:
        zero = int(target.zero_point.item())
        return target.qmin - zero, target.qmax - zero
    return target.qmin - target.zero_point, target.qmax - target.zero_point


def passes_float32(target: QParams) -> bool:
    """Whether the range of the centered integers, or its width, exceeds the integers that float32 holds exactly."""
    ends = [int(v.abs().max()) if isinstance(v, Tensor) else abs(v) for v in clip_range(target)]
    return max(*ends, target.qmax - target.qmin) > EXACT_FLOAT32


def _clip(c: Tensor, target: QParams) -> Tensor:
    low, high = clip_range(target)
    if c.dtype == torch.float32 and passes_float32(target):
        c = c.to(torch.float64)  # float32 would round a limit such as 2**31 - 1 up
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low, high = torch.as_tensor(low), torch.as_tensor(high)
        return torch.minimum(torch.maximum(c, low.to(c.dtype)), high.to(c.dtype))
    return c.clamp_(low, high)


def _number(t: Tensor) -> Tensor | float:
    """A Python number if the tensor holds only one value: multiplying by it reads no memory."""
    return float(t.item()) if t.numel() == 1 else t


def quantize(x: Tensor, target: QParams, rounding: str = "half_even") -> Tensor:
    """Quantize real values to centered integers: `clip(round(x / float32(scale)))`  (N1).

    NaN becomes the smallest integer, as in PyTorch's `fake_quantize` and ONNX Runtime's QuantizeLinear. It occurs when
    a float node divides 0 by a divisor that was rounded to 0.

    Args:
        x: float32 of any shape that the scale broadcasts against, or float64 (then the division
            is done in float64: weights and biases, offline).

    Returns:
        A new tensor of `x`'s dtype holding integers.
    """
    target = target.spread_over(x.shape)
    rounded = ROUNDINGS[rounding](x / _number(target.scale.to(x.dtype)))
    return _clip(rounded.nan_to_num_(-math.inf, math.inf, -math.inf), target)


def dequantize(c: Tensor, source: QParams) -> Tensor:
    """Dequantize centered integers to float32: `float32(c) * float32(scale)`  (N2)."""
    scale = source.scale.to(torch.float32)
    return c.to(torch.float32) * _number(scale if source.group is None else spread(scale, c.shape, source.group))


def ratio(source: QParams, target: QParams) -> Tensor:
    """`float64(source.scale) / float64(target.scale)`, at most MOST_RATIO."""
    return (source.scale / target.scale).clamp_max(MOST_RATIO)


def ratio_of_float32(source: QParams, target: QParams) -> Tensor:
    """`float32(source.scale) / float32(target.scale)` in float32, at most MOST_RATIO  (N10).

    References:
        ONNX Runtime, qlinearconv.cc and quantize_linear_matmul.cc: the product of the scales of both
        operands is a float32, and so is its quotient by the scale of the output.
    """
    return (source.scale.to(torch.float32) / target.scale.to(torch.float32)).clamp_max(MOST_RATIO)


def doubling_high_multiply(a: Tensor, m: Tensor) -> Tensor:
    """`round(a * m / 2**31)`, ties toward +infinity, at most 2**31 - 1  (N5).

    Args:
        a: int64, |a| <= 2**32.
        m: int64, from 0 to 2**31 - 1.

    References:
        gemmlowp `SaturatingRoundingDoublingHighMul`.
    """
    return rounding_shift(a * m, torch.full_like(m, 31), "half_up").clamp_max((1 << 31) - 1)


def multiply_by_quantized_multiplier(c: Tensor, m: Tensor, n: Tensor, how: Requantize) -> Tensor:
    """`c * m * 2**-n` in int64, with the rounding of the hardware  (N4, N5).

    Args:
        c: int64, |c| < 2**31.
        m, n: from `Requantize.multiplier`; broadcast against c.
    """
    return _in_blocks(lambda part: _multiplied(part, m, n, how), c, m, n, dtype=torch.int64)


def _multiplied(c: Tensor, m: Tensor, n: Tensor, how: Requantize) -> Tensor:
    """`multiply_by_quantized_multiplier` of one block."""
    if not how.two_stage:
        return rounding_shift(c * m, n, how.shift_rounding or how.rounding)
    high = doubling_high_multiply(saturating_shift(c, 31 - n, _SATURATED), m)
    return rounding_shift(high, (n - 31).clamp_min(0), "half_away")


def largest_requantized(register: DType, how: Requantize) -> int:
    """The largest magnitude in a register that is requantized exactly: float64 holds it, and 64 bits hold its product
    with a multiplier."""
    how = how.of_register(register)
    return 1 << (63 - how.multiplier_bits) if how.form == "multiplier_shift" else EXACT_FLOAT64


def requantize(c: Tensor, source: QParams, target: QParams, how: Requantize) -> Tensor:
    """Requantize centered integers from `source.scale` to `target.scale`, and clip them.

    float32 (N3): `clip(round(float32(c) * float32(s_in / s_out)))`; onnxruntime: the same with N10;
    shift (N6): the ratio is `2**-n`, exact in the carrier; multiplier_shift: N4, N5.

    Args:
        c: an integer tensor, or a float carrier that holds integers exactly.

    Returns:
        A new tensor: float where `c` is float, int64 where `c` is an integer tensor.
    """
    return requantization(source, target, how)(c)


def requantization(source: QParams, target: QParams, how: Requantize) -> Conversion:
    """`requantize` as a function of c alone. What depends on the scales is computed once, for any number of tensors."""
    r = ratio_of_float32(source, target) if how.form == "onnxruntime" else ratio(source, target)
    if how.form == "multiplier_shift":
        if source.scale is target.scale:  # the ratio is 1 and c does not change
            return lambda c: _clip(c.clone(), target)
        return _multiplication_and_shift(source, target, r, how.of_register(source.dtype))
    fewest, most = extremes(-torch.log2(r)) if how.form == "shift" else (0.0, 0.0)

    def compute(c: Tensor) -> Tensor:
        exact = c.dtype if c.is_floating_point() else torch.float64
        carrier = c.to(exact if how.form == "shift" else torch.float32)
        adds = fewest >= 1 and most <= _fraction_bits(carrier.dtype)
        out = _clip(_scaled(carrier, r, how.rounding, adds), target)
        return out if c.is_floating_point() else out.to(torch.int64)

    return compute


def _scaled(c: Tensor, r: Tensor, rounding: str, adds: bool) -> Tensor:
    """`round(c * r)` in the dtype of c.

    Args:
        adds: whether rounding half up may be computed as `floor(x + 1/2)`. That is wrong only if the sum itself rounds
            up to an integer, which it cannot if c * r is an integer below 2**f times 2**-n, with f the fraction bits
            of the dtype and 1 <= n <= f.
    """
    x = c * _number(r.to(c.dtype))
    return x.add_(0.5).floor_() if adds and rounding == "half_up" else ROUNDINGS[rounding](x)


def _multiplication_and_shift(source: QParams, target: QParams, r: Tensor, how: Requantize) -> Conversion:
    """Requantization in the form multiplier_shift. A carrier stays in float64 if that holds the products: it is
    faster."""
    # the one scale of a layer of one channel has the dimensions of its weight, which values that are reshaped lose
    m, n = (t.reshape(()) if t.numel() == 1 else t for t in how.multiplier(r))
    product = _one_product(source.dtype, m, n, how, target) or _any_product(source.dtype, m, n, how)

    def compute(c: Tensor) -> Tensor:
        if not c.is_floating_point():
            return _clip(multiply_by_quantized_multiplier(c.to(torch.int64), m, n, how), target)
        kept = torch.float64 if passes_float32(target) else c.dtype
        zero = torch.as_tensor(target.zero_point)
        return _in_blocks(lambda part: _clip(product(part), target), c, m, n, target.scale, zero, dtype=kept)

    return compute


def _one_product(dtype: DType, m: Tensor, n: Tensor, how: Requantize, target: QParams) -> Conversion | None:
    """`multiply_by_quantized_multiplier` as one product in float64, for values that are clipped to `target` next.

    The product x = c * m * 2**-n and its sum with a multiple of 2**-n below 1 are exact in float64 if
    |x| + 1 <= 2**(53 - n). That holds for the products that matter if it holds for 2**b, with b the bits of the largest
    magnitude in the range of the target: a product that is larger may be rounded, but not below 2**b, and is clipped.

    In two stages with s = n - 31, ties first toward +infinity and then away from zero, x >= 0 becomes
    floor(x + 1/2 + 2**-(s+1)), or floor(x + 1/2) for s = 0. A negative x takes both stages.

    Returns:
        A function of integers c of `dtype` on a float carrier, or None if float64 does not hold the products.
    """
    low, high = clip_range(target)
    if isinstance(low, Tensor) or isinstance(high, Tensor) or dtype.bits > 32:
        return None
    least, bits = 31 if how.two_stage else 1, max(abs(low), abs(high)).bit_length()
    if not _between(n, least, 52 - bits):
        return None
    scale = torch.ldexp(m.to(torch.float64), -n)
    if not how.two_stage:
        rounding = how.shift_rounding or how.rounding
        return lambda c: _scaled(c.to(torch.float64), scale, rounding, adds=True)
    if low < 0:
        return _stages(_rounded_product(m), n)
    # negative products are clipped to `low`, so that their ties do not matter
    up = torch.where(n > 31, torch.ldexp(torch.ones_like(scale), 30 - n), torch.zeros_like(scale)) + 0.5
    return lambda c: _multiply_add(c, scale, up).floor_()


def multiply_carrier(c: Tensor, m: Tensor, n: Tensor, how: Requantize, left: int = 0) -> Tensor:
    """`multiply_by_quantized_multiplier` of `c << left`, where c are integers on a float carrier, as float64 integers.

    Args:
        c: |c << left| < 2**31.
    """
    product = _two_products(m, n, how, left)

    def compute(part: Tensor) -> Tensor:
        if product is not None:
            return product(part)
        return _multiplied(part.to(torch.int64) << left, m, n, how).to(torch.float64)

    return _in_blocks(compute, c, m, n, dtype=torch.float64)


def _any_product(dtype: DType, m: Tensor, n: Tensor, how: Requantize) -> Conversion:
    """`multiply_by_quantized_multiplier` of integers of `dtype` on a float carrier, not yet clipped."""
    split = _two_products(m, n, how) if dtype.bits <= 32 else None
    scale, adds = torch.ldexp(m.to(torch.float64), -n), _between(n, 1, 53)

    def compute(c: Tensor) -> Tensor:
        if not how.two_stage and _products_fit(c, dtype, how.multiplier_bits):
            return _scaled(c.to(torch.float64), scale, how.shift_rounding or how.rounding, adds)
        return _multiplied(c.to(torch.int64), m, n, how) if split is None else split(c)

    return compute


def _two_products(m: Tensor, n: Tensor, how: Requantize, left: int = 0) -> Conversion | None:
    """`multiply_by_quantized_multiplier` as two products in float64, several times faster than in int64.

    Args:
        left: the integers are shifted left by so many bits before they are multiplied.

    Returns:
        A function of integers c on a float carrier, |c << left| <= 2**31, or None if the shift or the rounding cannot
        be computed in float64.
    """
    if how.two_stage:
        return _stages(_first_stage(m, left), n) if _between(n, 31, 62) else None
    rounding = how.shift_rounding or how.rounding
    if not _between(n, 17, 52) or rounding not in ("half_up", "half_away"):
        return None

    def compute(c: Tensor) -> Tensor:
        x = c.to(torch.float64) * float(1 << left)
        return _shifted_product(x, m, n) if rounding == "half_up" else _shifted_product(x.abs(), m, n).copysign_(x)

    return compute


def _stages(first: Conversion, n: Tensor) -> Conversion:
    """`round(high / 2**(n - 31))` of the result `high` of the first stage, ties away from zero.

    A factor slightly above 1 moves ties away from zero and makes no new ties: |high| < 2**32, and any other value is at
    least 2**(31 - n) away from a tie.

    Args:
        first: returns a new tensor of float64 integers.
        n: int64, 31 to 62.
    """
    factor = torch.ldexp(torch.full_like(n, 1.0 + 2.0**-33, dtype=torch.float64), 31 - n)
    return lambda c: first(c).mul_(factor).round_()


def _first_stage(m: Tensor, left: int = 0) -> Conversion:
    """`doubling_high_multiply` of `c << left` in float64, which holds products of 31 bits and fewer than 23 bits
    exactly."""
    product, n = _rounded_product(m, left), torch.full_like(m, 31)

    def compute(c: Tensor) -> Tensor:
        if _magnitude(c) < _DIRECT:
            return product(c)
        x = c.to(torch.float64)
        return _shifted_product(x * float(1 << left) if left else x, m, n)

    return compute


def _rounded_product(m: Tensor, left: int = 0) -> Conversion:
    """`doubling_high_multiply` of `c << left` in float64, exact where c * m + 1/2 is."""
    factor, half = m.to(torch.float64) * 2.0 ** (left - 31), torch.full_like(m, 0.5, dtype=torch.float64)
    return lambda c: _multiply_add(c, factor, half).floor_()


def _multiply_add(c: Tensor, factor: Tensor, term: Tensor) -> Tensor:
    """`c * factor + term` as a new tensor in float64.

    Args:
        factor, term: of the same shape, float64.
    """
    x = c.to(torch.float64, copy=True)
    if factor.numel() == 1:
        return x.mul_(float(factor.item())).add_(float(term.item()))
    return torch.addcmul(term, x, factor, out=x)


def _shifted_product(c: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """`floor((c * m + 2**(n - 1)) / 2**n)`, exact in float64 though the product has 62 bits.

    With m = 2**16 * a + b, it is `floor((c * a + floor((c * b + 2**(n - 1)) / 2**16)) / 2**(n - 16))`, where every
    product and sum is a multiple of 2**-16 below 2**37, or an integer below 2**53.

    Args:
        c: float64 integers, |c| <= 2**31.
        m: int64, below 2**31.
        n: int64, 17 to 52.
    """
    one, b = torch.ones_like(n, dtype=torch.float64), (m & 0xFFFF).to(torch.float64)
    low = _multiply_add(c, b * 2.0**-16, torch.ldexp(one, n - 17)).floor_()
    return low.addcmul_(c, (m >> 16).to(torch.float64)).mul_(torch.ldexp(one, 16 - n)).floor_()


def _products_fit(c: Tensor, dtype: DType, bits: int) -> bool:
    """Whether float64 holds the product of every c, centered integers of `dtype`, and a multiplier of `bits`."""
    largest = 2.0**dtype.bits
    if largest * 2.0**bits > 2.0**53:
        largest = _magnitude(c)
    return largest * 2.0**bits <= 2.0**53


def _in_blocks(compute: Conversion, c: Tensor, *factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply an elementwise function to blocks of rows of `c`; see `in_blocks`.

    Args:
        factors: the tensors that `compute` broadcasts against c; if one varies along axis 0, c is a single block.
    """
    varies = any(f.ndim == c.ndim and f.shape[0] > 1 for f in factors if f.ndim)
    return compute(c).to(dtype) if varies else in_blocks(compute, c, dtype=dtype)


def in_blocks(compute: Callable[..., Tensor], *values: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply an elementwise function to blocks of rows that stay in a core's cache.

    Args:
        compute: takes as many tensors as there are values, and returns one of their shape.
        values: of one shape; values of different shapes are a single block.
        dtype: of the result, which holds all integers that `compute` returns.
    """
    first = values[0]
    rows = max(1, BLOCK * len(first) // max(1, first.numel())) if first.ndim else 1
    if not first.ndim or rows >= len(first) or any(v.shape != first.shape for v in values):
        return compute(*values).to(dtype)
    out = torch.empty_like(first, dtype=dtype)
    for start in range(0, len(first), rows):
        out[start : start + rows] = compute(*(v[start : start + rows] for v in values))
    return out


def _magnitude(c: Tensor) -> float:
    low, high = extremes(c)
    return max(-low, high)


def _between(n: Tensor, low: int, high: int) -> bool:
    return bool(((n >= low) & (n <= high)).all())


def _fraction_bits(dtype: torch.dtype) -> int:
    """The number of bits of the integers that a float dtype holds exactly."""
    return 24 if dtype == torch.float32 else 53


def apply_simq(value: Tensor, simq: SimQ | None, how: Requantize) -> Tensor:
    """Apply the conversion of an edge to a value: quantize, requantize, dequantize, or nothing."""
    return value if simq is None else conversion(simq, how)(value)


def conversion(simq: SimQ, how: Requantize) -> Conversion:
    """`apply_simq` as a function of the value alone, which is made once and applied to many values."""
    source, target = simq.source, simq.target
    if simq.via is not None:
        first, second = (conversion(step, how) for step in simq.steps)
        return lambda value: second(first(value))
    if source is None:
        assert target is not None
        return lambda value: quantize(value, target, how.rounding)
    if target is None:
        return lambda value: dequantize(value, source)
    return requantization(source, target, how)


def power_of_two_at_least(t: Tensor) -> Tensor:
    """The smallest power of two >= t, and 1 where t is 0 (float64)."""
    _, exponent = torch.frexp(t.to(torch.float64))
    power = torch.ldexp(torch.ones_like(t, dtype=torch.float64), exponent)
    power = torch.where(power / 2 >= t, power / 2, power)
    return torch.where(t > 0, power, torch.ones_like(power))


def is_power_of_two(scale: Tensor) -> bool:
    """Whether every entry is an exact power of two."""
    fraction, _ = torch.frexp(scale.to(torch.float64))
    return bool((fraction == 0.5).all())


def simulated_quantize(
    x: Tensor,
    in_scale: float = 1.0,
    out_scale: float = 1.0,
    clip_min: float = -math.inf,
    clip_max: float = math.inf,
    in_dtype: str = "float32",
    out_dtype: str = "float32",
    rounding: str = "half_even",
) -> Tensor:
    """Quantize real values and dequantize them again, as the HAGO RFC's operator of that name does.

    If `in_dtype` is an integer dtype, `x` is first rounded to integers at `in_scale` and wrapped into that dtype, as
    the register of its producer would. If `out_dtype` is an integer dtype, the value is then rounded to a multiple of
    `out_scale` and clipped to `[clip_min, clip_max]` quanta.

    Args:
        x: float tensor of real values.
        in_scale, out_scale: real units per quantum.
        clip_min, clip_max: in quanta; the range of `out_dtype` holds as well.
        in_dtype, out_dtype: names of dtypes, e.g. "int8"; "float32" for no integers.
        rounding: a name in `hago.arithmetic.rounding.ROUNDINGS`.

    Returns:
        float32 real values. A value at the threshold `2**(bits-1) * out_scale` becomes one quantum less.

    References:
        The HAGO RFC's `simulated_quantize` (TVM, 2019).
    """
    source, target = named_dtype(in_dtype), named_dtype(out_dtype)
    real = x.to(torch.float64)
    if source.is_int:
        real = wrap(ROUNDINGS[rounding](real / in_scale), source) * in_scale
    if target.is_int:
        low, high = max(clip_min, target.min), min(clip_max, target.max)
        real = ROUNDINGS[rounding](real / out_scale).clamp(low, high) * out_scale
    return real.to(torch.float32)
