"""TPU-MLIR's calibration tables and quantize tables: a reader and a writer of each.

`hago.export.tpu_mlir` writes both for TPU-MLIR's compiler; `hago.calibration.given_ranges` reads both as ranges and
modes that a user gives. Both are text with one row per tensor or operator; lines that start with `#` are comments. In
a calibration table some comments open a section to which the following rows belong: int4 or fp8 thresholds, weight
scales, or names of operators.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from hago.emulation.tpu_mlir.calibration import SMALLEST_THRESHOLD
from hago.errors import HagoError, did_you_mean

_T = TypeVar("_T")

_NUMBER: Final = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

#: A comment that contains the first text opens the section of the second name; the first match counts.
_SECTIONS: Final = (
    ("#weight_scale", "weight_scales"),
    ("#int4_th", "int4"),
    ("#tpu-mlir-fp8", "fp8"),
    ("mqbench-fp8", "fp8"),
    ("asym_op", "asymmetric_ops"),
    ("int4_op", "int4_ops"),
)

#: The quantize modes that a quantize table may name.
MODES: Final = (
    "INT8", "UINT8", "INT4", "W4INT8", "F32", "F16", "BF16", "W8F16", "W8BF16", "W4F16", "W4BF16",
    "F8", "F8E4M3", "F8E5M2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """The calibration of one tensor, in real units.

    Raises:
        HagoError: a number is not finite, the threshold is negative, or the minimum exceeds the maximum.
    """

    threshold: float
    minimum: float
    maximum: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(v) for v in (self.threshold, self.minimum, self.maximum)):
            raise HagoError(f"a calibration row holds {self}; expected finite numbers")
        if self.threshold < 0 or self.minimum > self.maximum:
            raise HagoError(f"a calibration row holds {self}; expected a threshold of 0 or more and min <= max")

    def __str__(self) -> str:
        return f"threshold {self.threshold:.7f}, min {self.minimum:.7f}, max {self.maximum:.7f}"


@dataclass(frozen=True, slots=True)
class CalibrationTable:
    """A calibration table: rows by tensor, and optional sections.

    Args:
        rows: for int8 quantization.
        int4, fp8: the rows of the sections of these types.
        weight_scales: by weight, one scale per channel.
        asymmetric_ops, int4_ops: the names of operators in these sections.
        comments: at the head of the file, without `#` and the space after it.
    """

    rows: Mapping[str, Row]
    int4: Mapping[str, Row] = field(default_factory=dict)
    fp8: Mapping[str, Row] = field(default_factory=dict)
    weight_scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    asymmetric_ops: tuple[str, ...] = ()
    int4_ops: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()


# ---------------------------------------------------------------- rows
def symmetric_row(threshold: float) -> Row:
    """The row of an operator forced symmetric: `min = -threshold * 128 / 127`, `max = threshold`."""
    return Row(threshold, -threshold * 128.0 / 127.0, threshold)


def int4_row(threshold: float) -> Row:
    """The row of an `#int4_th` section: `min = -threshold * 8 / 7`, `max = threshold`."""
    return Row(threshold, -threshold * 8.0 / 7.0, threshold)


def head(method: str, samples: int, bins: int = 2048, tuned: int = 0, version: str = "") -> tuple[str, ...]:
    """The comments that TPU-MLIR writes at the head of a calibration table, without its times."""
    return (
        *([f"mlir version: {version} cali version 1.0"] if version else []),
        f"quantization threshold calculation method: {method}",
        f"histogram number: {bins}",
        f"sample number: {samples}",
        "##",
        f"tune number: {tuned}",
        "##",
        "op_name    threshold    min    max",
    )


# ---------------------------------------------------------------- calibration tables, written
def format_calibration_table(table: CalibrationTable) -> str:
    """The text of a table: comments, rows `name %.7f %.7f %.7f`, then the sections that are not empty.

    Thresholds below 1e-5 are written as 1e-5.

    Raises:
        HagoError: a name is empty, starts with `#` or contains white space; or a comment would
            open a section.
    """
    lines = [_format_comment(c) for c in table.comments]
    lines += _format_rows(table.rows)
    for heading, rows in (("#int4_th", table.int4), ("#tpu-mlir-fp8", table.fp8)):
        lines += ["", heading, *_format_rows(rows)] if rows else []
    if table.weight_scales:
        lines += ["", "#weight_scale"]
        for name, scales in table.weight_scales.items():
            lines.append(" ".join([_name(name), str(len(scales)), *(repr(float(s)) for s in scales)]))
    for heading, names in (("#asym_op", table.asymmetric_ops), ("#int4_op", table.int4_ops)):
        lines += ["", heading, *(_name(n) for n in names)] if names else []
    return "\n".join(lines) + "\n"


def _comment_line(text: str) -> str:
    return f"#{text}" if text.startswith("#") else f"# {text}"


def _comment_text(line: str) -> str:
    return line[1:] if line.startswith("##") else line[1:].strip()


def _format_comment(text: str) -> str:
    line = _comment_line(text)
    if "\n" in text or "\r" in text or _section(line) is not None:
        raise HagoError(f"the comment {text!r} would break the table; expected one line that opens no section")
    return line


def _name(name: str) -> str:
    if not name or name.startswith("#") or any(c.isspace() for c in name):
        raise HagoError(f"a table cannot name {name!r}; expected a name without white space that does not start with #")
    return name


def _format_rows(rows: Mapping[str, Row]) -> Iterator[str]:
    for name, row in rows.items():
        threshold = max(row.threshold, SMALLEST_THRESHOLD)
        yield f"{_name(name)} {threshold:.7f} {row.minimum:.7f} {row.maximum:.7f}"


# ---------------------------------------------------------------- calibration tables, read
def parse_calibration_table(text: str) -> CalibrationTable:
    """Parse a calibration table: every text that TPU-MLIR writes, and that its own reader accepts.

    Raises:
        HagoError: a row does not fit its section, or a name has two different rows; the message has the number of
            the line.

    References:
        TPU-MLIR lib/Dialect/Top/Transforms/ImportCalibration.cpp.
    """
    section = "rows"
    rows: dict[str, dict[str, Row]] = {"rows": {}, "int4": {}, "fp8": {}}
    scales: dict[str, tuple[float, ...]] = {}
    names: dict[str, list[str]] = {"asymmetric_ops": [], "int4_ops": []}
    comments: list[str] = []
    for number, line in _lines(text):
        if line.startswith("#"):
            opened = _section(line)
            section = opened or section
            if opened is None and not any(rows.values()):
                comments.append(_comment_text(line))
        elif section in rows:
            name, row = _parse_row(line, number)
            _add_once(rows[section], name, row, number)
        elif section in names:
            names[section].append(_parse_name(line, number))
        else:
            name, values = _parse_scales(line, number)
            _add_once(scales, name, values, number)
    return CalibrationTable(
        rows["rows"],
        rows["int4"],
        rows["fp8"],
        scales,
        tuple(names["asymmetric_ops"]),
        tuple(names["int4_ops"]),
        tuple(comments),
    )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, stripped, with their numbers from 1."""
    return ((i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip())


def _section(line: str) -> str | None:
    """The section that a comment opens, or None."""
    return next((name for mark, name in _SECTIONS if mark in line), None)


def _numbers(words: Iterable[str], number: int, line: str) -> list[float]:
    values = []
    for word in words:
        if not _NUMBER.fullmatch(word) or not math.isfinite(float(word)):
            raise HagoError(f"line {number} of a table: {word!r} in {line!r} is not a finite number")
        values.append(float(word))
    return values


def _parse_row(line: str, number: int) -> tuple[str, Row]:
    words = line.split()
    if len(words) != 4:
        raise HagoError(f"line {number} of a calibration table is {line!r}; expected 'name threshold min max'")
    try:
        return words[0], Row(*_numbers(words[1:], number, line))
    except HagoError as error:
        where = "" if str(error).startswith("line") else f"line {number} of a calibration table: "
        raise HagoError(f"{where}{error}") from None


def _parse_name(line: str, number: int) -> str:
    words = line.split()
    if len(words) != 1:
        raise HagoError(f"line {number} of a calibration table is {line!r}; this section expects one name per line")
    return words[0]


def _parse_scales(line: str, number: int) -> tuple[str, tuple[float, ...]]:
    words = line.split()
    if len(words) < 2 or not words[1].isdecimal() or len(words) != 2 + int(words[1]):
        raise HagoError(f"line {number} of a calibration table is {line!r}; expected 'name count scale ... scale'")
    return words[0], tuple(_numbers(words[2:], number, line))


def _add_once(table: dict[str, _T], name: str, value: _T, number: int) -> None:
    """Add an entry; one of the same name must have the same value."""
    if name in table and table[name] != value:
        raise HagoError(f"line {number} of a table: {name!r} stood before with other values; expected one row each")
    table[name] = value


# ---------------------------------------------------------------- quantize tables
@dataclass(frozen=True, slots=True)
class QuantizeTable:
    """A quantize table: the operators whose mode differs from that of the model.

    Args:
        modes: by operator, one of MODES.
        comments: all comments in order, without `#` and the space after it.
    """

    modes: Mapping[str, str]
    comments: tuple[str, ...] = ()


def format_quantize_table(table: QuantizeTable) -> str:
    """The text of a quantize table: comments, then rows `name MODE`.

    Raises:
        HagoError: a mode is unknown, or a name is empty, starts with `#` or contains white space.
    """
    lines = [_comment_line(c) for c in table.comments]
    if any("\n" in c or "\r" in c for c in table.comments):
        raise HagoError("a comment of a quantize table holds a line break; expected single lines")
    lines += [f"{_name(name)} {_check_mode(mode, 'a quantize table')}" for name, mode in table.modes.items()]
    return "\n".join(lines) + "\n"


def parse_quantize_table(text: str) -> QuantizeTable:
    """Parse a quantize table; modes may be written in upper or lower case.

    Raises:
        HagoError: a row is not `name MODE`, a mode is unknown, or a name has two modes; the message has the number
            of the line.
    """
    modes: dict[str, str] = {}
    comments: list[str] = []
    for number, line in _lines(text):
        if line.startswith("#"):
            comments.append(_comment_text(line))
            continue
        words = line.split()
        if len(words) != 2:
            raise HagoError(f"line {number} of a quantize table is {line!r}; expected 'name MODE'")
        _add_once(modes, words[0], _check_mode(words[1], f"line {number} of a quantize table"), number)
    return QuantizeTable(modes, tuple(comments))


def _check_mode(mode: str, where: str) -> str:
    """The mode in upper case; refused with `where` if it is not one of MODES."""
    upper = mode.upper()
    if upper not in MODES:
        raise HagoError(f"{where}: unknown mode {mode!r}; known: {', '.join(MODES)}." + did_you_mean(upper, MODES))
    return upper
