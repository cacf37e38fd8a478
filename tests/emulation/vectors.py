"""Conformance vectors, the published values of other engines: read them, generate their inputs, compare results."""

from __future__ import annotations

import ast
import json
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parent.parent / "golden"
#: The environment variable that names one more file of vectors to run.
MORE = "HAGO_CONFORMANCE"


@dataclass(frozen=True)
class Vector:
    """One case: inputs, and the results of the original implementation."""

    id: str
    system: str
    op: str
    params: Mapping[str, Any]
    inputs: Mapping[str, Any]
    expected: Mapping[str, Any]
    tolerance: float


def load(systems: tuple[str, ...]) -> list[Vector]:
    """The golden vectors of the systems, and those of the file that HAGO_CONFORMANCE names."""
    files = [GOLDEN / f"conformance_{system.replace('-', '_')}.json" for system in systems]
    if os.environ.get(MORE):
        files.append(Path(os.environ[MORE]))
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    unique = {json.dumps(row, sort_keys=True): row for row in rows if row["system"] in systems}
    names = [f.name for f in fields(Vector)]
    return [Vector(**{name: row[name] for name in names}) for row in unique.values()]


# ---------------------------------------------------------------- tensors
def tensor(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Nested lists of numbers, or "nan" and "inf" as text, as a tensor."""
    return torch.tensor(_numbers(values), dtype=dtype)


def _numbers(values: Any) -> Any:
    return [_numbers(v) for v in values] if isinstance(values, list) else float(values)


def with_gradient(call: Any, x: Tensor, grad_out: Any, *others: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`call(x, *others)` and, where `grad_out` is given, the gradients of x and the others."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *others)]
    y = call(*leaves)
    if grad_out is None:
        return y, []
    y.backward(tensor(grad_out, y.dtype).reshape(y.shape))
    return y, [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]


# ---------------------------------------------------------------- the comparison of results
def differences(got: Any, expected: Any, tolerance: float, where: str = "") -> list[str]:
    """The entries of `got` that differ from `expected` by more than `tolerance * max(1, |expected|)`.

    Keys of `got` that `expected` does not have are ignored.
    """
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or not set(expected) <= set(got):
            return [f"{where}: got {got!r}, expected the keys {sorted(expected)}"]
        return [d for key in expected for d in differences(got[key], expected[key], tolerance, f"{where}.{key}")]
    if isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            return [f"{where}: got {got!r}, expected {len(expected)} entries"]
        pairs = zip(got, expected, strict=True)
        return [d for i, (g, e) in enumerate(pairs) for d in differences(g, e, tolerance, f"{where}[{i}]")]
    if isinstance(expected, str) and expected not in ("nan", "inf", "-inf"):
        return [] if got == expected else [f"{where}: got {got!r}, expected {expected!r}"]
    number, other = float(expected), float(got)
    near = math.isfinite(number) and abs(other - number) <= tolerance * max(1.0, abs(number))
    same = other == number or (math.isnan(other) and math.isnan(number))
    return [] if same or near else [f"{where}: got {got!r}, expected {expected!r}, tolerance {tolerance}"]


def float_differences(got: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> list[str]:
    """The differences of results that may be tensors: entry by entry, whatever their shape.

    With a tolerance of 0 entries must be equal in float32.
    """
    missing = [f"not computed: {key}" for key in expected if key not in got]
    kept = {key: _entries(value, tolerance) for key, value in got.items()}
    wanted = {key: _entries(value, tolerance) for key, value in expected.items() if key in got}
    return missing + differences(kept, wanted, tolerance)


def _entries(values: Any, tolerance: float) -> list[Any]:
    if isinstance(values, Tensor):
        values = values.detach().to(torch.float64 if values.is_floating_point() else values.dtype).tolist()
    if isinstance(values, list | tuple):
        return [entry for value in values for entry in _entries(value, tolerance)]
    is_text = isinstance(values, str) and values not in ("nan", "inf", "-inf")
    return [values if is_text or tolerance else float(np.float32(float(values)))]


# ---------------------------------------------------------------- generated inputs
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.FloorDiv: operator.floordiv,
}
_NUMPY = {
    "abs", "maximum", "minimum", "clip", "exp", "log", "sqrt", "sin", "cos", "tanh", "sign", "where", "arange",
    "linspace", "zeros", "ones", "full", "concatenate", "float32", "float64", "pi", "random",
}  # fmt: skip
_DRAWS = {
    "rand", "randn", "uniform", "normal", "laplace", "exponential", "gamma", "beta", "lognormal", "standard_t",
    "standard_normal", "chisquare", "logistic", "gumbel", "weibull", "randint", "random_sample", "standard_cauchy",
}  # fmt: skip
_ARRAY = {"astype", "clip", "reshape", "max", "min", "mean", "std", "size"}


_FUNCTIONS: dict[str, Any] = {
    "np": np,
    "numpy": np,
    "arange": np.arange,
    "abs": np.abs,
    "float32": np.float32,
    "relu": lambda x: np.maximum(x, 0),
}


def generate(text: str) -> np.ndarray:
    """Evaluate the text from which a vector's input is generated: arithmetic on numpy, and nothing else of Python.

    Its form is `name=expression; expression as float32`, optionally followed by `with x[i]=value`.
    """
    body, _, change = text.partition(" with ")
    names: dict[str, Any] = {}
    values: Any = None
    for part in body.split(";"):
        expression = re.sub(r"\s+(as\s+)?float32\s*$", "", part.strip())
        assigned = re.match(r"(\w+)\s*=(?!=)\s*(.*)", expression)
        values = _evaluate(ast.parse(assigned[2] if assigned else expression, mode="eval").body, names)
        if assigned:
            names[assigned[1]] = values
    out = np.asarray(values, dtype=np.float32).reshape(-1).copy()
    for index, value in re.findall(r"x\[(-?\d+)\]\s*=\s*([-+\d.e]+)", change):
        out[int(index)] = float(value)
    return out


def _evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return {**_FUNCTIONS, **names}[node.id]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_evaluate(node.left, names), _evaluate(node.right, names))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, names)
    if isinstance(node, ast.Tuple | ast.List):
        return [_evaluate(e, names) for e in node.elts]
    if isinstance(node, ast.Attribute):
        return _attribute(_evaluate(node.value, names), node.attr)
    if isinstance(node, ast.Call):
        arguments = [_evaluate(a, names) for a in node.args]
        keywords = {str(k.arg): _evaluate(k.value, names) for k in node.keywords}
        return _evaluate(node.func, names)(*arguments, **keywords)
    raise ValueError(f"a generator may not contain {ast.dump(node)}")


def _attribute(of: Any, name: str) -> Any:
    allowed: set[str] = set()
    if of is np:
        allowed = _NUMPY
    elif of is np.random:
        allowed = {"RandomState"}
    elif isinstance(of, np.random.RandomState):
        allowed = _DRAWS
    elif isinstance(of, np.ndarray):
        allowed = _ARRAY
    if name not in allowed:
        raise ValueError(f"a generator may not use {name!r} of {type(of).__name__}")
    return getattr(of, name)
