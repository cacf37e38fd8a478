"""Forms that go to the output's scale by themselves: sums and products with a multiplier per operand,
and ops that an engine computes on real values between a dequantize and a quantize.

Each takes its operands as they are, with scales of their own, so nothing is rounded before the op.
Inside, integers are int64 whatever the carrier; the result returns to the carrier of the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.tpu_mlir_elementwise import add_multipliers, mul_multiplier
from hago.numerics import clip_range, dequantize, multiply_by_quantized_multiplier, quantize
from hago.ops._rule import Attrs, IntegerForm, Operand, Site, Slot
from hago.rounding import rounding_shift

#: Fraction bits that TFLite gives the operands of a sum: of 8 bits, and of 16.
LEFT_SHIFT: Final = 20
LEFT_SHIFT_16: Final = 15


# ---------------------------------------------------------------- TFLite
def tflite_sum(signs: Sequence[int]) -> IntegerForm:
    """`MBQM(sum(sign * MBQM(c_i << 20, s_i / (2 * max s))), 2 * max s / 2**20 / s_out)`.

    Every operand is shifted left (by 15 where it has 16 bits) and brought to twice the larger scale
    with a multiplier of its own; the sum goes to the output's scale with a third.

    References:
        TFLite lite/kernels/add.cc and internal/reference/integer_ops/add.h; CMSIS-NN
        arm_elementwise_add_s8.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        operands = [q for q in site.operands if q is not None]
        left = LEFT_SHIFT if max(q.dtype.bits for q in operands) <= 8 else LEFT_SHIFT_16
        twice = 2.0 * torch.stack([q.scale.reshape(()) for q in operands]).max()
        into = [site.how.multiplier(q.scale.reshape(()) / twice) for q in operands]
        return {
            "left_shift": left,
            "into": into,
            "out": site.how.multiplier(twice / float(1 << left) / site.target.scale),
            "how": site.how,
            "ratios": [float(q.scale / site.target.scale) for q in operands],
        }

    def compute(attrs: Attrs, *values: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.int64)
        for sign, c, (m, n) in zip(signs, values, attrs["into"], strict=True):
            moved = multiply_by_quantized_multiplier(c.to(torch.int64) << attrs["left_shift"], m, n, attrs["how"])
            total = total + sign * moved
        m, n = attrs["out"]
        out = multiply_by_quantized_multiplier(total, m, n, attrs["how"])
        return out.to(values[0].dtype)

    return _landing(compute, attrs_at, slots=("own",) * len(signs), bound=_ratio_bound, goes_with="multiplier_shift")


def _ratio_bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    """`sum |c_i| * s_i / s_out`, and what three roundings of less than one add."""
    parts = [o.magnitude.max() * r for o, r in zip(operands, attrs["ratios"], strict=True)]
    return torch.stack(parts).sum().ceil() + 3


# ---------------------------------------------------------------- TPU-MLIR
def tpu_mlir_sum(signs: Sequence[int]) -> IntegerForm:
    """`sum(half_up(c_i * m_i / 2**r_i))`: a multiplier of 8 bits and a shift per operand, rounded each.

    References:
        TPU-MLIR tpu.Add and tpu.Sub in the interpreter, bm1684x; `hago.arithmetic.tpu_mlir_elementwise.add`.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        found = add_multipliers([float(s) for s in site.scales], float(site.target.scale), list(map(float, signs)))
        return {"multipliers": found.multipliers, "rshifts": found.rshifts}

    def compute(attrs: Attrs, *values: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.int64)
        for c, m, r in zip(values, attrs["multipliers"], attrs["rshifts"], strict=True):
            total = total + _scaled(c, m, r)
        return total.to(values[0].dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        terms = zip(operands, attrs["multipliers"], attrs["rshifts"], strict=True)
        return torch.stack([(o.magnitude.max() * abs(m) / 2.0**r).ceil() for o, m, r in terms]).sum()

    return _landing(compute, attrs_at, slots=("own",) * len(signs), bound=bound)


def tpu_mlir_product() -> IntegerForm:
    """`half_up(c_0 * c_1 * m / 2**r)` with a multiplier of 8 bits.

    References:
        TPU-MLIR tpu.Mul in the interpreter, bm1684x; `hago.arithmetic.tpu_mlir_elementwise.mul`.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        m, r = mul_multiplier([float(s) for s in site.scales], float(site.target.scale))
        return {"multiplier": m, "rshift": r}

    def compute(attrs: Attrs, *values: Tensor) -> Tensor:
        product = values[0].to(torch.int64) * values[1].to(torch.int64)
        return _scaled(product, attrs["multiplier"], attrs["rshift"]).to(values[0].dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        ratio: float = abs(attrs["multiplier"]) / 2.0 ** attrs["rshift"]
        return (operands[0].magnitude.max() * operands[1].magnitude.max() * ratio).ceil()

    return _landing(compute, attrs_at, slots=("own", "own"), bound=bound)


def _scaled(c: Tensor, m: int, r: int) -> Tensor:
    return rounding_shift(c.to(torch.int64) * m, torch.tensor(r), "half_up")


# ---------------------------------------------------------------- on real values
def dequantized(compute: Callable[..., Tensor], slots: tuple[Slot, ...] = ("own",)) -> IntegerForm:
    """N2 on every operand, `compute` in float32, N1 into the output.

    Args:
        compute: of the rule, on real values.
        slots: as in IntegerForm; the last repeats.

    References:
        ONNX's DequantizeLinear, the float op, QuantizeLinear.
    """

    def attrs_at(attrs: Attrs, site: Site) -> Attrs:
        return {"real": attrs, "operands": site.operands, "out": site.target, "rounding": site.how.rounding}

    def compute_int(attrs: Attrs, *values: Tensor) -> Tensor:
        sources = zip(values, attrs["operands"], strict=True)
        real = [v if q is None else dequantize(v, q).contiguous() for v, q in sources]
        out = quantize(compute(attrs["real"], *real), attrs["out"], attrs["rounding"])
        return out.to(values[0].dtype)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        low, high = (torch.as_tensor(v, dtype=torch.float64).abs().max() for v in clip_range(attrs["out"]))
        return torch.maximum(low, high)

    return _landing(compute_int, attrs_at, slots=slots, bound=bound)


def _landing(compute: Callable[..., Tensor], attrs_at: Callable[[Attrs, Site], Attrs], **rest: Any) -> IntegerForm:
    return IntegerForm(compute=compute, attrs_at=attrs_at, lands=True, **rest)
