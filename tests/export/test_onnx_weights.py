"""ONNX files of float nodes whose weights are stored as integers, run by ONNX Runtime."""

from __future__ import annotations

import pytest
import torch
from building import Builder, seeded
from plan.test_weight_only import INT4, MAC, REAL, chip, network
from plans import resolver_of

from hago.arithmetic.types import Edge
from hago.export.onnx.export import make_onnx
from hago.export.onnx.verification import check_onnx
from hago.hardware.hardware import OpDesc
from hago.plan.plan import Plan

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def kinds(plan: Plan, form: str) -> dict[str, str]:
    """The element types of the integers in the file, after a check in ONNX Runtime."""
    file = make_onnx(plan, form)
    result = check_onnx(file, plan, [[seeded(4, 3, 6, 6, seed=5)]])
    assert result.same and all(p.largest < 1e-4 for p in result.outputs), str(result)
    names = {i.name: onnx.TensorProto.DataType.Name(i.data_type) for i in file.model.graph.initializer}
    assert {n.input[0] for n in file.model.graph.node if n.op_type == "DequantizeLinear"} >= set(map(str, plan.weights))
    return {str(e): names[str(e)] for e in plan.weights}


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
@pytest.mark.parametrize("scheme", ["symmetric", "affine"])
@pytest.mark.parametrize(("stored", "kind"), [("int4", "INT4"), ("uint4", "UINT4"), ("int8", "INT8"), ("int5", "INT8")])
def test_weights_are_dequantized_in_the_file(stored: str, kind: str, scheme: str, form: str) -> None:
    """The weights of Conv and Gemm, also with a zero point per channel."""
    hardware = chip(OpDesc(["float32", stored], "float32"), scheme=scheme)
    resolver = resolver_of(network(), hardware, [seeded(4, 3, 6, 6)])
    plan = resolver(resolver.space.widest())
    zeros = plan.weights[Edge("fc", 1)].qparams.zero_point
    assert scheme == "symmetric" or stored.endswith("4") or zeros.unique().numel() > 1
    assert kinds(plan, form) == dict.fromkeys(["conv:1", "fc:1", "again:1"], kind)


def test_products_are_summed_in_float() -> None:
    """ONNX Runtime fuses these into MatMulNBits, which rounds data to 8 bits unless the session says otherwise."""
    b = Builder()
    x = b.call("reshape", b.input(3, 6, 6, name="x"), name="rows", shape=[-1, 3, 36])
    graph = b.graph(b.call("matmul", b.linear(x, seeded(64, 36), name="fc"), b.const(seeded(64, 8), "w"), name="last"))
    resolver = resolver_of(graph, chip(INT4, MAC, REAL), [seeded(4, 3, 6, 6)])
    plan = resolver(resolver.space.widest())
    assert kinds(plan, "qdq") == {"fc:1": "INT4", "last:1": "INT4"}


def test_zero_points_of_four_bits_are_those_of_their_channels() -> None:
    """Each channel has its own zero point in the file."""
    b = Builder()
    weight = torch.cat([seeded(2, 8) + 1.0, seeded(2, 8) - 1.0])
    graph = b.graph(b.linear(b.input(8, name="x"), weight, name="fc"))
    hardware = chip(OpDesc(["float32", "uint4"], "float32"), scheme="affine")
    plan = resolver_of(graph, hardware, [seeded(4, 8)])({"fc:1": 4})
    file = make_onnx(plan, "qdq")
    (zero,) = [i for i in file.model.graph.initializer if i.name == "fc:1:zero"]
    exported = onnx.numpy_helper.to_array(zero).astype("int64").tolist()
    assert exported == plan.weights[Edge("fc", 1)].qparams.zero_point.flatten().tolist() and len(set(exported)) > 1
