"""Forms of ops as TFLite's integer kernels compute them; CMSIS-NN and Ethos-U give the same integers.

MBQM is TFLite's `MultiplyByQuantizedMultiplier`: N4 or N5, as the hardware file says. TFLite's scales are float32.
Where a kernel multiplies and divides scales in float32 before it computes a multiplier, its form does so, too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import Requantize, in_blocks, multiply_by_quantized_multiplier, multiply_carrier
from hago.arithmetic.rounding import round_half_away
from hago.ops._rule import Attrs, IntegerForm, Operand, Site
from hago.ops.forms.requantizing import requantizing

#: Fraction bits that are added to the operands of a sum: to operands of 8 bits, and of 16.
LEFT_SHIFT: Final = 20
LEFT_SHIFT_16: Final = 15

Multiplier = tuple[Tensor, Tensor]


def _plain(how: Requantize) -> Requantize:
    """The requantization in kernels of 32-bit values: with a multiplier of 31 bits, whatever wide registers use."""
    return how if how.search == "nearest" else replace(how, search="nearest", multiplier_bits=31)


def _float32_ratio(over: Tensor, *factors: Tensor) -> Tensor:
    """The product of the factors divided by `over`, with every step rounded to float32."""
    product = factors[0].to(torch.float32)
    for factor in factors[1:]:
        product = product * factor.to(torch.float32)
    return (product / over.to(torch.float32)).to(torch.float64).reshape(())


def _mbqm(c: Tensor, multiplier: Multiplier, how: Requantize, left: int = 0) -> Tensor:
    """MBQM of `c << left`: of integers as int64, of float carriers as float64."""
    if c.is_floating_point():
        return multiply_carrier(c, *multiplier, _plain(how), left)
    return multiply_by_quantized_multiplier(c.to(torch.int64) << left, *multiplier, _plain(how))


def _wide(c: Tensor) -> Tensor:
    """Integers in a type that holds every product and sum of a kernel: float64 for float carriers, else int64."""
    return c.to(torch.float64 if c.is_floating_point() else torch.int64)


def _largest(factor: float, operands: Sequence[Operand]) -> Tensor:
    """A bound: the largest first operand times a ratio of scales, plus what rounding twice may add."""
    return (operands[0].magnitude.max() * factor).ceil() + 2


# ---------------------------------------------------------------- sums and products
def tflite_sum(signs: Sequence[int]) -> IntegerForm:
    """`MBQM(sum(sign * MBQM(c_i << 20, s_i / (2 * max s))), 2 * max s / 2**20 / s_out)`.

    Every operand is shifted left (by 15 where it has 16 bits) and brought to twice the larger scale
    with a multiplier of its own; the sum goes to the output's scale with a third.

    References:
        TFLite lite/kernels/add.cc and sub.cc, internal/reference/integer_ops/add.h; CMSIS-NN
        arm_elementwise_add_s8.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        operands, how = [q for q in site.operands if q is not None], _plain(site.how)
        left = LEFT_SHIFT if max(q.dtype.bits for q in operands) <= 8 else LEFT_SHIFT_16
        twice = 2.0 * torch.stack([q.scale.reshape(()) for q in operands]).max()
        return {
            "left_shift": left,
            "into": [how.multiplier(q.scale.reshape(()) / twice) for q in operands],
            "out": how.multiplier(twice / float(1 << left) / site.target.scale),
            "how": site.how,
            "ratios": [float(q.scale / site.target.scale) for q in operands],
        }

    def compute(attrs: Attrs, *values: Tensor) -> Tensor:
        def block(*values: Tensor) -> Tensor:
            operands = zip(signs, values, attrs["into"], strict=True)
            parts = [(sign, _mbqm(c, into, attrs["how"], attrs["left_shift"])) for sign, c, into in operands]
            total = functools.reduce(operator.add, (part if sign > 0 else -part for sign, part in parts))
            return _mbqm(total, attrs["out"], attrs["how"])

        return in_blocks(block, *values, dtype=values[0].dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        parts = [o.magnitude.max() * r for o, r in zip(operands, attrs["ratios"], strict=True)]
        return torch.stack(parts).sum().ceil() + 3

    return _kernel(compute, attrs_at, slots=("own",) * len(signs), bound=bound)


def tflite_product() -> IntegerForm:
    """`MBQM(c_0 * c_1, s_0 * s_1 / s_out)`, the ratio in float32.

    References:
        TFLite lite/kernels/mul.cc.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        ratio, how = _float32_ratio(site.target.scale, *site.scales), _plain(site.how)
        return {"out": how.multiplier(ratio), "how": site.how, "ratio": float(ratio)}

    def compute(attrs: Attrs, *values: Tensor) -> Tensor:
        product = _wide(values[0]) * _wide(values[1])
        return _mbqm(product, attrs["out"], attrs["how"]).to(values[0].dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        return _largest(attrs["ratio"] * float(operands[1].magnitude.max()), operands)

    return _kernel(compute, attrs_at, slots=("own", "own"), bound=bound)


def tflite_mean(total: Callable[..., Tensor]) -> IntegerForm:
    """`MBQM(sum(c), s_in / s_out / count)`, the count in the multiplier: `floor(m * 2**k / count) / 2**(n + k)`.

    m / 2**n is the multiplier of s_in / s_out, and k `min(floor(log2(count)), 32, 62 - n)`: what is left is cut.

    Args:
        total: `(attrs, c)` to the sums; attrs hold the count.

    References:
        TFLite internal/reference/reduce.h, QuantizedMeanOrSum; PrepareMeanOrSum in lite/kernels/reduce.cc.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        how, ratio = _plain(site.how), site.scales[0].reshape(()) / site.target.scale.reshape(())
        m, n = (int(v) for v in how.multiplier(ratio))
        k = max(0, min(attrs["count"].bit_length() - 1, 32, 62 - n))
        out = (torch.tensor((m << k) // attrs["count"]), torch.tensor(n + k))
        return {**attrs, "out": out, "how": site.how, "factor": float(ratio)}

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        return _mbqm(total(attrs, x.to(torch.int64)), attrs["out"], attrs["how"]).to(x.dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        return _largest(attrs["factor"], operands)

    return _kernel(compute, attrs_at, slots=("follow",), bound=bound)


# ---------------------------------------------------------------- rectifiers
def tflite_leaky_relu() -> IntegerForm:
    """`MBQM(c, s_in / s_out)` where c >= 0, else `MBQM(c, s_in * slope / s_out)`; ratios in float32.

    References:
        TFLite internal/reference/leaky_relu.h; LeakyReluPrepare in lite/kernels/activations.cc.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        how, (scale,), over = _plain(site.how), site.scales, site.target.scale
        slope = torch.tensor(attrs["negative_slope"], dtype=torch.float64)
        kept, cut = _float32_ratio(over, scale), _float32_ratio(over, scale, slope)
        factor = max(float(kept), abs(float(cut)))
        return {"kept": how.multiplier(kept), "cut": how.multiplier(cut), "how": site.how, "factor": factor}

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        c = _wide(x)
        kept, cut = (_mbqm(c, attrs[side], attrs["how"]) for side in ("kept", "cut"))
        return torch.where(c >= 0, kept, cut).to(x.dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        return _largest(attrs["factor"], operands)

    return _kernel(compute, attrs_at, slots=("own",), bound=bound)


def tflite_prelu() -> IntegerForm:
    """`MBQM(c, s_in / s_out)` where c >= 0, else `MBQM(c * c_slope, s_in * s_slope / s_out)`.

    The slopes are quantized like weights, with one scale.

    References:
        TFLite internal/reference/prelu.h; PreluPrepare in lite/kernels/activations.cc.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        how, (scale, slopes), over = _plain(site.how), site.scales, site.target.scale
        kept, cut = _float32_ratio(over, scale), _float32_ratio(over, scale, slopes)
        factors = (float(kept), float(cut))
        return {"kept": how.multiplier(kept), "cut": how.multiplier(cut), "how": site.how, "factors": factors}

    def compute(attrs: Attrs, x: Tensor, slope: Tensor) -> Tensor:
        c = _wide(x)
        along = slope.to(c.dtype).reshape(-1, *[1] * max(x.ndim - 2, 0))
        kept, cut = _mbqm(c, attrs["kept"], attrs["how"]), _mbqm(c * along, attrs["cut"], attrs["how"])
        return torch.where(c >= 0, kept, cut).to(x.dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        kept, cut = attrs["factors"]
        return _largest(max(kept, cut * float(operands[1].magnitude.max())), operands)

    return _kernel(compute, attrs_at, slots=("own", "own"), bound=bound)


# ---------------------------------------------------------------- forms that keep the scale
def tflite_average(sums: Callable[..., Tensor], unsupported: Callable[..., str | None]) -> IntegerForm:
    """The sum of a window's stored integers over their count, half away from zero; padding is not counted.

    Input and output share scale and zero point.

    Args:
        sums: `(attrs, c)` to the sums of the windows.
        unsupported: as in IntegerForm.

    References:
        TFLite internal/reference/integer_ops/pooling.h; CMSIS-NN arm_avgpool_s8.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        return {**attrs, "zero_point": int(site.source.zero_point)}

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        count = sums(attrs, torch.ones_like(x[:1, :1], dtype=torch.float64)).to(torch.int64)
        total = sums(attrs, x).to(torch.int64) + count * attrs["zero_point"]
        average = total.sign() * torch.div(total.abs() + count // 2, count, rounding_mode="floor")
        centered: Tensor = average - attrs["zero_point"]
        return centered.to(x.dtype)

    return IntegerForm(
        slots=("follow",), compute=compute, attrs_at=attrs_at, unsupported=unsupported, allows_early_clipping=False
    )


def constant_pad(compute: Callable[..., Tensor]) -> IntegerForm:
    """Padding with any constant v: `round(v / s + z)`, half away from zero, saturated.

    Args:
        compute: of the rule.

    References:
        TFLite PADV2, whose constant has the input's scale; TPU-MLIR lib/Conversion/TopToTpu/BM1684X/Pad.cpp.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        source = site.source
        if attrs["mode"] != "constant":
            return attrs
        exact = attrs["value"] / source.scale + source.zero_point
        q = int(round_half_away(exact.reshape(())).clamp(source.qmin, source.qmax))
        return {**attrs, "value": q - int(source.zero_point)}

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        return torch.clamp_min(operands[0].magnitude.max(), abs(attrs["value"] or 0))

    return IntegerForm(slots=("follow",), compute=compute, attrs_at=attrs_at, bound=bound, fits_input_dtype=True)


def _kernel(compute: Callable[..., Tensor], attrs_at: Callable[[Attrs, Site], Attrs], **rest: Any) -> IntegerForm:
    return requantizing(compute, attrs_at, required_requantize="multiplier_shift", **rest)
