"""Conversion of a Plan to a document, JSON values with the large tensors beside them, and back.

`plan_to_document` is called when an integer model is saved, `plan_from_document` when one is loaded. A document holds
values of a closed set of types: those of JSON, tuples, mappings, tensors, dtypes, QParams, SimQ and the hardware's
Requantize. A value that JSON has no form for is written as an object with the key "hago".

Invariants: the Plan that is read computes the same integers on every edge and the same float nodes. A `ValueReader`
gives back the values that the `ValueWriter` was given, dtypes, shapes and bits of floats included; QParams and scales
that were one object are one object again, since a Plan tells by identity which operands need no requantization. Values
that nothing computes with are left out: the thresholds of constants, and the float values of constants that are stored
as integers, which are read back as tensors with a shape and no values. Reading imports no code that a document names:
operators come from the table that the caller gives.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.groups import groups_of
from hago.arithmetic.numerics import OVERFLOWS, Requantize
from hago.arithmetic.packing import Packed, pack, unpack
from hago.arithmetic.types import DType, Edge, QParams, SimQ
from hago.arithmetic.types import dtype as named_dtype
from hago.errors import GraphError, HagoError, ModelFileError
from hago.graph import CONST, INPUT, Graph, Node, infer_dtypes, read_tree
from hago.hardware import (
    Hardware,
    OpDesc,
    check_hardware_document,
    hardware_from_document,
    hardware_hash,
    hardware_to_document,
)
from hago.ops import ATTRIBUTE_RECORDS, OPS, OpRule, Ops, opaque
from hago.plan.accumulators import ProductPairs, additions_of
from hago.plan.document_checks import check_plan
from hago.plan.plan import NodePlan, Plan, StoredWeight
from hago.plan.weight_groups import WeightGroups, group_sums
from hago.serialization.tensor_file import RESERVED, dtype_name, storable, storable_dtype

#: Tensors of at most so many elements are written into the JSON itself.
INLINE_ELEMENTS: Final = 16
#: Records that attributes of operators hold, by name.
_RECORDS: Final = {kind.__name__: kind for kind in ATTRIBUTE_RECORDS}
_TAG: Final = "hago"
_NOT_FINITE: Final = ("nan", "inf", "-inf")
#: Fields of a NodePlan that `_node_plan` and `_read_node` write and read each in its own form.
_SPECIAL_FIELDS: Final = ("desc", "simqs", "consts", "thresholds", "digest", "pairs", "additions", "raised", "groups")
#: The key of each other field; formats keep the key of a field that was renamed.
_PLAIN_FIELDS: Final = {
    f.name: {"keeps_input_dtype": "within_hull"}.get(f.name, f.name)
    for f in fields(NodePlan)
    if f.name not in _SPECIAL_FIELDS
}
#: Types of the other fields that the schema cannot check.
_FIELD_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "attrs": (dict,),
    "operands": (tuple,),
    "register": (QParams,),
    "out_simq": (SimQ, type(None)),
    "out": (QParams,),
    "table": (Tensor, type(None)),
    "parts": (int,),
    "saturated_biases": (int,),
}


# ---------------------------------------------------------------- single values
class ValueWriter:
    """Converts values to JSON values. `plan_to_document` makes one for each document.

    Attributes:
        tensors: large tensors, by the name that the JSON values refer to.
        scales, qparams: tables that JSON values refer to by number.
    """

    def __init__(self, requantize: Requantize) -> None:
        self._requantize = requantize
        self.tensors: dict[str, Tensor] = {}
        self.scales: list[Any] = []
        self.qparams: list[Any] = []
        # by table and id of an object: its number, and the object itself, which keeps the id from being reused
        self._numbers: dict[tuple[str, int], tuple[int, object]] = {}
        self._stored: dict[tuple[str, bytes], str] = {}

    def __call__(self, value: Any, name: str) -> Any:
        """Convert a value.

        Args:
            name: the name that the value has in messages, and that a large tensor has in the file.

        Raises:
            HagoError: the value, or one in it, is of a type that cannot be stored.
        """
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {_TAG: "float", "is": str(value)}
        if isinstance(value, list):
            return [self(v, f"{name}.{i}") for i, v in enumerate(value)]
        if isinstance(value, tuple):
            return {_TAG: "tuple", "items": [self(v, f"{name}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, Mapping):
            return self._mapping(value, name)
        return self._object(value, name)

    def _mapping(self, value: Mapping[Any, Any], name: str) -> Any:
        if _TAG not in value and all(isinstance(k, str) for k in value):
            return {k: self(v, f"{name}.{k}") for k, v in value.items()}
        return {_TAG: "mapping", "items": [[self(k, name), self(v, f"{name}.{k}")] for k, v in value.items()]}

    def _object(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, DType):
            return {_TAG: "dtype", "name": value.name}
        if isinstance(value, QParams):
            return {_TAG: "qparams", "number": self.number(value)}
        if isinstance(value, SimQ):
            return {_TAG: "simq", "source": self(value.source, name), "target": self(value.target, name)}
        if type(value) in _RECORDS.values():
            values = {f.name: self(getattr(value, f.name), f"{name}.{f.name}") for f in fields(value)}
            return {_TAG: "record", "type": type(value).__name__, "fields": values}
        if isinstance(value, Requantize) and value == self._requantize:
            return {_TAG: "requantize"}
        raise HagoError(f"{name} is a {type(value).__name__}, which cannot be stored")

    def number(self, qparams: QParams) -> int:
        """The number of qparams in the table; new ones are added to it."""
        return self._numbered("qparams", self.qparams, qparams, lambda: self._qparams(qparams))

    def _qparams(self, q: QParams) -> Any:
        name = f"qparams.{len(self.qparams)}"
        scale = self._numbered("scales", self.scales, q.scale, lambda: self._tensor(q.scale, f"{name}.scale"))
        zero = self._tensor(q.zero_point, f"{name}.zero_point")
        record = {"scale": scale, "zero_point": zero, "qmin": q.qmin, "qmax": q.qmax, "dtype": q.dtype.name}
        return record if q.group is None else record | {"group": q.group}

    def _numbered(self, kind: str, table: list[Any], value: object, make: Callable[[], Any]) -> int:
        entry = self._numbers.get((kind, id(value)))
        if entry is None:
            written_value = make()
            entry = self._numbers[kind, id(value)] = (len(table), value)
            table.append(written_value)
        return entry[0]

    # ------------------------------------------------------------ tensors
    def _tensor(self, t: Tensor, name: str) -> Any:
        if not storable(t.dtype) or t.device.type == "meta":
            raise HagoError(f"{name} is a tensor of {t.dtype} on {t.device}, which cannot be stored")
        t = t.detach().cpu()
        record: dict[str, Any] = {_TAG: "tensor", "dtype": dtype_name(t.dtype), "shape": list(t.shape)}
        if t.numel() <= INLINE_ELEMENTS:
            return record | {"values": [self(v, name) for v in t.flatten().tolist()]}
        if t.is_floating_point() or t.dtype == torch.bool:
            order = _order(t)
            in_order = t.permute(order).contiguous()
            if in_order.dtype == torch.float64 and torch.equal(in_order.to(torch.float32).to(torch.float64), in_order):
                in_order = in_order.to(torch.float32)
            record |= {"order": order} if order != sorted(order) else {}
            return record | {"at": self._keep(in_order, name)}
        packed = pack(t)
        record |= {} if packed.bits is None else {"bits": packed.bits, "offset": packed.offset}
        return record | {"at": self._keep(packed.data, name)}

    def _keep(self, t: Tensor, name: str) -> str:
        """Add a tensor to the file, which holds equal tensors once; returns its name there."""
        key = (str(t.dtype), hashlib.sha256(t.flatten().view(torch.uint8).numpy().tobytes()).digest())
        if key not in self._stored:
            free_name, number = name, 1
            while free_name in self.tensors or free_name == RESERVED:
                number += 1
                free_name = f"{name}~{number}"
            self.tensors[free_name] = t
            self._stored[key] = free_name
        return self._stored[key]


def _order(t: Tensor) -> list[int]:
    """The axes in their order in memory. The rounding of a float kernel may depend on it."""
    if t.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(t):
        return list(range(t.ndim))
    return sorted(range(t.ndim), key=t.stride, reverse=True)


class ValueReader:
    """Converts the JSON values of a ValueWriter back. `plan_from_document` makes one for each document.

    Raises:
        HagoError: JSON values that no ValueWriter writes. Values of a wrong type may raise KeyError, TypeError,
            IndexError or ValueError instead; `_naming_place` converts these.
    """

    def __init__(self, tensors: Mapping[str, Tensor], requantize: Requantize) -> None:
        self._tensors, self._requantize = tensors, requantize
        self._qparams: list[QParams] = []
        self._read: dict[str, Callable[[Any], Any]] = {
            "float": lambda v: _not_finite(v["is"]),
            "tuple": lambda v: tuple(map(self, v["items"])),
            "mapping": lambda v: {self(k): self(x) for k, x in v["items"]},
            "tensor": self._tensor,
            "dtype": lambda v: named_dtype(v["name"]),
            "qparams": lambda v: self.qparams(v["number"]),
            "simq": lambda v: SimQ(self(v["source"]), self(v["target"])),
            "requantize": lambda v: self._requantize,
            "record": lambda v: _RECORDS[v["type"]](**self(v["fields"])),
        }

    def read_tables(self, scales: list[Any], qparams: list[Any]) -> None:
        """Read the tables that values refer to by number; called once, before any other value is read."""
        read_scales = [self(s) for s in scales]
        for q in qparams:
            dtype, zero = named_dtype(q["dtype"]), self(q["zero_point"])
            is_integer = type(q["qmin"]) is type(q["qmax"]) is int and dtype.is_int and zero.dtype == torch.int64
            if not is_integer or not dtype.min <= q["qmin"] <= q["qmax"] <= dtype.max:
                raise HagoError(
                    f"got integers from {q['qmin']} to {q['qmax']} in {dtype} with zero points in {zero.dtype}; "
                    "expected a range within an integer dtype, and zero points in int64"
                )
            if not bool(((zero >= dtype.min) & (zero <= dtype.max)).all()):
                raise HagoError(f"got a zero point outside of {dtype}; expected {dtype.min} to {dtype.max}")
            scale = read_scales[_index(q["scale"], read_scales)]
            if scale.dtype != torch.float64 or not bool(((scale > 0) & scale.isfinite()).all()):
                raise HagoError("got a scale that is not positive and finite in float64")
            self._qparams.append(QParams(scale, zero, q["qmin"], q["qmax"], dtype, q.get("group")))

    def qparams(self, number: int) -> QParams:
        """The qparams with a number of the table."""
        return self._qparams[_index(number, self._qparams)]

    def __call__(self, value: Any) -> Any:
        """Convert JSON values to the value that they stand for."""
        if isinstance(value, list):
            return [self(v) for v in value]
        if not isinstance(value, dict):
            return value
        if _TAG not in value:
            return {k: self(v) for k, v in value.items()}
        if value[_TAG] not in self._read:
            raise HagoError(f"got a value of kind {value[_TAG]!r}; expected one of {', '.join(self._read)}")
        return self._read[value[_TAG]](value)

    def _tensor(self, value: Any) -> Tensor:
        dtype, shape = storable_dtype(value["dtype"]), tuple(value["shape"])
        if "values" in value:
            return torch.tensor(self(value["values"]), dtype=dtype).reshape(shape)
        data = self._tensors[value["at"]]
        if not dtype.is_floating_point and dtype != torch.bool:
            return unpack(Packed(data, value.get("bits"), value.get("offset", 0)), shape, dtype)
        order = value.get("order", list(range(len(shape))))
        in_order = data.to(dtype).reshape([shape[d] for d in order])
        return in_order.permute([order.index(d) for d in range(len(order))])


def _index(index: int, table: list[Any]) -> int:
    if not 0 <= index < len(table):
        raise HagoError(f"got number {index} of a table with {len(table)} entries")
    return index


def _not_finite(text: str) -> float:
    if text not in _NOT_FINITE:
        raise HagoError(f"got the number {text!r}; expected one of {', '.join(_NOT_FINITE)}")
    return float(text)


# ---------------------------------------------------------------- a Graph
def write_graph(graph: Graph, needed: Collection[str], write: ValueWriter) -> dict[str, Any]:
    """The JSON values of a graph.

    Args:
        needed: the constants whose float values are written; of the others only dtype and shape are.

    Raises:
        GraphError: a node that cannot be stored, by name, and why.
    """
    consts = {n.name: graph.consts[n.name] for n in graph if n.op == CONST}
    return {
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "in_spec": graph.in_spec,
        "out_spec": graph.out_spec,
        "nodes": [
            {
                "name": n.name,
                "op": n.op,
                "inputs": list(n.inputs),
                "attrs": write_value(write, dict(n.attrs), n.name, f"{n.name}.attrs"),
                "shape": None if n.shape is None else list(n.shape),
            }
            for n in graph
        ],
        "consts": {n: write_value(write, t, n, n) for n, t in consts.items() if n in needed},
        "left_out": {n: [dtype_name(t.dtype), list(t.shape)] for n, t in consts.items() if n not in needed},
    }


def write_value(write: ValueWriter, value: Any, node: str, name: str) -> Any:
    """The JSON values of a value of a node; see `ValueWriter.__call__`.

    Raises:
        GraphError: the value cannot be stored; names the node.
    """
    try:
        return write(value, name)
    except HagoError as error:
        raise GraphError(f"node {node!r} cannot be stored: {error}") from None


def read_graph(record: Mapping[str, Any], read: ValueReader) -> Graph:
    """The graph that JSON values describe; constants that were left out have a shape and no values.

    Raises:
        HagoError: a node that would run code.
    """
    consts = {name: read(t) for name, t in record["consts"].items()}
    for name, (kind, shape) in record["left_out"].items():
        consts[name] = torch.empty(shape, dtype=storable_dtype(kind), device="meta")
    nodes = tuple(
        Node(
            n["name"], n["op"], tuple(n["inputs"]), read(n["attrs"]), None if n["shape"] is None else tuple(n["shape"])
        )
        for n in record["nodes"]
    )
    for node in nodes:
        if not isinstance(node.attrs, dict):
            raise HagoError(f"node {node.name!r}: got attributes that are no mapping by name")
        why_not = opaque.why_not_portable(node.attrs) if node.op == opaque.NAME else None
        if why_not is not None:
            raise HagoError(f"node {node.name!r}: {why_not}")
    for text in (record["in_spec"], record["out_spec"]):
        if text is not None:
            read_tree(text)
    order = [n.name for n in nodes if n.op == CONST]
    return Graph(
        nodes,
        tuple(record["inputs"]),
        tuple(record["outputs"]),
        {name: consts[name] for name in order},
        record["in_spec"],
        record["out_spec"],
    )


# ---------------------------------------------------------------- writing a Plan
def plan_to_document(plan: Plan) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON values and the tensors of a Plan.

    Raises:
        GraphError: a node that cannot be stored, by name, and why.
    """
    write = ValueWriter(plan.hardware.requantize)
    for node in plan.graph:
        _check_node(node, plan)
    for text in (plan.graph.in_spec, plan.graph.out_spec):
        if text is not None:
            read_tree(text)
    document = {
        "hardware": hardware_to_document(plan.hardware),
        "hardware_hash": hardware_hash(plan.hardware),
        "own_ops": sorted({n.op for n in plan.graph} & set(user_rules(plan.ops))),
        "graph": write_graph(plan.graph, set(_read_as_floats(plan)), write),
        "edges": {str(e): _simq(s, write) for e, s in plan.edges.items() if s is not None},
        "plans": {name: _node_plan(plan, name, write) for name in plan.nodes},
    }
    if plan.weights:
        document["weights"] = {str(e): _weight(plan, e, w, write) for e, w in plan.weights.items()}
    return document | {"scales": write.scales, "qparams": write.qparams}, write.tensors


