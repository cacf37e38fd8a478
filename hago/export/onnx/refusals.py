"""Plans that ONNX cannot express: the reasons, and hardware whose Plans it can.

`hago.export.onnx.export` calls `check_plan` before it writes anything. The error has one line for every reason, with
the nodes and edges that it concerns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.groups import in_groups
from hago.arithmetic.numerics import EXACT_FLOAT32, OVERFLOWS, dequantize
from hago.arithmetic.schemes import Grid
from hago.arithmetic.types import INT32, Edge, SimQ
from hago.errors import HagoError
from hago.export.onnx.engines import ENGINES
from hago.export.onnx.integers import sums_in_int32, sums_in_int64
from hago.export.onnx.operators import unknown_reason, unsupported_reason
from hago.export.onnx.values import REQUANTIZE_FORMS, ROUNDING_NODES, quantizes_to
from hago.export.onnx.writer import GraphWriter
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.hardware import available_hardware, load_hardware
from hago.plan import NodePlan, Plan, Resolver, analyze, build_space
from hago.plan.feasibility import nearest_feasible
from hago.plan.topology import varies_along

#: The named forms of ops (`OpDesc.form`) that ONNX operators compute; they also compute ops without a named form.
ONNX_FORMS: Final = ("common_scale", "rescaled", "dequantize", "qlinear")
#: The forms in which Plans are written, see `hago.export.onnx.export.FORMS`.
_FORMS: Final = ("qdq", "qoperator")
#: Stands for the amount in the text of a reason.
_AMOUNT: Final = "{amount}"
#: The most nodes, and the most edges, that a line of an error names.
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason why ONNX cannot express a node or an edge.

    Args:
        place: the name of the node, or the key of the edge.
        reason: in words; `_AMOUNT` stands for the amount.
        amount: the largest sum, where the reason is one.
        on_edge: whether the place is an edge.
    """

    place: str
    reason: str
    amount: float | None = None
    on_edge: bool = False


def check_plan(plan: Plan, form: str) -> None:
    """Check that ONNX can express a Plan in this form.

    Raises:
        HagoError: it cannot; the message lists the reasons, with the nodes and edges that each concerns, and names the
            form and the hardware that ships with hago with which the network can be written.
    """
    refusals = list(_refusals(plan, form))
    if not refusals:
        return
    listed = "\n".join(f"  {line}" for line in grouped(refusals))
    raise HagoError(
        f"ONNX in {form} form cannot express this strategy for {plan.hardware.name}:\n{listed}{_what_can(plan, form)}"
    )


def grouped(refusals: Sequence[Refusal]) -> Iterator[str]:
    """One line for every reason, with its places."""
    by_reason: dict[str, list[Refusal]] = {}
    for refusal in dict.fromkeys(refusals):
        by_reason.setdefault(refusal.reason, []).append(refusal)
    for reason, group in by_reason.items():
        kinds = [
            ("edge" if on_edge else "node", [r.place for r in group if r.on_edge == on_edge]) for on_edge in (0, 1)
        ]
        places = " and ".join(_places(kind, names) for kind, names in kinds if names)
        amounts = [r.amount for r in group if r.amount is not None]
        yield f"{places}: {reason.replace(_AMOUNT, f'{max(amounts):.0f}') if amounts else reason}"


