"""Registers that saturate at every addition, compared with sums that are computed step by step in Python's integers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from building import Builder, residual_block, seeded
from chips import CHIPS, Chip, only
from exact import clip
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.laws import extreme_inputs
from plans import fixed_resolver, points, resolver_of
from random_graphs import random_graph, random_inputs
from torch import Tensor, nn

import hago
from hago.analysis.inspect import inspect_plan
from hago.arithmetic.numerics import BiasAt, Lost, Order, apply_simq, saturate, saturate_each
from hago.arithmetic.types import INT8, INT16, INT32, DType, dtype
from hago.data.batches import Batches
from hago.errors import HagoError, HardwareError, ModelFileError
from hago.export.onnx.refusals import check_plan
from hago.graph.graph import Graph
from hago.hardware.file import (
    check_hardware,
    hardware_from_document,
    hardware_hash,
    hardware_to_document,
    load_hardware,
    save_hardware,
)
from hago.hardware.hardware import Accumulator, Hardware, OpDesc
from hago.ops import OPS
from hago.ops._rule import Attrs
from hago.plan import accumulators as additions
from hago.plan.document import plan_from_document, plan_to_document
from hago.plan.plan import NodePlan, Plan
from hago.qat.prepare import from_qat, prepare_qat
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.reference import IntegerModel, center
from hago.runtime.stored_model import from_file_bytes, to_file_bytes
from hago.search.evaluate import Evaluator
from hago.search.objective import named_objective
from hago.search.preparation import prepare
from hago.search.safe_bits import first_safe_bits
from hago.search.stored_strategy import make_strategy
from hago.simulation.overflow import AccumulatorExtremes, AccumulatorWatch
from hago.simulation.simulator import Simulator

ORDERS, BIASES = get_args(Order), get_args(BiasAt)
EACH = Accumulator(INT16, "saturate_each", "channels_inner", "first")
#: The addends of one entry of an output, without the bias: (attributes, operands, place of the entry, order).
AddendsOf = Callable[[Attrs, Sequence[Tensor], Sequence[int], str], Iterator[int]]


# ---------------------------------------------------------------- the independent model
def prefixes(addends: Sequence[int], register: DType) -> tuple[int, bool]:
    """The final value of the register, and whether it was clamped at any step."""
    held, clamped = 0, False
    for addend in addends:
        total = held + addend
        held = clip(total, register.min, register.max)
        clamped |= held != total
    return held, clamped


def nested(channels: int, places: Sequence[Any], order: str) -> Iterator[tuple[int, Any]]:
    """Channels and places of a window in the order of additions."""
    if order == "channels_outer":
        yield from ((c, p) for c in range(channels) for p in places)
    else:
        yield from ((c, p) for p in places for c in range(channels))


def conv_addends(attrs: Attrs, operands: Sequence[Tensor], entry: Sequence[int], order: str) -> Iterator[int]:
    x, w = operands[:2]
    sample, out, *place = entry
    first = out // (w.shape[0] // attrs["groups"]) * w.shape[1]
    steps = list(zip(place, attrs["stride"], attrs["dilation"], attrs["padding"], x.shape[2:], strict=True))
    for c, k in nested(w.shape[1], list(itertools.product(*map(range, w.shape[2:]))), order):
        read = [i * s + tap * d - p for tap, (i, s, d, p, _) in zip(k, steps, strict=True)]
        if all(0 <= r < n for r, (*_, n) in zip(read, steps, strict=True)):  # padding is never added
            yield int(x[(sample, first + c, *read)]) * int(w[(out, c, *k)])


def transposed_addends(attrs: Attrs, operands: Sequence[Tensor], entry: Sequence[int], order: str) -> Iterator[int]:
    """The places of the input row by row, each with the tap that connects it to the entry, if there is one."""
    x, w = operands[:2]
    sample, out, *place = entry
    channels, (group, within) = x.shape[1] // attrs["groups"], divmod(out, w.shape[1])
    for c, read in nested(channels, list(itertools.product(*map(range, x.shape[2:]))), order):
        taps = []
        for i, r, s, d, p, k in zip(
            place, read, attrs["stride"], attrs["dilation"], attrs["padding"], w.shape[2:], strict=True
        ):
            tap, rest = divmod(i + p - r * s, d)
            taps.append(tap if rest == 0 and 0 <= tap < k else None)
        if None not in taps:
            channel = group * channels + c
            yield int(x[(sample, channel, *read)]) * int(w[(channel, within, *taps)])


def linear_addends(attrs: Attrs, operands: Sequence[Tensor], entry: Sequence[int], order: str) -> Iterator[int]:
    x, w = operands[:2]
    *row, out = entry
    yield from (int(x[(*row, k)]) * int(w[out, k]) for k in range(w.shape[1]))


def matmul_addends(attrs: Attrs, operands: Sequence[Tensor], entry: Sequence[int], order: str) -> Iterator[int]:
    x, w = operands[:2]
    *batch, row, column = entry

    def matrix(t: Tensor) -> Tensor:
        own = batch[len(batch) - (t.ndim - 2) :]
        return t[tuple(b if size > 1 else 0 for b, size in zip(own, t.shape, strict=False))]

    a, b = matrix(x), matrix(w)
    yield from (int(a[row, k]) * int(b[k, column]) for k in range(a.shape[1]))


def pool_addends(attrs: Attrs, operands: Sequence[Tensor], entry: Sequence[int], order: str) -> Iterator[int]:
    (x,) = operands
    sample, channel, *place = entry
    for k in itertools.product(*map(range, attrs["kernel_size"])):
        read = [i * s + tap - p for i, s, tap, p in zip(place, attrs["stride"], k, attrs["padding"], strict=True)]
        if all(0 <= r < n for r, n in zip(read, x.shape[2:], strict=True)):
            yield int(x[(sample, channel, *read)])


def mean_addends(attrs: Attrs, operands: Sequence[Tensor], entry: Sequence[int], order: str) -> Iterator[int]:
    (x,) = operands
    kept = [a for a in range(x.ndim) if a not in attrs["axes"]]
    given = [entry[a] for a in kept] if attrs["keepdim"] else entry
    for read in itertools.product(*(range(x.shape[a]) for a in attrs["axes"])):
        place = dict(zip([*kept, *attrs["axes"]], [*given, *read], strict=True))
        yield int(x[tuple(place[a] for a in range(x.ndim))])


@dataclass(frozen=True)
class Seen:
    """The results of the one node of a Plan that a test is about."""

    plan: Plan
    node: NodePlan
    operands: list[Tensor]
    out: Tensor
    peaks: AccumulatorExtremes


def run(graph: Graph, hardware: Hardware, inputs: Sequence[Tensor], name: str, plan: Plan | None = None) -> Seen:
    """The node's operands and value in the integer model, which the simulator and the fast engine equal."""
    if plan is None:
        resolver = resolver_of(graph, hardware, inputs)
        plan = resolver(resolver.space.widest())
    read: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    IntegerModel(plan).run(inputs, lambda n, v: held.__setitem__(n.name, v), lambda e, c: read.__setitem__(str(e), c))
    found = compare_plan_exactly(plan, inputs)
    assert found.same, found.differences
    watch = AccumulatorWatch(plan)
    Simulator(plan, watch=watch).run(inputs)
    node = plan.nodes[name]
    operands = [read[f"{name}:{slot}"] for slot in range(len(node.operands))]
    return Seen(plan, node, operands, center(held[name], node.out), watch.extremes)


