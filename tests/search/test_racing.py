"""Racing: what is given up is worse, what survives is whole, and the log says which is which."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from building import residual_block, seeded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import timeless

from hago import search_quantize_strategy
from hago.data.batches import Batches
from hago.errors import DataError, HagoError
from hago.plan import Plan
from hago.search.evaluate import Evaluator, Measurement
from hago.search.intervals import jackknife_interval
from hago.search.objective import named_objective
from hago.search.preparation import Prepared, QuantizationOptions, prepare
from hago.search.racing import RaceOptions, looks, make_evaluator, shuffled
from hago.search.session import SearchOptions, run_search
from hago.search.workers import PointScorer
from hago.study.log import best_trial, read_log

Pair = Callable[[random.Random], tuple[float, float]]
DATA = [(seeded(40, 3, 8, 8, seed=s), torch.arange(40) % 5) for s in range(3)]


# ---------------------------------------------------------------- the test itself
def rare(draw: random.Random) -> tuple[float, float]:
    """A rival that is wrong once in twenty, and a point that is, elsewhere."""
    return float(draw.random() < 0.05), float(draw.random() < 0.05)


def skewed(draw: random.Random) -> tuple[float, float]:
    return draw.lognormvariate(0, 1.5), draw.lognormvariate(0, 1.5)


def alike(draw: random.Random) -> tuple[float, float]:
    loss = draw.lognormvariate(0, 0.5)
    return loss, loss * draw.lognormvariate(0, 0.1)


def losses(pair: Pair, draw: random.Random, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    theirs, mine = zip(*(pair(draw) for _ in range(samples)), strict=True)
    return torch.tensor(theirs, dtype=torch.float64), torch.tensor(mine, dtype=torch.float64)


@pytest.mark.parametrize("pair", [rare, skewed, alike])
def test_what_is_as_good_is_hardly_ever_given_up(pair) -> None:
    """Of points with exactly the rival's total, looked at after every sample, at most alpha: 5 % here, and the
    upper end of what chance makes of that in 300 draws."""
    draw, race, dropped = random.Random(0), RaceOptions(alpha=0.05), 0
    for _ in range(300):
        theirs, mine = losses(pair, draw, 96)
        mine = mine[torch.tensor(draw.sample(range(96), 96))] if pair is not alike else mine
        if float(mine.sum()) > float(theirs.sum()):
            theirs, mine = mine, theirs  # at least as good: then it is the null
        order = torch.tensor(draw.sample(range(96), 96))
        dropped += race.worse(mine[order], theirs[order], 96)
    assert dropped <= 24


def test_what_is_worse_is_given_up() -> None:
    draw = random.Random(1)
    theirs, mine = losses(alike, draw, 128)
    race = RaceOptions()
    assert race.worse(2 * mine[:32], theirs, 128) and race.worse(1.3 * mine[:96], theirs, 128)
    assert not race.worse(mine[:128], 2 * theirs, 128)
    assert race.worse(torch.tensor([0.0, 1e-9]), torch.zeros(8), 8)  # a rival without any loss
    assert not race.worse(torch.zeros(8), torch.zeros(8), 8)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=9))
def test_on_all_samples_certainty_agrees_with_the_sum(pairs: list[tuple[int, int]]) -> None:
    """With an alpha near 0 only certainty is left: then a point is given up only where its total is worse."""
    mine, theirs = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    if RaceOptions(alpha=1e-300).worse(mine, theirs, len(pairs)):
        assert float(mine.sum()) > float(theirs.sum())


def test_looks_come_after_twice_as_many_samples() -> None:
    assert looks([16, 16, 32, 64], 16) == [True, True, True, False]
    assert looks([40, 40, 40], 16) == [True, True, False] and looks([8], 16) == [False]


def test_samples_are_drawn_once_and_all_of_them() -> None:
    batches = Batches(DATA, ("x",))
    found = shuffled(batches, 3, 16, ("x",))
    assert [b.size for b in found] == [16, 16, 32, 40, 16]
    again = torch.cat([b.inputs[0] for b in shuffled(batches, 3, 16, ("x",))])
    assert torch.cat([b.inputs[0] for b in found]).equal(again)
    rows = {tuple(r.flatten()[:3].tolist()): int(y) for x, ys in DATA for r, y in zip(x, ys, strict=True)}
    shuffled_rows = {
        tuple(r.flatten()[:3].tolist()): int(y) for b in found for r, y in zip(b.inputs[0], b.labels, strict=True)
    }
    assert rows == shuffled_rows
    with pytest.raises(DataError, match="in memory"):
        shuffled(Batches(DATA, ("x",), cache_bytes=10), 0, 16, ("x",))


# ---------------------------------------------------------------- scores
def scorer_of(prepared: Prepared, **options) -> PointScorer:
    evaluator = make_evaluator(prepared.graph, prepared.batches, named_objective("sqnr"), **options)
    return PointScorer(prepared.resolver, evaluator)


def test_a_survivor_is_whole_and_what_is_given_up_says_so() -> None:
    prepared = prepare(residual_block(), "x86_vnni", DATA, QuantizationOptions(estimator="max_range"))
    scorer = scorer_of(prepared, race=RaceOptions(), seed=1)
    plain = scorer_of(replace(prepared, batches=shuffled(prepared.batches, 1, 16, ("x",))))
    best, worst = prepared.space.widest(), prepared.space.narrowest()
    assert scorer.score(best, worst) == scorer.score(best) == plain.score(best)
    for _ in range(2):  # the second time from what is remembered
        given_up = scorer.score(worst, best)
        assert given_up.dropped == {"samples": 16, "of": 120, "because": "worse", "rival": plain.score(best).value}
        assert given_up.forwards == 16 / 120 and given_up.results["samples"] == 16
        assert given_up.value < plain.score(best).value and not given_up.accepted
        assert abs(given_up.value - plain.score(worst).value) < 1.5
    fresh = scorer_of(prepared, race=RaceOptions(), seed=1)
    assert fresh.score(worst, best) == given_up  # whoever measured the rival before


def test_what_a_race_measured_on_all_samples_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is measured once more before its layers are corrected, and as the rival of others."""
    prepared = prepare(residual_block(), "x86_vnni", DATA, QuantizationOptions(estimator="max_range"))
    evaluator = scorer_of(prepared, race=RaceOptions(), seed=1).evaluator
    best, worst = (prepared.resolver(bits) for bits in (prepared.space.widest(), prepared.space.narrowest()))
    simulated: list[str] = []
    simulate = Evaluator._simulate

    def counted(self: Evaluator, plan: Plan, *more: Any) -> Measurement:
        simulated.append(plan.key)
        return simulate(self, plan, *more)

    monkeypatch.setattr(Evaluator, "_simulate", counted)
    assert not evaluator.score(best, prepared.space.widest(), worst).dropped
    whole = len(evaluator.measure(best).contributions["sqnr"])
    assert evaluator.score(worst, prepared.space.narrowest(), best).dropped
    assert simulated == [worst.key, best.key, worst.key]  # as a rival on all samples, and on those until it was dropped
    assert len(evaluator.measure(worst).contributions["sqnr"]) == whole


