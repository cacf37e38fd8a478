"""The steps from what users pass (a model, a hardware, a data set) to a calibrated graph with its space of bits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from hago.arithmetic.types import torch_dtype
from hago.calibration.collect import Calibration, collect
from hago.calibration.estimators import estimator as named_estimator
from hago.calibration.given_ranges import GivenRanges, ModesLike, ThresholdsLike, make_given_ranges
from hago.calibration.statistics import Estimator
from hago.data.batches import Batches
from hago.errors import DataError, GraphError, HardwareError, LogError, StrategyMismatch, as_strings
from hago.graph.execute import check_batches
from hago.graph.frontend import Attention, ModelLike, from_torch
from hago.graph.graph import OUTPUT, Graph
from hago.graph.nesting import read_tree
from hago.graph.passes.open_attention import ATTENTION, OPENED_INTO
from hago.hardware.file import check_hardware, hardware_hash, load_hardware
from hago.hardware.hardware import Hardware
from hago.ops import OPS
from hago.plan.dorefa_weights import DoReFaWeights, dorefa_made
from hago.plan.feasibility import prune_infeasible_choices
from hago.plan.placement import topology_of
from hago.plan.plan import Plan
from hago.plan.resolve import Resolver
from hago.plan.space import Space, build_space, with_kinds
from hago.plan.strategy import Conditions, HardwareId, Strategy
from hago.plan.threshold_sources import StoredThresholds, estimated_resolver, store_thresholds
from hago.plan.topology import Topology, escape, warn_of_unknown

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


def as_graph(
    model: ModelLike,
    dataset: Iterable[Any],
    hardware: Hardware | None = None,
    *,
    fold: bool = True,
    made_for: Collection[str] = (),
) -> tuple[Graph, Batches]:
    """The model imported, and the data set as batches of its inputs.

    Args:
        hardware: that the graph is for.
        made_for: of from_torch.

    Raises:
        GraphError: the model cannot be imported.
        DataError: the data is empty, ragged, not finite, or not the model's inputs.
    """
    batches = Batches(dataset, input_names(model))
    args = pytree.tree_map(lambda t: t[:2] if isinstance(t, Tensor) and t.ndim else t, batches.example)
    graph = import_on(hardware, model, args, fold=fold, made_for=made_for)
    check_batches(graph, batches)
    return graph, batches


def import_on(
    hardware: Hardware | None,
    model: ModelLike,
    args: Sequence[Any] = (),
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
    attention: Attention = "opened" if hardware is None or opens_attention(hardware) else "whole"
    ops = OPS if hardware is None else hardware.known_ops
    return from_torch(model, args, kwargs, fold=fold, ops=ops, attention=attention, made_for=made_for)


def opens_attention(hardware: Hardware) -> bool:
    """Whether attention is opened for a chip: it multiplies matrices of integers, and takes what stands between."""
    if not hardware.integer_descs("matmul"):
        return False
    if not hardware.float_descs(ATTENTION):
        return True  # whole, it could not run at all
    return all(hardware.integer_descs(op) or hardware.float_descs(op) for op in OPENED_INTO)


def input_names(model: ModelLike) -> tuple[str, ...]:
    """The names of the model's inputs: parameters without a default of an nn.Module's forward."""
    if isinstance(model, Graph):
        return model.inputs
    if isinstance(model, ExportedProgram):
        # numbers and None that the program was exported with are no inputs
        return tuple(name for name in model.graph_signature.user_inputs if isinstance(name, str))
    if not isinstance(model, nn.Module):
        raise GraphError(f"the model is a {type(model).__name__}; expected an nn.Module, ExportedProgram or Graph")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = tuple(p.name for p in parameters if p.kind in kinds and p.default is p.empty)
    return names or ("input",)


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """Which values are quantized, and how their thresholds are found: the options that searches, one-shot quantization
    and sensitivities share. `hago.search_quantize_strategy` explains each.

    Args:
        search_topology: whether the space chooses between integer and float, too. In a search, None lets the costs in
            use decide; elsewhere it stands for no.
    """

    estimator: str | Estimator | None = None
    keep_float: str | Sequence[str] = ()
    fix_bits: Mapping[str, int] | None = None
    thresholds: ThresholdsLike | GivenRanges | None = None
    modes: ModesLike | None = None
    search_topology: bool | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A calibrated graph on a piece of hardware. `prepare` makes it; searches and one-shot quantization start from it.

    Args:
        keep_float, fix_bits: the patterns of the user, and those that given modes stand for.
        refined: whether thresholds are those of `refinement`; where samples were kept aside to confirm them, the
            figures found on these, as JSON values.
    """

    graph: Graph
    hardware: Hardware
    batches: Batches
    topology: Topology
    space: Space
    calibration: Calibration
    estimator: Estimator
    resolver: Resolver
    keep_float: tuple[str, ...] = ()
    fix_bits: Mapping[str, int] = field(default_factory=dict)
    refined: bool | Mapping[str, Any] = False

    @property
    def without_row(self) -> tuple[str, ...]:
        """The nodes whose thresholds are estimated although ranges of others were given."""
        given, consts = self.calibration.given, self.graph.consts
        groups = ((k, g.source) for k, g in self.space.groups.items() if g.source not in consts)
        return tuple(dict.fromkeys(source for key, source in groups if given.named(key, source) is None))


