"""The Plan: everything that simulation and realization read.

A Resolver derives it from a graph, a hardware, a topology, bits and thresholds. It is never stored beside these: a
strategy stores bits and thresholds, a stored model only the Plan and where it came from.

The simulator executes it on floats that hold integers, and the integer model on integers; both give equal integers.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hago.arithmetic.numerics import EXACT_FLOAT32, OVERFLOWS, Lost, apply_overflow
from hago.arithmetic.types import Edge, QParams, SimQ
from hago.graph import CONST, OUTPUT, Graph
from hago.hardware import Hardware, OpDesc
from hago.ops import Ops, is_narrow
from hago.plan.accumulators import ClampedAdditions, ProductPairs
from hago.plan.weight_groups import GroupSums, WeightGroups
from hago.plan.weight_sizes import WeightSizes, bits_of, group_bytes, weight_sizes
from hago.serialization.summary import (
    Summarized,
    Summary,
    bits_text,
    counts_text,
    names_text,
    proofs_text,
    wrapped_lines,
)
from hago.serialization.text_table import counted

Verdict = Literal["proved", "possible", "overflows", "float"]


@dataclass(frozen=True, slots=True, eq=False)
class NodePlan:
    """How one integer node runs. Built by `plan.resolve.NodeBuilder`.

    Args:
        desc: the signature that it uses.
        attrs: attributes in integer units.
        operands: the qparams in which the node reads each operand; None for operands that are not quantized.
        simqs: the conversion on each in-edge; None where the operand is read as its producer emits it.
        consts: centered integers of the constant in-edges, by slot, in their storage dtype.
        register: the qparams of the integers in the accumulator; `desc.register` says how it overflows.
        out_simq: the requantization at the output; None where the node emits its accumulator or has a table.
        out: the qparams of the node's value.
        bound: the largest |accumulator| that any input can cause.
        raw_bound: the same on a chip that multiplies stored integers, zero points included.
        keeps_input_dtype: whether the accumulator has the dtype of the inputs, which every output fits.
        parts: the number of parts into which the sum over K is split so that each is exact in float32.
        table: the output of every input integer, where the op is a table; indexed by q - qmin.
        thresholds: (lo, hi) used for each operand and output that has bits, by group key.
        saturated_biases: bias entries that did not fit their slot.
        digest: equal for equal plans of one node.
        pairs: the pairs of products that may exceed 16 bits, on chips that add products in pairs; None where the chip
            does not, or no pair can exceed them.
        additions: the additions whose partial sums may leave the register, on chips whose registers saturate at every
            addition; None where the chip's do not, or no partial sum can leave them.
        raised: channels of the weight whose scale was raised so that their biases fit the accumulator; 0 stands for
            the whole weight where it has one scale. Not kept in stored models, whose qparams hold it.
        groups: of a weight whose groups have multipliers: `consts` has the joined integers, and `operands` their
            qparams. None where groups have none.
    """

    desc: OpDesc
    attrs: Mapping[str, Any]
    operands: tuple[QParams | None, ...]
    simqs: tuple[SimQ | None, ...]
    consts: Mapping[int, Tensor]
    register: QParams
    out_simq: SimQ | None
    out: QParams
    bound: float
    raw_bound: float
    keeps_input_dtype: bool
    parts: int
    table: Tensor | None
    thresholds: Mapping[str, tuple[Tensor, Tensor]]
    saturated_biases: int
    digest: bytes
    pairs: ProductPairs | None = None
    additions: ClampedAdditions | None = None
    raised: tuple[int, ...] = ()
    groups: WeightGroups | None = None

    @property
    def proved(self) -> bool:
        """Whether no input can make the accumulator leave its register."""
        if self.keeps_input_dtype or self.table is not None:
            return True
        if self.pairs is not None or self.group_sums is not None:
            return False
        # the accumulator has zero point 0, so an unsigned one holds no negative sum
        return self.desc.register.dtype.signed and self.largest_sum <= self.desc.register.dtype.max

    @property
    def group_sums(self) -> GroupSums | None:
        """The partial sums of groups that may overflow; None where none can."""
        return None if self.groups is None else self.groups.sums

    @property
    def verdict(self) -> Verdict:
        """`proved` or `possible`."""
        return "proved" if self.proved else "possible"

    @property
    def largest_sum(self) -> float:
        """The largest |sum| that its register must hold: of centered integers, and of stored ones, too, where the
        register saturates at the end, since the correction for zero points then comes too late."""
        behaviour = OVERFLOWS[self.desc.register.overflow]
        return max(self.bound, self.raw_bound) if behaviour.counts_zero_points else self.bound

    @property
    def register_share(self) -> float:
        """The largest accumulator that any input can cause, over the maximum of its register; above 1 it may overflow.
        Partial sums in narrower registers count too."""
        share = self.largest_sum / self.desc.register.dtype.max
        partial = self.group_sums if self.pairs is None else self.pairs
        return share if partial is None else max(share, partial.over)

    @property
    def carrier(self) -> torch.dtype:
        """The float dtype in which the sums are exact: float32, or float64 where they may exceed 2**24."""
        return torch.float32 if self.bound < EXACT_FLOAT32 else torch.float64

    @property
    def operand_carrier(self) -> torch.dtype:
        """The float dtype of the operands of `OpRule.compute_int_in_parts`."""
        return torch.float32 if self.parts > 1 else self.carrier

    def lost(self, operands: Sequence[Any]) -> Lost | None:
        """The change of every accumulator by overflow of its partial sums; None where none can overflow. The result is
        passed to `apply_register`."""
        if self.additions is not None:
            return self.additions.lost(operands)
        sums = self.group_sums if self.pairs is None else self.pairs
        return None if sums is None else sums.lost(operands)

    def apply_register(self, c: Tensor, lost: Lost | None = None) -> Tensor:
        """Apply the overflow of the register to exact sums.

        Args:
            c: the exact sums.
            lost: the change by overflow of partial sums.

        Returns:
            What the register holds; `c` itself where it cannot overflow.
        """
        if lost is not None:
            c = (c.to(torch.float64) if c.is_floating_point() else c) + lost.amount
        if self.proved:
            return c
        # only accumulators can overflow, and they have zero point 0
        return apply_overflow(c, self.desc.register.dtype, self.desc.register.overflow)

    def rescaling(self, slot: int) -> SimQ | None:
        """The requantization of a narrow operand to the common scale, which a node of the form `rescaled` makes itself;
        None for other operands."""
        q, common = self.operands[slot], self.attrs.get("common")
        return SimQ(q, common) if q is not None and common is not None and is_narrow(q.dtype) else None

    def look_up(self, c: Tensor) -> Tensor:
        """The entries of the table for centered inputs, in the dtype of `c`."""
        source = self.operands[0]
        assert self.table is not None and source is not None
        index = (c + (source.zero_point - source.qmin)).to(torch.int64)
        return self.table[index].to(c.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """The weight of a node that computes in float, stored as integers and dequantized where the node reads it.

    Args:
        desc: the signature that the node uses.
        qparams: of the integers.
        integers: centered, in their storage dtype.
        threshold: (lo, hi) from which the qparams were made; None in a model that was loaded.
        digest: of the integers, where they need not be the nearest; else empty.
    """

    desc: OpDesc
    qparams: QParams
    integers: Tensor
    threshold: tuple[Tensor, Tensor] | None
    digest: bytes = b""

    @property
    def key(self) -> tuple[object, ...]:
        """A hashable value that is equal for equal weights of one node."""
        return (*self.qparams.key, self.digest) if self.digest else self.qparams.key


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Summarized):
    """A node plan for every integer node, and the SimQ of every edge.

    Args:
        nodes: the node plans, of integer nodes only.
        edges: the SimQ of every edge of the graph, its outputs included; None where the value is read as it is.
        weights: the weights of float nodes that are stored as integers; the SimQs of their edges dequantize.
    """

    graph: Graph
    hardware: Hardware
    ops: Ops
    nodes: Mapping[str, NodePlan]
    edges: Mapping[Edge, SimQ | None]
    weights: Mapping[Edge, StoredWeight] = field(default_factory=dict)

    @functools.cached_property
    def key(self) -> str:
        """A hash that is equal for Plans of one model that compute the same; stable between processes."""
        digest = hashlib.sha256()
        for name, node in self.nodes.items():
            digest.update(name.encode() + node.digest)
        for edge, weight in self.weights.items():
            digest.update(repr((str(edge), weight.key)).encode())
        return digest.hexdigest()

    @property
    def thresholds(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Every threshold that was used, by group key."""
        thresholds = {key: pair for n in self.nodes.values() for key, pair in n.thresholds.items()}
        return thresholds | {str(edge): w.threshold for edge, w in self.weights.items() if w.threshold is not None}

    def target(self, edge: Edge) -> QParams | None:
        """The qparams in which an integer node reads an edge, or in which a float node's weight, or one whose groups
        have multipliers, is stored; None for real values."""
        if edge in self.weights:
            return self.weights[edge].qparams
        node = self.nodes.get(edge.dst)
        if node is not None and node.groups is not None and node.groups.slot == edge.slot:
            return node.groups.stored
        return None if node is None else node.operands[edge.slot]

    def group_bytes(self, edge: Edge) -> int:
        """The bytes of the scales or multipliers, and the zero points, of the groups of a constant on an edge."""
        target, node = self.target(edge), self.nodes.get(edge.dst)
        if target is None or target.group is None:
            return 0
        of_node = None if node is None else node.desc.groups
        return group_bytes(target, None if of_node is None else of_node.multiplier_bits)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """`proved` or `possible` for every integer node."""
        return {name: n.verdict for name, n in self.nodes.items()}

    @functools.cached_property
    def weight_sizes(self) -> WeightSizes:
        """The bytes of the constants."""
        graph = self.graph
        reads = [(source, edge) for edge in graph.edges if graph[source := graph.source(edge)].op == CONST]
        constants = (
            (source, graph.consts[source], self.target(edge), self.group_bytes(edge)) for source, edge in reads
        )
        return weight_sizes(constants, sum(t.numel() * t.element_size() for t in graph.consts.values()))

    def summary(self) -> Summary:
        """The network, the bits of operands, the size of the weights and what stays float."""
        computed = self.graph.computed
        return Summary(
            f"Plan of a network of {counted(len(computed), 'node')} for {self.hardware.name}",
            {
                "nodes": counts_text(n.op for n in computed),
                "bits": bits_text(self._bits_of_operands(), "operands"),
                "weights": self.weight_sizes.text(),
                "float": names_text([n.name for n in computed if n.name not in self.nodes]) or "nothing",
                "overflow": proofs_text(self.verdicts),
            },
        )

    def _bits_of_operands(self) -> list[int]:
        """The bits of every edge that is read as integers, biases aside."""
        bits = []
        for node in self.graph.computed:
            form = self.ops[node.op].integer if node.op in self.ops else None
            for edge in node.edges:
                target = self.target(edge)
                if target is not None and (form is None or form.slot(edge.slot) != "bias"):
                    bits.append(bits_of(target))
        return bits

    def __str__(self) -> str:
        lines = [f"plan for {self.hardware.name}"]
        for node in self.graph:
            if node.name in self.nodes:
                node_plan = self.nodes[node.name]
                bound = f"|acc| <= {node_plan.bound:.0f} {node_plan.verdict}"
                lines.append(f"  {node.name}: {node.op} {node_plan.desc}; {bound}")
            for edge in (*node.edges, *self._output_edges(node.name)):
                simq = self.edges.get(edge)
                if simq is not None:
                    lines.append(f"    {edge}: {simq}")
        return "\n".join(part for line in lines for part in wrapped_lines(line))

    def _output_edges(self, name: str) -> list[Edge]:
        return [e for e in self.graph.out_edges[name] if e.dst == OUTPUT]
