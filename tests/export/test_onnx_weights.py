"""ONNX files of float nodes whose weights are stored as integers, run by ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from building import Builder, seeded
from plan.test_weight_only import INT4, MAC, REAL, chip, network
from plans import resolver_of

from hago.arithmetic.types import INT32, Edge
from hago.export.onnx.export import make_onnx
from hago.export.onnx.verification import check_onnx
from hago.graph.graph import Graph
from hago.hardware.hardware import Accumulator, Groups, Hardware, OpDesc, TensorScheme
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


# ---------------------------------------------------------------- groups
def grouped_network() -> Graph:
    """A convolution, a linear layer with a bias on rows, and two of which one reads several axes."""
    b = Builder()
    x = b.conv2d(b.input(3, 6, 6, name="x"), seeded(5, 3, 3, 3), seeded(5), name="conv", padding=[0, 0])
    flat = b.call("reshape", x, name="flat", shape=[-1, 80])
    rows = b.call("reshape", x, name="rows", shape=[-1, 4, 20])
    first = b.linear(flat, seeded(7, 80, seed=1), seeded(7), name="fc")
    second = b.linear(rows, seeded(6, 20, seed=2), name="several")
    return b.graph(first, second, b.call("linear", flat, b.const(seeded(3, 80, seed=4), "w"), name="plain"))


def grouped(size: int, stored: str, scheme: str = "symmetric") -> Plan:
    desc = OpDesc(["float32", stored], "float32", groups=Groups(size), min_bits=3)
    hardware = Hardware({"conv2d": (desc,), "linear": (desc,)}, weight=TensorScheme(scheme, "per_channel"))
    resolver = resolver_of(grouped_network(), hardware, [seeded(4, 3, 6, 6)])
    return resolver(resolver.space.widest())


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
@pytest.mark.parametrize("scheme", ["symmetric", "affine", "hago"])
@pytest.mark.parametrize(
    ("stored", "size", "product"),
    [("int4", 32, True), ("uint4", 16, True), ("int3", 64, True), ("int4", 1024, True), ("int4", 24, False),
     ("int4", 8, False), ("int8", 32, False), ("int16", 32, False)],
)  # fmt: skip
def test_groups_are_blocks(stored: str, size: int, product: bool, scheme: str, form: str) -> None:
    """Linear layers of up to 4 bits are MatMulNBits, where it has such blocks; other weights are dequantized by
    blocks. ONNX Runtime computes both in float32."""
    plan = grouped(size, stored, scheme)
    file = make_onnx(plan, form)
    result = check_onnx(file, plan, [[seeded(4, 3, 6, 6, seed=5)]])
    assert result.same and all(p.largest < 1e-4 for p in result.outputs), str(result)
    by_kind: dict[str, list[str]] = {}
    for node in file.model.graph.node:
        by_kind.setdefault(node.op_type, []).append(node.input[1 if node.op_type == "MatMulNBits" else 0])
    layers = {"fc:1", "several:1", "plain:1"}
    assert set(by_kind.get("MatMulNBits", [])) == (layers if product else set())
    assert set(by_kind["DequantizeLinear"]) == ({"conv:1"} if product else {"conv:1", *layers})


def test_bytes_of_a_file_hold_two_weights_each() -> None:
    """The first entry of a pair in the low half, shifted by 8; zero points only where they are not 8."""
    plan = grouped(32, "int4")
    (weight,) = (i for i in make_onnx(plan, "qdq").model.graph.initializer if i.name == "fc:1")
    array = onnx.numpy_helper.to_array(weight)
    assert array.shape == (7, 3, 16) and array.dtype == "uint8"  # 80 entries are three blocks, the last filled up
    c = plan.weights[Edge("fc", 1)].integers
    assert [int(array[2, 1, 3]) & 15, int(array[2, 1, 3]) >> 4] == (c[2, 38:40] + 8).tolist()
    names = {i.name for i in make_onnx(plan, "qdq").model.graph.initializer}
    assert "fc:1:zero" not in names
    affine = make_onnx(grouped(32, "uint4", "affine"), "qdq")
    assert "fc:1:zero" in {i.name for i in affine.model.graph.initializer}


def test_a_file_with_other_scales_differs() -> None:
    """The check bites: scales of neighbouring groups that are exchanged show."""
    plan = grouped(32, "int4")
    weight = plan.weights[Edge("fc", 1)]
    other = replace(weight, qparams=replace(weight.qparams, scale=weight.qparams.scale.roll(1, 1)))
    file = make_onnx(replace(plan, weights={**plan.weights, Edge("fc", 1): other}), "qdq")
    result = check_onnx(file, plan, [[seeded(4, 3, 6, 6, seed=5)]])
    assert max(p.largest for p in result.outputs) > 1e-2


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_products_of_groups_are_those_of_joined_integers(form: str) -> None:
    """ONNX multiplies the integers times their multipliers, which are bytes: exact, at twice the bits."""
    desc = OpDesc(["int8", "int4", "int32"], "int8", Accumulator(INT32), "output", groups=Groups(16, 4))
    floats = OpDesc("float32", "float32")
    symmetric = TensorScheme("symmetric")
    hardware = Hardware(
        {"conv2d": (desc,), "linear": (desc,), "reshape": (OpDesc("int8", "int8"), floats)},
        weight=TensorScheme("symmetric", "per_channel"), activation=symmetric,
    )  # fmt: skip
    resolver = resolver_of(grouped_network(), hardware, [seeded(4, 3, 6, 6)])
    plan = resolver(resolver.space.widest())
    assert all(plan.nodes[n].groups for n in ("conv", "fc", "several", "plain"))
    result = check_onnx(make_onnx(plan, form), plan, [[seeded(4, 3, 6, 6, seed=5)]])
    assert result.same, str(result)
