"""ONNX files, run by ONNX Runtime: every float op, and random networks integer by integer."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from building import Builder, seeded
from networks import Small, images, randomized
from ops.samples import INTERNAL_KEYS, KEYS, at_batch, graph_of, inputs_of
from plans import points, resolver_of
from random_graphs import random_graph, random_inputs
from torch import Tensor

import hago
from hago.arithmetic.types import dtype
from hago.errors import HagoError
from hago.export.onnx.engines import PRECISE, onnxruntime
from hago.export.onnx.export import make_onnx
from hago.export.onnx.operators import OPERATORS
from hago.export.onnx.verification import OnnxCheck, check_onnx
from hago.graph.execute import run_real
from hago.graph.graph import Graph
from hago.hardware.file import load_hardware
from hago.hardware.hardware import Accumulator, Hardware, OpDesc
from hago.ops import OPS
from hago.plan.plan import Plan
from hago.runtime.reference import IntegerModel

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

CHIP = load_hardware("onnxruntime_cpu")


def float_plan(graph: Graph) -> Plan:
    """A Plan that quantizes nothing."""
    return Plan(graph, CHIP, OPS, {}, dict.fromkeys(graph.edges))


def run_file(graph: Graph, inputs: list[Tensor]) -> list[np.ndarray[Any, Any]]:
    run = onnxruntime(make_onnx(float_plan(graph)).model, threads=1)
    return list(run(dict(zip(graph.inputs, (t.numpy() for t in inputs), strict=True))).values())


# ---------------------------------------------------------------- float ops
#: Samples that ONNX cannot express, with the reason: windows of different sizes, and a divisor with incomplete windows.
REFUSED = {("adaptive_max_pool2d", 1): "maximum over windows", ("avg_pool2d", 4): "average with a divisor"}


@pytest.mark.parametrize("key", KEYS + INTERNAL_KEYS, ids=lambda k: f"{k[0]}-{k[1]}")
def test_every_op_in_float(key: tuple[str, int]) -> None:
    """The file is run with another batch size than it was made with."""
    graph = graph_of(*key)
    if key in INTERNAL_KEYS:
        inputs = [images(3, *(graph["x"].shape or ())[1:])]
    else:
        sample = OPS[key[0]].samples[key[1]]
        inputs = inputs_of(sample, at_batch(sample, 3, 5))
    if key in REFUSED:
        with pytest.raises(HagoError, match=f"node '.*': ONNX has no {REFUSED[key]}"):
            run_file(graph, inputs)
        return
    (theirs,) = run_file(graph, inputs)
    (ours,) = run_real(graph, inputs)
    assert theirs.dtype == ours.numpy().dtype
    np.testing.assert_allclose(theirs, ours.numpy(), rtol=2e-5, atol=2e-5)


# ---------------------------------------------------------------- networks
def checked(plan: Plan, inputs: list[Tensor], form: str) -> OnnxCheck:
    return check_onnx(make_onnx(plan, form), plan, [inputs])


#: Pairs of a hardware and a form that can express its Plans.
EXPRESSIBLE = [
    ("onnxruntime_cpu", "qdq"),
    ("onnxruntime_cpu", "qoperator"),
    ("x86_vnni", "qoperator"),
    ("vta", "qoperator"),
    ("tensorrt_gpu", "qoperator"),
]


@pytest.mark.parametrize(("chip", "form"), EXPRESSIBLE)
@pytest.mark.parametrize("seed", [7, 8, 13])
def test_random_networks(seed: int, chip: str, form: str) -> None:
    """Each node of the file, run on hago's integers, gives hago's integers, with the widest and with random bits."""
    graph = random_graph(seed)
    inputs = random_inputs(graph, seed)
    resolver = resolver_of(graph, load_hardware(chip), inputs, "power2_range" if chip == "vta" or seed == 7 else "mse")
    for bits in itertools.islice(points(resolver.space, seed), 0, 3, 2):
        result = checked(resolver(bits), inputs, form)
        assert result.same and result.compared > 0, str(result)


def test_a_wrong_weight_is_located() -> None:
    """One weight is off by a few quanta; the check reports that node and no other."""
    quantized = quantizer()
    file = make_onnx(quantized.plan)
    (weight,) = (c for c in file.model.graph.initializer if c.name == "body:1")
    values = onnx.numpy_helper.to_array(weight).copy()
    values[0, 0, 1, 1] += 50 if values[0, 0, 1, 1] < 0 else -50
    weight.CopyFrom(onnx.numpy_helper.from_array(values, "body:1"))
    result = check_onnx(file, quantized.plan, [[images(8, 1, 8, 8)]])
    assert not result.same
    assert {p.place for p in result.places if p.differing} == {"body"}
    assert "body (conv2d): " in str(result) and result.to_json()["differing"] == result.differing


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_a_scale_that_only_divides(form: str) -> None:
    """The integers do not change, and the nodes that read them use the new scale."""
    b = Builder()
    x = b.conv2d(b.input(3, 4, 4, name="x"), torch.randn(4, 3, 1, 1), name="conv")
    half = b.call("div", x, name="half", divisor=3.0)
    graph = b.graph(b.call("add", half, x, name="total"), half)
    inputs = [images(2, 3, 4, 4)]
    resolver = resolver_of(graph, CHIP, inputs)
    result = checked(resolver(resolver.space.widest()), inputs, form)
    assert result.same and all(p.largest < 1e-3 for p in result.outputs), str(result)


def conv_on(activation: str, weight: str) -> Hardware:
    """conv2d with operands of these dtypes."""
    desc = OpDesc([activation, weight, "int32"], activation, Accumulator(dtype("int32")), "output")
    return Hardware({"conv2d": [desc]}, requantize=CHIP.requantize, weight=CHIP.weight)


@pytest.mark.parametrize(
    ("activation", "weight", "opset", "kinds"),
    [("uint8", "int8", 17, {2, 3, 6}), ("int8", "int4", 21, {3, 22, 6}), ("int16", "int8", 21, {5, 3, 6})],
)
def test_the_opset_is_what_the_dtypes_need(activation: str, weight: str, opset: int, kinds: set[int]) -> None:
    b = Builder()
    graph = b.graph(b.conv2d(b.input(3, 6, 6, name="x"), torch.randn(4, 3, 3, 3), torch.randn(4), name="conv"))
    inputs = [images(2, 3, 6, 6)]
    resolver = resolver_of(graph, conv_on(activation, weight), inputs)
    plan = resolver({key: min(bits, 12) for key, bits in resolver.space.widest().items()})  # int16 has to be clipped
    exported = make_onnx(plan)
    assert exported.model.opset_import[0].version == opset
    assert {c.data_type for c in exported.model.graph.initializer} - {1} == kinds
    result = check_onnx(exported, plan, [inputs])
    assert result.tolerable and result.compared > 0, str(result)


def quantizer() -> hago.Quantizer:
    model = randomized(Small())
    return hago.quantize(model, "onnxruntime_cpu", [images(8, 1, 8, 8)])


def test_a_network_is_fused_whole(tmp_path: Path) -> None:
    """ONNX Runtime fuses every integer node into an integer kernel, and gives hago's outputs at any batch size."""
    import onnxruntime as ort

    quantized = quantizer()
    quantized.export_onnx(tmp_path / "net.onnx")
    options = ort.SessionOptions()
    options.add_session_config_entry(*PRECISE)
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    session = ort.InferenceSession(str(tmp_path / "net.onnx"), options, providers=["CPUExecutionProvider"])
    kinds = {node.op_type for node in onnx.load(str(tmp_path / "fused.onnx")).graph.node}
    assert {"QLinearConv", "QLinearAdd", "QGemm", "QLinearGlobalAveragePool"} <= kinds
    assert not kinds & {"Conv", "Gemm", "Add", "Relu"}
    for batch in (1, 5):
        x = images(batch, 1, 8, 8, seed=3)
        (theirs,) = session.run(None, {"x": x.numpy()})
        assert torch.from_numpy(theirs).equal(quantized.realize()(x))


