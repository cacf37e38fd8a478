"""Chips that refuse some points: guides know which, and searches end."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from refusing_chips import DATA, behind, either, gathering, layers, side_by_side, signs

from hago import search_quantize_strategy
from hago.cost.cost import plan_cost
from hago.errors import InfeasibleBits
from hago.hardware.hardware import Hardware
from hago.plan.space import FLOAT, Bits, Space
from hago.search.goal import GoalOptions, make_goal
from hago.search.guidance import make_surrogate
from hago.search.preparation import Prepared, QuantizationOptions, prepare
from hago.search.redundancy import prune_redundant_choices

BYTES: Final = "activation_bytes <= 500"
WEIGHTS: Final = "weight_bytes <= 250"
SEARCHERS: Final = (
    "gradient", "sensitivity", "pareto:points=6,rounds=2", "greedy", "annealing", "random:trials=20", "tpe:trials=12",
)  # fmt: skip
#: Chips and fixed bits with which the most bits, or the fewest, do not go together.
REFUSED: Final = ((either(), {}), (signs(), {"conv0:out": 4}), (signs(), {"conv2:out": 8}))


def every_point(space: Space) -> list[dict[str, int]]:
    listed = itertools.product(*(g.choices for g in space.groups.values()))
    return [dict(zip(space.groups, choices, strict=True)) for choices in listed]


def runs(prepared: Prepared, bits: Bits) -> bool:
    try:
        return bool(prepared.resolver(bits))
    except InfeasibleBits:
        return False


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("metric", ["activation_bytes", "requantized"])
def test_what_costs_without_end_is_what_is_refused(metric: str, count: int) -> None:
    """And a point that runs is not taken for one because its neighbours would have to change with it."""
    prepared = prune_redundant_choices(
        prepare(layers(count), signs(), DATA, QuantizationOptions(estimator="max_range")), [metric]
    )
    space = prepared.space
    surrogate = make_surrogate(prepared, make_goal(GoalOptions("sqnr")), space.widest(), metric=metric)
    every = every_point(space)
    found = [(runs(prepared, bits), math.isfinite(surrogate.cost(bits))) for bits in every]
    assert set(found) == {(True, True), (False, False)}


def test_what_runs_behind_fewer_bits_alone_has_a_cost() -> None:
    prepared = prune_redundant_choices(
        prepare(layers(3), behind(), DATA, QuantizationOptions(estimator="max_range")), ["activation_bytes"]
    )
    surrogate = make_surrogate(
        prepared, make_goal(GoalOptions("sqnr")), prepared.space.widest(), metric="activation_bytes"
    )
    assert all(surrogate.cost(bits) < math.inf for bits in every_point(prepared.space) if runs(prepared, bits))


def test_bits_of_a_float_node_fit_what_it_reads() -> None:
    prepared = prepare(
        layers(2), signs(floats=True), DATA, QuantizationOptions(estimator="max_range", search_topology=True)
    )
    space = prepared.space
    surrogate = make_surrogate(prepared, make_goal(GoalOptions("sqnr")), space.widest(), metric="activation_bytes")
    narrow = {**space.widest(), "conv0:out": 4}
    assert surrogate.cost(narrow) == math.inf and not runs(prepared, narrow)
    real = {**narrow, "conv1:kind": FLOAT}
    assert surrogate.cost(real) < math.inf and runs(prepared, real)


@pytest.mark.parametrize("limits", [BYTES, WEIGHTS, (BYTES, WEIGHTS), (WEIGHTS, BYTES)], ids=str)
@pytest.mark.parametrize("searcher", ["gradient", "sensitivity", "pareto:points=6,rounds=2"])
def test_a_search_runs_to_its_end(searcher: str, limits: str | tuple[str, ...], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    strategy, _ = search_quantize_strategy(
        layers(3), signs(), DATA, searcher=searcher, budget_cost=limits, log=log, progress=False
    )
    costs = strategy.made_by["costs"]
    assert costs["activation_bytes"] <= 500 or BYTES not in limits
    assert costs["weight_bytes"] <= 250 or WEIGHTS not in limits
    refused = [line for line in log.read_text().splitlines()[1:] if json.loads(line)["score"]["infeasible"]]
    assert not refused or BYTES not in limits


@pytest.mark.parametrize("searcher", SEARCHERS)
@pytest.mark.parametrize(("chip", "fixed"), REFUSED, ids=lambda x: getattr(x, "name", str(x)))
def test_searches_whose_widest_or_narrowest_point_is_refused(
    chip: Hardware, fixed: Mapping[str, int], searcher: str, tmp_path: Path
) -> None:
    log, how = tmp_path / "log.jsonl", {"fix_bits": fixed, "searcher": searcher, "progress": False}
    strategy, score = search_quantize_strategy(layers(3), chip, DATA, log=log, budget="24 trials", **how)
    trials = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert not trials[0]["score"]["infeasible"]
    assert score == strategy.made_by["results"]["sqnr"]
    assert all(strategy.bits[key] == bits for key, bits in fixed.items())


@pytest.mark.parametrize("searcher", ["gradient", "sensitivity", "pareto:points=6,rounds=2"])
@pytest.mark.parametrize("limit", ["weight_bytes <= 200", "bops <= 9000000", "effective_bits <= 5"])
def test_what_does_not_go_together_is_not_asked(searcher: str, limit: str, tmp_path: Path) -> None:
    """Costs of weights alone know of no signatures, and no guided search asks for 16 bits by 8."""
    log = tmp_path / "log.jsonl"
    search_quantize_strategy(
        layers(3), either(), DATA, searcher=searcher, budget_cost=limit, log=log, progress=False
    )  # fmt: skip
    trials = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert not any(t["score"]["infeasible"] for t in trials)


@pytest.mark.parametrize("metric", ["", "activation_bytes", "bytes_moved"])
def test_a_node_of_many_operands_has_a_guide_that_grows_as_they_do(metric: str) -> None:
    """A table over all of them together would have 2 ** 14 mixtures of dtypes, each with a Plan."""
    prepared = prune_redundant_choices(
        prepare(side_by_side(14), gathering(), DATA, QuantizationOptions(estimator="max_range")),
        [metric] if metric else [],
    )
    space = prepared.space
    start = space.widest()
    surrogate = make_surrogate(prepared, make_goal(GoalOptions("sqnr")), start, metric=metric)
    assert sum(len(term.table) for term in surrogate.terms) < 200 * len(space.groups)
    for key, group in space.groups.items():
        bits = {**start, key: group.choices[-1]}
        expected = plan_cost(prepared.resolver(bits))[metric] if metric else math.fsum(bits.values())
        assert surrogate.cost(bits) == pytest.approx(expected, rel=1e-3)
