"""Forms of ops as TPU-MLIR's interpreter computes them for bm1684x.

Multipliers of 8 bits and their shifts are chosen for the least error, and products are rounded half up. The forms
call `hago.emulation.tpu_mlir`, which defines both. Rules list these as their form `tpu_mlir`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.rounding import rounding_shift
from hago.arithmetic.types import QParams
from hago.emulation.tpu_mlir import (
    UniformType,
    add_multipliers,
    avg_pool,
    avg_pool_asymmetric,
    leaky_relu_multiplier,
    mul_multiplier,
    prelu_slopes,
)
from hago.ops._rule import Attrs, IntegerForm, Operand, Site
from hago.ops.forms.requantizing import largest_out, requantizing

#: Types, besides numbers, tensors and those of `hago.arithmetic`, that attributes in stored models may hold.
ATTRIBUTE_RECORDS: Final = (UniformType,)


def _scaled(c: Tensor, m: int | Tensor, r: int) -> Tensor:
    return rounding_shift(c.to(torch.int64) * m, torch.tensor(r), "half_up")


# ---------------------------------------------------------------- sums and products
def tpu_mlir_sum(signs: Sequence[int]) -> IntegerForm:
    """`sum(sign * half_up(c_i * m_i / 2**r_i))`: a multiplier and a shift per operand, rounded each.

    References:
        TPU-MLIR tpu.Add and tpu.Sub in the interpreter, bm1684x.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        found = add_multipliers([float(s) for s in site.scales], float(site.target.scale))
        return {"multipliers": found.multipliers, "rshifts": found.rshifts}

    def compute(attrs: Attrs, *values: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.int64)
        for sign, c, m, r in zip(signs, values, attrs["multipliers"], attrs["rshifts"], strict=True):
            total = total + sign * _scaled(c, m, r)
        return total.to(values[0].dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        terms = zip(operands, attrs["multipliers"], attrs["rshifts"], strict=True)
        return torch.stack([(o.magnitude.max() * m / 2.0**r).ceil() for o, m, r in terms]).sum()

    return requantizing(compute, attrs_at, slots=("own",) * len(signs), bound=bound)


def tpu_mlir_product() -> IntegerForm:
    """`half_up(c_0 * c_1 * m / 2**r)`.

    References:
        TPU-MLIR tpu.Mul in the interpreter, bm1684x.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        m, r = mul_multiplier([float(s) for s in site.scales], float(site.target.scale))
        return {"multiplier": m, "rshift": r}

    def compute(attrs: Attrs, *values: Tensor) -> Tensor:
        product = values[0].to(torch.int64) * values[1].to(torch.int64)
        return _scaled(product, attrs["multiplier"], attrs["rshift"]).to(values[0].dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        ratio: float = attrs["multiplier"] / 2.0 ** attrs["rshift"]
        return (operands[0].magnitude.max() * operands[1].magnitude.max() * ratio).ceil()

    return requantizing(compute, attrs_at, slots=("own", "own"), bound=bound)


# ---------------------------------------------------------------- rectifiers: input and output share a scale
def _symmetric(attrs: Attrs, site: Site) -> Attrs:
    assert not bool(site.source.zero_point.any()), "a rectifier of TPU-MLIR is symmetric"
    return attrs


def tpu_mlir_leaky_relu() -> IntegerForm:
    """c where it is not negative, else `half_up(c * m / 2**r)`: a slope of 0.1 is 51 / 2**9.

    References:
        TPU-MLIR tpu.LeakyRelu in the interpreter.
    """

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        m, r = leaky_relu_multiplier(attrs["negative_slope"])
        return torch.where(x >= 0, x.to(torch.int64), _scaled(x, m, r)).to(x.dtype)

    def unsupported(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
        slope = attrs["negative_slope"]
        return None if 0 <= slope <= 1 else f"a slope of {slope} leaves the input's range"

    return IntegerForm(
        slots=("follow",), compute=compute, attrs_at=_symmetric, unsupported=unsupported, allows_early_clipping=False
    )


def tpu_mlir_prelu() -> IntegerForm:
    """c where it is not negative, else `half_up(c * slope / 2**r)`: int8 slopes with one shift.

    Slopes beyond 1 may leave the input's range, and saturate. A single slope is a leaky relu.

    References:
        TPU-MLIR tpu.PRelu in the interpreter.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        return {**_symmetric(attrs, site), "low": site.source.qmin, "high": site.source.qmax}

    def compute(attrs: Attrs, x: Tensor, slope: Tensor) -> Tensor:
        if slope.numel() == 1:
            m, r = leaky_relu_multiplier(float(slope.reshape(())))
            scaled = _scaled(x, m, r)
        else:
            slopes, r = prelu_slopes(slope)
            scaled = _scaled(x, slopes.reshape(-1, *[1] * max(x.ndim - 2, 0)), r)
        kept = torch.where(x >= 0, x.to(torch.int64), scaled)
        return kept.clamp(attrs["low"], attrs["high"]).to(x.dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        return torch.clamp_min(operands[0].magnitude.max(), max(-attrs["low"], attrs["high"]))

    return IntegerForm(
        slots=("follow", "plain"),
        compute=compute,
        attrs_at=attrs_at,
        bound=bound,
        fits_input_dtype=True,
        allows_early_clipping=False,
    )


# ---------------------------------------------------------------- averages
def tpu_mlir_average(
    window: Callable[[Attrs], Attrs], unsupported: Callable[..., str | None], asymmetric: bool = False
) -> IntegerForm:
    """Symmetric: `half_up(sum * m / 2**r)`; with a zero point: `half_away(float32(sum * scale + offset))`.

    Args:
        window: the attributes of a pooling from those of the op.
        unsupported: as in IntegerForm.
        asymmetric: whether all is computed as with a zero point, as in a model that is quantized asymmetrically, where
            what is never negative has the zero point 0.

    References:
        TPU-MLIR tpu.Pool1D and tpu.Pool2D in the interpreter; `hago.emulation.tpu_mlir.operators`.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        return {**window(attrs), "source": site.source, "out": site.target}

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        source, target = _uniform(attrs["source"]), _uniform(attrs["out"])
        pool = avg_pool_asymmetric if asymmetric or source.zero_point or target.zero_point else avg_pool
        pads = [p for _ in range(2) for p in attrs["padding"]]
        counted = attrs.get("count_include_pad", True)
        q: Tensor = pool(
            x.to(torch.int64).contiguous() + source.zero_point,
            attrs["kernel_size"],
            source,
            target,
            strides=attrs["stride"],
            pads=pads,
            count_include_pad=counted or not any(pads),
        )
        centered: Tensor = q - target.zero_point
        return centered.to(x.dtype)

    why_not = _covering(window, unsupported)
    return requantizing(compute, attrs_at, slots=("own",), bound=largest_out, unsupported=why_not)


def _uniform(q: QParams) -> UniformType:
    return UniformType(float(q.scale), int(q.zero_point), q.dtype)


def _covering(window: Callable[[Attrs], Attrs], unsupported: Callable[..., str | None]) -> Callable[..., str | None]:
    """As `unsupported`; also refuses divisors other than the window's size, and windows that leave part of the padded
    input out, which TPU-MLIR pools in float."""

    def check(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
        why_not = unsupported(attrs, shapes)
        if why_not is not None:
            return why_not
        if attrs.get("divisor_override") not in (None, math.prod(window(attrs)["kernel_size"])):
            return f"divides by {attrs['divisor_override']}, not by the window's size"
        sides = (window(attrs)[k] for k in ("kernel_size", "stride", "padding"))
        for size, kernel, step, pad in zip(shapes[0][2:], *sides, strict=True):
            if (size + 2 * pad - kernel) % step:
                return "its windows leave part of the input out"
        return None

    return check
