"""Conversions: passes that quantize, requantize or dequantize a whole value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hago.engine import native
from hago.engine.calls import QuantizeCall, RowsCall
from hago.engine.chains import largest_value
from hago.engine.choice import axis_of
from hago.engine.moves import move_of, period, stored_type, to_real
from hago.engine.tail import Stored, Tail
from hago.graph import INPUT
from hago.numerics import clip_range, passes_float32
from hago.plan import Plan
from hago.realization import move_stored, real_value
from hago.types import SimQ

Run = Callable[[Sequence[Any]], Sequence[Any]]


def conversion(plan: Plan, root: str, simq: SimQ, calls: Any) -> tuple[str, Run]:
    """The kernel and the call that make a form of a root's value.

    Args:
        calls: the library, or None.
    """
    found: Run | None = None
    if calls is not None:
        found = _quantize(plan, root, simq, calls) if simq.source is None else _rows(plan, root, simq, calls)
    if found is not None:
        return f"native {simq.kind}", found
    how = plan.hardware.requantize
    if simq.target is None:
        return "reference", lambda values: (real_value(simq, values[0]),)
    return "reference", lambda values: (move_stored(values[0], simq, how),)


def _quantize(plan: Plan, root: str, simq: SimQ, calls: Any) -> Run | None:
    """Float32 values; what float nodes make may be of any dtype, and goes the way of the reference where it is."""
    target, node, how = simq.target, plan.graph[root], plan.hardware.requantize
    assert target is not None
    code, dtype = stored_type(target), node.attrs.get("dtype", "float32") if node.op == INPUT else "float32"
    if dtype != "float32" or code is None or target.scale.numel() > 1 or passes_float32(target):
        return None
    low, high = (float(v) for v in clip_range(target))
    rounding, stored = native.ROUNDINGS.index(how.rounding), (code, int(target.zero_point))
    scale = float(target.scale.to(torch.float32))
    quantize = QuantizeCall(calls, scale, low, high, rounding, stored, target.dtype.torch)

    def run(values: Sequence[Any]) -> Sequence[Any]:
        if values[0].dtype == torch.float32:
            return quantize(values)
        return (move_stored(values[0], simq, how),)

    return quantize if node.op == INPUT else run


def _rows(plan: Plan, root: str, simq: SimQ, calls: Any) -> RowsCall | None:
    source, shape = simq.source, plan.graph[root].shape
    assert source is not None
    code, made = stored_type(source), plan.nodes.get(root)
    axis = axis_of(source.scale, len(shape or ()))
    if code is None or made is None or not shape or isinstance(axis, str):
        return None
    channels = 1 if axis is None else shape[axis]
    if simq.target is None:
        moved = to_real(source, channels)
    elif stored_type(simq.target) is None:
        return None
    else:
        moved = move_of(simq, plan.hardware.requantize, channels, largest_value(made))
    if isinstance(moved, str):
        return None
    tail = Tail(channels, [], stored=[Stored(root, moved, simq.target)]).build()
    return RowsCall(calls, tail, (code, int(source.zero_point)), axis, period(channels))
