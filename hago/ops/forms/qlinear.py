"""Forms of sums, products and averages as ONNX Runtime's QLinear operators compute them.

They compute in float32 on stored integers and add the output's zero point before rounding, so that a tie goes to the
even *stored* integer. Every operation is one float32 operation, in the order of the equations N11 to N13 of
docs/numerics.md. Rules list these as their form `qlinear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hago.arithmetic.rounding import ROUNDINGS
from hago.arithmetic.types import QParams
from hago.ops._rule import Attrs, IntegerForm, Site
from hago.ops.forms.requantizing import largest_out, requantizing


def _float32(t: Tensor) -> Tensor:
    return t.to(torch.float32)


def _requantized(stored: Tensor, attrs: Attrs, like: Tensor) -> Tensor:
    """Round a stored value, clip it and center it, in the carrier of `like`. NaN, which a ratio of scales beyond
    float32 makes of 0, becomes the smallest integer."""
    out: QParams = attrs["out"]
    rounded = ROUNDINGS[attrs["rounding"]](stored).nan_to_num(-math.inf, math.inf, -math.inf)
    return (rounded.clamp(out.qmin, out.qmax) - out.zero_point).to(like.dtype)


def _attrs_at(attrs: Attrs, site: Site) -> Attrs:
    return {**attrs, "operands": site.operands, "out": site.target, "rounding": site.how.rounding}


def _sum(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    x, y = attrs["operands"]
    r_a, r_b = (_float32(q.scale) / _float32(attrs["out"].scale) for q in (x, y))
    z_a, z_b, z = (_float32(q.zero_point) for q in (x, y, attrs["out"]))
    fixed = z - (r_a * z_a + r_b * z_b)
    return _requantized((_float32(a) + z_a) * r_a + ((_float32(b) + z_b) * r_b + fixed), attrs, a)


def _product(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    x, y = attrs["operands"]
    multiplier = _float32(x.scale) * _float32(y.scale) / _float32(attrs["out"].scale)
    return _requantized(_float32(a) * _float32(b) * multiplier + attrs["out"].zero_point, attrs, a)


def qlinear_sum() -> IntegerForm:
    """`a + b`: `round(q_a * r_a + (q_b * r_b + (z - (r_a * z_a + r_b * z_b))))`, r the ratios of scales  (N11).

    References:
        ONNX Runtime, onnxruntime/core/mlas/lib/qladd.cpp, MlasQLinearAddKernelHelper.
    """
    return requantizing(_sum, _attrs_at, slots=("own", "own"), bound=largest_out)


def qlinear_product() -> IntegerForm:
    """`a * b`: `round(c_a * c_b * (s_a * s_b / s) + z)`  (N12).

    References:
        ONNX Runtime, onnxruntime/core/mlas/lib/qlmul.cpp.
    """
    return requantizing(_product, _attrs_at, slots=("own", "own"), bound=largest_out)


def qlinear_average(form: IntegerForm, count: Callable[[Attrs], int], whole: Callable[[Attrs], bool]) -> IntegerForm:
    """An average over windows of `count` values  (N13).

    Args:
        form: whose `compute` gives the sums of windows.
        whole: whether the window is the whole image; ONNX Runtime then requantizes the sum as it does those of
            convolutions, the zero point added last.

    References:
        ONNX Runtime, contrib_ops/cpu/quantization/qlinear_pool.cc and qlinear_global_average_pool.cc.
    """
    total = form.compute
    assert total is not None

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        scale, out = _float32(attrs["operands"][0].scale), attrs["out"]
        sums = _float32(total(attrs, x))
        if whole(attrs):
            rounded = ROUNDINGS[attrs["rounding"]](sums * (scale / (_float32(out.scale) * count(attrs))))
            # whole numbers, which it does not round again
            return _requantized(rounded + out.zero_point, attrs, x)
        return _requantized(sums * scale / count(attrs) / _float32(out.scale) + out.zero_point, attrs, x)

    return replace(form, compute=compute, attrs_at=_attrs_at, requantizes_output=True, bound=largest_out, addends=None)
