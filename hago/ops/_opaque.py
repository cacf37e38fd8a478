"""opaque: any ATen call without a rule. It runs exactly as torch runs it, on real values.

Its attributes are JSON: the call's target, and its arguments with tensors replaced by `{"$": i}`
(the i-th input) and dtypes, layouts and the like by `{"torch": "float32"}`.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from hago.errors import GraphError
from hago.ops._integer import Attrs
from hago.ops._rule import Ref

NAME: Final = "opaque"

#: What arithmetic on sizes is exported as.
_BUILTINS: Final[Mapping[str, Callable[..., Any]]] = {
    f"operator.{f.__name__}": f
    for f in (operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
              operator.neg, operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt,
              operator.ge, operator.getitem)
}  # fmt: skip
_SYMBOLIC: Final = ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite")
_NAMED: Final = (torch.dtype, torch.layout, torch.memory_format, torch.device)


def target_name(target: Any) -> str:
    """How a call's target is written: `aten.cumsum.default`, `operator.mul`, `torch.sym_max`.

    Raises:
        GraphError: a target that is not an operator, e.g. a higher-order control-flow op.
    """
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", str(target))
    if f"operator.{name}" in _BUILTINS:
        return f"operator.{name}"
    if name in _SYMBOLIC:
        return f"torch.{name}"
    raise GraphError(f"{target} cannot be imported; only ATen operators can (no control flow)")


def resolve_target(name: str) -> Callable[..., Any]:
    """The callable that `target_name` wrote.

    Raises:
        GraphError: this torch has no such operator.
    """
    if name in _BUILTINS:
        return _BUILTINS[name]
    found: Any = torch if name.startswith("torch.sym_") else torch.ops
    for part in name.removeprefix("torch.").split("."):
        found = getattr(found, part, None)
        if found is None:
            raise GraphError(f"torch {torch.__version__} has no operator {name!r}")
    return found  # type: ignore[no-any-return]


def why_not_portable(attrs: Attrs) -> str | None:
    """Why a file may not hold this call, or None: it may name torch's own functional ATen operators
    alone, and none that touches files."""
    target = str(attrs.get("target"))
    if target in _BUILTINS or target in (f"torch.{name}" for name in _SYMBOLIC):
        return None
    if not re.fullmatch(r"aten\.\w+\.\w+", target, re.ASCII):
        return f"it calls {target!r}; only torch's own ATen operators can be stored"
    try:
        found = resolve_target(target)
    except GraphError as error:
        return str(error)
    if not isinstance(found, torch._ops.OpOverload):
        return f"it calls {target!r}, which is no operator"
    if found._schema.is_mutable or any(a.name == "filename" for a in found._schema.arguments):
        return f"it calls {target!r}, which changes its operands or a file"
    return None


def pack(value: Any, inputs: list[str]) -> Any:
    """An argument as JSON; node names met on the way are appended to `inputs`."""
    if isinstance(value, Ref):
        inputs.append(value.name)
        return {"$": len(inputs) - 1}
    if isinstance(value, (list, tuple)):
        return [pack(v, inputs) for v in value]
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch."), "kind": type(value).__name__}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise GraphError(f"an argument of type {type(value).__name__} cannot be imported")


def unpack(value: Any, inputs: Sequence[Any]) -> Any:
    """The argument that `pack` wrote, with inputs in place.

    Raises:
        GraphError: a dtype, layout, memory format or device that this torch does not have.
    """
    if isinstance(value, list):
        return [unpack(v, inputs) for v in value]
    if not isinstance(value, dict):
        return value
    if "$" in value:
        return inputs[value["$"]]
    name, kind = value["torch"], value["kind"]
    found = torch.device(name) if kind == "device" else vars(torch).get(name)
    if not isinstance(found, _NAMED):
        raise GraphError(f"torch {torch.__version__} has no {kind} {name!r}")
    return found


def compute(attrs: Attrs, *inputs: Any) -> Any:
    """Run the call as torch runs it."""
    args = unpack(attrs["args"], inputs)
    kwargs = {k: unpack(v, inputs) for k, v in attrs["kwargs"].items()}
    return resolve_target(attrs["target"])(*args, **kwargs)


def macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> int:
    """Multiply-accumulates on operands of these shapes: of the matrix products and convolutions that torch makes of
    the call, as `torch.utils.flop_counter` counts them; 0 where it knows none."""
    if len(shapes) < 2 or attrs["target"] in _BUILTINS:
        return 0
    return _macs(
        json.dumps({"target": attrs["target"], "args": attrs["args"], "kwargs": attrs["kwargs"]}), tuple(shapes)
    )


@functools.lru_cache(maxsize=1024)
def _macs(call: str, shapes: tuple[tuple[int, ...], ...]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        try:
            compute(json.loads(call), *tensors)
        except Exception:  # an operator that takes no floats, or knows no shapes without values, multiplies none
            return 0
    return int(counter.get_total_flops()) // 2
