"""The forms of ops where chips differ: each equals the engine's own arithmetic, and simulator and integer
model agree on every one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from building import Builder
from chips import Chip
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import Fixed, fixed_resolver, resolver_of
from random_graphs import random_graph, random_inputs
from torch import Tensor

from hago.arithmetic.numerics import Requantize, dequantize, multiply_by_quantized_multiplier, quantize
from hago.arithmetic.schemes import Grid
from hago.arithmetic.types import INT8, INT64, QParams
from hago.emulation import tflite
from hago.emulation.tpu_mlir.numerics import UniformType, scale_and_shift
from hago.emulation.tpu_mlir.operators import (
    add,
    add_multipliers,
    avg_pool,
    avg_pool_asymmetric,
    leaky_relu,
    lower_conv,
    mul,
    pad,
    prelu,
    run_conv,
)
from hago.errors import HardwareError
from hago.graph.graph import Graph
from hago.hardware.file import check_hardware, load_hardware
from hago.hardware.hardware import Hardware, OpDesc, TensorScheme
from hago.ops import OPS
from hago.plan.document import plan_from_document, plan_to_document
from hago.plan.plan import NodePlan
from hago.plan.resolve import Resolver
from hago.plan.space import build_space
from hago.plan.topology import analyze
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.reference import IntegerModel, center
from hago.search.preparation import prepare

ends = st.floats(0.01, 50.0)
TFLITE = Requantize("multiplier_shift", "half_away", two_stage=True)
HOW = {
    "tflite": TFLITE,
    "tflite once": Requantize("multiplier_shift", "half_up"),
    "tpu_mlir": Requantize("multiplier_shift", "half_up", search="least_error"),
    "dequantize": Requantize("float32"),
}


def chip(op: str, how: str, form: str | None = None) -> Hardware:
    """Affine int8 in and out, requantized at the output, with one op in one form."""
    hardware = Chip(at="output", scheme="affine", requantize=HOW[how]).hardware()
    desc = replace(hardware.ops[op][0], form=form or how.split()[0])
    return replace(hardware, ops={**hardware.ops, op: (desc,)})


def planned(op: str, hardware: Hardware, ranges: list[tuple[float, float]]) -> tuple[Graph, NodePlan, list[Tensor]]:
    """One node of two inputs, ranges of both and of the output, and every pair of int8 in steps."""
    b = Builder()
    out = b.call(op, b.input(13, 13, name="a"), b.input(13, 13, name="b"), name=op)
    keys = [f"{op}:0", f"{op}:1", f"{op}:out"]
    resolver = fixed_resolver(b.graph(out), hardware, dict(zip(keys, ranges, strict=True)))
    plan = resolver(resolver.space.widest())
    steps = torch.linspace(-1.2, 1.2, 13)
    reals = [
        steps.reshape(1, 13, 1).expand(1, 13, 13) * max(map(abs, ranges[0])),
        steps.reshape(1, 1, 13).expand(1, 13, 13) * max(map(abs, ranges[1])),
    ]
    assert compare_plan_exactly(plan, reals).same
    return plan.graph, plan.nodes[op], reals


def run(op: str, hardware: Hardware, ranges: list[tuple[float, float]]) -> tuple[NodePlan, list[Tensor], Tensor]:
    """The node's plan, the integers of its operands and of its output."""
    _, node, reals = planned(op, hardware, ranges)
    sources = [q for q in node.operands if q is not None]
    rounding = hardware.requantize.rounding
    operands = [quantize(x, q, rounding).to(torch.int64) for x, q in zip(reals, sources, strict=True)]
    c = hardware.rules(OPS)[op].compute_int(node.attrs, *operands)
    low, high = node.out.qmin - node.out.zero_point, node.out.qmax - node.out.zero_point
    return node, operands, torch.minimum(torch.maximum(c, low), high) + node.out.zero_point


def uniform(q: QParams) -> UniformType:
    return UniformType(float(q.scale), int(q.zero_point), q.dtype)


pairs = st.tuples(ends, ends).map(lambda p: (-p[0], p[1]))


