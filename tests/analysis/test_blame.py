"""Blame and the diagnosis of errors, on rows written by hand."""

from __future__ import annotations

import pytest

from hago.analysis import graph_statistic
from hago.analysis.error_causes import CAUSES, Cause
from hago.analysis.graph_statistic import (
    COLUMNS,
    CauseStatistic,
    Column,
    EdgeStatistic,
    GraphStatistic,
    NodeStatistic,
    ValueStatistic,
    blame,
    cause_in_words,
    diagnose_error,
)
from hago.serialization.text_table import (
    WIDTH,
    count,
    decimals,
    head,
    keep_beginning,
    keep_end,
    number,
    percent,
    ratio_text,
    table,
    tail,
    wrap_words,
    wrapped,
)

NONE = ValueStatistic(None, None, None, None)


def row(
    name: str,
    *inputs: str,
    power: float,
    inherited: float,
    sqnr: float = 30.0,
    added_cause: Cause = "rounding",
    edges: tuple[EdgeStatistic, ...] = (),
) -> NodeStatistic:
    """The statistic of a node to whose error it added a single cause."""
    causes = dict.fromkeys(CAUSES, CauseStatistic(0.0, 0.0, 0.0, 0.0))
    causes["inherited"] = CauseStatistic(power * inherited, 0.0, inherited, None)
    causes[added_cause] = CauseStatistic(power * (1 - inherited), 0.0, 1 - inherited, 1.0)
    return NodeStatistic(
        name, "conv2d", inputs, True, 10, NONE, NONE, NONE, sqnr, 40.0, 35.0, 1.0, 0.1, power, causes, 0, 0.0, edges,
        register="int16", on_overflow="wrap", bound=2.5, overflows=3, accumulators=10,
    )  # fmt: skip


def edge(name: str, kind: str = "data", **figures: float) -> EdgeStatistic:
    default = EdgeStatistic(name, "before", kind, 8, "int8", 0.5, False, True, values=100)  # type: ignore[arg-type]
    return EdgeStatistic(**{**{f: getattr(default, f) for f in default.__slots__}, **figures})


DIAMOND = [
    row("x", power=0.0, inherited=0.0),
    row("a", "x", power=1.0, inherited=0.0),
    row("b", "x", power=3.0, inherited=0.0),
    row("sum", "a", "b", power=5.0, inherited=0.8, sqnr=15.0),
    row("end", "sum", power=5.0, inherited=1.0, sqnr=14.0),
]


def test_blame_is_distributed_by_the_power_of_errors() -> None:
    assert blame(DIAMOND, ["end"]) == pytest.approx({"a": 0.2, "b": 0.6, "sum": 0.2})
    assert blame(DIAMOND, ["b"]) == {"b": 1.0}
    assert blame(DIAMOND, ["a", "b"]) == {"a": 0.5, "b": 0.5}
    assert blame(DIAMOND, ["x"]) == {}
    assert blame(DIAMOND, ["x", "a"]) == {"a": 1.0}


def test_the_wrong_node_may_precede_its_symptom() -> None:
    wrong = diagnose_error(DIAMOND)
    assert wrong is not None
    assert (wrong.symptom, wrong.symptom_sqnr, wrong.node, wrong.cause) == ("sum", 15.0, "b", "rounding")
    assert wrong.part == pytest.approx(0.6)
    assert set(wrong.to_json()) == {"node", "part", "symptom", "symptom_sqnr", "cause", "words", "remedy"}


def test_nothing_went_wrong_above_20_db() -> None:
    assert diagnose_error(DIAMOND[:3]) is None
    assert diagnose_error([]) is None


def test_words_name_the_edge_with_most_effect() -> None:
    edges = (
        edge("n:0", rounding_effect=1.0, saturation_effect=0.5, saturated=25),
        edge("n:1", "constant", rounding_effect=9.0, saturation_effect=0.1, saturated=50),
        edge("n:out", "output", rounding_effect=2.0),
    )
    node = row("n", power=1.0, inherited=0.0, edges=edges)
    assert cause_in_words(node, "rounding")[0] == "the output n:out is rounded to 8 bits in steps of 0.5"
    assert cause_in_words(node, "constants")[0] == "the constant before on n:1 is rounded to 8 bits in steps of 0.5"
    words, remedy = cause_in_words(node, "saturation")
    assert words == "25 % of the value before on n:0 is clipped at 8 bits in steps of 0.5"
    assert remedy.startswith("a wider threshold for n:0")
    narrow = row("n", power=1.0, inherited=0.0, edges=(edge("n:1", "constant", channels=32, narrow_channels=9),))
    assert "one scale for 32 channels, which leaves 9 of them" in cause_in_words(narrow, "constants")[0]
    assert cause_in_words(node, "overflow")[0] == (
        "3 of 10 accumulators leave int16 and wrap; the largest possible is 2.5 times its maximum"
    )
    assert "results are rounded" in cause_in_words(row("n", power=1.0, inherited=0.0), "rounding")[0]


