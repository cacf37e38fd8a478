"""Plan document: a Plan as JSON values and tensors, and back.

Invariant: the Plan that comes back computes the same integers on every edge and the same float islands.
Left out is what no reader of a Plan computes with: the float values of constants that are integers
(their nodes come back with tensors that have a shape and no values) and the thresholds of constants.
Nothing is imported on behalf of a document: operators come from the table that the reader gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Final

from torch import Tensor

from hago.additions import additions_of
from hago.errors import GraphError, HagoError, ModelFileError
from hago.graph import CONST, INPUT, Graph, Node
from hago.graph_document import read_graph, write_graph, written
from hago.hardware import Hardware, OpDesc
from hago.hardware_check import check_document
from hago.hardware_document import from_document as hardware_from_document
from hago.hardware_document import hardware_hash
from hago.hardware_document import to_document as hardware_to_document
from hago.nesting import read_tree
from hago.ops import OPS, Ops, _opaque
from hago.ops._rule import OpRule
from hago.pairs import CUTS, Pairs
from hago.plan import NodePlan, Plan, StoredWeight
from hago.plan_check import check_plan
from hago.stored_values import Reader, Writer
from hago.types import Edge, QParams, SimQ

#: Fields of a NodePlan that are written in a way of their own.
_OWN_WAY: Final = ("desc", "simqs", "consts", "thresholds", "digest", "pairs", "additions", "raised")
_PLAIN: Final = tuple(f.name for f in fields(NodePlan) if f.name not in _OWN_WAY)
#: What the others are; a schema cannot tell.
_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "attrs": (dict,),
    "operands": (tuple,),
    "register": (QParams,),
    "out_simq": (SimQ, type(None)),
    "out": (QParams,),
    "table": (Tensor, type(None)),
    "parts": (int,),
    "saturated_biases": (int,),
}


# ---------------------------------------------------------------- writing
def to_document(plan: Plan) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON values and the tensors of a Plan.

    Raises:
        GraphError: a node that cannot be stored, by name, and why.
    """
    write = Writer(plan.hardware.requantize)
    for node in plan.graph:
        _check_node(node, plan)
    for text in (plan.graph.in_spec, plan.graph.out_spec):
        if text is not None:
            read_tree(text)
    document = {
        "hardware": hardware_to_document(plan.hardware),
        "hardware_hash": hardware_hash(plan.hardware),
        "own_ops": sorted({n.op for n in plan.graph} & set(own_rules(plan.ops))),
        "graph": write_graph(plan.graph, set(_read_as_floats(plan)), write),
        "edges": {str(e): _simq(s, write) for e, s in plan.edges.items() if s is not None},
        "plans": {name: _node_plan(plan, name, write) for name in plan.nodes},
    }
    if plan.weights:
        document["weights"] = {str(e): _weight(plan, e, w, write) for e, w in plan.weights.items()}
    return document | {"scales": write.scales, "qparams": write.qparams}, write.tensors


def own_rules(ops: Ops) -> dict[str, OpRule]:
    """The rules that are not hago's, whichever form hago's are rules in."""
    return {name: rule for name, rule in ops.items() if not _is_hago_s(rule, OPS.get(name))}


def _is_hago_s(rule: OpRule, known: OpRule | None) -> bool:
    return known is not None and (rule is known or replace(rule, integer=known.integer) == known)


def _check_node(node: Node, plan: Plan) -> None:
    if node.op == _opaque.NAME:
        why_not = _opaque.why_not_portable(node.attrs)
        if why_not is not None:
            raise GraphError(f"node {node.name!r} cannot be stored: {why_not}")
    elif node.op not in (INPUT, CONST) and node.op not in plan.ops:
        raise GraphError(f"node {node.name!r} cannot be stored: its op {node.op!r} has no rule")


def _read_as_floats(plan: Plan) -> Iterator[str]:
    """The constants whose own values something reads: float nodes, operands without integers, outputs."""
    for edge in plan.graph.edges:
        source, node = plan.graph.source(edge), plan.nodes.get(edge.dst)
        table = node is not None and node.table is not None
        integers = edge in plan.weights or (node is not None and edge.slot in node.consts)
        if plan.graph[source].op == CONST and not (table or integers):
            yield source


def _simq(simq: SimQ, write: Writer) -> list[int | None]:
    return [None if q is None else write.number(q) for q in (simq.source, simq.target)]


def _weight(plan: Plan, edge: Edge, weight: StoredWeight, write: Writer) -> dict[str, Any]:
    number, name = _desc_number(plan, edge.dst, weight.desc), plan.graph.source(edge)
    return {"desc": number, "integers": written(write, weight.integers, edge.dst, name)}


def _desc_number(plan: Plan, name: str, desc: OpDesc) -> int:
    descs = plan.hardware.ops.get(plan.graph[name].op, ())
    if desc not in descs:
        raise GraphError(f"node {name!r} cannot be stored: its signature {desc} is none of its hardware's")
    return descs.index(desc)


def _node_plan(plan: Plan, name: str, write: Writer) -> dict[str, Any]:
    node, found = plan.graph[name], plan.nodes[name]
    data = {k: v for k, v in found.thresholds.items() if not _is_const(plan, k)}
    said = {key: written(write, getattr(found, key), name, f"{name}.{key}") for key in _PLAIN}
    return said | {
        "desc": _desc_number(plan, name, found.desc),
        "consts": {str(s): written(write, c, name, node.inputs[s]) for s, c in found.consts.items()},
        "thresholds": {k: written(write, v, name, f"{name}.thresholds") for k, v in data.items()},
        "digest": found.digest.hex(),
        "largest_pair": None if found.pairs is None else found.pairs.largest,
    }


