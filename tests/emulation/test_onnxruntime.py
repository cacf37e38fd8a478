"""The arithmetic of hardware_specs/onnxruntime_cpu.json, against ONNX Runtime itself, op by op on random integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hago.arithmetic.numerics import requantize
from hago.arithmetic.types import INT32, UINT8, ZERO, QParams
from hago.export.onnx.engines import PRECISE
from hago.hardware.file import load_hardware
from hago.ops import OPS
from hago.ops._rule import Site

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

HOW = load_hardware("onnxruntime_cpu").requantize
#: Scales whose ratios are no powers of two, powers of two with even zero points, and with odd ones.
CASES = {
    "any scales": ((0.0231, 117), (0.0457, 3), (0.0611, 77)),
    "powers of two": ((2**-5, 128), (2**-4, 0), (2**-4, 128)),
    "odd zero points": ((2**-5, 117), (2**-4, 3), (2**-4, 77)),
}
Params = tuple[float, int]


def qparams(params: Params) -> QParams:
    scale = torch.tensor(params[0], dtype=torch.float32).to(torch.float64)
    return QParams(scale, torch.tensor(params[1]), 0, 255, UINT8)


def stored(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def run_node(op: str, inputs: Mapping[str, Any], domain: str = "com.microsoft", fed: str = "", **attrs: Any) -> Tensor:
    """Run one node in ONNX Runtime; all inputs are constants except `fed`, by default the first."""
    arrays = {k: np.asarray(v) for k, v in inputs.items()}
    names = list(arrays)
    data = fed or names[0]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op, names, ["y"], domain=domain, **attrs)],
        "one",
        [onnx.helper.make_tensor_value_info(data, onnx.TensorProto.UINT8, arrays[data].shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.UINT8, None)],
        [onnx.numpy_helper.from_array(v, k) for k, v in arrays.items() if k != data],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.add_session_config_entry(*PRECISE)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {data: arrays[data]})[0])


def form(op: str, name: str, ins: list[tuple[Tensor, Params]], out: Params, attrs: Mapping[str, Any]) -> Tensor:
    """Run a form of an op in hago on stored integers."""
    operands = [qparams(p) for _, p in ins]
    centered = [q.to(torch.int64) - p.zero_point for (q, _), p in zip(ins, operands, strict=True)]
    rule, site = OPS[op].with_form(name), Site(tuple(operands), qparams(out), HOW)
    assert rule.integer is not None
    result = rule.compute_int(rule.integer.integer_attrs(attrs, site), *centered)
    return (result.clamp(-out[1], 255 - out[1]) + out[1]).to(torch.uint8)


def quantized(prefix: str, q: Tensor, params: Params) -> dict[str, Any]:
    return {prefix: q.numpy(), **params_of(prefix, params)}


def params_of(prefix: str, params: Params) -> dict[str, Any]:
    return {f"{prefix}_scale": np.float32(params[0]), f"{prefix}_zero": np.uint8(params[1])}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("op", "engine"), [("add", "QLinearAdd"), ("mul", "QLinearMul")])
def test_sums_and_products(op: str, engine: str, case: str) -> None:
    a, b, out = CASES[case]
    out = out if op == "add" else (out[0] * 2, out[1])
    x, y = stored(1, 4, 25_000), stored(2, 4, 25_000)
    theirs = run_node(engine, quantized("a", x, a) | quantized("b", y, b) | params_of("y", out))
    assert torch.equal(form(op, "qlinear", [(x, a), (y, b)], out, {}), theirs)


@pytest.mark.parametrize("case", CASES)
def test_an_operand_that_is_broadcast(case: str) -> None:
    a, b, out = CASES[case]
    x, y = stored(3, 2, 8, 30, 30), stored(4, 8, 1, 1)
    theirs = run_node("QLinearAdd", quantized("a", x, a) | quantized("b", y, b) | params_of("y", out))
    assert torch.equal(form("add", "qlinear", [(x, a), (y, b)], out, {}), theirs)


@pytest.mark.parametrize("case", CASES)
def test_concat(case: str) -> None:
    a, b, out = CASES[case]
    x, y = stored(5, 3, 10_000), stored(6, 3, 10_000)
    inputs = params_of("y", out) | quantized("a", x, a) | quantized("b", y, b)
    theirs = run_node("QLinearConcat", inputs, fed="a", axis=0)
    assert torch.equal(form("concat", "dequantize", [(x, a), (y, b)], out, {"axis": 0}), theirs)


@pytest.mark.parametrize("case", CASES)
def test_average_pooling(case: str) -> None:
    a, _, out = CASES[case]
    out = (out[0] / 2, out[1])
    x = stored(7, 4, 8, 64, 64)
    attrs = {"kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0], "ceil_mode": False}
    attrs |= {"count_include_pad": True, "divisor_override": None}
    inputs = quantized("x", x, a) | params_of("y", out)
    theirs = run_node("QLinearAveragePool", inputs, kernel_shape=[2, 2], strides=[2, 2])
    assert torch.equal(form("avg_pool2d", "qlinear", [(x, a)], out, attrs), theirs)


@pytest.mark.parametrize("case", CASES)
def test_average_of_whole_images(case: str) -> None:
    a, _, out = CASES[case]
    out = (out[0] / 8, out[1])
    x = stored(8, 200, 50, 7, 6)
    theirs = run_node("QLinearGlobalAveragePool", quantized("x", x, a) | params_of("y", out))
    attrs = {"output_size": [1, 1], "input_size": [7, 6]}
    assert torch.equal(form("adaptive_avg_pool2d", "qlinear", [(x, a)], out, attrs), theirs)


@pytest.mark.parametrize("case", CASES)
def test_convolution_with_a_scale_per_channel(case: str) -> None:
    a, _, out = CASES[case]
    generator = torch.Generator().manual_seed(9)
    x = stored(10, 2, 16, 20, 20)
    w = torch.randint(-127, 128, (32, 16, 3, 3), generator=generator, dtype=torch.int8)
    bias = torch.randint(-20_000, 20_000, (32,), generator=generator, dtype=torch.int32)
    w_scale = torch.rand(32, generator=generator) * 0.01 + 1e-4
    if case != "any scales":
        w_scale = torch.exp2(torch.round(torch.log2(w_scale)))
    inputs = quantized("x", x, a) | {"w": w.numpy(), "w_scale": w_scale.numpy(), "w_zero": np.int8(0)}
    inputs |= params_of("y", (out[0] * 4, out[1])) | {"bias": bias.numpy()}
    theirs = run_node("QLinearConv", inputs, domain="", pads=[1, 1, 1, 1])
    centered = torch.nn.functional.pad(x.double() - a[1], (1, 1, 1, 1))
    sums = torch.nn.functional.conv2d(centered, w.double(), bias.double()).to(torch.int64)
    scale = qparams(a).scale * w_scale.double().reshape(1, -1, 1, 1)
    register, target = QParams(scale, ZERO, INT32.min, INT32.max, INT32), qparams((out[0] * 4, out[1]))
    ours = requantize(sums, register, target, HOW) + target.zero_point
    assert torch.equal(ours.to(torch.uint8), theirs)


@pytest.mark.parametrize("case", CASES)
def test_a_linear_layer(case: str) -> None:
    a, _, out = CASES[case]
    generator = torch.Generator().manual_seed(11)
    x = stored(12, 300, 64)
    w = torch.randint(-127, 128, (64, 40), generator=generator, dtype=torch.int8)
    bias = torch.randint(-20_000, 20_000, (40,), generator=generator, dtype=torch.int32)
    w_scale = torch.rand(40, generator=generator) * 0.01 + 1e-4
    if case != "any scales":
        w_scale = torch.exp2(torch.round(torch.log2(w_scale)))
    inputs = quantized("a", x, a) | {"b": w.numpy(), "b_scale": w_scale.numpy(), "b_zero": np.zeros(40, np.int8)}
    theirs = run_node("QGemm", inputs | {"c": bias.numpy()} | params_of("y", (out[0] * 4, out[1])))
    sums = (x.to(torch.int64) - a[1]) @ w.to(torch.int64) + bias
    register = QParams(qparams(a).scale * w_scale.double(), ZERO, INT32.min, INT32.max, INT32)
    target = qparams((out[0] * 4, out[1]))
    assert torch.equal((requantize(sums, register, target, HOW) + target.zero_point).to(torch.uint8), theirs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("engine", "fn", "attrs"),
    [
        ("QLinearSigmoid", torch.sigmoid, {}),
        ("QLinearLeakyRelu", lambda x: torch.nn.functional.leaky_relu(x, 0.1), {"alpha": 0.1}),
    ],
)
def test_tables(engine: str, fn: Callable[[Tensor], Tensor], attrs: dict[str, float], case: str) -> None:
    a = CASES[case][0]
    x = torch.arange(256, dtype=torch.uint8)
    theirs = run_node(engine, quantized("x", x, a) | params_of("y", (1 / 256, 0)), **attrs)
    real = fn((x.float() - a[1]) * np.float32(a[0]))
    ours = (real * 256).round().clamp(0, 255)
    assert int((ours - theirs.float()).abs().max()) == 0