def test_names_inputs_and_outputs_are_kept() -> None:
    b = Builder()
    x, y = b.input(3, 6, 6, name="image"), b.input(4, 6, 6, name="other")
    first = b.call("relu", b.conv2d(x, torch.randn(4, 3, 3, 3), padding=[1, 1], name="first"), name="act")
    total = b.call("add", first, y, name="total")
    graph = b.graph(total, first, total, x)
    inputs = [images(2, 3, 6, 6), images(2, 4, 6, 6)]
    resolver = resolver_of(graph, CHIP, inputs)
    plan = resolver(resolver.space.widest())
    exported = make_onnx(plan)
    assert [i.name for i in exported.model.graph.input] == ["image", "other"]
    metadata = {p.key: p.value for p in exported.model.metadata_props}
    assert metadata == {"hago.hardware": CHIP.name, "hago.form": "qdq"}
    names = [o.name for o in exported.model.graph.output]
    assert names[:2] == ["total", "act"] and len(set(names)) == 4
    assert {"first:real", "total:real"} <= {n.name for n in exported.model.graph.node}
    run = onnxruntime(exported.model, threads=1)
    theirs = run({"image": inputs[0].numpy(), "other": inputs[1].numpy()})
    for ours, other in zip(IntegerModel(plan).run(inputs), theirs.values(), strict=True):
        assert np.array_equal(ours.numpy(), other)