def user_rules(ops: Ops) -> dict[str, OpRule]:
    """The rules of a table that are not hago's own. A rule of hago whose integer form a hardware file replaced counts
    as hago's own."""
    return {name: rule for name, rule in ops.items() if not _is_hagos_own(rule, OPS.get(name))}


def _is_hagos_own(rule: OpRule, known: OpRule | None) -> bool:
    return known is not None and (rule is known or replace(rule, integer=known.integer) == known)


def _check_node(node: Node, plan: Plan) -> None:
    if node.op == opaque.NAME:
        why_not = opaque.why_not_portable(node.attrs)
        if why_not is not None:
            raise GraphError(f"node {node.name!r} cannot be stored: {why_not}")
    elif node.op not in (INPUT, CONST) and node.op not in plan.ops:
        raise GraphError(f"node {node.name!r} cannot be stored: its op {node.op!r} has no rule")


def _read_as_floats(plan: Plan) -> Iterator[str]:
    """Yield the constants whose float values are read: by float nodes, by operands without integers, by outputs."""
    for edge in plan.graph.edges:
        source, node = plan.graph.source(edge), plan.nodes.get(edge.dst)
        table = node is not None and node.table is not None
        integers = edge in plan.weights or (node is not None and edge.slot in node.consts)
        if plan.graph[source].op == CONST and not (table or integers):
            yield source


