"""Forms that requantize their output themselves.

Each reads its operands on scales of their own, so that nothing is rounded before the op. The result is held in the
same carrier as the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hago.arithmetic.numerics import clip_range, dequantize, quantize
from hago.ops._rule import Attrs, IntegerForm, Operand, Site


def requantizing(compute: Callable[..., Tensor], attrs_at: Callable[[Attrs, Site], Attrs], **rest: Any) -> IntegerForm:
    """A form whose `compute` gives integers on the output's scale."""
    return IntegerForm(compute=compute, attrs_at=attrs_at, requantizes_output=True, **rest)


def largest_out(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    """The bound of a form that clips its output itself, to the range of the qparams in its attribute `out`."""
    low, high = (torch.as_tensor(v, dtype=torch.float64).abs().max() for v in clip_range(attrs["out"]))
    return torch.maximum(low, high)


def dequantized(compute: Callable[..., Tensor]) -> IntegerForm:
    """A form that dequantizes every operand (N2), computes in float32 and quantizes the result (N1).

    Args:
        compute: the rule's own, on real values.

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

    return requantizing(compute_int, attrs_at, slots=("own",), bound=largest_out)
