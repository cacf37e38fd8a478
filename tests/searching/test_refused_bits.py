"""Chips that refuse some points and run the widest: guides know which, and guided searches end."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Final

import pytest
from building import Builder, seeded

from hago import search_quantize_strategy
from hago.errors import InfeasibleBits
from hago.graph import Graph
from hago.hardware import Accumulator, Hardware, OpDesc, TensorScheme
from hago.prepare import Prepared, prepare
from hago.searching.guidance import make_guide
from hago.searching.waste import tidied
from hago.space import FLOAT, Bits, Space
from hago.trials.goal import make_goal
from hago.types import INT32

DATA: Final = [(seeded(4, 3, 6, 6) * 3,), (seeded(4, 3, 6, 6),)]
BYTES: Final = "activation_bytes <= 500"
WEIGHTS: Final = "weight_bytes <= 250"


def layer(operand: str, out: str) -> OpDesc:
    return OpDesc([operand, "int8"], out, Accumulator(INT32), "output", min_bits=3)


def chip(floats: bool = False) -> Hardware:
    """Four bits have a sign, and eight have none: what reads four bits gives four."""
    layers, between = [layer("uint8", "int4"), layer("uint8", "uint8"), layer("int4", "int4")], ["int4", "uint8"]
    real = [OpDesc("float32", "float32", cost={"macs_per_cycle": 1, "elements_per_cycle": 1})] * floats
    ops = {"conv2d": [*layers, *real], "relu": [*(OpDesc(d, d) for d in between), *real]}
    return Hardware(ops, name="signs", activation=TensorScheme("affine"))


def layers(count: int) -> Graph:
    b = Builder()
    x = b.input(3, 6, 6, name="x")
    for i in range(count):
        x = x if i == 0 else b.call("relu", x, name=f"relu{i}")
        x = b.conv2d(x, seeded(4, 4 if i else 3, 3, 3, seed=i), name=f"conv{i}", padding=(1, 1))
    return b.graph(x)


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
    prepared = tidied(prepare(layers(count), chip(), DATA, estimator="max_range"), [metric])
    space = prepared.space
    guide = make_guide(prepared, make_goal("sqnr"), space.widest(), metric=metric)
    every = every_point(space)
    found = [(runs(prepared, bits), math.isfinite(guide.cost(bits))) for bits in every]
    assert set(found) == {(True, True), (False, False)}


def test_what_runs_behind_fewer_bits_alone_has_a_cost() -> None:
    """Four bits have a sign behind eight, and none behind four that have none, which the wide signature reads."""
    pairs = [("int8", "uint4"), ("uint8", "int4"), ("int4", "int4"), ("uint8", "uint8"), ("uint4", "uint4")]
    between = [OpDesc(d, d) for d in ("int4", "uint8", "int8", "uint4")]
    ops = {"conv2d": [layer(*p) for p in pairs], "relu": between}
    hardware = Hardware(ops, name="behind", activation=TensorScheme("affine"))
    prepared = tidied(prepare(layers(3), hardware, DATA, estimator="max_range"), ["activation_bytes"])
    guide = make_guide(prepared, make_goal("sqnr"), prepared.space.widest(), metric="activation_bytes")
    assert all(guide.cost(bits) < math.inf for bits in every_point(prepared.space) if runs(prepared, bits))


def test_bits_of_a_float_node_fit_what_it_reads() -> None:
    prepared = prepare(layers(2), chip(floats=True), DATA, estimator="max_range", kinds=True)
    space = prepared.space
    guide = make_guide(prepared, make_goal("sqnr"), space.widest(), metric="activation_bytes")
    narrow = {**space.widest(), "conv0:out": 4}
    assert guide.cost(narrow) == math.inf and not runs(prepared, narrow)
    real = {**narrow, "conv1:kind": FLOAT}
    assert guide.cost(real) < math.inf and runs(prepared, real)


@pytest.mark.parametrize("limits", [BYTES, WEIGHTS, (BYTES, WEIGHTS), (WEIGHTS, BYTES)], ids=str)
@pytest.mark.parametrize("searcher", ["sensitivity", "pareto:points=6,rounds=2"])
def test_a_search_runs_to_its_end(searcher: str, limits: str | tuple[str, ...], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    strategy, _ = search_quantize_strategy(
        layers(3), chip(), DATA, searcher=searcher, budget_cost=limits, log=log, progress=False
    )
    costs = strategy.made_by["costs"]
    assert costs["activation_bytes"] <= 500 or BYTES not in limits
    assert costs["weight_bytes"] <= 250 or WEIGHTS not in limits
    refused = [line for line in log.read_text().splitlines()[1:] if json.loads(line)["score"]["infeasible"]]
    assert not refused or BYTES not in limits
