"""Import what users pass: a model, a hardware, a strategy and a data set become a Graph, a Hardware, a Strategy and
Batches.

The functions of `hago.api`, the command line and `search.prepare` call it first. A model is imported for one chip, with
the chip's operators (`import_for_chip`), or as the strategy that is applied to it knows it (`import_for_strategy`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from hago.arithmetic.types import torch_dtype
from hago.data import Batches, OnBatch, warn_if_implausible
from hago.errors import GraphError, HardwareError, LogError
from hago.graph import (
    Attention,
    ExampleInputs,
    Graph,
    ModelLike,
    as_arguments,
    check_batches,
    check_export,
    check_exportable,
    check_runs,
    from_torch,
    read_tree,
    warn_of_scale,
)
from hago.graph.passes.open_attention import ATTENTION, OPENED_INTO, OPENED_INTO_GROUPS
from hago.hardware import Hardware, check_hardware, load_hardware
from hago.ops import OPS
from hago.plan import Strategy

#: The number of samples on which the scale of inputs is compared with that of training.
SCALE_SAMPLES: Final = 32
#: The most entries that an input remembered in a strategy may have.
LARGEST_INPUT: Final = 1 << 31

HardwareLike = Hardware | str | PathLike[str]
StrategyLike = Strategy | str | PathLike[str]


def as_hardware(hardware: HardwareLike) -> Hardware:
    """A Hardware, from itself, a name in hardware_specs, or a path; one that was built in Python is checked as a file
    is."""
    if isinstance(hardware, Hardware):
        check_hardware(hardware)
        return hardware
    if not isinstance(hardware, (str, PathLike)):
        raise HardwareError(f"hardware is a {type(hardware).__name__}; expected a Hardware, a name or a path")
    return load_hardware(hardware)


def as_strategy(strategy: StrategyLike) -> Strategy:
    """A Strategy, from itself or a path."""
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, (str, PathLike)):
        raise LogError(f"the strategy is a {type(strategy).__name__}; expected a Strategy or a path")
    return Strategy.load(Path(strategy))


def import_with_data(
    model: ModelLike,
    dataset: Iterable[Any],
    hardware: Hardware | None = None,
    *,
    fold: bool = True,
    made_for: Collection[str] = (),
    on_batch: OnBatch | None = None,
    role: str = "",
) -> tuple[Graph, Batches]:
    """The model imported, and the data set as batches of its inputs.

    Args:
        hardware: that the graph is for.
        made_for: of from_torch.
        on_batch, role: of Batches.

    Raises:
        GraphError: the model cannot be imported.
        DataError: the data is empty, ragged, not finite, or not the model's inputs; the message says of which shape
            and dtype they are, and a conversion on which the model runs if there is one.
    """
    batches = read_batches(model, dataset, role, on_batch=on_batch)
    if isinstance(model, nn.Module):
        check_exportable(model)
        check_runs(model, batches.example, where=f"{batches.title}: batch 0", labels=batches.example_labels)
    args = pytree.tree_map(lambda t: t[:2] if isinstance(t, Tensor) and t.ndim else t, batches.example)
    graph = import_for_chip(model, hardware, args, fold=fold, made_for=made_for)
    check_batches(graph, batches)
    if isinstance(model, nn.Module):
        ops = OPS if hardware is None else hardware.known_ops
        check_export(model, graph, batches.example, batches.title, ops)
    return graph, batches


def read_batches(
    model: ModelLike,
    dataset: Iterable[Any],
    role: str = "",
    *,
    like: Batches | None = None,
    on_batch: OnBatch | None = None,
) -> Batches:
    """A data set of the user as batches of a model's inputs, with a warning if its values are odd, or on another scale
    than those of training. Batches that were checked already are not warned of again.

    Args:
        role, like, on_batch: of Batches.

    Raises:
        DataError: of Batches.
    """
    names, optional = input_names(model), optional_names(model)
    batches = Batches(dataset, names, like=like, on_batch=on_batch, role=role, optional=optional)
    if not isinstance(dataset, Batches):
        warn_if_implausible(batches.title, batches.statistics)
        samples = None if batches.statistics.all_equal else batches.spread(SCALE_SAMPLES)
        if isinstance(model, nn.Module) and not model.training and samples is not None:
            warn_of_scale(model, samples, batches.title)
    return batches


def import_for_chip(
    model: ModelLike,
    hardware: Hardware | None,
    args: ExampleInputs = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    fold: bool = True,
    made_for: Collection[str] = (),
) -> Graph:
    """The model imported for a chip: with its operators, and attention opened where that gives it integers to multiply.

    Args:
        made_for: of from_torch.

    Raises:
        GraphError: the model cannot be imported.
    """
    attention: Attention = "opened" if hardware is None else attention_on(hardware)
    ops = OPS if hardware is None else hardware.known_ops
    return from_torch(model, args, kwargs, fold=fold, ops=ops, attention=attention, made_for=made_for)


def attention_on(hardware: Hardware) -> Attention:
    """How attention is imported for a chip: opened where the chip multiplies matrices of integers and takes all ops
    that it is opened into; attention with shared heads is opened into more of them."""
    if not hardware.integer_descs("matmul"):
        return "whole"
    if not hardware.float_descs(ATTENTION):
        return "opened"  # whole, it could not run at all

    def takes(ops: Collection[str]) -> bool:
        return all(hardware.integer_descs(op) or hardware.float_descs(op) for op in ops)

    if not takes(OPENED_INTO):
        return "whole"
    return "opened" if takes(OPENED_INTO_GROUPS) else "opened_unless_shared"


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    """The positional parameters of an nn.Module's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        return [p for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    except ValueError:
        raise GraphError(
            f"the parameters of the forward of a {type(model).__name__} cannot be read; of a module of TorchScript, "
            "pass the nn.Module that it was traced or scripted from"
        ) from None


