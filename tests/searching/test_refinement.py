"""Refinement: what is expected of other thresholds against what they do, and searches that begin with it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from building import Builder, residual_block, seeded
from search.toys import timeless

import hago
from hago.costing import plan_cost
from hago.errors import LogError
from hago.frontend.data import Batch
from hago.gradients import divergence_pull, gradients, squared_error, squared_error_pull
from hago.hardware_file import available_hardware
from hago.numerics import quantize
from hago.prepare import Prepared, prepare
from hago.searching.refinement import refined, weighted
from hago.searching.search import SearchOptions, find
from hago.searching.waste import tidied
from hago.searching.weight_scales import DOUBT, LEAST, WeightScales
from hago.trials.evaluate import Evaluator, safe_start
from hago.trials.goal import make_goal

DATA = [(seeded(8, 3, 8, 8, seed=s), torch.arange(8) % 5) for s in range(2)]


# ---------------------------------------------------------------- one weight, by hand
def one_row() -> tuple[Prepared, WeightScales, torch.Tensor]:
    """x -> one output, so that a sketch of one sample at a time is exact."""
    b = Builder()
    b.linear(b.input(6, name="x"), seeded(1, 6, seed=1), name="fc")
    x = seeded(20, 6, seed=2)
    prepared = prepare(b.graph(), "x86_vnni", [x])
    bits = prepared.space.widest()
    return prepared, WeightScales.of(prepared, prepared.resolver(bits), bits), x


def held(prepared: Prepared, scales: WeightScales, index: int) -> torch.Tensor:
    (weight,) = scales.weights.values()
    grid = weight.with_factor(scales.factors[index])
    return quantize(prepared.graph.consts[weight.source].double(), grid) * grid.scale


def test_what_is_expected_of_a_linear_layer_is_what_happens() -> None:
    prepared, scales, x = one_row()
    (edge,) = scales.weights
    error = 0.01 * seeded(20, 1, seed=3)
    ops, nothing = prepared.hardware.known_ops, lambda edge: ()
    for probe, see in (
        (squared_error, scales.see_probe),
        (lambda *_: squared_error_pull([error], [error]), scales.see_slope),
    ):
        batches = [Batch((x[i : i + 1],), None) for i in range(20)] if see == scales.see_probe else [Batch((x,), None)]
        gradients(prepared.graph, batches, {}, probe, nothing, ops, chunk=32, see=see)
    weight = scales.weights[edge]
    assert weight.with_factor(1.0).key == weight.qparams.key
    before = held(prepared, scales, 0)
    for index in range(len(scales.factors)):
        moved = x.double() @ (held(prepared, scales, index) - before).T
        wanted = (error.double() + moved).square().sum() - error.double().square().sum()
        expected = weight.slopes[0, index] + weight.sketch[0, index].square().sum() / 2
        assert float(expected) == pytest.approx(float(wanted), rel=1e-4, abs=1e-7)


def test_the_pull_of_a_divergence_is_its_gradient() -> None:
    logits, error = seeded(3, 5, 2, seed=1).requires_grad_(), 1e-3 * seeded(3, 5, 2, seed=2)
    p = logits.detach().softmax(1)

    def divergence(e: torch.Tensor) -> torch.Tensor:
        other = (logits.detach() + e).log_softmax(1)
        return (p * (p.log() - other)).sum(1).mean(1).sum()

    e = error.clone().requires_grad_()
    divergence(e).backward()
    (found,) = divergence_pull([logits.detach()], [error])
    assert found is not None and torch.allclose(found, e.grad, rtol=1e-2, atol=1e-7)


def test_the_best_change_of_one_channel_is_found_and_bars_are_kept() -> None:
    _, scales, _ = one_row()
    (edge,) = scales.weights
    weight = scales.weights[edge]
    weight.slopes[0] = torch.linspace(0.0, -1.0, len(scales.factors), dtype=torch.float64)
    weight.sketch[0, -1, 0] = 2.0  # the last would gain 1 and lose 2
    found = scales.improved(scales.as_estimated, 10.0, 0.5)
    assert int(found[edge][0]) == len(scales.factors) - 2
    weight.slopes[0, 3] = -LEAST * 10.0 / 2
    weight.slopes[0, [i for i in range(len(scales.factors)) if i != 3]] = 0.0
    assert torch.equal(scales.improved(scales.as_estimated, 10.0, 0.5)[edge], scales.as_estimated[edge])
    weight.slopes[0] = -torch.ones(len(scales.factors), dtype=torch.float64)
    weight.slopes[0, 0] = 0.0
    scales.bar([edge.dst], scales.as_estimated)
    assert scales.factors[int(scales.improved(scales.as_estimated, 10.0, 0.5)[edge][0])] > 1.0


def test_channels_are_chosen_together() -> None:
    b = Builder()
    b.linear(b.input(4, name="x"), seeded(2, 4, seed=1), name="fc")
    prepared = prepare(b.graph(), "x86_vnni", [seeded(8, 4, seed=2)])
    bits = prepared.space.widest()
    scales = WeightScales.of(prepared, prepared.resolver(bits), bits)
    (edge,) = scales.weights
    weight = scales.weights[edge]
    weight.slopes[:, 1] = -1.0
    weight.sketch[:, 1, 0] = math.sqrt(0.8 / DOUBT)
    # alone each gains 0.6; both together turn the output the same way, and the second gains nothing
    found = scales.improved(scales.as_estimated, 2.0, 1.0)[edge]
    assert sorted(found.tolist()) == [0, 1]
    weight.sketch[1, 1, 0] *= -1.0
    assert scales.improved(scales.as_estimated, 2.0, 1.0)[edge].tolist() == [1, 1]


# ---------------------------------------------------------------- whole networks
@pytest.fixture(scope="module", params=available_hardware())
def prepared(request: pytest.FixtureRequest) -> Prepared:
    return prepare(residual_block(), request.param, DATA)


def test_rounds_are_kept_where_they_are_better(prepared: Prepared) -> None:
    goal = make_goal("sqnr")
    evaluator = Evaluator(prepared.graph, prepared.batches, goal.objective, prepared.hardware.known_ops)
    one, more = (refined(prepared, goal, "", evaluator, most) for most in (3.0, 16.0))
    assert one.forwards == 3.0 and not one.prepared.calibration.refined
    assert dict(one.start) == dict(more.start) == safe_start(one.prepared.resolver, prepared.calibration.peaks)
    scores = [evaluator.score(r.prepared.resolver(r.start), r.start) for r in (one, more)]
    if scores[0].runs:
        assert 3.0 < more.forwards <= 16.0
        assert scores[1].runs and scores[1].value >= scores[0].value
        assert (scores[1].value > scores[0].value) == bool(more.prepared.calibration.refined)


def test_the_start_keeps_limits_on_costs(prepared: Prepared) -> None:
    ends = [plan_cost(prepared.resolver(bits)) for bits in (prepared.space.widest(), prepared.space.narrowest())]
    limits = [f"{name} <= {(ends[0][name] + ends[1][name]) / 2}" for name in ("weight_bytes", "activation_bytes")]
    goal = make_goal("sqnr", budget_cost=limits)
    evaluator = Evaluator(prepared.graph, prepared.batches, goal.objective, prepared.hardware.known_ops)
    found = refined(tidied(prepared, goal.costs), goal, "weight_bytes", evaluator, 3.0)
    figures = plan_cost(found.prepared.resolver(found.start)).figures
    assert not any(limit.shortfall(float(figures[limit.figure])) for limit in goal.limits)


def test_weights_of_values_are_squared_gradients() -> None:
    b = Builder()
    b.linear(b.input(2, name="x"), torch.tensor([[1.0, 3.0]]), name="fc")
    x = torch.tensor([[0.5, -1.0], [0.25, 1.0]])
    prepared = prepare(b.graph(), "x86_vnni", [x])
    seen = gradients(prepared.graph, prepared.batches, prepared.calibration.ranges, squared_error, lambda edge: ())
    histogram = weighted(prepared, seen.spectra).statistics["x"].histogram[0]
    width = 2.0 / len(histogram)
    share = {v: float(histogram[int((v + 1.0) / width) - 2 : int((v + 1.0) / width) + 3].sum()) for v in (0.5, 0.25)}
    assert float(histogram.sum()) == pytest.approx(1.0)
    assert share == pytest.approx({0.5: 0.05, 0.25: 0.05}, rel=0.05)  # 1, 1 of 1 + 9 + 1 + 9


# ---------------------------------------------------------------- searches
def trials(path: Path, **options: object) -> bytes:
    find(residual_block(), "vta", DATA, SearchOptions("gradient", progress=False, log=path, **options))  # type: ignore[arg-type]
    return path.read_bytes()


@pytest.mark.parametrize("spec", ["x86_vnni", "vta", "int16_accumulator"])
def test_better_than_the_descent_for_fewer_forwards(spec: str) -> None:
    found = {
        s: find(residual_block(), spec, DATA, SearchOptions(s, progress=False, budget_cost="weight_bytes <= 250"))
        for s in ("gradient", "greedy")
    }
    values = {s: f.result.score.value for s, f in found.items()}
    assert values["gradient"] >= values["greedy"] and found["gradient"].forwards < found["greedy"].forwards
    assert found["gradient"].result.score.costs["weight_bytes"] <= 250


@pytest.mark.parametrize("options", [{}, {"race": True}, {"minimize": "weight_bytes", "keep": "sqnr >= 25"}])
def test_logs_are_replayed_and_do_not_depend_on_workers(tmp_path: Path, options: dict[str, object]) -> None:
    one, more = (trials(tmp_path / f"{n}.jsonl", executor=n, **options) for n in (None, "threads:2"))
    assert timeless(one) == timeless(more)
    assert hago.replay(residual_block(), "vta", tmp_path / "None.jsonl", DATA).same


def test_a_log_with_chosen_thresholds_is_another(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    content = trials(path)
    assert trials(path) == content  # continued where it ended
    with pytest.raises(LogError, match="refined"):
        trials(path, estimator="mse")
