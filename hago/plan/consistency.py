"""Consistency of a Plan that was read from a file: kernels rely on its shapes, windows, ranges and tables.

`plan_from_document` calls `check_plan` for every Plan that it reads. Whatever a Plan states twice must agree, and its
parts must fit one another. Every Plan that a Resolver makes passes, which is tested as a law. Values that are stated
once (weights, scales, multipliers) are not checked: with others it would be another model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import TORCH_DTYPES, Edge, QParams
from hago.errors import HagoError
from hago.graph.execute import infer_shape, run_without_values
from hago.graph.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.graph.nesting import read_tree
from hago.ops import Ops, _opaque
from hago.ops._rule import IntegerForm, Site
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
    _check_ends(plan.graph)
    for node in plan.graph:
        _check_node(plan, node)
    check_opaque(plan.graph, plan.ops)
    for name, made in plan.nodes.items():
        _check_integer(plan, plan.graph[name], made)
    for edge in plan.graph.edges:
        _check_edge(plan, edge)
    for edge in plan.weights:
        _check_weight(plan, edge)


# ---------------------------------------------------------------- the graph
def _check_ends(graph: Graph) -> None:
    """Inputs and outputs are as many as their nesting has, and every input node is given a value."""
    given = [n.name for n in graph if n.op == INPUT]
    if sorted(given) != sorted(graph.inputs):
        raise HagoError(f"the graph's inputs are {', '.join(graph.inputs)}; its input nodes are {', '.join(given)}")
    for spec, count, least in ((graph.in_spec, len(given), True), (graph.out_spec, len(graph.outputs), False)):
        leaves = count if spec is None else read_tree(spec).num_leaves
        if leaves < count or (leaves > count and not least):
            raise HagoError(f"{count} {'inputs' if least else 'outputs'} are nested as {leaves}")


def _check_node(plan: Plan, node: Node) -> None:
    """A node's shape is what its attributes make of those of its inputs."""
    graph = plan.graph
    _check_size(node.name, node.shape or ())
    if node.op in (INPUT, CONST):
        dtype = TORCH_DTYPES.get(str(node.dtype))
        shape = node.shape if node.op == INPUT else tuple(graph.consts[node.name].shape)
        if node.inputs or node.shape is None or node.shape != shape or dtype is None:
            raise HagoError(f"node {node} is an {node.op} with inputs, another shape than its values, or no dtype")
        return
    shapes = [graph[s].shape for s in node.inputs]
    if node.op == _opaque.NAME or any(s is None for s in shapes):
        return
    shape = infer_shape(node, [s for s in shapes if s is not None], plan.ops)
    if shape != node.shape:
        raise HagoError(f"node {node.name!r} ({node.op}) has the shape {node.shape}; its attributes give {shape}")


def check_opaque(graph: Graph, ops: Ops) -> None:
    """Opaque calls take their operands, and give values of the shapes that the graph says.

    They are run on tensors without values, at batch 1, with all that they read: so a file can ask for nothing whose
    size its shapes do not show.

    Raises:
        HagoError: the first node that cannot be run, or gives another shape.
    """
    if not any(node.op == _opaque.NAME for node in graph):
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
    """What travels on an edge begins as its producer gives it and ends as its reader takes it."""
    source, reader, simq = plan.nodes.get(plan.graph.source(edge)), plan.nodes.get(edge.dst), plan.edges[edge]
    given = plan.weights[edge].qparams if edge in plan.weights else None if source is None else source.out
    taken = None if edge.dst == OUTPUT or reader is None else reader.operands[edge.slot]
    ends = (given, given) if simq is None else (simq.source, simq.target)
    if ends[0] is not given or ends[1] is not taken or (simq is not None and given is taken):
        said = "nothing" if simq is None else str(simq)
        raise HagoError(f"on edge {edge} goes {said}; its producer gives {given}, its reader takes {taken}")


def _check_weight(plan: Plan, edge: Edge) -> None:
    """A weight that a float node reads as integers stands where its op has one, is a constant, of its shape and
    within its range."""
    if edge != weight_edge(plan.graph[edge.dst], plan.ops):
        raise HagoError(f"edge {edge} has integers that a float node reads; its op has no weight there")
    weight, source = plan.weights[edge], plan.graph[plan.graph.source(edge)]
    q, desc = weight.qparams, weight.desc
    fits = desc.is_weight_only and desc.in_dtype(edge.slot) == q.dtype and edge.dst not in plan.nodes
    if not (fits and source.op == CONST and source.shape is not None and _stands(q, source.shape)):
        raise HagoError(f"edge {edge} has integers that its signature or its constant do not allow")
    if not _holds(q, weight.integers, source.shape):
        raise HagoError(f"edge {edge} has integers outside of its range, or of another shape than its constant")


def _holds(q: QParams, values: Tensor, shape: tuple[int, ...] | None) -> bool:
    """Whether centered integers are of a shape and within range."""
    c = values.to(torch.int64)
    low, high = q.qmin - q.zero_point, q.qmax - q.zero_point
    return values.shape == shape and bool(((c >= low) & (c <= high)).all())