def input_names(model: ModelLike) -> tuple[str, ...]:
    """The names of the model's inputs: parameters without a default of an nn.Module's forward."""
    if isinstance(model, Graph):
        return model.inputs
    if isinstance(model, ExportedProgram):
        # numbers and None that the program was exported with are no inputs
        return tuple(name for name in model.graph_signature.user_inputs if isinstance(name, str))
    if not isinstance(model, nn.Module):
        raise GraphError(f"the model is a {type(model).__name__}; expected an nn.Module, ExportedProgram or Graph")
    names = tuple(p.name for p in _positional(model) if p.default is p.empty)
    return names or ("input",)


def optional_names(model: ModelLike) -> tuple[str, ...]:
    """The names of the positional parameters with a default of an nn.Module's forward, if it has others without."""
    if not isinstance(model, nn.Module):
        return ()
    parameters = _positional(model)
    names = tuple(p.name for p in parameters if p.default is not p.empty)
    return names if len(names) < len(parameters) else ()


def import_for_strategy(
    model: ModelLike,
    strategy: Strategy,
    args: ExampleInputs = (),
    hardware: Hardware | None = None,
    *,
    fold: bool = True,
) -> Graph:
    """The model a strategy was made for, imported anew; its inputs are remembered in the strategy.

    Raises:
        GraphError: the model cannot be imported.
    """
    args = as_arguments(args)
    if args or not isinstance(model, nn.Module):
        return import_for_chip(model, hardware, args, fold=fold, made_for=[strategy.model_hash])
    remembered = strategy.made_by.get("inputs")
    if not remembered:
        raise GraphError("the strategy does not say which inputs the model takes; pass example_inputs")
    try:
        leaves = [_zeros((2, *t["shape"][1:]), t["dtype"]) for t in remembered["tensors"]]
        args, kwargs = pytree.tree_unflatten(leaves, read_tree(remembered["spec"]))
        args, kwargs = tuple(args), dict(kwargs)
    except Exception as error:  # torch's pytree raises whatever it meets
        raise LogError(f"the strategy's made_by.inputs cannot be read ({error}); pass example_inputs") from None
    return import_for_chip(model, hardware, args, kwargs, fold=fold, made_for=[strategy.model_hash])


def _zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
    if math.prod(shape) > LARGEST_INPUT:
        raise ValueError(f"an input of shape {shape}; expected at most {LARGEST_INPUT} entries")
    return torch.zeros(shape, dtype=torch_dtype(dtype))


def inputs_of(graph: Graph) -> dict[str, Any]:
    """The inputs of a graph as `import_for_strategy` needs them, as JSON values."""
    tensors = [{"shape": list(graph[n].shape or ()), "dtype": graph[n].dtype} for n in graph.inputs]
    spec = graph.in_spec
    if spec is None:
        spec = pytree.treespec_dumps(pytree.tree_structure((tuple(range(len(tensors))), {})))
    return {"tensors": tensors, "spec": spec}