def check_by_hand(seen: Seen, name: str, addends: AddendsOf) -> int:
    """Every entry is what the register holds step by step; every entry that was clamped is counted.

    Returns:
        How many were clamped.
    """
    node, register = seen.node, seen.node.desc.register
    expected, clamped = torch.zeros(seen.out.shape, dtype=torch.int64), 0
    attrs = seen.plan.graph[name].attrs
    for entry in itertools.product(*map(range, seen.out.shape)):
        terms = list(addends(attrs, seen.operands, entry, str(register.order)))
        if len(seen.operands) > 2:
            axis = -1 if name in ("linear", "matmul") else 1
            bias = seen.operands[2].flatten()
            term = int(bias[entry[axis] if bias.numel() > 1 else 0])
            terms = [term, *terms] if register.bias == "first" else [*terms, term]
        value, cut = prefixes(terms, register.dtype)
        expected[entry], clamped = value, clamped + cut
    assert apply_simq(expected, node.out_simq, seen.plan.hardware.requantize).equal(seen.out)
    assert seen.peaks.overflows.get(name, 0) == clamped
    assert (seen.peaks.peaks.get(name, 0.0) > 1.0) == (clamped > 0)
    assert not (node.proved and clamped)
    return clamped


def chip_of(data: Any, operands: str = "") -> Chip:
    """A chip with a register of 16 bits that saturates at every addition, and data with or without zero points."""
    operand = operands or data.draw(st.sampled_from(["int8", "uint8"]), "operand")
    return Chip(
        operand,
        "int16",
        "saturate_each",
        at=data.draw(st.sampled_from(["edge", "output"]), "requantize_at"),
        scheme=data.draw(st.sampled_from(["hago", "affine"]), "scheme"),
        weight_scheme=data.draw(st.sampled_from(["hago", "symmetric"]), "weights"),
        granularity=data.draw(st.sampled_from(["per_tensor", "per_channel"]), "granularity"),
        order=data.draw(st.sampled_from(ORDERS), "order"),
        bias=data.draw(st.sampled_from(BIASES), "bias"),
    )


