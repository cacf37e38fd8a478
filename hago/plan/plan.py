"""Plan: everything that simulation and realization need to know, derived and never stored.

A Plan is made by `resolve` from a graph, a hardware, a topology, bits and thresholds. Both readers
(simulator and integer model) do exactly what it says, which is why they agree.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hago.arithmetic.numerics import EXACT_FLOAT32, Lost, apply_overflow
from hago.arithmetic.types import Edge, QParams, SimQ
from hago.graph.graph import OUTPUT, Graph
from hago.hardware.hardware import Hardware, OpDesc
from hago.ops import Ops
from hago.plan.accumulators import Additions, Pairs

Verdict = Literal["proved", "possible", "overflows", "float"]


@dataclass(frozen=True, slots=True, eq=False)
class NodePlan:
    """How one integer node runs.

    Args:
        desc: the signature it uses.
        attrs: attributes in integer units.
        operands: the qparams each operand arrives in; None for operands that are not quantized.
        simqs: what happens on each in-edge to get there; None where nothing does.
        consts: centered integers of the constant in-edges, by slot, in their storage dtype.
        register: the qparams of the accumulator.
        out_simq: requantization at the output, or None where the node emits its accumulator.
        out: the qparams of the node's value.
        bound: the largest |accumulator| that any input can cause.
        raw_bound: the same with the zero points multiplied in, as a saturating chip sees it.
        keeps_input_dtype: whether the accumulator has the dtype of the inputs, which every output fits.
        parts: into how many sums over K a float32 carrier must be split to stay exact.
        table: value of every input integer, where the op is a table; indexed by q - dtype.min.
        thresholds: (lo, hi) used on each in-edge that has bits, by group key.
        saturated_biases: bias entries that did not fit their slot.
        digest: equal for equal node plans.
        pairs: of products that 16 bits may not hold, on chips that add products by two; None where
            the chip does not, or none can pass.
        additions: whose partial sums may leave the register, on chips whose registers saturate at every addition; None
            where the chip's do not, or no partial sum can leave them.
        raised: channels of the weight whose scale was raised so that their biases fit the accumulator; 0 stands for
            the whole weight where it has one scale. Not kept in stored models, whose qparams hold it.
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
    pairs: Pairs | None = None
    additions: Additions | None = None
    raised: tuple[int, ...] = ()

    @property
    def proved(self) -> bool:
        """Whether no input can make the accumulator leave its register."""
        if self.keeps_input_dtype or self.table is not None:
            return True
        if self.pairs is not None:
            return False
        register = self.desc.register
        seen = max(self.bound, self.raw_bound) if register.overflow == "saturate_end" else self.bound
        # the accumulator has zero point 0, so an unsigned one holds no negative sum
        return register.dtype.signed and seen <= register.dtype.max

    @property
    def carrier(self) -> torch.dtype:
        """The float type whose sums are exact: float32, or float64 where they may pass 2**24."""
        return torch.float32 if self.bound < EXACT_FLOAT32 else torch.float64

    @property
    def operand_carrier(self) -> torch.dtype:
        """The float type of the operands of `OpRule.compute_int_in_parts`."""
        return torch.float32 if self.parts > 1 else self.carrier

    def lost(self, operands: Sequence[Any]) -> Lost | None:
        """What pairs of products, or clamped partial sums, change in every accumulator; None where they cannot."""
        if self.additions is not None:
            return self.additions.lost(operands)
        return None if self.pairs is None else self.pairs.lost(operands)

    def held(self, c: Tensor, lost: Lost | None = None) -> Tensor:
        """What the register holds where `c` was computed: `c` itself unless it could overflow."""
        if lost is not None:
            c = (c.to(torch.float64) if c.is_floating_point() else c) + lost.amount
        if self.proved:
            return c
        # only accumulators can overflow, and they have zero point 0
        return apply_overflow(c, self.desc.register.dtype, self.desc.register.overflow)

    def look_up(self, c: Tensor) -> Tensor:
        """The table's value of every centered input, in the input's dtype."""
        source = self.operands[0]
        assert self.table is not None and source is not None
        index = (c + (source.zero_point - source.qmin)).to(torch.int64)
        return self.table[index].to(c.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """The weight of a node that computes in float: it rests as integers and is dequantized where it is read.

    Args:
        desc: the signature that the node uses.
        qparams: what the integers mean.
        integers: centered, in their storage dtype.
        threshold: (lo, hi) that the qparams are made of; None in a model that was stored.
    """

    desc: OpDesc
    qparams: QParams
    integers: Tensor
    threshold: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, eq=False)
class Plan:
    """A node plan for every integer node, and the SimQ of every edge.

    Args:
        nodes: integer nodes only.
        edges: every edge of the graph, its outputs included; None where values pass as they are.
        weights: of float nodes, those that rest as integers; their edges dequantize.
    """

    graph: Graph
    hardware: Hardware
    ops: Ops
    nodes: Mapping[str, NodePlan]
    edges: Mapping[Edge, SimQ | None]
    weights: Mapping[Edge, StoredWeight] = field(default_factory=dict)

    @functools.cached_property
    def key(self) -> str:
        """Equal for Plans that compute the same; stable between processes."""
        digest = hashlib.sha256()
        for name, node in self.nodes.items():
            digest.update(name.encode() + node.digest)
        for edge, weight in self.weights.items():
            digest.update(repr((str(edge), weight.qparams.key)).encode())
        return digest.hexdigest()

    @property
    def thresholds(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Every threshold that was used, by group key."""
        found = {key: pair for n in self.nodes.values() for key, pair in n.thresholds.items()}
        return found | {str(edge): w.threshold for edge, w in self.weights.items() if w.threshold is not None}

    def target(self, edge: Edge) -> QParams | None:
        """The qparams that an operand arrives in at an integer node, or that a weight rests in; None for real
        values."""
        if edge in self.weights:
            return self.weights[edge].qparams
        node = self.nodes.get(edge.dst)
        return None if node is None else node.operands[edge.slot]

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """`proved` or `possible` for every integer node."""
        return {name: "proved" if n.proved else "possible" for name, n in self.nodes.items()}

    def __str__(self) -> str:
        lines = [f"plan for {self.hardware.name}"]
        for node in self.graph:
            if node.name in self.nodes:
                p = self.nodes[node.name]
                verdict = "proved" if p.proved else "possible"
                lines.append(f"  {node.name}: {node.op} {p.desc}; |acc| <= {p.bound:.0f} {verdict}")
            for edge in (*node.edges, *self._output_edges(node.name)):
                simq = self.edges.get(edge)
                if simq is not None:
                    lines.append(f"    {edge}: {simq}")
        return "\n".join(lines)

    def _output_edges(self, name: str) -> list[Edge]:
        return [e for e in self.graph.out_edges[name] if e.dst == OUTPUT]