# ---------------------------------------------------------------- what is refused
def plan_on(hardware: Hardware | str, graph: Graph, inputs: list[Tensor]) -> Plan:
    chip = load_hardware(hardware) if isinstance(hardware, str) else hardware
    resolver = resolver_of(graph, chip, inputs, "power2_range" if chip.requantize.power_of_two else "mse")
    return resolver(resolver.space.widest())


def residual() -> Graph:
    b = Builder()
    x = b.input(3, 6, 6, name="x")
    first = b.conv2d(x, torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0)), padding=[1, 1], name="a")
    second = b.conv2d(x, torch.ones(4, 3, 1, 1), name="b")
    return b.graph(b.call("add", first, second, name="total"))


@pytest.mark.parametrize(
    ("chip", "fragments"),
    [
        ("x86_vnni", ["'total:0'", "23 bits in int32", "QuantizeLinear writes at most 16"]),
        ("arm_dot", ["nodes ('a', 'b'", "by an integer and a shift"]),
        ("vta", ["rounds half_up", "half to even"]),
        ("int16_accumulator", ["nodes ('a', 'b'", "int16", "wraps", "Take fewer bits"]),
    ],
)
def test_plans_that_onnx_cannot_express_are_refused(chip: str, fragments: list[str], tmp_path: Path) -> None:
    graph = residual()
    plan = plan_on(chip, graph, [images(2, 3, 6, 6)])
    path = tmp_path / "net.onnx"
    with pytest.raises(HagoError) as caught:
        hago.Quantizer(plan, None).export_onnx(path)  # type: ignore[arg-type]
    assert all(text in str(caught.value) for text in fragments), caught.value
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("activation", "weight"), [("int16", "int8"), ("int8", "int16")])
def test_sums_that_float32_rounds_are_refused_where_an_operand_has_16_bits(activation: str, weight: str) -> None:
    # ONNX adds products in int32 only where both factors have 8 bits
    b = Builder()
    conv = b.conv2d(b.input(16, 4, 4, name="x"), torch.randn(8, 16, 3, 3), name="conv")
    hardware = replace(conv_on(activation, weight), requantize=replace(CHIP.requantize, form="float32"))
    plan = plan_on(hardware, b.graph(conv), [images(2, 16, 4, 4)])
    assert plan.nodes["conv"].bound > 2**24 and plan.nodes["conv"].proved
    with pytest.raises(
        HagoError, match="node 'conv': sums reach .*; ONNX has conv2d with such operands in float32 only"
    ):
        make_onnx(plan, "qoperator")


def test_a_mean_whose_sum_may_wrap_is_refused() -> None:
    # the file adds in int64, which does not wrap
    b = Builder()
    conv = b.conv2d(b.input(4, 4, 4, name="x"), torch.ones(8, 4, 1, 1), name="conv")
    graph = b.graph(b.call("mean", conv, name="mean", axes=[2, 3], keepdim=False, count=16))
    ops = {
        "conv2d": [OpDesc(["int8", "int8", "int32"], "int32")],
        "mean": [OpDesc(["int32"], "int32")],
    }
    hardware = Hardware(ops, requantize=replace(CHIP.requantize, form="float32"), weight=CHIP.weight)
    inputs = [images(2, 4, 4, 4)]
    with pytest.raises(HagoError, match="node 'mean': sums may leave .* in int32, which wraps; .* in int64"):
        make_onnx(plan_on(hardware, graph, inputs), "qoperator")
    resolver = resolver_of(graph, hardware, inputs)
    plan = resolver({**resolver.space.widest(), "mean:0": 26})
    assert checked(plan, inputs, "qoperator").same


def test_a_requantize_form_that_the_export_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_on("x86_vnni", residual(), [images(2, 3, 6, 6)])
    monkeypatch.setattr("hago.export.onnx.refusals.REQUANTIZE_FORMS", frozenset({"shift"}))
    with pytest.raises(HagoError, match="float32 requantizes in another arithmetic"):
        make_onnx(plan, "qoperator")


