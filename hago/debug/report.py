"""Reports: node statistics as text tables and CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hago.debug.blame import WRONG_DB, Wrong, in_words
from hago.debug.causes import CAUSES
from hago.debug.statistic import NodeStatistic, ValueStatistic
from hago.debug.text import count, decimals, head, number, percent, table, tail, wrapped
from hago.objective import MOST_DB

_HEAD: Final = (
    "bits    of each in-edge; =8 passes as the producer emits it, >8 is the node's requantized output",
    "SQNR    dB of the float value over the error of the simulated one; own: over what the node itself added",
    "max err the largest |simulated - float|",
    "of its error, in %: inherited from its inputs | rounding of data | of constants | saturation | overflow;",
    "        below 0 where one undoes others",
    "blame   in % of the outputs' error, estimated",
    "clip    % of values cut off at the threshold, on the worst edge that carries data",
    "sums    that cannot leave their register (proved), could (the bound in multiples of its maximum), or did",
    "differ  values where the simulator and the integer model disagree",
)
_TITLES: Final = (
    "node", "op", "bits", "SQNR", "own", "cosine", "max err",
    "inh", "rnd", "const", "sat", "ovf", "blame", "clip", "sums", "differ",
)  # fmt: skip
#: How many nodes the foot of a report names.
_NAMED: Final = 5


def error_table(
    rows: Sequence[NodeStatistic], blame: Mapping[str, float], wrong: Wrong | None, differences: int
) -> list[str]:
    """Lines: what the columns mean, a line per node, and what went wrong."""
    cells = [_cells(r, blame.get(r.name)) for r in rows]
    right = [t for t in _TITLES if t not in ("node", "op", "bits", "sums")]
    lines = ["", *_HEAD, "", *table(_TITLES, cells, right=right), ""]
    past = sorted({r.past for r in rows if r.past is not None})
    if past:
        behind = "its requantized output covers only what nodes behind it let through, so its error is taken past"
        lines += wrapped(f"* {behind} {', '.join(past)}")
    raised = [f"{r.name} ({count(r.raised)} channel{'' if r.raised == 1 else 's'})" for r in rows if r.raised]
    if raised:
        lines += wrapped(
            "weights with a coarser scale than their threshold gives, so that biases fit the accumulator: "
            + ", ".join(raised)
        )
    return [*lines, *_story(rows, blame, wrong), _agreement(differences)]


def _cells(row: NodeStatistic, part: float | None) -> tuple[str, ...]:
    exact = row.max_error == 0.0
    return (
        tail(row.name, 30) + ("*" if row.past else ""),
        head(row.op, 10),
        _bits(row),
        "exact" if exact else decimals(row.sqnr),
        "" if exact or row.own_sqnr is None or row.own_sqnr >= MOST_DB else decimals(row.own_sqnr),
        decimals(row.cosine, 4),
        "0" if exact else number(row.max_error),
        *("" if exact else percent(row.causes[c].share) for c in CAUSES),
        percent(part),
        percent(row.saturated_fraction),
        _sums(row),
        str(row.differences),
    )


def _bits(row: NodeStatistic) -> str:
    if not row.integer:
        return "float"
    marks = {"output": ">"}
    return " ".join(f"{marks.get(e.kind, '') if e.requantized else '='}{e.bits}" for e in row.edges)


def _sums(row: NodeStatistic) -> str:
    if row.verdict == "overflows":
        return f"{count(row.overflows)} of {count(row.accumulators)}"
    if row.verdict == "possible":
        return f"possible {number(row.bound)}x"
    return "" if row.verdict == "float" else row.verdict


def _story(rows: Sequence[NodeStatistic], blame: Mapping[str, float], wrong: Wrong | None) -> Iterator[str]:
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
        yield from wrapped(f"what may help: {wrong.remedy}")
    most = sorted(blame, key=lambda n: -blame[n])[:_NAMED]
    if most:
        yield "most of the outputs' error comes from"
    for row in (by_name[n] for n in most):
        cause = row.main_cause
        words = "" if cause is None else f": {cause}: {in_words(row, cause)[0]}"
        yield from wrapped(f"  {percent(blame[row.name]):>3} %  {row.name} ({row.op}){words}", " " * 9)


def _level(sqnr: float | None) -> str:
    return "exact" if sqnr is None or sqnr >= MOST_DB else f"{sqnr:.1f} dB"


def _agreement(differences: int) -> str:
    if differences:
        return f"the simulator and the integer model DISAGREE on {differences} values"
    return "the simulator and the integer model agree on every value"


# ---------------------------------------------------------------- values
def value_table(rows: Sequence[NodeStatistic]) -> list[str]:
    """Lines of ranges, means and standard deviations; `same` where the integer model agrees."""
    figures = ("min", "max", "mean", "std")
    titles = ("node", *(f"{kind} {f}" for kind in ("float", "simulated") for f in figures), "integer")
    cells = [
        (
            tail(r.name, 30),
            *map(number, _figures(r.float_values)),
            *map(number, _figures(r.simulated_values)),
            "same" if r.integer_values == r.simulated_values else " ".join(map(number, _figures(r.integer_values))),
        )
        for r in rows
    ]
    return table(titles, cells, right=titles[1:-1])


def _figures(values: ValueStatistic) -> tuple[float | None, ...]:
    return values.minimum, values.maximum, values.mean, values.deviation


# ---------------------------------------------------------------- CSV
def csv_rows(rows: Sequence[NodeStatistic], blame: Mapping[str, float]) -> Iterator[list[Any]]:
    """A head row, then one per node; None where there is no number."""
    for index, row in enumerate(rows):
        cells = _csv_cells(row, blame.get(row.name, 0.0))
        if index == 0:
            yield list(cells)
        yield list(cells.values())


def _csv_cells(row: NodeStatistic, part: float) -> dict[str, Any]:
    found: dict[str, Any] = {"node": row.name, "op": row.op, "runs": "integer" if row.integer else "float"}
    found["bits"] = " ".join(f"{e.edge}={e.bits}" for e in row.edges)
    for kind, values in (
        ("float", row.float_values),
        ("simulated", row.simulated_values),
        ("integer", row.integer_values),
    ):
        for figure, value in zip(("min", "max", "mean", "std"), _figures(values), strict=True):
            found[f"{kind}_{figure}"] = value
    for name in ("sqnr", "inherited_sqnr", "own_sqnr", "cosine", "max_error", "error_power"):
        found[name] = getattr(row, name)
    for cause, statistic in row.causes.items():
        for figure in ("power", "largest", "share"):
            found[f"{cause}_{figure}"] = getattr(statistic, figure)
    found |= {"main_cause": row.main_cause, "blame": part}
    found["saturated"] = " ".join(f"{e.edge}={e.saturated_fraction:.6g}" for e in row.edges if e.saturated)
    for name in ("verdict", "register", "on_overflow", "bound", "overflows", "accumulators"):
        found[name] = getattr(row, name)
    for name in ("differences", "max_difference", "left_out", "past"):
        found[name] = getattr(row, name)
    return found
