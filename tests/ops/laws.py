"""The laws of operators, as functions: `test_laws.py` runs them on every op file, `test_laws_bite.py`
on rules that were broken. Kernels alone (carriers, scale, bound of a form) are in `test_kernels.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from plans import fixed_resolver
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hago.arithmetic.equality import equal
from hago.arithmetic.numerics import apply_simq
from hago.arithmetic.types import QParams
from hago.errors import GraphError
from hago.graph.execute import channels_last, compute_real, infer_shape, run_real
from hago.graph.graph import Graph, Node
from hago.hardware.hardware import Hardware
from hago.ops import OPS, Ops
from hago.ops._rule import OpRule, Refusal, Sample
from hago.plan.plan import NodePlan, Plan
from hago.plan.resolve import Resolver
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.reference import IntegerModel, center
from hago.serialization.tensor_file import dtype_name
from hago.simulation.simulator import Simulator

from .samples import at_batch, compute_nodes, inputs_of


# ---------------------------------------------------------------- on real values
def check_import(name: str, sample: Sample, model: nn.Module, graph: Graph, ops: Ops = OPS) -> None:
    """One node of the op, which equals torch bit for bit at other batch sizes than it was exported at."""
    assert [n.op for n in compute_nodes(graph)] == [name]
    for batch in (1, 3):
        inputs = inputs_of(sample, at_batch(sample, batch, seed=batch))
        expected = model(*inputs)
        (got,) = run_real(graph, inputs, ops=ops)
        if batch == 1 and got.ndim > expected.ndim:
            expected = expected.reshape(got.shape)  # torch's own squeeze() drops a batch of one
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def check_shape(graph: Graph, ops: Ops = OPS) -> None:
    """The shape at batch 1 is what running on meta tensors gives, and what running on data gives."""
    for node in compute_nodes(graph):
        assert node.shape == infer_shape(node, [graph[s].shape or () for s in node.inputs], ops)


def check_any_layout(graph: Graph, inputs: Sequence[Tensor], ops: Ops = OPS) -> None:
    """Equal values where the first and the last axis have changed places in memory, and where channels lie last."""
    (expected,) = run_real(graph, inputs, ops=ops)
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    for laid in (turned, [channels_last(x) for x in inputs]):
        (found,) = run_real(graph, laid, ops=ops)
        assert equal(found, expected)


def check_early_clipping(rule: OpRule, graph: Graph, inputs: Sequence[Tensor], ops: Ops = OPS) -> None:
    """Where a producer may take the op's range, clipping to it, 0 included, changes nothing of the op's output."""
    form = rule.integer
    assert (
        form is not None and form.slots == ("follow",) and form.outputs_fit_input_dtype and form.allows_early_clipping
    )
    (expected,) = run_real(graph, inputs, ops=ops)
    (found,) = run_real(
        graph, [x.clamp(expected.min().clamp(max=0), expected.max().clamp(min=0)) for x in inputs], ops=ops
    )
    assert torch.equal(found, expected)


def check_moves_values(name: str, cases: Sequence[tuple[Graph, Sequence[Tensor]]], ops: Ops = OPS) -> None:
    """An op says that it moves values if and only if every entry of its results is one of an operand, or padding.

    Args:
        cases: the op's samples, with inputs; entries of real operands are distinct.
    """
    moves = []
    for graph, inputs in cases:
        (node,) = compute_nodes(graph)
        (found,) = run_real(graph, inputs, ops=ops)
        operands = [*inputs, *graph.consts.values()]
        entries = {v for x in operands if x.is_floating_point() for v in x.flatten().tolist()}
        padding = {node.attrs["value"]} if "value" in node.attrs else set()
        moves.append(set(found.flatten().tolist()) <= entries | padding)
    assert all(moves) == ops[name].moves_values


def check_clips_or_averages(graph: Graph, inputs: Sequence[Tensor], ops: Ops = OPS) -> None:
    """Every entry of the result lies between the least and the largest operand and the limits that attributes state."""
    (node,) = compute_nodes(graph)
    (found,) = run_real(graph, inputs, ops=ops)
    limits = [v for v in (node.attrs.get("min"), node.attrs.get("max")) if v is not None]
    hull = torch.cat([*(x.flatten() for x in inputs), torch.tensor([0.0, *limits])])
    slack = 1e-6 * hull.abs().max()  # averages are rounded
    assert found.min() >= hull.min() - slack and found.max() <= hull.max() + slack


def check_cost(sample: Sample, graph: Graph, ops: Ops = OPS) -> None:
    """As many multiply-accumulates as torch counts, at any batch."""
    (node,) = compute_nodes(graph)
    assert node.shape is not None
    macs = ops[node.op].macs(node.attrs, [graph[s].shape or () for s in node.inputs], node.shape)
    for batch in (1, 3):
        with FlopCounterMode(display=False) as counter:
            sample.fn(*at_batch(sample, batch, seed=0))
        assert 2 * macs * batch == counter.get_total_flops()


def check_refuse(rule: OpRule, refusal: Refusal, ops: Ops = OPS) -> None:
    """Wrong attributes or shapes are a GraphError that names the node, the op and the attribute."""
    node = Node("the_node", rule.name, tuple(f"x{i}" for i in range(len(refusal.shapes))), refusal.attrs)
    for refuse in (
        lambda: infer_shape(node, refusal.shapes, ops),
        lambda: compute_real(node, [torch.ones(s) for s in refusal.shapes], ops),
    ):
        with pytest.raises(GraphError) as caught:
            refuse()
        assert all(word in str(caught.value) for word in (node.name, rule.name, refusal.names))


def check_dtypes(graph: Graph, inputs: Sequence[Tensor], ops: Ops = OPS) -> None:
    """Every node states the dtype of the value that is computed there, and none where that is no tensor."""
    values: dict[str, Any] = dict(graph.consts)
    run_real(graph, inputs, lambda node, value: values.__setitem__(node.name, value), ops)
    for node in graph:
        value = values[node.name]
        assert node.dtype == (dtype_name(value.dtype) if isinstance(value, Tensor) else None), node


# ---------------------------------------------------------------- rectify
def real_range(q: QParams) -> tuple[float, float]:
    """The smallest and the largest real value that q stands for."""
    low, high = (q.qmin - q.zero_point) * q.scale, (q.qmax - q.zero_point) * q.scale
    return float(low.min()), float(high.max())


def _resolved(
    graph: Graph, hardware: Hardware, ranges: Mapping[str, tuple[float, float]], bits: Mapping[str, int], ops: Ops
) -> NodePlan:
    resolver = fixed_resolver(graph, hardware, ranges, ops)
    (node,) = compute_nodes(graph)
    return resolver({k: bits.get(k, g.choices[0]) for k, g in resolver.space.groups.items()}).nodes[node.name]


def check_rectify(
    graph: Graph,
    hardware: Hardware,
    ranges: Mapping[str, tuple[float, float]],
    bits: Mapping[str, int],
    ops: Ops = OPS,
) -> None:
    """Operands on one scale and zero point: none narrower than it asked, and asking again changes nothing. Where they
    are brought to it inside the node, its accumulator holds their sum.

    Args:
        graph: one node, all of whose operands are inputs and belong on one scale.
        ranges, bits: what is asked, by edge.
    """
    (node,) = compute_nodes(graph)
    plan = _resolved(graph, hardware, ranges, bits, ops)
    first = plan.operands[0]
    assert first is not None
    quantum = float(first.scale)
    for q, edge in zip(plan.operands, node.edges, strict=True):
        if plan.desc.requantize_at == "output":  # the steps of its own bits
            quantum = max(float(first.scale), max(map(abs, ranges[str(edge)])) / 2 ** (bits[str(edge)] - 1))
        assert q is not None and q.scale.equal(first.scale) and q.zero_point.equal(first.zero_point)
        (low, high), (asked_low, asked_high) = real_range(q), ranges[str(edge)]
        # the end itself may be one quantum beyond the grid, and an affine zero point is rounded
        slack = quantum * (1 + 1e-6) + max(-asked_low, asked_high) * 1e-6
        assert low <= asked_low + slack and high >= asked_high - slack
    if plan.desc.requantize_at == "output":
        assert plan.proved
        return  # a common scale finer than any that was asked, or coarser in a narrow accumulator
    for edge in map(str, node.edges):
        alone = _resolved(graph, hardware, dict.fromkeys(ranges, ranges[edge]), dict.fromkeys(bits, bits[edge]), ops)
        own = alone.operands[0]
        assert own is not None and quantum >= float(own.scale) * (1 - 1e-6)
    if hardware.activation.scheme == "hago":
        asked = {str(e): _threshold(q) for e, q in zip(node.edges, plan.operands, strict=True)}
        again = _resolved(graph, hardware, asked, bits, ops).operands[0]
        assert again is not None and again.scale.equal(first.scale)


def _threshold(q: QParams | None) -> tuple[float, float]:
    """The range that the hago scheme gives this grid for."""
    assert q is not None
    end = float(q.scale) * (q.qmax - int(q.zero_point) + 1)
    return (-end if q.qmin < int(q.zero_point) else 0.0), end


# ---------------------------------------------------------------- overflow and bound
def register_holds(c: int, low: int, high: int, overflow: str) -> int:
    """What a register of [low, high] holds where `c` was computed, in Python's integers."""
    if overflow == "wrap":
        return (c - low) % (high - low + 1) + low
    return min(max(c, low), high)


