"""Resolving bits and thresholds to a Plan: what a Resolver derives, caches and refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from building import Builder, residual_block, seeded
from chips import Chip
from networks import images, randomized
from plans import Fixed, fixed_resolver, resolver_of
from torch import nn

import hago
from hago.arithmetic.types import INT16, INT32, Edge
from hago.errors import HagoError, InfeasibleBits
from hago.graph.graph import Graph
from hago.hardware.file import hardware_from_document, load_hardware
from hago.hardware.hardware import Accumulator, Granularity, Hardware, OpDesc
from hago.ops import OPS
from hago.plan.resolve import Resolver


def conv(bias: bool = True, granularity: str = "per_tensor") -> tuple[Graph, Resolver]:
    b = Builder()
    weight = seeded(4, 3, 3, 3) * torch.tensor([1.0, 0.5, 2.0, 0.1]).reshape(4, 1, 1, 1)
    b.conv2d(b.input(3, 8, 8, name="x"), weight, seeded(4) if bias else None, name="conv")
    graph = b.graph()
    return graph, fixed_resolver(graph, Chip(granularity=granularity).hardware(), {"conv:0": (-2.0, 2.0)})  # type: ignore[arg-type]


# ---------------------------------------------------------------- scales
def test_scales_of_a_convolution() -> None:
    """Image 2.0 at 8 bits: 1/64. Weight w at 6 bits: w/32. The sum and the bias: their product."""
    graph, resolver = conv()
    plan = resolver({"conv:0": 8, "conv:1": 6}).nodes["conv"]
    x, w, bias = plan.operands
    assert x is not None and w is not None and bias is not None
    assert float(x.scale) == 2.0 / 128
    largest = float(graph.consts["conv.weight"].abs().max())
    assert float(w.scale) == pytest.approx(largest / 32, rel=1e-7)
    assert float(plan.register.scale) == float(x.scale) * float(w.scale) == float(bias.scale)
    assert (w.qmin, w.qmax, plan.register.dtype, bias.dtype) == (-31, 31, INT32, INT32)


def test_known_scale_of_a_product() -> None:
    """0.5 times 0.25 is 0.125."""
    b = Builder()
    b.call("mul", b.input(4, name="a"), b.input(4, name="b"), name="mul")
    resolver = fixed_resolver(b.graph(), Chip().hardware(), {"mul:0": (-64.0, 64.0), "mul:1": (-32.0, 32.0)})
    assert float(resolver({"mul:0": 8, "mul:1": 8}).nodes["mul"].register.scale) == 0.125


def test_a_scale_per_channel() -> None:
    b = Builder()
    weight = torch.stack([torch.full((3, 1, 1), t) for t in (1.0, 4.0)])
    b.call("relu", b.conv2d(b.input(3, 8, 8, name="x"), weight, name="conv"), name="relu")
    source = _PerChannel({"conv:0": (-2.0, 2.0)}, b.graph().consts)
    made = fixed_resolver(b.graph(), Chip(granularity="per_channel").hardware(), {})
    made.thresholds = source
    plan = made({"conv:0": 8, "conv:1": 8})
    w = plan.nodes["conv"].operands[1]
    assert w is not None and w.scale.flatten().tolist() == [1 / 128, 4 / 128]
    assert tuple(w.scale.shape) == (2, 1, 1, 1)
    assert tuple(plan.nodes["relu"].register.scale.shape) == (1, 2, 1, 1)
    assert plan.nodes["relu"].simqs == (None,)


class _PerChannel(Fixed):
    def __call__(
        self, key: str, source: str, grid: object, channel_axis: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if channel_axis is None:
            return super().__call__(key, source, grid, channel_axis)  # type: ignore[arg-type]
        top = self.consts[source].movedim(channel_axis, 0).flatten(1).abs().amax(1).double()
        return -top, top


def test_thresholds_used_are_recorded() -> None:
    _, resolver = conv()
    plan = resolver({"conv:0": 8, "conv:1": 6})
    assert set(plan.thresholds) == {"conv:0", "conv:1"}
    assert [float(end) for end in plan.thresholds["conv:0"]] == [-2.0, 2.0]


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_a_bias_beyond_half_of_its_register_raises_the_scale_of_its_weights(granularity: Granularity) -> None:
    b = Builder()
    bias = torch.tensor([0.0, 1e6, -1e6, 1.0, 1e-3])
    b.conv2d(b.input(3, 8, 8, name="x"), seeded(5, 3, 3, 3, size=1e-3), bias, name="conv")
    graph, chip = b.graph(), Chip(register="int16", granularity=granularity).hardware()
    resolver = fixed_resolver(graph, chip, {"conv:0": (-1.0, 1.0)})
    plan = resolver(resolver.space.widest()).nodes["conv"]
    assert plan.saturated_biases == 0
    assert plan.raised == ((0,) if granularity == "per_tensor" else (1, 2, 3))
    kept, scale = plan.consts[2].to(torch.float64), plan.operands[2].scale  # type: ignore[union-attr]
    assert float(kept.abs().max()) == pytest.approx(INT16.max / 2, abs=1)
    assert ((kept * scale - bias).abs() <= scale / 2).all()


# ---------------------------------------------------------------- signatures
def test_the_first_signature_that_holds_the_bits() -> None:
    wide, narrow = OpDesc("int16", "int32"), OpDesc("int8", "int32")
    b = Builder()
    b.linear(b.input(4, name="x"), seeded(3, 4), name="fc")
    for order, expected in (((narrow, wide), [narrow, wide]), ((wide, narrow), [wide, wide])):
        resolver = fixed_resolver(b.graph(), Hardware({"linear": order}), {"fc:0": (-1.0, 1.0)})
        found = [resolver({"fc:0": bits, "fc:1": 8}).nodes["fc"].desc for bits in (8, 9)]
        assert found == expected


def test_bits_that_no_signature_holds_together() -> None:
    """Each number of bits is in the space, but no signature takes both."""
    descs = (OpDesc(["int16", "int8"], "int32"), OpDesc(["int8", "int16"], "int32"))
    b = Builder()
    b.linear(b.input(4, name="x"), seeded(3, 4), name="fc")
    resolver = fixed_resolver(b.graph(), Hardware({"linear": descs}, name="lopsided"), {"fc:0": (-1.0, 1.0)})
    with pytest.raises(InfeasibleBits) as caught:
        resolver({"fc:0": 16, "fc:1": 16})
    assert all(word in str(caught.value) for word in ("lopsided", "'fc'", "linear", "16", "int8"))
    with pytest.raises(InfeasibleBits, match="fc:1"):
        resolver({"fc:0": 16})


def requantized(operand: str, out: str) -> OpDesc:
    return OpDesc([operand, "int8"], out, Accumulator(INT32), "output")


def test_the_first_signature_that_holds_the_bits_of_the_output() -> None:
    narrow, wide = requantized("int8", "int4"), requantized("int8", "int8")
    b = Builder()
    b.linear(b.input(4, name="x"), seeded(3, 4), name="fc")
    for order, expected in (((narrow, wide), [narrow, wide]), ((wide, narrow), [wide, wide])):
        resolver = fixed_resolver(b.graph(), Hardware({"linear": order}), {"fc:0": (-1.0, 1.0)})
        plans = [resolver({"fc:0": 8, "fc:1": 8, "fc:out": bits}).nodes["fc"] for bits in (4, 6)]
        assert [plan.desc for plan in plans] == expected
        assert [(plan.out.qmin, plan.out.qmax, plan.out.dtype) for plan in plans] == [
            (-7, 7, expected[0].out_dtype),
            (-31, 31, expected[1].out_dtype),
        ]


def test_bits_of_the_output_that_no_signature_holds_with_those_of_the_operands() -> None:
    descs = (requantized("int8", "int4"), requantized("int4", "int8"))
    b = Builder()
    b.linear(b.input(4, name="x"), seeded(3, 4), name="fc")
    resolver = fixed_resolver(b.graph(), Hardware({"linear": descs}, name="lopsided"), {"fc:0": (-1.0, 1.0)})
    found = [resolver({"fc:0": x, "fc:1": 8, "fc:out": y}).nodes["fc"].desc for x, y in ((8, 4), (4, 8))]
    assert found == list(descs)
    says = r"no signature of lopsided for node 'fc' \(linear\) holds .*'x': 8.* and 6 of its output; it has .*int4"
    with pytest.raises(InfeasibleBits, match=says):
        resolver({"fc:0": 8, "fc:1": 8, "fc:out": 6})


def test_infeasible_bits_on_the_rfc_hardware() -> None:
    _, resolver = conv()
    with pytest.raises(InfeasibleBits, match="9 bits for edge 'conv:0' fit no signature"):
        resolver({"conv:0": 9, "conv:1": 8})


# ---------------------------------------------------------------- verdicts
def test_a_verdict_is_about_the_actual_weights() -> None:
    """128 products of 127 times 127 exceed 2**20; 128 products of 127 times 1 do not."""
    b = Builder()
    weight = torch.ones(2, 128)
    weight[1] = 1 / 127
    weight[1, 0] = -1.0
    b.linear(b.input(128, name="x"), weight, name="fc")
    hardware = Hardware({"linear": [OpDesc("int8", "int32", Accumulator(INT16))]})
    plan = fixed_resolver(b.graph(), hardware, {"fc:0": (-1.0, 1.0)})({"fc:0": 8, "fc:1": 8}).nodes["fc"]
    assert plan.bound == 127 * 127 * 128 and not plan.proved
    rows = plan.consts[1].abs().sum(1).tolist()
    assert rows == [127 * 128, 127 + 127]  # the second alone would fit


@pytest.mark.parametrize("bits, proved", [(8, False), (6, True)])
def test_fewer_bits_prove_more(bits: int, proved: bool) -> None:
    b = Builder()
    b.linear(b.input(8, name="x"), torch.ones(2, 8), name="fc")
    resolver = fixed_resolver(b.graph(), Chip(register="int16").hardware(), {"fc:0": (-1.0, 1.0)})
    plan = resolver({"fc:0": bits, "fc:1": bits})
    assert plan.verdicts == {"fc": "proved" if proved else "possible"}


def test_the_bound_of_a_chip_that_multiplies_zero_points_in_is_over_stored_weights() -> None:
    """Centered weights within a byte are bytes; with a zero point of 128 they reach 255."""
    b = Builder()
    weight = torch.tensor([[1.0, -1.0, 0.5], [0.25, 0.0, -0.125]])
    b.linear(b.input(3, name="x"), weight, name="fc")
    hardware = Hardware({"linear": [OpDesc("uint8", "int32", Accumulator(INT32))]})
    plan = fixed_resolver(b.graph(), hardware, {"fc:0": (-1.0, 1.0)})({"fc:0": 8, "fc:1": 8}).nodes["fc"]
    x, w = plan.operands
    assert x is not None and w is not None and int(w.zero_point) == 128
    stored = plan.consts[1].to(torch.int64) + w.zero_point
    assert plan.raw_bound == int(stored.sum(1).max()) * max(abs(x.qmin), abs(x.qmax))


def test_bounds_of_producers_are_used() -> None:
    """A sum of accumulators uses the proved bound of its operand, not the range of its dtype."""
    b = Builder()
    x = b.conv2d(b.input(3, 8, 8, name="x"), seeded(4, 3, 3, 3), name="conv")
    b.call("mean", b.call("relu", x, name="relu"), axes=[2, 3], keepdim=False, count=64, name="mean")
    resolver = fixed_resolver(b.graph(), Chip().hardware(), {"conv:0": (-1.0, 1.0)})
    plan = resolver(resolver.space.widest())
    assert plan.nodes["mean"].bound == 64 * plan.nodes["conv"].bound < 2**31
    assert set(plan.verdicts.values()) == {"proved"}


# ---------------------------------------------------------------- keys and the cache
def test_equal_points_give_equal_plans() -> None:
    _, one = conv()
    _, other = conv()
    assert one({"conv:0": 8, "conv:1": 6}).key == other({"conv:1": 6, "conv:0": 8}).key
    assert one({"conv:0": 8, "conv:1": 6}).key != one({"conv:0": 8, "conv:1": 7}).key


def test_only_nodes_that_a_change_reaches_are_resolved_again() -> None:
    graph = residual_block()
    resolver = resolver_of(graph, load_hardware("x86_vnni"), [seeded(2, 3, 8, 8)])
    bits = resolver.space.widest()
    before, after = resolver(bits), resolver({**bits, "fc:1": 5})
    assert [n for n in before.nodes if before.nodes[n] is not after.nodes[n]] == ["fc"]
    changed = resolver({**bits, "left:1": 5})
    assert before.nodes["stem"] is changed.nodes["stem"] and before.nodes["left"] is not changed.nodes["left"]


def test_an_edge_without_requantization_has_no_simq() -> None:
    plan = resolver_of(residual_block(), load_hardware("x86_vnni"), [seeded(2, 3, 8, 8)])
    edges = plan(plan.space.widest()).edges
    assert edges[Edge("stem.relu", 0)] is None and edges[Edge("pool", 0)] is None
    assert {str(e): s.kind for e, s in edges.items() if s} | {"stem:0": "quantize", "output:0": "dequantize"} == {
        str(e): s.kind for e, s in edges.items() if s
    }


def test_operands_of_a_sum_are_on_one_scale() -> None:
    """Every add in every plan reads its operands on one scale, in the form `common_scale`."""
    for chip in ("x86_avx2", "vta", "int16_accumulator", "arm_dot"):
        resolver = resolver_of(residual_block(), load_hardware(chip), [seeded(2, 3, 8, 8)])
        for bits in (resolver.space.widest(), resolver.space.narrowest()):
            first, second = resolver(bits).nodes["add"].operands
            assert first is not None and second is not None and first.scale.equal(second.scale)


def test_an_invalid_threshold_is_refused() -> None:
    graph, _ = conv()
    resolver = fixed_resolver(graph, Chip().hardware(), {"conv:0": (float("nan"), 1.0)})
    with pytest.raises(HagoError, match="finite"):
        resolver({"conv:0": 8, "conv:1": 8})


def test_shifts_have_powers_of_two_everywhere() -> None:
    resolver = resolver_of(residual_block(), load_hardware("vta"), [seeded(2, 3, 8, 8)], "mse")
    plan = resolver(resolver.space.widest())
    for node in plan.nodes.values():
        for q in (*node.operands, node.register, node.out):
            if q is not None:
                fraction, _ = torch.frexp(q.scale)
                assert bool((fraction == 0.5).all())


# ---------------------------------------------------------------- printed
@pytest.mark.parametrize("name", ["x86_vnni", "vta"])
def test_the_printed_form(name: str, golden: Callable[[str, str], None]) -> None:
    ranges = {f"{n}:{s}": (-2.0, 4.0) for n in residual_block().by_name for s in (0, 1)}
    ranges = {k: r for k, r in ranges.items() if not k.endswith(":1") or k == "add:1"}
    resolver = fixed_resolver(residual_block(), load_hardware(name), ranges)
    golden(f"residual_block.{name}.plan.txt", str(resolver(resolver.space.widest())))


# ---------------------------------------------------------------- signs
def test_the_unsigned_signature_that_is_listed_first_is_taken_behind_an_integer_layer() -> None:
    """The edge requantizes what a signed register holds, which is never negative behind a ReLU."""
    document = {
        "version": 1,
        "name": "signs",
        "activation": {"scheme": "symmetric", "granularity": "per_tensor"},
        "weight": {"scheme": "symmetric", "granularity": "per_channel"},
        "requantize": {"form": "float32"},
        "rounding": "half_even",
        "other_ops": "reject",
        "signatures": {
            "unsigned": {"in": ["uint8", "int8", "int32"], "out": "int32"},
            "signed": {"in": ["int8", "int8", "int32"], "out": "int32"},
            "i32": {"in": ["int32"], "out": "int32"},
        },
        "ops": {"conv2d": ["unsigned", "signed"], "relu": ["i32"]},
    }
    hardware = hardware_from_document(document, "", OPS)
    layers = [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)]
    network = randomized(nn.Sequential(*layers))
    plan = hago.quantize(network, hardware, [images(16, 2, 6, 6)], corrections="none").plan
    names = {name: node.desc.name for name, node in plan.nodes.items() if len(node.operands) > 1}
    assert names == {"0": "signed", "2": "unsigned", "3": "signed"}
