"""The table of the operators that a piece of hardware can run: `str` of a Hardware, and `hago hardware show`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hago.serialization.summary import wrapped_lines
from hago.serialization.text_table import keep_beginning, table, wrap_words

#: The columns that give way where the table is too wide, the first group first.
_NARROW: Final = ({"requantize": wrap_words}, {"op": keep_beginning}, {"operands": wrap_words, "register": wrap_words})


@dataclass(frozen=True, slots=True)
class SignatureRow:
    """One line of a HardwareTable: a signature of an op. Float signatures have `-` instead of a register.

    Args:
        requantize: where its values are requantized: `edge` or `output`.
        signature: its name in the hardware file; empty if it has none.
        groups: the groups of its weight in words; empty if it has none.
    """

    op: str
    operands: tuple[str, ...]
    result: str
    register: str
    overflow: str
    requantize: str
    form: str
    signature: str
    groups: str = ""


@dataclass(frozen=True, slots=True)
class HardwareTable:
    """The signatures of a piece of hardware, as a table that prints itself. Made by `Hardware.table`.

    Args:
        head: the properties that all ops share, in words.
        requantize: the form of requantization.
        origin: the file that it comes from.
        rows: the signatures of each op, preferred ones first.
    """

    head: str
    requantize: str
    origin: str
    rows: tuple[SignatureRow, ...]

    def to_json(self) -> dict[str, Any]:
        """The table as JSON values."""
        rows = [
            {
                "op": r.op,
                "operands": list(r.operands),
                "result": r.result,
                "register": r.register,
                "overflow": r.overflow,
                "requantize": "-" if r.requantize == "-" else f"{self.requantize} at {r.requantize}",
                "form": r.form,
                "source": f"{self.origin}: {r.signature}" if r.signature else self.origin,
            }
            | ({"groups": r.groups} if r.groups else {})
            for r in self.rows
        ]
        return {"head": self.head, "rows": rows}

    def __str__(self) -> str:
        columns = {
            "op": [r.op for r in self.rows],
            "operands": [" ".join(r.operands) + (f", {r.groups}" if r.groups else "") for r in self.rows],
            "result": [r.result for r in self.rows],
            "register": [r.register if r.register == "-" else f"{r.register} {r.overflow}" for r in self.rows],
            "requantize": [r.requantize for r in self.rows],
            "form": [r.form for r in self.rows],
            "signature": [r.signature for r in self.rows],
        }
        # most chips compute every op by its first form
        kept = {title: cells for title, cells in columns.items() if title != "form" or {*cells} - {"-"}}
        rows = list(zip(*kept.values(), strict=True))
        lines = table(tuple(kept), rows, narrow=_NARROW)
        return "\n".join([*wrapped_lines(self.head), f"from {self.origin}", "", *lines])