def _simq(simq: SimQ, write: ValueWriter) -> list[int | None]:
    return [None if q is None else write.number(q) for q in (simq.source, simq.target)]


def _weight(plan: Plan, edge: Edge, weight: StoredWeight, write: ValueWriter) -> dict[str, Any]:
    number, name = _desc_number(plan, edge.dst, weight.desc), plan.graph.source(edge)
    record = {"desc": number, "integers": write_value(write, weight.integers, edge.dst, name)}
    return record | {"digest": weight.digest.hex()} if weight.digest else record


def _desc_number(plan: Plan, name: str, desc: OpDesc) -> int:
    descs = plan.hardware.ops.get(plan.graph[name].op, ())
    if desc not in descs:
        raise GraphError(f"node {name!r} cannot be stored: its signature {desc} is not listed by its hardware")
    return descs.index(desc)


def _node_plan(plan: Plan, name: str, write: ValueWriter) -> dict[str, Any]:
    node, node_plan = plan.graph[name], plan.nodes[name]
    activations = {k: v for k, v in node_plan.thresholds.items() if not _is_const(plan, k)}
    record = {
        key: write_value(write, getattr(node_plan, field), name, f"{name}.{field}")
        for field, key in _PLAIN_FIELDS.items()
    }
    groups = node_plan.groups
    if groups is not None:
        record["groups"] = _groups(node.inputs[groups.slot], name, groups, write)
    # the joined integers follow from those of the groups
    consts = {s: c for s, c in node_plan.consts.items() if groups is None or s != groups.slot}
    return record | {
        "desc": _desc_number(plan, name, node_plan.desc),
        "consts": {str(s): write_value(write, c, name, node.inputs[s]) for s, c in consts.items()},
        "thresholds": {k: write_value(write, v, name, f"{name}.thresholds") for k, v in activations.items()},
        "digest": node_plan.digest.hex(),
        "largest_pair": None if node_plan.pairs is None else node_plan.pairs.largest,
    }


