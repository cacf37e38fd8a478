"""Comparison of two strategies: paired differences, bits, thresholds and costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from building import residual_block, seeded

import hago
from hago.analysis.strategy_comparison import LISTED, MeasureDifference, StrategyComparison, compare_strategies
from hago.cost.cost import METRICS
from hago.errors import HagoError, StrategyMismatch
from hago.plan.strategy import Strategy
from hago.search.evaluate import Evaluator
from hago.search.objective import OBJECTIVES
from hago.search.stored_strategy import plan_and_batches

DATA = [(seeded(8, 3, 8, 8, seed=s), torch.arange(8) % 5) for s in range(3)]
CHIP = "x86_vnni"


def quantized(**options: object) -> Strategy:
    return hago.quantize(residual_block(), CHIP, DATA, **options).strategy  # type: ignore[arg-type]


def compared(a: Strategy, b: Strategy, objective: str | None = None) -> StrategyComparison:
    return compare_strategies(residual_block(), (CHIP, CHIP), (a, b), DATA, objective)


def test_values_are_those_of_each_strategy_alone() -> None:
    a, b = quantized(), quantized(fix_bits={"*": 4})
    result = compared(a, b, "mse")
    for index, strategy in enumerate((a, b)):
        plan, batches = plan_and_batches(residual_block(), CHIP, strategy, DATA)
        alone = Evaluator(plan.graph, batches, OBJECTIVES["mse"], also=[OBJECTIVES["sqnr"]]).score(plan, strategy.bits)
        for measure in result.measures:
            value = alone.results[OBJECTIVES[measure.name].figure]
            assert measure.values[index] == pytest.approx(-value if measure.is_loss else value)
    assert {m.name for m in result.measures} == {"mse", "sqnr", "agreement", "accuracy"}
    by_name = {m.name: m for m in result.measures}
    # four bits are worse, by either sign
    assert by_name["sqnr"].difference < 0 and by_name["sqnr"].better == "A" == by_name["mse"].better
    assert by_name["mse"].difference > 0


def test_exchanging_the_strategies_mirrors_the_result() -> None:
    a, b = quantized(), quantized(fix_bits={"*": 5})
    one, other = compared(a, b), compared(b, a)
    for first, second in zip(one.measures, other.measures, strict=True):
        assert first.difference == pytest.approx(-second.difference)
        assert first.interval == pytest.approx((-second.interval[1], -second.interval[0]))
        assert {first.better, second.better} in ({"A", "B"}, {""})
    assert other.bits == {group: (y, x) for group, (x, y) in one.bits.items()}
    assert other.costs == {name: (y, x) for name, (x, y) in one.costs.items()}


def test_a_strategy_equals_itself() -> None:
    strategy = quantized()
    result = compared(strategy, strategy)
    assert all(m.difference == 0 and m.interval == (0.0, 0.0) and not m.better for m in result.measures)
    assert not result.bits and not result.thresholds
    assert f"bits are equal in all {len(strategy.bits)} groups of edges" in str(result)


def test_bits_thresholds_and_floats_that_differ_are_told_apart() -> None:
    a, b = quantized(), quantized(keep_float="fc")
    result = compared(a, b)
    assert result.bits and all(both[1] is None for both in result.bits.values())
    assert "float" in str(result)
    other = compared(a, quantized(estimator="max_range"))
    assert not other.bits and 0 < other.thresholds <= other.groups
    assert f"thresholds differ in {other.thresholds} of them" in str(other)


def test_only_what_the_topology_keeps_float_is_called_float() -> None:
    chips = (CHIP, "tflite")
    pair = [hago.quantize(residual_block(), chip, DATA).strategy for chip in chips]
    result = compare_strategies(residual_block(), chips, pair, DATA)
    rows = {line.split()[0]: line for line in result.bits_text() if line.split()[0] in result.bits}
    seen = set()
    for key, both in result.bits.items():
        for strategy, bits in zip(pair, both, strict=True):
            if bits is None and strategy.topology.edge_conds.get(key, False):
                seen.add(key)
                assert "as its source" in rows[key] and "float" not in rows[key]
    assert seen


def test_costs_are_those_of_the_plans() -> None:
    a, b = quantized(), quantized(fix_bits={"*:1": 4})
    result = compared(a, b)
    for index, strategy in enumerate((a, b)):
        cost = hago.estimate_cost(residual_block(), CHIP, strategy)
        assert result.costs["weight_bytes"][index] == cost["weight_bytes"]
    assert set(result.costs) == set(METRICS)


def test_strategies_of_two_chips() -> None:
    model = residual_block()
    other = hago.quantize(model, "vta", DATA).strategy
    result = compare_strategies(model, (CHIP, "vta"), (quantized(), other), iter(DATA))
    assert result.hardware == (CHIP, "vta") and str(result).startswith("on x86_vnni and vta, 24 samples")


def test_a_strategy_of_another_model_is_named() -> None:
    wrong = replace(quantized(), model_hash="0" * 64)
    with pytest.raises(StrategyMismatch, match=r"^strategy B: "):
        compared(quantized(), wrong)
    with pytest.raises(HagoError, match="unknown objective"):
        compared(quantized(), quantized(), "klm")


def test_a_long_list_of_groups_is_cut_in_the_text_alone() -> None:
    bits = {f"n{i}:0": (8, 4) for i in range(LISTED + 5)}
    measure = MeasureDifference("sqnr", "dB", (30.0, 20.0), -10.0, (-11.0, -9.0), False)
    result = StrategyComparison((CHIP, CHIP), 8, (measure,), bits, len(bits), 0, {}, (0, 3))
    assert "and 5 more, which --json lists" in str(result) and "OVERFLOWED 3 times in B" in str(result)
    assert len(result.to_json()["bits"]) == LISTED + 5
    assert "-11.00 to -9.00 dB  A" in str(result)
