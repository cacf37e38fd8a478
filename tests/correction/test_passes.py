"""What every pass of corrections gained is recorded, shown, and read back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Outliers, Uneven, images
from products import some

import hago
from hago.analysis.graph_statistic import cause_in_words
from hago.correction import CorrectionPass, passes_from_json
from hago.errors import LogError
from hago.plan import Strategy
from hago.search import CORRECTIONS, correcting, passes_of
from hago.search.effort import EFFORTS
from hago.search.measured_point import first_point_if_any
from hago.search.squared_gradients import GRADIENT_SAMPLES, gradient_samples
from hago.study import read_log

CHIPS = ("x86_vnni", "vta", "tflite", "cmsis_nn")
DATA = [images(16, 3, 8, 8, seed=n) for n in range(4)]
WORDS = [images(16, 6, 12, seed=n) for n in range(4)]
SUBJECTS: dict[str, tuple[Any, list[torch.Tensor]]] = {
    "uneven": (lambda: Uneven().eval(), DATA),
    "clamped": (lambda: Uneven(high=1.0).eval(), DATA),
    "outliers": (lambda: Outliers().eval(), WORDS),
}


@pytest.mark.parametrize(("chip", "name", "bits"), some(2, CHIPS, SUBJECTS, [8, 4]))
def test_every_correction_has_a_pass_and_what_is_kept_gains(chip: str, name: str, bits: int) -> None:
    make, data = SUBJECTS[name]
    strategy = hago.quantize(make(), chip, data, fix_bits={"*:1": bits}).strategy
    passes = passes_of(strategy)
    assert {n for each in passes for n in each.names} == {*strategy.made_by["corrections"]}
    for each in passes:
        assert each.kept == (each.why_not == "")
        if each.kept:
            assert each.gain is not None and each.samples > 0
            assert each.gain > 0.0 or each.names == ("splitting",), each  # what is split may be for equalization
        elif each.why_not == "no gain":
            assert each.gain is not None and each.gain <= 0.0
        elif each.why_not in ("not sure", "another gains more"):
            assert each.gain is not None and each.gain > 0.0
        else:
            assert each.gain is None
    kept = {n for each in passes if each.kept for n in each.names}
    made = strategy.corrections
    assert bool(made.equalization) == ("equalization" in kept)
    assert bool(made.offsets) == bool({"rounding", "bias"} & kept)
    assert bool(strategy.made_by.get("refined")) == ("thresholds" in kept)
    assert not made.splits or "splitting" in kept


def test_the_figures_are_those_of_the_plans() -> None:
    """The SQNR before the first pass is that of one shot without corrections, and that after the last that is kept of
    the strategy, on the samples that judged them."""
    model = Uneven().eval()
    strategy = hago.quantize(model, "vta", DATA, corrections=["equalization", "bias"]).strategy
    first, last = passes_of(strategy)
    plain = hago.quantize(model, "vta", DATA, corrections="none").strategy
    assert first.names == ("equalization",) and first.samples == 64 - GRADIENT_SAMPLES
    judged = torch.cat(DATA)[gradient_samples(64)[1]]
    value = hago.evaluate_strategy(model, "vta", plain, [judged]).results["sqnr"]
    assert first.before is not None and math.isclose(first.before, value, abs_tol=1e-3)
    judged = torch.cat(DATA)[-last.samples :]
    assert last.names == ("bias",) and 0 < last.samples < 64
    value = hago.evaluate_strategy(model, "vta", strategy, [judged]).results["sqnr"]
    assert last.after is not None and math.isclose(last.after, value, abs_tol=1e-3)


def test_a_pass_that_is_not_sure_or_overflows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Uneven().eval()

    def why(**how: Any) -> dict[tuple[str, ...], str]:
        return {p.names: p.why_not for p in passes_of(hago.quantize(model, "vta", DATA, **how).strategy)}

    assert why(corrections="thresholds") == {("thresholds",): ""}
    with monkeypatch.context() as patch:
        patch.setattr(correcting.Confirmation, "gain", lambda *_: correcting_gain())
        assert why(corrections="thresholds") == {("thresholds",): "not sure"}

    def overflowing(prepared: Any, evaluator: Any) -> Any:
        return None if prepared.graph.corrected_from is not None else first_point_if_any(prepared, evaluator)

    monkeypatch.setattr(correcting, "first_point_if_any", overflowing)
    assert why(corrections="equalization") == {("equalization",): "overflow"}


def correcting_gain() -> Any:
    from hago.search.confirmation import Gain

    return Gain(0.0, 0.0, 8)


def test_passes_stand_in_strategies_and_logs_and_are_continued(tmp_path: Path) -> None:
    model, log, saved = Uneven().eval(), tmp_path / "log.jsonl", tmp_path / "s.json"
    how: dict[str, Any] = {"log": log, "save": saved, "progress": False, "searcher": "greedy", "fix_bits": {"*:1": 6}}
    hago.search_quantize_strategy(model, "vta", DATA, budget=2, **how)
    header = read_log(log).header
    assert header is not None
    of_graph = correcting.logged_passes(header)
    assert [each.names for each in of_graph] == [("equalization",), ("splitting",)]
    strategy, _ = hago.search_quantize_strategy(model, "vta", DATA, budget=5, **how)
    assert passes_of(strategy)[:2] == of_graph and len(passes_of(strategy)) > 2
    assert passes_of(Strategy.load(saved)) == passes_of(strategy)
    at_once = {**how, "log": tmp_path / "other.jsonl", "save": tmp_path / "other.json"}
    whole, _ = hago.search_quantize_strategy(model, "vta", DATA, budget=5, **at_once)
    assert whole.to_json() == strategy.to_json()
    older = replace(strategy, made_by={k: v for k, v in strategy.made_by.items() if k != "passes"})
    assert passes_of(older) == () and hago.replay(model, "vta", older, DATA).same


def test_a_pass_is_read_back_and_an_edited_one_refused() -> None:
    for each in (
        CorrectionPass(("equalization",), 1.5, 2.25, 64),
        CorrectionPass(("rounding", "bias"), 3.0, None, 16, "overflow"),
        CorrectionPass(("splitting",), why_not="nothing to change"),
    ):
        assert passes_from_json([json.loads(json.dumps(each.to_json()))], "x") == (each,)
    strategy = hago.quantize(Uneven().eval(), "vta", DATA, corrections="bias").strategy
    document = strategy.to_json()
    for wrong in ([{}], [{"names": ["bias"], "before": "high"}], [3], {"names": []}):
        document["made_by"]["passes"] = wrong
        with pytest.raises(LogError, match="passes"):
            Strategy.from_json(document)
    with pytest.raises(LogError, match="it was edited"):
        passes_from_json([{"names": 3}], "x")


def test_an_inspection_shows_what_each_gained_and_names_the_correction_that_cures() -> None:
    model = Uneven().eval()
    strategy = hago.quantize(model, "vta", DATA, corrections="bias").strategy
    statistic = hago.inspect_graph_statistic(model, "vta", strategy, DATA)
    (made,) = statistic.passes
    text = str(statistic)
    assert "corrections: what each gained" in text and f"{made.gain:+.2f}" in text
    assert statistic.to_json()["corrections"] == [made.to_json()]
    assert statistic.remedies is not None
    cures = [r for r in statistic.remedies.found if r.change.corrections is not None]
    assert cures and all(r.node is not None and r.gain > 0.0 for r in cures)
    best = max(cures, key=lambda r: r.gain)
    assert best.change.corrections is not None and {"bias"} < {*best.change.corrections}
    assert f"--corrections {best.change.corrections[0]}" in " ".join(text.split())
    named = hago.quantize(model, "vta", DATA, **best.change.to_json()).strategy
    unseen = [images(128, 3, 8, 8, seed=77)]
    before, after = (hago.evaluate_strategy(model, "vta", s, unseen).results["sqnr"] for s in (strategy, named))
    assert after > before


def test_what_may_help_names_the_correction_that_was_not_tried() -> None:
    words = "the correction equalization"
    row = narrow_row()
    assert words in cause_in_words(row, "constants")[1] and words in cause_in_words(row, "constants", ["bias"])[1]
    assert words not in cause_in_words(row, "constants", ["bias", "equalization"])[1]


def narrow_row() -> Any:
    """The statistic of a layer whose weight has one scale for channels of very different sizes."""
    strategy = hago.quantize(Uneven().eval(), "vta", DATA, corrections="none").strategy
    statistic = hago.inspect_graph_statistic(Uneven().eval(), "vta", strategy, DATA, remedies=False)
    return next(row for row in statistic.rows if any(e.narrow_channels and not e.per_channel for e in row.edges))


def test_no_correction_is_advised_where_all_were_made() -> None:
    model = Uneven().eval()
    names = [name for name in CORRECTIONS if name != "reconstruction"]
    strategy = hago.quantize(model, "vta", DATA, corrections=names).strategy
    statistic = hago.inspect_graph_statistic(model, "vta", strategy, DATA)
    assert statistic.remedies is not None
    assert all(remedy.change.corrections is None for remedy in statistic.remedies.found)


@pytest.mark.parametrize("effort", EFFORTS)
def test_every_effort_records_its_passes(effort: str) -> None:
    strategy = hago.quantize(Uneven().eval(), "vta", DATA, effort=effort).strategy
    assert {n for each in passes_of(strategy) for n in each.names} == {*EFFORTS[effort].corrections}
    assert {*EFFORTS[effort].corrections} <= {*CORRECTIONS}
