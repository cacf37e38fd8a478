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
from plans import fixed_resolver
from torch import Tensor

from hago.arithmetic import tflite
from hago.arithmetic.tpu_mlir_cast import UniformType
from hago.arithmetic.tpu_mlir_elementwise import add, add_multipliers, mul
from hago.errors import HardwareError
from hago.exactness import compare
from hago.graph import Graph
from hago.hardware import Hardware, OpDesc, TensorScheme
from hago.hardware_file import check_hardware, load_hardware
from hago.numerics import Requantize, dequantize, quantize
from hago.ops import OPS
from hago.plan import NodePlan
from hago.realization import center
from hago.types import INT8, QParams

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
    assert compare(plan, reals).same
    return plan.graph, plan.nodes[op], reals


def run(op: str, hardware: Hardware, ranges: list[tuple[float, float]]) -> tuple[NodePlan, list[Tensor], Tensor]:
    """The node's plan, the integers of its operands and of its output."""
    _, node, reals = planned(op, hardware, ranges)
    sources = [q for q in node.operands if q is not None]
    rounding = hardware.requantize.rounding
    operands = [quantize(x, q, rounding).to(torch.int64) for x, q in zip(reals, sources, strict=True)]
    c = hardware.computes(OPS)[op].compute_int(node.attrs, *operands)
    low, high = node.out.qmin - node.out.zero_point, node.out.qmax - node.out.zero_point
    return node, operands, torch.minimum(torch.maximum(c, low), high) + node.out.zero_point


def uniform(q: QParams) -> UniformType:
    return UniformType(float(q.scale), int(q.zero_point), INT8)


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
    found = compare(resolver(resolver.space.widest()), [torch.randn(2, 3, 4), torch.randn(2, 3, 4)])
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
        assert OPS[op].computed_as(None) is OPS[op]


def test_wrong_forms_are_refused() -> None:
    desc = OpDesc("int8", "int8", requantize_at="output", form="tflight")
    with pytest.raises(HardwareError, match="unknown form 'tflight'.*Did you mean 'tflite'"):
        Hardware({"add": [desc]}).computes(OPS)
    with pytest.raises(HardwareError, match="known: none"):
        Hardware({"conv2d": [replace(desc, form="tflite")]}).computes(OPS)
    with pytest.raises(HardwareError, match="2 forms"):
        check_hardware(Hardware({"add": [replace(desc, form="tflite"), replace(desc, form="dequantize")]}))


def test_a_chip_without_named_forms_changes_no_op() -> None:
    assert load_hardware("vta").computes(OPS) is OPS
    assert load_hardware("vta").rule("add", OPS) is OPS["add"]
    assert load_hardware("vta").rule("no such op", OPS) is None
    assert TensorScheme() == load_hardware("sample").activation


def test_stored_and_centered_integers_are_told_apart() -> None:
    node, (a, _), out = run("add", chip("add", "tflite"), [(-1.0, 3.0), (-1.0, 3.0), (-1.0, 7.0)])
    q = node.operands[0]
    assert q is not None and int(q.zero_point) != 0
    assert center(a + q.zero_point, q).equal(a) and int(out.min()) >= -128
