"""The statistic of an inspection: a row for every node, the blame of each for the outputs' error, and the tables.

`hago.analysis.inspect` makes a NodeStatistic of every node from its sums over batches, and a GraphStatistic of the
whole, which prints itself. A figure of a node is a field of NodeStatistic; a column of the printed table is an entry of
`COLUMNS`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from hago.analysis.error_causes import Cause
from hago.analysis.remedies import Remedies, Suspect
from hago.arithmetic.numerics import Overflow
from hago.correction import CorrectionPass
from hago.graph import INPUT
from hago.plan import Verdict
from hago.serialization.pictures import (
    BLUE,
    LIGHT_BLUE,
    ORANGE,
    RED,
    axes_for,
    data_frame,
    picture,
    plain_text,
    style_axes,
)
from hago.serialization.summary import MOST_DB, Summarized, Summary, names_text
from hago.serialization.text_table import (
    count,
    counted,
    decimals,
    head,
    keep_beginning,
    keep_end,
    number,
    percent,
    table,
    tail,
    wrapped,
)

# ---------------------------------------------------------------- statistics of one node
EdgeRole = Literal["data", "constant", "output"]


@dataclass(frozen=True, slots=True)
class ValueStatistic:
    """The finite values of one node in one of the three models; None if there were none."""

    minimum: float | None
    maximum: float | None
    mean: float | None
    deviation: float | None


@dataclass(frozen=True, slots=True)
class CauseStatistic:
    """The contribution of one cause to the error of a node.

    Args:
        power: mean square of the difference that the cause added.
        largest: its largest magnitude.
        share: sum(added * error) / sum(error^2), the projection of the added difference on the error. Shares of all
            causes sum to 1; a cause that cancels others has a negative one. None if there is no error.
        own_share: its share in the error that the node itself added; None for inherited error, and if the node added
            none.
    """

    power: float
    largest: float
    share: float | None
    own_share: float | None


@dataclass(frozen=True, slots=True)
class EdgeStatistic:
    """One in-edge of an integer node, or its requantized output (`node:out`).

    Args:
        edge: its key.
        source: the node whose value is on the edge.
        kind: data, a constant, or the node's own output.
        bits: number of bits that the range of its integers needs.
        dtype: of the slot.
        scale: real units per quantum; the largest one if it is per channel.
        per_channel: whether there is a scale per channel.
        requantized: whether values are quantized on the edge; otherwise they pass as the producer emits them.
        saturated, values: number of clipped values, and of all values.
        rounding_sqnr: dB of the value before the edge over the error of rounding.
        saturation_sqnr: dB of the same value over the error of clipping.
        rounding_effect: mean square of the error that rounding on this edge adds to the node's value. It is exact
            if the edge is in the node's own units (a bias, operands of an add, the output), else estimated as the
            edge's noise-to-signal ratio times the power of the node's value.
        saturation_effect: the same for clipping.
        channels: of a weight, its output channels.
        narrow_channels: how many of them reach fewer than `hago.analysis.inspect.NARROW` quanta.
    """

    edge: str
    source: str
    kind: EdgeRole
    bits: int
    dtype: str
    scale: float
    per_channel: bool
    requantized: bool
    saturated: int = 0
    values: int = 0
    rounding_sqnr: float | None = None
    saturation_sqnr: float | None = None
    rounding_effect: float = 0.0
    saturation_effect: float = 0.0
    channels: int = 0
    narrow_channels: int = 0

    @property
    def saturated_fraction(self) -> float:
        """The fraction of the values that was clipped."""
        return self.saturated / self.values if self.values else 0.0

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self) | {"saturated_fraction": self.saturated_fraction}


@dataclass(frozen=True, slots=True)
class NodeStatistic:
    """The statistic of one node over all batches, made by `hago.analysis.inspect.summarize`.

    Args:
        inputs: the nodes whose values it reads, without constants.
        integer: whether it runs in integers.
        count: number of values that the errors were measured on.
        float_values, simulated_values, integer_values: in real units.
        sqnr: dB of the float value over the simulated error; None if nothing was measured.
        inherited_sqnr: the same if the node itself were exact on its simulated inputs.
        own_sqnr: dB of the float value over the error that the node itself added.
        cosine: between float and simulated value; None if either is 0 everywhere.
        max_error: the largest |simulated - float|.
        error_power: mean square of simulated - float.
        causes: the contribution of each cause.
        differences: number of values that differ between the simulator and the integer model; integers are compared as
            integers, floats by their bits.
        max_difference: the largest difference, in quanta of an integer node, in real units of a float node.
        edges: in-edges of an integer node, and its output if it requantizes.
        verdict: on overflow: proved absent, possible, seen, or float.
        register, on_overflow: dtype of the accumulator, and how it behaves outside its range.
        bound: the largest accumulator that any input can cause, over the register's maximum.
        overflows, accumulators: number of accumulators that left their register, and of all accumulators.
        left_out: number of values that were infinite or NaN.
        raised: number of channels of the weight whose scale was raised so that their biases fit the accumulator.
        past: the node (relu, clamp, pooling) after which errors are taken, if the requantized output covers only the
            values that it passes on.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    integer: bool
    count: int
    float_values: ValueStatistic
    simulated_values: ValueStatistic
    integer_values: ValueStatistic
    sqnr: float | None
    inherited_sqnr: float | None
    own_sqnr: float | None
    cosine: float | None
    max_error: float | None
    error_power: float | None
    causes: Mapping[Cause, CauseStatistic]
    differences: int
    max_difference: float
    edges: tuple[EdgeStatistic, ...] = ()
    verdict: Verdict = "float"
    register: str | None = None
    on_overflow: Overflow | None = None
    bound: float | None = None
    overflows: int = 0
    accumulators: int = 0
    left_out: int = 0
    raised: int = 0
    past: str | None = None

    @property
    def inherited_share(self) -> float:
        """The part of the error that was inherited, clamped to [0, 1]; 0 if there is no error."""
        return min(1.0, max(0.0, self.causes["inherited"].share or 0.0))

    @property
    def main_cause(self) -> Cause | None:
        """The cause with the largest part in the error that the node itself added; None if it added none."""
        shares = [(s.own_share, cause) for cause, s in self.causes.items() if s.own_share is not None]
        return max(shares)[1] if shares else None

    @property
    def saturated_fraction(self) -> float:
        """The largest fraction of values clipped on any of its edges that carry data."""
        return max((e.saturated_fraction for e in self.edges if e.kind != "constant"), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        document = asdict(self)
        document["inputs"] = list(self.inputs)
        document["edges"] = [e.to_json() for e in self.edges]
        return document | {"main_cause": self.main_cause}


# ---------------------------------------------------------------- blame
#: A node whose SQNR is below this many dB is reported as wrong: its error is more than a tenth of its value.
WRONG_DB: Final = 20.0


def blame(rows: Sequence[NodeStatistic], ends: Sequence[str]) -> dict[str, float]:
    """The part of each node in the error of `ends`, in node order, without the nodes that have none.

    Blame is propagated backwards through the graph: a node keeps the part that corresponds to the error that it added
    itself, and distributes the inherited part to its producers in proportion to the power of their errors. The parts
    therefore sum to 1. They are an estimate, because a node is assumed to pass on all inherited errors alike.

    Args:
        rows: in topological order.
        ends: nodes whose errors have equal weight; those without error do not count.
    """
    by_name = {r.name: r for r in rows}
    ends = [e for e in ends if by_name[e].error_power]
    assigned = dict.fromkeys(by_name, 0.0)
    for end in ends:
        assigned[end] += 1.0 / len(ends)
    parts: dict[str, float] = {}
    for row in reversed(rows):
        share = assigned[row.name]
        noise = {s: by_name[s].error_power or 0.0 for s in row.inputs}
        noise = {s: power * by_name[s].count for s, power in noise.items() if power > 0.0}
        total = sum(noise.values())
        passed_back = share * row.inherited_share if total > 0.0 else 0.0
        for source, power in noise.items():
            assigned[source] += passed_back * power / total
        if share - passed_back > 0.0:
            parts[row.name] = share - passed_back
    return {r.name: parts[r.name] for r in rows if r.name in parts}


@dataclass(frozen=True, slots=True)
class ErrorDiagnosis:
    """The node where a model goes wrong, and why; made by `diagnose_error`.

    Args:
        node: the node with the largest part in the error of `symptom`.
        part: its part in that error.
        symptom: the first node in order whose SQNR is below WRONG_DB.
        symptom_sqnr: in dB.
        cause: the cause of the largest part of the error that `node` added.
        words: the cause in words, with its edge or register.
        remedy: a change that may help.
    """

    node: str
    part: float
    symptom: str
    symptom_sqnr: float
    cause: Cause
    words: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def diagnose_error(rows: Sequence[NodeStatistic], tried: Collection[str] = ()) -> ErrorDiagnosis | None:
    """Find the node where a model goes wrong, by the rule of `GraphStatistic.first_wrong`; None if there is none.

    Args:
        tried: the names of the corrections that were tried.
    """
    symptom = next((r for r in rows if r.sqnr is not None and r.sqnr < WRONG_DB and r.error_power), None)
    if symptom is None or symptom.sqnr is None:
        return None
    by_name = {r.name: r for r in rows}
    parts = {n: p for n, p in blame(rows, [symptom.name]).items() if by_name[n].main_cause is not None}
    if not parts:
        return None
    node = max(parts, key=lambda n: parts[n])
    row = by_name[node]
    cause = row.main_cause
    assert cause is not None
    words, remedy = cause_in_words(row, cause, tried)
    return ErrorDiagnosis(node, parts[node], symptom.name, symptom.sqnr, cause, words, remedy)


# ---------------------------------------------------------------- words
def cause_in_words(
    row: NodeStatistic,
    cause: Cause,
    tried: Collection[str] = (),
    *,
    full: Collection[str] = (),
    is_per_channel: bool = True,
) -> tuple[str, str]:
    """Describe a cause with its edge or register, and what may help; the latter is empty where nothing is left.

    Args:
        tried: the names of the corrections that were tried, which are no remedy.
        full: the edges that have the most bits that the hardware takes.
        is_per_channel: whether the hardware may have a scale per channel.
    """
    if cause == "overflow":
        verb = "wrap" if row.on_overflow == "wrap" else "are clamped"
        bound = "" if row.bound is None else f"; the largest possible is {row.bound:.3g} times its maximum"
        return (
            f"{count(row.overflows)} of {count(row.accumulators)} accumulators leave {row.register} and {verb}{bound}",
            "fewer bits on its operands, or a wider accumulator",
        )
    edge = _worst_edge(row, cause)
    if edge is None:
        rounded = "limits" if row.op in ("clamp", "channel_clamp") else "results"
        has_most = f"{row.name}:0" in full
        return f"its {rounded} are rounded to integers", "" if has_most else "more bits on its operand"
    if cause == "saturation":
        return (
            f"{100.0 * edge.saturated_fraction:.2g} % of {_named(edge)} is clipped at {_grid(edge)}",
            f"a wider threshold for {edge.edge}, or one estimated on more data",
        )
    if cause == "constants" and edge.narrow_channels and not edge.per_channel:
        helps = {
            "a scale per channel if the hardware has it": is_per_channel,
            "the correction equalization": "equalization" not in tried,
            "more bits": edge.edge not in full,
        }
        return (
            f"{_named(edge)} in {edge.bits} bits has one scale for {edge.channels} channels, which leaves "
            f"{edge.narrow_channels} of them with less than 4 bits",
            _one_of(helps),
        )
    helps = {f"more bits on {edge.edge}": edge.edge not in full, "a tighter threshold": True}
    return f"{_named(edge)} is rounded to {_grid(edge)}", _one_of(helps)


def _one_of(helps: Mapping[str, bool]) -> str:
    """What may help, as far as it is possible: `a, b, or c`.

    Args:
        helps: whether it is possible, by what it is in words.
    """
    possible = [words for words, is_possible in helps.items() if is_possible]
    return ", ".join([*possible[:-1], *(f"or {words}" if len(possible) > 1 else words for words in possible[-1:])])


def suspect(row: NodeStatistic) -> Suspect | None:
    """The node of a row as one whose error is to be made smaller; None if it adds none."""
    cause = row.main_cause
    if cause is None:
        return None
    edges = row.edges if cause == "overflow" else _edges_by_effect(row, cause)
    narrow = any(e.narrow_channels and not e.per_channel for e in row.edges)
    return Suspect(row.name, row.op, cause, tuple(e.edge for e in edges), cause == "constants" and narrow)


def _worst_edge(row: NodeStatistic, cause: Cause) -> EdgeStatistic | None:
    """The edge through which a cause has the largest effect."""
    return next(iter(_edges_by_effect(row, cause)), None)


def _edges_by_effect(row: NodeStatistic, cause: Cause) -> list[EdgeStatistic]:
    """The edges through which a cause has an effect, the largest first."""
    requantized = [e for e in row.edges if e.requantized]
    if cause == "saturation":
        return sorted((e for e in requantized if e.saturated), key=lambda e: -e.saturation_effect)
    kinds = ("constant",) if cause == "constants" else ("data", "output")
    return sorted((e for e in requantized if e.kind in kinds), key=lambda e: -e.rounding_effect)


def _named(edge: EdgeStatistic) -> str:
    if edge.kind == "output":
        return f"the output {edge.edge}"
    return f"{'the value' if edge.kind == 'data' else 'the constant'} {edge.source} on {edge.edge}"


def _grid(edge: EdgeStatistic) -> str:
    return f"{edge.bits} bits in steps of {'at most ' if edge.per_channel else ''}{edge.scale:.3g}"


# ---------------------------------------------------------------- tables and CSV
#: The meaning of the columns, each line under the title of one of its columns.
_LEGEND: Final = (
    ("bits", "bits    of each in-edge; =8 passes as the producer emits it, >8 is the node's requantized output"),
    ("SQNR", "SQNR    dB of the float value over the error of the simulated one; own: over what the node added"),
    ("max err", "max err the largest |simulated - float|"),
    ("inh", "of its error, in %: inherited from inputs | rounding of data | of constants | saturation |"),
    ("inh", "        overflow; below 0 where one undoes others, and no column where there is none"),
    ("blame", "blame   in % of the outputs' error, estimated"),
    ("clip", "clip    % of values cut off at the threshold, on the worst edge that carries data"),
    ("sums", "sums    that cannot leave their register (proved), could (the bound in multiples of its maximum),"),
    ("sums", "        or did"),
    ("differ", "differ  values where the simulator and the integer model disagree"),
)


def _legend(titles: Sequence[str]) -> list[str]:
    """The meaning of the columns that are shown."""
    return [line for title, line in _LEGEND if title in titles]


#: Number of nodes that the end of a report names.
_NAMED: Final = 5


def error_table(
    rows: Sequence[NodeStatistic],
    blame: Mapping[str, float],
    wrong: ErrorDiagnosis | None,
    differences: int,
    remedies: Remedies | None = None,
) -> list[str]:
    """The lines of a report: the meaning of the columns, a line per node, and a summary of what went wrong."""
    cells = [tuple(column.cell(r, blame.get(r.name)) for column in COLUMNS) for r in rows]
    right = [column.title for column in COLUMNS if column.right]
    titles = [column.title for column in COLUMNS]
    # what no node has, or all have, needs no column
    kept = [i for i, column in enumerate(COLUMNS) if {row[i] for row in cells} - {"", *column.usual}]
    shown = table(
        [titles[i] for i in kept],
        [[row[i] for i in kept] for row in cells],
        right,
        [{"node": keep_end, "bits": keep_beginning}],
    )
    lines = ["", *_legend([titles[i] for i in kept]), "", *shown, ""]
    past = list(dict.fromkeys(r.past for r in rows if r.past is not None))  # in the order of the graph
    if past:
        behind = "its requantized output covers only what nodes behind it let through, so its error is taken past"
        lines += wrapped(f"* {behind} {names_text(past)}")
    raised = [f"{r.name} ({count(r.raised)} channel{'' if r.raised == 1 else 's'})" for r in rows if r.raised]
    if raised:
        lines += wrapped(
            "weights with a coarser scale than their threshold gives, so that biases fit the accumulator: "
            + ", ".join(raised)
        )
    lines += _summary(rows, blame, wrong, general_remedy=remedies is None)
    if all(row.verdict == "proved" for row in rows if row.integer):
        lines.append("overflow is proved absent at every integer node")
    return [*lines, *(() if remedies is None else remedies.lines()), _agreement(differences)]


def _bits(row: NodeStatistic) -> str:
    if not row.integer:
        return "float"
    return " ".join(f"{_mark(e)}{e.bits}" for e in row.edges)


def _mark(edge: EdgeStatistic) -> str:
    if not edge.requantized:
        return "="
    return ">" if edge.kind == "output" else ""


def _sums(row: NodeStatistic) -> str:
    if row.verdict == "overflows":
        return f"{count(row.overflows)} of {count(row.accumulators)}"
    if row.verdict == "possible":
        return f"possible {number(row.bound)}x"
    return "" if row.verdict == "float" else row.verdict


#: The text of a cell, for a node and its part in the outputs' error.
Cell = Callable[[NodeStatistic, float | None], str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the printed table, an entry of `COLUMNS`.

    Args:
        title: its heading.
        cell: makes its text.
        right: whether cells are aligned to the right.
        usual: the column is left out where all cells are these or empty.
    """

    title: str
    cell: Cell
    right: bool = True
    usual: tuple[str, ...] = ()


def _unless_exact(cell: Callable[[NodeStatistic], str], exact: str = "") -> Cell:
    """The cell of a figure of the error, and `exact` for a node without error."""
    return lambda row, part: exact if row.max_error == 0.0 else cell(row)


def _share(cause: Cause) -> Cell:
    return _unless_exact(lambda row: percent(row.causes[cause].share))


def _own_sqnr(row: NodeStatistic) -> str:
    return "" if row.own_sqnr is None or row.own_sqnr >= MOST_DB else decimals(row.own_sqnr)


#: The columns of the printed table, in their order; `_LEGEND` explains them. A figure that is new is also a field of
#: NodeStatistic, which `hago.analysis.inspect.summarize` fills, and a cell of `_csv_cells`.
COLUMNS: Final = (
    Column("node", lambda row, part: tail(row.name, 30) + ("*" if row.past else ""), right=False),
    Column("op", lambda row, part: head(row.op, 10), right=False),
    Column("bits", lambda row, part: _bits(row), right=False),
    Column("SQNR", _unless_exact(lambda row: decimals(row.sqnr), "exact")),
    Column("own", _unless_exact(_own_sqnr)),
    Column("max err", _unless_exact(lambda row: number(row.max_error), "0")),
    Column("inh", _share("inherited")),
    Column("rnd", _share("rounding")),
    Column("const", _share("constants")),
    Column("sat", _share("saturation")),
    Column("ovf", _share("overflow")),
    Column("blame", lambda row, part: percent(part)),
    Column("clip", lambda row, part: percent(row.saturated_fraction)),
    Column("sums", lambda row, part: _sums(row), right=False, usual=("proved",)),
    Column("differ", lambda row, part: str(row.differences), usual=("0",)),
)


def _summary(
    rows: Sequence[NodeStatistic], blame: Mapping[str, float], wrong: ErrorDiagnosis | None, *, general_remedy: bool
) -> Iterator[str]:
    by_name = {r.name: r for r in rows}
    if wrong is None:
        yield f"no node falls below {WRONG_DB:.0f} dB"
    else:
        row = by_name[wrong.node]
        yield f"the first node below {WRONG_DB:.0f} dB is {wrong.symptom}, at {wrong.symptom_sqnr:.1f} dB"
        yield from wrapped(
            f"it goes wrong at {wrong.node} ({row.op}), which adds {percent(wrong.part)} % of that error and takes "
            f"its own value from {_level(row.inherited_sqnr)} to {_level(row.sqnr)}"
        )
        yield from wrapped(f"main cause: {wrong.cause}: {wrong.words}")
        if general_remedy:
            yield from wrapped(f"what may help: {wrong.remedy}")
    most = sorted(blame, key=lambda n: -blame[n])[:_NAMED]
    if most:
        yield "most of the outputs' error comes from"
    for row in (by_name[n] for n in most):
        cause = row.main_cause
        words = "" if cause is None else f": {cause}: {cause_in_words(row, cause)[0]}"
        yield from wrapped(f"  {percent(blame[row.name]):>3} %  {row.name} ({row.op}){words}", " " * 9)


def _level(sqnr: float | None) -> str:
    return "exact" if sqnr is None or sqnr >= MOST_DB else f"{sqnr:.1f} dB"


def _agreement(differences: int) -> str:
    if differences:
        return f"the simulator and the integer model DISAGREE on {differences} values"
    return "the simulator and the integer model agree on every value"


def pass_table(passes: Sequence[CorrectionPass]) -> list[str]:
    """What every pass of corrections gained when the strategy was made; no line without any."""
    if not passes:
        return []
    cells = [
        (
            f"  {', '.join(each.names)}",
            decimals(each.before),
            decimals(each.after),
            "" if each.gain is None else f"{each.gain:+.2f}",
            str(each.samples or ""),
            "kept" if each.kept else f"not kept: {each.why_not}",
        )
        for each in passes
    ]
    titles = ("  pass", "before", "after", "gain", "samples", "")
    return ["", "corrections: what each gained, in dB of the outputs' SQNR", *table(titles, cells, right=titles[1:5])]


def value_table(rows: Sequence[NodeStatistic]) -> list[str]:
    """A table of ranges, means and standard deviations; `same` if the integer model has the same."""
    figures = ("min", "max", "mean", "std")
    titles = ("node", *(f"{kind} {f}" for kind in ("float", "sim") for f in figures), "integer")
    cells = [
        (
            tail(r.name, 30),
            *map(number, _figures(r.float_values)),
            *map(number, _figures(r.simulated_values)),
            "same" if r.integer_values == r.simulated_values else " ".join(map(number, _figures(r.integer_values))),
        )
        for r in rows
    ]
    lines = table(titles, cells, right=titles[1:-1], narrow=[{"node": keep_end}])
    if all(cell[-1] == "same" for cell in cells):
        same = table(titles[:-1], [cell[:-1] for cell in cells], right=titles[1:-1], narrow=[{"node": keep_end}])
        return [*same, "the integer model has the same values as the simulation"]
    return lines


def _figures(values: ValueStatistic) -> tuple[float | None, ...]:
    return values.minimum, values.maximum, values.mean, values.deviation


def csv_rows(rows: Sequence[NodeStatistic], blame: Mapping[str, float]) -> Iterator[list[Any]]:
    """A header row, then one row per node; None for a missing number."""
    for index, row in enumerate(rows):
        cells = _csv_cells(row, blame.get(row.name, 0.0))
        if index == 0:
            yield list(cells)
        yield list(cells.values())


def _csv_cells(row: NodeStatistic, part: float) -> dict[str, Any]:
    cells: dict[str, Any] = {"node": row.name, "op": row.op, "runs": "integer" if row.integer else "float"}
    cells["bits"] = " ".join(f"{e.edge}={e.bits}" for e in row.edges)
    for kind, values in (
        ("float", row.float_values),
        ("simulated", row.simulated_values),
        ("integer", row.integer_values),
    ):
        for figure, value in zip(("min", "max", "mean", "std"), _figures(values), strict=True):
            cells[f"{kind}_{figure}"] = value
    for name in ("sqnr", "inherited_sqnr", "own_sqnr", "cosine", "max_error", "error_power"):
        cells[name] = getattr(row, name)
    for cause, statistic in row.causes.items():
        for figure in ("power", "largest", "share"):
            cells[f"{cause}_{figure}"] = getattr(statistic, figure)
    cells |= {"main_cause": row.main_cause, "blame": part}
    cells["saturated"] = " ".join(f"{e.edge}={e.saturated_fraction:.6g}" for e in row.edges if e.saturated)
    for name in ("verdict", "register", "on_overflow", "bound", "overflows", "accumulators"):
        cells[name] = getattr(row, name)
    for name in ("differences", "max_difference", "left_out", "past"):
        cells[name] = getattr(row, name)
    return cells


# ---------------------------------------------------------------- the statistic of a model
@dataclass(frozen=True, slots=True, repr=False)
class GraphStatistic(Summarized):
    """The result of an inspection: float, simulated and integer model, node by node; prints as a table.

    Made by `inspect_plan`; `hago.inspect_graph_statistic` returns it.

    Args:
        hardware: name of the hardware.
        batches, samples: number of batches and samples that were run.
        rows: one per node in order, with inputs and without constants.
        outputs: names of the nodes that the model returns.
        remedies: changes of the strategy that were tried; None if none were.
        passes: what the passes of corrections gained when the strategy was made.
    """

    hardware: str
    batches: int
    samples: int
    rows: tuple[NodeStatistic, ...]
    outputs: tuple[str, ...]
    remedies: Remedies | None = None
    passes: tuple[CorrectionPass, ...] = ()

    def __getitem__(self, name: str) -> NodeStatistic:
        return next(r for r in self.rows if r.name == name)

    @property
    def total_differences(self) -> int:
        """Number of values that differ between the simulator and the integer model; 0 unless hago has a bug."""
        return sum(r.differences for r in self.rows)

    @property
    def blame(self) -> dict[str, float]:
        """The part of each node in the error of the outputs; an estimate, see `hago.analysis.graph_statistic.blame`."""
        return blame(self.rows, self.outputs)

    @property
    def first_wrong(self) -> ErrorDiagnosis | None:
        """The node where the model goes wrong; None if there is none.

        The symptom is the first node in order whose SQNR is below 20 dB, that is, whose error is above a tenth of its
        value. The node that goes wrong is the one with the largest part in the symptom's error, which may be the
        symptom itself or a node before it. Its main cause is that of the largest part of the error that it added.
        """
        return diagnose_error(self.rows, {name for each in self.passes for name in each.names})

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """The nodes for which remedies are looked for: the one that goes wrong first, then by blame."""
        wrong, blame = self.first_wrong, self.blame
        by_blame = sorted(blame, key=lambda name: -blame[name])
        names = dict.fromkeys([*([] if wrong is None else [wrong.node]), *by_blame])
        rows = {row.name: row for row in self.rows}
        return tuple(s for name in names if (s := suspect(rows[name])) is not None)

    @property
    def overflowing(self) -> tuple[str, ...]:
        """The nodes whose accumulators left their register, the most frequent first."""
        rows = sorted((row for row in self.rows if row.overflows), key=lambda row: -row.overflows)
        return tuple(row.name for row in rows)

    def to_json(self) -> dict[str, Any]:
        """The statistic as JSON values; None for a missing number."""
        wrong = self.first_wrong
        return {
            "hardware": self.hardware,
            "batches": self.batches,
            "samples": self.samples,
            "outputs": list(self.outputs),
            "total_differences": self.total_differences,
            "first_wrong": None if wrong is None else wrong.to_json(),
            "blame": self.blame,
            "remedies": None if self.remedies is None else self.remedies.to_json(),
            "corrections": [each.to_json() for each in self.passes],
            "nodes": [r.to_json() for r in self.rows],
        }

    def to_csv(self) -> str:
        """The statistic as CSV: a header line, then one line per node; missing numbers are empty cells."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(csv_rows(self.rows, self.blame))
        return text.getvalue()

    def figures(self) -> dict[str, dict[str, float | str]]:
        """Figures of nodes by name, which an export may show (`Quantizer.export(..., figures=...)`): the SQNR, the part
        in the error of the outputs, the main cause of the error, and whether the accumulator overflowed."""
        rows, parts = self.rows, self.blame
        return {
            "SQNR (dB)": {row.name: row.sqnr for row in rows if row.sqnr is not None},
            "blame (%)": {name: 100.0 * part for name, part in parts.items()},
            "cause": {row.name: row.main_cause for row in rows if row.main_cause is not None},
            "accumulator": {row.name: row.verdict for row in rows if row.op != INPUT},
        }

    def to_frame(self) -> Any:
        """The statistic as a data frame of pandas: the columns of `to_csv`, by node.

        Raises:
            HagoError: pandas is not installed.
        """
        parts = self.blame
        return data_frame([_csv_cells(row, parts.get(row.name, 0.0)) for row in self.rows], "node")

    def plot(self, ax: Any = None, *, nodes: int = 15) -> Any:
        """Draw the nodes with the largest parts in the error of the outputs, in their order, on axes of matplotlib:
        each part by the causes of the error that the node added, and the SQNR of its value in dB.

        Args:
            ax: by default, those of a new figure.
            nodes: the largest number of nodes that are drawn.

        Returns:
            The axes.

        Raises:
            HagoError: matplotlib is not installed.
        """
        return plot_blame(axes_for(ax), self, nodes)

    def _picture(self) -> str:
        return picture(self.plot, "the parts of nodes in the error of the outputs") if self.blame else ""

    def values(self) -> str:
        """The ranges, means and standard deviations of float, simulated and integer values, as a table."""
        return "\n".join(value_table(self.rows))

    def summary(self) -> Summary:
        """The SQNR of the outputs, where their error comes from, and where the model goes wrong."""
        wrong, parts = self.first_wrong, self.blame
        most = sorted(parts, key=lambda n: -parts[n])
        return Summary(
            f"GraphStatistic of {counted(len(self.rows), 'node')} on {self.hardware}, "
            f"{counted(self.samples, 'sample')}",
            {
                "outputs": ", ".join(f"{name} {_level(self[name].sqnr)}" for name in self.outputs),
                "error from": names_text([f"{n} {100 * parts[n]:.3g} %" for n in most if parts[n] > 0]),
                "goes wrong": "nowhere" if wrong is None else f"at {wrong.node}: {wrong.cause}: {wrong.words}",
                "may help": "" if wrong is None else wrong.remedy,
                "exactness": _agreement(self.total_differences),
            },
        )

    def __str__(self) -> str:
        head = (
            f"float | simulated | integer on {self.hardware}: {counted(len(self.rows), 'node')}, "
            f"{counted(self.samples, 'sample')} in {counted(self.batches, 'batch', 'batches')}"
        )
        lines = error_table(self.rows, self.blame, self.first_wrong, self.total_differences, self.remedies)
        return "\n".join([head, *lines, *pass_table(self.passes)])


#: The causes that a node may add error by, and their colors.
_CAUSE_COLORS: Final[Mapping[Cause, str]] = {
    "rounding": LIGHT_BLUE,
    "constants": BLUE,
    "saturation": ORANGE,
    "overflow": RED,
}


def plot_blame(ax: Any, statistic: GraphStatistic, most: int) -> Any:
    """Draw the parts of nodes in the error of the outputs; see `GraphStatistic.plot`."""
    blame = statistic.blame
    chosen = set(sorted(blame, key=lambda name: -blame[name])[:most])
    rows = [row for row in statistic.rows if row.name in chosen]
    places, left = range(len(rows)), [0.0] * len(rows)
    for cause, color in _CAUSE_COLORS.items():
        widths = [100.0 * blame[row.name] * _own_share(row, cause) for row in rows]
        if any(widths):
            ax.barh(places, widths, left=left, color=color, height=0.7, label=cause)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, end, row in zip(places, left, rows, strict=True):
        ax.annotate(_level(row.sqnr), (end, place), (4.0, 0.0), textcoords="offset points", va="center", fontsize=8)
    ax.set_yticks(places, [plain_text(tail(row.name, 30)) for row in rows], fontsize=8)
    ax.set_ylim(len(rows) - 0.4, -0.6)  # in the order of the graph, from the top
    ax.set_xlim(0.0, 1.18 * max(left, default=0.0) or 1.0)  # with room for the texts
    ax.set_xlabel("part of the error of the outputs (%); beside it, the SQNR of the node")
    fewer = f", the {len(rows)} largest of {len(blame)} parts" if len(rows) < len(blame) else ""
    ax.set_title(plain_text(f"Sources of the error of the outputs on {statistic.hardware}{fewer}"), fontsize="medium")
    if rows:
        ax.legend(loc="best", fontsize="small", frameon=False)
    style_axes(ax, grid="x")
    return ax


def _own_share(row: NodeStatistic, cause: Cause) -> float:
    """The share of a cause in the error that a node added itself, without causes that cancel others; all of it is
    rounding where no cause adds."""
    shares = {name: max(0.0, row.causes[name].own_share or 0.0) for name in _CAUSE_COLORS if name in row.causes}
    total = sum(shares.values())
    return shares.get(cause, 0.0) / total if total > 0.0 else float(cause == "rounding")