def prepare(
    model: ModelLike,
    hardware: HardwareLike,
    dataset: Iterable[Any],
    options: QuantizationOptions = QuantizationOptions(),
    *,
    made_for: Collection[str] = (),
) -> Prepared:
    """Import the model, analyze its topology, build the space of bits, calibrate, and drop the choices of bits that fit
    no signature of the hardware.

    Args:
        made_for: of from_torch.

    Raises:
        HagoError: whatever is wrong with the model, the hardware, the data, the patterns or the tables.
    """
    chip = as_hardware(hardware)
    ops = chip.known_ops
    graph, batches = as_graph(model, dataset, chip, made_for=made_for)
    given = make_given_ranges(options.thresholds, options.modes, chip).at(graph)
    kept = (*as_strings(options.keep_float, "keep_float"), *given.float_patterns())
    topology = topology_of(graph, chip, kept, ops)
    warn_of_unknown(graph, chip)
    fixed = options.fix_bits
    if given.modes:
        groups = build_space(graph, chip, topology, None, ops).groups
        group_of = {str(edge): key for key, group in groups.items() for edge in group.edges}
        fixed = {**(fixed or {}), **given.fixed_bits(graph, group_of)}
    space = build_space(graph, chip, topology, fixed, ops)
    estimator = _estimator_for(chip, options.estimator)
    observed = {g.source for g in space.groups.values()}
    if options.search_topology:
        # another topology quantizes other edges
        space = with_kinds(space, chip, topology, graph)
        observed |= {graph.source(e) for e in graph.edges if e.dst != OUTPUT and topology.edges[e]}
    calibration = replace(collect(graph, batches, observed, ops), given=given)
    resolver = estimated_resolver(graph, chip, topology, space, calibration, estimator, ops)
    if (fits := prune_infeasible_choices(resolver)) is not space:
        space, resolver = fits, resolver.within(fits)
    return Prepared(graph, chip, batches, topology, space, calibration, estimator, resolver, kept, dict(fixed or {}))


def _estimator_for(hardware: Hardware, chosen: str | Estimator | None) -> Estimator:
    """The chosen estimator; by default `power2_range` where the hardware requires powers of two, else `mse`."""
    if chosen is None:
        chosen = "power2_range" if hardware.requantize.power_of_two else "mse"
    return named_estimator(chosen)


def plan_of(graph: Graph, hardware: Hardware, strategy: Strategy) -> Plan:
    """The Plan of a stored strategy.

    Raises:
        StrategyMismatch: it was made for another model or hardware.
    """
    return stored_resolver(graph, hardware, strategy)(strategy.bits)


def stored_resolver(graph: Graph, hardware: Hardware, strategy: Strategy) -> Resolver:
    """A Resolver with the thresholds, the topology and the space of a stored strategy.

    Raises:
        StrategyMismatch: it was made for another model or hardware.
    """
    strategy.check_against(graph.model_hash, hardware.name, hardware_hash(hardware))
    keep = [n for n, integer in strategy.topology.node_conds.items() if not integer]
    made_by = strategy.made_by
    ops = hardware.known_ops
    topology = topology_of(graph, hardware, [str(p) for p in made_by.get("keep_float", ())], ops)
    if any(topology.nodes.get(n) for n in keep) or conditions(topology) != strategy.topology:
        raise StrategyMismatch(
            "the strategy's topology is not the one this hardware gives for this model; it was edited, or made by "
            "another version of hago: search again"
        )
    fixed = {str(k): int(v) for k, v in made_by.get("fix_bits", {}).items()}
    space = build_space(graph, hardware, topology, fixed, ops)
    how = dorefa_made(made_by)
    weights = None if how is None else DoReFaWeights(graph, hardware, how, ops)
    return Resolver(graph, hardware, topology, space, StoredThresholds(graph, strategy), ops, constants=weights)


