"""Consistency checks of a Plan that was read from a file.

`plan_from_document` calls `check_plan` for every Plan that it reads, since kernels rely on its shapes, windows, ranges
and tables. Facts that a Plan states twice must agree, and its parts must fit one another. Every Plan that a Resolver
makes passes, which is tested as a law. Values that are stated once (weights, scales, multipliers) are not checked: with
other values it would be another model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.groups import groups_of
from hago.arithmetic.types import TORCH_DTYPES, Edge, QParams
from hago.errors import HagoError
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node, infer_shape, read_tree, run_without_values
from hago.ops import IntegerForm, Ops, Site, opaque
from hago.plan.accumulators import MOST_PARTS
from hago.plan.plan import NodePlan, Plan
from hago.plan.topology import weight_edge

#: The most entries of a value at batch 1.
LARGEST: Final = 1 << 31


def check_plan(plan: Plan) -> None:
    """Check that the parts of a Plan agree.

    Raises:
        HagoError: two parts contradict each other; names the node or the edge.
    """
    _check_inputs_and_outputs(plan.graph)
    for node in plan.graph:
        _check_node(plan, node)
    _check_opaque_calls(plan.graph, plan.ops)
    for name, node_plan in plan.nodes.items():
        _check_integer(plan, plan.graph[name], node_plan)
    for edge in plan.graph.edges:
        _check_edge(plan, edge)
    for edge in plan.weights:
        _check_weight(plan, edge)


# ---------------------------------------------------------------- the graph
def _check_inputs_and_outputs(graph: Graph) -> None:
    """Check that inputs and outputs are as many as their nesting has, and that every input node is an input."""
    input_nodes = [n.name for n in graph if n.op == INPUT]
    if sorted(input_nodes) != sorted(graph.inputs):
        raise HagoError(
            f"the graph's inputs are {', '.join(graph.inputs)}; its input nodes are {', '.join(input_nodes)}"
        )
    for spec, count, is_input in ((graph.in_spec, len(input_nodes), True), (graph.out_spec, len(graph.outputs), False)):
        leaves = count if spec is None else read_tree(spec).num_leaves
        if leaves < count or (leaves > count and not is_input):
            raise HagoError(f"got {count} {'inputs' if is_input else 'outputs'}, and a nesting of {leaves}")


def _check_node(plan: Plan, node: Node) -> None:
    """Check that a node's shape follows from its attributes and the shapes of its inputs."""
    graph = plan.graph
    _check_size(node.name, node.shape or ())
    if node.op in (INPUT, CONST):
        dtype = TORCH_DTYPES.get(str(node.dtype))
        shape = node.shape if node.op == INPUT else tuple(graph.consts[node.name].shape)
        if node.inputs or node.shape is None or node.shape != shape or dtype is None:
            raise HagoError(f"node {node} is an {node.op} with inputs, another shape than its values, or no dtype")
        return
    shapes = [graph[s].shape for s in node.inputs]
    if node.op == opaque.NAME or any(s is None for s in shapes):
        return
    shape = infer_shape(node, [s for s in shapes if s is not None], plan.ops)
    if shape != node.shape:
        raise HagoError(f"node {node.name!r} ({node.op}) has the shape {node.shape}; its attributes give {shape}")


def _check_opaque_calls(graph: Graph, ops: Ops) -> None:
    """Check that opaque calls accept their operands, and give values of the shapes that the graph states.

    They are run on fake tensors, at batch 1, with all nodes that they depend on. So a file cannot make hago allocate
    memory that its shapes do not show.

    Raises:
        HagoError: the first node that cannot be run, or that gives another shape.
    """
    if not any(node.op == opaque.NAME for node in graph):
        return
    run_without_values(graph, ops, _check_value)


def _check_value(node: Node, value: Any) -> None:
    for tensor in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(tensor, Tensor):
            _check_size(node.name, tuple(tensor.shape))
    if isinstance(value, Tensor) and node.shape is not None and tuple(value.shape) != node.shape:
        raise HagoError(f"node {node.name!r} has the shape {node.shape}; its call gives {tuple(value.shape)}")


def _check_size(name: str, shape: tuple[int, ...]) -> None:
    if math.prod(shape) > LARGEST:
        raise HagoError(f"node {name!r} has the shape {shape}; a value has at most {LARGEST} entries a sample")


