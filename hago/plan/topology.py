"""The topology of a graph on a piece of hardware: which nodes run in integers, which edges are quantized, and why.

`analyze` makes a Topology. Searches and the API call it, and a Resolver calls it for every set of nodes that a point
turns float. Its rule, node by node in order: a node is integer if the hardware has an integer signature that the node's
attributes fit, the user kept neither the node nor one of its edges float, and at least one of these holds: the op
starts an integer region (e.g. conv, linear), an input comes from an integer node, the hardware has no float signature
for the op.

A node that computes in float may have its weight stored as integers (*weight only*): where the hardware lists such a
signature before all others that the node could run on, or the user kept only the other operands float.

The second half of the module has the rules by which scales and ranges pass through ops, for the Space and the Plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import is_power_of_two
from hago.arithmetic.types import DType, Edge, QParams
from hago.errors import HagoError, UnsupportedOp, as_strings, did_you_mean, warn
from hago.graph import CONST, INPUT, OUTPUT, Graph, Node
from hago.hardware import Hardware, OpDesc
from hago.ops import OPS, IntegerForm, Ops, opaque

#: How the names of operators begin that give sizes of values.
_OF_SIZES: Final = "aten.sym_"
#: Operators that take a part of what another gives.
_PARTS: Final = ("operator.getitem",)
#: The most operators that a warning names.
_LISTED: Final = 5


@dataclass(frozen=True, slots=True)
class Topology:
    """Which nodes are integer and which edges are quantized, the RFC's node_conds and edge_conds. Made by `analyze`.

    Args:
        nodes: by node, whether it is integer.
        edges: by in-edge of a node, whether it is quantized: operands of integer nodes, and weights of float nodes that
            are stored as integers.
        reasons: by node, the reason why it is integer or float.
    """

    nodes: Mapping[str, bool]
    edges: Mapping[Edge, bool]
    reasons: Mapping[str, str]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether any shell pattern matches (`"layer1.*"`, say)."""
    return any(fnmatchcase(name, p) for p in patterns)


#: The reason of nodes that the user keeps float by name.
KEPT_FLOAT: Final = "kept float by the user"
#: The reason of nodes that a search chose to run in float.
CHOSEN_FLOAT: Final = "the search chose float"


def check_patterns(patterns: Sequence[str], names: Sequence[str], what: str) -> None:
    """Check that every pattern matches a name.

    Args:
        what: the option that the patterns are of, for the message.

    Raises:
        HagoError: one matches none; names the pattern and the closest name.
    """
    for pattern in patterns:
        if not any(fnmatchcase(n, pattern) for n in names):
            advice = did_you_mean(pattern, names) or " hago.explain lists the nodes; edges are NODE:0, NODE:1, ..."
            raise HagoError(f"{what} pattern {pattern!r} matches no name.{advice}")


def fitting_descs(graph: Graph, node: Node, hardware: Hardware, ops: Ops = OPS) -> tuple[OpDesc, ...]:
    """The integer signatures that the node's attributes and operands fit, in the hardware's order of preference."""
    if why_not_integer(graph, node, hardware, ops):
        return ()
    is_constant = _has_constant_weight(graph, node, ops)
    return tuple(d for d in hardware.integer_descs(node.op) if d.groups is None or is_constant)


def weight_only_descs(graph: Graph, node: Node, hardware: Hardware, ops: Ops = OPS) -> tuple[OpDesc, ...]:
    """The signatures that take the node in float with its weight as integers, in the hardware's order of preference;
    none where its weight is no constant."""
    edge = weight_edge(node, ops)
    if edge is None or graph[graph.source(edge)].op != CONST:
        return ()
    return tuple(d for d in hardware.ops.get(node.op, ()) if d.is_weight_only and d.in_dtype(edge.slot).is_int)


def _has_constant_weight(graph: Graph, node: Node, ops: Ops) -> bool:
    edge = weight_edge(node, ops)
    return edge is not None and graph[graph.source(edge)].op == CONST


