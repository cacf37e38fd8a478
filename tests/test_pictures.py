"""Plots and data frames of fronts, searches and inspections, and the pictures of notebooks."""

from __future__ import annotations

import base64
import functools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from building import residual_block, seeded

import hago
from hago.errors import HagoError
from hago.search import SearchOptions, SearchOutcome, SearchScore, run_search
from hago.search.pareto_front import ParetoFront
from hago.study import Score, StudyResult, Trial

DATA = [(seeded(4, 3, 8, 8, seed=s), torch.arange(4) % 5) for s in range(2)]
CHIP = "int16_accumulator"


@functools.cache
def outcome() -> SearchOutcome:
    options = SearchOptions.of("random:trials=12,batch=3", estimator="max_range", progress=False)
    return run_search(residual_block(), CHIP, DATA, options)


@functools.cache
def statistic() -> Any:
    return hago.inspect_graph_statistic(residual_block(), CHIP, outcome().strategy, DATA, remedies=False)


#: Everything that is drawn, by name.
DRAWN: dict[str, Callable[[], Any]] = {
    "outcome": outcome,
    "trials": lambda: outcome().result,
    "front": lambda: outcome().front,
    "statistic": statistic,
}


def new_axes() -> Any:
    figure = pytest.importorskip("matplotlib.figure")
    return figure.Figure().subplots()


# ---------------------------------------------------------------- laws of all that is drawn
@pytest.mark.parametrize("name", DRAWN)
def test_a_plot_draws_on_the_axes_that_it_is_given_and_leaves_pyplot_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ax = new_axes()
    settings = dict(sys.modules["matplotlib"].rcParams)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    assert DRAWN[name]().plot(ax) is ax and ax.has_data()
    assert ax.get_xlabel() and ax.get_title()
    ax.figure.savefig("/dev/null", format="png")
    assert dict(sys.modules["matplotlib"].rcParams) == settings


@pytest.mark.parametrize("name", DRAWN)
def test_a_plot_without_axes_is_a_new_figure(name: str) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    ax = DRAWN[name]().plot()
    assert ax.has_data() and ax.figure.number in pyplot.get_fignums()
    pyplot.close(ax.figure)


@pytest.mark.parametrize("name", DRAWN)
def test_a_notebook_shows_a_picture_below_the_table(name: str) -> None:
    pytest.importorskip("matplotlib")
    thing = DRAWN[name]()
    image = ElementTree.fromstring(thing._repr_html_().removeprefix(thing.summary().html()))
    kind, _, data = image.attrib["src"].partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(data).startswith(b"\x89PNG")
    assert image.attrib["alt"]


@pytest.mark.parametrize("name", DRAWN)
def test_without_matplotlib_a_notebook_shows_the_table_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thing = DRAWN[name]()
    for module in ("matplotlib.figure", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, module, None)
    assert thing._repr_html_() == thing.summary().html()
    with pytest.raises(HagoError, match=r"pip install 'hago\[plot\]'") as error:
        thing.plot()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", DRAWN)
def test_a_frame_has_a_row_for_each_thing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    thing, rows = DRAWN[name](), {"front": len(outcome().front), "statistic": len(statistic().rows)}
    frame = thing.to_frame()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == rows.get(name, len(outcome().result.trials))
    assert frame.index.name in ("trial", "node") and frame.columns.is_unique
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(HagoError, match=r"pip install 'hago\[pandas\]'"):
        thing.to_frame()


# ---------------------------------------------------------------- what they show
def test_a_front_is_drawn_in_its_units() -> None:
    ax, front = outcome().front.plot(new_axes()), outcome().front
    points = next(c for c in ax.collections if len(c.get_offsets()) == len(front))
    drawn = [tuple(map(float, each)) for each in points.get_offsets()]
    unit = re.fullmatch(r"weight_bytes \((\w+)\)", ax.get_xlabel())
    size = {"B": 1, "KiB": 1024, "MiB": 1 << 20}[unit[1] if unit else ""]
    expected = [(p.costs["weight_bytes"] / size, p.score) for p in front]
    assert drawn == [pytest.approx(point) for point in expected]
    assert ax.get_ylabel() == "SQNR (dB)" and "95 % intervals" in ax.get_title()


def test_a_share_is_drawn_in_percent() -> None:
    front = outcome().front
    points = tuple(replace(p, score=0.1 * i, interval=None) for i, p in enumerate(front))
    ax = ParetoFront("sim_acc", "bops", points, {}).plot(new_axes())
    assert ax.get_ylabel() == "accuracy (%)" and "interval" not in ax.get_title()
    assert max(float(y) for c in ax.collections for _, y in c.get_offsets()) == pytest.approx(10.0 * (len(front) - 1))


