"""Costs as a report shows them: their titles, and their values in few digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hago.cost import METRICS, amount_text
from hago.report.document import Figure
from hago.serialization.text_table import BYTE_UNITS, unit_of

#: The bytes of constants as the chip stores them, each in its dtype: a cost of points, and of trials with a Plan.
STORED: Final = "stored_bytes"
#: What each cost is called on the page.
COST_TITLES: Final[Mapping[str, str]] = {
    "weight_bytes": "size of weights, packed",
    STORED: "weights as stored",
    "activation_bytes": "bytes of activations",
    "bytes_moved": "bytes moved",
    "macs": "multiply-accumulates",
    "bops": "bit operations",
    "effective_bits": "mean bits of a weight",
    "requantized": "values requantized",
    "cycles": "cycles",
    "latency": "latency",
    "energy": "energy",
}


def cost_figure(name: str) -> Figure:
    """A cost, with its title and unit."""
    unit = "B" if name == STORED else METRICS[name].unit if name in METRICS else ""
    return Figure(name, COST_TITLES.get(name, name), unit)


def cost_text(name: str, value: float) -> str:
    """A cost with its unit, in three or four digits."""
    if cost_figure(name).unit == "B":
        return size_text(value)
    return amount_text(name, value) if name in METRICS else f"{value:.6g}"


def size_text(value: float) -> str:
    """Bytes with as many places wherever they are shown: 950 B, 231.0 KiB, 1.03 MiB."""
    return size_in(value, *unit_of(value, BYTE_UNITS), value)


def sizes_text(values: Sequence[float]) -> list[str]:
    """Several amounts of bytes that are compared, in one unit: the largest of which the least, if it is not 0, has a
    tenth."""
    least = min((value for value in values if value), default=0.0)
    size, unit = unit_of(min(10.0 * least, max(values, default=0.0)), BYTE_UNITS)
    return [size_in(value, size, unit, least) for value in values]


def size_in(value: float, size: float, unit: str, least: float) -> str:
    """Bytes in a unit, with the places that the least of several amounts has in it.

    Args:
        size: of the unit.
    """
    places = 0 if size == 1 else 1 if least >= 10 * size else 2 if least >= size else 3
    return f"{value / size:.{places}f} {unit}"