# ---------------------------------------------------------------- integer nodes
def _check_integer(plan: Plan, node: Node, made: NodePlan) -> None:
    form = plan.ops[node.op].integer if node.op in plan.ops else None
    if form is None or not made.desc.is_integer or node.shape is None:
        raise HagoError(f"node {node.name!r} ({node.op}) has integers, which its op, signature or shape do not allow")
    for right in _RIGHTS:
        try:
            is_right = right(plan, node, made, form)
        except (HagoError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise HagoError(f"node {node.name!r} ({node.op}): {error}; expected: {right.__doc__}") from error
        if not is_right:
            raise HagoError(f"node {node.name!r} ({node.op}): expected: {right.__doc__}")


def _operands(plan: Plan, node: Node, made: NodePlan, form: IntegerForm) -> bool:
    """qparams for every operand that is quantized, and for no other"""
    kinds = [form.slot(slot) for slot in range(len(node.inputs))]
    return [q is None for q in made.operands] == [kind == "plain" for kind in kinds]


def _scales(plan: Plan, node: Node, made: NodePlan, form: IntegerForm) -> bool:
    """scales and zero points that stand along axes of the values they are for"""
    pairs = [(q, plan.graph[source].shape) for q, source in zip(made.operands, node.inputs, strict=True)]
    pairs += [(made.register, node.shape), (made.out, node.shape)]
    return all(shape is not None and _stands(q, shape) for q, shape in pairs if q is not None)


def _output(plan: Plan, node: Node, made: NodePlan, form: IntegerForm) -> bool:
    """an output that comes from the accumulator, or from a table, and from nothing else"""
    if made.desc.register.dtype != made.register.dtype:
        return False
    if form.table or made.out_simq is None:
        return made.out_simq is None and (form.table or made.out is made.register)
    return made.out_simq.source is made.register and made.out_simq.target is made.out


def _accumulator(plan: Plan, node: Node, made: NodePlan, form: IntegerForm) -> bool:
    """an accumulator that is bounded, without a zero point unless values are only moved about"""
    moved = form.outputs_fit_input_dtype and made.register.dtype == made.desc.in_dtype(0)
    most = 1 if form.split is None else MOST_PARTS
    bounded = all(math.isfinite(b) and b >= 0 for b in (made.bound, made.raw_bound))
    centered = moved or not bool(made.register.zero_point.any())
    return bounded and made.keeps_input_dtype == moved and centered and 1 <= made.parts <= most


def _constants(plan: Plan, node: Node, made: NodePlan, form: IntegerForm) -> bool:
    """integers within range, and of its shape, for every constant operand that is quantized"""
    for slot, source in enumerate(node.inputs):
        q, values = made.operands[slot], made.consts.get(slot)
        if (values is None) == (plan.graph[source].op == CONST and q is not None):
            return False
        if values is not None and q is not None and not _holds(q, values, plan.graph[source].shape):
            return False
    return set(made.consts) <= set(range(len(node.inputs)))


def _table(plan: Plan, node: Node, made: NodePlan, form: IntegerForm) -> bool:
    """a table of the output of every integer input, where the op is a table"""
    source, out, table = made.operands[0], made.out, made.table
    if table is None or source is None or not form.table:
        return table is None and not form.table
    low, high = out.qmin - out.zero_point, out.qmax - out.zero_point
    whole = table.dtype == torch.int64 and table.shape == (source.qmax - source.qmin + 1,)
    return whole and bool(((table >= low) & (table <= high)).all())


def _attributes(plan: Plan, node: Node, made: NodePlan, form: IntegerForm) -> bool:
    """attributes in integer units of the form that the signature computes"""
    out = made.out if form.table or made.out_simq is not None else None
    derived = form.integer_attrs(node.attrs, Site(made.operands, out, plan.hardware.requantize))
    same = {k: v for k, v in derived.items() if k in node.attrs and _is_left(v, node.attrs[k])}
    return _is_like(dict(made.attrs), dict(derived)) and all(made.attrs[k] == v for k, v in same.items())


def _thresholds(plan: Plan, node: Node, made: NodePlan, form: IntegerForm) -> bool:
    """pairs of thresholds for groups of the node"""
    keys = {f"{node.name}:out", *map(str, node.edges)}
    return set(made.thresholds) <= keys and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(t, Tensor) for t in pair)
        for pair in made.thresholds.values()
    )


#: What must be right of an integer node, in this order; the docstrings are shown to users.
_RIGHTS: Final[tuple[Callable[[Plan, Node, NodePlan, IntegerForm], bool], ...]] = (
    _operands,
    _scales,
    _output,
    _accumulator,
    _constants,
    _table,
    _attributes,
    _thresholds,
)


def _stands(q: QParams, shape: tuple[int, ...]) -> bool:
    """Whether qparams broadcast against a value and leave it its shape."""
    return all(
        t.ndim <= len(shape) and all(n in (1, size) for n, size in zip(t.shape[::-1], shape[::-1], strict=False))
        for t in (q.scale, q.zero_point)
    )


def _is_left(value: Any, given: Any) -> bool:
    """Whether a form leaves an attribute as it is."""
    return not isinstance(value, (Tensor, QParams)) and type(value) is type(given) and bool(value == given)


def _is_like(value: Any, model: Any) -> bool:
    """Whether a value has the types, keys, lengths, dtypes and shapes of another, and its names."""
    if type(value) is not type(model):
        return False
    if isinstance(model, Mapping):
        return set(value) == set(model) and all(_is_like(value[k], v) for k, v in model.items())
    if isinstance(model, (list, tuple)):
        return len(value) == len(model) and all(map(_is_like, value, model))
    if isinstance(model, Tensor):
        return bool(value.dtype == model.dtype and value.shape == model.shape)
    if isinstance(model, QParams):
        return _is_like((value.scale, value.zero_point), (model.scale, model.zero_point))
    return isinstance(model, (int, float)) or bool(value == model)
