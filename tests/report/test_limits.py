"""What a report says of the limits of a search, and of a cost that is minimized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hago
from hago.api import make_report
from hago.errors import LogError
from hago.report import LiveReport, Report, ReportOptions, page_of
from hago.report.document import AskedGoal, InShort, Point
from hago.report.goals import asked_goal
from hago.report.short import Told, answers
from hago.report.trials import columns_of, story_of
from hago.study import Log, Trial, read_log

from .searched import CHIP, data, network
from .test_page import Reader, running_search

#: The goal of the tests: the fewest bytes of at least 20 dB, for which trials were asked for 5.65 dB less.
GOAL = {"minimize": "weight_bytes", "limits": ["sqnr >= 20"], "expected_gains": {"sqnr": 5.65}}


def goal_of(**settings: Any) -> AskedGoal:
    goal = asked_goal(settings, "sqnr")
    assert goal is not None
    return goal


def measured(report: Report, values: Mapping[str, Mapping[str, Any]], **costs: float) -> Point:
    """The first point of a report with other figures of the simulation.

    Args:
        values: figures by data set.
    """
    point = report.points[0]
    verdicts = []
    for verdict in point.verdicts:
        models = tuple(
            replace(model, figures={**model.figures, **values.get(verdict.data, {})})
            if model.name == "simulated"
            else model
            for model in verdict.models
        )
        verdicts.append(replace(verdict, models=models))
    return replace(point, verdicts=tuple(verdicts), costs={**point.costs, **costs})


def answers_of(report: Report, point: Point, goal: AskedGoal | None) -> tuple[InShort, ...]:
    return answers(point, Told(report.search, report.measure, "weight_bytes", CHIP, 10, goal))


def sqnr(calibration: float | None, held_out: float | None) -> dict[str, dict[str, Any]]:
    return {"calibration data": {"sqnr": calibration}, "held-out data": {"sqnr": held_out}}


# ---------------------------------------------------------------- what was asked
@pytest.mark.parametrize(
    ("calibration", "held_out", "says", "alarm"),
    [
        (21.73, 19.16, "holds on the calibration data (21.73) and not on the held-out data (19.16).", True),
        (21.73, 20.0, "holds on the calibration data (21.73) and on the held-out data (20.00).", False),
        (18.0, 19.16, "does not hold on the calibration data (18.00) and on the held-out data (19.16).", True),
        (20.5, 19.9999, "holds on the calibration data (20.50) and not on the held-out data (19.9999).", True),
        (21.73, None, "holds on the calibration data (21.73).", False),
        (None, None, "was not measured.", False),
    ],
)
def test_the_first_answer_says_what_was_asked_and_whether_it_holds(
    full_report: Report, calibration: float | None, held_out: float | None, says: str, alarm: bool
) -> None:
    point = measured(full_report, sqnr(calibration, held_out), weight_bytes=139059.0)
    made = answers_of(full_report, point, goal_of(**GOAL))
    assert made[0].answer == f"Least weight_bytes with sqnr >= 20: 135.8 KiB. The limit {says}"
    assert made[0].leads and made[0].alarm == alarm
    shown = replace(full_report, points=(replace(point, short=made),), pairs=(), goal=goal_of(**GOAL))
    document = shown.to_json()
    text = "".join(Reader(page_of(document)).text)
    assert made[0].answer.replace(" KiB", "\u00a0KiB") in text
    assert document["points"][0]["short"][0]["answer"] == made[0].answer
    assert document["goal"]["limits"][0]["before"] == pytest.approx(14.35)
    # it stands before all other figures of the section, once
    assert text.index(made[0].question) < text.index("weights, packed to their bits")
    assert text.count(made[0].question) == 1


def test_nothing_is_said_where_nothing_was_asked(full_report: Report) -> None:
    assert full_report.goal is None and asked_goal({"expected_gains": {}}, "sqnr") is None
    assert not any(each.leads or "asked" in each.question for each in full_report.points[0].short)


def test_limits_on_costs_and_relative_ones_have_their_numbers(full_report: Report) -> None:
    goal = goal_of(
        limits=["weight_bytes <= 141.6", "accuracy >= 0.5", "kl <= 0.01"],
        limits_given=["size<=60%", "accuracy >= float - 10 %", "kl <= 0.01"],
    )
    values: dict[str, dict[str, Any]] = {
        "calibration data": {"sqnr": 30.0, "sim_acc": 0.5, "kl": -0.005},
        "held-out data": {"sqnr": 31.0, "sim_acc": 0.3, "kl": -0.02},
    }
    point = measured(full_report, values, weight_bytes=150.0)
    verdicts = []
    for verdict, whole in zip(point.verdicts, (0.6, 0.35), strict=True):
        models = [
            replace(m, figures={**m.figures, "sim_acc": whole}) if m.name == "float" else m for m in verdict.models
        ]
        verdicts.append(replace(verdict, models=tuple(models)))
    made = answers_of(full_report, replace(point, verdicts=tuple(verdicts)), goal)[0]
    assert made.answer == (
        "Highest sqnr with size <= 60 % and accuracy >= float - 10 % and kl <= 0.01: 30.00 dB on the calibration data "
        "and 31.00 dB on the held-out data. "
        "The limit size <= 60 % does not hold (150 B; asked: at most 142 B). "
        "The limit accuracy >= float - 10 % holds on the calibration data (50.00 %; asked: at least 50 %) and on the "
        "held-out data (30.00 %; asked: at least 25 %). "
        "The limit kl <= 0.01 holds on the calibration data (0.005) and not on the held-out data (0.02)."
    )
    assert made.alarm


def test_trials_are_judged_as_of_before_corrections(full_report: Report) -> None:
    point = replace(measured(full_report, sqnr(15.0, 15.0)), kind="front", uncorrected=True)
    made = answers_of(full_report, point, goal_of(**GOAL))[0]
    assert made.answer.startswith("The least weight_bytes with sqnr >= 20 was asked. This trial has ")
    assert "does not hold" in made.answer and "before layers were corrected" in made.answer and not made.alarm


@pytest.fixture(scope="module")
def limited_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a small search within limits: `net.jsonl`, `net.json` and `net.front.json`."""
    folder = tmp_path_factory.mktemp("limited")
    hago.search_quantize_strategy(
        network(),
        CHIP,
        data(),
        minimize="weight_bytes",
        keep=["cosine >= 0.9", "sqnr >= 24"],
        searcher="greedy",
        budget="6 trials",
        log=folder / "net.jsonl",
        save=folder / "net.json",
        front=folder / "net.front.json",
        progress=False,
    )
    return folder


