"""The report of which kernel runs which node, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Which kernel runs a node, and why."""

    node: str
    op: str
    kernel: str
    why: str


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Node by node, which kernel runs it: prints as a table.

    Args:
        head: what the machine can do.
        rows: one per node that is computed, in order.
    """

    head: str
    rows: tuple[KernelRow, ...]

    @property
    def kernels(self) -> dict[str, int]:
        """How many nodes each kernel runs."""
        found: dict[str, int] = {}
        for row in self.rows:
            found[row.kernel] = found.get(row.kernel, 0) + 1
        return found

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {"head": self.head, "kernels": self.kernels, "rows": [asdict(r) for r in self.rows]}

    def __str__(self) -> str:
        cells = [("node", "op", "kernel", "why"), *((r.node, r.op, r.kernel, r.why) for r in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)
        return "\n".join([self.head, *lines])
