"""Exported: what the nodes and the signature of an ExportedProgram say, read off one by one."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node as FxNode
from torch.utils import _pytree as pytree

from hago.errors import GraphError

#: Calls that check something and compute nothing.
_CHECKS: Final = ("_assert", "sym_constrain", "_guards_fn")
#: Calls that tracing again leaves as they are, among those of which most networks of convolutions are made.
_AS_THEY_ARE: Final = frozenset(
    f"aten.{name}"
    for name in (
        "conv1d.default", "conv2d.default", "conv2d.padding", "linear.default", "add.Tensor", "mul.Tensor",
        "relu.default", "relu6.default", "hardtanh.default", "leaky_relu.default", "sigmoid.default", "tanh.default",
        "hardswish.default", "hardsigmoid.default", "silu.default", "gelu.default", "max_pool2d.default",
        "avg_pool2d.default", "adaptive_avg_pool2d.default", "mean.dim", "cat.default", "pad.default",
        "slice.Tensor", "dropout.default",
    )
)  # fmt: skip


def nesting(spec: pytree.TreeSpec | None, verb: str) -> str | None:
    """How arguments or results are nested, as text; named tuples (torch.topk's result, say) as plain ones."""
    if spec is None:
        return None
    plain = pytree.tree_structure(_plain_tuples(pytree.tree_unflatten(range(spec.num_leaves), spec)))
    try:
        return pytree.treespec_dumps(plain)
    except NotImplementedError:
        kind = " ".join(str(plain).split())
        raise GraphError(
            f"the model {verb} {kind}, which hago cannot write down; use tuples, lists and dicts"
        ) from None


def _plain_tuples(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain_tuples, value))
    if type(value) is list:
        return [_plain_tuples(v) for v in value]
    return {k: _plain_tuples(v) for k, v in value.items()} if type(value) is dict else value


def reads_as_it_is(program: ExportedProgram, known: Collection[str]) -> bool:
    """Whether no call need be traced again before it is read, which takes longer than the export itself.

    Args:
        known: the calls that can be read.
    """
    calls = [n for n in program.graph.nodes if n.op not in ("placeholder", "output")]
    return all(str(n.target) in known and _reads_as_it_is(n) for n in calls)


def _reads_as_it_is(fx: FxNode) -> bool:
    if str(fx.target) == "aten.batch_norm.default":
        return not dict(named_arguments(fx))["training"]
    if str(fx.target) == "aten.flatten.using_ints":
        value, whole = fx.meta["val"], dict(named_arguments(fx))["self"].meta["val"]
        return value.ndim < whole.ndim and len(open_axes_of(value)) <= 1
    return str(fx.target) in _AS_THEY_ARE


def is_check(fx: FxNode) -> bool:
    """Whether a call checks something and computes nothing."""
    return any(c in str(fx.target) for c in _CHECKS)


def is_reading(fx: FxNode) -> bool:
    """Whether a call reads off a size, or one of several results."""
    return fx.target is operator.getitem or str(fx.target) == "aten.sym_size.int"


def counts(fx: FxNode) -> bool:
    """Whether a call gives indices, sizes or conditions, whose arithmetic is torch's own."""
    value = first_of(fx.meta.get("val"))
    return isinstance(value, Tensor) and not value.is_floating_point()


def module_path(fx: FxNode) -> str:
    """The path of the module that the call stands in; empty at the top of the model."""
    stack = list((fx.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return "" if path.startswith("_empty") else path


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory read in the same way."""
    if not tensor.numel():
        return (id(tensor),)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


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


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape at batch 1: every size that export left open is read with its symbols at 1."""
    return tuple(_size(s) for s in value.shape) if isinstance(value, Tensor) else None


def open_axes_of(value: Any) -> tuple[int, ...]:
    """The axes whose size depends on the batch."""
    if not isinstance(value, Tensor):
        return ()
    return tuple(axis for axis, size in enumerate(value.shape) if not isinstance(size, int))


def _size(size: Any) -> int:
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr.subs(dict.fromkeys(expr.free_symbols, 1)))


def first_line(error: Exception) -> str:
    """What a long message of torch says first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse weights that are NaN or infinite.

    Raises:
        GraphError: naming the parameter, and how many.
    """
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise GraphError(f"{name!r} holds {bad} NaN or infinite values of {tensor.numel()}; check the weights")