def test_an_overflow_ends_a_race_and_is_a_lower_bound() -> None:
    prepared = prepare(residual_block(), "int16_accumulator", DATA, QuantizationOptions(estimator="max_range"))
    narrow, wide = prepared.space.narrowest(), prepared.space.widest()
    scorer = scorer_of(prepared, race=RaceOptions())
    whole = scorer.score(wide)
    raced = scorer.score(wide, narrow)
    assert raced.dropped["because"] == "overflows" and not raced.runs
    assert all(raced.overflows[n] <= whole.overflows[n] for n in raced.overflows)
    assert sum(raced.overflows.values()) < sum(whole.overflows.values())


# ---------------------------------------------------------------- searches
def test_a_race_ends_with_a_whole_winner_and_the_same_log(tmp_path: Path) -> None:
    def run(name: str, **options) -> list[str]:
        given = {"log": tmp_path / name, "searcher": "random:trials=30,batch=5", "progress": False, **options}
        search_quantize_strategy(residual_block(), "x86_vnni", DATA, estimator="max_range", race=0.01, **given)
        return timeless((tmp_path / name).read_bytes())

    whole = run("whole")
    trials = read_log(tmp_path / "whole").trials
    dropped = [t for t in trials if t.score.dropped]
    assert len(dropped) > 5 and sum(t.score.forwards for t in trials) < 0.8 * len(trials)
    best = best_trial(trials)
    assert best is not None and not best.score.dropped and all(t.score.value < best.score.value for t in dropped)
    assert run("threads", executor="threads:3") == whole
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    for cut in (4, 13, 24):
        (tmp_path / "cut").write_bytes(b"".join(lines[:cut]))
        assert run("cut") == whole


def test_greedy_ends_where_it_does_without_a_race(tmp_path: Path) -> None:
    ends = []
    for race in (False, True):
        options = SearchOptions.of(race=race, seed=2, log=tmp_path / f"{race}", progress=False, estimator="max_range")
        ends.append(run_search(residual_block(), "int16_accumulator", DATA, options).result)
    assert ends[0].bits == ends[1].bits
    assert sum(t.score.forwards for t in ends[1].trials) < sum(t.score.forwards for t in ends[0].trials)


