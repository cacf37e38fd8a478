"""Every table that a backend has of ops either has an op or refuses it by name."""

from __future__ import annotations

import pytest

from hago.errors import UnsupportedOp
from hago.export.onnx.operators import REAL, check_real, emit_real
from hago.export.onnx.writer import Writer
from hago.graph.graph import INPUT, Graph, Node
from hago.ops import OPS
from hago.runtime.native.kernels import KERNELS
from hago.runtime.native.layouts import JOINERS, MOVERS

from .samples import KEYS, compute_nodes, graph_of

#: Ops whose integers the native engine computes as the reference does, for want of a kernel.
ON_THE_REFERENCE = frozenset(
    {"conv3d", "conv_transpose1d", "conv_transpose2d", "div", "embedding", "index", "neg", "softmax"}
)


def test_onnx_has_every_op() -> None:
    assert set(REAL) <= set(OPS)
    for name, index in KEYS:
        (node,) = compute_nodes(graph_of(name, index))
        assert check_real(node) is None, name
    assert {op for op in OPS if op not in REAL} == set()


def test_onnx_refuses_an_op_that_it_lacks_by_name() -> None:
    node = Node("the_node", "abs", ("x",), {}, (1, 4))
    graph = Graph((Node("x", INPUT, (), {"dtype": "float32"}, (1, 4)), node), ("x",), ("the_node",))
    assert "abs" in str(check_real(node))
    with pytest.raises(UnsupportedOp, match="the_node.*abs"):
        emit_real(Writer(graph), node, ["x"], "out")


def test_the_native_engine_has_every_integer_op_or_leaves_it_to_the_reference() -> None:
    integer = {name for name, rule in OPS.items() if rule.integer is not None or rule.forms}
    looked_up = {name for name, rule in OPS.items() if rule.integer is not None and rule.integer.table}
    assert set(KERNELS) <= integer
    assert integer - set(KERNELS) - looked_up == ON_THE_REFERENCE


def test_tables_of_movers_are_facts_of_the_rules() -> None:
    assert all(OPS[op].moves_values for op in MOVERS | JOINERS)
    assert {op for op, rule in OPS.items() if rule.moves_values} - MOVERS - JOINERS == {"embedding", "index"}
