"""Chains: what follows a sum in the same kernel.

A residual add or a clamp that alone reads a sum is done on the way, and the value is stored in every form that
readers want, as far as one kernel can; the rest are passes of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hago.arithmetic.types import SimQ
from hago.graph.graph import Node
from hago.plan.plan import NodePlan
from hago.runtime.native.choice import axis_of
from hago.runtime.native.epilogue import MOST_OUTPUTS, Added, Stored, Tail, raw, register_of, sum_of
from hago.runtime.native.layouts import Wants
from hago.runtime.native.requantize import AS_IS, Moved, largest_of, stored_type, to_real
from hago.runtime.native.weights import Packs


class Chains:
    """Builds the tails of one Plan's kernels.

    Args:
        made: the values that exist already; grows while steps are made.
        packs: remembers requantizations, too.
    """

    def __init__(self, wants: Wants, made: Collection[str], packs: Packs) -> None:
        self.packs = packs
        self.wants, self.plan, self.graph, self.made = wants, wants.plan, wants.graph, made
        self.how = self.plan.hardware.requantize

    def after(self, node: Node, channels: int) -> Tail | None:
        """The tail of a kernel that sums; None where it cannot even store the node's own value.

        Args:
            channels: along which the node's scale may vary.
        """
        register = register_of(self.plan.nodes[node.name])
        assert not isinstance(register, str)
        tail = Tail(channels, [node.name], register)
        end = node
        if self.plan.nodes[node.name].out_simq is None:
            end = self._absorb_add(tail, node)
        return tail if self.finish(tail, end) else None

    def pooled(self, tail: Tail) -> tuple[Node, Tail] | None:
        """The max pooling of images that alone reads the one value that a tail stores, and its own tail."""
        end = self.wants.sole(tail.nodes[-1])
        if end is None or end.op != "max_pool2d" or self.wants.choices[end.name].kind != "max_pool":
            return None
        alone = len(tail.stored) == 1 and tail.stored[0].name == self.wants.names[end.edges[0]]
        if not alone or tail.stored[0].qparams is None:
            return None
        later = tail.limits if tail.stored[0].moved is AS_IS else None  # a clamp of maxima is the maximum of clamps
        after = Tail(tail.channels, [end.name], limits=later)
        if not self.finish(after, end):
            return None
        tail.limits = None if later is not None else tail.limits
        return end, after

    def finish(self, tail: Tail, end: Node) -> bool:
        """Requantization at the output, a clamp, and what is stored; whether anything can be."""
        made = self.plan.nodes[end.name]
        if made.out_simq is not None:
            moved = self._move(made.out_simq, tail.channels, largest_sum(made))
            if moved is None or stored_type(made.out) is None:
                return False
            tail.stored = [Stored(end.name, moved, made.out)]
        end = self._absorb_clamp(tail, end)
        if tail.stored:  # requantized at the output: further forms are passes of their own
            tail.stored = [replace(tail.stored[0], name=end.name)]
        else:
            self._store(tail, end)
        return bool(tail.stored)

    def added(self, tail: Tail, node: Node, slot: int) -> Added | None:
        """The operands of an add, the one in `slot` being at hand; None where a pass cannot requantize one."""
        plan = self.plan.nodes[node.name]
        moves: list[Moved] = []
        register = register_of(plan)
        if isinstance(register, str):
            return None
        for s in (slot, 1 - slot):
            simq = plan.simqs[s]
            integer = simq is not None and simq.source is not None
            source = self.plan.nodes.get(self.wants.wiring.root(node.inputs[s]))
            largest = largest_value(source) if source is not None else 0.0
            found = self.packs.move(simq if integer else None, self.how, tail.channels, largest)
            if isinstance(found, str):
                return None
            moves.append(found)
        simq, target = plan.simqs[1 - slot], plan.operands[1 - slot]
        qparams = target if simq is None or simq.source is None else simq.source
        if qparams is None or stored_type(qparams) is None:
            return None
        return Added(
            self.wants.names[node.edges[1 - slot]], qparams, moves[0], moves[1], sum_of(node.op, slot), register
        )

    def _absorb_add(self, tail: Tail, node: Node) -> Node:
        """The add that alone reads the node, where its other operand is there already; else the node."""
        end = self.wants.sole(node.name)
        if end is None or self.wants.choices[end.name].kind != "add" or end.shape != node.shape:
            return node
        slot = 0 if self.wants.wiring.root(end.inputs[0]) == node.name else 1
        if self.wants.names[end.edges[1 - slot]] not in self.made or not self._along_one_axis(node, end):
            return node
        added, out = self.added(tail, end, slot), self.plan.nodes[end.name]
        if added is None:
            return node
        if out.out_simq is not None and self._move(out.out_simq, tail.channels, largest_sum(out)) is None:
            return node
        tail.added = added
        tail.nodes.append(end.name)
        return end

    def _along_one_axis(self, node: Node, end: Node) -> bool:
        """Whether what an add reads varies along the channels of the node or not at all: lengths alone may agree."""
        rank, sources = len(node.shape or ()), [s.source for s in self.plan.nodes[end.name].simqs if s is not None]
        axes = {axis_of(q.scale, rank) for q in sources if q is not None}
        return axes <= {None, axis_of(self.plan.nodes[node.name].register.scale, rank)}

    def _absorb_clamp(self, tail: Tail, node: Node) -> Node:
        """The clamp that alone reads the node, if its limits can be had; else the node."""
        end = self.wants.sole(node.name)
        if end is None or self.wants.choices[end.name].kind != "clamp" or self.plan.edges[end.edges[0]] is not None:
            return node
        form, made = self.plan.ops[end.op].integer, self.plan.nodes[end.name]
        assert form is not None and form.limits is not None
        limits = form.limits(made.attrs)
        numbers = all(v is None or isinstance(v, int) for v in limits)
        fits = numbers or all(v is None or isinstance(v, int) or v.numel() in (1, tail.channels) for v in limits)
        if made.out_simq is not None or stored_type(made.out) is None or not fits:
            return node
        if not tail.stored:
            tail.clamp(*limits)
        elif numbers and int(made.out.zero_point) == int(self.plan.nodes[node.name].out.zero_point):
            tail.clamp_stored(*limits)
        else:
            return node
        tail.nodes.append(end.name)
        return end

    def _store(self, tail: Tail, end: Node) -> None:
        """As many of the forms that readers want as the kernel can store."""
        made = self.plan.nodes[end.name]
        wanted = self.wants.forms(end.name) or {end.name: None}
        each = [self._stored(name, simq, made, tail.channels) for name, simq in wanted.items()]
        found = [s for s in each if s is not None]
        if (len(found) < len(wanted) or len(found) > MOST_OUTPUTS) and end.name not in wanted:
            plain = raw(end.name, made.out)  # the forms left over are made of the value itself
            found = [] if plain is None else [plain, *found]
        if end.name in wanted and all(s.name != end.name for s in found):
            found = []
        found.sort(key=lambda s: s.name != end.name)
        tail.stored = found[:MOST_OUTPUTS]

    def _stored(self, name: str, simq: SimQ | None, made: NodePlan, channels: int) -> Stored | None:
        if simq is None:
            return raw(name, made.out)
        if simq.target is None:
            assert simq.source is not None
            real = to_real(simq.source, channels)
            return None if isinstance(real, str) else Stored(name, real, None)
        moved = self._move(simq, channels, largest_value(made))
        return None if moved is None else Stored(name, moved, simq.target)

    def _move(self, simq: SimQ, channels: int, largest: float) -> Moved | None:
        assert simq.source is not None and simq.target is not None
        if stored_type(simq.target) is None:
            return None
        found = self.packs.move(simq, self.how, channels, largest)
        return None if isinstance(found, str) else found


def largest_value(made: NodePlan) -> float:
    """The largest |c| of a node's own value."""
    return largest_sum(made) if made.out_simq is None and made.table is None else largest_of(made.out)


def largest_sum(made: NodePlan) -> float:
    """The largest |c| of a node before its output is requantized."""
    whole = largest_of(made.out if made.out_simq is None else made.register)
    return min(whole, made.bound) if made.proved and not made.within_hull else whole
