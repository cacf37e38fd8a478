"""Integer models in graphs of torch.compile: one operator runs a whole model, so that no graph breaks at it.

The operator is opaque on purpose. What a compiler fuses around a float island changes its last bits, and the
promise is that an integer model's outputs are the same however it is run.

The operator and the models that it can find are made with the first model of a process; a model is found by its
handle, a text, which torch.compile guards, so that one model's graph never runs another. Graphs do not keep
models alive: whoever compiled one holds it.
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

from hago.data.batches import as_tensor
from hago.errors import HagoError
from hago.graph.execute import check_inputs, compute_real, run_graph
from hago.plan.plan import Plan

_NAME: Final = "hago::run_integer_model"


class Runs(Protocol):
    """What the operator needs of a model."""

    plan: Plan

    def run(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs of flat inputs."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The models of this process by handle, and the library that the operator lives in."""

    library: Any
    models: MutableMapping[str, Runs] = field(default_factory=WeakValueDictionary)
    numbers: Iterator[int] = field(default_factory=itertools.count)


def registered(model: Runs) -> str:
    """The handle by which the operator finds a model for as long as it lives."""
    known = _known()
    handle = f"integer model {next(known.numbers)} of this process"
    known.models[handle] = model
    return handle


def run_compiled(leaves: Sequence[Any], handle: str) -> list[Tensor]:
    """A model's outputs, as one call in the graph that is being made."""
    # no torch.no_grad: where inputs are refused in the middle of it, tracing leaves gradients off for good
    tensors = [as_tensor(x, "an input").detach() for x in leaves if isinstance(x, (Tensor, np.ndarray))]
    outputs: list[Tensor] = torch.ops.hago.run_integer_model(tensors, handle)
    return outputs


@functools.cache
def _known() -> _Known:
    untyped: Any = torch.library
    library = untyped.Library("hago", "FRAGMENT")
    library.define("run_integer_model(Tensor[] inputs, str model) -> Tensor[]")
    library.impl("run_integer_model", _run, "CompositeExplicitAutograd")
    torch.library.register_fake(_NAME, _shapes, lib=library)
    return _Known(library)


def _model(handle: str) -> Runs:
    model = _known().models.get(handle)
    if model is None:
        raise HagoError(
            f"a compiled graph runs {handle}, which was deleted; keep a reference to the model while its graph is used"
        )
    return model


def _run(inputs: Sequence[Tensor], handle: str) -> list[Tensor]:
    """The outputs, each in memory of its own, as graphs expect of an operator."""
    model = _model(handle)
    consts = [x for x in model.plan.graph.consts.values() if isinstance(x, Tensor)]
    taken = {x.untyped_storage().data_ptr() for x in (*inputs, *consts)}
    outputs = []
    for value in model.run(check_inputs(model.plan.graph, inputs)):
        place = value.untyped_storage().data_ptr()
        outputs.append(value.clone(memory_format=torch.contiguous_format) if place in taken else value.contiguous())
        taken.add(place)
    return outputs


def _shapes(inputs: Sequence[Tensor], handle: str) -> list[Tensor]:
    """The outputs without their values: those of the float model, whose shapes and dtypes are the same."""
    plan = _model(handle).plan
    consts = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in plan.graph.consts.items()}
    real = run_graph(plan.graph, inputs, lambda node, values: compute_real(node, values, plan.ops), consts=consts)
    return [torch.empty(value.shape, dtype=value.dtype) for value in real]
