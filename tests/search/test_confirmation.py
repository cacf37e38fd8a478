"""What a search proposes is confirmed on samples that did not shape it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from building import residual_block, seeded
from hypothesis import given
from hypothesis import strategies as st
from products import some
from torch import Tensor
from toys import timeless

import hago
from hago.calibration import collect
from hago.cost.cost import METRICS
from hago.data.batches import Batches
from hago.errors import LogError
from hago.search import DEFAULT_CORRECTIONS, choice_refinement, confirmation, searcher_choice, weight_scales
from hago.search.choice_refinement import _Proposals
from hago.search.confirmation import (
    Confirmation,
    UnseenSamples,
    clipped_share,
    losses_of,
)
from hago.search.evaluate import Evaluator
from hago.search.folds import FEW, FOLDS, Fold, folds_of
from hago.search.goal import GoalOptions, make_goal
from hago.search.objective import OBJECTIVES
from hago.search.point_refinement import _make_refinements, refine_at_point
from hago.search.preparation import Prepared, prepare
from hago.search.proposed_thresholds import RefinementTask
from hago.search.sensitivity import gradients_of_choices
from hago.search.session import SearchOptions, run_search
from hago.search.stored_strategy import plan_and_batches
from hago.study.log import Header, read_log

GOLDEN = Path(__file__).parents[1] / "golden"
DATA = [(seeded(8, 3, 8, 8, seed=s), torch.arange(8) % 5) for s in range(2)]
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=20)


# ---------------------------------------------------------------- which samples
@given(SIZES)
def test_few_samples_take_turns_and_of_many_a_part_is_kept_aside(sizes: list[int]) -> None:
    total, turns = sum(sizes), folds_of(sizes)
    ends = {0, *itertools.accumulate(sizes)}
    if total == 1:
        assert not turns
    elif total < FEW:
        assert len(turns) == min(FOLDS, total)
        assert [t.first for t in turns] == [0, *(t.last for t in turns[:-1])] and turns[-1].last == total
    else:
        (turn,) = turns
        assert turn.last == total and 0.1 < (total - turn.first) / total < 0.45
    if len(set(sizes)) == 1 and len(sizes) % FOLDS == 0:
        assert all({t.first, t.last} <= ends for t in turns)  # whole batches


@given(SIZES, st.data())
def test_what_is_kept_aside_and_what_shapes_are_all(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    first = data.draw(st.integers(0, total - 1))
    aside = Fold(first, data.draw(st.integers(first + 1, total)))
    batches = list(torch.arange(total).split(sizes))
    shaping = [t for (t,) in aside.tuning_tensors([b] for b in batches)]
    assert all(len(t) for t in shaping)
    expected = [i for i in range(total) if not aside.first <= i < aside.last]
    assert [int(i) for t in shaping for i in t] == expected == aside.tuning(torch.arange(total)).tolist()


def test_a_gain_is_sure_where_blocks_agree() -> None:
    kept = Confirmation((16,) * 8, folds_of([16] * 8))
    before = torch.ones(128)
    even = before - 0.1 - 0.001 * (torch.arange(128) % 16 // 4)
    one = before.clone()
    one[127] -= 3.2  # as much on average, all of it of one sample
    assert kept.gain([before], [even]).is_significant() and not kept.gain([before], [one]).is_significant()
    assert kept.gain([before], [even]).part == pytest.approx(0.1, rel=0.05)
    assert not kept.gain([before], [even]).is_significant(margin=0.2)
    # what does not run is not compared, and no figure of it is infinite
    none = torch.full((128,), torch.inf, dtype=torch.float64)
    for pair in ((none, even), (even, none), (none, none)):
        found = kept.gain(*([losses] for losses in pair))
        assert not found.is_significant() and (found.part, found.errors) == (0.0, 0.0)
    # what is gained on samples that shaped it does not count
    seen = before.clone()
    seen[:96] = 0.0
    assert kept.gain([before], [seen]).part == 0.0


def test_the_best_of_several_equal_candidates_is_seldom_taken() -> None:
    kept, generator = Confirmation((4, 4), folds_of([4, 4])), torch.Generator().manual_seed(0)
    rounds, candidates, taken = 400, 6, {1: 0, 6: 0}
    for _ in range(rounds):
        before = torch.rand(8, generator=generator, dtype=torch.float64) + 0.5
        after = [
            before * (torch.randn(8, generator=generator, dtype=torch.float64) / 10).exp() for _ in range(candidates)
        ]
        best = min(after, key=lambda losses: float(losses.mean()))
        gain = kept.gain([before] * len(kept.folds), [best] * len(kept.folds))
        for counted in taken:
            taken[counted] += gain.is_significant(candidates=counted)
    assert taken[6] < 0.08 * rounds < 0.15 * rounds < taken[1]  # the law bites where only the best is counted


def test_the_share_that_is_clipped() -> None:
    prepared = prepare(residual_block(), "x86_vnni", DATA)
    plan = prepared.resolver(prepared.space.widest())
    most = {k: (lo * 4, hi * 4) for k, (lo, hi) in plan.thresholds.items()}
    assert clipped_share(prepared.calibration, prepared.space, most) == 0.0
    none = {k: (lo * 0, hi * 0) for k, (lo, hi) in plan.thresholds.items()}
    assert clipped_share(prepared.calibration, prepared.space, none) == 1.0


# ---------------------------------------------------------------- laws of proposals
def other_where_kept(aside: Fold) -> list[tuple[Tensor, Tensor]]:
    """The data with other samples there."""
    inputs, labels = (torch.cat(parts) for parts in zip(*DATA, strict=True))
    inputs = inputs.clone()
    inputs[aside.first : aside.last] = 3.0 * seeded(aside.last - aside.first, 3, 8, 8, seed=99)
    return list(zip(inputs.split(8), labels.split(8), strict=True))


def proposed(prepared: Prepared, data: list[tuple[Tensor, Tensor]], aside: Fold | None) -> list[object]:
    """All thresholds that are proposed from these data."""
    goal, batches = make_goal(GoalOptions("sqnr")), Batches(data, prepared.graph.inputs)
    evaluator = Evaluator(prepared.graph, batches, goal.objective)
    turns = folds_of([8, 8])
    task = RefinementTask.of(replace(prepared, batches=batches), goal, "", evaluator)
    folds, final = _make_refinements(task, Confirmation((8, 8), turns))
    refinement = final if aside is None else folds[turns.index(aside)]
    refinement.run_rounds(20.0)
    proposals = _Proposals.of(replace(task, metric="weight_bytes"), aside)
    plans = [p.resolver(prepared.space.widest()) for p in (refinement.prepared, *proposals.thresholds.values())]
    return [sorted((k, lo.tolist(), hi.tolist()) for k, (lo, hi) in plan.thresholds.items()) for plan in plans]


#: Corrections of one shot but for thresholds, which a search chooses itself.
WITHOUT_THRESHOLDS = [name for name in DEFAULT_CORRECTIONS if name != "thresholds"]


@pytest.mark.parametrize(("spec", "turn"), some(3, ["x86_vnni", "tflite", "vta"], [1, 2]))
def test_samples_that_are_kept_aside_shape_no_proposal(spec: str, turn: int) -> None:
    prepared, aside = prepare(residual_block(), spec, DATA), folds_of([8, 8])[turn]
    others = other_where_kept(aside)
    assert proposed(prepared, DATA, aside) == proposed(prepared, others, aside)
    assert proposed(prepared, DATA, None) != proposed(prepared, others, None)  # the law bites


@pytest.mark.parametrize("spec", ["x86_vnni", "tflite", "vta"])
def test_unseen_samples_are_in_no_statistics(spec: str) -> None:
    prepared, goal = prepare(residual_block(), spec, DATA), make_goal(GoalOptions("sqnr"))
    confirmation = Confirmation.of(prepared.batches)
    assert confirmation is not None
    evaluator = Evaluator(prepared.graph, prepared.batches, goal.objective)
    task = RefinementTask.of(prepared, goal, "weight_bytes", evaluator)
    choices = _Proposals.of(task, confirmation.folds[1])

    def thresholds(data: list[tuple[Tensor, Tensor]], index: int) -> list[object]:
        batches = Batches(data, prepared.graph.inputs)
        unseen = UnseenSamples(replace(prepared, batches=batches), goal.objective, confirmation)
        proposals = [choices.proposal_with(way, unseen.calibrations[index]) for way in choices.thresholds]
        plans = [p.resolver(prepared.space.widest()) for p in proposals]
        return [sorted((k, lo.tolist(), hi.tolist()) for k, (lo, hi) in plan.thresholds.items()) for plan in plans]

    others = other_where_kept(confirmation.folds[1])
    for before, after in zip(thresholds(DATA, 1), thresholds(others, 1), strict=True):
        assert before == after
    for before, after in zip(thresholds(DATA, 2), thresholds(others, 2), strict=True):
        assert before != after  # the law bites: another turn sees them


def test_unseen_samples_are_measured_alone() -> None:
    prepared = prepare(residual_block(), "vta", DATA)
    confirmation = Confirmation.of(prepared.batches)
    assert confirmation is not None
    unseen = UnseenSamples(prepared, OBJECTIVES["sqnr"], confirmation)
    bits, turns = prepared.space.widest(), confirmation.folds
    by_turn = unseen.losses([prepared] * len(turns), [bits] * len(turns))
    evaluator = Evaluator(prepared.graph, prepared.batches, OBJECTIVES["sqnr"])
    whole = losses_of(OBJECTIVES["sqnr"], evaluator.measure(prepared.resolver(bits)))
    assert by_turn is not None
    for turn, losses in zip(turns, by_turn, strict=True):
        aside = slice(turn.first, turn.last)
        assert torch.allclose(losses[aside], whole[aside], rtol=1e-3) and not turn.tuning(losses).any()
    assert unseen.forwards == len(turns) + 1


@pytest.mark.parametrize("options", [{"objective": "agreement"}, {"budget_cost": "weight_bytes <= 250"}])
def test_thresholds_of_activations_must_be_better_with_statistics_of_others_too(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = SearchOptions.of(progress=False, budget=2, corrections="none", **options)
    key = "thresholds" if "budget_cost" in options else "activations"
    monkeypatch.setattr(Confirmation, "gain", lambda *_: confirmation.Gain(0.5, 50.0, 16))
    taken = run_search(residual_block(), "x86_vnni", DATA, how).strategy.made_by["confirmed"][key]
    monkeypatch.setattr(UnseenSamples, "gain", lambda *_: confirmation.Gain(0.0, 0.0, 0))
    assert taken != "estimated"
    assert run_search(residual_block(), "x86_vnni", DATA, how).strategy.made_by["confirmed"][key] == "estimated"


@pytest.mark.parametrize(("sizes", "passes"), [([16] * 4, 0), ([20, 12, 16, 16], 0), ([20, 20, 24], 1), ([8, 8], 4)])
def test_statistics_of_tuning_samples_take_no_pass_where_batches_end_there(
    sizes: list[int], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(residual_block(), "x86_vnni", [seeded(n, 3, 8, 8, seed=i) for i, n in enumerate(sizes)])
    kept = Confirmation.of(prepared.batches)
    assert kept is not None and kept.sizes == tuple(sizes)
    made: list[int] = []

    def noted(*args: Any) -> Any:
        made.append(1)
        return collect(*args)

    monkeypatch.setattr("hago.search.confirmation.collect", noted)
    unseen = UnseenSamples(prepared, OBJECTIVES["sqnr"], kept)
    assert len(made) == passes
    for fold, calibration in zip(kept.folds, unseen.calibrations, strict=True):
        tuning = list(fold.tuning_batches(prepared.batches))
        alone = collect(prepared.graph, tuning, calibration.statistics.keys(), prepared.hardware.known_ops)
        for name, seen in alone.statistics.items():
            assert torch.equal(calibration.statistics[name].histogram, seen.histogram)
            assert torch.equal(calibration.statistics[name].limit, seen.limit)


@pytest.mark.parametrize("objective", ["accuracy", "agreement"])
def test_rounds_for_classes_err_less_and_lose_no_class(objective: str) -> None:
    prepared, goal = prepare(residual_block(), "x86_vnni", DATA), make_goal(GoalOptions(objective))
    evaluator = Evaluator(prepared.graph, prepared.batches, goal.objective, prepared.hardware.known_ops)
    turns = Confirmation((8, 8), folds_of([8, 8]))
    _, refinement = _make_refinements(RefinementTask.of(prepared, goal, "", evaluator), turns)
    measured = refinement.simulate(refinement.prepared)
    value, losses = refinement.value_of(measured), [float(measured.losses.mean())]
    for _ in refinement.rounds(40.0):
        measured = refinement.simulate(refinement.prepared)
        after = refinement.value_of(measured)
        assert value is not None and after is not None and after >= value
        value = after
        losses.append(float(measured.losses.mean()))
    assert len(losses) > 1 and losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    "goal", [{"minimize": "weight_bytes", "keep": "sqnr >= 15"}, {"budget_cost": "weight_bytes <= 250"}]
)
def test_thresholds_are_confirmed_where_the_search_goes(goal: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At fewer bits than the most, where a cost is limited or made least."""
    seen: list[int] = []

    def noted(task: RefinementTask, prepared: Prepared, bits: Mapping[str, int]) -> Any:
        seen.append(sum(bits.values()))
        return measure(task, prepared, bits)

    measure = choice_refinement._measure
    monkeypatch.setattr(choice_refinement, "_measure", noted)
    run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(progress=False, budget=3, **goal))
    most = prepare(residual_block(), "x86_vnni", DATA).space.widest()
    assert seen and max(seen) < sum(most.values())


