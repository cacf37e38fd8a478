"""Emit: the call of every kind of kernel for a node, or why it cannot be made after all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.engine import native
from hago.engine.calls import ConvCall, ConvPoolCall, PoolCall, ReduceCall, RowsCall, TableCall
from hago.engine.chains import Chains
from hago.engine.choice import Choice, axis_of, is_flat
from hago.engine.kernels import Kernels
from hago.engine.moves import AS_IS, SLACK, Moved, landed_moves, period, stored_type
from hago.engine.onednn_call import onednn_call
from hago.engine.pack import LEAST_TILED, Packs
from hago.engine.products import MatmulCall, MultiplyCall, PairTableCall, Place, pair_table
from hago.engine.tail import Added, Stored, Tail, register_of, sum_of
from hago.engine.wants import Wants
from hago.graph import Node
from hago.numerics import clip_range
from hago.plan import NodePlan, Plan
from hago.realization import store
from hago.types import QParams


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel's call.

    Args:
        nodes: what it computes, in order.
        inputs, outputs: names of values.
    """

    nodes: tuple[str, ...]
    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]


class Owner(Protocol):
    """What emitting needs of the lowering."""

    plan: Plan
    wants: Wants
    chains: Chains
    packs: Packs
    kernels: Kernels


_NO_FORM: Final = "what follows has no form in the kernels"


