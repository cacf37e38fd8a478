"""The tables of ONNX operators: every op of hago has a converter or is refused by name with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from hago.errors import UnsupportedOp
from hago.export.onnx import operators
from hago.export.onnx.integers import DATA_MOVEMENT, INT32_SUMS
from hago.export.onnx.operators import OPERATORS, unknown_reason, write_float_node
from hago.export.onnx.qoperator import FUSED, QLINEAR
from hago.graph.graph import Node
from hago.ops import OPS

#: The ops in the tables of integer nodes.
INTEGER_OPS: Final = {*DATA_MOVEMENT, *INT32_SUMS, *FUSED, *(op for op, _ in QLINEAR)}


def node_of(op: str) -> Node:
    return Node("n", op, (), {}, (1,))


def misplaced(ops: Mapping[str, Any]) -> list[str]:
    """Ops that are in neither table, or in both."""
    return [op for op in ops if (op in OPERATORS) == (op in operators.UNSUPPORTED)]


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_row_or_a_reason(op: str) -> None:
    assert not misplaced({op: OPS[op]})
    reason = unknown_reason(node_of(op))
    assert (reason is None) == (op in OPERATORS) and reason != ""


def test_the_tables_name_only_ops_of_hago() -> None:
    assert {*OPERATORS, *operators.UNSUPPORTED} == {*OPS, "opaque"}
    assert set(OPS) >= INTEGER_OPS


def test_an_op_without_a_row_is_noticed_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert misplaced({**OPS, "fft": None}) == ["fft"]
    with pytest.raises(UnsupportedOp, match="node 'n': ONNX export knows no op 'fft'"):
        write_float_node(None, node_of("fft"), [], "n")  # type: ignore[arg-type]
    monkeypatch.setattr(operators, "UNSUPPORTED", {"fft": "ONNX has no complex numbers"})
    assert not misplaced({**OPS, "fft": None})
    assert unknown_reason(node_of("fft")) == "ONNX has no complex numbers"
