"""Strategies: made from a Plan and its bits, and applied to their model again, without calibration.

`search.session` makes the strategies of a search, `quantize_in_one_shot` that of `hago.quantize` and of training that
begins without one. `hago.create_quantizer` and the reports apply one.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hago.calibration import named_estimator
from hago.correction import CorrectionPass, OffsetConstants, passes_from_json
from hago.data import Batches
from hago.errors import HagoError, StrategyMismatch
from hago.graph import Graph, ModelLike
from hago.hardware import Hardware, hardware_hash
from hago.importing import HardwareLike, StrategyLike, as_hardware, as_strategy, import_with_data, inputs_of
from hago.plan import (
    Conditions,
    Constants,
    HardwareId,
    Plan,
    Resolver,
    StoredThresholds,
    Strategy,
    Topology,
    analyze,
    build_space,
    expand_policies,
    store_thresholds,
)
from hago.plan.dorefa_weights import DoReFaWeights, dorefa_scheme_of
from hago.search.preparation import Prepared, default_estimator


def make_strategy(prepared: Prepared, plan: Plan, bits: Mapping[str, int], made_by: Mapping[str, Any]) -> Strategy:
    """A Strategy from a Plan and its bits."""
    # a point may turn nodes float, which gives a space of its own
    resolver, own = prepared.resolver.variant_at(bits)
    floats = sorted(prepared.space.floats(bits))
    if floats:
        kept = [*made_by.get("keep_float", ()), *map(glob.escape, floats)]
        made_by = {**made_by, "keep_float": kept, "chosen_float": floats}
    constants = prepared.resolver.constants
    offsets = constants.encoded() if isinstance(constants, OffsetConstants) else {}
    return Strategy(
        model_hash=prepared.graph.model_hash,
        hardware=HardwareId(prepared.hardware.name, hardware_hash(prepared.hardware)),
        topology=conditions(resolver.topology),
        bits=own,
        thresholds=store_thresholds(plan),
        made_by={**made_by, "inputs": inputs_of(prepared.graph)},
        corrections=replace(prepared.corrections, offsets=offsets),
    )


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
        LogError: its corrections do not fit the model.
    """
    strategy.check_against(graph.model_hash, hardware.name, hardware_hash(hardware))
    keep = [n for n, integer in strategy.topology.node_conds.items() if not integer]
    made_by = strategy.made_by
    ops = hardware.known_ops
    graph = strategy.corrections.apply(graph, ops)
    kept = expand_policies([str(p) for p in made_by.get("keep_float", ())], graph, hardware, ops)
    topology = analyze(graph, hardware, kept, ops, [str(name) for name in made_by.get("chosen_float", ())])
    if any(topology.nodes.get(n) for n in keep) or conditions(topology) != strategy.topology:
        raise StrategyMismatch(
            "the strategy's topology is not the one this hardware gives for this model; it was edited, or made by "
            "another version of hago: search again"
        )
    # not with the patterns of `fix_bits`: what came of them are the strategy's bits
    space = build_space(graph, hardware, topology, ops=ops)
    how = dorefa_scheme_of(made_by)
    constants: Constants | None = strategy.corrections.constants(graph, hardware.requantize.rounding)
    if how is not None:
        constants = DoReFaWeights(graph, hardware, how, ops)
    return Resolver(graph, hardware, topology, space, StoredThresholds(graph, strategy), ops, constants=constants)


def chosen_estimator(strategy: Strategy, hardware: Hardware) -> str | None:
    """The estimator that the user chose for a strategy, as an option names it, or "ESTIMATOR" for one of the user's
    own; None where none was chosen: thresholds are those of the default, or refined."""
    name = str(strategy.made_by.get("estimator", ""))
    if not name or strategy.made_by.get("refined") or name == named_estimator(default_estimator(hardware)).name:
        return None
    try:
        return named_estimator(name).name
    except HagoError:
        return "ESTIMATOR"


def is_one_shot(strategy: Strategy) -> bool:
    """Whether a strategy is that of `hago.quantize`, so that it is no better than one shot."""
    return "estimator" in strategy.made_by and {"searcher", "finetuned", "trained"}.isdisjoint(strategy.made_by)


def passes_of(strategy: Strategy) -> tuple[CorrectionPass, ...]:
    """What the passes of corrections gained when a strategy was made; none where it does not say.

    Raises:
        LogError: the record was edited.
    """
    return passes_from_json(strategy.made_by.get("passes", ()), "the strategy")


def plan_and_batches(
    model: ModelLike, hardware: HardwareLike, strategy: StrategyLike, dataset: Iterable[Any]
) -> tuple[Plan, Batches]:
    """The Plan of a strategy for a model, and the data to run it on.

    Raises:
        StrategyMismatch: it was made for another model or hardware.
    """
    chip, chosen = as_hardware(hardware), as_strategy(strategy)
    graph, batches = import_with_data(model, dataset, chip, made_for=[chosen.model_hash])
    return plan_of(graph, chip, chosen), batches


def conditions(topology: Topology) -> Conditions:
    """A topology as a strategy stores it."""
    return Conditions(dict(topology.nodes), {str(e): q for e, q in topology.edges.items()})