@settings(max_examples=25, deadline=None)
@given(st.lists(pairs, min_size=3, max_size=3), st.sampled_from([("add", 1), ("sub", -1)]), st.booleans())
def test_tflite_sums(ranges: list[tuple[float, float]], op: tuple[str, int], once: bool) -> None:
    """Against TensorFlow Lite's own three multipliers, in both roundings."""
    rounding = "single" if once else "double"
    node, (a, b), out = run(op[0], chip(op[0], "tflite once" if once else "tflite"), ranges)
    (qa, qb), so = [q for q in node.operands if q], float(node.out.scale)
    twice = 2 * max(float(qa.scale), float(qb.scale))
    moved = [
        tflite.multiply_by_quantized_multiplier(c << 20, *tflite.quantize_multiplier(float(q.scale) / twice), rounding)
        for c, q in ((a, qa), (b, qb))
    ]
    m, shift = tflite.quantize_multiplier(twice / ((1 << 20) * so))
    expected = tflite.requantize(moved[0] + op[1] * moved[1], m, shift, node.out.zero_point, INT8, rounding)
    assert out.equal(expected)


@settings(max_examples=25, deadline=None)
@given(st.lists(pairs, min_size=3, max_size=3))
def test_tpu_mlir_add_and_mul(ranges: list[tuple[float, float]]) -> None:
    node, (a, b), out = run("add", chip("add", "tpu_mlir"), ranges)
    types = [uniform(q) for q in node.operands if q]
    stored = [c + t.zero_point for c, t in zip((a, b), types, strict=True)]
    how = add_multipliers([t.scale for t in types], float(node.out.scale))
    assert out.equal(add(stored, types, uniform(node.out), how))
    node, (a, b), out = run("mul", chip("mul", "tpu_mlir"), [*ranges[:2], (-100.0, 60.0)])
    assert out.equal(mul([a + types[0].zero_point, b + types[1].zero_point], types, uniform(node.out)))


@settings(max_examples=25, deadline=None)
@given(st.lists(pairs, min_size=3, max_size=3), st.sampled_from(["add", "sub", "mul"]))
def test_dequantized(ranges: list[tuple[float, float]], op: str) -> None:
    node, (a, b), out = run(op, chip(op, "dequantize"), ranges)
    qa, qb = (q for q in node.operands if q)
    real = OPS[op].compute({}, dequantize(a, qa), dequantize(b, qb))
    assert out.equal(quantize(real, node.out, "half_even").to(torch.int64) + node.out.zero_point)


@pytest.mark.parametrize("op", ["concat", "stack"])
def test_joined_where_operands_are_dequantized(op: str) -> None:
    b = Builder()
    out = b.call(op, b.input(3, 4, name="a"), b.input(3, 4, name="b"), name=op, axis=1)
    ranges = {f"{op}:0": (-1.0, 2.0), f"{op}:1": (-3.0, 1.0), f"{op}:out": (-3.0, 2.0)}
    resolver = fixed_resolver(b.graph(out), chip(op, "dequantize"), ranges)
    found = compare_plan_exactly(resolver(resolver.space.widest()), [torch.randn(2, 3, 4), torch.randn(2, 3, 4)])
    assert found.same and found.compared > 0


def test_a_form_changes_what_is_computed() -> None:
    """Operands keep scales of their own, and no bits are asked for twice."""
    ranges = [(-1.0, 1.0), (-7.0, 7.0), (-8.0, 8.0)]
    forms = {how: run("add", chip("add", how), ranges) for how in ("tflite", "tpu_mlir", "dequantize")}
    for node, _, _ in forms.values():
        first, second = (q for q in node.operands if q)
        assert not first.scale.equal(second.scale) and node.register.scale is node.out.scale
        assert node.proved
    assert not forms["tflite"][2].equal(forms["tpu_mlir"][2])


def test_the_default_form_has_a_name() -> None:
    for op in ("add", "sub", "concat", "stack"):
        assert OPS[op].forms["common_scale"] is OPS[op].integer
        assert OPS[op].with_form(None) is OPS[op]


def test_wrong_forms_are_refused() -> None:
    desc = OpDesc("int8", "int8", requantize_at="output", form="tflight")
    with pytest.raises(HardwareError, match="unknown form 'tflight'.*Did you mean 'tflite'"):
        Hardware({"add": [desc]}).rules(OPS)
    with pytest.raises(HardwareError, match="known: none"):
        Hardware({"conv2d": [replace(desc, form="tflite")]}).rules(OPS)
    with pytest.raises(HardwareError, match="2 forms"):
        check_hardware(Hardware({"add": [replace(desc, form="tflite"), replace(desc, form="dequantize")]}))


