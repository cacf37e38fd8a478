"""Conformance vectors: a reader, and the comparison of a quantizer's results with the expected ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SYSTEMS = ("oneflow", "tensorflow", "dorefa", "pytorch")


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


def read(path: Path) -> list[Vector]:
    """The vectors of the four systems in a file."""
    names = tuple(Vector.__dataclass_fields__)
    rows = json.loads(path.read_text())
    return [Vector(**{name: row[name] for name in names}) for row in rows if row["system"] in SYSTEMS]


def tensor(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Nested lists of numbers, or "nan" and "inf" as text, as a tensor."""
    return torch.tensor(_numbers(values), dtype=dtype)


def _numbers(values: Any) -> Any:
    return [_numbers(v) for v in values] if isinstance(values, list) else float(values)


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, Tensor):
        values = values.detach().to(torch.float64 if values.is_floating_point() else values.dtype).tolist()
    if isinstance(values, (list, tuple)):
        for v in values:
            yield from _flat(v)
    else:
        yield values


def wrong(got: Any, expected: Any, tolerance: float) -> str:
    """Why `got` is not `expected`, or an empty string.

    `|got - expected| <= t * max(1, |expected|)`; t = 0 means equal in float32.
    """
    gots, wanted = list(_flat(got)), list(_flat(expected))
    if len(gots) != len(wanted):
        return f"{len(gots)} entries, expected {len(wanted)}"
    for i, (g, w) in enumerate(zip(gots, wanted, strict=True)):
        if not _close(g, w, tolerance):
            return f"entry {i} is {g}, expected {w}"
    return ""


def _close(got: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(got, str):
        return bool(got == expected)
    got, expected = float(got), float(expected)
    if np.isnan(expected) or np.isnan(got):
        return bool(np.isnan(expected) and np.isnan(got))
    if np.isinf(expected) or tolerance == 0:
        return bool(np.float32(got) == np.float32(expected))
    return abs(got - expected) <= tolerance * max(1.0, abs(expected))


def with_gradient(call: Any, x: Tensor, grad_out: Any, *others: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`call(x, *others)` and, where `grad_out` is given, the gradients of x and the others."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *others)]
    y = call(*leaves)
    if grad_out is None:
        return y, []
    y.backward(tensor(grad_out, y.dtype).reshape(y.shape))
    return y, [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
