"""Calls of the kernels that make an entry of an entry, or of a few, or move entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.graph.graph import Node
from hago.runtime.native.calls import PairTableCall, PoolCall, TableCall, entries_of_pairs
from hago.runtime.native.choice import Choice, axis_of
from hago.runtime.native.emitting import NO_FORM, Call, Owner, one, rows, stored_const, window
from hago.runtime.native.epilogue import Tail
from hago.runtime.native.requantize import stored_type
from hago.runtime.reference import store


def max_pool(owner: Owner, node: Node, choice: Choice) -> Call:
    made = owner.plan.nodes[node.name]
    code = stored_type(made.out)
    assert code is not None
    return one(owner, node, "native max pool", PoolCall(owner.kernels.calls, *window(made), (code, 0), None))


def clamp(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, shape = owner.plan.nodes[node.name], node.shape or ()
    form, x, axis = owner.plan.ops[node.op].integer, made.operands[0], axis_of(made.out.scale, len(shape))
    assert form is not None and form.limits is not None and x is not None
    if isinstance(axis, str):
        return axis
    tail = Tail(1 if axis is None else shape[axis], [node.name])
    tail.clamp(*form.limits(made.attrs))
    if not owner.chains.finish(tail, node):
        return NO_FORM
    return rows(owner, "native clamp", tail, x, axis, owner.wants.names[node.edges[0]])


def table(owner: Owner, node: Node, choice: Choice) -> Call:
    made = owner.plan.nodes[node.name]
    x = made.operands[0]
    assert made.table is not None and x is not None
    entries = torch.zeros(256, dtype=made.out.dtype.torch)
    entries[torch.arange(x.qmin, x.qmax + 1) % 256] = store(made.table, made.out)
    return one(owner, node, "native table", TableCall(owner.kernels.calls, entries, made.out.dtype.torch))


def pair_table(owner: Owner, node: Node, choice: Choice) -> Call:
    made = owner.plan.nodes[node.name]
    consts = stored_const(made, 0), stored_const(made, 1)
    # a digest leaves what comes in to the nodes before
    key = (node.op, made.digest, *(q and q.key for q in made.operands))
    entries = owner.packs.tables.made(key, lambda: entries_of_pairs(owner.plan, node))
    inputs = tuple(owner.wants.names[e] for e in node.edges if e.slot not in made.consts)
    call = PairTableCall(owner.kernels.calls, entries, consts)
    return Call((node.name,), "native pair table", inputs, (node.name,), call)


def move(owner: Owner, node: Node, choice: Choice) -> Call:
    made, rule = owner.plan.nodes[node.name], owner.plan.ops[node.op]

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        return (rule.compute(made.attrs, *values),)

    return one(owner, node, "torch on bytes", run)


def pad(owner: Owner, node: Node, choice: Choice) -> Call:
    made = owner.plan.nodes[node.name]
    sizes, mode = made.attrs["pad"], made.attrs["mode"]
    value = int(made.attrs["value"] or 0) + int(made.out.zero_point) if mode == "constant" else None

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        return (F.pad(values[0], sizes, mode, value),)

    return one(owner, node, "torch on bytes", run)
