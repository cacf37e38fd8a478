"""What ONNX Runtime makes of the files: nothing between integer kernels that quantize_static's files have not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from building import Builder, seeded
from networks import images
from plans import resolver_of
from torch import Tensor

from hago.export.onnx.export import make_onnx
from hago.export.onnx.verification import OnnxCheck, check_onnx
from hago.graph.graph import Graph
from hago.hardware.file import load_hardware
from hago.plan.plan import Plan

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

CHIP = load_hardware("onnxruntime_cpu")
FORMS = pytest.mark.parametrize("form", ["qdq", "qoperator"])


def widest(graph: Graph, inputs: list[Tensor], estimator: str = "max_range") -> Plan:
    resolver = resolver_of(graph, CHIP, inputs, estimator)
    return resolver(resolver.space.widest())


def fused(plan: Plan, form: str, folder: Path) -> list[Any]:
    """The nodes of ONNX Runtime's optimized model."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "fused.onnx")
    exported = make_onnx(plan, form).model.SerializeToString()
    ort.InferenceSession(exported, options, providers=["CPUExecutionProvider"])
    return list(onnx.load(str(folder / "fused.onnx")).graph.node)


def kinds(nodes: list[Any]) -> Counter[str]:
    return Counter(n.op_type for n in nodes)


def checked(plan: Plan, inputs: list[Tensor], form: str) -> OnnxCheck:
    return check_onnx(make_onnx(plan, form), plan, [inputs])


@FORMS
@pytest.mark.parametrize("tail", ["reshape", "squeeze", "mean"])
def test_channels_stay_last_behind_a_clip(tail: str, form: str, tmp_path: Path) -> None:
    """relu6 is a Clip where 6 is no end of the grid, and a global pooling behind it needs no transposition."""
    b = Builder()
    x = b.conv2d(b.input(3, 6, 6, name="x"), seeded(8, 3, 3, 3), name="conv")
    x = b.call("clamp", x, min=0.0, max=6.0, name="relu6")
    if tail == "mean":
        x = b.call("mean", x, axes=[2, 3], keepdim=False, count=36, name="flat")
    else:
        x = b.call("adaptive_avg_pool2d", x, output_size=[1, 1], input_size=[6, 6], name="pool")
        attrs = {"shape": [-1, 8]} if tail == "reshape" else {"axes": [2, 3]}
        x = b.call(tail, x, name="flat", **attrs)
    graph = b.graph(b.linear(x, seeded(4, 8), name="last"))
    inputs = [images(2, 3, 6, 6)]
    plan = widest(graph, inputs, "power2_range")
    assert plan.nodes["relu6"].out.qmax * float(plan.nodes["relu6"].out.scale) > 6
    nodes = fused(plan, form, tmp_path)
    if (tail, form) != ("mean", "qoperator"):  # sums of integers are written out there
        (pool,) = (n for n in nodes if n.op_type == "QLinearGlobalAveragePool")
        assert [a.i for a in pool.attribute if a.name == "channels_last"] == [1]
        assert kinds(nodes)["Transpose"] == 1 and kinds(nodes)["Clip"] == 1
    result = checked(plan, inputs, form)
    assert result.same and result.compared, str(result)


@FORMS
def test_zeros_around_reals_are_a_part_of_the_integer_convolution(form: str) -> None:
    b = Builder()
    pad = b.call("pad", b.input(3, 8, 8, name="x"), pad=[1, 2, 0, 1], mode="constant", value=0.0, name="pad")
    graph = b.graph(b.conv2d(pad, seeded(4, 3, 3, 3), name="conv"))
    inputs = [images(2, 3, 8, 8) - 3.0]  # zero is no integer's edge
    plan = widest(graph, inputs)
    assert "pad" not in plan.nodes and "conv" in plan.nodes
    exported = make_onnx(plan, form)
    assert not [n for n in exported.model.graph.node if n.op_type == "Pad"]
    result = check_onnx(exported, plan, [inputs])
    assert result.same and result.compared and not sum(p.differing for p in result.outputs), str(result)
    places = {p.place: p.compared for p in result.places}
    assert places == {"conv:0": inputs[0].numel(), "conv": 2 * 4 * 9 * 11}  # what is quantized, and the sums of ours


@FORMS
def test_padding_by_itself_moves_bytes(form: str, tmp_path: Path) -> None:
    b = Builder()
    x = b.conv2d(b.input(3, 8, 8, name="x"), seeded(4, 3, 3, 3), name="first")
    x = b.call("pad", x, pad=[1, 1, 1, 1], mode="reflect", value=0.0, name="pad")
    plan = widest(b.graph(b.conv2d(x, seeded(4, 4, 3, 3), name="last")), [images(2, 3, 8, 8)])
    result = kinds(fused(plan, form, tmp_path))
    assert result["Pad"] == 1 and result["QuantizeLinear"] == result["DequantizeLinear"] == 1
    assert checked(plan, [images(2, 3, 8, 8)], form).same