def _check_edge(plan: Plan, edge: Edge) -> None:
    """Check that an edge's SimQ converts the qparams of its producer to those of its reader."""
    source, reader, simq = plan.nodes.get(plan.graph.source(edge)), plan.nodes.get(edge.dst), plan.edges[edge]
    given = plan.weights[edge].qparams if edge in plan.weights else None if source is None else source.out
    taken = None if edge.dst == OUTPUT or reader is None else reader.operands[edge.slot]
    ends = (given, given) if simq is None else (simq.source, simq.target)
    if ends[0] is not given or ends[1] is not taken or (simq is not None and given is taken):
        conversion = "nothing" if simq is None else str(simq)
        raise HagoError(f"edge {edge} converts {conversion}; its producer gives {given}, its reader takes {taken}")


def _check_weight(plan: Plan, edge: Edge) -> None:
    """Check that a float node's integer weight is the weight operand of its op, a constant, of its shape and within its
    range."""
    if edge != weight_edge(plan.graph[edge.dst], plan.ops):
        raise HagoError(f"edge {edge} has integers that a float node reads; its op has no weight there")
    weight, source = plan.weights[edge], plan.graph[plan.graph.source(edge)]
    q, desc = weight.qparams, weight.desc
    fits = desc.is_weight_only and desc.in_dtype(edge.slot) == q.dtype and edge.dst not in plan.nodes
    fits = fits and q.group == (None if desc.groups is None else desc.groups.size)
    if not (fits and source.op == CONST and source.shape is not None and _stands_along(q, source.shape)):
        raise HagoError(f"edge {edge} has integers that its signature or its constant do not allow")
    if not _is_within_range(q, weight.integers, source.shape):
        raise HagoError(f"edge {edge} has integers outside of its range, or of another shape than its constant")


def _is_within_range(q: QParams, values: Tensor, shape: tuple[int, ...] | None) -> bool:
    """Whether centered integers have a shape and are within the range of qparams."""
    if values.shape != shape:
        return False
    c, zero = values.to(torch.int64), q.spread_over(values.shape).zero_point
    return bool(((c >= q.qmin - zero) & (c <= q.qmax - zero)).all())


# ---------------------------------------------------------------- integer nodes
# A rule of _RULES returns whether it holds for a node plan; its docstring completes "expected: ..." in the message.
def _check_integer(plan: Plan, node: Node, node_plan: NodePlan) -> None:
    form = plan.ops[node.op].integer if node.op in plan.ops else None
    if form is None or not node_plan.desc.is_integer or node.shape is None:
        raise HagoError(f"node {node.name!r} ({node.op}) has integers, which its op, signature or shape do not allow")
    for rule in _RULES:
        try:
            holds = rule(plan, node, node_plan, form)
        except (HagoError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise HagoError(f"node {node.name!r} ({node.op}): {error}; expected: {rule.__doc__}") from error
        if not holds:
            raise HagoError(f"node {node.name!r} ({node.op}): expected: {rule.__doc__}")


def _operands(plan: Plan, node: Node, node_plan: NodePlan, form: IntegerForm) -> bool:
    """qparams for every operand that is quantized, and for no other"""
    kinds = [form.slot(slot) for slot in range(len(node.inputs))]
    return [q is None for q in node_plan.operands] == [kind == "plain" for kind in kinds]


def _scales(plan: Plan, node: Node, node_plan: NodePlan, form: IntegerForm) -> bool:
    """scales and zero points that stand along axes of the values they are for"""
    pairs = [(q, plan.graph[source].shape) for q, source in zip(node_plan.operands, node.inputs, strict=True)]
    pairs += [(node_plan.register, node.shape), (node_plan.out, node.shape)]
    return all(shape is not None and _broadcasts(q, shape) for q, shape in pairs if q is not None)


def _output(plan: Plan, node: Node, node_plan: NodePlan, form: IntegerForm) -> bool:
    """an output that comes from the accumulator, or from a table, and from nothing else"""
    if node_plan.desc.register.dtype != node_plan.register.dtype:
        return False
    if form.table or node_plan.out_simq is None:
        return node_plan.out_simq is None and (form.table or node_plan.out is node_plan.register)
    return node_plan.out_simq.source is node_plan.register and node_plan.out_simq.target is node_plan.out


def _accumulator(plan: Plan, node: Node, node_plan: NodePlan, form: IntegerForm) -> bool:
    """an accumulator that is bounded, without a zero point unless values are only moved about"""
    only_moves = form.outputs_fit_input_dtype and node_plan.register.dtype == node_plan.desc.in_dtype(0)
    most_parts = 1 if form.split is None else MOST_PARTS
    bounded = all(math.isfinite(b) and b >= 0 for b in (node_plan.bound, node_plan.raw_bound))
    centered = only_moves or not bool(node_plan.register.zero_point.any())
    return bounded and node_plan.keeps_input_dtype == only_moves and centered and 1 <= node_plan.parts <= most_parts


def _constants(plan: Plan, node: Node, node_plan: NodePlan, form: IntegerForm) -> bool:
    """integers within range, and of its shape, for every constant operand that is quantized"""
    for slot, source in enumerate(node.inputs):
        q, values = node_plan.operands[slot], node_plan.consts.get(slot)
        if (values is None) == (plan.graph[source].op == CONST and q is not None):
            return False
        if values is not None and q is not None and not _is_within_range(q, values, plan.graph[source].shape):
            return False
    return set(node_plan.consts) <= set(range(len(node.inputs)))


def _groups(plan: Plan, node: Node, node_plan: NodePlan, form: IntegerForm) -> bool:
    """groups with multipliers where the signature has them, integers within their range, and sums that may overflow"""
    groups, of_op = node_plan.groups, node_plan.desc.groups
    if groups is None or of_op is None or form.weight is None or form.weight.slot != groups.slot:
        return groups is None and of_op is None
    shape, sums = plan.graph[node.inputs[groups.slot]].shape, groups.sums
    largest = None if sums is None else sums.largest
    holds = largest is None or (math.isfinite(largest) and largest > 0 and bool(groups.integers.any()))
    return holds and _is_within_range(groups.stored, groups.integers, shape)


def _table(plan: Plan, node: Node, node_plan: NodePlan, form: IntegerForm) -> bool:
    """a table of the output of every integer input, where the op is a table"""
    source, out, table = node_plan.operands[0], node_plan.out, node_plan.table
    if table is None or source is None or not form.table:
        return table is None and not form.table
    low, high = out.qmin - out.zero_point, out.qmax - out.zero_point
    is_complete = table.dtype == torch.int64 and table.shape == (source.qmax - source.qmin + 1,)
    return is_complete and bool(((table >= low) & (table <= high)).all())


def _attributes(plan: Plan, node: Node, node_plan: NodePlan, form: IntegerForm) -> bool:
    """attributes in integer units of the form that the signature computes"""
    out = node_plan.out if form.table or node_plan.out_simq is not None else None
    derived = form.integer_attrs(node.attrs, Site(node_plan.operands, out, plan.hardware.requantize))
    same = {k: v for k, v in derived.items() if k in node.attrs and _is_unchanged(v, node.attrs[k])}
    return _has_structure_of(dict(node_plan.attrs), dict(derived)) and all(
        node_plan.attrs[k] == v for k, v in same.items()
    )


def _thresholds(plan: Plan, node: Node, node_plan: NodePlan, form: IntegerForm) -> bool:
    """pairs of thresholds for groups of the node"""
    keys = {f"{node.name}:out", *map(str, node.edges)}
    return set(node_plan.thresholds) <= keys and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(t, Tensor) for t in pair)
        for pair in node_plan.thresholds.values()
    )


