"""Calls of the kernels that sum products, or values, in a register."""

from __future__ import annotations

from dataclasses import replace

import torch

from hago.graph.graph import Node
from hago.runtime.native import library as native
from hago.runtime.native.calls import ConvCall, ConvPoolCall, MatmulCall, MultiplyCall, PoolCall, ReduceCall
from hago.runtime.native.choice import Choice, axis_of, is_flat
from hago.runtime.native.emitting import NO_FORM, Call, Owner, onednn_call, place, stored_const, window, with_tail
from hago.runtime.native.epilogue import Tail
from hago.runtime.native.requantize import SLACK, stored_type
from hago.runtime.native.weights import tiles_pay


def conv(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, g = owner.plan.nodes[node.name], choice.geometry
    x = made.operands[0]
    assert g is not None and x is not None
    name = owner.wants.names[node.edges[0]]
    if not owner.kernels.conv.exact:
        found = onednn_call(owner.wants, owner.packs, owner.kernels, node, g)
        return found if isinstance(found, str) else Call((node.name,), found.kernel, (name,), found.outputs, found.run)
    tail = owner.chains.after(node, g.out_channels)
    if tail is None:
        return NO_FORM
    values, zero = stored_type(x), int(x.zero_point)
    assert values is not None
    words = values == native.TYPES["int16"]
    tiles = owner.kernels.tiles.exact and not words and tiles_pay(g)
    packed = owner.packs(made.consts[1], g, tiles, node.op == "matmul", words)
    offset = packed.offsets(made.consts.get(2), zero + 128 * (values == native.TYPES["int8"]), g.groups)
    zeros = torch.full((g.channels * (1 + words) + SLACK,), zero % 256, dtype=torch.uint8)
    template = native.conv_of(g, packed, values, offset, zeros)
    flat = is_flat(node)
    pooled = owner.chains.pooled(tail) if node.op == "conv2d" and not g.pointwise else None
    call = ConvCall(owner.kernels.calls, template, g, tail.build(), (packed.weight, offset, zeros), flat)
    kernel = "native conv on tiles" if packed.steps else "native conv of words" if words else "native conv"
    if pooled is None:
        return with_tail(kernel, tail, name, call)
    end, after = pooled
    pool = PoolCall(owner.kernels.calls, *window(owner.plan.nodes[end.name]), (0, 0), after.build())
    whole = replace(tail, nodes=[*tail.nodes, *after.nodes], stored=after.stored)
    return with_tail(kernel, whole, name, ConvPoolCall(call, pool))


def sum_pool(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, shape = owner.plan.nodes[node.name], node.shape or ()
    x = made.operands[0]
    tail = owner.chains.after(node, shape[1])
    code = None if x is None else stored_type(x)
    if tail is None or x is None or code is None:
        return NO_FORM
    call = PoolCall(owner.kernels.calls, *window(made), (code, int(x.zero_point)), tail.build())
    return with_tail("native sum pool", tail, owner.wants.names[node.edges[0]], call)


def reduce(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, tail = owner.plan.nodes[node.name], owner.chains.after(node, 1)
    if tail is None:
        return NO_FORM
    axes, keepdim = tuple(made.attrs["axes"]), bool(made.attrs["keepdim"])
    call = ReduceCall(owner.kernels.calls, axes, keepdim, place(made.operands[0]), tail.build())
    return with_tail("native sum over axes", tail, owner.wants.names[node.edges[0]], call)


def matmul(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, shape = owner.plan.nodes[node.name], node.shape or ()
    tail = owner.chains.after(node, 1 if made.register.scale.numel() == 1 else shape[-1])
    if tail is None:
        return NO_FORM
    consts = stored_const(made, 0), stored_const(made, 1)
    offset = made.consts[2].flatten().to(torch.int32).contiguous() if 2 in made.consts else None
    places = place(made.operands[0]), place(made.operands[1])
    call = MatmulCall(owner.kernels.calls, tail.build(), places, consts, offset, node.op == "linear")
    return _of_two(owner, "native matmul", node, tail, call)


def multiply(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, shape = owner.plan.nodes[node.name], node.shape or ()
    axis = axis_of(made.register.scale, len(shape))
    assert not isinstance(axis, str)
    channels = 1 if axis is None else shape[axis]
    tail = owner.chains.after(node, channels)
    if tail is None:
        return NO_FORM
    consts, places = (stored_const(made, 0), stored_const(made, 1)), tuple(map(place, made.operands))
    call = MultiplyCall(owner.kernels.calls, tail.build(), (places[0], places[1]), consts, channels, axis)
    return _of_two(owner, "native multiply", node, tail, call)


def _of_two(owner: Owner, kernel: str, node: Node, tail: Tail, run: MatmulCall | MultiplyCall) -> Call:
    edges = [e for slot, e in enumerate(node.edges[:2]) if run.consts[slot] is None]
    inputs = (*(owner.wants.names[e] for e in edges), *((tail.added.name,) if tail.added else ()))
    return Call(tuple(dict.fromkeys(tail.nodes)), kernel, inputs, tuple(s.name for s in tail.stored), run)
