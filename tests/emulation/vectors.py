"""Conformance vectors, the published values of other engines: read them, generate their inputs, compare results."""

from __future__ import annotations

import ast
import json
import math
import operator
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Vector = dict[str, Any]

GOLDEN = Path(__file__).parent.parent / "golden"
#: The environment variable that names one more file of vectors to run.
MORE = "HAGO_CONFORMANCE"


def load(systems: tuple[str, ...]) -> list[Vector]:
    """The golden vectors of the systems, and those of the file that HAGO_CONFORMANCE names."""
    files = [GOLDEN / f"conformance_{system.replace('-', '_')}.json" for system in systems]
    if os.environ.get(MORE):
        files.append(Path(os.environ[MORE]))
    vectors = [vector for file in files for vector in json.loads(file.read_text(encoding="utf-8"))]
    unique = {(v["id"], json.dumps(v, sort_keys=True)): v for v in vectors if v["system"] in systems}
    return list(unique.values())


def differences(got: Any, expected: Any, tolerance: float, where: str = "") -> list[str]:
    """The entries of `got` that differ from `expected` by more than `tolerance * max(1, |expected|)`.

    Keys of `got` that `expected` does not have are ignored.
    """
    if isinstance(expected, dict):
        if not isinstance(got, dict) or not set(expected) <= set(got):
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
    near = abs(other - number) <= tolerance * max(1.0, abs(number))
    same = other == number or (math.isnan(other) and math.isnan(number))
    return [] if same or near else [f"{where}: got {got!r}, expected {expected!r}, tolerance {tolerance}"]


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
