"""A table of the operators that a piece of hardware can run, for `hago hardware show`."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

from hago.hardware.hardware import Hardware, OpDesc
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
    """The signatures of a piece of hardware, as a table that prints itself. Made by `explain_hardware`.

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


def explain_hardware(hardware: Hardware) -> HardwareTable:
    """Make the table of a piece of hardware: the dtypes, register and requantization of every signature, and the file
    that it comes from."""
    how, origin = hardware.requantize, hardware.origin or "Python"
    form: str = how.form
    if how.form == "multiplier_shift":
        form += f" of {how.multiplier_bits} bits{' in two stages' if how.two_stage else ''}"
        form += f" found by {how.search}" if how.search != "nearest" else ""
        form += f" rounded {how.shift_rounding}" if how.shift_rounding else ""
        form += f", {how.wide} for wide registers" if how.wide else ""
    head = (
        f"{hardware.name}: activations {hardware.activation.scheme} {hardware.activation.granularity}, "
        f"weights {hardware.weight.scheme} {hardware.weight.granularity}, requantize {form}, "
        f"rounding {how.rounding}, other ops {hardware.other_ops}"
    )
    rows = [_explain(op, d, how.form, origin) for op, descs in hardware.ops.items() for d in descs]
    return HardwareTable(head, tuple(rows))


def _explain(op: str, desc: OpDesc, form: str, origin: str) -> SignatureRow:
    integer = desc.is_integer
    return SignatureRow(
        op=op,
        operands=tuple(map(str, desc.in_dtypes)),
        result=str(desc.out_dtype),
        register=str(desc.register.dtype) if integer else "-",
        overflow=desc.register.on_overflow if integer else "-",
        requantize=(f"{form} at {desc.requantize_at}{_fixed(desc)}") if integer else "-",
        form=desc.form or "-",
        source=f"{origin}: {desc.name}" if desc.name else origin,
    )


def _fixed(desc: OpDesc) -> str:
    fixed = desc.fixed_out
    return "" if fixed is None else f", fixed to {fixed.scale:g} {fixed.zero_point:+d}"
