"""Text tables and numbers, in the form in which reports print them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

#: The width of wrapped text. Wider lines would wrap in most terminals.
WIDTH: Final = 140
_SIZES: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> list[str]:
    """The lines of a table whose columns are as wide as their widest cell.

    Args:
        right: the titles of the columns that are aligned to the right.
    """
    cells = [tuple(titles), *(tuple(r) for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    to_right = [title in right for title in titles]
    return [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, to_right, strict=True)).rstrip()
        for row in cells
    ]


def tail(text: str, width: int) -> str:
    """The text, or its end if it is longer than `width`; for names of nodes, which differ in their ends."""
    return text if len(text) <= width else ".." + text[2 - width :]


def head(text: str, width: int) -> str:
    """The text, or its beginning if it is longer than `width`."""
    return text if len(text) <= width else text[: width - 2] + ".."


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits; `-` for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def decimals(value: float | None, places: int = 1) -> str:
    """A number with a fixed number of decimal places; `-` for None."""
    return "-" if value is None else f"{value:.{places}f}"


def percent(fraction: float | None) -> str:
    """A fraction in whole percent: `<1` below one percent, and empty for None or almost 0."""
    if fraction is None or abs(fraction) < 1e-6:
        return ""
    return "<1" if abs(fraction) < 0.01 else f"{100.0 * fraction:.0f}"


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """The lines of a sentence that is wrapped at WIDTH, with all but the first indented."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def count(value: int) -> str:
    """A count with a thousands suffix: 950, 12.3k, 4.56M."""
    if value < 1000:
        return str(value)
    power = min(3, (len(str(value)) - 1) // 3)
    return f"{value / 1000**power:.3g}{' kMG'[power]}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things in words: `1 node`, `3 nodes`.

    Args:
        noun: what is counted, in the singular.
        plural: its plural where that is not the noun with an s.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """A value in the first of its units that is not larger than it, or in the last, with four significant digits.

    Args:
        units: each with its size, the largest first.
    """
    size, name = next((unit for unit in units if value >= unit[0]), units[-1])
    return f"{value / size:.4g} {name}"


def bytes_text(value: float) -> str:
    """A number of bytes: 950 B, 157.9 KiB, 4 MiB."""
    return scaled(value, _SIZES)


def ratio_text(part: int, total: int) -> str:
    """The percentage that `part` is of `total`, e.g. `62.5 %`; `-` if the total is 0."""
    return "-" if total == 0 else f"{100.0 * part / total:.1f} %"
