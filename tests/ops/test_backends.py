"""The native engine has a kernel for every integer op, or names it as left to the reference; ONNX: see tests/export."""

from __future__ import annotations

from hago.ops import OPS
from hago.runtime.native.kernels import KERNELS
from hago.runtime.native.layouts import JOINERS, MOVERS

#: Ops whose integers the native engine computes as the reference does, for want of a kernel.
ON_THE_REFERENCE = frozenset(
    {"conv3d", "conv_transpose1d", "conv_transpose2d", "div", "embedding", "index", "neg", "softmax"}
)


def test_the_native_engine_has_every_integer_op_or_leaves_it_to_the_reference() -> None:
    integer = {name for name, rule in OPS.items() if rule.integer is not None or rule.forms}
    looked_up = {name for name, rule in OPS.items() if rule.integer is not None and rule.integer.table}
    assert set(KERNELS) <= integer
    assert integer - set(KERNELS) - looked_up == ON_THE_REFERENCE


def test_tables_of_movers_are_facts_of_the_rules() -> None:
    assert all(OPS[op].moves_values for op in MOVERS | JOINERS)
    assert {op for op, rule in OPS.items() if rule.moves_values} - MOVERS - JOINERS == {"embedding", "index"}