#: The rules that every node plan must keep, checked in this order.
_RULES: Final[tuple[Callable[[Plan, Node, NodePlan, IntegerForm], bool], ...]] = (
    _operands,
    _scales,
    _output,
    _accumulator,
    _constants,
    _groups,
    _table,
    _attributes,
    _thresholds,
)


def _stands_along(q: QParams, shape: tuple[int, ...]) -> bool:
    """Whether the qparams of a weight are those of its groups, if it has groups, and else broadcast against it."""
    if q.group is None:
        return _broadcasts(q, shape)
    return len(shape) > 1 and q.scale.shape == q.zero_point.shape == groups_of(shape, q.group)


def _broadcasts(q: QParams, shape: tuple[int, ...]) -> bool:
    """Whether qparams, without groups, broadcast against a value without changing its shape."""
    return q.group is None and all(
        t.ndim <= len(shape) and all(n in (1, size) for n, size in zip(t.shape[::-1], shape[::-1], strict=False))
        for t in (q.scale, q.zero_point)
    )


def _is_unchanged(value: Any, original: Any) -> bool:
    """Whether a form leaves an attribute unchanged."""
    return not isinstance(value, (Tensor, QParams)) and type(value) is type(original) and bool(value == original)


def _has_structure_of(value: Any, model: Any) -> bool:
    """Whether a value has the types, keys, lengths, dtypes and shapes of `model`, and its texts and other values that
    are no numbers."""
    if type(value) is not type(model):
        return False
    if isinstance(model, Mapping):
        return set(value) == set(model) and all(_has_structure_of(value[k], v) for k, v in model.items())
    if isinstance(model, (list, tuple)):
        return len(value) == len(model) and all(map(_has_structure_of, value, model))
    if isinstance(model, Tensor):
        return bool(value.dtype == model.dtype and value.shape == model.shape)
    if isinstance(model, QParams):
        return _has_structure_of((value.scale, value.zero_point), (model.scale, model.zero_point))
    return isinstance(model, (int, float)) or bool(value == model)
