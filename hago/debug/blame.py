"""Blame: which nodes the error of a value comes from, and where a model goes wrong.

Every node's error is split into what it inherited and what it added (`hago.debug.causes`). Walking
backwards, a node keeps the added part of the blame that reaches it and hands the rest to its producers,
in proportion to the power of their errors. So the parts sum to 1. It is an estimate: it takes for
granted that a node passes on all noise that it inherits alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hago.debug.causes import Cause
from hago.debug.statistic import EdgeStatistic, NodeStatistic
from hago.debug.text import count

#: A value whose SQNR is below this many dB has gone wrong: its error is above a tenth of it.
WRONG_DB: Final = 20.0


def blame(rows: Sequence[NodeStatistic], ends: Sequence[str]) -> dict[str, float]:
    """The part that each node has in the error of `ends`, in node order; nodes without any left out.

    Args:
        rows: in topological order.
        ends: nodes whose errors count alike; those without error do not count.
    """
    by_name = {r.name: r for r in rows}
    ends = [e for e in ends if by_name[e].error_power]
    reached = dict.fromkeys(by_name, 0.0)
    for end in ends:
        reached[end] += 1.0 / len(ends)
    kept: dict[str, float] = {}
    for row in reversed(rows):
        share = reached[row.name]
        noise = {s: by_name[s].error_power or 0.0 for s in row.inputs}
        noise = {s: power * by_name[s].count for s, power in noise.items() if power > 0.0}
        total = sum(noise.values())
        handed = share * row.inherited_share if total > 0.0 else 0.0
        for source, power in noise.items():
            reached[source] += handed * power / total
        if share - handed > 0.0:
            kept[row.name] = share - handed
    return {r.name: kept[r.name] for r in rows if r.name in kept}


@dataclass(frozen=True, slots=True)
class Wrong:
    """Where a model goes wrong.

    Args:
        node: the node that is to blame most for the error of `symptom`.
        part: its part in that error.
        symptom: the first node in order whose SQNR is below WRONG_DB.
        symptom_sqnr: dB.
        cause: the largest part of what `node` added.
        words: the cause in words, with the edge or register it sits on.
        remedy: what may help.
    """

    node: str
    part: float
    symptom: str
    symptom_sqnr: float
    cause: Cause
    words: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def find_wrong(rows: Sequence[NodeStatistic]) -> Wrong | None:
    """Where it goes wrong: see `GraphStatistic.first_wrong`."""
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
    words, remedy = in_words(row, cause)
    return Wrong(node, parts[node], symptom.name, symptom.sqnr, cause, words, remedy)


# ---------------------------------------------------------------- words
def in_words(row: NodeStatistic, cause: Cause) -> tuple[str, str]:
    """A cause with the edge or register it sits on, and what may help."""
    if cause == "overflow":
        past = "wrap" if row.on_overflow == "wrap" else "are clamped"
        bound = "" if row.bound is None else f"; the largest possible is {row.bound:.3g} times its maximum"
        return (
            f"{count(row.overflows)} of {count(row.accumulators)} accumulators leave {row.register} and {past}{bound}",
            "fewer bits on its operands, or a wider accumulator",
        )
    edge = _worst_edge(row, cause)
    if edge is None:
        return "its limits are rounded to whole quanta", "more bits on its operand"
    if cause == "saturation":
        return (
            f"{100.0 * edge.saturated_fraction:.2g} % of {_named(edge)} is clipped at {_grid(edge)}",
            f"a wider threshold for {edge.edge}, or one estimated on more data",
        )
    if cause == "constants" and edge.narrow_channels and not edge.per_channel:
        return (
            f"{_named(edge)} in {edge.bits} bits has one scale for {edge.channels} channels, which leaves "
            f"{edge.narrow_channels} of them with less than 4 bits",
            "a scale per channel if the hardware has it, channels equalized beforehand, or more bits",
        )
    return f"{_named(edge)} is rounded to {_grid(edge)}", f"more bits on {edge.edge}, or a tighter threshold"


def _worst_edge(row: NodeStatistic, cause: Cause) -> EdgeStatistic | None:
    """The edge through which a cause has most effect."""
    moved = [e for e in row.edges if e.requantized]
    if cause == "saturation":
        return max((e for e in moved if e.saturated), key=lambda e: e.saturation_effect, default=None)
    kinds = ("constant",) if cause == "constants" else ("data", "output")
    return max((e for e in moved if e.kind in kinds), key=lambda e: e.rounding_effect, default=None)


def _named(edge: EdgeStatistic) -> str:
    if edge.kind == "output":
        return f"the output {edge.edge}"
    return f"{'the value' if edge.kind == 'data' else 'the constant'} {edge.source} on {edge.edge}"


def _grid(edge: EdgeStatistic) -> str:
    return f"{edge.bits} bits in steps of {'at most ' if edge.per_channel else ''}{edge.scale:.3g}"