def test_silu_is_one_operator(tmp_path: Path) -> None:
    b = Builder()
    x = b.conv2d(b.input(3, 8, 8, name="x"), seeded(4, 3, 3, 3), name="first")
    graph = b.graph(b.conv2d(b.call("silu", x, name="silu"), seeded(4, 4, 3, 3), name="last"))
    inputs = [images(2, 3, 8, 8)]
    plan = widest(graph, inputs)
    result = kinds(fused(plan, "qdq", tmp_path))
    assert result["QuickGelu"] == 1 and result["DequantizeLinear"] == 2 and not result["Sigmoid"]
    assert checked(plan, inputs, "qdq").tolerable


def branches(plain: bool) -> Graph:
    """Two branches of very different ranges, joined; then, unless `plain`, that joined with what becomes of it."""
    b = Builder()
    x = b.conv2d(b.input(3, 6, 6, name="x"), seeded(4, 3, 3, 3), name="stem")
    wide = b.call("relu", b.conv2d(x, seeded(4, 4, 3, 3, size=3.0), name="wide"), name="wide_relu")
    narrow = b.call("relu", b.conv2d(x, seeded(4, 4, 1, 1, seed=1), name="narrow"), name="narrow_relu")
    joined = b.call("concat", wide, narrow, axis=1, name="joined")
    last = b.conv2d(joined, seeded(4, 8, 3, 3), name="last")
    if plain:
        return b.graph(last)
    again = b.call("concat", joined, last, axis=1, name="again")
    return b.graph(b.conv2d(again, seeded(4, 12, 1, 1), name="end"))


@pytest.mark.parametrize("estimator", ["mse", "power2_range"])
def test_a_concatenation_copies(estimator: str, tmp_path: Path) -> None:
    inputs = [images(2, 3, 6, 6)]
    plan = widest(branches(plain=True), inputs, estimator)
    nodes = fused(plan, "qdq", tmp_path)
    constants = onnx.load(str(tmp_path / "fused.onnx")).graph.initializer
    values = {c.name: onnx.numpy_helper.to_array(c) for c in constants}
    (joined,) = (n for n in nodes if n.op_type == "QLinearConcat")
    scales, zeros = ({float(values[i]) for i in joined.input[k::3]} for k in (0, 1))
    assert len(scales) == len(zeros) == 1
    assert checked(plan, inputs, "qdq").same


@FORMS
@pytest.mark.parametrize("bits", [8, 6])
def test_a_joined_operand_that_others_read(bits: int, form: str, tmp_path: Path) -> None:
    """Its change of scale is the table of the concatenation, where the plan's integers are those of the table."""
    inputs = [images(2, 3, 6, 6)]
    resolver = resolver_of(branches(plain=False), CHIP, inputs, "mse")
    plan = resolver({**resolver.space.widest(), "last:out": bits})
    assert plan.nodes["again"].simqs[0] is not None and plan.nodes["again"].simqs[1] is None
    result = kinds(fused(plan, form, tmp_path))
    if form == "qdq":
        assert (result["Cast"] == 0) == (bits == 8)
    report = checked(plan, inputs, form)
    assert report.same and report.compared, str(report)


@pytest.mark.parametrize("chip", ["x86_vnni", "sample", "onnxruntime_cpu"])
@pytest.mark.parametrize("op", ["relu", "clamp", "pad", "max_pool2d"])
def test_what_follows_a_sum_that_stays_wide(chip: str, op: str) -> None:
    """Where edges requantize, a sum is real in QDQ form, and so is what moves it or cuts it off."""
    attrs: dict[str, dict[str, Any]] = {
        "clamp": {"min": -1.0, "max": 1.0},
        "pad": {"pad": [1, 0, 0, 1], "mode": "reflect", "value": 0.0},
        "max_pool2d": {"kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0], "dilation": [1, 1]},
    }
    ceil = {"ceil_mode": False} if op == "max_pool2d" else {}
    b = Builder()
    x = b.conv2d(b.input(3, 6, 6, name="x"), seeded(4, 3, 3, 3), name="first")
    graph = b.graph(b.conv2d(b.call(op, x, **attrs.get(op, {}), **ceil), seeded(4, 4, 3, 3), name="last"))
    resolver = resolver_of(graph, load_hardware(chip), [seeded(2, 3, 6, 6)], "power2_range")
    plan = resolver({k: min(bits, 8) for k, bits in resolver.space.widest().items()})
    result = checked(plan, [seeded(3, 3, 6, 6, seed=3)], "qdq")
    assert result.same and result.compared, str(result)


@FORMS
@pytest.mark.parametrize("chip", ["x86_vnni", "onnxruntime_cpu", "openvino_cpu"])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)])
def test_a_product_by_constant_matrices(batch: tuple[int, ...], chip: str, form: str) -> None:
    """A scale for every column, of one matrix or of several."""
    b = Builder()
    x = b.input(*(batch[:-1]), 3, 6, 5, name="x")
    graph = b.graph(b.call("matmul", x, b.const(seeded(*batch, 5, 4)), name="product"))
    inputs = [seeded(2, *batch[:-1], 3, 6, 5)]
    resolver = resolver_of(graph, load_hardware(chip), inputs, "power2_range")
    plan = resolver({k: min(bits, 8) for k, bits in resolver.space.widest().items()})
    weight = plan.nodes["product"].operands[1]
    assert weight is not None and weight.per_channel
    result = checked(plan, inputs, form)
    assert result.same and result.compared, str(result)