def _is_const(plan: Plan, key: str) -> bool:
    name, _, slot = key.rpartition(":")
    return slot != "out" and plan.graph[plan.graph.source(Edge(name, int(slot)))].op == CONST


# ---------------------------------------------------------------- reading
def from_document(document: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str, ops: Ops = OPS) -> Plan:
    """The Plan of a document that its schema finds nothing wrong in.

    Args:
        ops: the operators it may use, e.g. `{**OPS, "my_op": RULE}`.

    Raises:
        ModelFileError: parts that contradict each other, or operators that `ops` lacks.
    """
    _check_ops(document, where, ops)
    try:
        with _reading("$.hardware"):
            hardware = _hardware(document, where, ops)
        rules, read = hardware.computes(ops), Reader(tensors, hardware.requantize)
        with _reading("$.scales, $.qparams"):
            read.enter(document["scales"], document["qparams"])
        with _reading("$.graph"):
            graph = read_graph(document["graph"], read)
        with _reading("$.edges"):
            edges = _read_edges(document["edges"], graph, read)
        nodes = {}
        for name, said in document["plans"].items():
            with _reading(f"$.plans[{name!r}]"):
                nodes[name] = _read_node(graph[name], said, read, hardware, edges, rules)
        weights = {}
        for edge, said in document.get("weights", {}).items():
            with _reading(f"$.weights[{edge!r}]"):
                weights[Edge.parse(edge)] = _read_weight(graph, Edge.parse(edge), said, read, hardware, edges)
        plan = Plan(graph, hardware, rules, nodes, edges, weights)
        check_plan(plan)
    except HagoError as error:
        raise ModelFileError(f"{where}: its parts contradict each other: {error}") from error
    return plan


@contextlib.contextmanager
def _reading(place: str) -> Iterator[None]:
    """While this lasts, what a Reader raises names the place in the document."""
    try:
        yield
    except (HagoError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise HagoError(f"at {place}: {what}") from error


def _check_ops(document: Mapping[str, Any], where: str, ops: Ops) -> None:
    own = set(document["own_ops"]) - set(own_rules(ops))
    for node in document["graph"]["nodes"]:
        name, op = node["name"], node["op"]
        if op not in (INPUT, CONST, _opaque.NAME) and (op not in ops or op in own):
            raise ModelFileError(
                f"{where}: node {name!r} is of the op {op!r}, which is none of hago's own; give its rule: "
                f"ops={{**OPS, {op!r}: RULE}}"
            )


def _hardware(document: Mapping[str, Any], where: str, ops: Ops) -> Hardware:
    try:
        hardware = hardware_from_document(document["hardware"], where, ops)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise HagoError("; ".join(map(str, check_document(document["hardware"], ops)))) from None
    if hardware_hash(hardware) != document["hardware_hash"]:
        raise HagoError("its hardware has another hash than it says; it was written by another version of hago")
    return hardware


def _read_edges(listed: Mapping[str, list[int | None]], graph: Graph, read: Reader) -> dict[Edge, SimQ | None]:
    found: dict[Edge, SimQ | None] = dict.fromkeys(graph.edges)
    for text, said in listed.items():
        edge = Edge.parse(text)
        if edge not in found:
            raise HagoError(f"the graph has no edge {text}")
        source, target = (None if q is None else read.qparams(q) for q in said)
        found[edge] = SimQ(source, target)
    return found


def _read_node(
    node: Node, said: Mapping[str, Any], read: Reader, hardware: Hardware, edges: Mapping[Edge, SimQ | None], ops: Ops
) -> NodePlan:
    descs, plain = hardware.ops.get(node.op, ()), {key: read(said[key]) for key in _PLAIN}
    wrong = [key for key, kinds in _KINDS.items() if not isinstance(plain[key], kinds)]
    wrong += [] if all(q is None or isinstance(q, QParams) for q in plain["operands"]) else ["operands"]
    if wrong or len(plain["operands"]) != len(node.inputs) or said["desc"] >= len(descs):
        raise HagoError(f"{', '.join(wrong) or 'operands or desc'} do not fit {node}")
    plan = NodePlan(
        **plain,
        desc=descs[said["desc"]],
        simqs=tuple(edges[e] for e in node.edges),
        consts={int(slot): read(c) for slot, c in said["consts"].items()},
        thresholds={k: read(v) for k, v in said["thresholds"].items()},
        digest=bytes.fromhex(said["digest"]),
    )
    if plan.desc.register.overflow == "saturate_each":
        plan = replace(plan, additions=additions_of(ops[node.op], plan.attrs, plan.desc.register, plan.bound))
    if said["largest_pair"] is not None:
        plan = replace(plan, pairs=_pairs(node, plan, ops, said["largest_pair"]))
    return plan


def _read_weight(
    graph: Graph,
    edge: Edge,
    said: Mapping[str, Any],
    read: Reader,
    hardware: Hardware,
    edges: Mapping[Edge, SimQ | None],
) -> StoredWeight:
    simq, integers = edges[edge], read(said["integers"])
    if simq is None or simq.source is None or simq.target is not None:
        raise HagoError("there are integers, and nothing that makes real values of them")
    return StoredWeight(hardware.ops[graph[edge.dst].op][said["desc"]], simq.source, integers, None)


def _pairs(node: Node, plan: NodePlan, ops: Ops, largest: float) -> Pairs:
    form, (x, w) = ops[node.op].integer, plan.operands[:2]
    if form is None or form.product is None or x is None or w is None or plan.desc.register.overflow not in CUTS:
        raise HagoError(f"node {node.name!r} has pairs of products, and is no matrix product that adds them")
    return Pairs(form.product, node.attrs, x, w, largest, plan.desc.register.overflow)
