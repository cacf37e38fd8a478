"""The page of a report: it holds exactly its document, escapes every name, needs no network, and stays current."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hago
from hago.report import LiveReport, Report, ReportOptions, page_of, save_page
from hago.report import page as page_module
from hago.study import Trial, read_log

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


def injected(page: Reader) -> list[str]:
    """What the template of the page does not write: elements that load something, attributes that run code, and scripts
    beside its two."""
    icon = ("link", {"rel": "icon", "href": "data:,"})
    loading = [tag for tag, attributes in page.elements if tag in LOADING and (tag, attributes) != icon]
    running = [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    return [*loading, *running, *([] if scripts == [{"type": "application/json", "id": "report"}, {}] else ["script"])]


#: The elements that load something.
LOADING = ("img", "iframe", "frame", "object", "embed", "link", "video", "audio", "source", "image", "use", "base")


def test_a_hostile_name_stays_text(page: Reader) -> None:
    assert "".join(page.text).count(HOSTILE) > 3 and not injected(page)


def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let templates escape nothing."""
    import jinja2

    made = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", lambda **options: made(**{**options, "autoescape": False}))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (HOSTILE, "img"),
        ("<b onclick=alert(1)>", "onclick"),
        ("</h1><script>alert(1)</script>", "script"),
        ("<link rel=stylesheet href=//example.org>", "link"),
    ],
)
def test_the_law_on_hostile_names_notices_a_page_that_does_not_escape(
    full_report: Report, monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    named = replace(full_report, title=name).to_json()
    clean = Reader(page_of(named))
    assert not injected(clean) and name in "".join(clean.text)
    careless(monkeypatch)
    assert found in injected(Reader(page_of(named)))


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


class Names(html.parser.HTMLParser):
    """Reads the controls, the groups and the pictures of a page, and the text that names each.

    Attributes:
        names: an element in words, and its name, which is empty where it has none.
    """

    NAMED = ("button", "select", "input", "textarea", "a", "summary", "nav", "section", "fieldset")
    EMPTY = ("input", "meta", "link", "br", "hr", "img")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[tuple[str, str]] = []
        #: open elements, each with its attributes and the texts in it that are no options of a choice
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._legend: list[str] = []
        self._identified: dict[str, list[str]] = {}
        #: those whose name is known when the page has been read
        self._waiting: list[tuple[str, list[list[str]], str]] = []
        self.feed(page)
        for element, texts, by in self._waiting:
            named_by = [*self._identified.get(by, ()), *("".join(text) for text in texts)]
            self.names.append((element, "".join(named_by).strip()))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes, text = dict(attrs), list[str]()
        if tag == "fieldset":
            self._legend = []
        elif tag == "legend":
            text = self._legend
        if identifier := attributes.get("id"):
            self._identified[identifier] = text
        if tag in self.NAMED or attributes.get("role") in ("img", "group") or "tabindex" in attributes:
            own = [text] if tag in ("button", "a", "summary", "pre") else [self._legend] if tag == "fieldset" else []
            labels = [texts for name, _, texts in self._open if name == "label"] if tag in ("select", "input") else []
            texts = [*own, *labels, [attributes.get("aria-label") or ""]]
            self._waiting.append((self.get_starttag_text() or tag, texts, attributes.get("aria-labelledby") or ""))
        if tag not in self.EMPTY:
            self._open.append((tag, attributes, text))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not any(tag in ("select", "script", "style") for tag, _, _ in self._open):
            for _, _, texts in self._open:
                texts.append(data)


def unnamed(page: str) -> list[str]:
    return [element for element, name in Names(page).names if not name]


def test_every_control_has_a_name(full_report: Report) -> None:
    text = page_of(full_report.to_json())
    assert not unnamed(text)
    kinds = {element.split()[0].strip("<>") for element, _ in Names(text).names}
    assert {"button", "select", "input", "a", "section", "svg", "div", "pre", "fieldset"} <= kinds


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ('aria-label="Zoom out">\u2212<', "><"),
        ('<label>Shown <select id="pick-a" aria-label="The point that is shown">', '<label><select id="pick-a">'),
        ("<label>Cost <select", "<label><select"),
        ("<legend>Colour by</legend>", ""),
        ('role="img" aria-label="The network"', 'role="img"'),
        ('role="group" aria-label="Costs"', 'role="group"'),
        ('id="front-title"', 'id="other"'),
    ],
)
def test_the_law_on_names_notices_one_that_is_missing(
    full_report: Report, monkeypatch: pytest.MonkeyPatch, text: str, without: str
) -> None:
    read = page_module._file
    assert text in read("page.html")
    template = read("page.html").replace(text, without)
    monkeypatch.setattr(page_module, "_file", lambda name: template if name == "page.html" else read(name))
    assert unnamed(page_of(full_report.to_json()))


def test_identifiers_are_unique_and_links_and_headings_lead_somewhere(page: Reader) -> None:
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    linked = {str(a["href"])[1:] for t, a in page.elements if t == "a" and str(a.get("href")).startswith("#")}
    assert len(linked) > 5 and linked <= set(identifiers)
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


def running_search(trials: Sequence[Trial]) -> Any:
    return SimpleNamespace(trials=tuple(trials))


def test_the_page_of_a_running_search_is_written_now_and_then(search_folder: Path, tmp_path: Path) -> None:
    log, path, clock = search_folder / "net.jsonl", tmp_path / "live.html", Clock()
    live = LiveReport(path, log, hago.load_hardware(CHIP), ReportOptions(), lambda source: [], clock)
    trials = read_log(log).trials
    assert not path.exists()
    written = []
    for count, trial in enumerate(trials, 1):
        live(running_search(trials[:count]), trial)
        written.append(path.stat().st_mtime_ns)
        clock.now += 0.9
    assert 2 <= len(set(written)) < len(trials)
    running = Reader(path.read_text("utf-8"))
    assert any(attributes.get("http-equiv") == "refresh" for _, attributes in running.elements)
    live.close()
    ended = Reader(path.read_text("utf-8"))
    assert not any(attributes.get("http-equiv") == "refresh" for _, attributes in ended.elements)
    assert len(json.loads(ended.scripts["application/json"])["trials"]["value"]) == len(trials)


def test_a_search_goes_on_where_its_page_cannot_be_written(search_folder: Path, tmp_path: Path) -> None:
    log, path, clock = search_folder / "net.jsonl", tmp_path / "made" / "live.html", Clock()
    live = LiveReport(path, log, hago.load_hardware(CHIP), ReportOptions(), lambda source: [], clock)
    trials = read_log(log).trials
    with pytest.warns(hago.HagoWarning, match="the search goes on") as warned:
        for count, trial in enumerate(trials[:4], 1):
            live(running_search(trials[:count]), trial)
            clock.now += 60.0
    assert len(warned) == 1 and "live.html" in str(warned[0].message)
    path.parent.mkdir()
    live(running_search(trials[:5]), trials[4])
    assert "5 trials" in "".join(Reader(path.read_text("utf-8")).text)
    shutil.rmtree(path.parent)
    live.close()
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
    trials = read_log(log).trials[:1]
    for _ in range(200):
        live(running_search(trials), trials[0])
        clock.now += 1.0
    assert len(writes) / clock.now <= 0.025