def one_linear() -> torch.nn.Module:
    fc = torch.nn.Linear(6, 5)
    with torch.no_grad():
        fc.weight.copy_(seeded(5, 6, seed=3))
        fc.bias.copy_(seeded(5, seed=4))
    return fc.eval()


@pytest.mark.parametrize(
    ("count", "spec", "objective"),
    some(3, [2, 12, 64, 256], ["x86_vnni", "vta", "tflite"], ["sqnr", "kl", "agreement"]),
)
def test_what_is_taken_is_surely_better_where_it_was_not_shaped(count: int, spec: str, objective: str) -> None:
    """Or nothing is taken: strategies hold estimated thresholds then."""
    data = [4.0 * seeded(count, 6, seed=7) ** 3]
    how = SearchOptions.of("gradient", progress=False, objective=objective, corrections="none")
    found = run_search(one_linear(), spec, data, how)
    said = found.strategy.made_by["confirmed"]
    if {said["activations"], said["weights"]} == {"estimated"}:
        assert said["gain"] == 0.0
    else:
        assert said["gain"] > 0.0 and said["standard_errors"] > 1.95
    one = hago.quantize(one_linear(), spec, data, corrections=WITHOUT_THRESHOLDS).strategy
    if {said["activations"], said["weights"]} == {"estimated"} and one.bits == found.strategy.bits:
        assert dict(one.thresholds) == dict(found.strategy.thresholds)