def drawn_bias(data: Any, size: int, seed: int) -> list[Tensor]:
    return [seeded(size, seed=seed, size=4.0)] if data.draw(st.booleans(), "has bias") else []


# ---------------------------------------------------------------- products
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_convolutions(data: Any) -> None:
    dims, groups = data.draw(st.integers(1, 3), "dims"), data.draw(st.sampled_from([1, 1, 2, 3]), "groups")
    channels, out = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 2))
    kernel = data.draw(st.lists(st.integers(1, 3 if dims < 3 else 2), min_size=dims, max_size=dims), "kernel")
    attrs = {
        "stride": data.draw(st.lists(st.integers(1, 2), min_size=dims, max_size=dims), "stride"),
        "padding": data.draw(st.lists(st.integers(0, 2), min_size=dims, max_size=dims), "padding"),
        "dilation": data.draw(st.lists(st.integers(1, 2), min_size=dims, max_size=dims), "dilation"),
        "groups": groups,
    }
    size = ((5,), (5, 6), (3, 4, 3))[dims - 1]
    seed, b = data.draw(st.integers(0, 99), "seed"), Builder()
    weight = seeded(out, channels // groups, *kernel, seed=seed)
    x = b.input(channels, *size, name="x")
    b.call(f"conv{dims}d", x, *map(b.const, [weight, *drawn_bias(data, out, seed)]), name="conv", **attrs)
    hardware = only(chip_of(data).hardware(), f"conv{dims}d")
    seen = run(b.graph(), hardware, [seeded(2, channels, *size, seed=seed + 1)], "conv")
    check_by_hand(seen, "conv", conv_addends)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_transposed_convolutions(data: Any) -> None:
    dims, groups = data.draw(st.integers(1, 2), "dims"), data.draw(st.sampled_from([1, 1, 2]), "groups")
    channels, out = groups * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    kernel = data.draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims), "kernel")
    stride = data.draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims), "stride")
    attrs = {
        "stride": stride,
        "padding": data.draw(st.lists(st.integers(0, 2), min_size=dims, max_size=dims), "padding"),
        "output_padding": [min(s - 1, data.draw(st.integers(0, 1))) for s in stride],
        "groups": groups,
        "dilation": data.draw(st.lists(st.integers(1, 2), min_size=dims, max_size=dims), "dilation"),
    }
    seed, b = data.draw(st.integers(0, 99), "seed"), Builder()
    weight = seeded(channels, out, *kernel, seed=seed)
    x = b.input(channels, *(4, 5)[:dims], name="x")
    name = f"conv_transpose{dims}d"
    b.call(name, x, *map(b.const, [weight, *drawn_bias(data, out * groups, seed)]), name="conv", **attrs)
    hardware = only(chip_of(data).hardware(), name)
    seen = run(b.graph(), hardware, [seeded(2, channels, *(4, 5)[:dims], seed=seed + 1)], "conv")
    check_by_hand(seen, "conv", transposed_addends)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_linear(data: Any) -> None:
    depth, out, seed = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4)), data.draw(st.integers(0, 99))
    rows, b = data.draw(st.sampled_from([(), (3,), (2, 2)])), Builder()
    consts = [seeded(out, depth, seed=seed), *drawn_bias(data, out, seed)]
    b.call("linear", b.input(*rows, depth, name="x"), *map(b.const, consts), name="linear")
    hardware = only(chip_of(data).hardware(), "linear")
    seen = run(b.graph(), hardware, [seeded(2, *rows, depth, seed=seed + 1)], "linear")
    check_by_hand(seen, "linear", linear_addends)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_products_of_two_activations(data: Any) -> None:
    depth, seed, b = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99)), Builder()
    batches: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ()), ((3,), (3,)), ((3,), (1,)), ((1,), (2,))]
    one, other = data.draw(st.sampled_from(batches), "batches")
    shapes = ((*one, 4, depth), (*other, depth, 2))
    b.call("matmul", b.input(*shapes[0], name="x"), b.input(*shapes[1], name="y"), name="matmul")
    chip = chip_of(data)
    hardware = only(replace(chip, weight_scheme=chip.scheme).hardware(), "matmul")
    inputs = [seeded(2, *s, seed=seed + i) for i, s in enumerate(shapes)]
    check_by_hand(run(b.graph(), hardware, inputs, "matmul"), "matmul", matmul_addends)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("bias", BIASES)
