"""An effort stands for options that the user did not give, and more of it is no worse."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from networks import Outliers, ResNet, Small, Uneven, images, randomized
from products import some, whole
from torch import Tensor, nn
from toys import timeless

import hago
from hago.data import JobProgress
from hago.data.batches import spread_indices
from hago.errors import HagoError, LogError
from hago.search import correct, correcting, prepare, session, sqnr_evaluator
from hago.search import effort as efforts
from hago.search.confirmation import Gain
from hago.search.correcting import CORRECTIONS
from hago.search.effort import EFFORTS, WITH_COSTS, logged_effort
from hago.search.float_layers import FloatLayers
from hago.search.intervals import paired_interval
from hago.search.measured_point import first_point
from hago.search.session import SearchOptions, run_search
from hago.searchers import SEARCHERS, make_options, parse_searcher
from hago.study import read_log

DATA = [images(16, 3, 8, 8, seed=n) for n in range(6)]
#: By name, a network, and what makes a batch of it.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Tensor]]] = {
    "uneven": (lambda: Uneven().eval(), lambda n, seed: images(n, 3, 8, 8, seed=seed)),
    "clamped": (lambda: Uneven(high=1.0).eval(), lambda n, seed: images(n, 3, 8, 8, seed=seed)),
    "small": (lambda: randomized(Small()), lambda n, seed: images(n, 1, 6, 6, seed=seed)),
    "residual": (lambda: randomized(ResNet((4, 8), 1)), lambda n, seed: images(n, 3, 16, 16, seed=seed)),
    "outliers": (lambda: Outliers().eval(), lambda n, seed: images(n, 6, 12, seed=seed)),
}
CHIPS = ("x86_vnni", "vta", "tflite", "cmsis_nn")


def test_a_greater_effort_makes_no_fewer_corrections() -> None:
    fast, good, best = (EFFORTS[name] for name in ("fast", "good", "best"))
    assert tuple(EFFORTS) == ("fast", "good", "best")
    assert {*fast.corrections} < {*good.corrections} <= {*best.corrections} == {*CORRECTIONS}
    for effort in EFFORTS.values():
        assert effort.corrections == tuple(name for name in CORRECTIONS if name in effort.corrections)
        for text in (effort.searcher, effort.limited_searcher):
            name, options = parse_searcher(text)
            assert name in SEARCHERS
            make_options(name, options)


@pytest.mark.parametrize("wrong", ["greatest", "", "Good"])
def test_an_unknown_effort_is_refused_with_the_choices(wrong: str) -> None:
    model, said = Uneven().eval(), "effort is .*; expected one of fast, good, best"
    with pytest.raises(HagoError, match=said):
        hago.quantize(model, "vta", DATA, effort=wrong)
    with pytest.raises(HagoError, match=said):
        hago.search_quantize_strategy(model, "vta", DATA, effort=wrong, progress=False)
    with pytest.raises(HagoError, match=said):
        hago.measure_sensitivity(model, "vta", DATA, effort=wrong)


@pytest.mark.parametrize("effort", EFFORTS)
def test_named_corrections_take_the_place_of_the_efforts(effort: str) -> None:
    model = Uneven().eval()
    named, alone = (
        hago.quantize(model, "vta", DATA, corrections="rounding", **how).strategy.to_json()
        for how in ({"effort": effort}, {})
    )
    assert named["made_by"].pop("effort")["name"] == effort and alone["made_by"].pop("effort")["name"] == "good"
    assert named["made_by"]["corrections"] == ["rounding"]
    assert EFFORTS[effort].turns > 1 or named == alone
    made = hago.quantize(model, "vta", DATA, effort=effort).strategy.made_by["corrections"]
    assert made == list(EFFORTS[effort].corrections)


def test_a_named_searcher_and_a_budget_count_with_any_effort(tmp_path: Path) -> None:
    model = Uneven().eval()
    trials = []
    for effort in EFFORTS:
        log = tmp_path / effort
        how: dict[str, Any] = {"searcher": "random", "budget": 3, "corrections": "bias", "progress": False}
        hago.search_quantize_strategy(model, "vta", DATA, effort=effort, log=log, **how)
        record = read_log(log)
        assert record.header is not None and record.header.searcher["name"] == "random"
        assert record.header.settings["corrections"]["names"] == ["bias"]
        trials.append([trial.bits for trial in record.trials])
    assert trials[0] == trials[1] == trials[2] and len(trials[0]) == 3


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_log_says_what_its_effort_stood_for(effort: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, log, data = Uneven().eval(), tmp_path / "log.jsonl", DATA[:2]
    how: dict[str, Any] = {"log": log, "progress": False, "fix_bits": {"*:1": 6}}
    first = hago.search_quantize_strategy(model, "vta", data, effort=effort, **how)[0]
    before, header = timeless(log.read_bytes()), read_log(log).header
    assert header is not None and header.settings["effort"] == EFFORTS[effort].to_json()
    assert logged_effort(header).to_json() == EFFORTS[effort].to_json()
    assert hago.replay(model, "vta", log, data).same
    others = [name for name in EFFORTS if name != effort]
    for other in others:
        with pytest.raises(LogError, match=f"effort was '?{effort}'?, is '?{other}"):
            hago.search_quantize_strategy(model, "vta", data, effort=other, **how)
    # the names may mean something else by then
    changed = {name: replace(EFFORTS[others[0]], name=name) for name in EFFORTS}
    changed[effort] = replace(changed[effort], searcher=EFFORTS[effort].searcher, turns=7)
    monkeypatch.setattr(efforts, "EFFORTS", MappingProxyType(changed))
    again = hago.search_quantize_strategy(model, "vta", data, **how)[0]
    assert again.to_json() == first.to_json() and timeless(log.read_bytes()) == before
    assert hago.replay(model, "vta", log, data).same


def test_logs_without_an_effort_are_continued_as_they_began(tmp_path: Path) -> None:
    model, log = Uneven().eval(), tmp_path / "log.jsonl"
    hago.search_quantize_strategy(model, "vta", DATA, log=log, progress=False, budget=2)
    header, *trials = log.read_text("utf-8").splitlines()
    document = json.loads(header)
    assert document["settings"].pop("effort")["name"] == "good"
    document["settings"]["corrections"].pop("passes")
    log.write_text("\n".join([json.dumps(document, sort_keys=True), *trials, ""]), "utf-8")
    hago.search_quantize_strategy(model, "vta", DATA, log=log, progress=False, budget=3)
    assert len(read_log(log).trials) > 1 and "effort" not in read_log(log).header.settings  # type: ignore[union-attr]
    assert hago.replay(model, "vta", log, DATA).same
    with pytest.raises(LogError, match="effort was good, is best"):
        hago.search_quantize_strategy(model, "vta", DATA, log=log, progress=False, effort="best")


def unseen_losses(model: nn.Module, chip: str, strategy: Any, data: Tensor) -> Tensor:
    """The squared error of every sample."""
    with torch.no_grad():
        error = hago.create_quantizer(model, chip, strategy).simulate()(data) - model(data)
    return error.double().square().flatten(1).sum(1)


def gain_of(effort: str, name: str, chip: str, bits: int) -> tuple[float, bool]:
    """By how many dB a search of an effort is better than one shot of `fast` on samples that neither saw, and whether
    it is surely worse."""
    make, batch = NETWORKS[name]
    model, data, unseen = make(), [batch(16, seed) for seed in range(8)], batch(512, 99)
    fixed = {"fix_bits": {"*:1": bits}}
    fast = hago.quantize(model, chip, data, effort="fast", **fixed).strategy
    found = hago.search_quantize_strategy(model, chip, data, effort=effort, progress=False, **fixed)[0]
    before, after = (unseen_losses(model, chip, s, unseen) for s in (fast, found))
    _, _, high = paired_interval(before - after, 0.99)
    return float(10 * torch.log10(before.mean() / after.mean())), high < 0.0


@pytest.mark.parametrize("effort", ["good", "best"])
def test_a_search_is_no_worse_than_a_fast_one_shot_on_unseen_samples(effort: str) -> None:
    cells = [(name, CHIPS[index % len(CHIPS)], 4 if index % 2 else 8) for index, name in enumerate(NETWORKS)]
    cells.append(("clamped", "x86_vnni", 4))  # where biases alone are better than rounding and biases
    if not whole():
        cells = cells[1::3] if effort == "good" else cells[:1]
    gains = {cell: gain_of(effort, *cell) for cell in cells}
    assert sum(gain for gain, _ in gains.values()) / len(gains) >= 0.0, gains
    assert not any(worse for _, worse in gains.values()), gains


@pytest.mark.parametrize(("chip", "effort"), some(3, CHIPS, EFFORTS))
def test_a_search_begins_with_the_thresholds_and_bits_of_one_shot(
    chip: str, effort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is no worse where no trial is surely better."""
    model = Uneven().eval()
    monkeypatch.setattr(session.Confirmation, "gain", lambda *_: Gain(-0.5, 0.0, 8))
    data = DATA[:2]
    shot = hago.quantize(model, chip, data, effort=effort)
    found = run_search(model, chip, data, SearchOptions.of(effort=effort, progress=False))
    assert hago.create_quantizer(model, chip, found.strategy).plan.key == shot.plan.key
    assert found.strategy.made_by["results"] == shot.strategy.made_by["results"]
    assert hago.replay(model, chip, found.strategy, data).same


