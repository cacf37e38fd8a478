"""The start of a hardware file for a new chip: a copy of another, with notes on what to change."""

from __future__ import annotations

import re
from dataclasses import replace

from hago.errors import HardwareError
from hago.hardware.common_ops import DATA_MOVEMENT
from hago.hardware.file import available_hardware
from hago.hardware.hardware import Hardware


def start_hardware(name: str, base: Hardware) -> Hardware:
    """A description of a new chip to edit: the arithmetic, signatures and ops of `base`, with notes for the writer.

    Figures of costs are left out, since they are those of another chip, and so is its `processor`.

    Raises:
        HardwareError: the name is none for a file, or that of hardware that ships with hago.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][\w.+-]*", name, re.ASCII):
        raise HardwareError(f"hardware name {name!r}; expected letters, digits, _, -, + and ., e.g. my_dsp")
    if name in available_hardware():
        raise HardwareError(f"hardware {name!r} ships with hago; give the new one another name")
    ops = {op: tuple(replace(desc, cost={}) for desc in descs) for op, descs in base.ops.items()}
    ships = ", which ships with hago" if base.name in available_hardware() else ""
    source = f"Begun as a copy of {base.name}{ships}. Replace this by the documents of {name}."
    return replace(base, name=name, ops=ops, cost={}, sources=(source,), notes=_notes(base), processor="", origin="")


def _notes(base: Hardware) -> tuple[str, ...]:
    """One remark for every part of the file that its writer has to decide."""
    listed = [op for op in DATA_MOVEMENT if op in base.ops]
    left = [op for op in base.known_ops if op not in base.ops]
    unlisted = f" Not listed yet: {', '.join(left)}." if left else ""
    fate = "runs in float between the others" if base.other_ops == "float32" else "is refused"
    return (
        "To edit; delete each note that is settled. docs/hardware.md explains every key; hago hardware check FILE "
        "finds mistakes, and hago hardware show FILE prints what the file says.",
        "activation, weight: how real values become integers. Symmetric schemes have no zero point; per_channel gives "
        "each output channel of a weight its own scale.",
        "requantize, rounding: how a sum becomes a smaller integer. multiplier_shift is an integer multiplication and "
        "a shift, shift a shift alone (scales are powers of two), float32 a float multiplication.",
        "signatures: each names the dtypes of the operands (in) and of the result (out), and the register of its sums "
        "(accumulator), with what happens on overflow. min_bits and max_bits say which bits a search may choose.",
        "requantize_at: output if an op requantizes before it stores, edge if its consumers requantize what they read.",
        f"ops: the signatures of each op, preferred first. Delete what the chip cannot run. An op without a line "
        f"{fate} (other_ops).{unlisted}",
        f"Ops that only move data, which most chips run in any dtype: {', '.join(listed)}.",
        "cost: no figures are given; add clock_hz and bytes_per_cycle, and macs_per_cycle to signatures, to have "
        "cycles and latency (docs/cost.md). Weight bytes are known without them.",
    )
