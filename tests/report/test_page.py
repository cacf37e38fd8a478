"""The page of a report: it holds exactly its document, escapes every name, needs no network, and stays current."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import hago
from hago.report import LiveReport, Report, ReportOptions, page_of, save_page
from hago.report import page as page_module
from hago.study import read_log

from .searched import CHIP, HOSTILE, data, network


class Reader(html.parser.HTMLParser):
    """Reads a page: its elements with their attributes, the texts of scripts, and all other text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.text: list[str] = []
        self._script: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs).get("type") or "code"

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text.append(data)
        else:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data


@pytest.fixture(scope="module")
def page(full_report: Report) -> Reader:
    return Reader(page_of(full_report.to_json()))


def test_the_page_holds_its_document(full_report: Report, page: Reader) -> None:
    assert json.loads(page.scripts["application/json"]) == full_report.to_json()


def test_a_hostile_name_stays_text(page: Reader) -> None:
    assert HOSTILE in json.dumps("".join(page.text))[1:-1].encode().decode("unicode_escape")
    assert not [
        tag for tag, _ in page.elements if tag in ("img", "iframe", "object", "embed", "link") and tag != "link"
    ]
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_the_law_on_hostile_names_notices_a_page_that_does_not_escape(
    full_report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jinja2

    made = jinja2.Environment

    def careless(**options: Any) -> Any:
        return made(**{**options, "autoescape": False})

    monkeypatch.setattr(jinja2, "Environment", careless)
    assert [tag for tag, _ in Reader(page_of(full_report.to_json())).elements if tag == "img"]


def test_embedded_json_cannot_end_its_element(monkeypatch: pytest.MonkeyPatch) -> None:
    text = page_module.embedded({"name": f"{HOSTILE}\u2028"})
    assert not set("<>&\u2028") & set(text) and json.loads(text) == {"name": f"{HOSTILE}\u2028"}
    monkeypatch.setattr(page_module, "_ESCAPED", {})
    assert "</script>" in page_module.embedded({"name": HOSTILE})


def test_the_page_loads_nothing(page: Reader) -> None:
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe-eval" not in policy
    style = page_module._file("page.css")
    assert "@import" not in style and "url(" not in style and "fetch" not in page.scripts["code"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page.scripts["code"])


def test_a_long_log_lists_some_of_its_trials(full_report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = full_report.to_json()["trials"]
    assert page_module.listed(trials) == list(range(len(trials["value"])))
    many = {"value": [1.0] * 50_000, "front": [7, 49_999], "gain": [None] * 49_000 + [1.0] + [None] * 999}
    rows = page_module.listed(many)
    assert {7, 49_999, 49_000} <= set(rows) and 1_900 <= len(rows) <= 2_000
    monkeypatch.setattr(page_module, "MOST_ROWS", 2)
    assert "of them are listed" in page_of(full_report.to_json())


def test_every_control_has_a_name(page: Reader) -> None:
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1 and max(levels) <= 3


@pytest.mark.parametrize("records", [["net.jsonl"], ["net.json"], ["net.front.json"], ["net.jsonl", "net.json"]])
@pytest.mark.parametrize("measured", [True, False])
def test_there_is_a_page_of_every_kind_of_record(search_folder: Path, records: list[str], measured: bool) -> None:
    from hago.api import make_report

    paths = [search_folder / name for name in records]
    dataset = data() if measured else None
    report = make_report(network(), CHIP, paths, dataset, points=2, remedies=False, progress=False)
    text = "".join(Reader(page_of(report.to_json())).text)
    assert "Do it again" in text and ("hago.replay" in text or "net.jsonl" not in records)


def test_the_package_that_is_missing_is_named(full_report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from hago.report.layout import draw_network

    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(hago.HagoError, match=r"hago\[report\]"):
        page_of(full_report.to_json())
    monkeypatch.setitem(sys.modules, "grandalf.graphs", None)
    with pytest.raises(hago.HagoError, match=r"hago\[report\]"):
        draw_network(network())


# ---------------------------------------------------------------- while the search runs
class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_page_of_a_running_search_is_written_now_and_then(search_folder: Path, tmp_path: Path) -> None:
    log, path, clock = search_folder / "net.jsonl", tmp_path / "live.html", Clock()
    live = LiveReport(path, log, hago.load_hardware(CHIP), ReportOptions(), lambda source: [], clock)
    trials = read_log(log).trials
    assert not path.exists()
    written = []
    for trial in trials:
        live(trial)
        written.append(path.stat().st_mtime_ns)
        clock.now += 0.9
    assert 2 <= len(set(written)) < len(trials)
    running = Reader(path.read_text("utf-8"))
    assert any(attributes.get("http-equiv") == "refresh" for _, attributes in running.elements)
    live.stop()
    ended = Reader(path.read_text("utf-8"))
    assert not any(attributes.get("http-equiv") == "refresh" for _, attributes in ended.elements)
    assert len(json.loads(ended.scripts["application/json"])["trials"]["value"]) == len(trials)


def test_a_search_goes_on_where_its_page_cannot_be_written(search_folder: Path, tmp_path: Path) -> None:
    log, path, clock = search_folder / "net.jsonl", tmp_path / "made" / "live.html", Clock()
    live = LiveReport(path, log, hago.load_hardware(CHIP), ReportOptions(), lambda source: [], clock)
    trials = read_log(log).trials
    with pytest.warns(hago.HagoWarning, match="the search goes on") as warned:
        for trial in trials[:4]:
            live(trial)
            clock.now += 60.0
    assert len(warned) == 1 and "live.html" in str(warned[0].message)
    path.parent.mkdir()
    live(trials[4])
    assert "5 trials" in "".join(Reader(path.read_text("utf-8")).text)
    shutil.rmtree(path.parent)
    live.stop()
    assert not path.exists()


def test_a_slow_page_is_written_seldom(search_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, writes = Clock(), []

    def slow(report: Report, path: Path, template: Any) -> None:
        writes.append(clock.now)
        clock.now += 1.0
        save_page(report, path, template)

    monkeypatch.setattr("hago.report.live.save_page", slow)
    log = search_folder / "net.jsonl"
    live = LiveReport(tmp_path / "live.html", log, hago.load_hardware(CHIP), ReportOptions(), lambda source: [], clock)
    trial = read_log(log).trials[0]
    for _ in range(200):
        live(trial)
        clock.now += 1.0
    assert len(writes) / clock.now <= 0.025
