"""Ranges and modes of nodes that the user gives instead of estimating them, e.g. from the tables of another tool.

A range is the interval that a node's integers should represent; it is converted to thresholds for every grid that a
search asks for. Weights keep their estimated thresholds. A mode keeps a node float, or fixes the bits of its operands.
`search.prepare` makes a `GivenRanges` of the user's arguments and maps its names to the graph's nodes with `at`.
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.schemes import TWO_SIDED, Grid, Range, thresholds_for
from hago.emulation.tpu_mlir import (
    MODES,
    CalibrationTable,
    QuantizeTable,
    Row,
    parse_calibration_table,
    parse_quantize_table,
)
from hago.errors import DataError, HagoError, did_you_mean, shortened
from hago.graph import CONST, Graph, Node
from hago.hardware import Hardware
from hago.serialization.json_text import read_file

#: Grids of at most this many bits use the ranges of a table's int4 section, if it has any.
_INT4_BITS: Final = 4
#: The rounding error of ranges in a printed table: half a unit of the last digit.
PRINTED_SLACK: Final = 5e-8
#: Bits of the weight and of the data that a node reads, by mode; None for float.
_MODES: Final[Mapping[str, tuple[int, int] | None]] = {
    "F32": None,
    "F16": None,
    "BF16": None,
    "INT8": (8, 8),
    "UINT8": (8, 8),
    "INT4": (4, 4),
    "W4INT8": (4, 8),
}
#: TPU-MLIR's name of an ONNX operator: the name of its output, and its type.
_NAME_WITH_TYPE: Final = re.compile(r"(.+)_[A-Z][A-Za-z0-9]*")

ThresholdsLike = Mapping[str, Sequence[float]] | CalibrationTable | str | PathLike[str]
ModesLike = Mapping[str, str] | QuantizeTable | str | PathLike[str]


@dataclass(frozen=True, slots=True)
class GivenRanges:
    """Ranges and modes that the user gives.

    Args:
        ranges: (low, high) by node, in real units.
        narrow: (low, high) by node for grids of at most four bits; `ranges` for nodes that are absent here.
        modes: by node, a mode of a quantize table.
        slack: the rounding error of the ends of ranges that were printed; else 0.
    """

    ranges: Mapping[str, Range] = field(default_factory=dict)
    narrow: Mapping[str, Range] = field(default_factory=dict)
    modes: Mapping[str, str] = field(default_factory=dict)
    slack: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The JSON values of ranges and slack. Modes are stored as patterns of keep_float and fix_bits."""
        ends = {k: {n: list(r) for n, r in getattr(self, k).items()} for k in ("ranges", "narrow")}
        return {**ends, "slack": self.slack}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> GivenRanges:
        """The ranges of JSON values.

        Raises:
            DataError, LookupError, TypeError, ValueError, AttributeError: the values are of another form.
        """
        ranges, narrow = ({n: _checked(n, r) for n, r in value[k].items()} for k in ("ranges", "narrow"))
        return GivenRanges(ranges, narrow, slack=float(value["slack"]))

    @property
    def gives_ranges(self) -> bool:
        """Whether any node has a range."""
        return bool(self.ranges or self.narrow)

    def names(self) -> Iterator[str]:
        """The name of every node with a range or mode."""
        yield from self.ranges
        yield from self.narrow
        yield from self.modes

    def at(self, graph: Graph) -> GivenRanges:
        """The same ranges and modes, by the names of the graph's nodes.

        Raises:
            HagoError: a name is that of no node, in which case the message says the closest, or two names are those of
                one node.
        """
        nodes = {n.name for n in graph if n.op != CONST}
        node_of = {name: _node_called(name, nodes) for name in self.names()}
        twice = {n for n in node_of.values() if sum(m == n for m in node_of.values()) > 1}
        for name, node in node_of.items():
            if node in twice and node != name:
                raise HagoError(f"the tables name node {node!r} twice, once as {name!r}; expected one row each")
        ranges, narrow = ({node_of[n]: v for n, v in part.items()} for part in (self.ranges, self.narrow))
        return GivenRanges(ranges, narrow, {node_of[n]: m for n, m in self.modes.items()}, self.slack)

    # ------------------------------------------------------------ thresholds
    def named(self, key: str, source: str) -> str | None:
        """The node whose range a group uses, if any has one.

        Args:
            key: the key of the group.
            source: the node whose value the group's edges read.
        """
        node = key.removesuffix(":out") if key.endswith(":out") else source
        return next((n for n in (source, node) if n in self.ranges or n in self.narrow), None)

    def signed(self, name: str) -> bool:
        """Whether the range of a named node goes below 0."""
        return self._range(name, 8)[0] < 0

    def thresholds(self, name: str, grid: Grid) -> tuple[Tensor, Tensor]:
        """(lo, hi) of a named node on a grid, float64 of shape (1,)."""
        lo, hi = thresholds_for(*self._range(name, grid.bits), grid, self.slack)
        return torch.tensor([lo], dtype=torch.float64), torch.tensor([hi], dtype=torch.float64)

    def _range(self, name: str, bits: int) -> Range:
        preferred = (self.narrow, self.ranges) if bits <= _INT4_BITS else (self.ranges, self.narrow)
        return next(part[name] for part in preferred if name in part)

    # ------------------------------------------------------------ modes
    def float_patterns(self) -> list[str]:
        """Patterns of the nodes that stay float."""
        return [glob.escape(n) for n, mode in self.modes.items() if _MODES[mode] is None]

    def fixed_bits(self, graph: Graph, group_of: Mapping[str, str]) -> dict[str, int]:
        """The bits of the groups that nodes with an integer mode read and write, as patterns of `fix_bits`.

        If nodes request different bits of a group, the most are taken.

        Args:
            group_of: by quantized edge, the key of its group.
        """
        groups = set(group_of.values())
        bits_of: dict[str, int] = {}
        for name, mode in self.modes.items():
            mode_bits = _MODES[mode]
            if mode_bits is not None:
                for key, bits in _requested_bits(graph, graph[name], mode_bits, group_of):
                    if key in groups:
                        bits_of[key] = max(bits, bits_of.get(key, 0))
        return {glob.escape(key): bits for key, bits in bits_of.items()}