def test_one_sample_confirms_nothing() -> None:
    found = run_search(residual_block(), "x86_vnni", DATA[0][0][:1], SearchOptions.of(progress=False))
    assert found.strategy.made_by["refined"] == {"kept_aside": 0, "turns": 0, "one_shot": True}
    one = hago.quantize(residual_block(), "x86_vnni", DATA[0][0][:1]).strategy
    assert dict(one.thresholds) == dict(found.strategy.thresholds)


def test_samples_unlike_those_that_shaped_are_not_clipped() -> None:
    """The last quarter is five times as large: thresholds of the others clip it, and are not taken."""
    inputs = torch.cat([seeded(96, 6, seed=1), 5.0 * seeded(32, 6, seed=2)])
    prepared = prepare(one_linear(), "x86_vnni", inputs)
    found = run_search(one_linear(), "x86_vnni", inputs, SearchOptions.of(progress=False, seed=0))
    batches = Batches(inputs[96:], prepared.graph.inputs)
    evaluator = Evaluator(prepared.graph, batches, OBJECTIVES["sqnr"])
    kept = plan_and_batches(prepared.graph, prepared.hardware, found.strategy, [inputs[96:]])[0]
    one = plan_and_batches(
        prepared.graph, prepared.hardware, hago.quantize(one_linear(), "x86_vnni", inputs).strategy, [inputs[96:]]
    )[0]
    losses = [float(losses_of(OBJECTIVES["sqnr"], evaluator.measure(plan)).mean()) for plan in (kept, one)]
    assert losses[0] <= losses[1]