# ---------------------------------------------------------------- kernels that sum
def _conv(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, g = owner.plan.nodes[node.name], choice.geometry
    x = made.operands[0]
    assert g is not None and x is not None
    name = owner.wants.names[node.edges[0]]
    if not owner.kernels.conv.exact:
        found = onednn_call(owner.wants, owner.packs, owner.kernels, node, g)
        return found if isinstance(found, str) else Call((node.name,), found.kernel, (name,), found.outputs, found.run)
    tail = owner.chains.after(node, g.out_channels)
    if tail is None:
        return _NO_FORM
    values, zero = stored_type(x), int(x.zero_point)
    assert values is not None
    words = values == native.TYPES["int16"]
    tiles = owner.kernels.tiles.exact and g.window >= LEAST_TILED and not words
    packed = owner.packs(made.consts[1], g, tiles, node.op == "matmul", words)
    offset = packed.offsets(made.consts.get(2), zero + 128 * (values == native.TYPES["int8"]), g.groups)
    zeros = torch.full((g.channels * (1 + words) + SLACK,), zero % 256, dtype=torch.uint8)
    template = native.conv_of(g, packed, values, offset, zeros)
    flat = is_flat(node)
    pooled = owner.chains.pooled(tail) if node.op == "conv2d" and not g.pointwise else None
    call = ConvCall(owner.kernels.calls, template, g, tail.build(), (packed.weight, offset, zeros), flat)
    kernel = "native conv on tiles" if packed.steps else "native conv of words" if words else "native conv"
    if pooled is None:
        return _with_tail(kernel, tail, name, call)
    end, after = pooled
    pool = PoolCall(owner.kernels.calls, *_window(owner.plan.nodes[end.name]), (0, 0), after.build())
    whole = replace(tail, nodes=[*tail.nodes, *after.nodes], stored=after.stored)
    return _with_tail(kernel, whole, name, ConvPoolCall(call, pool))


def _sum_pool(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, shape = owner.plan.nodes[node.name], node.shape or ()
    x = made.operands[0]
    tail = owner.chains.after(node, shape[1])
    code = None if x is None else stored_type(x)
    if tail is None or x is None or code is None:
        return _NO_FORM
    call = PoolCall(owner.kernels.calls, *_window(made), (code, int(x.zero_point)), tail.build())
    return _with_tail("native sum pool", tail, owner.wants.names[node.edges[0]], call)


def _reduce(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, tail = owner.plan.nodes[node.name], owner.chains.after(node, 1)
    if tail is None:
        return _NO_FORM
    axes, keepdim = tuple(made.attrs["axes"]), bool(made.attrs["keepdim"])
    call = ReduceCall(owner.kernels.calls, axes, keepdim, _place(made.operands[0]), tail.build())
    return _with_tail("native sum over axes", tail, owner.wants.names[node.edges[0]], call)


# ---------------------------------------------------------------- kernels that multiply two values
def _matmul(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, shape = owner.plan.nodes[node.name], node.shape or ()
    tail = owner.chains.after(node, 1 if made.register.scale.numel() == 1 else shape[-1])
    if tail is None:
        return _NO_FORM
    consts = _stored_const(made, 0), _stored_const(made, 1)
    offset = made.consts[2].flatten().to(torch.int32).contiguous() if 2 in made.consts else None
    places = _place(made.operands[0]), _place(made.operands[1])
    call = MatmulCall(owner.kernels.calls, tail.build(), places, consts, offset, node.op == "linear")
    return _of_two(owner, "native matmul", node, tail, call)


def _multiply(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, shape = owner.plan.nodes[node.name], node.shape or ()
    axis = axis_of(made.register.scale, len(shape))
    assert not isinstance(axis, str)
    channels = 1 if axis is None else shape[axis]
    tail = owner.chains.after(node, channels)
    if tail is None:
        return _NO_FORM
    consts, places = (_stored_const(made, 0), _stored_const(made, 1)), tuple(map(_place, made.operands))
    call = MultiplyCall(owner.kernels.calls, tail.build(), (places[0], places[1]), consts, channels, axis)
    return _of_two(owner, "native multiply", node, tail, call)


def _of_two(owner: Owner, kernel: str, node: Node, tail: Tail, run: MatmulCall | MultiplyCall) -> Call:
    edges = [e for slot, e in enumerate(node.edges[:2]) if run.consts[slot] is None]
    inputs = (*(owner.wants.names[e] for e in edges), *((tail.added.name,) if tail.added else ()))
    return Call(tuple(dict.fromkeys(tail.nodes)), kernel, inputs, tuple(s.name for s in tail.stored), run)


def _stored_const(made: NodePlan, slot: int) -> Tensor | None:
    qparams = made.operands[slot]
    assert qparams is not None
    return store(made.consts[slot], qparams) if slot in made.consts else None


def _place(qparams: QParams | None) -> Place:
    """Code and zero point of a value whose type the kernels know."""
    code = None if qparams is None else stored_type(qparams)
    assert qparams is not None and code is not None
    return code, int(qparams.zero_point)


# ---------------------------------------------------------------- passes
def _add(owner: Owner, node: Node, choice: Choice) -> Call | str:
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
    return _rows(owner, "native add", tail, first, axis, owner.wants.names[node.edges[0]])


def _spread_add(owner: Owner, node: Node, choice: Choice) -> Call | str:
    register = register_of(owner.plan.nodes[node.name])
    assert not isinstance(register, str)
    slot = _whole_slot(owner, node)
    tail = Tail(1, [node.name], added=_added(owner, node, slot, (AS_IS, AS_IS), register))
    return _sum_of_two(owner, node, slot, tail) if owner.chains.finish(tail, node) else _NO_FORM


def _landed_sum(owner: Owner, node: Node, choice: Choice) -> Call | str:
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
    made, const = owner.plan.nodes[node.name], _stored_const(owner.plan.nodes[node.name], 1 - slot)
    assert tail.added is not None
    call = RowsCall(owner.kernels.calls, tail.build(), _place(made.operands[slot]), None, period(1), const)
    inputs = (owner.wants.names[node.edges[slot]], *((tail.added.name,) if const is None else ()))
    return Call(tuple(dict.fromkeys(tail.nodes)), "native add", inputs, tuple(s.name for s in tail.stored), call)


def _clamp(owner: Owner, node: Node, choice: Choice) -> Call | str:
    made, shape = owner.plan.nodes[node.name], node.shape or ()
    form, x, axis = owner.plan.ops[node.op].integer, made.operands[0], axis_of(made.out.scale, len(shape))
    assert form is not None and form.limits is not None and x is not None
    if isinstance(axis, str):
        return axis
    tail = Tail(1 if axis is None else shape[axis], [node.name])
    tail.clamp(*form.limits(made.attrs))
    if not owner.chains.finish(tail, node):
        return _NO_FORM
    return _rows(owner, "native clamp", tail, x, axis, owner.wants.names[node.edges[0]])


def _rows(owner: Owner, kernel: str, tail: Tail, source: QParams, axis: int | None, name: str) -> Call:
    code = stored_type(source)
    assert code is not None
    source_type = (code, int(source.zero_point))
    call = RowsCall(owner.kernels.calls, tail.build(), source_type, axis, period(tail.channels))
    return _with_tail(kernel, tail, name, call)


def _with_tail(kernel: str, tail: Tail, name: str, run: Callable[[Sequence[Any]], Sequence[Any]]) -> Call:
    inputs = (name, *((tail.added.name,) if tail.added else ()))
    return Call(tuple(dict.fromkeys(tail.nodes)), kernel, inputs, tuple(s.name for s in tail.stored), run)


# ---------------------------------------------------------------- kernels that store one value
def _max_pool(owner: Owner, node: Node, choice: Choice) -> Call:
    made = owner.plan.nodes[node.name]
    code = stored_type(made.out)
    assert code is not None
    return _one(owner, node, "native max pool", PoolCall(owner.kernels.calls, *_window(made), (code, 0), None))


def _table(owner: Owner, node: Node, choice: Choice) -> Call:
    made = owner.plan.nodes[node.name]
    x = made.operands[0]
    assert made.table is not None and x is not None
    entries = torch.zeros(256, dtype=made.out.dtype.torch)
    entries[torch.arange(x.qmin, x.qmax + 1) % 256] = store(made.table, made.out)
    return _one(owner, node, "native table", TableCall(owner.kernels.calls, entries, made.out.dtype.torch))


def _pair_table(owner: Owner, node: Node, choice: Choice) -> Call:
    made = owner.plan.nodes[node.name]
    consts = _stored_const(made, 0), _stored_const(made, 1)
    # a digest leaves what comes in to the nodes before
    key = (node.op, made.digest, *(q and q.key for q in made.operands))
    entries = owner.packs.tables.made(key, lambda: pair_table(owner.plan, node))
    inputs = tuple(owner.wants.names[e] for e in node.edges if e.slot not in made.consts)
    call = PairTableCall(owner.kernels.calls, entries, consts)
    return Call((node.name,), "native pair table", inputs, (node.name,), call)


def _move(owner: Owner, node: Node, choice: Choice) -> Call:
    made, rule = owner.plan.nodes[node.name], owner.plan.ops[node.op]

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        return (rule.compute(made.attrs, *values),)

    return _one(owner, node, "torch on bytes", run)


def _pad(owner: Owner, node: Node, choice: Choice) -> Call:
    made = owner.plan.nodes[node.name]
    sizes, mode = made.attrs["pad"], made.attrs["mode"]
    value = int(made.attrs["value"] or 0) + int(made.out.zero_point) if mode == "constant" else None

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        return (F.pad(values[0], sizes, mode, value),)

    return _one(owner, node, "torch on bytes", run)


def _one(owner: Owner, node: Node, kernel: str, run: Callable[[Sequence[Any]], Sequence[Any]]) -> Call:
    return Call((node.name,), kernel, tuple(owner.wants.names[e] for e in node.edges), (node.name,), run)


def _window(made: NodePlan) -> tuple[tuple[int, ...], Callable[[Sequence[int]], tuple[int, ...]]]:
    """(kernel, stride, padding, dilation, two each; the size of the result from that of the image)."""
    a = made.attrs
    if "kernel_size" in a:
        kernel, stride, padding = a["kernel_size"], a["stride"], a["padding"]
        dilation = a.get("dilation", [1] * len(kernel))
    else:
        kernel = [i // o for i, o in zip(a["input_size"], a["output_size"], strict=True)]
        stride, padding, dilation = kernel, [0] * len(kernel), [1] * len(kernel)
    ones = [1] * (2 - len(kernel))
    pairs = [*ones, *kernel, *ones, *stride, *[0] * len(ones), *padding, *ones, *dilation]

    def size(image: Sequence[int]) -> tuple[int, ...]:
        parts = zip(image, kernel, stride, padding, dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in parts)

    return tuple(pairs), size


Emitter = Callable[[Owner, Node, Choice], "Call | str"]
EMIT: Final[Mapping[str, Emitter]] = {
    "conv": _conv,
    "matmul": _matmul,
    "multiply": _multiply,
    "add": _add,
    "spread_add": _spread_add,
    "landed_sum": _landed_sum,
    "clamp": _clamp,
    "max_pool": _max_pool,
    "sum_pool": _sum_pool,
    "reduce": _reduce,
    "pad": _pad,
    "table": _table,
    "pair_table": _pair_table,
    "move": _move,
}