def _groups(weight: str, name: str, groups: WeightGroups, write: ValueWriter) -> dict[str, Any]:
    """The groups of the weight of a node, whose qparams follow from those of the operand."""
    return {
        "slot": groups.slot,
        "integers": write_value(write, groups.integers, name, weight),
        "multipliers": write_value(write, groups.multipliers, name, f"{weight}.multipliers"),
        "largest_sum": None if groups.sums is None else groups.sums.largest,
    }


def _is_const(plan: Plan, key: str) -> bool:
    name, _, slot = key.rpartition(":")
    return slot != "out" and plan.graph[plan.graph.source(Edge(name, int(slot)))].op == CONST


# ---------------------------------------------------------------- reading a Plan
def plan_from_document(document: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str, ops: Ops = OPS) -> Plan:
    """The Plan of a document that conforms to its schema.

    Args:
        tensors: the large tensors of the document, by name.
        where: the file's name, for messages.
        ops: the operators that the document may use, e.g. `{**OPS, "my_op": RULE}`.

    Raises:
        ModelFileError: parts that contradict each other, or operators that `ops` lacks.
    """
    _check_ops(document, where, ops)
    try:
        with _naming_place("$.hardware"):
            hardware = _hardware(document, where, ops)
        rules, read = hardware.rules(ops), ValueReader(tensors, hardware.requantize)
        with _naming_place("$.scales, $.qparams"):
            read.read_tables(document["scales"], document["qparams"])
        with _naming_place("$.graph"):
            graph = read_graph(document["graph"], read)
        with _naming_place("$.edges"):
            edges = _read_edges(document["edges"], graph, read)
        nodes = {}
        for name, record in document["plans"].items():
            with _naming_place(f"$.plans[{name!r}]"):
                nodes[name] = _read_node(graph[name], record, read, hardware, edges, rules)
        weights = {}
        for edge, record in document.get("weights", {}).items():
            with _naming_place(f"$.weights[{edge!r}]"):
                weights[Edge.parse(edge)] = _read_weight(graph, Edge.parse(edge), record, read, hardware, edges)
        plan = Plan(graph, hardware, rules, nodes, edges, weights)
        check_plan(plan)
        # the format is older than the dtypes of nodes, which follow from what it holds
        plan = replace(plan, graph=infer_dtypes(plan.graph, rules))
    except HagoError as error:
        raise ModelFileError(f"{where}: its parts contradict each other: {error}") from error
    return plan