@pytest.mark.parametrize(
    ("held_out", "says"),
    [
        ([], "held-out data is empty"),
        ([seeded(4, 3, 9, 9)], r"has samples of \(3, 9, 9\) torch.float32; the calibration data has \(3, 8, 8\) torch"),
        ([torch.ones(4, 3, 8, 8, dtype=torch.int32)], r"held-out data has samples of \(3, 8, 8\) torch.int32; the cal"),
        ([seeded(4, 3, 8, 8) * float("nan")], "held-out data: .*batch 0"),
    ],
)
def test_held_out_data_are_checked_before_the_search(held_out: list[Tensor], says: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with pytest.raises(DataError, match=says):
        run_search(
            residual_block(), "x86_vnni", DATA, SearchOptions.of(held_out=held_out, log=log, budget=4, progress=False)
        )
    assert not log.exists()


def test_held_out_data_need_the_labels_of_the_objective(tmp_path: Path) -> None:
    options = SearchOptions.of(objective="accuracy", log=tmp_path / "log", progress=False, budget=2)
    for unfit in ([DATA[0][0]], [(DATA[0][0], seeded(len(DATA[0][0])))]):
        with pytest.raises(DataError, match="held-out data: the objective needs labels that are classes"):
            run_search(residual_block(), "x86_vnni", DATA, replace(options, held_out=unfit))
    assert not (tmp_path / "log").exists()


class Halves(nn.Module):
    """Takes its inputs nested."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, halves: Any) -> Tensor:
        left, right = (halves["left"], halves["right"]) if isinstance(halves, dict) else halves
        return self.left(left).relu() + self.right(right)


@pytest.mark.filterwarnings("ignore:.* of the held-out data are in the calibration data")
def test_nested_data_mean_one_thing_in_any_order() -> None:
    torch.manual_seed(0)
    net, left, right = Halves().eval(), seeded(8, 4, seed=1), 3 * seeded(8, 4, seed=2)
    tupled, same, turned = [((left, right),)], {"left": left, "right": right}, {"right": right, "left": left}
    for data, held_out in ((tupled, tupled), ([same], [same]), ([same], [turned])):
        options = SearchOptions.of(held_out=held_out, progress=False, budget=2)
        found = run_search(net, "x86_vnni", data, options).strategy.made_by
        assert found["held_out"]["sqnr"] == found["results"]["sqnr"]
    in_turn, equal = (
        run_search(net, "x86_vnni", data, SearchOptions.of(progress=False, budget=1)).strategy.made_by["results"]
        for data in ([same, turned], [same, same])
    )
    assert in_turn["sqnr"] == equal["sqnr"]
    with pytest.raises(DataError, match="batch 1 is nested differently from the first"):
        run_search(net, "x86_vnni", [same, {"left": left, "other": right}], SearchOptions.of(progress=False, budget=1))


@pytest.mark.filterwarnings("ignore:.* of the held-out data are in the calibration data")
def test_held_out_data_confirm_with_an_interval(tmp_path: Path) -> None:
    options = SearchOptions.of(race=True, budget=4, held_out=DATA[:1], progress=False)
    held_out = run_search(residual_block(), "x86_vnni", DATA, options).strategy.made_by["held_out"]
    low, high = held_out["sqnr_interval"]
    assert low < held_out["sqnr"] < high


@pytest.mark.filterwarnings("ignore:.* of the held-out data are in the calibration data")
def test_intervals_of_shares_end_at_100_percent() -> None:
    options = SearchOptions.of(objective="agreement", budget=1, held_out=DATA[:1], progress=False)
    held_out = run_search(residual_block(), "x86_vnni", DATA, options).strategy.made_by["held_out"]
    low, high = held_out["agreement_interval"]
    assert held_out["agreement"] == high == 1.0 and low < 1.0


def test_what_cannot_be_raced_is_refused() -> None:
    def run(**options) -> None:
        search_quantize_strategy(residual_block(), "x86_vnni", DATA, race=True, progress=False, budget=1, **options)

    with pytest.raises(HagoError, match="no loss for each sample"):
        run(objective=lambda reference, outputs, labels: 1.0)
    with pytest.raises(HagoError, match="minimize"):
        run(minimize="weight_bytes", keep="sqnr >= 1 dB")
    with pytest.raises(HagoError, match="alpha 2"):
        RaceOptions(alpha=2)


def test_racing_a_search_for_a_front_is_refused_before_any_data_are_read() -> None:
    def unread():
        pytest.fail("data were read")
        yield

    with pytest.raises(HagoError, match="'pareto' looks for a front"):
        search_quantize_strategy(residual_block(), "x86_vnni", unread(), searcher="pareto", race=True, progress=False)


def test_a_jackknife_interval_of_a_mean_is_the_usual_one() -> None:
    x = torch.randn(200, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    low, high = jackknife_interval(x, lambda t: float(t[0]))
    half = 1.959963985 * float(x.std()) / 200**0.5
    assert low == pytest.approx(float(x.mean()) - half) and high == pytest.approx(float(x.mean()) + half)


def test_objectives_with_losses_order_models_as_their_value_does() -> None:
    draw = torch.Generator().manual_seed(0)
    for name in ("sqnr", "kl", "mse", "cosine", "agreement"):
        measure = named_objective(name)
        assert measure.loss is not None
        reference = [torch.randn(64, 5, generator=draw)]
        found = []
        for size in (0.1, 0.5, 2.0):
            c = measure.per_sample(reference, [reference[0] + size * torch.randn(64, 5, generator=draw)], None)
            assert float(measure.loss(c).min()) >= 0.0
            found.append((float(measure.loss(c).mean()), -measure.finish(c.mean(0))))
        assert found == sorted(found) and replace(measure, loss=None).loss is None
