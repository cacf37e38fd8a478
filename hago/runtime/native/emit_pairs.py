"""Calls of the kernel that adds two values."""

from __future__ import annotations

from torch import Tensor

from hago.arithmetic.numerics import clip_range
from hago.graph.graph import Node
from hago.runtime.native import library as native
from hago.runtime.native.calls import RowsCall
from hago.runtime.native.choice import Choice, axis_of
from hago.runtime.native.emitting import NO_FORM, Call, Owner, place, rows, stored_const
from hago.runtime.native.epilogue import Added, Stored, Tail, register_of, sum_of
from hago.runtime.native.requantize import AS_IS, Moved, landed_moves, period


def add(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, shape = owner.plan.nodes[node.name], node.shape or ()
    scales = [s.source.scale for s in made.simqs if s is not None and s.source is not None]
    axes = {axis_of(s, len(shape)) for s in scales} - {None}
    axis = next(iter(axes), None)
    if len(axes) > 1 or isinstance(axis, str):
        return "scales that vary along two axes"
    tail = Tail(1 if axis is None else shape[axis], [node.name])
    tail.added = owner.chains.added(tail, node, 0)
    if tail.added is None or not owner.chains.finish(tail, node):
        return "an operand that the pass cannot requantize"
    first = made.operands[0] if (s := made.simqs[0]) is None or s.source is None else s.source
    assert first is not None
    return rows(owner, "native add", tail, first, axis, owner.wants.names[node.edges[0]])


def spread_add(owner: Owner, node: Node, choice: Choice) -> Call | str:
    register = register_of(owner.plan.nodes[node.name])
    assert not isinstance(register, str)
    slot = _whole_slot(owner, node)
    tail = Tail(1, [node.name], added=_added(owner, node, slot, (AS_IS, AS_IS), register))
    return _sum_of_two(owner, node, slot, tail) if owner.chains.finish(tail, node) else NO_FORM


def landed_sum(owner: Owner, node: Node, choice: Choice) -> Call | str:
    """TFLite's: both operands go to one scale, each with a multiplier, and the sum to the output's with a third."""
    made = owner.plan.nodes[node.name]
    low, high = clip_range(made.out)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return "zero points per channel"
    moves = landed_moves(made.attrs, (low, high))
    if isinstance(moves, str):
        return moves
    out, *into = moves
    slot = _whole_slot(owner, node)
    added = _added(owner, node, slot, (into[slot], into[1 - slot]), native.Register())
    return _sum_of_two(owner, node, slot, Tail(1, [node.name], added=added, stored=[Stored(node.name, out, made.out)]))


def _whole_slot(owner: Owner, node: Node) -> int:
    """Of the operands of a sum, one that is no constant and has the shape of the result."""
    made, shapes = owner.plan.nodes[node.name], [owner.plan.graph[n].shape for n in node.inputs]
    return next(s for s in (0, 1) if s not in made.consts and shapes[s] == node.shape)


def _added(owner: Owner, node: Node, slot: int, moves: tuple[Moved, Moved], register: native.Register) -> Added:
    """The operand beside that in `slot`; `moves` of both, that one's first."""
    other = owner.plan.nodes[node.name].operands[1 - slot]
    assert other is not None
    return Added(owner.wants.names[node.edges[1 - slot]], other, *moves, sum_of(node.op, slot), register)


def _sum_of_two(owner: Owner, node: Node, slot: int, tail: Tail) -> Call:
    """A pass over the operand in `slot` and the one beside it, whatever shape that has."""
    made, const = owner.plan.nodes[node.name], stored_const(owner.plan.nodes[node.name], 1 - slot)
    assert tail.added is not None
    call = RowsCall(owner.kernels.calls, tail.build(), place(made.operands[slot]), None, period(1), const)
    inputs = (owner.wants.names[node.edges[slot]], *((tail.added.name,) if const is None else ()))
    return Call(tuple(dict.fromkeys(tail.nodes)), "native add", inputs, tuple(s.name for s in tail.stored), call)