@pytest.mark.parametrize("name", ["net.jsonl", "net.json", "net.front.json"])
def test_every_record_of_a_search_says_what_was_asked(limited_folder: Path, name: str) -> None:
    report = make_report(network(), CHIP, [limited_folder / name], data(), points=1, remedies=False, progress=False)
    goal = report.to_json()["goal"]
    assert goal["minimize"] == "weight_bytes" and goal["objective"] == "sqnr"
    assert [limit["text"] for limit in goal["limits"]] == ["cosine >= 0.9", "sqnr >= 24"]
    answer = report.points[0].short[0].answer
    # the page measures what is limited, beside the objective
    asked = "east weight_bytes with cosine >= 0.9 and sqnr >= 24"
    assert answer.startswith(f"L{asked}: " if name == "net.json" else f"The l{asked} was asked. This trial has ")
    assert "not measured" not in answer and "The limit cosine >= 0.9 holds on the calibration data (0.9" in answer


def test_an_edited_goal_is_refused(limited_folder: Path) -> None:
    strategy = hago.Strategy.load(limited_folder / "net.json")
    edited = replace(strategy, made_by={**strategy.made_by, "goal": {"limits": 3}})
    with pytest.raises(LogError, match="edited"):
        make_report(network(), CHIP, [edited], progress=False)


