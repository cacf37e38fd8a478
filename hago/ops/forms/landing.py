"""Forms that go to the output's scale by themselves.

Each takes its operands as they are, with scales of their own, so nothing is rounded before the op.
Whatever the carrier, the result returns to that of the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hago.arithmetic.numerics import clip_range, dequantize, quantize
from hago.ops._rule import Attrs, IntegerForm, Operand, Site, Slot


def landing(compute: Callable[..., Tensor], attrs_at: Callable[[Attrs, Site], Attrs], **rest: Any) -> IntegerForm:
    """A form whose `compute` goes to the output's scale by itself."""
    return IntegerForm(compute=compute, attrs_at=attrs_at, lands=True, **rest)


def largest_out(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    """The largest |c| of the output; for forms that clip by themselves, with the qparams as `out`."""
    low, high = (torch.as_tensor(v, dtype=torch.float64).abs().max() for v in clip_range(attrs["out"]))
    return torch.maximum(low, high)


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

    return landing(compute_int, attrs_at, slots=slots, bound=largest_out)