def _requested_bits(
    graph: Graph, node: Node, bits: tuple[int, int], group_of: Mapping[str, str]
) -> Iterator[tuple[str, int]]:
    """The groups that a node reads and writes, each with the bits that its mode requests.

    Args:
        bits: of the weight and of the data.
    """
    weight, data = bits
    for edge in node.edges:
        yield group_of.get(str(edge), str(edge)), weight if graph[graph.source(edge)].op == CONST else data
    if weight == data == 8:
        yield f"{node.name}:out", data


def _node_called(name: str, known: Iterable[str]) -> str:
    """The node that a table names, with or without the type of the operator."""
    with_type = _NAME_WITH_TYPE.fullmatch(name)
    for candidate in (name, with_type[1] if with_type else name):
        if candidate in known:
            return candidate
    raise HagoError(f"the tables name {name!r}, which is not a node of the model.{did_you_mean(name, known)}")


# ---------------------------------------------------------------- reading the user's arguments
def make_given_ranges(
    thresholds: ThresholdsLike | GivenRanges | None, modes: ModesLike | None, hardware: Hardware
) -> GivenRanges:
    """Make the GivenRanges of the user's arguments `thresholds` and `modes`.

    Args:
        thresholds: (low, high) by node, a calibration table, or the path of one. From a row of a table, hardware with
            an affine scheme uses the minimum and the maximum, and other hardware the threshold and the sign of the
            minimum.
        modes: modes by node, a quantize table, or the path of one.

    Raises:
        HagoError: a file cannot be read or is not a table, a range is not finite or does not contain 0, or hago has no
            counterpart of a mode.
    """
    named = dict(_modes(modes))
    for name, mode in named.items():
        if mode.upper() not in _MODES:
            known = ", ".join(_MODES)
            hint = "" if mode.upper() in MODES else did_you_mean(mode.upper(), _MODES)
            raise HagoError(f"the quantize table runs {name!r} in {mode}; hago has counterparts of {known}.{hint}")
    named = {name: mode.upper() for name, mode in named.items()}
    if isinstance(thresholds, GivenRanges):
        return GivenRanges(thresholds.ranges, thresholds.narrow, named, thresholds.slack)
    if thresholds is None:
        return GivenRanges(modes=named)
    if isinstance(thresholds, Mapping):
        return GivenRanges({n: _checked(n, ends) for n, ends in thresholds.items()}, modes=named)
    table = thresholds if isinstance(thresholds, CalibrationTable) else _read(thresholds, parse_calibration_table)
    two_sided = hardware.activation.scheme in TWO_SIDED
    rows, int4_rows = ({n: _of_row(row, two_sided) for n, row in part.items()} for part in (table.rows, table.int4))
    return GivenRanges(rows, int4_rows, named, PRINTED_SLACK)


def _modes(modes: ModesLike | None) -> Mapping[str, str]:
    if modes is None or isinstance(modes, Mapping):
        return modes or {}
    return (modes if isinstance(modes, QuantizeTable) else _read(modes, parse_quantize_table)).modes


def _read(path: str | PathLike[str], parse: Any) -> Any:
    try:
        text = read_file(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise HagoError(f"cannot read table {str(path)!r}: {error}") from None
    try:
        return parse(text)
    except HagoError as error:
        raise HagoError(f"table {str(path)!r}: {error}") from None


def _of_row(row: Row, two_sided: bool) -> Range:
    if two_sided:
        return min(row.minimum, 0.0), max(row.maximum, 0.0)
    return (-row.threshold if row.minimum < 0 else 0.0), row.threshold


def _checked(name: str, ends: Sequence[float]) -> Range:
    try:
        low, high = (float(v) for v in ends)
    except (TypeError, ValueError):
        raise DataError(f"the range of {name!r} is {shortened(ends)}; expected (low, high)") from None
    if not (math.isfinite(low) and math.isfinite(high) and low <= 0 <= high):
        raise DataError(f"the range of {name!r} is ({low}, {high}); expected finite numbers with low <= 0 <= high")
    return low, high