def import_for(
    model: ModelLike,
    strategy: Strategy,
    args: Sequence[Any] = (),
    hardware: Hardware | None = None,
    *,
    fold: bool = True,
) -> Graph:
    """The model a strategy was made for, imported anew; its inputs are remembered in the strategy.

    Raises:
        GraphError: the model cannot be imported.
    """
    if args or not isinstance(model, nn.Module):
        return import_on(hardware, model, args, fold=fold, made_for=[strategy.model_hash])
    remembered = strategy.made_by.get("inputs")
    if not remembered:
        raise GraphError("the strategy does not say which inputs the model takes; pass example_inputs")
    try:
        leaves = [_zeros((2, *t["shape"][1:]), t["dtype"]) for t in remembered["tensors"]]
        args, kwargs = pytree.tree_unflatten(leaves, read_tree(remembered["spec"]))
        args, kwargs = tuple(args), dict(kwargs)
    except Exception as error:  # torch's pytree raises whatever it meets
        raise LogError(f"the strategy's made_by.inputs cannot be read ({error}); pass example_inputs") from None
    return import_on(hardware, model, args, kwargs, fold=fold, made_for=[strategy.model_hash])


def _zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
    if math.prod(shape) > LARGEST_INPUT:
        raise ValueError(f"an input of shape {shape}; expected at most {LARGEST_INPUT} entries")
    return torch.zeros(shape, dtype=torch_dtype(dtype))


def inputs_of(graph: Graph) -> dict[str, Any]:
    """The inputs of a graph as `import_for` needs them, as JSON values."""
    tensors = [
        {"shape": list(graph[n].shape or ()), "dtype": graph[n].attrs.get("dtype", "float32")} for n in graph.inputs
    ]
    spec = graph.in_spec
    if spec is None:
        spec = pytree.treespec_dumps(pytree.tree_structure((tuple(range(len(tensors))), {})))
    return {"tensors": tensors, "spec": spec}


def plan_and_batches(
    model: ModelLike, hardware: HardwareLike, strategy: StrategyLike, dataset: Iterable[Any]
) -> tuple[Plan, Batches]:
    """The Plan of a strategy for a model, and the data to run it on.

    Raises:
        StrategyMismatch: it was made for another model or hardware.
    """
    chip, chosen = as_hardware(hardware), as_strategy(strategy)
    graph, batches = as_graph(model, dataset, chip, made_for=[chosen.model_hash])
    return plan_of(graph, chip, chosen), batches


def held_out_batches(model: ModelLike, prepared: Prepared, dataset: Iterable[Any], labels: bool) -> Batches:
    """Batches that a search does not see, checked before it begins.

    Args:
        labels: whether they have to be classes.

    Raises:
        DataError: empty, ragged, not finite, without the labels, or samples of other shapes or dtypes than those of
            the calibration.
    """
    try:
        found = Batches(dataset, input_names(model), like=prepared.batches)
    except DataError as error:
        raise DataError(f"held-out data: {error}") from None
    got, known = (_kinds(batches) for batches in (found, prepared.batches))
    if got != known:
        raise DataError(f"held-out data has samples of {got}; the calibration data has {known}")
    if labels and not found.classed:
        raise DataError("held-out data: the objective needs labels that are classes; pass (inputs, labels) batches")
    return found


def _kinds(batches: Batches) -> str:
    """Shapes and dtypes of samples."""
    return ", ".join(f"{tuple(x.shape[1:])} {x.dtype}" for x in next(iter(batches)).inputs)


def conditions(topology: Topology) -> Conditions:
    """A topology as a strategy stores it."""
    return Conditions(dict(topology.nodes), {str(e): q for e, q in topology.edges.items()})


def make_strategy(prepared: Prepared, plan: Plan, bits: Mapping[str, int], made_by: Mapping[str, Any]) -> Strategy:
    """A Strategy from a Plan and its bits."""
    resolver, own = prepared.resolver.settled(bits)
    floats = sorted(prepared.space.floats(bits))
    if floats:
        made_by = {**made_by, "keep_float": [*made_by.get("keep_float", ()), *map(escape, floats)]}
    return Strategy(
        model_hash=prepared.graph.model_hash,
        hardware=HardwareId(prepared.hardware.name, hardware_hash(prepared.hardware)),
        topology=conditions(resolver.topology),
        bits=own,
        thresholds=store_thresholds(plan),
        made_by={**made_by, "inputs": inputs_of(prepared.graph)},
    )