def test_a_chip_without_named_forms_changes_no_op() -> None:
    assert load_hardware("vta").rules(OPS) is OPS
    assert load_hardware("vta").rule("add", OPS) is OPS["add"]
    assert load_hardware("vta").rule("no such op", OPS) is None
    assert TensorScheme() == load_hardware("sample").activation


def test_stored_and_centered_integers_are_told_apart() -> None:
    node, (a, _), out = run("add", chip("add", "tflite"), [(-1.0, 3.0), (-1.0, 3.0), (-1.0, 7.0)])
    q = node.operands[0]
    assert q is not None and int(q.zero_point) != 0
    assert center(a + q.zero_point, q).equal(a) and int(out.min()) >= -128


# ---------------------------------------------------------------- whole specs, against the engines' own arithmetic
TFLITE_CHIP, TPU, TPU_ASYM = (load_hardware(n) for n in ("tflite", "tpu_mlir_bm1684x", "tpu_mlir_bm1684x_asym"))


class PerChannel(Fixed):
    """Thresholds as given, and those of constants channel by channel."""

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        if channel_axis is None or key in self.ranges:
            return super().__call__(key, source, grid, channel_axis)
        rows = self.consts[source].double().movedim(channel_axis, 0).flatten(1)
        return rows.amin(1).clamp_max(0.0), rows.amax(1).clamp_min(0.0)


def one(
    op: str, hardware: Hardware, x: Tensor, ranges: dict[str, tuple[float, float]], *consts: Tensor, **attrs: object
) -> tuple[NodePlan, Tensor, Tensor]:
    """One node of one input: its plan, the stored integers that reach it, and those that it hands on."""
    b = Builder()
    out = b.call(op, b.input(*x.shape[1:], name="x"), *map(b.const, consts), name="node", **attrs)
    graph = b.graph(out)
    alone = replace(hardware, ops={op: hardware.integer_descs(op)})
    topology = analyze(graph, alone)
    space = build_space(graph, alone, topology)
    plan = Resolver(graph, alone, topology, space, PerChannel(ranges, graph.consts))(space.widest())
    assert compare_plan_exactly(plan, [x]).same
    node, seen = plan.nodes["node"], {}
    IntegerModel(plan).run([x], lambda n, v: seen.__setitem__(n.name, v), lambda e, c: seen.__setitem__(str(e), c))
    source = node.operands[0]
    assert source is not None
    return node, seen["node:0"] + source.zero_point, seen["node"].to(torch.int64)