# ---------------------------------------------------------------- trials
def limited(log: Log, figures: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[Any, list[Trial]]:
    """The header of a log with other settings, and its first trials, of which the second misses limits."""
    assert log.header is not None
    first, second = log.trials[:2]
    score = replace(second.score, shortfall=0.2, results={**second.score.results, **figures})
    return replace(log.header, settings={**log.header.settings, **settings}), [first, replace(second, score=score)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (GOAL, "sqnr 11.46, below the 14.35 that were asked before corrections"),
        ({**GOAL, "expected_gains": {}}, "sqnr 11.46, below the 20 that were asked"),
        ({**GOAL, "limits": ["sqnr >= 17.1101"]}, "sqnr 11.46, below the 11.4601 that were asked before corrections"),
        ({"limits": ["kl <= 0.1", "sqnr >= 5"]}, "kl 0.25, above the 0.1 that were asked"),
        ({"limits": ["agreement >= 99 %", "sqnr >= 20"]}, "agreement 50.00 %, below the 99 % that were asked; sqnr"),
        ({"limits": ["weight_bytes <= 1 B"]}, " B, above the 1 B that were asked"),
        ({"limits": ["mine >= 3"]}, "violates a limit"),
    ],
)
def test_a_trial_says_which_limit_it_misses(search_folder: Path, settings: Mapping[str, Any], says: str) -> None:
    figures = {"sqnr": 11.46, "kl": -0.25, "agreement": 0.5}
    header, trials = limited(read_log(search_folder / "net.jsonl"), figures, settings)
    rejected = columns_of(header, trials).rejected
    assert rejected[0] == "" and says in rejected[1] and "taken" not in rejected[1]


@pytest.mark.parametrize(
    ("limit", "figure", "gain", "says"),
    [
        ("sqnr >= 20", "sqnr", 5.65, "sqnr may be 5.65 dB below its limit"),
        ("kl <= 0.1", "kl", 0.005, "kl may be 0.005 above its limit"),
        ("agreement >= 99 %", "agreement", 0.012, "agreement may be 1.20 points below its limit"),
        ("sqnr >= 20", "sqnr", 0.0, ""),
    ],
)
def test_what_trials_may_lack_is_told_in_the_direction_of_the_limit(
    search_folder: Path, limit: str, figure: str, gain: float, says: str
) -> None:
    log = read_log(search_folder / "net.jsonl")
    assert log.header is not None
    settings = {**log.header.settings, "limits": [limit], "expected_gains": {figure: gain}}
    header = replace(log.header, settings=settings)
    columns = columns_of(header, log.trials)
    story = story_of(header, log.trials, columns, [], running=False)
    assert story.settings.get("before corrections", "") == says


def test_a_trial_that_has_a_limit_exactly_does_not_miss_it(search_folder: Path) -> None:
    settings = {"limits": [f"accuracy >= {2 / 3!r}", "sqnr >= 20"]}
    header, trials = limited(read_log(search_folder / "net.jsonl"), {"sim_acc": 2 / 3, "sqnr": 11.46}, settings)
    assert "accuracy" not in columns_of(header, trials).rejected[1]


@pytest.mark.parametrize(
    ("results", "says"),
    [
        ({"sqnr": 21.73}, "; taken all the same: corrected, it keeps the limit"),
        ({"sqnr": 19.0}, "; taken all the same: corrected, it misses the limit"),
        ({}, "; taken all the same"),
    ],
)
def test_the_trial_that_is_taken_says_why(search_folder: Path, results: Mapping[str, Any], says: str) -> None:
    header, trials = limited(read_log(search_folder / "net.jsonl"), {"sqnr": 11.46}, GOAL)
    columns = columns_of(header, trials, trials[1].bits, results)
    assert columns.best == 1
    assert columns.best_note == f"sqnr 11.46, below the 14.35 that were asked before corrections{says}"
    assert columns.rejected[1] == ""
    assert columns_of(header, trials, trials[0].bits, results).rejected[1].endswith("before corrections")


def test_a_report_reads_what_the_strategy_keeps(search_folder: Path, tmp_path: Path) -> None:
    from hago.report.gather import _trials_of
    from hago.report.records import Records

    log = read_log(search_folder / "net.jsonl")
    header, trials = limited(log, {"sqnr": 11.46}, GOAL)
    strategy = hago.Strategy.load(search_folder / "net.json")
    taken = replace(
        strategy, bits=trials[1].bits, made_by={**strategy.made_by, "goal": GOAL, "results": {"sqnr": 21.73}}
    )
    records = Records(log=Log(header, tuple(trials), 0, 0), strategies=(("net.json", taken),))
    columns, _ = _trials_of(records, ReportOptions(), running=False)
    assert columns is not None and columns.best_note.endswith("corrected, it keeps the limit")
    one_shot = replace(taken, made_by={k: v for k, v in taken.made_by.items() if k != "searcher"})
    others = replace(records, strategies=(("one_shot.json", one_shot),))
    columns, _ = _trials_of(others, ReportOptions(), running=False)
    assert columns is not None and columns.best == 0 and not columns.best_note