def accumulators(plan: Plan, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """What every integer node computed before its register cut it, by the simulator."""
    seen: dict[str, Tensor] = {}
    Simulator(plan, watch=lambda node, c, lost: seen.__setitem__(node.name, c.clone())).run(inputs)
    return seen


def check_overflow(resolver: Resolver, inputs: Sequence[Tensor]) -> int:
    """Past the register's range, simulator and integer model hold what arithmetic says.

    Returns:
        How many accumulators were past the range.
    """
    plan = resolver(resolver.space.widest())
    past = 0
    held: dict[str, Tensor] = {}
    IntegerModel(plan).run(inputs, lambda n, v: held.__setitem__(n.name, v) if n.name in plan.nodes else None)
    simulated: dict[str, Tensor] = {}
    Simulator(plan).run(inputs, lambda n, v: simulated.__setitem__(n.name, v))
    for name, c in accumulators(plan, inputs).items():
        node = plan.nodes[name]
        register = node.desc.register
        assert not bool(node.register.zero_point.any()) or node.proved
        computed = [int(v) for v in c.flatten()]
        cut = [register_holds(v, register.dtype.min, register.dtype.max, register.overflow) for v in computed]
        expected = apply_simq(torch.tensor(cut).reshape(c.shape), node.out_simq, plan.hardware.requantize)
        past += sum(a != b for a, b in zip(computed, cut, strict=True))
        assert center(held[name], node.out).equal(expected)
        assert simulated[name].to(torch.int64).equal(expected)
    return past


def check_bound(plan: Plan, inputs: Iterable[Sequence[Tensor]]) -> int:
    """No accumulator passes the plan's bound, and where the plan says proved none leaves its register.

    Returns:
        How many accumulators were looked at.
    """
    count = 0
    for batch in inputs:
        for name, c in accumulators(plan, batch).items():
            node, dtype = plan.nodes[name], plan.nodes[name].desc.register.dtype
            count += c.numel()
            assert float(c.abs().max()) <= node.bound
            if node.proved:
                q = c + node.register.zero_point
                assert dtype.min <= int(q.min()) and int(q.max()) <= dtype.max
    return count


# ---------------------------------------------------------------- exactness
def check_exact(resolver: Resolver, inputs: Sequence[Tensor], points: Iterable[Mapping[str, int]]) -> None:
    """Simulator and integer model agree on every node, edge and output."""
    for bits in points:
        found = compare_plan_exactly(resolver(bits), inputs)
        assert found.compared > 0
        assert found.same, (dict(found.differences), dict(bits))


def extreme_inputs(graph: Graph, batch: int = 2) -> list[list[Tensor]]:
    """Inputs at and beyond every threshold: all up, all down, mixed, and infinite."""
    found = []
    for pattern in (1.0, -1.0, math.nan):
        generator = torch.Generator().manual_seed(1)
        tensors = []
        for name in graph.inputs:
            shape = (batch, *(graph[name].shape or ())[1:])
            if graph[name].dtype != "float32":
                tensors.append(torch.zeros(shape, dtype=torch.int64))
            elif math.isnan(pattern):
                tensors.append(torch.where(torch.rand(shape, generator=generator) < 0.5, -1e6, 1e6))
            else:
                tensors.append(torch.full(shape, 1e6 * pattern))
        found.append(tensors)
    return found
