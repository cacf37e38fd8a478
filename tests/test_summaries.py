"""What objects print of themselves: every object that a user gets is a few lines, and a table in a notebook."""

from __future__ import annotations

import functools
import glob
import inspect
import re
import shlex
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import Small

import hago
from hago.api import explain_cost
from hago.cli import main
from hago.errors import shortened
from hago.graph.graph import Graph, Node
from hago.search import Quantizer, SearchOptions, SearchOutcome, SearchScore, run_search
from hago.serialization.summary import LINES, WIDTH, Summarized, Summary, figures_text

CHIP: Final = "x86_vnni"
DATA: Final = [torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
#: The name of a node that would be markup, a line break and a control character.
HOSTILE: Final = "<img src=\"x\" onerror='a()'>&amp;\n\x00\x1b[31m" + "long" * 60
#: Results that are none of hago's classes with a summary, and why.
OTHERS: Final[Mapping[type, str]] = {SearchScore: "a number, which prints as one"}
#: Words that counts are of, in the singular.
COUNTED: Final = "node sample batch trial point step thread figure op edge group row fold tensor"


# ---------------------------------------------------------------- a small quantized network
def hostile(graph: Graph) -> Graph:
    """The graph with another name for its first convolution."""
    old = next(n.name for n in graph if n.op == "conv2d")
    names = {old: HOSTILE}
    nodes = [replace(n, name=names.get(n.name, n.name), inputs=tuple(names.get(i, i) for i in n.inputs)) for n in graph]
    return graph.with_nodes(nodes, outputs=tuple(names.get(o, o) for o in graph.outputs))


@functools.cache
def model() -> Graph:
    torch.manual_seed(0)
    return hostile(hago.from_torch(Small().eval(), (DATA[0],)))


@functools.cache
def quantizer() -> Quantizer:
    # the node of the hostile name stays float, so that summaries name it
    return hago.quantize(model(), CHIP, DATA, keep_float=glob.escape(HOSTILE))


@functools.cache
def outcome() -> SearchOutcome:
    options = SearchOptions.of("random:trials=3", progress=False, keep_float=glob.escape(HOSTILE))
    return run_search(model(), CHIP, DATA, options)


def export_result() -> Any:
    text = f"wrote {HOSTILE}"
    return next(t for t in returned(Quantizer.export) if issubclass(t, Summarized))(text, {})


@functools.cache
def objects() -> dict[str, Any]:
    """Every kind of object that a user gets, by the words that its summary must have."""
    q, found = quantizer(), outcome()
    desc = next(iter(q.plan.nodes.values())).desc
    given = (model(), CHIP, q.strategy)
    return {
        "Accumulator int32": desc.accumulator,
        "OpDesc": desc,
        f"Hardware {CHIP}": hago.load_hardware(CHIP),
        "Graph of": model(),
        f"Plan of a network of 7 nodes for {CHIP}": q.plan,
        f"Strategy for {CHIP}": q.strategy,
        f"Quantizer of a network of 7 nodes for {CHIP}": q,
        f"Simulator of a network of 7 nodes for {CHIP}": q.simulate(),
        f"IntegerModel of a network of 7 nodes for {CHIP}": q.realize(),
        f"IntegerModel of a network of 7 nodes for {CHIP} ": q.realize("reference"),
        "KernelTable of 7 nodes": q.realize().explain(),  # type: ignore[attr-defined]
        f"Cost of 7 nodes on {CHIP}": hago.estimate_cost(*given),
        f"CostRange from the fewest to the most bits on {CHIP}": explain_cost(model(), CHIP, DATA[:1]),
        f"Explanation of 7 nodes on {CHIP}": hago.explain(*given[:2], DATA[:1], keep_float=glob.escape(HOSTILE)),
        "Score": hago.evaluate_strategy(*given, DATA),
        f"GraphStatistic of 8 nodes on {CHIP}": hago.inspect_graph_statistic(*given, DATA),
        "Sensitivity of": hago.measure_sensitivity(model(), CHIP, DATA),
        "Replay of 1 trial": hago.replay(*given, DATA),
        f"SearchOutcome for {CHIP}": found,
        "StudyResult of 3 trials": found.result,
        "ParetoFront of": found.front,
        f"FrontPoint of trial {found.front[0].trial} on {CHIP}": found.front[0],
        f"QatModel of a network of 7 nodes for {CHIP}": hago.prepare_qat(*given),
        f"Finetuned for {CHIP}: 1 step in": hago.finetune(*given, DATA, steps=1, progress=False),
        "ExportResult": export_result(),
        f"Report 'A page': Graph on {CHIP}, 1 point in full": hago.make_report(
            model(), CHIP, [q.strategy], DATA, title="A page", points=1, remedies=False, progress=False
        ),
    }


@pytest.fixture(scope="module", params=range(26))
def printed(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """An object, and the words that its summary must have."""
    return list(objects().items())[request.param]


def test_all_objects_are_tested() -> None:
    assert len(objects()) == 26


# ---------------------------------------------------------------- the laws of a summary
def test_an_object_is_a_few_lines_that_name_it(printed: tuple[str, Any]) -> None:
    words, thing = printed
    lines = repr(thing).splitlines()
    assert 1 <= len(lines) <= LINES == 15
    assert max(map(len, lines)) <= WIDTH == 100
    assert lines[0].startswith(words.strip())
    assert "\x1b" not in repr(thing) and "\x00" not in repr(thing)


def test_an_object_prints_as_text(printed: tuple[str, Any]) -> None:
    _, thing = printed
    assert type(thing).__str__ is not object.__str__
    assert str(thing).strip() and " object at 0x" not in str(thing)


def test_an_object_prints_in_a_terminal(printed: tuple[str, Any]) -> None:
    _, thing = printed
    quoted = shlex.quote(glob.escape(HOSTILE))  # in options that can be copied
    lines = str(thing).replace(quoted, "node").replace(HOSTILE, "node").splitlines()
    assert max(map(len, lines)) <= WIDTH, max(lines, key=len)


def test_counts_of_one_are_in_the_singular(printed: tuple[str, Any]) -> None:
    _, thing = printed
    plural = re.compile(rf"(?<![\d.,])1 ({'|'.join(f'{word}(?:e?s)' for word in COUNTED.split())})\b")
    for text in (repr(thing), str(thing)):
        assert not plural.search(text), plural.search(text)


def test_an_object_is_a_table_of_its_facts_in_a_notebook(printed: tuple[str, Any]) -> None:
    _, thing = printed
    check_html(thing.summary())
    text = thing._repr_html_()
    assert text.startswith(thing.summary().html())
    picture = text.removeprefix(thing.summary().html())
    if picture:
        image = ElementTree.fromstring(picture)
        assert (image.tag, sorted(image.attrib), len(image)) == ("img", ["alt", "src", "width"], 0)


def check_html(summary: Summary) -> None:
    """The HTML is XML, holds exactly the title and the facts, and no element that a name would make."""
    tree = ElementTree.fromstring(summary.html())
    assert {e.tag for e in tree.iter()} <= {"table", "caption", "b", "tbody", "tr", "th", "td"}
    cells = [(row[0].text or "", row[1].text or "") for row in tree.iter("tr")]
    assert cells == summary.rows()
    assert all(value for _, value in cells)


def test_summaries_name_the_node_of_the_hostile_name() -> None:
    for thing in (quantizer(), quantizer().strategy, quantizer().plan, quantizer().realize()):
        assert "&lt;img src=&quot;x&quot;" in thing._repr_html_()
        assert "<img" not in thing._repr_html_()
        assert "<img" in repr(thing)


@given(st.text(), st.dictionaries(st.text(), st.text()))
def test_any_text_is_printed(title: str, facts: Mapping[str, str]) -> None:
    summary = Summary(title, facts)
    lines = summary.text().split("\n")
    assert len(lines) <= LINES and max(map(len, lines)) <= WIDTH
    check_html(summary)


def test_a_summary_in_an_error_is_one_line() -> None:
    assert "\n" not in shortened(quantizer())


def test_what_a_file_holds_in_place_of_figures_is_no_error() -> None:
    for figures in (None, "text", [1], {"sqnr": "high"}, {"sqnr": None}, {1: 2}):
        assert figures_text(figures) == ""
    strange = replace(quantizer().strategy, made_by={"results": 3, "searcher": "x", "costs": [], "held_out": ""})
    assert "bits" in repr(strange)


# ---------------------------------------------------------------- every result has one
def returned(function: Callable[..., Any]) -> Iterator[type]:
    """The classes of hago that a function returns, by its annotation."""

    def classes(hint: Any) -> Iterator[type]:
        if isinstance(hint, type) and hint.__module__.partition(".")[0] in ("hago", __name__):
            yield hint
        for part in typing.get_args(hint):
            yield from classes(part)

    return classes(typing.get_type_hints(function).get("return"))


def without_summary(functions: Mapping[str, Callable[..., Any]]) -> set[str]:
    """The functions that return a class of hago that does not print a summary."""
    return {
        name
        for name, function in functions.items()
        if any(not issubclass(t, Summarized) and t not in OTHERS for t in returned(function))
    }


def public_functions() -> dict[str, Callable[..., Any]]:
    """The functions in `hago.__all__`, and the methods of a Quantizer."""
    names = {name: getattr(hago, name) for name in hago.__all__}
    methods = {f"Quantizer.{n}": f for n, f in inspect.getmembers(Quantizer, inspect.isfunction) if n[0] != "_"}
    functions = {name: f for name, f in names.items() if inspect.isfunction(f)}
    return {**functions, **{n: f for n, f in methods.items() if n != "Quantizer.summary"}}


def test_every_public_function_returns_what_prints_a_summary() -> None:
    assert not without_summary(public_functions())
    kinds = {t for f in public_functions().values() for t in returned(f)}
    assert len(kinds) > 12


def test_every_public_class_prints_a_summary() -> None:
    classes = {name: c for name in hago.__all__ if inspect.isclass(c := getattr(hago, name))}
    without = {name for name, c in classes.items() if not issubclass(c, (Summarized, Exception))}
    assert not without


def test_every_kind_of_result_is_printed_here() -> None:
    shown = {type(thing) for thing in objects().values()}
    results = {t for f in public_functions().values() for t in returned(f) if t not in OTHERS}
    # measuring takes seconds, and ONNX need not be installed
    elsewhere = {t for t in results if t.__name__ in ("Measurement", "OnnxFile")}
    assert not {t for t in results - elsewhere if not any(issubclass(s, t) for s in shown)}


def test_no_class_with_a_summary_has_a_repr_of_its_own() -> None:
    classes = [Summarized]
    for kind in classes:
        classes += kind.__subclasses__()
    assert {c.__name__ for c in classes} > {"Cost", "Measurement", "OnnxFile", "QatModel"}
    for kind in classes[1:]:
        assert kind.__repr__ is Summarized.__repr__, kind
        assert kind.summary is not Summarized.summary, kind


@dataclass(frozen=True)
class Flood:
    """A result without a summary."""

    values: tuple[int, ...]


def flood() -> tuple[Flood, int]:
    return Flood(tuple(range(1000))), 0


def test_a_result_without_a_summary_is_noticed() -> None:
    assert without_summary({"flood": flood}) == {"flood"}


# ---------------------------------------------------------------- what they say
def test_the_command_line_prints_str(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, weights, path = Small().eval(), tmp_path / "net.pt", tmp_path / "net.json"
    torch.save(network.state_dict(), weights)
    strategy = hago.quantize(network, CHIP, DATA).strategy
    strategy.save(path)

    def printed(*words: str) -> str:
        assert main(list(words)) == 0
        return capsys.readouterr().out

    of_model = ("networks:Small", "--weights", str(weights))
    assert printed("hardware", "show", CHIP) == f"{hago.load_hardware(CHIP)}\n"
    assert printed("cost", *of_model, str(path)) == f"{hago.estimate_cost(network, CHIP, strategy)}\n"
    explained = printed("explain", *of_model, "--hardware", CHIP, "--input-shape", "1,6,6", "--cost")
    assert explained.endswith(f"\n\n{explain_cost(network, CHIP, (DATA[0][:1],))}\n")


def test_what_hago_offers_prints_in_a_terminal() -> None:
    q = hago.quantize(Small().eval(), CHIP, DATA)
    desc = next(iter(q.plan.nodes.values())).desc
    chips = [hago.load_hardware(CHIP), hago.create_sample_hardware()]
    things = [q, q.strategy, q.plan, q.plan.graph, desc, desc.register, model(), *chips]
    kinds = {c for name in hago.__all__ if inspect.isclass(c := getattr(hago, name)) and issubclass(c, Summarized)}
    assert kinds <= {type(thing) for thing in things}
    for thing in things:
        assert max(map(len, str(thing).splitlines())) <= WIDTH, type(thing)


def test_a_quantizer_says_what_one_asks_first() -> None:
    text = repr(quantizer())
    for words in (CHIP, "7 nodes", "bits", "weights", "SQNR", "float", "overflow proved absent", "realize()"):
        assert words in " ".join(text.split()), words


def test_counts_of_nodes_agree() -> None:
    strategy = quantizer().strategy
    computed = len(model().computed)
    assert f"a network of {computed} nodes" in repr(strategy) and f"a network of {computed} nodes" in repr(quantizer())
    assert strategy.summary().facts["float"] == quantizer().plan.summary().facts["float"]


def test_a_node_without_shape_is_printed() -> None:
    graph = Graph((Node("x", "input"), Node("y", "relu", ("x",))), ("x",), ("y",))
    assert graph.summary().facts["outputs"] == "y"


def test_a_score_of_a_search_says_what_it_is() -> None:
    score = SearchScore.of(outcome())
    assert re.fullmatch(r"SearchScore\([\d.]+\): SQNR [\d.]+ dB, with a front of \d+ points?", repr(score))
    assert str(score) == f"{float(score)!r}" and score == outcome().score
    assert re.match(
        r"Score [\d.]+: SQNR in dB \(95 % interval",
        repr(hago.evaluate_strategy(model(), CHIP, quantizer().strategy, DATA)),
    )


def test_models_in_a_container_are_printed() -> None:
    assert "IntegerModel of" in repr(torch.nn.Sequential(quantizer().realize(), torch.nn.ReLU()))


def test_results_of_files_are_printed(tmp_path: Path) -> None:
    quantizer().realize().save(tmp_path / "m.hago")
    assert repr(hago.load_integer_model(tmp_path / "m.hago")) == repr(quantizer().realize())
    outcome().front.save(tmp_path / "f.json")
    assert repr(hago.load_front(tmp_path / "f.json")) == repr(outcome().front)