@contextlib.contextmanager
def _naming_place(place: str) -> Iterator[None]:
    """A context manager in which errors of a ValueReader name the place in the document."""
    try:
        yield
    except (HagoError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise HagoError(f"at {place}: {what}") from error


def _check_ops(document: Mapping[str, Any], where: str, ops: Ops) -> None:
    missing = set(document["own_ops"]) - set(user_rules(ops))
    for node in document["graph"]["nodes"]:
        name, op = node["name"], node["op"]
        if op not in (INPUT, CONST, opaque.NAME) and (op not in ops or op in missing):
            raise ModelFileError(
                f"{where}: node {name!r} is of the op {op!r}, which is none of hago's own; give its rule: "
                f"ops={{**OPS, {op!r}: RULE}}, or on the command line --ops package.module:RULE"
            )


def _hardware(document: Mapping[str, Any], where: str, ops: Ops) -> Hardware:
    try:
        hardware = hardware_from_document(document["hardware"], where, ops)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise HagoError("; ".join(map(str, check_hardware_document(document["hardware"], ops)))) from None
    if hardware_hash(hardware) != document["hardware_hash"]:
        raise HagoError("its hardware does not have the hash that it states; it was written by another version of hago")
    return hardware


def _read_edges(records: Mapping[str, list[int | None]], graph: Graph, read: ValueReader) -> dict[Edge, SimQ | None]:
    simqs: dict[Edge, SimQ | None] = dict.fromkeys(graph.edges)
    for text, record in records.items():
        edge = Edge.parse(text)
        if edge not in simqs:
            raise HagoError(f"the graph has no edge {text}")
        source, target = (None if q is None else read.qparams(q) for q in record)
        simqs[edge] = SimQ(source, target)
    return simqs


def _read_node(
    node: Node,
    record: Mapping[str, Any],
    read: ValueReader,
    hardware: Hardware,
    edges: Mapping[Edge, SimQ | None],
    ops: Ops,
) -> NodePlan:
    descs = hardware.ops.get(node.op, ())
    plain_fields = {field: read(record[key]) for field, key in _PLAIN_FIELDS.items()}
    misfits = [key for key, kinds in _FIELD_TYPES.items() if not isinstance(plain_fields[key], kinds)]
    misfits += [] if all(q is None or isinstance(q, QParams) for q in plain_fields["operands"]) else ["operands"]
    if misfits or len(plain_fields["operands"]) != len(node.inputs) or record["desc"] >= len(descs):
        raise HagoError(f"{', '.join(misfits) or 'operands or desc'} do not fit {node}")
    plan = NodePlan(
        **plain_fields,
        desc=descs[record["desc"]],
        simqs=tuple(edges[e] for e in node.edges),
        consts={int(slot): read(c) for slot, c in record["consts"].items()},
        thresholds={k: read(v) for k, v in record["thresholds"].items()},
        digest=bytes.fromhex(record["digest"]),
    )
    plan = replace(plan, additions=additions_of(ops[node.op], plan.attrs, plan.desc.register, plan.bound))
    if "groups" in record:
        groups = _read_groups(node, plan, record["groups"], read, hardware, ops)
        consts = {**plan.consts, groups.slot: groups.joined()}
        plan = replace(plan, groups=groups, consts=dict(sorted(consts.items())))
    if record["largest_pair"] is not None:
        plan = replace(plan, pairs=_pairs(node, plan, ops, record["largest_pair"]))
    return plan


def _read_groups(
    node: Node, plan: NodePlan, record: Mapping[str, Any], read: ValueReader, hardware: Hardware, ops: Ops
) -> WeightGroups:
    """The groups of the weight of a node; the plan lacks them and the joined integers."""
    slot, integers, multipliers = record["slot"], read(record["integers"]), read(record["multipliers"])
    form, of_op, joined = ops[node.op].integer, plan.desc.groups, plan.operands[record["slot"]]
    if form is None or form.weight is None or form.weight.slot != slot or of_op is None or joined is None:
        raise HagoError(f"node {node.name!r} has groups with multipliers, but its signature or its op has none")
    top = of_op.largest_multiplier(power_of_two=hardware.requantize.power_of_two)
    is_integer = not (integers.is_floating_point() or integers.dtype == torch.bool) and multipliers.dtype == torch.int64
    shape = groups_of(integers.shape, of_op.size) if integers.ndim > 1 else None
    if not is_integer or multipliers.shape != shape or not bool(((multipliers > 0) & (multipliers <= top)).all()):
        raise HagoError(
            f"got {integers.dtype} integers of shape {tuple(integers.shape)} in groups with {multipliers.dtype} "
            f"multipliers of shape {tuple(multipliers.shape)}; expected one from 1 to {top} for every group"
        )
    scale = joined.scale.reshape(-1, 1) * multipliers
    zero, ends = torch.zeros_like(multipliers), (joined.qmin // top, joined.qmax // top)
    stored = QParams(scale, zero, *ends, plan.desc.in_dtype(slot), of_op.size)
    sums = None
    if record["largest_sum"] is not None:
        register, largest = plan.desc.register, float(record["largest_sum"])
        sums = group_sums(ops[node.op], plan.attrs, of_op, integers, multipliers, register, largest)
    return WeightGroups(slot, stored, integers, multipliers, sums)


def _read_weight(
    graph: Graph,
    edge: Edge,
    record: Mapping[str, Any],
    read: ValueReader,
    hardware: Hardware,
    edges: Mapping[Edge, SimQ | None],
) -> StoredWeight:
    simq, integers = edges[edge], read(record["integers"])
    if simq is None or simq.source is None or simq.target is not None:
        raise HagoError("got integers of a weight, and no edge that dequantizes them")
    desc, digest = hardware.ops[graph[edge.dst].op][record["desc"]], bytes.fromhex(record.get("digest", ""))
    return StoredWeight(desc, simq.source, integers, None, digest)


def _pairs(node: Node, plan: NodePlan, ops: Ops, largest: float) -> ProductPairs:
    form, (x, w) = ops[node.op].integer, plan.operands[:2]
    if (
        form is None
        or form.product is None
        or x is None
        or w is None
        or OVERFLOWS[plan.desc.register.overflow].of_pair is None
    ):
        raise HagoError(f"node {node.name!r} has pairs of products, but its op or register adds no pairs")
    return ProductPairs(form.product, node.attrs, x, w, largest, plan.desc.register.overflow)