def weight_edge(node: Node, ops: Ops = OPS) -> Edge | None:
    """The edge on which a node reads its weight; None where its op has none."""
    rule = ops.get(node.op)
    weight = None if rule is None else rule.weight
    return None if weight is None else node.edges[weight.slot]


def why_not_integer(graph: Graph, node: Node, hardware: Hardware, ops: Ops = OPS) -> str | None:
    """The reason why the node cannot be integer on this hardware; None where it can."""
    rule = hardware.rule(node.op, ops)
    if node.op == opaque.NAME and rule is None:
        return f"hago has no rule for {node.attrs['target']}"
    if rule is None or rule.integer is None:
        return f"{node.op} has no integer form"
    if not hardware.integer_descs(node.op):
        return f"{hardware.name} lists no integer signature for {node.op}"
    if node.shape is None or any(graph[s].shape is None for s in node.inputs):
        return "an operand is not a tensor"
    if all(d.groups for d in hardware.integer_descs(node.op)) and not _has_constant_weight(graph, node, ops):
        return "its weight is computed, and the hardware multiplies groups of constant weights"
    if rule.integer.table and hardware.integer_descs(node.op)[0].requantize_at != "output":
        return f"{node.op} needs a signature that requantizes at the output"
    if rule.integer.table and any(graph[s].op != CONST for s in node.inputs[1:]):
        return "a table needs its other operands to be constants"
    why_not = rule.integer.unsupported(node.attrs, [graph[s].shape or () for s in node.inputs])
    if why_not is not None:
        return why_not
    if hardware.requantize.power_of_two and not (rule.integer.table or rule.integer.requantizes_output):
        scale = rule.integer.scale(node.attrs, [torch.ones((), dtype=torch.float64)] * len(node.inputs))
        if not is_power_of_two(scale):
            return f"it scales by {float(scale):.6g}, no power of two, and {hardware.name} only shifts"
    return None


