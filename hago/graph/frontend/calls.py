"""The calls of an exported program: their arguments and values."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node as FxNode

#: Calls that check something and compute nothing.
_CHECKS: Final = ("_assert", "sym_constrain", "_guards_fn")


def is_check(fx: FxNode) -> bool:
    """Whether a call checks something and computes nothing."""
    return any(c in str(fx.target) for c in _CHECKS)


def named_arguments(fx: FxNode) -> list[tuple[str, Any]]:
    """The arguments of a call by the names of its schema, defaults filled in."""
    schema = getattr(fx.target, "_schema", None)
    if schema is None:
        return [(str(i), a) for i, a in enumerate(fx.args)]
    named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    named |= {a.name: v for a, v in zip(schema.arguments, fx.args, strict=False)}
    return list((named | dict(fx.kwargs)).items())


def first_of(value: Any) -> Any:
    """The first of several results; one result as it is."""
    return value[0] if isinstance(value, (tuple, list)) and value else value


def dtype_of(value: Any) -> torch.dtype | None:
    """The dtype of a value, or of the first of several; None where that is no tensor."""
    first = first_of(value)
    return first.dtype if isinstance(first, Tensor) else None


def open_axes_of(value: Any) -> tuple[int, ...]:
    """The axes whose size depends on the batch."""
    if not isinstance(value, Tensor):
        return ()
    return tuple(axis for axis, size in enumerate(value.shape) if not isinstance(size, int))


def is_specialised(fx: FxNode) -> bool:
    """Whether the batch is open in the value of a call as torch.export writes it, and fixed by what the model asked of
    it: its size is a number then, but none of Python's."""
    values = fx.meta.get("val")
    sizes = [
        size
        for value in (values if isinstance(values, (tuple, list)) else [values])
        for size in (value.shape if isinstance(value, Tensor) else [value])
    ]
    return any(isinstance(size, torch.SymInt) and size.node.expr.is_number for size in sizes)


def copies_to_reshape(fx: FxNode) -> bool:
    """Whether a call gives another shape to values that lie in memory so that they must be copied first."""
    if str(fx.target) not in ("aten.flatten.using_ints", "aten.reshape.default", "aten.reshape_as.default"):
        return False
    value, result = dict(named_arguments(fx))["self"].meta["val"], fx.meta["val"]
    sizes, strides, shape = ([_at_two(n) for n in of] for of in (value.shape, value.stride(), result.shape))
    try:
        torch.empty_strided(sizes, strides, device="meta").view(shape)
    except RuntimeError:
        return True
    return False


def _at_two(size: Any) -> int:
    """A size, or a stride, at batch 2."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr.subs(dict.fromkeys(expr.free_symbols, 2)))