# ---------------------------------------------------------------- one shot, and pages of running searches
def against(report: Report, point: Point, goal: AskedGoal | None) -> InShort:
    return next(each for each in answers_of(report, point, goal) if "one shot" in each.question)


def compared(report: Report, better: str, own: float, stored: float) -> Point:
    """A point that takes so many bytes, packed and as stored, where one shot takes 200 and 236."""
    point = report.points[0]
    verdict = point.verdicts[-1]
    paired = [replace(d, better=better, difference=1.0, low=-1.0, high=2.0) for d in verdict.differences]
    return replace(
        point,
        verdicts=(replace(verdict, differences=tuple(paired)),),
        costs={**point.costs, "weight_bytes": own, "stored_bytes": stored},
        one_shot_costs={**point.one_shot_costs, "weight_bytes": 200.0, "stored_bytes": 236.0},
    )


@pytest.mark.parametrize(
    ("better", "then"),
    [
        ("one shot", "For that, one shot is surely better in accuracy, agreement, SQNR. Against"),
        ("simulated", "Nothing is surely lost for that, and it is surely better in accuracy, agreement, SQNR. Against"),
        ("", "Nothing is surely lost for that: differences may be chance. Against"),
    ],
)
def test_a_cost_that_is_saved_comes_before_what_is_lost(full_report: Report, better: str, then: str) -> None:
    goal = goal_of(**GOAL)
    same = against(full_report, compared(full_report, better, 150.0, 236.0), goal)
    assert same.answer.startswith(
        "It saves 25.0 % of weight_bytes: 150 B instead of 200 B. "
        f"But {CHIP} stores the weights in as many bytes as one shot's, 236 B. {then}"
    )
    assert not same.alarm and same.answer.count("236 B") == 1
    less = against(full_report, compared(full_report, better, 150.0, 118.0), goal)
    assert f"As {CHIP} stores them, weights take 118 B instead of 236 B. {then}" in less.answer


def test_one_shot_alarms_where_no_cost_is_saved(full_report: Report) -> None:
    point = compared(full_report, "one shot", 200.0, 236.0)
    answer = against(full_report, point, goal_of(**GOAL))
    assert answer.alarm and answer.answer.startswith("No: one shot is surely better")
    assert "It saves nothing of weight_bytes: 200 B, as one shot." in answer.answer
    least = replace(point, costs={**point.costs, "weight_bytes": 199.99})
    assert "It saves less than 0.1 % of weight_bytes" in against(full_report, least, goal_of(**GOAL)).answer
    assert answer.answer.count("236 B") <= 1
    assert "saves" not in against(full_report, point, None).answer


@pytest.mark.parametrize("minimize", ["weight_bytes", ""])
def test_the_page_of_a_running_search_names_the_minimized_cost_first(
    search_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minimize: str
) -> None:
    log = read_log(search_folder / "net.jsonl")
    assert log.header is not None
    settings = {**log.header.settings, **(GOAL if minimize else {})}
    header = replace(log.header, settings=settings)
    monkeypatch.setattr("hago.report.live.read_header", lambda path: header)
    path = tmp_path / "live.html"
    live = LiveReport(path, search_folder / "net.jsonl", hago.load_hardware(CHIP), ReportOptions(), lambda source: [])
    trial = replace(log.trials[0], score=replace(log.trials[0].score, results={"sqnr": 21.73}))
    live(running_search([replace(trial, score=replace(trial.score, costs={"weight_bytes": 139059.0}))]), trial)
    text = "".join(Reader(path.read_text("utf-8")).text)
    if minimize:
        assert "The best so far is trial 0, with weight_bytes 135.8 KiB and SQNR 21.73 dB." in text
        assert "measured before layers are corrected, when sqnr may be 5.65 dB below its limit." in text
    else:
        assert "The best so far is trial 0, with SQNR 21.73 dB." in text and "than its limit" not in text


def test_captions_of_differences_end_with_a_full_stop(full_report: Report) -> None:
    assert full_report.trials is not None
    text = "".join(Reader(page_of(full_report.to_json())).text)
    count = len(full_report.trials.value)
    assert f"It is one of {count} trials." in text
    assert f"It is one of {count} trials and was chosen on this data, which flatters it." in text
