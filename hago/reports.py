"""The public calls that only look: what will be integer, what it costs, how good it is, and why.

Glue, no logic, as `api`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hago.api import create_quantizer
from hago.calibrate.statistics import Estimator
from hago.cost import Cost
from hago.cost_range import CostRange, cost_range
from hago.costing import plan_cost
from hago.debug.explain import Explanation, explain_topology
from hago.debug.inspect import GraphStatistic, inspect_plan
from hago.frontend.torch_export import ModelLike
from hago.objective import ObjectiveLike
from hago.objective import objective as named_objective
from hago.prepare import HardwareLike, StrategyLike, as_hardware, as_strategy, import_on, planned, prepare
from hago.qat.policies import topology_of
from hago.search.searcher import Score
from hago.searching.sensitivity import Sensitivity
from hago.searching.sensitivity import measure_sensitivity as sensitivity_of
from hago.space import build_space
from hago.trials.evaluate import Evaluator


def evaluate_strategy(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    objective: ObjectiveLike = "sqnr",
) -> Score:
    """How a strategy does on a data set."""
    chosen = as_strategy(strategy)
    plan, batches = planned(model, hardware, chosen, dataset)
    return Evaluator(plan.graph, batches, named_objective(objective), plan.ops).score(plan, chosen.bits)


def explain(
    model: ModelLike,
    hardware: HardwareLike,
    example_inputs: Sequence[Any] = (),
    *,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
) -> Explanation:
    """What will be integer, what stays float and why, before any search.

    Args:
        example_inputs: one batch, to export an nn.Module with.
    """
    chip = as_hardware(hardware)
    ops = chip.known_ops
    graph = import_on(chip, model, example_inputs)
    topology = topology_of(graph, chip, keep_float, ops)
    return explain_topology(graph, chip, topology, build_space(graph, chip, topology, fix_bits, ops), ops)


def estimate_cost(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    example_inputs: Sequence[Any] = (),
    *,
    batch: int = 1,
) -> Cost:
    """What a strategy takes on the hardware: bytes, operations, and cycles and energy as far as the
    hardware's description gives figures for them; `.missing` says what it does not give.

    Args:
        example_inputs: see create_quantizer.
        batch: samples in one run.

    Raises:
        StrategyMismatch: the strategy was made for another model or hardware.
    """
    return plan_cost(create_quantizer(model, hardware, strategy, example_inputs).plan, batch)


def measure_sensitivity(
    model: ModelLike,
    hardware: HardwareLike,
    dataset: Iterable[Any],
    *,
    objective: ObjectiveLike = "sqnr",
    estimator: str | Estimator | None = None,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Sensitivity:
    """The expected loss of every choice of bits on every edge, from one forward and one backward pass
    over the data: what a search of bits is guided by.

    Args:
        objective: what is lost: accuracy reads labels, kl and agreement compare class probabilities,
            everything else the outputs themselves.
        seed: of the random signs.

    Returns:
        A table: print it, or take `.losses`, `.save(path)`, `.to_json()`.
    """
    prepared = prepare(model, hardware, dataset, estimator=estimator, keep_float=keep_float, fix_bits=fix_bits)
    return sensitivity_of(prepared, named_objective(objective), seed)


def explain_cost(
    model: ModelLike,
    hardware: HardwareLike,
    example_inputs: Sequence[Any] = (),
    *,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
) -> CostRange:
    """What the model takes at its most bits, at its fewest, and in float, before any search."""
    chip = as_hardware(hardware)
    ops = chip.known_ops
    graph = import_on(chip, model, example_inputs)
    topology = topology_of(graph, chip, keep_float, ops)
    return cost_range(graph, chip, topology, build_space(graph, chip, topology, fix_bits, ops), ops)


def inspect_graph_statistic(
    model: ModelLike, hardware: HardwareLike, strategy: StrategyLike, dataset: Iterable[Any]
) -> GraphStatistic:
    """Node by node, float against simulated against integer, and the cause of every error.

    Returns:
        A table: print it, or take `.to_json()`, `.to_csv()`, `.first_wrong`.
    """
    return inspect_plan(*planned(model, hardware, strategy, dataset))
