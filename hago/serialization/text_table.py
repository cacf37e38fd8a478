"""Text tables and numbers, in the form in which reports print them.

A table is at most `WIDTH` columns wide where its columns can give way: names are shortened, and words wrapped, only as
far as that needs.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Final

#: The width of text and tables. Wider lines would wrap in many terminals.
WIDTH: Final = 100
#: The fewest columns that a column of names keeps where a table is too wide.
LEAST_NAME: Final = 14
_GAP: Final = 2
#: The units of byte counts, each with its size, the largest first.
BYTE_UNITS: Final = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


#: How a column gives way where its table is too wide: the lines of a cell in so many columns.
Narrowing = Callable[[str, int], list[str]]


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    narrow: Sequence[Mapping[str, Narrowing]] = (),
) -> list[str]:
    """The lines of a table whose columns are as wide as their widest cell, or less where it would exceed WIDTH.

    Args:
        right: the titles of the columns that are aligned to the right.
        narrow: the columns that may give way, with how they do: `keep_beginning`, `keep_end` or `wrap_words`. Those of
            the first mapping give way first, of these the widest. Titles that the table lacks are no error.
    """
    cells = [tuple(titles), *(tuple(r) for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    how: dict[int, Narrowing] = {}
    for group in narrow:
        columns = {titles.index(title): narrowing for title, narrowing in group.items() if title in titles}
        how |= columns
        least = {i: _least_width([row[i] for row in cells], narrowing) for i, narrowing in columns.items()}
        while sum(widths) + _GAP * (len(widths) - 1) > WIDTH:
            wider = [i for i in columns if widths[i] > least[i]]
            if not wider:
                break
            widths[max(wider, key=lambda i: widths[i])] -= 1
    to_right = [title in right for title in titles]
    lines = []
    for row in cells:
        parts = [how[i](cell, widths[i]) if i in how else [cell] for i, cell in enumerate(row)]
        for line in itertools.zip_longest(*parts, fillvalue=""):
            padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, to_right, strict=True))
            lines.append((" " * _GAP).join(padded).rstrip())
    return lines


def _least_width(cells: Sequence[str], how: Narrowing) -> int:
    """The fewest columns that cells keep: those of the longest word where they wrap."""
    if how is not wrap_words:
        return LEAST_NAME
    return max(len(word) for cell in cells for word in (*cell.split(), ""))


def keep_beginning(cell: str, width: int) -> list[str]:
    """Keep the beginning of a cell."""
    return [head(cell, width)]


def keep_end(cell: str, width: int) -> list[str]:
    """Keep the end of a cell, for names of nodes."""
    return [tail(cell, width)]


def wrap_words(cell: str, width: int) -> list[str]:
    """Let a cell go on in the next line, between words."""
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) or [""]


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


def wrapped_words(text: str, indent: str = "  ") -> list[str]:
    """The same of a sentence that ends in options of the command line, or in several choices of them, which stay on
    lines of their own if they do not fit, so that they can be copied."""
    words, found, options = text.partition(" --")
    if not found or len(text) <= WIDTH:
        return wrapped(text, indent)
    first, *others = options.split(", or with --")
    lines = [*wrapped(words, indent), f"{indent}--{first}"]
    return [*lines, *(line for other in others for line in (f"{indent}or with", f"{indent}--{other}"))]


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


def unit_of(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The first of the units that is not larger than a value, or the last.

    Args:
        units: each with its size, the largest first.
    """
    return next((unit for unit in units if value >= unit[0]), units[-1])


def scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """A value in its unit, see `unit_of`, with four significant digits."""
    size, name = unit_of(value, units)
    return f"{value / size:.4g} {name}"


def bytes_text(value: float) -> str:
    """A number of bytes: 950 B, 157.9 KiB, 4 MiB."""
    return scaled(value, BYTE_UNITS)


def ratio_text(part: int, total: int) -> str:
    """The percentage that `part` is of `total`, e.g. `62.5 %`; `-` if the total is 0."""
    return "-" if total == 0 else f"{100.0 * part / total:.1f} %"
