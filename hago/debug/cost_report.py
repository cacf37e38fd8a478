"""CostReport: costs as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hago.cost import METRICS, Cost, EdgeCost, NodeCost, rows_of
from hago.cost_range import CostRange
from hago.debug.text import count, head, number, table, tail, wrapped

_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_TIMES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_JOULES: Final = ((1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"), (1e-9, "nJ"))


def amount(metric: str, value: float) -> str:
    """A total with its unit, in three or four digits."""
    unit = METRICS[metric]
    if unit == "B":
        return _scaled(value, (*_SIZES, (1, "B")))
    if unit in ("s", "J"):
        return _scaled(value, _TIMES if unit == "s" else _JOULES)
    if unit == "bits":
        return f"{value:.4g} bits"
    return f"{count(round(value))}{' cycles' if unit else ''}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    for size, name in units:
        if value >= size:
            return f"{value / size:.4g} {name}"
    return f"{value / units[-1][0]:.4g} {units[-1][1]}"


def cost_text(cost: Cost) -> str:
    """Every node with what happens on its edges, and the totals."""
    titles = ("node", "op", "signature", "MACs", "BOPs", "bits of its edges", "weights", "moved", "cycles", "of edges")
    rows = [_row(node, edges) for node, edges in rows_of(cost)]
    right = ("MACs", "BOPs", "weights", "moved", "cycles", "of edges")
    title = f"cost on {cost.hardware}, batch {cost.batch}"
    return "\n".join([title, "", *table(titles, rows, right), "", *_totals({"": cost.figures}), *_missing(cost)])


def _row(node: NodeCost, edges: Sequence[EdgeCost]) -> tuple[str, ...]:
    crossing = [e.cycles for e in edges if e.cycles is not None]
    return (
        tail(node.node, 36),
        head(node.op, 24),
        head(node.signature, 24),
        count(node.macs) if node.macs else "",
        count(node.bops) if node.bops else "",
        " ".join(_edge(e) for e in edges),
        count(sum(e.weight_bytes for e in edges)) if any(e.weight_bytes for e in edges) else "",
        count(node.read_bytes + node.write_bytes),
        number(node.cycles, 4),
        number(sum(crossing), 4) if crossing else "",
    )


def _edge(edge: EdgeCost) -> str:
    """Bits, with a mark where they are made while the model runs: `>8`; `f` for real values."""
    bits = "f" if edge.dtype.startswith(("float", "bfloat")) else str(edge.bits)
    return f">{bits}" if edge.requantized else bits


def range_text(found: CostRange) -> str:
    """The totals side by side."""
    columns = {"most bits": found.widest, "fewest bits": found.narrowest, "float": found.floating}
    lines = _totals({name: cost.figures for name, cost in columns.items()})
    return "\n".join([f"cost on {found.widest.hardware}, batch {found.widest.batch}", *lines, *_missing(found.widest)])


def _totals(columns: Mapping[str, Mapping[str, float]]) -> list[str]:
    known = [m for m in METRICS if any(m in figures for figures in columns.values())]
    rows = [(m, *(amount(m, f[m]) if m in f else "-" for f in columns.values())) for m in known]
    return table(("total", *columns), rows, right=tuple(columns))


def _missing(cost: Cost) -> list[str]:
    if not cost.missing:
        return []
    said = "; ".join(cost.missing)
    return [
        "",
        *wrapped(f"not in {cost.hardware}, and so not counted, which makes cycles and energy lower bounds: {said}"),
    ]