def analyze(
    graph: Graph,
    hardware: Hardware,
    keep_float: str | Sequence[str] = (),
    ops: Ops = OPS,
    chosen: Collection[str] = (),
) -> Topology:
    """The topology of a graph on a piece of hardware.

    Args:
        keep_float: shell patterns of nodes that are kept float, and of edges whose values are: `fc:0` keeps the data of
            `fc` float, while its weight may be quantized.
        chosen: the nodes among these that a search, and not the user, keeps float; the reasons say so.

    Raises:
        UnsupportedOp: an op that the hardware refuses (`other_ops: reject`), with its node.
        HagoError: a pattern that matches neither node nor edge.
    """
    ops, keep_float = hardware.rules(ops), as_strings(keep_float, "keep_float")
    names = [*(n.name for n in graph.computed), *(str(e) for n in graph.computed for e in n.edges)]
    check_patterns(keep_float, names, "keep_float")
    integer: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    edges: dict[Edge, bool] = {}
    for node in graph:
        if node.op in (INPUT, CONST):
            integer[node.name], reasons[node.name] = False, node.op
            continue
        kind = _decide(graph, node, hardware, integer, keep_float, ops)
        is_chosen = kind.reason == KEPT_FLOAT and node.name in chosen
        integer[node.name], reasons[node.name] = kind.integer, CHOSEN_FLOAT if is_chosen else kind.reason
        rule = ops.get(node.op)
        for edge in node.edges:
            is_plain = rule is None or rule.integer is None or rule.integer.slot(edge.slot) == "plain"
            edges[edge] = (kind.integer and not is_plain) or (kind.weight_only and edge == weight_edge(node, ops))
    return Topology(integer, edges, reasons)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a node runs.

    Args:
        weight_only: whether it computes in float with its weight stored as integers.
    """

    integer: bool
    reason: str
    weight_only: bool = False


def _decide(
    graph: Graph,
    node: Node,
    hardware: Hardware,
    integer: Mapping[str, bool],
    keep_float: Sequence[str],
    ops: Ops,
) -> _Kind:
    """How a node runs, by the rule of the module.

    Args:
        integer: by node before it, whether that is integer.

    Raises:
        UnsupportedOp: the hardware takes the node neither in integers nor in float.
    """
    why_not = why_not_integer(graph, node, hardware, ops)
    has_float = bool(hardware.float_descs(node.op, integer_fits=why_not is None)) or _moves_no_reals(graph, node)
    remedy = "List a signature for it, or other_ops: float32"
    if why_not is None and (why_kept := _why_kept_float(node, keep_float)):
        why_not, remedy = why_kept, "List a float signature for it, or let it be integer"
    weight_only = _has_integer_weight(graph, node, hardware, keep_float, ops)
    if why_not is None and weight_only and hardware.ops[node.op][0].is_weight_only:
        return _Kind(False, f"{hardware.name} prefers to quantize its weight alone", True)
    if why_not is not None:
        if not (has_float or weight_only):
            raise UnsupportedOp(
                f"node {node.name!r} ({node.op}) cannot run on {hardware.name}: {why_not}, and the "
                f"hardware takes {_accepted_float_forms(graph, node, hardware, ops)}. {remedy}"
            )
        return _Kind(False, why_not, weight_only)
    rule = ops[node.op]
    assert rule.integer is not None
    if rule.integer.starts_region:
        return _Kind(True, "starts an integer region")
    if any(integer[s] for s in node.inputs):
        return _Kind(True, "an input is integer")
    if not (has_float or weight_only):
        return _Kind(True, f"{hardware.name} has no float {node.op}")
    return _Kind(False, "nothing that it reads is quantized", weight_only)


def _moves_no_reals(graph: Graph, node: Node) -> bool:
    """Whether a node moves indices or masks alone, which are integers or booleans in the float model, too: there is
    nothing to quantize, and it runs wherever these are."""
    values = [node, *(graph[source] for source in node.inputs)]
    is_known = node.op != opaque.NAME and all(value.dtype is not None for value in values)
    return is_known and not any(value.torch_dtype.is_floating_point for value in values)


def _accepted_float_forms(graph: Graph, node: Node, hardware: Hardware, ops: Ops) -> str:
    """The float forms of an op that the hardware takes, in words, for the refusal of a node that has none of them."""
    edge = weight_edge(node, ops)
    if edge is None or not any(d.is_weight_only for d in hardware.ops.get(node.op, ())):
        return f"no float {node.op}"
    source = graph[graph.source(edge)]
    why_not = "its weight is kept float by the user" if source.op == CONST else f"{source.name!r} is computed"
    return f"float {node.op} only with a constant weight, as integers, where {why_not} ({edge})"


def _why_kept_float(node: Node, keep_float: Sequence[str]) -> str:
    """Why a node must be float, if the user keeps it or an edge of it float; empty otherwise."""
    if matches(node.name, keep_float):
        return KEPT_FLOAT
    return next((f"edge {e} is kept float by the user" for e in node.edges if matches(str(e), keep_float)), "")


def _has_integer_weight(graph: Graph, node: Node, hardware: Hardware, keep_float: Sequence[str], ops: Ops) -> bool:
    """Whether a node, if it is float, has its weight stored as integers: the hardware lists such a signature before
    those with a float weight, or has none of the latter, or the user keeps other edges of the node float."""
    descs, edge = weight_only_descs(graph, node, hardware, ops), weight_edge(node, ops)
    if not descs or matches(node.name, keep_float) or matches(str(edge), keep_float):
        return False
    listed = hardware.ops[node.op]
    float_positions = [i for i, d in enumerate(listed) if not (d.is_integer or d.is_weight_only)]
    return bool(_why_kept_float(node, keep_float)) or not float_positions or listed.index(descs[0]) < float_positions[0]


def warn_of_unknown(graph: Graph, hardware: Hardware) -> None:
    """Warn of operators without a rule that compute on real values, since no hardware file can make these integer.
    Arithmetic on sizes, indices and masks is left out.
    """
    real_nodes: set[str] = set()
    counts: Counter[str] = Counter()
    for node in graph:
        if node.op == INPUT:
            is_real = node.torch_dtype.is_floating_point
        elif node.op == opaque.NAME:
            target = str(node.attrs["target"])
            is_real = not target.startswith(_OF_SIZES) and any(source in real_nodes for source in node.inputs)
            counts[target] += is_real and target not in _PARTS
        else:
            # an embedding makes real values of indices
            rule = hardware.known_ops.get(node.op)
            reads_weight = rule is not None and rule.weight is not None
            is_real = node.op != CONST and (reads_weight or any(source in real_nodes for source in node.inputs))
        if is_real:
            real_nodes.add(node.name)
    listed = [f"{n} x {target}" for target, n in counts.most_common() if n]
    if listed:
        more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
        warn(
            f"hago has no rule for {', '.join(listed[:_LISTED])}{more}: these run in float, and values around them are "
            "dequantized and quantized again; hago.explain says where, and docs/adding-an-op.md how to add a rule"
        )


def float_boundaries(graph: Graph, topology: Topology) -> list[Edge]:
    """The edges between an integer and a float node, constants aside."""
    boundaries = []
    for edge in graph.edges:
        source = graph.source(edge)
        target = edge.dst != OUTPUT and topology.edges[edge]
        if graph[source].op != CONST and topology.nodes[source] != target:
            boundaries.append(edge)
    return boundaries


# ---------------------------------------------------------------- scales and ranges that pass through ops


def varies_along(scale: Tensor, ndim: int) -> tuple[int, ...]:
    """The axes of an `ndim`-dimensional value along which a scale varies."""
    return tuple(ndim - scale.ndim + d for d, size in enumerate(scale.shape) if size > 1)


def accepts_scale(form: IntegerForm, scale: Tensor, ndim: int) -> bool:
    """Whether an op with this form can read a value of `ndim` axes with this scale without requantization."""
    axes = varies_along(scale, ndim)
    return not axes or form.accepts_per_channel == "all" or (form.accepts_per_channel == "axis1" and axes == (1,))


def passes_through(form: IntegerForm, source: QParams, dtype: DType, ndim: int) -> bool:
    """Whether a `follow` operand needs no requantization."""
    return source.dtype == dtype and accepts_scale(form, source.scale, ndim)


def range_chain(graph: Graph, hardware: Hardware, topology: Topology, ops: Ops, name: str) -> tuple[str, ...]:
    """The nodes past which the range of a requantized output is taken, each the only reader of the one before.

    They are relus and poolings, since values that these cut off need not be represented, and concatenations, since
    their operands need one scale. So the output of `name` is given the range of the last of these nodes.

    References:
        TPU-MLIR's backward calibration passes; TFLite's fused activations, and its converter, which gives all
        operands of CONCATENATION and its output the same scale.
    """
    chain = []
    edges = graph.out_edges[name]
    while len(edges) == 1 and topology.nodes.get(edges[0].dst, False):
        name = edges[0].dst
        form = ops[graph[name].op].integer
        if form is None or not (form.outputs_fit_input_dtype and form.allows_early_clipping):
            break
        if form.slots != ("follow",) and not joins_operands(form, hardware, graph[name].op):
            break
        chain.append(name)
        edges = graph.out_edges[name]
    return tuple(chain)


def joins_operands(form: IntegerForm, hardware: Hardware, op: str) -> bool:
    """Whether an op concatenates operands of one scale without changing them, in all its signatures."""
    descs = hardware.integer_descs(op)
    widths = {d.in_dtype(0).bits for d in descs}
    one_dtype = form.outputs_fit_input_dtype and len(widths) == 1
    return form.slots == ("common",) and one_dtype and descs[0].requantize_at == "edge"


def range_node(graph: Graph, hardware: Hardware, topology: Topology, ops: Ops, name: str) -> str:
    """The node whose range a requantized output should cover: the last of `range_chain`, or `name` itself."""
    return (name, *range_chain(graph, hardware, topology, ops, name))[-1]
