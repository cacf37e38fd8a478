"""What objects print of themselves: a title and named facts, as a few lines of text and as a small HTML table.

Every object that a user gets inherits from `Summarized` and states its facts in `summary()`. How they look is decided
here alone. A summary takes at most `LINES` lines of `WIDTH` columns, whatever the names in it are.
"""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hago.serialization.text_table import counted, head

#: The most columns and lines of a summary, and the most lines of the value of a fact.
WIDTH: Final = 100
LINES: Final = 15
FACT_LINES: Final = 2
#: The most columns of the name of a fact.
NAME_WIDTH: Final = 24
#: The most names and the most different values that a fact lists.
_LISTED: Final = 5
#: Columns between the names of facts and their values.
_GAP: Final = 2


@dataclass(frozen=True, slots=True)
class Summary:
    """A title and named facts.

    Args:
        title: what the object is, and what it is of.
        facts: by name; facts whose text is empty are left out.
    """

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """The facts that are printed, with control characters written as escapes."""
        return [(head(printable(name), NAME_WIDTH), printable(value)) for name, value in self.facts.items() if value]

    def text(self) -> str:
        """The title, and each fact on one or two lines."""
        rows = self.rows()
        indent = 2 + _GAP + max((len(name) for name, _ in rows), default=0)
        lines = [head(printable(self.title), WIDTH)]
        for name, value in rows:
            wrapped = textwrap.wrap(
                value, WIDTH - indent, max_lines=FACT_LINES, placeholder=" ...", break_on_hyphens=False
            )
            labels = [f"  {name}", *[""] * len(wrapped)]
            lines += [f"{label:<{indent}}{line}" for label, line in zip(labels, wrapped, strict=False)]
        return "\n".join(lines if len(lines) <= LINES else [*lines[: LINES - 1], "  ..."])

    def html(self) -> str:
        """The same as an HTML table, which is valid XML."""
        rows = "".join(
            f'<tr><th style="text-align:left">{html.escape(name)}</th>'
            f'<td style="text-align:left">{html.escape(value)}</td></tr>'
            for name, value in self.rows()
        )
        title = f'<caption style="text-align:left"><b>{html.escape(printable(self.title))}</b></caption>'
        return f"<table>{title}<tbody>{rows}</tbody></table>"


class Summarized:
    """A base of objects that print a summary. One that is also a table has a `__str__` of its own."""

    __slots__ = ()

    def summary(self) -> Summary:
        """The facts that the object prints of itself."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.summary().text()

    def __str__(self) -> str:
        return self.summary().text()

    def _repr_html_(self) -> str:
        """The summary in a notebook, and a picture of what is better looked at than read."""
        return self.summary().html() + self._picture()

    def _picture(self) -> str:
        """The picture below the summary, as HTML; empty for most objects, and where matplotlib is not installed."""
        return ""


def printable(text: str) -> str:
    """The text with control characters, line breaks included, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def wrapped_lines(line: str) -> list[str]:
    """The parts of a line of text, none wider than `WIDTH`; all but the first are indented further than the line.
    Control characters are written as escapes."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(printable(line), WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [line]


# ---------------------------------------------------------------- facts as text
def names_text(names: Sequence[str]) -> str:
    """Names with commas, at most five of them: `a, b and 3 more`."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def counts_text(values: Iterable[Any]) -> str:
    """How often each value occurs, the most frequent first: `relu 9, conv2d 7`."""
    counts = Counter(map(str, values)).most_common()
    listed = len(counts) if len(counts) <= _LISTED + 1 else _LISTED
    others = f", others {sum(n for _, n in counts[listed:])}" if len(counts) > listed else ""
    return ", ".join(f"{value} {n}" for value, n in counts[:listed]) + others


def bits_text(bits: Iterable[int], of: str) -> str:
    """How many edges or groups have each number of bits, the most bits first: `7 edges at 8 bits, 2 at 4`.

    Args:
        of: what has the bits, in the plural.
    """
    counts = sorted(Counter(bits).items(), reverse=True)
    noun, space, rest = of.partition(" ")
    one = noun.removesuffix("s") + space + rest
    texts = [f"{counted(n, one, of)} at {b} bits" if i == 0 else f"{n} at {b}" for i, (b, n) in enumerate(counts)]
    return ", ".join(texts) or f"none: all {of} are float"


def proofs_text(verdicts: Mapping[str, str]) -> str:
    """At how many nodes overflow is proved absent, and at which it is possible.

    Args:
        verdicts: `proved` or `possible`, by integer node.
    """
    possible = [name for name, verdict in verdicts.items() if verdict != "proved"]
    text = f"proved absent at {len(verdicts) - len(possible)} of {len(verdicts)} integer nodes"
    return f"{text}; possible at {names_text(possible)}" if possible else text


#: The largest SQNR that is reported, in dB; also where there is no noise at all.
MOST_DB: Final = 200.0
#: The measures in results: their names in words, a factor and the unit.
_MEASURES: Final[Mapping[str, tuple[str, float, str]]] = {
    "sim_acc": ("accuracy", 100.0, "%"),
    "agreement": ("agreement", 100.0, "%"),
    "sqnr": ("SQNR", 1.0, "dB"),
}


def measure_name(key: str) -> str:
    """The name of a measure in words; that of a user's own objective as it is."""
    return _MEASURES[key][0] if key in _MEASURES else key


def measure_axis(key: str) -> tuple[str, float]:
    """The label of an axis of a measure, with its unit, and the factor of values in that unit."""
    if key not in _MEASURES:
        return key, 1.0
    name, factor, unit = _MEASURES[key]
    return f"{name} ({unit})", factor


def measure_text(key: str, value: float) -> str:
    """A value of a measure with its unit: `98.50 %`, `30.82 dB`, or `exact` for outputs without noise; of a user's own
    objective the number."""
    if key not in _MEASURES:
        return f"{value:.6g}"
    _, factor, unit = _MEASURES[key]
    return "exact" if unit == "dB" and value >= MOST_DB else f"{factor * value:.2f} {unit}"


def range_text(key: str, ends: Sequence[float]) -> str:
    """An interval of a measure with its unit: `97.12 to 98.50 %`."""
    low, high = (measure_text(key, end) for end in ends)
    return high if low == high == "exact" else f"{low.partition(' ')[0]} to {high}"


def figures_text(figures: Any) -> str:
    """The measures of a model on data: those that it has of accuracy, agreement and SQNR, and the number of samples.

    Args:
        figures: a mapping as in the results of a strategy. What a file holds in its place gives an empty text.
    """
    known = number_values(figures)
    texts = [f"{measure_name(key)} {measure_text(key, known[key])}" for key in _MEASURES if key in known]
    samples = f" on {known['samples']:.0f} samples" if "samples" in known else ""
    return ", ".join(texts) + samples if texts else ""


def number_values(values: Any) -> dict[str, float]:
    """The entries of a mapping that are numbers; none of anything else that a file may hold in its place."""
    entries = values.items() if isinstance(values, Mapping) else ()
    return {str(k): v for k, v in entries if isinstance(v, (int, float)) and not isinstance(v, bool)}