@pytest.mark.parametrize("kept", [True, False])
def test_thresholds_of_one_shot_stand_in_the_log_and_are_found_again(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, log = Uneven().eval(), tmp_path / "log.jsonl"
    monkeypatch.setattr(Gain, "is_significant", lambda self, margin=0.0, candidates=1: kept)
    how: dict[str, Any] = {"log": log, "progress": False, "fix_bits": {"*:1": 6}}
    first = hago.search_quantize_strategy(model, "vta", DATA, **how)[0]
    content, header = log.read_bytes(), read_log(log).header
    assert header is not None and header.settings["refined"]["one_shot"] is True
    made = [p for p in header.settings["corrections"]["passes"] if p["names"] == ["thresholds"]]
    assert [p["kept"] for p in made] == [kept]
    assert set(header.confirmed) == (
        {"samples", "gain", "standard_errors", "clipped", "clipped_before"} if kept else set()
    )
    assert hago.replay(model, "vta", log, DATA).same
    log.write_bytes(b"".join(content.splitlines(keepends=True)[:2]))
    again = hago.search_quantize_strategy(model, "vta", DATA, **how)[0]
    assert again.to_json() == first.to_json() and timeless(log.read_bytes()) == timeless(content)


@pytest.mark.parametrize(("helps", "expected"), [(True, [1, 4, 16, 64]), (False, [1, 4])])
def test_layers_are_corrected_on_more_samples_while_that_helps(
    helps: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    once = correcting.correct_point

    def counted(point: Any, evaluator: Any, real: FloatLayers | None = None) -> Any:
        seen.append(1 if real is None else real.multiple)
        return once(point, evaluator, real)

    monkeypatch.setattr(correcting, "correct_point", counted)
    monkeypatch.setattr(correcting, "_is_better", lambda *_: helps)
    prepared = prepare(Uneven().eval(), "vta", DATA)
    evaluator = sqnr_evaluator(prepared)
    prepared = correct(prepared, ["rounding", "bias"], evaluator=evaluator)
    point = correcting.correct_in_turns(first_point(prepared, evaluator), evaluator, EFFORTS["best"].turns)
    assert seen == expected
    turns = [each for each in point.prepared.passes if each.names == ("rounding", "bias")]
    assert [each.kept for each in turns] == [True, *[helps] * (len(expected) - 1)]


def test_more_samples_are_kept_only_where_they_are_better_on_those_kept_aside() -> None:
    model = Uneven().eval()
    for chip in CHIPS[:2]:
        data = [images(32, 3, 8, 8, seed=n) for n in range(8)]
        once, often = (
            hago.quantize(model, chip, data, effort=e, corrections="rounding", fix_bits={"*:1": 4}).strategy
            for e in ("good", "best")
        )
        aside = [torch.cat(data)[192:]]
        before, after = (hago.evaluate_strategy(model, chip, s, aside).value for s in (once, often))
        assert after >= before


@pytest.mark.parametrize("effort", EFFORTS)
def test_an_effort_without_an_end_says_beforehand_what_it_takes(effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(JobProgress, "__call__", lambda self, step: said.append(step))
    hago.search_quantize_strategy(Uneven().eval(), "vta", DATA, effort=effort, budget=1)
    (step,) = [text for text in said if text.startswith("correcting the model")]
    found = re.fullmatch(r"correcting the model(?: \(effort best: about (\d+) forwards, \S+\))?", step)
    assert found is not None and (found[1] is not None) == (effort == "best")
    fewer, more = (EFFORTS["best"].expected_forwards(names, searches=False) for names in (["bias"], CORRECTIONS))
    assert fewer < more < EFFORTS["best"].expected_forwards(CORRECTIONS, searches=True)


@pytest.mark.parametrize("effort", EFFORTS)
def test_limits_on_costs_are_kept_with_every_effort(effort: str, tmp_path: Path) -> None:
    model, log, data = Uneven().eval(), tmp_path / "log", DATA[:2]
    goal: dict[str, Any] = {"budget_cost": "weight_bytes <= 70 %", "log": log, "progress": False}
    strategy, _ = hago.search_quantize_strategy(model, "x86_vnni", data, effort=effort, **goal)
    most = hago.quantize(model, "x86_vnni", data).strategy
    before, after = (hago.estimate_cost(model, "x86_vnni", s)["weight_bytes"] for s in (most, strategy))
    assert after <= 0.7 * before
    header = read_log(log).header
    assert header is not None
    assert header.searcher["name"] == parse_searcher(EFFORTS[effort].limited_searcher)[0]
    again = hago.search_quantize_strategy(model, "x86_vnni", data, **goal)[0]
    assert again.to_json() == strategy.to_json()


# ---------------------------------------------------------------- a fast search where costs are in use
FEW = WITH_COSTS["fast"]
SIZE: dict[str, Any] = {"budget_cost": "weight_bytes <= 70 %"}
FRONT: dict[str, Any] = {"searcher": "pareto:points=4,rounds=1"}


@pytest.mark.parametrize("goal", [SIZE, FRONT])
def test_a_fast_search_with_costs_looks_at_few_samples_and_rounds(goal: dict[str, Any], tmp_path: Path) -> None:
    model, log = Uneven().eval(), tmp_path / "log.jsonl"
    how: dict[str, Any] = {"effort": "fast", "log": log, "progress": False, **goal}
    strategy, _ = hago.search_quantize_strategy(model, "x86_vnni", DATA, **how)
    header = read_log(log).header
    assert header is not None and header.settings["effort"] == FEW.to_json() == strategy.made_by["effort"]
    assert header.settings["corrections"]["names"] == list(FEW.corrections) and "refined" not in header.settings
    assert header.data_hash == prepare(model, "x86_vnni", DATA).batches.sha256  # of all samples
    # both figures are those of the samples that were looked at
    assert hago.replay(model, "x86_vnni", log, DATA).same and hago.replay(model, "x86_vnni", strategy, DATA).same
    seen = list(torch.cat(DATA)[spread_indices(96, 64)].split(16))
    own = hago.evaluate_strategy(model, "x86_vnni", strategy, seen)
    assert own.value == strategy.made_by["results"]["sqnr"]
    assert hago.evaluate_strategy(model, "x86_vnni", strategy, DATA).value != own.value


def test_a_fast_search_with_costs_is_continued_as_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, log = Uneven().eval(), tmp_path / "log.jsonl"
    how: dict[str, Any] = {"log": log, "progress": False, **FRONT}
    first = hago.search_quantize_strategy(model, "x86_vnni", DATA, effort="fast", **how)[0]
    content = log.read_bytes()
    monkeypatch.setattr(efforts, "WITH_COSTS", MappingProxyType({"fast": replace(FEW, samples=32, tries_apart=True)}))
    log.write_bytes(b"".join(content.splitlines(keepends=True)[:3]))
    again = hago.search_quantize_strategy(model, "x86_vnni", DATA, **how)[0]
    assert again.to_json() == first.to_json() and timeless(log.read_bytes()) == timeless(content)


def test_workers_look_at_the_same_samples(tmp_path: Path) -> None:
    model, logs = Uneven().eval(), [tmp_path / "alone", tmp_path / "workers"]
    for log, executor in zip(logs, (None, ThreadPoolExecutor(2)), strict=True):
        how: dict[str, Any] = {"log": log, "executor": executor, "progress": False, **FRONT}
        hago.search_quantize_strategy(model, "x86_vnni", DATA, effort="fast", **how)
    assert timeless(logs[0].read_bytes()) == timeless(logs[1].read_bytes())


def test_all_samples_tell_whether_a_limit_on_a_measure_holds(tmp_path: Path) -> None:
    model, log = Uneven().eval(), tmp_path / "log.jsonl"
    how: dict[str, Any] = {"effort": "fast", "log": log, "progress": False, "keep": "sqnr >= 12", **SIZE}
    strategy, _ = hago.search_quantize_strategy(model, "x86_vnni", DATA, **how)
    header = read_log(log).header
    assert header is not None and logged_effort(header) == replace(FEW, samples=None)
    results = strategy.made_by["results"]
    assert hago.evaluate_strategy(model, "x86_vnni", strategy, DATA).value == results["sqnr"]


def test_logs_of_fast_searches_of_before_are_continued_with_all_samples(tmp_path: Path) -> None:
    model, log = Uneven().eval(), tmp_path / "log.jsonl"
    before = replace(EFFORTS["fast"], name="fast")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(efforts, "WITH_COSTS", MappingProxyType({}))
        how: dict[str, Any] = {"log": log, "progress": False, **FRONT}
        first = hago.search_quantize_strategy(model, "x86_vnni", DATA, effort="fast", **how)[0]
    header, content = read_log(log).header, log.read_bytes()
    assert header is not None and header.settings["effort"] == {"name": "fast", "turns": 1}
    assert logged_effort(header) == before and "refined" in header.settings
    log.write_bytes(b"".join(content.splitlines(keepends=True)[:2]))
    again = hago.search_quantize_strategy(model, "x86_vnni", DATA, effort="fast", **how)[0]
    assert again.to_json() == first.to_json() and timeless(log.read_bytes()) == timeless(content)


def test_layers_are_corrected_once_a_point(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[bool, bool]] = []
    once = correcting.correct_layers

    def counted(*args: Any, rounding: bool, bias: bool) -> Any:
        made.append((rounding, bias))
        return once(*args, rounding=rounding, bias=bias)

    monkeypatch.setattr(correcting, "correct_layers", counted)
    hago.search_quantize_strategy(Uneven().eval(), "x86_vnni", DATA, effort="fast", progress=False, **FRONT)
    assert made and set(made) == {(True, True)}


@pytest.mark.parametrize("named", [(), ("equalization",), ("bias",), ("rounding",), ("affine",), ("bias", "rounding")])
def test_no_correction_of_layers_is_made_that_is_not_named(
    named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: set[str] = set()
    once = correcting.correct_layers

    def counted(*args: Any, **which: bool) -> Any:
        made.update(name for name, wanted in which.items() if wanted)
        return once(*args, **which)

    monkeypatch.setattr(correcting, "correct_layers", counted)
    how: dict[str, Any] = {"effort": "fast", "corrections": named or "none", "progress": False, **FRONT}
    hago.search_quantize_strategy(Uneven().eval(), "x86_vnni", DATA, **how)
    assert made == {"bias", "rounding"} & {*named}


def test_scores_of_other_samples_are_not_reused(tmp_path: Path) -> None:
    """Thresholds that are given make equal Plans of all samples and of some."""
    model, logs = Uneven().eval(), {effort: tmp_path / f"{effort}.jsonl" for effort in ("good", "fast")}
    how: dict[str, Any] = {"estimator": "power2_range", "corrections": "none", "progress": False, **FRONT}
    for effort, log in logs.items():
        hago.search_quantize_strategy(model, "x86_vnni", DATA, effort=effort, log=log, **how)
    for effort, other in (("good", "fast"), ("fast", "good")):
        again, log = tmp_path / f"{effort}_reusing.jsonl", logs[other]
        hago.search_quantize_strategy(model, "x86_vnni", DATA, effort=effort, log=again, reuse=log, **how)
        assert hago.replay(model, "x86_vnni", again, DATA).same


def test_training_sees_all_samples(tmp_path: Path) -> None:
    log = tmp_path / "training.jsonl"
    tuning = {"steps": 2, "log": log, "save_weights": tmp_path / "weights.pt"}
    how: dict[str, Any] = {"effort": "fast", "progress": False, "finetune": tuning, **SIZE}
    hago.search_quantize_strategy(Uneven().eval(), "vta", DATA, **how)
    before = json.loads(log.read_text("utf-8").splitlines()[0])
    assert before["what"] == "before" and before["results"]["samples"] == 96


def test_a_fast_search_that_is_trained_rounds_too() -> None:
    for_costs, without = (
        session.for_training(SearchOptions.of(effort="fast", **goal), "vta").quantization.corrections
        for goal in (SIZE, {})
    )
    assert for_costs == ("equalization", "rounding", "bias") and without == ("equalization", "bias")


@pytest.mark.parametrize("samples", [0, -3, True, 64.5, "64"])
def test_an_edited_number_of_samples_is_refused(samples: Any) -> None:
    model = Uneven().eval()
    strategy, _ = hago.search_quantize_strategy(model, "x86_vnni", DATA, effort="fast", progress=False, **FRONT)
    edited = replace(
        strategy, made_by={**strategy.made_by, "effort": {**strategy.made_by["effort"], "samples": samples}}
    )
    with pytest.raises(LogError, match="samples; expected a whole number above 0"):
        hago.replay(model, "x86_vnni", edited, DATA)


@pytest.mark.parametrize(("chip", "is_proved"), [("x86_avx2", False), ("x86_vnni", True)])
def test_overflows_on_samples_that_were_not_looked_at_are_a_warning(
    chip: str, is_proved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = randomized(Uneven()).eval(), torch.cat([images(16, 3, 8, 8, seed=n) for n in range(12)])
    data[[1, 100]] *= 6.0
    assert not {1, 100} & {*spread_indices(192, 64)}
    measured: list[int] = []
    measure = session.Evaluator.measure
    monkeypatch.setattr(
        session.Evaluator,
        "measure",
        lambda self, *a, **k: (measured.append(self.batches.samples), measure(self, *a, **k))[1],
    )
    how: dict[str, Any] = {"effort": "fast", "progress": False, "searcher": "pareto:points=3,rounds=1"}
    if is_proved:
        hago.search_quantize_strategy(model, chip, list(data.split(16)), **how)
    else:
        with pytest.warns(hago.HagoWarning, match="overflow on samples .* it looked at 64 of 192; .*effort='good'"):
            hago.search_quantize_strategy(model, chip, list(data.split(16)), **how)
        with warnings.catch_warnings():  # what the warning advises
            warnings.simplefilter("error", hago.HagoWarning)
            hago.search_quantize_strategy(model, chip, list(data.split(16)), **{**how, "effort": "good"})
        assert measured[-1] == 192 and measured.count(192) > 1
    assert (192 in measured) != is_proved  # what is proved is not measured
