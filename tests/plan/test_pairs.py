"""Sums of neighbouring products in 16 bits, compared with sums that are computed pair by pair in Python."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from building import Builder, seeded
from chips import Chip
from exact import clip, wrap_exactly
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import fixed_resolver, points, resolver_of
from torch import Tensor

from hago.analysis.inspect import inspect_plan
from hago.arithmetic.types import INT16
from hago.data.batches import Batches
from hago.errors import HardwareError
from hago.graph.graph import Graph
from hago.hardware.file import check_hardware, load_hardware
from hago.hardware.hardware import Hardware, OpDesc, TensorScheme
from hago.plan.plan import NodePlan
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.reference import IntegerModel, center
from hago.search.evaluate import Evaluator
from hago.search.objective import named_objective
from hago.search.safe_bits import first_safe_bits

AVX2 = load_hardware("x86_avx2")


def cut(pair: int, overflow: str) -> int:
    if overflow == "saturate_pairs":
        return clip(pair, INT16.min, INT16.max)
    return wrap_exactly(pair, INT16.min, INT16.max)


def by_hand(x: Sequence[int], w: Sequence[int], bias: int, x_zero: int, overflow: str) -> int:
    """One sum as the chip computes it: pairs of stored products, then the correction for the zero point."""
    total = bias - x_zero * sum(w)
    for k in range(0, len(x), 2):
        total += cut(sum(a * b for a, b in zip(x[k : k + 2], w[k : k + 2], strict=True)), overflow)
    return total


def stored(node: NodePlan, slot: int, c: Tensor) -> Tensor:
    q = node.operands[slot]
    assert q is not None
    return c.to(torch.int64) + q.zero_point


def accumulators(graph: Graph, hardware: Hardware, x: Tensor) -> tuple[NodePlan, Tensor, Tensor]:
    """The plan of the only integer node, the stored operand that it reads, and the value that it emits."""
    resolver = resolver_of(graph, hardware, [x], "max_range")
    plan = resolver(resolver.space.widest())
    (name,) = plan.nodes
    node, seen = plan.nodes[name], {}
    held: dict[str, Tensor] = {}
    IntegerModel(plan).run([x], lambda n, v: held.__setitem__(n.name, v), lambda e, c: seen.__setitem__(str(e), c))
    assert compare_plan_exactly(plan, [x]).same
    return node, stored(node, 0, seen[f"{name}:0"]), center(held[name], node.out)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.sampled_from(["saturate_pairs", "wrap_pairs"]), st.booleans(), st.integers(0, 99))
def test_rows(depth: int, overflow: str, signed: bool, seed: int) -> None:
    weight = seeded(3, depth, seed=seed).sign() * (1 - seeded(3, depth, seed=seed + 1).abs() / 20)
    b = Builder()
    b.linear(b.input(depth, name="x"), weight, seeded(3), name="fc")
    chip = Chip("uint8", overflow=overflow, scheme="hago_affine").hardware()  # type: ignore[arg-type]
    hardware = Hardware({"linear": chip.ops["linear"]}, activation=chip.activation)
    x = seeded(4, depth, seed=seed + 2).sign() * 0.95
    node, q, held = accumulators(b.graph(), hardware, x if signed else x.abs())
    zero = int(node.operands[0].zero_point)  # type: ignore[union-attr]
    w, bias = node.consts[1].tolist(), node.consts[2].tolist()
    for row, out in zip(q.tolist(), held.tolist(), strict=True):
        assert out == [by_hand(row, w[n], bias[n], zero, overflow) for n in range(3)]


@pytest.mark.parametrize("channels, groups, options", [
    (3, 1, {}), (4, 1, {"stride": [2, 1], "padding": [1, 0]}), (6, 2, {"dilation": [2, 1], "padding": [2, 1]}),
    (4, 4, {"padding": [1, 1]}), (2, 1, {"padding": "same", "dilation": [2, 1]}), (2, 1, {"padding": "valid"}),
])  # fmt: skip
def test_windows(channels: int, groups: int, options: dict[str, list[int] | str]) -> None:
    """Channels are paired at each place; padding holds the zero point; a depthwise product has no partner."""
    b = Builder()
    attrs = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": groups} | options
    weight = seeded(4, channels // groups, 2, 3).sign() * 0.97
    b.call("conv2d", b.input(channels, 5, 6, name="x"), b.const(weight), name="conv", **attrs)
    hardware = Hardware({"conv2d": AVX2.ops["conv2d"]}, activation=AVX2.activation)
    x = seeded(2, channels, 5, 6).sign() * 3.0 + 1.0
    node, q, held = accumulators(b.graph(), hardware, x)
    zero, lost = int(node.operands[0].zero_point), 0  # type: ignore[union-attr]
    pads = {"same": [(1, 1), (1, 1)], "valid": [(0, 0)] * 2}.get(str(attrs["padding"]))
    (top, bottom), (left, right) = pads or [(p, p) for p in attrs["padding"]]  # type: ignore[misc]
    padded = torch.nn.functional.pad(q, (left, right, top, bottom), value=zero)
    per = channels // groups
    for n, o, i, j in torch.cartesian_prod(*map(torch.arange, held.shape)).tolist():
        g, total = o // (4 // groups), 0
        for di, dj in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
            row, column = (
                i * attrs["stride"][0] + di * attrs["dilation"][0],
                j * attrs["stride"][1] + dj * attrs["dilation"][1],
            )  # type: ignore[operator,index]
            window = padded[n, g * per : (g + 1) * per, row, column].tolist()
            total += by_hand(window, node.consts[1][o, :, di, dj].tolist(), 0, zero, "saturate_pairs")
            lost += total != 0
        assert int(held[n, o, i, j]) == total
    assert lost and (node.proved == (per == 1))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["linear", "conv2d"]),
    st.sampled_from(["saturate_pairs", "wrap_pairs"]),
    st.sampled_from(["affine", "hago_affine"]),
    st.integers(1, 7),
    st.integers(0, 99),
)
def test_weights_with_a_zero_point_for_each_channel(op: str, overflow: str, scheme: str, depth: int, seed: int) -> None:
    # channels of other ranges
    ends = torch.stack([seeded(6, seed=seed).sigmoid(), seeded(6, seed=seed + 1).sigmoid()], 1)
    weight = torch.lerp(-ends[:, :1], ends[:, 1:], seeded(6, depth, seed=seed + 2).sigmoid().round())
    b = Builder()
    if op == "linear":
        b.linear(b.input(depth, name="x"), weight, seeded(6), name="layer")
    else:
        kernel = b.const(weight.reshape(6, depth, 1, 1))
        attrs = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
        b.call(op, b.input(depth, 1, 1, name="x"), kernel, name="layer", **attrs)
    chip = Chip("uint8", overflow=overflow, scheme="hago_affine").hardware()  # type: ignore[arg-type]
    hardware = Hardware({op: chip.ops[op]}, activation=chip.activation, weight=TensorScheme(scheme, "per_channel"))
    x = seeded(4, depth, seed=seed + 3).sign() * 0.95
    node, q, held = accumulators(b.graph(), hardware, x if op == "linear" else x[..., None, None])
    zero, w_qparams = int(node.operands[0].zero_point), node.operands[1]  # type: ignore[union-attr]
    assert w_qparams is not None and len(set(w_qparams.zero_point.flatten().tolist())) > 1
    w = node.consts[1].reshape(6, depth).to(torch.int64)
    stored_w = (w + w_qparams.zero_point.reshape(6, 1)).tolist()
    bias = node.consts[2].tolist() if 2 in node.consts else [0] * 6
    for row, out in zip(q.reshape(4, depth).tolist(), held.reshape(4, 6).tolist(), strict=True):
        for n in range(6):
            exact = bias[n] + sum((a - zero) * c for a, c in zip(row, w[n].tolist(), strict=True))
            pairs = [
                sum(a * c for a, c in zip(row[k : k + 2], stored_w[n][k : k + 2], strict=True))
                for k in range(0, depth, 2)
            ]
            assert out[n] == exact + sum(cut(p, overflow) - p for p in pairs)
    # what is proved is so for every stored input
    x_qparams = node.operands[0]
    assert x_qparams is not None
    reached = [
        sum(v * (x_qparams.qmax if (v > 0) == top else x_qparams.qmin) for v in row[k : k + 2])
        for row in stored_w
        for k in range(0, depth, 2)
        for top in (True, False)
    ]
    assert node.proved == all(INT16.min <= p <= INT16.max for p in reached)


def test_products_of_two_activations() -> None:
    b = Builder()
    b.call("matmul", b.input(2, 3, 5, name="x"), b.input(2, 5, 4, name="y"), name="product")
    hardware = Hardware({"matmul": AVX2.ops["matmul"]}, activation=AVX2.activation)
    resolver = resolver_of(b.graph(), hardware, [seeded(2, 2, 3, 5), seeded(2, 2, 5, 4)])
    plan = resolver(resolver.space.widest())
    node, ends = plan.nodes["product"], [torch.full((2, 2, 3, 5), 9.0), torch.full((2, 2, 5, 4), 9.0)]
    assert not node.proved and compare_plan_exactly(plan, ends).same
    seen: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    IntegerModel(plan).run(ends, lambda n, v: held.__setitem__(n.name, v), lambda e, c: seen.__setitem__(str(e), c))
    x, y = (stored(node, s, seen[f"product:{s}"]) for s in (0, 1))
    zeros = [int(q.zero_point) for q in node.operands if q]
    assert zeros[1] == 0
    expected = by_hand(x[0, 0, 0].tolist(), y[0, 0, :, 0].tolist(), 0, zeros[0], "saturate_pairs")
    assert held["product"].eq(expected).all()
    assert compare_plan_exactly(plan, [end[:0] for end in ends]).same  # an empty batch, too


# ---------------------------------------------------------------- proofs and counts
def wide(bits: tuple[int, int], sign: float = 1.0) -> NodePlan:
    b = Builder()
    b.linear(b.input(4, name="x"), torch.tensor([[1.0, 1.0, sign, 1.0]]), name="fc")
    resolver = fixed_resolver(b.graph(), AVX2, {"fc:0": (0.0, 1.0)})
    return resolver({"fc:0": bits[0], "fc:1": bits[1]}).nodes["fc"]


def test_seven_bits_of_either_operand_are_proved() -> None:
    assert not wide((8, 8)).proved and wide((8, 8)).pairs is not None
    assert wide((8, 8)).pairs.largest == 2 * 255 * 127  # type: ignore[union-attr]
    assert wide((8, 7)).proved and wide((7, 8)).proved and wide((8, 7)).pairs is None


def test_pairs_of_opposite_sign_do_not_add_up() -> None:
    b = Builder()
    b.linear(b.input(4, name="x"), torch.tensor([[1.0, -1.0, 0.0, 1.0]]), name="fc")
    resolver = fixed_resolver(b.graph(), AVX2, {"fc:0": (0.0, 1.0)})
    assert resolver(resolver.space.widest()).nodes["fc"].proved


def saturating() -> tuple[Graph, Tensor]:
    b = Builder()
    b.linear(b.input(8, name="x"), torch.tensor([[1.0, 1.0] * 4, [1.0, -1.0] * 4]), name="fc")
    return b.graph(), torch.cat([torch.ones(3, 8), torch.full((5, 8), 0.1)])


def test_saturation_is_counted_and_avoided() -> None:
    graph, x = saturating()
    resolver = resolver_of(graph, AVX2, [x])
    evaluator = Evaluator(graph, Batches([(x,)], graph.inputs), named_objective("sqnr"))
    widest = evaluator.score(resolver(resolver.space.widest()), resolver.space.widest())
    assert widest.overflows == {"fc": 3} and widest.excess_bits == {"fc": 1} and widest.unproved == 1
    bits, score, _ = first_safe_bits(evaluator, resolver, {"fc": 8.0})
    assert not score.overflows and sorted(bits.values()) == [7, 8] and score.unproved == 0
    assert score.value > widest.value


def test_inspection_blames_the_pairs() -> None:
    graph, x = saturating()
    resolver = resolver_of(graph, AVX2, [x])
    found = inspect_plan(resolver(resolver.space.widest()), Batches([(x,)], graph.inputs))
    (row,) = [r for r in found.rows if r.name == "fc"]
    assert row.verdict == "overflows" and row.overflows == 3 and row.differences == 0
    assert row.causes["overflow"].share is not None and row.causes["overflow"].share > 0.9


@pytest.mark.parametrize("overflow", ["saturate_pairs", "wrap_pairs"])
def test_whole_networks(overflow: str) -> None:
    from building import residual_block

    chip = Chip("uint8", overflow=overflow, scheme="affine", floats=True).hardware()  # type: ignore[arg-type]
    ops = {
        n: d if n in ("conv2d", "linear", "matmul") else Chip("uint8").hardware().ops[n] for n, d in chip.ops.items()
    }
    hardware = Hardware(ops, activation=chip.activation)
    graph = residual_block()
    resolver = resolver_of(graph, hardware, [seeded(2, 3, 8, 8)])
    for bits, _ in zip(points(resolver.space, 5), range(4), strict=False):
        assert compare_plan_exactly(resolver(bits), [seeded(2, 3, 8, 8, seed=5) * 20]).same


def test_ops_that_are_no_matrix_product_are_refused_with_pairs() -> None:
    desc = OpDesc(["uint8", "int8"], "int32", AVX2.ops["conv2d"][0].register)
    with pytest.raises(HardwareError, match="no pairs of products of conv_transpose2d"):
        check_hardware(Hardware({"conv_transpose2d": [desc]}))