def test_trials_are_drawn_by_whether_they_are_eligible() -> None:
    result = outcome().result
    ax = result.plot(new_axes())
    counts = {c.get_label(): len(c.get_offsets()) for c in ax.collections}
    finite = [t for t in result.trials if math.isfinite(t.score.value)]
    assert counts["trial"] == sum(t.score.accepted for t in finite)
    assert counts.get("not eligible", 0) == sum(not t.score.accepted for t in finite)
    best = next(line for line in ax.get_lines() if line.get_label() == "best so far")
    assert best.get_ydata()[-1] == result.best.results["sqnr"] == max(best.get_ydata())
    assert ax.get_ylabel() == "SQNR (dB)"


def test_trials_are_drawn_by_their_measure_where_two_are_equal() -> None:
    trials = tuple(
        Trial(i, {"conv:0": 8}, Score(0.5 + 0.1 * i, {"sim_acc": 0.5 + 0.1 * i, "agreement": 0.9 - 0.1 * i}))
        for i in range(3)
    )
    assert trials[2].results["sim_acc"] == trials[2].results["agreement"]
    for measure, label, last in (
        ("agreement", "agreement (%)", [90, 80, 70]),
        ("sim_acc", "accuracy (%)", [50, 60, 70]),
    ):
        ax = StudyResult(trials[2], trials, "finished", measure).plot(new_axes())
        drawn = next(c for c in ax.collections if c.get_label() == "trial").get_offsets()
        assert ax.get_ylabel() == label and [float(y) for _, y in drawn] == pytest.approx(last)
    assert StudyResult(trials[2], trials, "finished").plot(new_axes()).get_ylabel() == "objective"


def test_the_measure_of_a_search_is_its_objective_unless_a_cost_is_minimized() -> None:
    assert outcome().result.measure == "sqnr"
    goals = {"sim_acc": {"objective": "accuracy"}, "": {"minimize": "size", "keep": "sqnr >= 1"}}
    for measure, goal in goals.items():
        options = SearchOptions.of("random:trials=2", estimator="max_range", progress=False, **goal)
        assert run_search(residual_block(), "x86_vnni", DATA, options).result.measure == measure


def test_the_frame_of_trials_has_their_figures_and_bits() -> None:
    pytest.importorskip("pandas")
    result, frame = outcome().result, outcome().result.to_frame()
    trial = result.trials[3]
    row = frame.loc[3]
    assert row["value"] == trial.score.value and row["weight_bytes"] == trial.score.costs["weight_bytes"]
    assert {k: row[f"bits {k}"] for k in trial.bits} == trial.bits


def test_the_bars_of_nodes_sum_to_their_parts() -> None:
    ax, blame = statistic().plot(new_axes()), statistic().blame
    widths: dict[float, float] = {}
    for bar in ax.patches:
        place = bar.get_y() + bar.get_height() / 2
        widths[round(place)] = widths.get(round(place), 0.0) + bar.get_width()
    assert [widths[i] for i in sorted(widths)] == pytest.approx([100.0 * part for part in blame.values()])
    assert [t.get_text() for t in ax.get_yticklabels()] == list(blame)


def test_only_the_largest_parts_are_drawn() -> None:
    ax, blame = statistic().plot(new_axes(), nodes=2), statistic().blame
    most = sorted(blame, key=lambda name: -blame[name])[:2]
    assert {t.get_text() for t in ax.get_yticklabels()} == set(most) and "2 largest" in ax.get_title()


def test_names_of_nodes_are_no_formulas() -> None:
    rows = tuple(replace(row, name=f"$x^{i}$\n", inputs=()) for i, row in enumerate(statistic().rows))
    ends = tuple(f"$x^{i}$\n" for i, row in enumerate(statistic().rows) if row.name in statistic().outputs)
    ax = replace(statistic(), rows=rows, outputs=ends).plot(new_axes())
    ax.figure.savefig("/dev/null", format="png")
    assert all(re.fullmatch(r"\\\$x\^\d+\\\$\\n", t.get_text()) for t in ax.get_yticklabels())


def test_what_is_empty_is_drawn_empty() -> None:
    pytest.importorskip("pandas")
    front = ParetoFront("sqnr", "weight_bytes", (), {})
    assert not front.plot(new_axes()).collections[0].get_offsets().size and len(front.to_frame()) == 0
    assert front._repr_html_() == front.summary().html()
    empty = replace(statistic(), rows=(), outputs=())
    assert not empty.plot(new_axes()).patches and len(empty.to_frame()) == 0


def test_one_trial_has_no_picture() -> None:
    result = StudyResult(outcome().result.best, outcome().result.trials[:1], "finished")
    assert result._repr_html_() == result.summary().html()


def test_a_score_shows_its_front() -> None:
    score = SearchScore.of(outcome())
    assert score._repr_html_().endswith(outcome().front._repr_html_())
    assert score.result is outcome().result
    assert SearchScore(3.5)._repr_html_() == "<p>3.5</p>"
