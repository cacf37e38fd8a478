"""Support of torch.compile: one custom operator runs a whole integer model, so that the graph does not break there.

The operator is opaque on purpose. If a compiler fused operators of a float island, the last bits of its values would
change, and the outputs of an integer model must be the same wherever it runs.

The operator is defined when the first integer model of a process is made. It finds a model by its handle, a string
that torch.compile guards, so that the graph of one model never runs another. Graphs do not keep models alive: the
caller of torch.compile must.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from hago.data import as_tensor
from hago.errors import HagoError
from hago.graph import check_inputs, compute_real, run_graph
from hago.plan import Plan

_NAME: Final = "hago::run_integer_model"


class CompilableModel(Protocol):
    """The interface of a model that the operator runs; `reference.IntegerModel` has it."""

    plan: Plan

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs for flat inputs."""


@dataclass(frozen=True, slots=True)
class _Registry:
    """The models of this process by handle, and the torch library that defines the operator."""

    library: Any
    models: MutableMapping[str, CompilableModel] = field(default_factory=WeakValueDictionary)
    numbers: Iterator[int] = field(default_factory=itertools.count)


def register(model: CompilableModel) -> str:
    """Register a model, and return the handle by which the operator finds it as long as it exists."""
    registry = _registry()
    handle = f"integer model {next(registry.numbers)} of this process"
    registry.models[handle] = model
    return handle


def run_compiled(leaves: Sequence[Any], handle: str) -> list[Tensor]:
    """The outputs of a model, as a single call in the graph that torch.compile traces.

    Args:
        leaves: the flattened arguments of the model's forward.
    """
    # no torch.no_grad: if inputs are refused inside of it, tracing leaves gradients switched off
    # torch.compile follows torch.as_tensor, but not what `as_tensor` does to an array
    given = [torch.as_tensor(x) for x in leaves if isinstance(x, (Tensor, np.ndarray))]
    tensors = [as_tensor(x, "an input").detach() for x in given]
    outputs: list[Tensor] = torch.ops.hago.run_integer_model(tensors, handle)
    return outputs


@functools.cache
def _registry() -> _Registry:
    untyped: Any = torch.library
    library = untyped.Library("hago", "FRAGMENT")
    library.define("run_integer_model(Tensor[] inputs, str model) -> Tensor[]")
    library.impl("run_integer_model", _run, "CompositeExplicitAutograd")
    torch.library.register_fake(_NAME, _shapes, lib=library)
    return _Registry(library)


def _model(handle: str) -> CompilableModel:
    model = _registry().models.get(handle)
    if model is None:
        raise HagoError(
            f"a compiled graph runs {handle}, which was deleted; keep a reference to the model while its graph is used"
        )
    return model


def _run(inputs: Sequence[Tensor], handle: str) -> list[Tensor]:
    """Run a model. Outputs do not share memory with inputs or constants, as torch requires of an operator."""
    model = _model(handle)
    consts = [x for x in model.plan.graph.consts.values() if isinstance(x, Tensor)]
    used = {x.untyped_storage().data_ptr() for x in (*inputs, *consts)}
    outputs = []
    for value in model.run(check_inputs(model.plan.graph, inputs)):
        address = value.untyped_storage().data_ptr()
        outputs.append(value.clone(memory_format=torch.contiguous_format) if address in used else value.contiguous())
        used.add(address)
    return outputs


def _shapes(inputs: Sequence[Tensor], handle: str) -> list[Tensor]:
    """Empty tensors of the outputs' shapes and dtypes, which are those of the float model."""
    plan = _model(handle).plan
    consts = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in plan.graph.consts.items()}
    real = run_graph(plan.graph, inputs, lambda node, values: compute_real(node, values, plan.ops), consts=consts)
    return [torch.empty(value.shape, dtype=value.dtype) for value in real]