def test_matmul_with_a_bias(bias: BiasAt, size: int) -> None:
    """addmm broadcasts a bias of one entry."""
    b = Builder()
    consts = [seeded(7, 3), seeded(size, size=0.5)]
    b.call("matmul", b.input(7, name="x"), *map(b.const, consts), name="matmul")
    chip = Chip("int8", "int16", "saturate_each", order="channels_outer", bias=bias)
    seen = run(b.graph(), only(chip.hardware(), "matmul"), [seeded(5, 7, seed=1)], "matmul")
    assert check_by_hand(seen, "matmul", matmul_addends)


# ---------------------------------------------------------------- sums without a weight
def before_sums(b: Builder, shape: Sequence[int]) -> str:
    """An op that the chip quantizes, so that the next op reads integers."""
    weight = torch.ones(shape[0], 1, *[1] * (len(shape) - 1))
    ones, zeros = [1] * (len(shape) - 1), [0] * (len(shape) - 1)
    attrs = {"stride": ones, "padding": zeros, "dilation": ones, "groups": shape[0]}
    return b.call(f"conv{len(ones)}d", b.input(*shape, name="x"), b.const(weight), name="before", **attrs)


@pytest.mark.parametrize("op, attrs, shape, addends", [
    ("avg_pool2d", {"kernel_size": [3, 2], "stride": [2, 1], "padding": [1, 1], "ceil_mode": False,
                    "count_include_pad": True, "divisor_override": None}, (2, 5, 4), pool_addends),
    ("avg_pool2d", {"kernel_size": [3, 2], "stride": [2, 3], "padding": [1, 0], "ceil_mode": True,
                    "count_include_pad": True, "divisor_override": 5}, (2, 6, 6), pool_addends),
    ("avg_pool1d", {"kernel_size": [4], "stride": [2], "padding": [0], "ceil_mode": False,
                    "count_include_pad": True}, (3, 8), pool_addends),
    ("mean", {"axes": [2, 3], "keepdim": False, "count": 12}, (2, 3, 4), mean_addends),
    ("sum", {"axes": [1, 3], "keepdim": True, "count": 8}, (2, 3, 4), mean_addends),
])  # fmt: skip
@pytest.mark.parametrize("order", ORDERS)
def test_sums(op: str, attrs: dict[str, Any], shape: tuple[int, ...], addends: AddendsOf, order: Order) -> None:
    """Large values in a register that is hardly wider; the places of a window, or entries, in row-major order."""
    b = Builder()
    b.call(op, before_sums(b, shape), name=op, **attrs)
    conv, pool = f"conv{len(shape) - 1}d", OpDesc("int8", "int8", Accumulator(INT8, "saturate_each", order, "last"))
    mac = OpDesc(["int8", "int8"], "int8", Accumulator(INT32), "output")
    hardware = Hardware({conv: [mac], op: [pool]})
    seen = run(b.graph(), hardware, [seeded(2, *shape, seed=3)], op)
    assert check_by_hand(seen, op, addends) > 2


def test_adaptive_average() -> None:
    b = Builder()
    b.call("adaptive_avg_pool2d", before_sums(b, (2, 6, 4)), name="pool", input_size=[6, 4], output_size=[2, 2])
    pool = OpDesc("int8", "int8", Accumulator(INT8, "saturate_each", "channels_inner", "last"))
    mac = OpDesc(["int8", "int8"], "int8", Accumulator(INT32), "output")
    seen = run(b.graph(), Hardware({"conv2d": [mac], "adaptive_avg_pool2d": [pool]}), [seeded(2, 2, 6, 4)], "pool")
    window = {"kernel_size": [3, 2], "stride": [3, 2], "padding": [0, 0]}
    assert check_by_hand(seen, "pool", lambda attrs, *rest: pool_addends(window, *rest))


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_one_addition_is_one_clamp(op: str) -> None:
    """A sum, difference or product of two operands is clamped once, also by the kernels of the fast engine."""
    b = Builder()
    x = b.input(3, 4, 4, name="x")
    one = b.conv2d(x, seeded(3, 3, 1, 1), name="one")
    b.call(op, one, b.conv2d(x, seeded(3, 3, 1, 1, seed=1), name="other"), name=op)
    mac = OpDesc(["int8", "int8"], "int16", Accumulator(INT16), "edge")
    each = OpDesc("int8" if op == "mul" else "int16", "int16", replace(EACH, dtype=INT16))
    graph, x = b.graph(), seeded(2, 3, 4, 4, seed=2)
    found = []
    for register in (EACH, Accumulator(INT16, "saturate_end")):
        hardware = Hardware({"conv2d": [mac], op: [replace(each, accumulator=register)]})
        seen = run(graph, hardware, [x], op)
        assert seen.node.additions is None and seen.node.desc.register == register
        found.append((seen.out.tolist(), seen.peaks.overflows.get(op, 0)))
    assert found[0] == found[1] and (op == "mul" or found[0][1] > 0)