def _places(kind: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{kind} {names[0]!r}"
    return f"{len(names)} {kind}s ({', '.join(map(repr, names[:_NAMED]))}{', ...' if len(names) > _NAMED else ''})"


# ---------------------------------------------------------------- what can be written instead
def _what_can(plan: Plan, form: str) -> str:
    """A line with the other form, and the hardware, that can be written; empty if there are none."""
    ways = [f"take the form {other}" for other in _FORMS if other != form and not any(_refusals(plan, other))]
    names = [n for n in expressible_hardware(_with_values(plan), form) if n != plan.hardware.name]
    # that of the engines first
    names.sort(key=lambda name: not name.startswith(tuple(ENGINES)))
    if names:
        ways.append(f"quantize for hardware that the {form} form can express for this network: {', '.join(names)}")
    return f"\nWhat helps: {', or '.join(ways)}" if ways else ""


def _with_values(plan: Plan) -> Graph:
    """The graph of a Plan; constants that its stored model left out have the values that its integers stand for."""
    consts = dict(plan.graph.consts)
    kept = [
        (node_plan.operands[slot], integers, Edge(name, slot))
        for name, node_plan in plan.nodes.items()
        for slot, integers in node_plan.consts.items()
    ]
    kept += [(weight.qparams, weight.integers, edge) for edge, weight in plan.weights.items()]
    for qparams, integers, edge in kept:
        source = plan.graph[edge.dst].inputs[edge.slot]
        if consts[source].is_meta and qparams is not None:
            consts[source] = dequantize(integers, qparams).to(consts[source].dtype)
    return replace(plan.graph, consts=consts)


def expressible_hardware(graph: Graph, form: str) -> list[str]:
    """The hardware that ships with hago for which ONNX can express the Plan of a graph with the most bits."""
    names = []
    for name in available_hardware():
        hardware = load_hardware(name)
        requantize = hardware.requantize
        if requantize.form not in REQUANTIZE_FORMS or requantize.rounding not in ROUNDING_NODES:
            continue  # of no Plan
        try:
            topology = analyze(graph, hardware, (), hardware.known_ops)
            space = build_space(graph, hardware, topology, None, hardware.known_ops)
            resolver = Resolver(graph, hardware, topology, space, _OwnRanges(graph), hardware.known_ops)
            point = nearest_feasible(resolver, space.widest())
        except HagoError:
            continue
        if point is not None and point.plan.nodes and not any(_refusals(point.plan, form)):
            names.append(name)
    return names


class _OwnRanges:
    """A ThresholdSource of the ranges of constants, and of [-1, 1] for all other values: what ONNX can express does not
    depend on the ranges of activations."""

    def __init__(self, graph: Graph) -> None:
        self._consts = graph.consts

    def signed(self, key: str, source: str) -> bool:
        return source not in self._consts or bool((self._consts[source] < 0).any())

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        if source not in self._consts:
            return torch.tensor([-1.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
        rows = self._consts[source].to(torch.float64)
        channels = 1 if channel_axis is None else rows.shape[channel_axis]
        rows = (rows if channel_axis is None else rows.movedim(channel_axis, 0)).reshape(channels, -1)
        rows = rows if grid.group is None else in_groups(rows, grid.group).flatten(0, 1)
        return rows.amin(1).clamp_max(0.0), rows.amax(1).clamp_min(0.0)


# ---------------------------------------------------------------- the rules
def _refusals(plan: Plan, form: str) -> Iterator[Refusal]:
    """The nodes and edges that ONNX cannot express in this form, each with the reason."""
    draft = GraphWriter(plan.graph, plan.ops)
    for node in plan.graph:
        if node.op in (INPUT, CONST):
            continue
        # in the form qoperator, integer nodes have operators of their own
        is_float = form == "qdq" or node.name not in plan.nodes
        if (why := unsupported_reason(draft, node) if is_float else unknown_reason(node)) is not None:
            yield Refusal(node.name, why)
        if node.name in plan.nodes:
            yield from _node_refusals(plan, node, plan.nodes[node.name], form)
    for name in plan.graph.outputs:
        if plan.graph[name].shape is None:
            yield Refusal(name, "is returned and no tensor; ONNX returns tensors only")
    for edge, simq in plan.edges.items():
        if simq is not None and (edge.dst == OUTPUT or edge.slot not in _constant_slots(plan, edge)):
            yield from _simq_refusals(plan, simq, form, str(edge), on_edge=True)


def _constant_slots(plan: Plan, edge: Edge) -> tuple[int, ...]:
    node = plan.nodes.get(edge.dst)
    return () if node is None else tuple(node.consts)


def _node_refusals(plan: Plan, node: Node, node_plan: NodePlan, form: str) -> Iterator[Refusal]:
    register, desc = node_plan.desc.register, node_plan.desc
    largest = max(node_plan.bound, node_plan.raw_bound)
    if desc.form not in (None, *ONNX_FORMS):
        yield Refusal(node.name, f"{node.op} is computed in the form {desc.form}; ONNX has no operator that does that")
    if not node_plan.proved and (register.overflow != "wrap" or register.dtype != INT32):
        yield Refusal(
            node.name,
            f"sums may leave the register, up to {_AMOUNT} in {register.dtype}, which "
            f"{OVERFLOWS[register.overflow].verb}; ONNX sums in int32 that wraps. Take fewer bits",
            largest,
        )
    elif register.dtype.bits > 32 and largest > INT32.max:
        yield Refusal(node.name, f"sums reach {_AMOUNT}; ONNX sums in int32. Take fewer bits", node_plan.bound)
    elif form == "qoperator" and not node_plan.proved and sums_in_int64(node.op):
        yield Refusal(
            node.name,
            f"sums may leave the register, up to {_AMOUNT} in {register.dtype}, which wraps; the file sums {node.op} "
            "in int64. Take fewer bits",
            largest,
        )
    elif form == "qoperator" and _float32_changes_sums(plan, node, node_plan):
        yield Refusal(
            node.name,
            f"sums reach {_AMOUNT}; ONNX has {node.op} with such operands in float32 only, which ends at 2**24",
            node_plan.bound,
        )
    for slot in range(len(node.inputs)):
        if (rescaling := node_plan.rescaling(slot)) is not None and slot not in node_plan.consts:
            yield from _simq_refusals(plan, rescaling, form, node.name)
    if node_plan.out_simq is not None and desc.form in (None, "common_scale"):
        yield from _simq_refusals(plan, node_plan.out_simq, form, node.name)


def _float32_changes_sums(plan: Plan, node: Node, node_plan: NodePlan) -> bool:
    """Whether a sum of a node in the file may differ from that of the Plan because float32 does not hold it.

    The file adds in int32, in int64 or in float32, and stores the total in float32. To round the total changes nothing
    where the Plan multiplies it by a float32 ratio, which rounds it to float32, too (N3); a shift is exact.
    """
    if node_plan.bound < EXACT_FLOAT32:
        return False
    if plan.hardware.requantize.form == "shift":
        return True
    adds_exactly = sums_in_int32(node.op, node_plan.operands) or sums_in_int64(node.op)
    return not (node_plan.keeps_input_dtype or adds_exactly)


def _simq_refusals(plan: Plan, simq: SimQ, form: str, place: str, on_edge: bool = False) -> Iterator[Refusal]:
    """Why ONNX cannot express a conversion on an edge or at a node's output."""
    for reason in _simq_reasons(plan, simq, form):
        yield Refusal(place, reason, on_edge=on_edge)


def _simq_reasons(plan: Plan, simq: SimQ, form: str) -> Iterator[str]:
    requantize = plan.hardware.requantize
    for q in (simq.source, simq.target):
        if q is not None and q.group is None and len(varies_along(q.scale, q.scale.ndim)) > 1:
            yield "scales vary along several axes; ONNX has one per tensor or per entry of one axis"
    if simq.target is None:
        return
    if simq.source is not None and requantize.form not in REQUANTIZE_FORMS:
        means = "by an integer and a shift" if requantize.form == "multiplier_shift" else "in another arithmetic"
        yield f"{requantize.form} requantizes {means}; ONNX multiplies by a float32"
    if requantize.rounding not in ROUNDING_NODES:
        yield f"rounds {requantize.rounding}; ONNX has {', '.join(ROUNDING_NODES)}"
    elif form == "qdq" and requantize.rounding != "half_even":
        yield f"rounds {requantize.rounding}; QuantizeLinear rounds half to even"
    target = simq.target.dtype
    if form == "qdq" and not quantizes_to(target):
        yield f"holds {_bits(simq)} bits in {target}; QuantizeLinear writes at most 16"


def _bits(simq: SimQ) -> int:
    assert simq.target is not None
    return (simq.target.qmax - simq.target.qmin).bit_length()
