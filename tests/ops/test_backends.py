"""Tables of the native engine have every op, or leave it to the reference by name; ONNX: see tests/export."""

from __future__ import annotations

from hago.ops import OPS
from hago.runtime.native.kernels import KERNELS
from hago.runtime.native.layouts import JOINERS, MOVERS


def test_the_native_engine_has_kernels_for_every_integer_op_or_says_that_it_has_none() -> None:
    integer = {name for name, rule in OPS.items() if rule.integer is not None or rule.forms}
    looked_up = {name for name, rule in OPS.items() if rule.integer is not None and rule.integer.table}
    assert set(KERNELS) <= integer
    assert not integer - set(KERNELS) - looked_up, "add them to KERNELS, or to _NO_KERNELS beside it"


def test_tables_of_movers_are_facts_of_the_rules() -> None:
    assert all(OPS[op].moves_values for op in MOVERS | JOINERS)
    for op in {op for op, rule in OPS.items() if rule.moves_values} - MOVERS - JOINERS:
        form = OPS[op].integer
        assert form is None or "plain" in form.slots, op  # indices are no values that can be moved