def test_affine_adds_its_bias_first_or_last() -> None:
    for bias in BIASES:
        b = Builder()
        x, consts = b.input(3, 4, name="x"), [seeded(3), seeded(3, seed=2, size=3.0)]
        b.call("affine", x, *map(b.const, consts), name="affine", rank=3)
        chip = Chip("uint8", "uint16", "saturate_each", order="channels_inner", bias=bias)
        seen = run(b.graph(), only(chip.hardware(), "affine"), [seeded(2, 3, 4, seed=1)], "affine")
        assert check_by_hand(
            seen, "affine", lambda attrs, ops, at, order: iter([int(ops[0][tuple(at)]) * int(ops[1][at[1]])])
        )


# ---------------------------------------------------------------- by hand
def test_one_register_by_hand() -> None:
    assert int(saturate_each(torch.tensor([100, -100, 100, -100]), INT8)) == 0
    assert int(saturate_each(torch.tensor([100, 100, -100, -100]), INT8)) == -73
    assert int(saturate_each(torch.tensor([50, 100, -100, 100, -100]), INT8)) == 27
    assert int(saturate_each(torch.tensor([200, -300, 5]), dtype("uint8"))) == 5


@pytest.mark.parametrize("order, bias, expected", [
    ("channels_outer", "first", 27), ("channels_outer", "last", 50),
    ("channels_inner", "first", -73), ("channels_inner", "last", -23),
])  # fmt: skip
def test_orders_differ(order: Order, bias: BiasAt, expected: int) -> None:
    """Products 100, -100 of one channel and 100, -100 of the next, and a bias of 50, in 8 bits (docs/hardware.md)."""
    b = Builder()
    weight = torch.tensor([[[[1.0, -1.0]], [[1.0, -1.0]]]])
    b.conv2d(b.input(2, 1, 2, name="x"), weight, torch.tensor([25.0]), name="conv", padding=[0, 0])
    chip = Chip("int8", "int8", "saturate_each", min_bits=2, order=order, bias=bias)
    plan = fixed_resolver(b.graph(), only(chip.hardware(), "conv2d"), {"conv:0": (-128.0, 128.0)})(
        {"conv:0": 8, "conv:1": 2}
    )
    seen = run(b.graph(), plan.hardware, [torch.full((1, 2, 1, 2), 100.0)], "conv", plan)
    assert [c.flatten().tolist() for c in seen.operands] == [[100] * 4, [1, -1, 1, -1], [50]]
    assert seen.out.tolist() == [[[[expected]]]]
    assert seen.peaks.overflows == ({} if (order, bias) == ("channels_outer", "last") else {"conv": 1})


def test_clamps_that_cancel_out_are_counted() -> None:
    """100, 100, -100, -100, -100, 127: clamped up by 73 and down by 45 on the way."""
    b = Builder()
    b.linear(b.input(6, name="x"), torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0, 1.0]]), name="linear")
    chip = Chip("int8", "int8", "saturate_each", min_bits=2, order="channels_outer", bias="first")
    resolver = fixed_resolver(b.graph(), only(chip.hardware(), "linear"), {"linear:0": (-128.0, 128.0)})
    plan = resolver({"linear:0": 8, "linear:1": 2})
    rows = torch.tensor([[100.0, 100, 100, 100, 100, 127], [100, 100, 100, 100, 101, 73], [10, 20, 30, 40, 50, 60]])
    seen = run(b.graph(), plan.hardware, [rows], "linear", plan)
    assert check_by_hand(seen, "linear", linear_addends) == 2
    assert seen.peaks.peaks["linear"] == 200 / 127


# ---------------------------------------------------------------- proofs
@pytest.mark.parametrize("depth", [2, 3])
def test_proved_sums_are_never_clamped(depth: int) -> None:
    """127 * 127 * 2 fits 16 bits and 127 * 127 * 3 does not, whatever the signs are."""
    b = Builder()
    weight = torch.tensor([[1.0, -1.0, 1.0][:depth], [-1.0, -1.0, 1.0][:depth]])
    b.linear(b.input(depth, name="x"), weight, name="linear")
    rows = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=depth))) * 9
    for order, bias in itertools.product(ORDERS, BIASES):
        chip = Chip("int8", "int16", "saturate_each", order=order, bias=bias)
        seen = run(b.graph(), only(chip.hardware(), "linear"), [rows], "linear")
        assert seen.node.bound == 127 * 127 * depth and seen.node.proved == (depth == 2)
        assert (seen.node.additions is None) == (depth == 2)
        assert (check_by_hand(seen, "linear", linear_addends) > 0) == (depth == 3)