def reals(*shape: int, seed: int = 0, size: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


@pytest.mark.parametrize("seed", range(4))
def test_tflite_average_pool(seed: int) -> None:
    """Stored integers, padding left out, half away from zero."""
    window = {"kernel_size": [2, 3], "stride": [2, 1], "padding": [1, 1], "ceil_mode": bool(seed % 2)}
    x = reals(2, 3, 5, 6, seed=seed)
    node, q, out = one(
        "avg_pool2d", TFLITE_CHIP, x, {"node:0": (-2.0, 5.0)}, **window, count_include_pad=False, divisor_override=None
    )
    assert node.out.key == node.operands[0].key  # type: ignore[union-attr]
    for n, c, i, j in torch.cartesian_prod(*map(torch.arange, out.shape)).tolist():
        rows, columns = range(2 * i - 1, 2 * i + 1), range(j - 1, j + 2)
        found = [int(q[n, c, a, b]) for a in rows for b in columns if 0 <= a < 5 and 0 <= b < 6]
        total, half = sum(found), len(found) // 2
        expected = (total + half) // len(found) if total > 0 else -((-total + half) // len(found))
        assert int(out[n, c, i, j]) == expected


@pytest.mark.parametrize("slope", [0.1, 0.7, 1.5, -0.25])
def test_tflite_leaky_relu(slope: float) -> None:
    ranges = {"node:0": (-3.0, 5.0), "node:out": (-2.0, 4.0)}
    node, q, out = one("leaky_relu", TFLITE_CHIP, reals(2, 30), ranges, negative_slope=slope)
    s, so = (torch.tensor(float(t.scale)) for t in (node.operands[0], node.out) if t)  # float32, as the kernel has them
    c = q - int(node.operands[0].zero_point)  # type: ignore[union-attr]
    kept, cut = (tflite.quantize_multiplier(float(r)) for r in (s / so, s * slope / so))
    expected = torch.where(
        c >= 0,
        tflite.requantize(c, *kept, node.out.zero_point),
        tflite.requantize(c, *cut, node.out.zero_point),
    )
    assert out.equal(expected)


def test_tflite_prelu_and_mul() -> None:
    slopes = torch.tensor([0.25, -0.1, 0.9])
    ranges = {"node:0": (-3.0, 5.0), "node:out": (-2.0, 4.0), "node:1": (-0.9, 0.9)}
    node, q, out = one("prelu", TFLITE_CHIP, reals(2, 3, 9), ranges, slopes)
    s, sa, so = (torch.tensor(float(t.scale)) for t in (*node.operands, node.out) if t)
    c, alpha = q - int(node.operands[0].zero_point), node.consts[1].to(torch.int64).reshape(3, 1)  # type: ignore[union-attr]
    kept, cut = (tflite.quantize_multiplier(float(r)) for r in (s / so, s * sa / so))
    negative = tflite.requantize(c * alpha, *cut, node.out.zero_point)
    assert out.equal(torch.where(c >= 0, tflite.requantize(c, *kept, node.out.zero_point), negative))
    node, (a, b), out = run("mul", chip("mul", "tflite"), [(-1.0, 2.0), (-3.0, 0.5), (-4.0, 4.0)])
    s, sb, so = (torch.tensor(float(t.scale)) for t in (*node.operands, node.out) if t)
    assert out.equal(tflite.requantize(a * b, *tflite.quantize_multiplier(float(s * sb / so)), node.out.zero_point))


@pytest.mark.parametrize("value", [0.7, -9.0, 100.0])
def test_padding_with_any_constant(value: float) -> None:
    attrs = {"pad": [1, 2], "mode": "constant", "value": value}
    for hardware in (TFLITE_CHIP, TPU, TPU_ASYM):
        x = reals(2, 3, 5)
        node, q, out = one("pad", hardware, x, {"node:0": (-1.0, 2.0)}, **attrs)
        source = node.operands[0]
        assert source is not None and node.proved
        assert out.equal(
            pad(q, [0, 0, 1, 0, 0, 2], value, UniformType(float(source.scale), int(source.zero_point), INT8))
        )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("asymmetric", [False, True])
def test_tpu_mlir_convolution(asymmetric: bool, seed: int) -> None:
    """Padding by the zero point, the bias with its correction, the multiplier's search, half up."""
    hardware = TPU_ASYM if asymmetric else TPU
    weight, bias, x = reals(4, 3, 3, 3, seed=seed, size=0.3), reals(4, seed=seed + 9), reals(2, 3, 6, 7, seed=seed)
    ranges = {"node:0": (-4.0, 5.0), "node:out": (-3.0, 6.0)}
    attrs = {"stride": [2, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    node, q, out = one("conv2d", hardware, x, ranges, weight, bias, **attrs)
    source = node.operands[0]
    assert source is not None and bool(source.zero_point) == asymmetric
    lowered = lower_conv(weight, bias, uniform(source), uniform(node.out))
    assert lowered.weight.equal(node.consts[1].to(torch.int64))
    if not asymmetric:
        assert lowered.bias is not None and lowered.bias.equal(node.consts[2].to(torch.int64))
    expected = run_conv(q, lowered, uniform(source), uniform(node.out), strides=[2, 1], pads=[1, 1, 1, 1])
    assert out.equal(expected)


@pytest.mark.parametrize("rectified", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_tpu_mlir_average_pool(asymmetric: bool, rectified: bool) -> None:
    """A zero point of 0, which values that are never negative have, makes no asymmetric pool a symmetric one."""
    hardware = TPU_ASYM if asymmetric else TPU
    window = {"kernel_size": [2, 3], "stride": [1, 2], "padding": [1, 0], "ceil_mode": False}
    low = 0.0 if rectified else -4.0
    ranges = {"node:0": (low, 5.0), "node:out": (low, 3.0)}
    x = reals(2, 3, 5, 7).abs() if rectified else reals(2, 3, 5, 7)
    node, q, out = one("avg_pool2d", hardware, x, ranges, **window, count_include_pad=True, divisor_override=None)
    types = [uniform(t) for t in (node.operands[0], node.out) if t]
    assert not rectified or not any(t.zero_point for t in types)
    engine = avg_pool_asymmetric if asymmetric else avg_pool
    assert out.equal(engine(q, [2, 3], *types, strides=[1, 2], pads=[1, 0, 1, 0]))


def test_tpu_mlir_rectifiers_keep_the_scale() -> None:
    node, q, out = one("leaky_relu", TPU, reals(2, 40), {"node:0": (-3.0, 5.0)}, negative_slope=0.1)
    assert node.out.key == node.operands[0].key and out.equal(leaky_relu(q, 0.1))  # type: ignore[union-attr]
    slopes = torch.tensor([0.1, -0.3, 1.9])
    node, q, out = one("prelu", TPU, reals(2, 3, 40), {"node:0": (-3.0, 5.0)}, slopes)
    assert node.out.key == node.operands[0].key and out.equal(prelu(q, slopes))  # type: ignore[union-attr]
    node, q, out = one("prelu", TPU, reals(2, 3, 40), {"node:0": (-3.0, 5.0)}, slopes[:1])
    assert out.equal(prelu(q, slopes[:1])) and node.proved


def test_tpu_mlir_stores_what_is_never_negative_without_a_sign() -> None:
    """A relu behind a convolution is fused: the convolution's range is that of the relu, in unsigned bytes."""
    b = Builder()
    x = b.input(3, 6, 6, name="x")
    rest = b.call("max_pool2d", b.call("relu", b.conv2d(x, reals(4, 3, 3, 3), name="conv"), name="relu"), name="pool",
                  kernel_size=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1], ceil_mode=False)  # fmt: skip
    graph = b.graph(b.conv2d(rest, reals(2, 4, 1, 1), name="last"))
    for hardware in (TPU, TPU_ASYM):
        resolver = resolver_of(graph, hardware, [reals(2, 3, 6, 6)])
        plan = resolver(resolver.space.widest())
        nodes = plan.nodes
        assert [nodes[n].out.dtype.name for n in ("conv", "relu", "pool", "last")] == ["uint8"] * 3 + ["int8"]
        assert nodes["conv"].out is nodes["relu"].out is nodes["pool"].out is nodes["last"].operands[0]
        assert compare_plan_exactly(plan, [reals(2, 3, 6, 6, seed=3)]).same


# ---------------------------------------------------------------- multipliers
@settings(max_examples=100, deadline=None)
@given(st.floats(1e-9, 1e3), st.integers(-(1 << 40), 1 << 40))
def test_wide_registers_take_the_reduced_multiplier(ratio: float, c: int) -> None:
    m, shift = tflite.quantize_multiplier(ratio)
    how = load_hardware("tflite_int16").requantize.of_register(INT64)
    reduced, n = how.multiplier(torch.tensor(ratio, dtype=torch.float64))
    value = torch.tensor(c)
    if int(shift) > 7 or int(m) == 0 or abs(c) * ratio >= 2**31:
        return
    expected = tflite.multiply_by_quantized_multiplier_int64(value, m, shift)
    assert multiply_by_quantized_multiplier(value, reduced, n, how).equal(expected)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-9, 1e3))
def test_least_error_is_tpu_mlirs_search(ratio: float) -> None:
    how = TPU.requantize
    for got, expected in zip(how.multiplier(torch.tensor(ratio)), scale_and_shift(ratio), strict=True):
        assert got.equal(expected)


# ---------------------------------------------------------------- forms in files
@pytest.mark.parametrize("name", ["tflite", "tflite_int16", "tpu_mlir_bm1684x_asym", "tensorrt_gpu", "x86_avx2"])
def test_a_stored_plan_keeps_its_forms(name: str) -> None:
    """What a form needs is stored with the plan, and read back with the forms of its hardware."""
    for seed in range(60):
        graph = random_graph(seed)
        if {"add", "mul", "avg_pool2d"} <= {n.op for n in graph} and "opaque" not in {n.op for n in graph}:
            break
    data = [tuple(random_inputs(graph, 1))]
    prepared = prepare(graph, name, data)
    plan = prepared.resolver(prepared.space.widest())
    document, tensors = plan_to_document(plan)
    assert document["own_ops"] == []
    again = plan_from_document(document, tensors, "here")
    x = random_inputs(graph, 5)
    for a, b in zip(IntegerModel(plan).run(x), IntegerModel(again).run(x), strict=True):
        assert torch.equal(a, b)
