"""Nodes of a Plan computed as the simulator does, with gradients that reach constants and what the nodes read.

Block reconstruction runs some nodes of a network by it, again and again, with constants that change. Forward, values
are those of `Simulator`, bit for bit, where constants are whole and every value is rounded; scales and registers are
those of the Plan. Backward, rounding passes the gradient, and clipping passes it inside its range.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.fake_quantize import Slope, fake_quantize_edge, trained_to_real
from hago.arithmetic.numerics import clip_range
from hago.arithmetic.straight_through import straight_through
from hago.arithmetic.types import Edge, SimQ
from hago.graph import Node, compute_laid_out, compute_real
from hago.plan import NodePlan, Plan, fuse_clamps
from hago.simulation.simulator import Carriers

_SLOPE: Final = Slope()
#: The most integers of a range whose values may be left unrounded: rounding to more of them hardly matters.
MOST_DROPPED: Final = 256


@dataclass(frozen=True, slots=True)
class Drop:
    """Entries of activations that are left unrounded at random, in each pass others.

    Args:
        generator: draws them; each with a probability of one half.

    References:
        X. Wei et al., "QDrop: Randomly Dropping Quantization for Extremely Low-bit Post-Training Quantization", ICLR
        2022.
    """

    generator: torch.Generator

    def like(self, x: Tensor) -> Tensor:
        """Zeros and ones of the shape, layout and dtype of a tensor, at random."""
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(generator=self.generator)
        bits = words.view(torch.uint8)[: x.numel()].bitwise_and_(1).to(x.dtype)
        order = sorted(range(x.ndim), key=x.stride, reverse=True)
        drawn = bits.reshape([x.shape[d] for d in order])
        return drawn.permute([order.index(d) for d in range(x.ndim)])


class DifferentiableNodes:
    """Computes nodes of a Plan on float carriers with gradients.

    Args:
        plan: the Plan.
        ends: nodes whose value is read elsewhere, too; other clamps are fused into the clipping of their readers.
        carriers: constants as floats.
    """

    def __init__(self, plan: Plan, ends: Collection[str] = (), carriers: Carriers | None = None) -> None:
        self.plan, self.carriers = plan, carriers or Carriers()
        fused = fuse_clamps(plan)
        self.skipped = fused.skipped.difference(ends)
        self.simqs: dict[Edge, SimQ | None] = {**plan.edges}
        self.simqs.update({e: s for e, s in fused.simqs.items() if plan.graph.source(e) in self.skipped})

    def run(
        self,
        nodes: Sequence[Node],
        values: Mapping[str, Any],
        live: Mapping[Edge, Tensor] = {},
        drop: Drop | None = None,
        factors: Mapping[Edge, Tensor] = {},
    ) -> dict[str, Any]:
        """The values of nodes, which are run in order, on their carriers.

        Args:
            values: what the nodes read that they do not compute; constants need not be among them.
            live: by edge of a constant, the centered integers in its place, as floats which may take gradients.
            drop: the entries of activations that are not rounded; None for none.
            factors: by edge of an activation, what its scale is multiplied by, which may take gradients. The node reads
                its integers times the factor, in units of the Plan's scale, so that everything behind it has the units
                of the Plan.
        """
        computed, shared = {**values}, dict[tuple[str, int, int], Tensor]()
        for node in nodes:
            if node.name in self.skipped:
                computed[node.name] = computed[node.inputs[0]]
                continue
            node_plan = self.plan.nodes.get(node.name)
            if node_plan is None:
                computed[node.name] = self._float(node, computed, live)
            else:
                computed[node.name] = self._integer(node, node_plan, computed, live, drop, factors, shared)
        return {node.name: computed[node.name] for node in nodes}

    def real(self, name: str, value: Any) -> Any:
        """The real values of the value of a node."""
        node_plan = self.plan.nodes.get(name)
        return value if node_plan is None else trained_to_real(value, node_plan.out)

    def _read(self, name: str, computed: Mapping[str, Any]) -> Any:
        return computed[name] if name in computed else self.plan.graph.consts[name]

    def _float(self, node: Node, computed: Mapping[str, Any], live: Mapping[Edge, Tensor]) -> Any:
        plan, operands = self.plan, []
        for edge, name in zip(node.edges, node.inputs, strict=True):
            if edge in plan.weights:
                stored = plan.weights[edge]
                integers = live.get(edge, stored.integers)
                operands.append(trained_to_real(integers, stored.qparams.spread_over(integers.shape)))
            else:
                operands.append(self.real(name, self._read(name, computed)))
        return compute_laid_out(node, operands, plan.ops)

    def _integer(
        self,
        node: Node,
        node_plan: NodePlan,
        computed: Mapping[str, Any],
        live: Mapping[Edge, Tensor],
        drop: Drop | None,
        factors: Mapping[Edge, Tensor],
        shared: dict[tuple[str, int, int], Tensor],
    ) -> Tensor:
        rule, carrier = self.plan.ops[node.op], node_plan.operand_carrier
        operands: list[Any] = []
        for slot, (edge, name) in enumerate(zip(node.edges, node.inputs, strict=True)):
            target, simq = node_plan.operands[slot], self.simqs[edge]
            if edge in live:
                operands.append(live[edge].to(carrier))
            elif slot in node_plan.consts:
                operands.append(self.carriers(node_plan.consts[slot], carrier))
            elif target is None:
                real = self.real(name, self._read(name, computed))
                operands.append(real.contiguous() if isinstance(real, Tensor) else real)
            elif simq is None or simq.target is None:
                operands.append(self._read(name, computed).to(carrier))
            else:
                factor = factors.get(edge)
                key = (name, id(simq.target), id(factor))
                if key not in shared:
                    shared[key] = self._quantized(simq, self._read(name, computed), name in self.skipped, drop, factor)
                operands.append(shared[key].to(carrier))
        form = rule.integer
        assert form is not None
        if form.table or form.requantizes_output:
            return self._requantizing(node, node_plan, operands)
        if form.common is None:
            c = rule.compute_int_in_parts(node_plan.attrs, operands, node_plan.parts)
        else:
            c = rule.compute(node.attrs, *self._rescaled(node_plan, operands))
        if not node_plan.proved:
            held = node_plan.apply_register(c.detach(), node_plan.lost([_detached(x) for x in operands]))
            c = straight_through(c, held.to(c.dtype))
        return c if node_plan.out_simq is None else self._quantized(node_plan.out_simq, c, False, drop)

    def _rescaled(self, node_plan: NodePlan, operands: Sequence[Tensor]) -> list[Tensor]:
        """The operands of a sum as integers of the common scale, to which narrow ones are requantized."""
        simqs = [node_plan.rescaling(slot) for slot in range(len(operands))]
        return [
            c if simq is None else self._quantized(simq, c, False, None).to(c.dtype)
            for c, simq in zip(operands, simqs, strict=True)
        ]

    def _quantized(
        self, simq: SimQ, x: Tensor, is_fused: bool, drop: Drop | None, factor: Tensor | None = None
    ) -> Tensor:
        source, requantize = simq.source, self.plan.hardware.requantize
        for step in simq.steps:
            target = step.target
            assert target is not None
            if factor is not None and step.target is simq.target:
                target = replace(target, scale=target.scale * factor)
            few = target.qmax - target.qmin < MOST_DROPPED
            x = fake_quantize_edge(
                x,
                source,
                target,
                requantize,
                _SLOPE,
                # the clipping at 0 is that of the fused clamp, which passes no gradient from below
                relu_fused=is_fused and target.zero_point.numel() == 1 and target.qmin == int(target.zero_point),
                unrounded=drop.like(x) if drop is not None and few else None,
            )
            source = target
        return x if factor is None else x * factor.to(x.dtype)

    def _requantizing(self, node: Node, node_plan: NodePlan, operands: Sequence[Any]) -> Tensor:
        """The integers of a node that requantizes its output itself, with the gradient of the real operator."""
        with torch.no_grad():
            # what is kept from rounding, or has a factor, stands for the nearest integer of its range here
            plain = [
                x if t is None else x.detach().round().clamp(*clip_range(t.spread_over(x.shape)))
                for x, t in zip(operands, node_plan.operands, strict=True)
            ]
            if node_plan.table is not None:
                exact = node_plan.look_up(plain[0])
            else:
                rule = self.plan.ops[node.op]
                exact = rule.compute_int_in_parts(node_plan.attrs, plain, node_plan.parts)
                exact = node_plan.apply_register(exact, node_plan.lost(plain))
                if node_plan.out_simq is not None:
                    exact = fake_quantize_edge(
                        exact, node_plan.register, node_plan.out, self.plan.hardware.requantize, _SLOPE
                    )
        if not torch.is_grad_enabled():
            return exact
        reals = [
            x if t is None else trained_to_real(x, t.spread_over(x.shape))
            for x, t in zip(operands, node_plan.operands, strict=True)
        ]
        near = fake_quantize_edge(
            compute_real(node, reals, self.plan.ops), None, node_plan.out, self.plan.hardware.requantize, _SLOPE
        )
        return straight_through(near, exact.to(near.dtype))


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