@pytest.mark.parametrize("chip", ["int16_saturates_each", "uint8_saturates_each"])
def test_whole_networks(chip: str) -> None:
    graph, hardware = residual_block(), CHIPS[chip].hardware(name=chip)
    resolver = resolver_of(graph, hardware, [seeded(2, 3, 8, 8)])
    clamped = proved = 0
    for bits, _ in zip(points(resolver.space, 5), range(5), strict=False):
        plan = resolver(bits)
        for inputs in ([seeded(2, 3, 8, 8, seed=5) * 20], *extreme_inputs(graph)):
            assert compare_plan_exactly(plan, inputs).same
            watch = AccumulatorWatch(plan)
            Simulator(plan, watch=watch).run(inputs)
            clamped += sum(watch.extremes.overflows.values())
            proved += sum(n.proved and n.desc.register.overflow == "saturate_each" for n in plan.nodes.values())
            assert not any(n.proved and n.additions is not None for n in plan.nodes.values())
    assert clamped and proved


@pytest.mark.parametrize("seed", range(8))
def test_random_networks(seed: int) -> None:
    """Simulator, integer model and fast engine on random graphs, in either order and with the bias at either end."""
    chip = Chip(
        "uint8" if seed % 3 else "int8",
        "int16",
        "saturate_each",
        at="output" if seed % 2 else "edge",
        scheme="affine" if seed % 3 else "hago",
        floats=True,
        order=ORDERS[seed // 2 % 2],
        bias=BIASES[seed // 4 % 2],
    )
    graph = random_graph(seed)
    resolver = resolver_of(graph, chip.hardware(), random_inputs(graph, seed))
    for bits, _ in zip(points(resolver.space, seed), range(3), strict=False):
        assert compare_plan_exactly(resolver(bits), random_inputs(graph, seed + 1, batch=2, size=4.0)).same


def test_an_empty_batch() -> None:
    plan, x = unproved()
    (out,) = IntegerModel(plan).run([x[:0]])
    assert out.shape[0] == 0 and compare_plan_exactly(plan, [x[:0]]).same


def test_partial_sums_of_proved_nodes_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sum is computed step by step, also those that are proved to fit."""
    monkeypatch.setattr(
        "hago.plan.resolve.additions_of",
        lambda rule, attrs, register, bound: additions.additions_of(rule, attrs, register, 2.0**60),
    )
    graph, hardware = residual_block(), CHIPS["int16_saturates_each"].hardware()
    resolver = resolver_of(graph, hardware, [seeded(2, 3, 8, 8)])
    looked_at = 0
    for bits, _ in zip(points(resolver.space, 5), range(4), strict=False):
        plan = resolver(bits)
        for inputs in extreme_inputs(graph):
            seen: dict[str, Lost | None] = {}
            Simulator(plan, watch=lambda n, c, lost, seen=seen: seen.__setitem__(n.name, lost)).run(inputs)
            proved = [n for n, node in plan.nodes.items() if node.proved and node.additions is not None]
            lost = [seen[name] for name in proved if seen[name] is not None]
            assert not any(bool(part.cut.any()) for part in lost)
            looked_at += len(lost)
    assert looked_at


# ---------------------------------------------------------------- the laws bite
def _once(terms: Tensor, register: DType) -> Tensor:
    return saturate(terms.sum(0), register)


def _seen_by_hand() -> None:
    b = Builder()
    b.conv2d(b.input(3, 5, 5, name="x"), seeded(4, 3, 3, 3), seeded(4), name="conv")
    chip = Chip("uint8", "int16", "saturate_each", scheme="affine", order="channels_inner", bias="first")
    seen = run(b.graph(), only(chip.hardware(), "conv2d"), [seeded(2, 3, 5, 5, seed=1)], "conv")
    assert check_by_hand(seen, "conv", conv_addends) > 10


def test_a_clamp_at_the_end_alone_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    _seen_by_hand()
    monkeypatch.setattr(additions, "saturate_each", _once)
    with pytest.raises(AssertionError):
        _seen_by_hand()


def test_another_order_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hago.ops._conv.in_order", lambda terms, order: terms.movedim(-1, 1).flatten(1))
    with pytest.raises(AssertionError):
        _seen_by_hand()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additions, "ADDENDS_AT_ONCE", 100)
    _seen_by_hand()


def test_wide_registers_are_added_up_in_int64() -> None:
    b = Builder()
    weight = torch.tensor([1.0, -1.0]).repeat_interleave(40000)[None]
    b.linear(b.input(80000, name="x"), weight, name="linear")
    chip = Chip("int16", "int32", "saturate_each", order="channels_outer", bias="first")
    seen = run(b.graph(), only(chip.hardware(), "linear"), [torch.ones(1, 80000)], "linear")
    assert check_by_hand(seen, "linear", linear_addends) == 1


# ---------------------------------------------------------------- files
def test_hardware_files_keep_the_order(tmp_path: Path) -> None:
    hashes = set()
    for order, bias in itertools.product(ORDERS, BIASES):
        chip = Chip(register="int16", overflow="saturate_each", order=order, bias=bias).hardware()
        save_hardware(chip, tmp_path / "chip.json")
        again = load_hardware(tmp_path / "chip.json")
        assert again == chip and hardware_hash(again) == hardware_hash(chip)
        assert again.ops["conv2d"][0].register == Accumulator(INT16, "saturate_each", order, bias)
        assert "saturate_each" in str(again) and f"({order}, bias {bias})" in str(again)
        hashes.add(hardware_hash(chip))
    assert len(hashes) == 4


@pytest.mark.parametrize("register, expected", [
    ({"order": "channel_inner", "bias": "first"}, r"accumulator\.order: got .* Did you mean 'channels_inner'"),
    ({"order": "channels_inner", "bias": "at_end"}, r"accumulator\.bias: got \"at_end\"; expected one of first, last"),
    ({"order": "channels_inner"}, r"accumulator\.bias: the key is missing; .* one of first, last"),
    ({"bias": "last"}, r"accumulator\.order: the key is missing; .* channels_outer, channels_inner"),
    ({"overflow": "wrap", "order": "channels_inner"}, r"accumulator\.order: .* belongs to saturate_each, got wrap"),
    ({"overflow": "saturate_eech"}, "Did you mean 'saturate_each'"),
])  # fmt: skip
def test_invalid_registers_in_files_are_refused(tmp_path: Path, register: dict[str, str], expected: str) -> None:
    document = hardware_to_document(Chip(register="int16", overflow="saturate_end").hardware())
    (name,) = (n for n in document["ops"]["conv2d"])
    document["signatures"][name]["accumulator"] = {"dtype": "int16", "overflow": "saturate_each"} | register
    (tmp_path / "chip.json").write_text(json.dumps(document))
    with pytest.raises(HardwareError, match=expected):
        load_hardware(tmp_path / "chip.json")


@pytest.mark.parametrize("given, expected", [
    (("saturate_each",), "needs order, one of channels_outer, channels_inner"),
    (("saturate_each", "channels_iner", "first"), "Did you mean 'channels_inner'"),
    (("saturate_each", "channels_inner"), "needs bias, one of first, last"),
    (("wrap", "channels_inner"), "order belongs to saturate_each"),
    (("saturate_end", None, "last"), "bias belongs to saturate_each"),
])  # fmt: skip
def test_invalid_registers_in_python_are_refused(given: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(HardwareError, match=expected):
        Accumulator(INT16, *given)


def test_registers_without_an_order_are_written_as_before() -> None:
    chip = Chip(register="int16", overflow="saturate_end").hardware()
    registers = [s["accumulator"] for s in hardware_to_document(chip)["signatures"].values() if "accumulator" in s]
    assert registers and all(set(r) == {"dtype", "overflow"} for r in registers)
    assert hardware_from_document(hardware_to_document(chip), "", OPS) == chip


def unproved() -> tuple[Plan, Tensor]:
    hardware, x = CHIPS["int16_saturates_each"].hardware(name="each"), seeded(2, 3, 8, 8) * 3
    resolver = resolver_of(residual_block(), hardware, [seeded(2, 3, 8, 8)])
    return resolver(resolver.space.widest()), x


def test_stored_models_run_the_same() -> None:
    plan, x = unproved()
    again, _ = from_file_bytes(to_file_bytes(plan), "a test")
    assert again.key == plan.key and again.verdicts == plan.verdicts
    added = {n for n, node in plan.nodes.items() if node.additions is not None}
    assert added and added == {n for n, node in again.nodes.items() if node.additions is not None}
    for one, other in zip(IntegerModel(plan).run([x]), IntegerModel(again).run([x]), strict=True):
        assert one.equal(other)
    assert compare_plan_exactly(again, [x]).same


@pytest.mark.parametrize("key, value", [("order", "kkc"), ("bias", "middle"), ("order", None)])
def test_stored_models_of_an_unknown_order_are_refused(key: str, value: str | None) -> None:
    document, tensors = plan_to_document(unproved()[0])
    for signature in document["hardware"]["signatures"].values():
        if signature.get("accumulator", {}).get("overflow") == "saturate_each":
            signature["accumulator"][key] = value
    with pytest.raises(ModelFileError, match=rf"\$\.hardware: .*needs {key}, one of"):
        plan_from_document(document, tensors, "a test")


# ---------------------------------------------------------------- every op
def test_every_op_is_simulated_or_refused_by_name() -> None:
    """Ops that add up terms have `addends`; the forms of engines, which have other sums, are refused."""
    refused = []
    for op, rule in OPS.items():
        for named in (*([None] if rule.integer is not None else []), *rule.forms):
            form = rule.integer if named is None else rule.forms[named]
            assert form is not None
            at = "output" if form.requantizes_output or form.table else "edge"
            operands = ["int8", "int8"] if form.weight is not None else ["int8"]
            desc = OpDesc(operands, "int16" if at == "edge" else "int8", EACH, at, form=named)
            try:
                check_hardware(Hardware({op: [desc]}))
                assert form.addends is not None or form.has_no_additions
            except HardwareError as error:
                if "no order of additions" in str(error):
                    assert f"hago knows no order of additions of {op} in the form {named}" in str(error)
                    refused.append((op, named))
    assert ("mean", "tflite") in refused and ("avg_pool2d", "qlinear") in refused and ("add", "tpu_mlir") in refused
    assert all(named is not None for _, named in refused)


# ---------------------------------------------------------------- search, reports, training, files of others
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.two(torch.relu(self.one(x)))).mean((2, 3)))
        return out


@pytest.mark.parametrize("chip", ["int16_saturates_each", "uint8_saturates_each"])
def test_a_search_finds_bits(chip: str) -> None:
    hardware = replace(CHIPS[chip], floats=False).hardware(name=chip)
    images = [seeded(16, 3, 8, 8)]
    net = Net().eval()
    strategy, value = hago.search_quantize_strategy(net, hardware, images, budget="6 trials")
    plan = hago.create_quantizer(net, hardware, strategy).plan
    watch = AccumulatorWatch(plan)
    Simulator(plan, watch=watch).run(images)
    assert not watch.extremes.overflows and value > 3.0
    assert compare_plan_exactly(plan, images).same


def test_the_start_of_a_search_holds_partial_sums() -> None:
    """Products that cancel out: the sum is 0, and a partial sum is as large as possible."""
    b = Builder()
    b.linear(b.input(64, name="x"), torch.tensor([[1.0] * 32 + [-1.0] * 32]), name="fc")
    chip = Chip("int8", "int16", "saturate_each", order="channels_outer", bias="first")
    x = torch.ones(4, 64)
    resolver = resolver_of(b.graph(), only(chip.hardware(), "linear"), [x])
    evaluator = Evaluator(b.graph(), Batches([(x,)], b.inputs), named_objective("sqnr"))
    widest = evaluator.score(resolver(resolver.space.widest()), resolver.space.widest())
    assert widest.overflows == {"fc": 4} and widest.excess_bits == {"fc": 4} and widest.unproved == 1
    bits, score, _ = first_safe_bits(evaluator, resolver, {"fc": 0.0})
    assert not score.overflows and sum(bits.values()) in (11, 12)


def test_inspection_counts_and_blames() -> None:
    plan, x = unproved()
    found = inspect_plan(plan, Batches([(x,)], plan.graph.inputs))
    watch = AccumulatorWatch(plan)
    Simulator(plan, watch=watch).run([x])
    assert watch.extremes.overflows
    for row in found.rows:
        assert row.overflows == watch.extremes.overflows.get(row.name, 0) and row.differences == 0
        assert (row.verdict == "overflows") == (row.overflows > 0)


def test_training_clamps_as_the_plan_does() -> None:
    """In training the forward pass clamps as the chip does, before a step and after one."""
    hardware, x = CHIPS["int16_saturates_each"].hardware(name="each"), seeded(4, 3, 8, 8)
    prepared = prepare(residual_block(), hardware, [(x,)])
    bits = prepared.space.widest()
    strategy = make_strategy(prepared, prepared.resolver(bits), bits, {})
    trained, more = prepare_qat(residual_block(), hardware, strategy).train(), x * 3
    trained.observe(False)
    for _ in range(2):
        found = trained.train()(more)
        quantizer = from_qat(trained)
        watch = AccumulatorWatch(quantizer.plan)
        Simulator(quantizer.plan, watch=watch).run([more])
        assert watch.extremes.overflows
        assert found.equal(trained.eval()(more)) and found.equal(quantizer.realize()(more))
        found.square().mean().backward()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in trained.parameters())
        torch.optim.SGD(trained.parameters(), 0.01).step()
        trained.zero_grad()


def test_onnx_export_names_the_refused_node() -> None:
    plan, _ = unproved()
    (name, *_) = (n for n, node in plan.nodes.items() if node.additions is not None)
    with pytest.raises(HagoError, match=f"'{name}'.*: sums may leave .* int16, which saturates at every addition"):
        check_plan(plan, "qdq")