def test_an_unknown_form() -> None:
    with pytest.raises(HagoError, match="unknown ONNX form 'qop'"):
        make_onnx(float_plan(residual()), "qop")


def test_an_unknown_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPERATORS, "add")
    with pytest.raises(HagoError, match=r"node 'total': ONNX export knows no op 'add'"):
        make_onnx(float_plan(residual()))


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(HagoError, match=r"pip install 'hago\[onnx\]'"):
        make_onnx(float_plan(residual()))


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(HagoError, match="cannot write"):
        quantizer().export_onnx(tmp_path / "no" / "net.onnx")


# ---------------------------------------------------------------- padding
def _padded(sizes: list[int], value: float = 0.0, also_out: bool = False) -> Graph:
    b = Builder()
    x = b.call("relu", b.conv2d(b.input(3, 8, 8, name="x"), seeded(4, 3, 3, 3), name="first"))
    pad = b.call("pad", x, pad=sizes, mode="constant", value=value, name="pad")
    convolutions = [
        b.conv2d(pad, seeded(4, 4, 3, 3), name="wide"),
        b.conv2d(pad, seeded(4, 4, 3, 3), padding=[1, 0], stride=[2, 2], name="strided"),
    ]
    return b.graph(*convolutions, *([pad] if also_out else []))


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
@pytest.mark.parametrize("sizes", [[0, 1, 0, 1], [2, 1, 0, 3], [1, 1]])
def test_zero_padding_is_merged_into_the_convolution(form: str, sizes: list[int]) -> None:
    graph = _padded(sizes)
    resolver = resolver_of(graph, CHIP, [images(4, 3, 8, 8)])
    plan = resolver(resolver.space.widest())
    exported = make_onnx(plan, form)
    assert not [n for n in exported.model.graph.node if n.op_type == "Pad"]
    result = check_onnx(exported, plan, [[images(3, 3, 8, 8)]])
    assert result.same and result.compared and not sum(p.differing for p in result.outputs), str(result)
    (ours, *_), (theirs, *_) = run_real(graph, [images(2, 3, 8, 8)]), run_file(graph, [images(2, 3, 8, 8)])
    np.testing.assert_allclose(theirs, ours.numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("graph", [_padded([0, 1], value=0.5), _padded([0, 1], also_out=True), _padded([0, -1])])
def test_padding_that_is_an_output_or_not_of_zeros_is_kept(graph: Graph) -> None:
    exported = make_onnx(float_plan(graph))
    assert [n.op_type for n in exported.model.graph.node].count("Pad") == 1
    (ours, *_), (theirs, *_) = run_real(graph, [images(2, 3, 8, 8)]), run_file(graph, [images(2, 3, 8, 8)])
    np.testing.assert_allclose(theirs, ours.numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_limits_of_a_clamp_are_integers(per_channel: bool, form: str) -> None:
    """If sums are an output, they are clipped to the integer nearest to the limit."""
    b = Builder()
    weight = seeded(4, 3, 3, 3) * (torch.arange(1, 5).reshape(4, 1, 1, 1) if per_channel else 1)
    clamped = b.call("clamp", b.conv2d(b.input(3, 6, 6, name="x"), weight), min=-0.101, max=0.2013)
    inputs = [seeded(2, 3, 6, 6)]
    plan = plan_on("x86_vnni" if per_channel else "cambricon_mlu", b.graph(clamped), inputs)
    assert plan.nodes[clamped].out.per_channel == per_channel
    result = checked(plan, inputs, form)
    (output,) = result.outputs
    assert result.same and output.largest < 1e-2, str(result)
    assert len({float(v) for v in IntegerModel(plan).run(inputs)[0].flatten()}) > 2


def test_batches_of_any_size_are_checked_with_the_batch_on_any_axis() -> None:
    b = Builder()
    turned = b.call("permute", b.linear(b.input(7, 5, name="x"), seeded(6, 5)), axes=(1, 0, 2))
    graph = b.graph(b.call("permute", b.linear(b.call("relu", turned), seeded(4, 6)), axes=(1, 0, 2)))
    plan, sizes = plan_on("onnxruntime_cpu", graph, [seeded(4, 7, 5)]), (4, 3, 1)
    result = check_onnx(make_onnx(plan), plan, [[seeded(n, 7, 5, seed=n)] for n in sizes])
    assert result.same and result.outputs[0].compared == sum(sizes) * 7 * 4
