"""The page of a report in a real browser: what a click, a key and a switch show; no message, no request, no overflow.

The browser is Debian's chromium, driven by playwright; without either, these tests say so and are skipped.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hago.cost import METRICS
from hago.report import Report, save_page
from hago.report.amounts import cost_figure
from hago.report.document import rounded
from hago.report.page import NONE, listed
from hago.report.trials import measure_figure

from .searched import HOSTILE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    *("--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    # containers have little shared memory, which screenshots of long pages need
    *("--disable-sync", "--no-first-run", "--disable-dev-shm-usage"),
]
#: Browsers refuse calls of 130,000 arguments or so; with this, `Math.min` and `Math.max` refuse 1,000.
FEW_ARGUMENTS = """for (const name of ["min", "max"]) {
  const own = Math[name];
  Math[name] = (...values) => { if (values.length > 1000) throw new RangeError(name); return own(...values); };
}"""
#: Where screenshots are kept; by default nowhere but in the folder of the test.
SHOTS = os.environ.get("HAGO_SHOTS")


@dataclass
class Seen:
    """What a page did that it must not do: messages on its console, errors, and requests."""

    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed, so no page is opened")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (apt-get install chromium), so no page is opened")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def page_path(full_report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    save_page(full_report, path)
    return path


@contextmanager
def opened(
    browser: Any, path: Path, width: int = 1400, scheme: str = "light", script: str = "", **options: Any
) -> Iterator[Any]:
    """The page in a new tab. When the context closes, the page must have been quiet.

    Args:
        script: runs before the page's own.
    """
    seen = Seen()
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)

    def request(route: Any) -> None:
        if route.request.url == path.as_uri():
            route.continue_()
        else:
            seen.requests.append(route.request.url)
            route.abort()

    tab.route("**/*", request)
    tab.on("console", lambda message: seen.messages.append(message.text))
    tab.on("pageerror", lambda error: seen.messages.append(str(error)))
    if script:
        tab.add_init_script(script)
    tab.goto(path.as_uri())
    try:
        yield tab
    finally:
        tab.close()
    assert seen == Seen()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_the_page_fits_its_window(browser: Any, page_path: Path, tmp_path: Path, width: int, scheme: str) -> None:
    with opened(browser, page_path, width, scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.body.scrollWidth") <= width
        folder = Path(SHOTS) if SHOTS else tmp_path
        shot = folder / f"report-{width}-{scheme}.png"
        # Chromium sometimes fails to draw the whole page, which is tall, on a busy machine
        tab.screenshot(path=str(shot), full_page=bool(SHOTS))
        assert shot.stat().st_size > 20_000
        dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, dark[4:-1].split(","))) < 200) == (scheme == "dark")


def test_a_click_on_a_point_shows_it_everywhere(browser: Any, page_path: Path, full_report: Report) -> None:
    trials = full_report.trials
    assert trials is not None
    number = next(i for i, point in enumerate(full_report.points) if point.kind == "front" and i > 0)
    trial = full_report.points[number].trial
    with opened(browser, page_path) as tab:
        shown = tab.locator("#verdict [data-point]:visible")
        assert shown.get_attribute("data-point") == "0"
        tab.locator(f"#front-plot circle[data-trial='{trial}']").click(force=True)
        assert tab.locator("#pick-a").input_value() == f"p{number}"
        assert shown.get_attribute("data-point") == str(number)
        assert f"trial {trial}" in tab.locator("#front-readout").inner_text().lower()
        costs = full_report.points[number].costs
        assert f"{costs['weight_bytes']:.0f} B" in shown.inner_text()
        # a trial that is not shown in full has its bits and costs
        others = {point.trial for point in full_report.points}
        other = next(i for i in range(len(trials.value)) if i not in others and trials.value[i] is not None)
        tab.select_option("#pick-a", f"t{other}")
        text = tab.locator("[data-trial-only]").inner_text()
        assert f"Trial {other} is shown with its bits and costs" in text and "size of weights" in text
        assert not shown.count()


def test_a_stored_strategy_is_a_diamond_of_its_own(browser: Any, page_path: Path) -> None:
    with opened(browser, page_path) as tab:
        tab.select_option("#pick-a", "p1")
        for number in (3, 0):  # one shot with few bits, and the strategy
            tab.locator(f"#front-plot path.diamond[data-point-of='{number}']").click(force=True)
            assert tab.locator("#pick-a").input_value() == f"p{number}"


def test_a_hover_shows_bits(browser: Any, page_path: Path) -> None:
    with opened(browser, page_path) as tab:
        tab.locator("#front-plot circle[data-trial='1']").hover(force=True)
        text = tab.locator("#front-readout").inner_text()
        assert text.startswith("Trial 1:") and "bits of edges" in text


def test_a_node_shows_its_page(browser: Any, page_path: Path) -> None:
    with opened(browser, page_path) as tab:
        assert "Where to look" in tab.locator("#panel").inner_text()
        node = tab.locator("#canvas g.node").filter(has_text="conv2d").first
        node.click()
        text = tab.locator("#panel").inner_text()
        for part in ("Error", "Its values in the float model", "Accumulator", "headroom", "Ranges of its weights"):
            assert part in text, part
        assert tab.locator("#panel .chart svg").count() == 3
        assert tab.locator("#canvas g.node.on").count() == 1
        # the hostile name is text, on the page of its node, too
        tab.select_option("#pick-node", HOSTILE)
        assert tab.locator("#panel h3").inner_text() == HOSTILE
        assert tab.locator("img").count() == 0


def test_the_switch_colours_the_network(browser: Any, page_path: Path) -> None:
    with opened(browser, page_path) as tab:
        legends, texts = {}, {}
        for name in ("bits", "blame", "cause", "cost"):
            tab.locator("#colour label").filter(has_text=name).click()
            legends[name] = tab.locator("#legend").inner_text()
            texts[name] = tab.locator("#canvas g.node .what").all_text_contents()
        assert "Fewest bits" in legends["bits"] and "rounding" in legends["cause"]
        assert any("%" in text for text in texts["blame"]) and any("rounding" in text for text in texts["cause"])
        assert len({tuple(each) for each in texts.values()}) == 4
        assert tab.locator("#node-cost-label").is_visible()
        tab.select_option("#node-cost", "macs")
        assert "multiply-accumulates" in tab.locator("#legend").inner_text()


def test_two_points_stand_side_by_side(browser: Any, page_path: Path, full_report: Report) -> None:
    with opened(browser, page_path) as tab:
        assert not tab.locator("#compare").is_visible()
        tab.select_option("#pick-b", "p2")
        text = tab.locator("#compare").inner_text()
        assert "B / A" in text and "paired sample by sample" in text
        first, second = full_report.points[0].bits, full_report.points[2].bits
        assert f"Bits differ in {sum(first[g] != second[g] for g in first)} of {len(first)} groups" in text


def changed_trials(report: Report, path: Path, **fields: Any) -> Path:
    """The page of a report of a log alone, whose trials have other values."""
    assert report.trials is not None
    trials = replace(report.trials, **fields)
    save_page(replace(report, trials=trials, points=(), pairs=(), shown=None), path)
    return path


def test_what_was_not_measured_is_no_zero(browser: Any, full_report: Report, tmp_path: Path) -> None:
    trials = full_report.trials
    assert trials is not None
    value = (*trials.value[:2], None, *trials.value[3:])
    costs = {name: (*column[:2], None, *column[3:]) for name, column in trials.costs.items()}
    path = changed_trials(full_report, tmp_path / "null.html", value=value, costs=costs)
    with opened(browser, path) as tab:
        tab.select_option("#pick-a", "t1")
        tab.select_option("#pick-b", "t2")
        cells = tab.locator("#compare td").all_text_contents()
        assert cells[1] == cells[2] == NONE, cells
        assert "0.000" not in tab.locator("#compare").inner_text()


def test_bits_that_are_left_out_are_not_called_float(browser: Any, full_report: Report, tmp_path: Path) -> None:
    trials = full_report.trials
    assert trials is not None
    path = changed_trials(full_report, tmp_path / "bits.html", bits=("", "", *trials.bits[2:]))
    with opened(browser, path) as tab:
        tab.select_option("#pick-a", "t0")
        assert "left out" in tab.locator("[data-trial-only]").inner_text()
        assert "left out" in tab.locator("#legend").inner_text() and "float" not in tab.locator("#legend").inner_text()
        assert "bits left out" in tab.locator("#canvas g.node").filter(has_text="conv2d").first.text_content()
        assert tab.locator("#canvas g.edge.float").count() == 0
        for other, names in (("t1", "A and B"), ("t2", "A")):
            tab.select_option("#pick-b", other)
            text = tab.locator("#compare").inner_text()
            assert f"Bits of {names} are left out" in text and "Bits differ" not in text and "are equal" not in text
        tab.select_option("#pick-a", "t2")
        assert tab.locator("#canvas g.edge.float").count() < tab.locator("#canvas g.edge").count()


def test_a_long_log_is_drawn_and_lists_some_of_its_trials(browser: Any, full_report: Report, tmp_path: Path) -> None:
    trials = full_report.trials
    assert trials is not None
    times = 6_000 // len(trials.value)
    columns = ("value", "low", "high", "same_as", "reason", "seconds", "elapsed", "rejected", "bits")
    long: dict[str, Any] = {name: getattr(trials, name) * times for name in columns}
    long["gain"] = (*trials.gain, *[None] * (len(long["value"]) - len(trials.gain)))
    long["costs"] = {name: column * times for name, column in trials.costs.items()}
    rows = listed({**trials_of(full_report), **long})
    other = next(i for i in reversed(range(len(long["value"]))) if i not in rows)
    long["value"] = (*long["value"][:other], 99.0, *long["value"][other + 1 :])
    path = changed_trials(full_report, tmp_path / "long.html", **long)
    with opened(browser, path, script=FEW_ARGUMENTS) as tab:
        assert tab.locator("#front-plot circle").count() > 5_000
        assert tab.locator("#pick-a option").count() == len(rows) <= 2_000
        # a dot whose trial is not listed can be chosen all the same
        tab.locator(f"#front-plot circle[data-trial='{other}']").click(force=True)
        assert tab.locator("#pick-a").input_value() == f"t{other}"


#: The texts of the facts of a trial that is chosen, by name.
FACTS = """(index) => {
  const select = document.getElementById("pick-a");
  select.value = `t${index}`;
  select.dispatchEvent(new Event("change"));
  const facts = [...document.querySelectorAll("[data-trial-only] dl div")];
  return Object.fromEntries(facts.map((fact) => [fact.children[0].textContent, fact.children[1].textContent]));
}"""


@pytest.mark.parametrize("objective", ["sqnr", "accuracy", "cosine"])
def test_a_figure_has_one_text_wherever_it_is_shown(
    browser: Any, full_report: Report, tmp_path: Path, objective: str
) -> None:
    trials, draw = full_report.trials, random.Random(1)
    assert trials is not None and full_report.search is not None
    count = 250
    # halves are between two texts, and are rounded to even ones
    halves = [draw.randrange(1, 4000) / 8 for _ in range(50)] + [(draw.randrange(100) + 0.5) / 2**7 for _ in range(50)]
    near = [draw.randrange(1, 20_000) / 20_000 * (1 + draw.choice((-1, 1, 0)) * 1e-9) for _ in range(50)]
    wide = [10 ** draw.uniform(-8, 9) for _ in range(100)]

    def column(sign: int) -> tuple[float | None, ...]:
        values = [draw.choice((1, sign)) * value for value in (*halves, *near, *wide)]
        draw.shuffle(values)
        return tuple(map(rounded, values))

    names = [name for name in METRICS if name != "macs"]  # which the table leaves out
    of = range(count)
    path = changed_trials(
        replace(
            full_report,
            measure=measure_figure(objective),
            costs=tuple(map(cost_figure, names)),
            search=replace(full_report.search, fewer=()),
        ),
        tmp_path / "texts.html",
        **dict.fromkeys(("value", "low", "high"), column(-1)),
        **{name: tuple(getattr(trials, name)[0] for _ in of) for name in ("bits", "reason", "rejected", "seconds")},
        **dict.fromkeys(("gain", "same_as"), (None,) * count),
        elapsed=tuple(map(float, of)),
        costs={name: column(1) for name in names},
        front=(0, 1),
        best=0,
    )
    with opened(browser, path) as tab:
        titles, *rows = tab.evaluate(
            "[...document.querySelectorAll('#front details tr')].map((tr) => [...tr.cells].map((c) => c.textContent))"
        )
        assert len(rows) == count
        for index, row in enumerate(rows):
            cells, facts = dict(zip(titles, row, strict=True)), tab.evaluate(FACTS, index)
            told = next(text for name, text in facts.items() if " on the calibration data" in name)
            value, interval = told.removesuffix(")").split(" (95 %: ")
            assert value == cells[titles[1]] and interval.split(" to ")[-1] == cells[titles[2]].split(" to ")[-1]
            for name in names:
                title = cost_figure(name).title
                assert facts[title] == cells[title], (name, index)


def trials_of(report: Report) -> dict[str, Any]:
    document: dict[str, Any] = report.to_json()["trials"]
    return document


def test_keys_are_enough(browser: Any, page_path: Path) -> None:
    with opened(browser, page_path) as tab:
        before = tab.locator("#pick-a").input_value()
        tab.locator("#front-plot svg").focus()
        for key in ("ArrowLeft", "ArrowLeft", "Enter"):
            tab.keyboard.press(key)
        assert tab.locator("#pick-a").input_value() != before
        tab.locator("#canvas").focus()
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("ArrowDown")
        assert tab.locator("#canvas g.node.on").count() == 1
        tab.locator("#colour input[value=bits]").focus()
        tab.keyboard.press("ArrowRight")
        assert tab.locator("#colour input[value=blame]").is_checked()


def test_the_plot_stays_where_it_is_when_a_key_chooses_a_point(browser: Any, page_path: Path) -> None:
    with opened(browser, page_path) as tab:
        plot = tab.locator("#front-plot svg")
        tab.select_option("#pick-a", "p1")
        plot.scroll_into_view_if_needed()
        plot.focus()
        for key in ("ArrowLeft", "ArrowRight", "ArrowLeft"):
            tab.keyboard.press(key)
        assert plot.locator("circle.cursor").count() == 1
        assert plot.locator("text.cursor").text_content().startswith("trial ")
        chosen = tab.locator("#pick-a").input_value()
        before = plot.bounding_box()["y"]
        tab.keyboard.press("Enter")
        assert tab.locator("#pick-a").input_value() != chosen
        assert abs(plot.bounding_box()["y"] - before) < 2
        assert plot.locator("circle.ring").count() == 1


def test_a_copy_button_does_not_move_the_command(browser: Any, page_path: Path) -> None:
    with opened(browser, page_path) as tab:
        button = tab.locator("#short [data-copy]:visible")
        before = button.bounding_box()
        button.evaluate("each => { each.textContent = 'Copied'; }")
        assert button.bounding_box() == before


def test_without_scripts_the_tables_are_there(browser: Any, page_path: Path) -> None:
    with opened(browser, page_path, java_script_enabled=False) as tab:
        assert "Scripts are off" in tab.locator("main").inner_text()
        assert tab.locator("table:visible").count() > 5
        assert tab.locator("#canvas g.node").count() > 5


def test_the_test_notices_a_request_and_a_message(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "loud.html"
    path.write_text("<!DOCTYPE html><img src='http://127.0.0.1:9/x.png'><script>console.log(1)</script>", "utf-8")
    with pytest.raises(AssertionError) as raised, opened(browser, path):
        pass
    assert "messages" in str(raised.value) and "x.png" in str(raised.value)
