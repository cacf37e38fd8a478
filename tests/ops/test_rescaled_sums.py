"""Sums in the form `rescaled`: narrow operands keep their scales, and the op brings them to the common one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from building import Builder, seeded
from exact import round_exactly
from plans import fixed_resolver, resolver_of
from torch import Tensor, nn

import hago
from hago.arithmetic.equality import count_differing
from hago.arithmetic.types import INT16, INT32
from hago.cost import plan_cost
from hago.errors import HardwareError
from hago.export.onnx.export import make_onnx
from hago.export.onnx.refusals import check_plan
from hago.graph.graph import Graph
from hago.hardware.file import check_hardware, load_hardware
from hago.hardware.hardware import Accumulator, Hardware
from hago.ops import OPS
from hago.plan.document import plan_from_document, plan_to_document
from hago.plan.plan import Plan
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.native.executor import Executor
from hago.runtime.native.layouts import wire
from hago.runtime.native.lowering import Lowering
from hago.runtime.native.self_test import exact_kernels
from hago.runtime.native.weights import KernelConstantCache
from hago.runtime.reference import IntegerModel

CHIP = load_hardware("x86_vnni")
_WIDE = CHIP.integer_descs("add")[-1]
#: The same chip with sums of the form `common_scale`, whose operands are all int32.
COMMON = replace(CHIP, ops=CHIP.ops | dict.fromkeys(("add", "sub"), (replace(_WIDE, form="common_scale"),)))
needs_kernels = pytest.mark.skipif(not exact_kernels().conv.exact, reason="no kernels here")


def residual(channels: int = 40, op: str = "add") -> tuple[Graph, list[Tensor]]:
    """Two residual blocks: convolutions, sums and relus, of which each is read twice."""
    b = Builder()
    x = b.call("relu", b.conv2d(b.input(channels, 9, 9), seeded(channels, channels, 3, 3, seed=1), padding=[1, 1]))
    for block in range(2):
        y = b.conv2d(x, seeded(channels, channels, 3, 3, seed=block + 2), padding=[1, 1], name=f"conv{block}")
        x = b.call("relu", b.call(op, y, x, name=f"sum{block}"), name=f"relu{block}")
    b.conv2d(x, seeded(5, channels, 1, 1, seed=9), name="last")
    return b.graph(), [seeded(2, channels, 9, 9, seed=10)]


def planned(graph: Graph, data: list[Tensor], bits: dict[str, int], chip: Hardware = CHIP) -> Plan:
    resolver = resolver_of(graph, chip, data)
    return resolver(resolver.space.widest() | bits)


def float32(x: Fraction) -> Fraction:
    return Fraction(float(torch.tensor(float(x), dtype=torch.float64).to(torch.float32)))


@pytest.mark.parametrize("op", ["add", "sub"])
@pytest.mark.parametrize("bits", [(8, 8), (8, 23), (23, 8), (6, 4)])
def test_what_is_computed(op: str, bits: tuple[int, int]) -> None:
    """Every narrow operand is `round(float32(c) * float32(s / common))`, and wide ones are on the common scale."""
    b = Builder()
    b.call(op, b.input(50, name="a"), b.input(50, name="b"), name="sum")
    ranges = {"sum:0": (-1.0, 2.5), "sum:1": (-0.7, 0.3)}
    chip = replace(CHIP, ops={**CHIP.ops, op: CHIP.integer_descs(op)})  # in integers, although both are inputs
    plan = fixed_resolver(b.graph("sum"), chip, ranges)({"sum:0": bits[0], "sum:1": bits[1]})
    node = plan.nodes["sum"]
    common, centered = node.register.scale, []
    for slot, q in enumerate(node.operands):
        assert q is not None and (q.dtype.name == "int32") == (bits[slot] > 8)
        c = torch.linspace(q.qmin - int(q.zero_point), q.qmax - int(q.zero_point), 50).round().to(torch.int64)
        centered.append(c.flip(0) if slot else c)
        assert q.dtype.name == "int32" or Fraction(float(q.scale)) / Fraction(float(common)) <= 1 << 15
    moved = []
    for q, c in zip(node.operands, centered, strict=True):
        assert q is not None
        ratio = float32(Fraction(float(q.scale / common)))
        scaled = [round_exactly(float32(v * ratio), "half_even") for v in c.tolist()]
        moved.append(scaled if q.dtype.name == "uint8" else c.tolist())
    sign = 1 if op == "add" else -1
    expected = [x + sign * y for x, y in zip(*moved, strict=True)]
    assert OPS[op].with_form("rescaled").compute_int(node.attrs, *centered).tolist() == expected
    assert max(map(abs, expected)) <= node.bound < 2**24 and node.proved


@pytest.mark.parametrize("op", ["add", "sub"])
@pytest.mark.parametrize("channels", [3, 40, 64])
def test_all_engines_agree(channels: int, op: str) -> None:
    graph, data = residual(channels, op)
    keys = [f"sum{i}:{slot}" for i in range(2) for slot in range(2)]
    for chosen in itertools.product((8, 23), repeat=4):
        result = compare_plan_exactly(planned(graph, data, dict(zip(keys, chosen, strict=True))), data)
        assert result.same, f"{chosen}: {result}"


@pytest.mark.parametrize("op", ["add", "sub"])
def test_wide_operands_are_those_of_a_common_scale(op: str) -> None:
    """Their integers, kernels, costs and ONNX nodes do not depend on the form."""
    graph, data = residual(op=op)
    plans = [planned(graph, data, {}, chip) for chip in (COMMON, CHIP)]
    (expected,), (out,) = (IntegerModel(plan).run(data) for plan in plans)
    assert count_differing(expected, out) == 0
    facts = [(plan_cost(p).rows, [(r.node, r.kernel) for r in Executor(p).explain().rows]) for p in plans]
    assert facts[0] == facts[1]
    pytest.importorskip("onnx")
    common, rescaled = ([n.op_type for n in make_onnx(p, "qoperator").model.graph.node] for p in plans)
    assert common == rescaled


def test_one_shot_reads_int32() -> None:
    graph, data = residual()
    plan = hago.quantize(graph, CHIP, data).plan
    assert {q.dtype for name in ("sum0", "sum1") for q in plan.nodes[name].operands if q is not None} == {INT32}


@pytest.mark.parametrize("op", ["add", "sub"])
@pytest.mark.parametrize("limited", [False, True])
def test_a_search_of_latency_chooses_bytes_and_stays_exact(limited: bool, op: str) -> None:
    graph, data = residual(16, op)
    chip = replace(CHIP, cost={"clock_hz": 1e9})
    sums = [f"sum{i}:{slot}" for i in range(2) for slot in range(2)]
    most, least = (plan_cost(planned(graph, data, b, chip))["latency"] for b in ({}, dict.fromkeys(sums, 8)))
    goal = {"budget_cost": f"latency <= {(most + least) / 2} s"}
    if not limited:
        goal = {"minimize": "latency", "keep": "sqnr >= 20 dB"}
    strategy, _ = hago.search_quantize_strategy(graph, chip, [(x,) for x in data], progress=False, **goal)
    plan = hago.create_quantizer(graph, chip, strategy).plan
    assert any(strategy.bits[key] == 8 for key in sums)
    assert plan_cost(plan)["latency"] <= (most + least) / 2
    result = compare_plan_exactly(plan, data)
    assert result.same and result.compared > 0, str(result)


@needs_kernels
def test_a_residual_stream_of_bytes_is_stored_once() -> None:
    """The kernel of a convolution adds the bytes, and stores those that the next convolution and the next sum read."""
    graph, data = residual()
    plan = planned(graph, data, {"sum0:1": 8, "sum1:1": 8})
    lowering = Lowering(wire(plan), KernelConstantCache(), exact_kernels())
    lowered = lowering.lower()
    assert [u.nodes for u in lowered.uses if "sum0" in u.nodes] == [("conv0", "sum0")]
    (step,) = (s for s in lowered.steps if s.outputs[0].startswith("sum0"))
    (name,) = step.outputs
    assert [edge for edge, read in lowering.layouts.names.items() if read == name and edge.dst != "relu0"] == [
        *(e for e in graph.edges if graph.source(e) == "relu0")
    ]
    (value,) = (v for k, v in lowering.layouts.conversions("sum0").items() if k == name)
    assert value is not None and value.target is not None and value.target.dtype.name == "uint8"


@needs_kernels
def test_kernels_compute_constants_and_broadcast_operands() -> None:
    b = Builder()
    x = b.conv2d(b.input(8, 5, 5), seeded(8, 8, 3, 3, seed=1))
    y = b.call("add", x, b.const(seeded(8, 1, 1, seed=2)), name="constant")
    b.call("add", y, b.call("adaptive_max_pool2d", y, output_size=[1, 1]), name="broadcast")
    graph, data = b.graph(), [seeded(2, 8, 5, 5, seed=3)]
    for bits in itertools.product((8, 23), repeat=2):
        chosen = dict(zip(("constant:0", "constant:1"), bits, strict=True))
        plan = planned(graph, data, chosen | {k.replace("constant", "broadcast"): v for k, v in chosen.items()})
        assert compare_plan_exactly(plan, data).same
        kernels = {r.node: r.kernel for r in Executor(plan).explain().rows}
        assert all(kernels[n].startswith("native") for n in ("constant", "broadcast"))


def test_a_stored_plan_keeps_its_rescalings() -> None:
    graph, data = residual()
    plan = planned(graph, data, {"sum0:1": 8, "sum1:0": 8, "sum1:1": 8})
    document, tensors = plan_to_document(plan)
    read = plan_from_document(document, tensors, "here")
    (expected,), (out,) = IntegerModel(plan).run(data), IntegerModel(read).run(data)
    assert count_differing(expected, out) == 0


def test_only_the_qoperator_form_of_onnx_has_them() -> None:
    graph, data = residual()
    plan = planned(graph, data, {"sum0:0": 8, "sum0:1": 8, "sum1:0": 8, "sum1:1": 8})
    check_plan(plan, "qoperator")
    with pytest.raises(Exception, match="24 bits in int32; QuantizeLinear writes at most 16"):
        check_plan(plan, "qdq")


def test_narrow_registers_are_refused() -> None:
    desc = CHIP.ops["add"][0]
    register = Accumulator(INT16)
    narrow = replace(CHIP, ops={**CHIP.ops, "add": (replace(desc, out_dtypes=INT16, accumulator=register),)})
    with pytest.raises(HardwareError, match="sums of the form rescaled of add have 25 bits.*got int16"):
        check_hardware(narrow)


def test_a_chip_that_requantizes_at_the_output_has_sums_of_bytes() -> None:
    graph, data = residual()
    chip = load_hardware("openvino_cpu")
    sums = replace(chip.ops["add"][0], form="rescaled", accumulator=Accumulator(INT32))
    resolver = resolver_of(graph, replace(chip, ops={**chip.ops, "add": (sums,)}), data)
    plan = resolver(resolver.space.widest())
    assert plan.nodes["sum0"].out.dtype.bits == 8
    assert compare_plan_exactly(plan, data).same


@pytest.mark.parametrize("bits", [{"add:1": 8}, {"add:0": 8, "add:1": 8}])
def test_training_computes_the_same_and_passes_gradients(bits: dict[str, int]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            return torch.relu(self.second(x) + x)

    torch.manual_seed(0)
    module, x = Block().eval(), seeded(4, 6, 7, 7, seed=3)
    quantizer = hago.quantize(module, CHIP, [x], fix_bits=bits, corrections="none")
    trained = hago.prepare_qat(module, CHIP, quantizer.strategy)
    out = trained(x)
    assert out.detach().equal(quantizer.realize()(x))
    out.square().mean().backward()
    weights = [p for name, p in trained.named_parameters() if name.endswith("weight")]
    assert len(weights) == 2 and all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in weights)