def test_what_is_not_possible_is_no_remedy() -> None:
    edges = (edge("n:0", rounding_effect=1.0), edge("n:1", "constant", channels=32, narrow_channels=9))
    node = row("n", power=1.0, inherited=0.0, edges=edges)
    assert cause_in_words(node, "rounding")[1] == "more bits on n:0, or a tighter threshold"
    assert cause_in_words(node, "rounding", full={"n:0"})[1] == "a tighter threshold"
    whole = "a scale per channel if the hardware has it, the correction equalization, or more bits"
    assert cause_in_words(node, "constants")[1] == cause_in_words(node, "constants", full={"n:0"})[1] == whole
    assert cause_in_words(node, "constants", ["equalization"], is_per_channel=False)[1] == "more bits"
    assert cause_in_words(node, "constants", full={"n:1"}, is_per_channel=False)[1] == "the correction equalization"
    assert cause_in_words(node, "constants", ["equalization"], full={"n:1"}, is_per_channel=False)[1] == ""


# ---------------------------------------------------------------- text
@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (12_345, "12.3k"), (4_560_000, "4.56M"), (7 * 10**12, "7e+03G")],
)
def test_count(value: int, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(None, ""), (0.0, ""), (1e-9, ""), (0.004, "<1"), (-0.004, "<1"), (0.5, "50"), (-0.58, "-58"), (1.0, "100")],
)
def test_percent(fraction: float | None, text: str) -> None:
    assert percent(fraction) == text


def test_other_cells() -> None:
    assert (number(None), number(0.012345), decimals(None), decimals(41.25, 1)) == ("-", "0.0123", "-", "41.2")
    assert (ratio_text(1, 0), ratio_text(1, 8)) == ("-", "12.5 %")
    assert (tail("layer1.0.conv1", 8), tail("conv1", 8)) == ("...conv1", "conv1")
    assert (head("adaptive_avg_pool2d", 10), head("conv2d", 10)) == ("adaptive..", "conv2d")
    assert table(("a", "b"), [("x", "1"), ("long", "22")], right=("b",)) == ["a      b", "x      1", "long  22"]
    lines = wrapped("word " * 60)
    assert len(lines) == 4 and all(len(line) <= WIDTH for line in lines) and lines[1].startswith("  word")


def test_a_table_that_is_too_wide_gives_way_in_order() -> None:
    rows = [("x" * 60, "y" * 60, "word " * 9)]
    names = {"a": keep_end, "b": keep_beginning}
    assert table(("a", "b", "c"), [("x", "y", "z")], (), [names]) == ["a  b  c", "x  y  z"]
    cut = table(("a", "b", "c"), rows, (), [names, {"c": wrap_words}])
    assert max(map(len, cut)) <= WIDTH and len(cut) == 2  # names alone give way
    assert cut[1].startswith("..x") and "y.." in cut[1] and cut[1].endswith("word")
    wrapped_first = table(("a", "b", "c"), rows, (), [{"c": wrap_words}, names])
    assert max(map(len, wrapped_first)) <= WIDTH and len(wrapped_first) == 10
    assert len(table(("a", "b", "c"), rows)[1]) > WIDTH, "nothing may give way"


def test_a_column_is_one_entry_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    statistic = GraphStatistic("chip", 1, 2, tuple(DIAMOND), ("end",))
    monkeypatch.setattr(graph_statistic, "COLUMNS", (*COLUMNS, Column("values", lambda row, part: str(row.count))))
    lines = str(statistic).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("node"))
    assert lines[start].split()[-1] == "values"
    assert [line.split()[-1] for line in lines if line.startswith(("sum ", "end "))] == ["10", "10"]
