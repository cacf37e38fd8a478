"""Exports of networks, made once in a process: torch.export takes most of the time of a small search.

A model is exported anew unless all that its export depends on is equal: its classes, all that its modules hold, and
what it is given. Whoever tests the import itself, in `tests/graph` and `tests/ops`, exports every time; so does
`--whole`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from hago.caching import LRU
from hago.graph.frontend import exported_program

#: Larger models are exported every time: it takes little of their tests' time.
MOST_BYTES = 1 << 20


def key_of(model: nn.Module, args: Any, kwargs: Any) -> Any | None:
    """What an export depends on; None if that is not certain, as of classes that a test defines in its body."""
    if sum(t.nbytes for t in (*model.parameters(), *model.buffers())) > MOST_BYTES:
        return None
    content = io.BytesIO()
    try:
        _Pickler(content).dump((model, pytree.tree_map(_described, (args, dict(kwargs or {})))))
    except Exception:
        return None  # what cannot be pickled
    return tuple(type(module) for module in model.modules()), content.getvalue()


class _Pickler(pickle.Pickler):
    """Writes tensors by their values: torch writes equal ones in different ways."""

    def reducer_override(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return NotImplemented
        return type(x), (*_described(x), x.requires_grad, x.detach().contiguous().numpy().tobytes())


def _described(x: Any) -> Any:
    return (tuple(x.shape), tuple(x.stride()), str(x.dtype)) if isinstance(x, torch.Tensor) else x


class Exports:
    """Takes the place of the functions of `hago.graph.frontend` that call torch.export."""

    def __init__(self, most: int = 100) -> None:
        self.export, self.trace_again = exported_program._export, exported_program._traced_again
        self.programs: LRU[Any, ExportedProgram] = LRU(most)
        self.traced: LRU[Any, tuple[ExportedProgram, ExportedProgram, set[str]]] = LRU(most)

    def export_once(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None) -> ExportedProgram:
        key = key_of(model, args, kwargs)
        if key is None:
            return self.export(model, args, kwargs)
        # of a copy, since the program holds the parameters of its model, which tests may change
        return self.programs.get_or_make(key, lambda: self.export(copy.deepcopy(model), args, kwargs))

    def trace_once(self, program: ExportedProgram, table: Any) -> ExportedProgram:
        def trace() -> tuple[ExportedProgram, ExportedProgram, set[str]]:
            return program, self.trace_again(program, table), set(*used)

        used = [next(iter(table.values())).args[0]] if table else []  # the calls that were decomposed
        _, traced, decomposed = self.traced.get_or_make((id(program), bool(table)), trace)
        for each in used:
            each.update(decomposed)
        return traced

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(exported_program, "_export", self.export_once)
        patch.setattr(exported_program, "_traced_again", self.trace_once)