def test_a_point_that_is_better_by_chance_is_not_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmation.Gain, "is_significant", lambda self, margin=0.0, candidates=1: False)
    found = run_search(residual_block(), "vta", DATA, SearchOptions.of("gradient", progress=False))
    assert found.result.best.bits == found.result.trials[0].bits
    monkeypatch.setattr(confirmation.Gain, "is_significant", lambda self, margin=0.0, candidates=1: True)
    again = run_search(residual_block(), "vta", DATA, SearchOptions.of("gradient", progress=False))
    assert again.result.best.bits == max(again.result.trials, key=lambda t: t.score.rank).bits


# ---------------------------------------------------------------- logs of version 1
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("refined_1", {}),
        ("refined_within_limits_1", {"budget_cost": "weight_bytes <= 250"}),
        ("refined_front_1", {"searcher": "pareto:points=4,rounds=1"}),
    ],
)
def test_logs_of_version_1_are_replayed_and_continued_as_they_were_begun(
    name: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written before samples were kept aside, when `gradient` was the default under limits, too."""
    content = (GOLDEN / f"log_{name}.jsonl").read_bytes()
    written_for = json.loads(content.splitlines()[0])["hardware"]["hash"]
    content = content.replace(
        written_for.encode(), hago.hardware.hardware_hash(hago.load_hardware("x86_vnni")).encode()
    )
    for metric in set(METRICS) - set(json.loads(content.splitlines()[1])["score"]["costs"]):  # newer costs
        monkeypatch.delitem(METRICS, metric)  # type: ignore[arg-type]
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    how: dict[str, object] = {"progress": False, "log": path, **options}
    differences = hago.replay(residual_block(), "x86_vnni", path, DATA).differences
    if differences:
        # gradients, and so thresholds, differ in the last bits on other CPUs: the same search by the code of today
        numbers = [d for d in differences if not isinstance(d.logged, str)]
        assert all(d.replayed == pytest.approx(d.logged, rel=1e-3) for d in numbers)
        path.unlink()
        how["searcher"] = options.get("searcher", "gradient")
        with monkeypatch.context() as patch:
            patch.setattr(Confirmation, "of", staticmethod(lambda *_, **__: None))
            run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(**how))  # type: ignore[arg-type]
        content = path.read_bytes().replace(b'"version": 2', b'"version": 1', 1)
        how.pop("searcher")
        how |= options
        path.write_bytes(content)
        assert hago.replay(residual_block(), "x86_vnni", path, DATA).same
    lines = content.splitlines(keepends=True)
    assert json.loads(lines[0])["version"] == 1
    path.write_bytes(b"".join(lines[:2]))
    run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(**how))  # type: ignore[arg-type]
    assert timeless(path.read_bytes()) == timeless(content)


def test_a_default_search_goes_on_with_the_options_that_its_log_was_begun_with(tmp_path: Path) -> None:
    """The default number of moves became smaller; a log that names no number of groups a move was begun with 8."""
    header = json.loads((GOLDEN / "log_refined_1.jsonl").read_text().splitlines()[0])
    assert Header.from_json(header, "log").searcher["options"] == {"moves": -1, "groups_a_move": 8}
    path = tmp_path / "log.jsonl"
    how: dict[str, object] = {"progress": False, "log": path}
    run_search(residual_block(), "vta", DATA, SearchOptions.of("gradient:groups_a_move=2", **how))  # type: ignore[arg-type]
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    assert len(lines) > 4  # more trials than with the default number of moves
    path.write_bytes(b"".join(lines[:2]))
    run_search(residual_block(), "vta", DATA, SearchOptions.of(**how))  # type: ignore[arg-type]
    assert timeless(path.read_bytes()) == timeless(content)


def test_an_earlier_front_goes_on_with_gaps_to_points_without_loss(tmp_path: Path) -> None:
    """Losses had no least one; a log that names none goes on without, also where the user does not name it."""
    log, new = tmp_path / "log.jsonl", tmp_path / "new.jsonl"
    how: dict[str, object] = {"progress": False, "effort": "fast", "search_topology": True}
    searcher, bits = "pareto:points=6,rounds=1", {}
    for path, name in ((log, f"{searcher},least_loss=0"), (new, searcher)):
        found = run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(name, log=path, **how))  # type: ignore[arg-type]
        bits[path] = [trial.bits for trial in found.result.trials]
    assert bits[log] != bits[new]  # the question is worth asking
    content = log.read_bytes()
    lines = content.replace(b', "least_loss": 0.0', b"").splitlines(keepends=True)
    assert content.count(b"least_loss") == 1 and b"least_loss" not in lines[0]
    log.write_bytes(b"".join(lines[:3]))
    with pytest.raises(LogError, match="pareto:least_loss=0.0, is pareto:least_loss=0.5"):
        run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(f"{searcher},least_loss=0.5", log=log, **how))  # type: ignore[arg-type]
    run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(searcher, log=log, **how))  # type: ignore[arg-type]
    assert timeless(log.read_bytes()) == timeless(b"".join(lines))
    assert hago.replay(residual_block(), "x86_vnni", log, DATA).same
    # an option that the user gave is asked for again, like any other
    log.write_bytes(content.replace(b'"least_loss": 0.0', b'"least_loss": 0.5'))
    with pytest.raises(LogError, match="pareto:least_loss=0.5, is pareto:least_loss=2.38"):
        run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(searcher, log=log, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"budget_cost": "weight_bytes <= 250"}, {"searcher": "pareto:points=4"}])
def test_logs_that_are_not_blind_are_replayed_and_continued_as_they_were_begun(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As searches before thresholds of activations were confirmed with statistics of others wrote them."""
    path = tmp_path / "log.jsonl"
    how = SearchOptions.of(progress=False, log=path, budget=4, **options)
    with monkeypatch.context() as patch:
        older = Confirmation((8, 8), folds_of([8, 8]), is_blind=False, max_forwards=math.inf)
        patch.setattr(Confirmation, "of", staticmethod(lambda *_, **__: older))
        run_search(residual_block(), "vta", DATA, how)
    content = path.read_bytes()
    assert b"blind" not in content
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:2]))
    # whoever is asked by mistake takes nothing
    monkeypatch.setattr(UnseenSamples, "gain", lambda *_: confirmation.Gain(0.0, 0.0, 0))
    assert hago.replay(residual_block(), "vta", path, DATA).same
    run_search(residual_block(), "vta", DATA, how)
    assert timeless(path.read_bytes()) == timeless(content)


