"""Explanations: the nodes that will run in integers, and those that stay float and why, before any search.

An explanation depends neither on thresholds nor on data. The overflow that it reports holds for all weights and
thresholds; where overflow depends on them, it is known once a Plan is resolved. `explain_topology` makes the
Explanation that `hago.explain` returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hago.arithmetic.numerics import OVERFLOWS
from hago.arithmetic.schemes import TWO_SIDED
from hago.arithmetic.types import INT16, Edge
from hago.cost import node_macs
from hago.graph import Graph, Node
from hago.hardware import Hardware, OpDesc
from hago.ops import Operand, Ops
from hago.plan import Space, Topology
from hago.plan.topology import fitting_descs, float_boundaries, weight_only_descs
from hago.serialization.summary import Summarized, Summary, names_text
from hago.serialization.text_table import (
    count,
    counted,
    head,
    keep_beginning,
    keep_end,
    ratio_text,
    table,
    tail,
    wrap_words,
    wrapped,
)


@dataclass(frozen=True, slots=True)
class EdgeChoice:
    """The choices of bits of an in-edge of an integer node, or of its requantized output (`node:out`).

    Args:
        key: of the edge.
        choices: numbers of bits, widest first; empty if there is nothing to choose.
        why: the source of the bits: "chosen", "of <node>:out", "as emitted", "derived" (a bias),
            "not quantized".
    """

    key: str
    choices: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        if not self.choices:
            return {"derived": "bias", "as emitted": "="}.get(self.why, "-")
        high, low = self.choices[0], self.choices[-1]
        return str(high) if high == low else f"{high}..{low}"


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The choices that a search has at one node; one row of an Explanation.

    Args:
        integer: whether it runs in integers.
        reason: why it does or does not.
        macs: multiply-accumulates at batch 1.
        signatures: the signatures with which the hardware can run it, preferred first.
        edges: the in-edges and the output of an integer node, or the quantized weight of a float node.
        safe_bits: the largest number of bits of all operands at which the accumulator cannot overflow for any weights
            and thresholds; None if that depends on them.
        always_safe: whether it cannot overflow for any choice of bits.
    """

    name: str
    op: str
    integer: bool
    reason: str
    macs: int
    signatures: tuple[str, ...]
    edges: tuple[EdgeChoice, ...]
    safe_bits: int | None
    always_safe: bool

    @property
    def overflow(self) -> str:
        """A phrase that tells whether the accumulator can overflow."""
        if not self.integer:
            return ""
        if self.always_safe:
            return "never"
        return "when resolved" if self.safe_bits is None else f"never to {self.safe_bits} bits"


