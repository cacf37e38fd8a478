"""Calls that write to their operand: which of them are read as the calls that do not.

Networks are full of them (`nn.ReLU(inplace=True)`, `x += y`), and `run_decompositions`, which takes all of them out,
takes longer than the export of the whole network. Most write to what another call has just made and nobody reads
afterwards, where it does not matter whether they write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node as FxNode

#: Calls that write to their first operand, and those that give the same and do not write.
_WITHOUT: Final = {
    f"aten.{name}_.{overload}": f"aten.{name}.{overload}"
    for name, overload in (
        ("add", "Tensor"), ("mul", "Tensor"), ("relu", "default"), ("relu6", "default"), ("hardtanh", "default"),
        ("leaky_relu", "default"), ("sigmoid", "default"), ("tanh", "default"), ("hardswish", "default"),
        ("hardsigmoid", "default"), ("silu", "default"), ("gelu", "default"),
    )
}  # fmt: skip
#: Calls whose result is memory of its own: no view of what they read.
_MAKING: Final = frozenset(
    f"aten.{name}"
    for name in (
        "conv1d.default", "conv2d.default", "conv2d.padding", "batch_norm.default", "linear.default", "add.Tensor",
        "mul.Tensor", "relu.default", "hardtanh.default", "leaky_relu.default", "sigmoid.default", "tanh.default",
        "hardswish.default", "hardsigmoid.default", "silu.default", "gelu.default", "max_pool2d.default",
        "avg_pool2d.default", "cat.default", "layer_norm.default",
    )
)  # fmt: skip
#: Calls that may give a view of what they read.
_VIEWS: Final = frozenset(
    f"aten.{name}"
    for name in (
        "flatten.using_ints", "slice.Tensor", "permute.default", "transpose.int", "view.default", "reshape.default",
        "contiguous.default", "expand.default", "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims",
        "select.int", "to.dtype", "expand_as.default", "reshape_as.default",
    )
)  # fmt: skip
#: Calls that give several views, each of which is made where it is read once a program is traced again.
_SEVERAL: Final = frozenset(
    f"aten.{name}" for name in ("unbind.int", "split.Tensor", "split_with_sizes.default", "chunk.default")
)


def without_writing(fx: FxNode, name: str) -> str:
    """The name of a call; of one that writes to what nobody reads afterwards, that of the call that does not write."""
    if is_idle_dropout(fx):
        return "aten.dropout.default"
    return _WITHOUT[name] if name in _WITHOUT and _is_alone(fx) else name


def is_idle_dropout(fx: FxNode) -> bool:
    """Whether a call is a dropout in eval mode that would write to its operand. Tracing again leaves nothing of it."""
    return str(fx.target) == "aten.dropout_.default" and fx.args[2:] == (False,)


def _is_alone(fx: FxNode) -> bool:
    """Whether nobody else sees what a call writes: its operand was made for it or for calls before it, is read by none
    behind it, and none has a view of it; and whether it writes what the other call gives, in the same place."""
    operand = fx.args[0]
    if not isinstance(operand, FxNode) or "alpha" in fx.kwargs or not _keeps_dtype(fx):
        return False
    readers = list(_readers(fx))
    if any(str(reader.target) in _SEVERAL for reader in readers):
        return False
    if not all(_stays_in_place(reader) for reader in readers if str(reader.target) in _VIEWS):
        return False
    others = [user for user in operand.users if user is not fx]
    return _makes(operand) and all(user < fx and _makes(user) for user in others)


def _readers(fx: FxNode) -> Iterator[FxNode]:
    """The calls that read a value, through dropouts that give it back."""
    for user in fx.users:
        if is_idle_dropout(user):
            yield from _readers(user)
        else:
            yield user


def _stays_in_place(view: FxNode) -> bool:
    """Whether tracing again leaves a view of what was written to in its place, and so its name: it is made where it is
    read, and a view of it is all that reads it, or no view of it reads it."""
    reader, stack = view.next, "nn_module_stack"
    if reader not in view.users or reader.meta.get(stack) != view.meta.get(stack):
        return False
    views = [user for user in view.users if str(user.target) in _VIEWS | _SEVERAL]
    return not views or (len(view.users) == 1 and str(reader.target) in _VIEWS and _stays_in_place(reader))


def _makes(fx: FxNode) -> bool:
    """Whether a call gives no view of what it reads, or writes to it, which others then do not read behind it."""
    return str(fx.target) in _MAKING or str(fx.target) in _WITHOUT


def _keeps_dtype(fx: FxNode) -> bool:
    """Whether torch promotes no operand; it converts a sum back to the dtype of what it is written to."""
    values: list[Any] = [arg.meta.get("val") for arg in fx.args if isinstance(arg, FxNode)]
    return all(isinstance(v, Tensor) and v.dtype == torch.float32 for v in values)