@pytest.mark.parametrize("options", [{"budget_cost": "weight_bytes <= 250"}, {"searcher": "pareto:points=4"}])
def test_as_many_samples_share_a_vector_as_the_log_says(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few sums of gradients have more samples each; at most 4 shared a random vector before logs said how many."""
    monkeypatch.setattr(weight_scales, "SKETCHES", 1)
    chunks: list[int] = []

    def watched(prepared: Any, objective: Any, seed: int, chunk: int, *more: Any, **named: Any) -> Any:
        chunks.append(chunk)
        return gradients_of_choices(prepared, objective, seed, chunk, *more, **named)

    monkeypatch.setattr(choice_refinement, "gradients_of_choices", watched)
    contents = []
    for most, largest in ((4, 4), (16, 16)):
        path = tmp_path / f"{most}.jsonl"
        how = SearchOptions.of(progress=False, log=path, budget=4, **options)
        with monkeypatch.context() as patch:
            own = Confirmation((8, 8), folds_of([8, 8]), most_chunk=most)
            patch.setattr(Confirmation, "of", staticmethod(lambda *_, own=own, **__: own))
            run_search(residual_block(), "vta", DATA, how)
        content = path.read_bytes()
        assert (b'"chunk"' in content) == (most == 16)
        path.write_bytes(b"".join(content.splitlines(keepends=True)[:2]))
        assert hago.replay(residual_block(), "vta", path, DATA).same
        run_search(residual_block(), "vta", DATA, how)
        assert timeless(path.read_bytes()) == timeless(content)
        assert max(chunks) == largest
        chunks.clear()
        contents.append(timeless(content))
    assert contents[0] != contents[1]


@pytest.mark.parametrize("limit", [3.0, math.inf])
def test_the_limit_on_refinement_is_that_of_the_log(
    limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that was begun with another limit, or with none, is replayed and continued with it."""
    path, limits = tmp_path / "log.jsonl", []
    how = SearchOptions.of(progress=False, log=path, budget=4)

    def refine(task: RefinementTask, max_forwards: float, confirmed: Confirmation | None) -> Any:
        assert confirmed is not None
        limits.append((max_forwards, confirmed.max_forwards))
        return refine_at_point(task, max_forwards, confirmed)

    monkeypatch.setattr(searcher_choice, "refine_at_point", refine)
    with monkeypatch.context() as patch:
        other = Confirmation((8, 8), folds_of([8, 8]), max_forwards=limit)
        patch.setattr(Confirmation, "of", staticmethod(lambda *_, **__: other))
        run_search(residual_block(), "x86_vnni", DATA, how)
    content = path.read_bytes()
    assert (b'"forwards": 3.0' in content.splitlines()[0]) == (limit == 3.0)
    path.write_bytes(b"".join(content.splitlines(keepends=True)[:2]))
    assert hago.replay(residual_block(), "x86_vnni", path, DATA).same
    run_search(residual_block(), "x86_vnni", DATA, how)
    assert timeless(path.read_bytes()) == timeless(content)
    first, *others = limits
    assert others == [first] * 2 and first[1] == limit and (first[0] == 3.0 if limit == 3.0 else first[0] >= 6.0)


def test_the_header_says_what_was_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    run_search(residual_block(), "x86_vnni", DATA, SearchOptions.of(progress=False, log=path, corrections="none"))
    header = read_log(path).header
    assert header is not None and header.settings["refined"] == {
        "kept_aside": 16,
        "turns": 4,
        "blind": True,
        "forwards": confirmation.MAX_FORWARDS,
    }
    assert {"gain", "standard_errors", "clipped", "clipped_before", "activations", "weights"} == set(header.confirmed)
    assert json.loads(path.read_text("utf-8").splitlines()[0])["version"] == 2