@dataclass(frozen=True, slots=True)
class FloatBoundary:
    """An edge on which values change from float to integer or back."""

    edge: str
    source: str
    to: Literal["integer", "float"]

    def __str__(self) -> str:
        return f"{self.source} -> {self.edge} to {self.to}"


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Summarized):
    """A topology and a search space, explained node by node; prints as a table.

    Args:
        hardware: name of the hardware.
        rows: one per computed node, in order.
        crossings: the edges on which values change from float to integer or back.
        groups: number of edge groups whose bits can be chosen.
        choices: number of points of the search space.
    """

    hardware: str
    rows: tuple[NodeChoice, ...]
    crossings: tuple[FloatBoundary, ...]
    groups: int
    choices: int

    @property
    def integer_nodes(self) -> int:
        return sum(r.integer for r in self.rows)

    @property
    def float_nodes(self) -> int:
        return len(self.rows) - self.integer_nodes

    @property
    def integer_macs(self) -> int:
        return sum(r.macs for r in self.rows if r.integer)

    @property
    def float_macs(self) -> int:
        return sum(r.macs for r in self.rows if not r.integer)

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON values."""
        return {
            "hardware": self.hardware,
            "integer_nodes": self.integer_nodes,
            "float_nodes": self.float_nodes,
            "integer_macs": self.integer_macs,
            "float_macs": self.float_macs,
            "groups": self.groups,
            "choices": self.choices,
            "crossings": [{"edge": c.edge, "source": c.source, "to": c.to} for c in self.crossings],
            "nodes": [_row_json(r) for r in self.rows],
        }

    def summary(self) -> Summary:
        """What runs in integers, what stays float and why, and the size of the search space."""
        total = self.integer_macs + self.float_macs
        why = Counter((r.op, r.reason) for r in self.rows if not r.integer).most_common()
        return Summary(
            f"Explanation of {counted(len(self.rows), 'node')} on {self.hardware}",
            {
                "integer": f"{self.integer_nodes} nodes, {ratio_text(self.integer_macs, total)} of {count(total)} MACs",
                "float": names_text([f"{n} x {op} ({reason})" for (op, reason), n in why]) or "nothing",
                "choices": f"{self.groups} groups of edges with {self.choices:.4g} choices of bits in all",
            },
        )

    def __str__(self) -> str:
        letters, reasons = _letters(self.rows), _numbers(self.rows)
        rows = [_row_text(r, letters, reasons) for r in self.rows]
        titles = ("node", "op", "runs in", "MACs", "bits of its edges", "sig.", "overflow", "why")
        names = {"node": keep_end, "op": keep_beginning}
        words = {"bits of its edges": wrap_words, "overflow": wrap_words}
        lines = table(titles, rows, ("MACs", "why"), [names, words])
        return "\n".join([*self._head(), *lines, *self._foot(letters, reasons)])

    def _head(self) -> list[str]:
        total = self.integer_macs + self.float_macs
        part = ratio_text(self.integer_macs, total)
        return [
            *wrapped(
                f"on {self.hardware}: {self.integer_nodes} nodes in integers, {self.float_nodes} in float; "
                f"{count(self.integer_macs)} of {count(total)} MACs in integers ({part}); "
                f"{self.groups} edge groups with {self.choices} choices of bits in all"
            ),
            "",
            "bits      what a search may choose, edge by edge: = passes as emitted, bias is derived,",
            "          (8..4) the producer requantizes to it, >8..4 is the node's own requantized output",
            "overflow  what holds whatever weights and thresholds are; the rest shows when a plan is resolved",
            "sig., why  the signatures and the reason, which are listed below",
            "",
        ]

    def _foot(self, letters: Mapping[str, str], reasons: Mapping[str, int]) -> list[str]:
        lines = ["", "signatures:"]
        for signature, letter in letters.items():
            lines += wrapped(f"  {letter}  {signature}", indent=" " * 5)
        lines += ["", "why a node runs as it does:"]
        for reason, number in reasons.items():
            lines += wrapped(f"  {number:>2}  {reason}", indent=" " * 6)
        why = Counter((r.op, r.reason) for r in self.rows if not r.integer)
        if why:
            lines += ["", "in float:"]
            for (op, reason), n in why.most_common():
                lines += wrapped(f"  {n} x {op}: {reason}", indent=" " * 6)
        if self.crossings:
            lines += ["", f"values cross between float and integer on {counted(len(self.crossings), 'edge')}:"]
            for crossing in self.crossings:
                lines += wrapped(f"  {crossing}", indent=" " * 6)
        return lines


def explain_topology(graph: Graph, hardware: Hardware, topology: Topology, space: Space) -> Explanation:
    """Explain which nodes will run in integers on a hardware, and why the others stay float.

    Args:
        topology, space: of this graph on this hardware.
    """
    ops = hardware.rules(hardware.known_ops)
    rows = tuple(_explain(graph, node, hardware, topology, space, ops) for node in graph.computed)
    boundaries = tuple(_boundary(graph, topology, e) for e in float_boundaries(graph, topology))
    return Explanation(hardware.name, rows, boundaries, len(space.groups), space.size)


def _boundary(graph: Graph, topology: Topology, edge: Edge) -> FloatBoundary:
    source = graph.source(edge)
    return FloatBoundary(str(edge), source, "float" if topology.nodes[source] else "integer")


def _explain(graph: Graph, node: Node, hardware: Hardware, topology: Topology, space: Space, ops: Ops) -> NodeChoice:
    integer = topology.nodes[node.name]
    fitting = fitting_descs(graph, node, hardware, ops)
    weight_only = not integer and any(topology.edges[e] for e in node.edges)
    edges: tuple[EdgeChoice, ...] = ()
    if weight_only:
        descs = weight_only_descs(graph, node, hardware, ops)
        edges = tuple(_weight_edge(e, space) for e in node.edges)
    else:
        descs = fitting if integer else hardware.float_descs(node.op, integer_fits=bool(fitting))
        edges = _integer_edges(graph, node, space, ops) if integer else ()
    safe, always = None, False
    if integer:
        choices = [e.choices for e in edges[: len(node.inputs)]]
        safe, always = always_safe_bits(graph, node, hardware, descs, choices, ops)
    return NodeChoice(
        name=node.name,
        op=node.attrs["target"] if node.op == "opaque" else node.op,
        integer=integer,
        reason=topology.reasons[node.name],
        macs=node_macs(graph, node, ops),
        signatures=tuple(str(d) for d in descs),
        edges=edges,
        safe_bits=safe,
        always_safe=always,
    )


# ---------------------------------------------------------------- overflow
def always_safe_bits(
    graph: Graph,
    node: Node,
    hardware: Hardware,
    descs: Sequence[OpDesc],
    choices: Sequence[Sequence[int]],
    ops: Ops,
) -> tuple[int | None, bool]:
    """The largest number of bits of all operands of an integer node at which its accumulator cannot overflow.

    Args:
        descs: its integer signatures.
        choices: the bits that each operand may have, widest first; empty if there is nothing to choose.

    Returns:
        The number of bits, and whether every choice is safe; (None, False) if that depends on weights and thresholds.
    """
    form = ops[node.op].integer
    assert form is not None
    keeps_dtype = form.outputs_fit_input_dtype and all(d.register.dtype == d.in_dtype(0) for d in descs)
    if form.table or keeps_dtype:
        return None, True
    has_other_scale = form.requantizes_output or (
        "common" in form.slots and any(d.requantize_at == "output" for d in descs)
    )
    ones = [torch.ones((), dtype=torch.float64)] * len(choices)
    # a form without limits or pads returns its attributes as they are
    depends_on_scales = bool(form.attrs_at) or form.attrs(node.attrs, ones) is not node.attrs
    if has_other_scale or depends_on_scales or not all(choices):
        return None, False  # it depends on scales: of a derived bias, or of integers as the producer emits them
    affine = not TWO_SIDED.isdisjoint((hardware.activation.scheme, hardware.weight.scheme))
    widest = max(c[0] for c in choices)
    for bits in range(widest, min(c[-1] for c in choices) - 1, -1):
        if _fits(graph, node, descs, [min(bits, c[0]) for c in choices], affine, ops):
            return bits, bits == widest
    return None, False


def _fits(graph: Graph, node: Node, descs: Sequence[OpDesc], bits: Sequence[int], affine: bool, ops: Ops) -> bool:
    """Whether the largest operands of these bits fit the register of every signature that could be chosen."""
    form = ops[node.op].integer
    assert form is not None
    for desc in descs:
        if any(b > desc.bits_of(desc.in_dtype(slot))[-1] for slot, b in enumerate(bits)):
            continue
        operands = []
        for slot, b in enumerate(bits):
            uses_all_levels = affine or not desc.in_dtype(slot).signed
            largest = torch.tensor(float((1 << b) - 1 if uses_all_levels else (1 << (b - 1)) - 1), dtype=torch.float64)
            if desc.groups is not None and form.weight is not None and form.weight.slot == slot:
                largest = largest * desc.groups.largest_multiplier(power_of_two=False)
            operands.append(Operand(None, largest, graph[node.inputs[slot]].shape or ()))
        if float(form.bound(node.attrs, operands).max()) > desc.register.dtype.max:
            return False
        if OVERFLOWS[desc.register.overflow].of_pair is not None and form.product is not None:
            pair = 2 * float(operands[0].magnitude) * float(operands[1].magnitude)
            if pair > INT16.max:
                return False
    return True


# ---------------------------------------------------------------- edges
def _weight_edge(edge: Edge, space: Space) -> EdgeChoice:
    """The choices of an in-edge of a float node; only a quantized weight has any."""
    group = space.groups.get(str(edge))
    return EdgeChoice(str(edge), () if group is None else group.choices, "not quantized" if group is None else "chosen")


def _integer_edges(graph: Graph, node: Node, space: Space, ops: Ops) -> tuple[EdgeChoice, ...]:
    form = ops[node.op].integer
    assert form is not None
    outputs = {e: g for g in space.groups.values() if g.key == f"{g.source}:out" for e in g.edges}
    choices = []
    for edge in node.edges:
        key, kind = str(edge), form.slot(edge.slot)
        if key in space.groups:
            choices.append(EdgeChoice(key, space.groups[key].choices, "chosen"))
        elif kind in ("bias", "plain"):
            choices.append(EdgeChoice(key, (), "derived" if kind == "bias" else "not quantized"))
        elif edge in outputs:
            choices.append(EdgeChoice(key, outputs[edge].choices, f"of {outputs[edge].key}"))
        else:
            choices.append(EdgeChoice(key, (), "as emitted"))
    out = space.groups.get(f"{node.name}:out")
    return (*choices, *([EdgeChoice(out.key, out.choices, "chosen")] if out else []))


# ---------------------------------------------------------------- text and JSON
def _letters(rows: Sequence[NodeChoice]) -> dict[str, str]:
    """A letter for every signature, in order of appearance."""
    letters: dict[str, str] = {}
    for signature in (s for r in rows for s in r.signatures):
        index = len(letters)
        letters.setdefault(signature, chr(ord("A") + index % 26) * (1 + index // 26))
    return letters


def _numbers(rows: Sequence[NodeChoice]) -> dict[str, int]:
    """A number for every reason, in order of appearance."""
    return {reason: number for number, reason in enumerate(dict.fromkeys(r.reason for r in rows), start=1)}


def _row_text(row: NodeChoice, letters: Mapping[str, str], reasons: Mapping[str, int]) -> tuple[str, ...]:
    return (
        tail(row.name, 36),
        head(row.op, 24),
        "integer" if row.integer else "float",
        count(row.macs) if row.macs else "",
        " ".join(map(_edge_text, row.edges)),
        "".join(letters[s] for s in row.signatures),
        row.overflow,
        str(reasons[row.reason]),
    )


def _edge_text(edge: EdgeChoice) -> str:
    if edge.key.endswith(":out"):
        return f">{edge}"
    return f"({edge})" if edge.why.startswith("of ") else str(edge)


def _row_json(row: NodeChoice) -> dict[str, Any]:
    edges = [{"edge": e.key, "choices": list(e.choices), "why": e.why} for e in row.edges]
    return {
        "node": row.name,
        "op": row.op,
        "integer": row.integer,
        "reason": row.reason,
        "macs": row.macs,
        "signatures": list(row.signatures),
        "edges": edges,
        "safe_bits": row.safe_bits,
        "overflow": row.overflow,
    }
