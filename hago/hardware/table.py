"""The table of the operators that a piece of hardware can run: `str` of a Hardware, and `hago hardware show`."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

from hago.serialization.text_table import table


@dataclass(frozen=True, slots=True)
class SignatureRow:
    """One line of a HardwareTable: a signature of an op. Float signatures have `-` instead of a register."""

    op: str
    operands: tuple[str, ...]
    result: str
    register: str
    overflow: str
    requantize: str
    form: str
    source: str


@dataclass(frozen=True, slots=True)
class HardwareTable:
    """The signatures of a piece of hardware, as a table that prints itself. Made by `Hardware.table`.

    Args:
        head: the properties that all ops share, in words.
        rows: the signatures of each op, preferred ones first.
    """

    head: str
    rows: tuple[SignatureRow, ...]

    def to_json(self) -> dict[str, Any]:
        """The table as JSON values."""
        return {"head": self.head, "rows": [asdict(r) for r in self.rows]}

    def __str__(self) -> str:
        titles = ("op", "operands", "result", "register", "overflow", "requantize", "form", "source")
        rows = [(r.op, ", ".join(r.operands), *astuple(r)[2:]) for r in self.rows]
        return "\n".join([self.head, *table(titles, rows)])
