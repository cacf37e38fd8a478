"""Kernels: for every op, the kernels that can compute it, when each one can, and how it is called.

A `Kernel` is one record: `matches` compares what the kernel computes with what the Plan prescribes for a node and says
why the kernel cannot compute it; `emit` makes the call. `KERNELS`, at the end, lists the kernels of every op in the
order in which `select_kernel` tries them. To add a kernel, write its `matches` and its `emit` and add it to that table.

Selection reads the Plan alone. A kernel is selected only if it computes the Plan's integers exactly; the reference
arithmetic always does, so every node has a kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.numerics import EXACT_FLOAT32, clip_range, dequantize, ratio
from hago.arithmetic.types import QParams, SimQ
from hago.graph import CONST, Node
from hago.ops import OPS, pool_window
from hago.plan import NodePlan, Plan
from hago.runtime.native import library as native
from hago.runtime.native.calls import (
    AttentionCall,
    ConvPoolCall,
    MatmulCall,
    MultiplyCall,
    NormCall,
    PairTableCall,
    PoolCall,
    ReduceCall,
    RowsCall,
    Softmax,
    TableCall,
    conv_call,
)
from hago.runtime.native.epilogue import (
    AddedOperand,
    Epilogue,
    FusedEpilogues,
    StoredOutput,
    addition_sign,
    conversion_of_read,
    overflow_rule,
    read_qparams,
)
from hago.runtime.native.layouts import JOINERS, MOVERS, Converts, Fusion, RequestedLayouts
from hago.runtime.native.onednn import OnednnConv, prepack, requantizes_exactly, run_on_any_rank
from hago.runtime.native.requantize import (
    FloatQuantization,
    Requantization,
    channel_axis,
    largest_of,
    period,
    quantization_of,
    requantization_of,
    storage_format,
    stored_type,
    tflite_sum_requantizations,
)
from hago.runtime.native.self_test import ExactKernels
from hago.runtime.native.timing import direct_products
from hago.runtime.native.weights import Geometry, KernelConstantCache, conv_geometry, tiles_pay
from hago.runtime.reference import compute_float, compute_integer, move_stored, store

Run = Callable[[Sequence[Any]], Sequence[Any]]


# ---------------------------------------------------------------- records
@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel. Made by `Kernel.emit`; `Lowering` turns it into a `Step`.

    Args:
        nodes: the nodes that it computes, in order.
        kernel: its name in reports and in the digest of the step.
        inputs, outputs: names of the values that it reads and makes.
        run: makes the outputs from the inputs.
    """

    nodes: tuple[str, ...]
    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Run


@dataclass(frozen=True, slots=True)
class Match:
    """A kernel can compute a node, and `why` says how."""

    why: str


class LoweringState(Protocol):
    """The parts of a `Lowering` that kernels read when they emit their calls."""

    plan: Plan
    layouts: RequestedLayouts
    epilogues: FusedEpilogues
    constant_cache: KernelConstantCache
    kernels: ExactKernels


def _has_passes(kernels: ExactKernels, node_plan: NodePlan) -> bool:
    return kernels.calls is not None


def _has_products(kernels: ExactKernels, node_plan: NodePlan) -> bool:
    return kernels.calls is not None and kernels.products.exact


def _in_torch(kernels: ExactKernels, node_plan: NodePlan) -> bool:
    return True


def _always(plan: Plan, node: Node) -> bool:
    return True


def _never(plan: Plan, node: Node) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute a node. Kernels are constants of this module; `KERNELS` lists them by op.

    Args:
        name: the name of the kernel; its calls may have more precise names.
        matches: called by `select_kernel` with a Plan, a node and its NodePlan. Returns a `Match`, or the reason why
            the kernel cannot compute what the Plan prescribes. An empty reason keeps that of the kernel tried before.
        emit: called by `Lowering` once for every node that runs on this kernel. Returns the call, or the reason why
            there is none, in which case the node runs on the reference arithmetic.
        present: whether this process has the native kernel that the node needs.
        any_form: whether it can compute ops in a form that requantizes its output itself, or that takes attributes
            in integers.
        converts: which conversions of its operands it makes itself. Steps before it make the others.
        reads_real: whether it reads the real values of integers.
        fuses_as: the part of an epilogue in which the kernel of a sum can compute the node.
        by_sample: whether it computes every sample of a batch independently of the others, for a node whose first
            axis is the batch.
    """

    name: str
    matches: Callable[[Plan, Node, NodePlan], Match | str]
    emit: Callable[[LoweringState, Node], Call | str]
    present: Callable[[ExactKernels, NodePlan], bool]
    any_form: bool = False
    converts: Converts = "nothing"
    reads_real: bool = False
    fuses_as: Fusion | None = None
    by_sample: Callable[[Plan, Node], bool] = _always


@dataclass(frozen=True, slots=True)
class SelectedKernel:
    """The kernel of a node, and why it was selected."""

    kernel: Kernel
    why: str


_NO_FORM: Final = "what follows has no form in the kernels"


# ---------------------------------------------------------------- calls
def _stored_const(node_plan: NodePlan, slot: int) -> Tensor | None:
    """The constant operand of a slot in its storage dtype; None if the operand is not a constant."""
    qparams = node_plan.operands[slot]
    assert qparams is not None
    return store(node_plan.consts[slot], qparams) if slot in node_plan.consts else None


def _call_with_epilogue(kernel: str, epilogue: Epilogue, names: Sequence[str], run: Run) -> Call:
    """The call of a kernel that reads the values `names`, then the one that its epilogue adds, and stores the outputs
    of its epilogue."""
    added = [] if epilogue.added is None else [epilogue.added.name]
    return Call(tuple(epilogue.nodes), kernel, (*names, *added), tuple(s.name for s in epilogue.stored), run)


def _call_of_rows(
    state: LoweringState, kernel: str, epilogue: Epilogue, source: QParams, axis: int | None, name: str
) -> Call:
    """The call of a pass that applies an epilogue to the stored value `name`."""
    call = RowsCall(state.kernels.calls, epilogue.build(), storage_format(source), axis, period(epilogue.channels))
    return _call_with_epilogue(kernel, epilogue, [name], call)


def _call_of_node(state: LoweringState, node: Node, kernel: str, run: Run) -> Call:
    """The call of a kernel that reads all inputs of a node and stores the node's own value."""
    return Call((node.name,), kernel, tuple(state.layouts.names[e] for e in node.edges), (node.name,), run)


def _is_flat(node: Node) -> bool:
    """Whether the channels of a sum of products are its last axis, so that every row is a pixel."""
    return node.op in ("linear", "matmul") or len(node.shape or ()) == 2


def _window(node_plan: NodePlan) -> tuple[tuple[int, ...], Callable[[Sequence[int]], tuple[int, ...]]]:
    """The kernel, stride, padding and dilation of a pooling, two of each, and a function that gives the size of its
    output from that of its input."""
    a = pool_window(node_plan.attrs)
    kernel, stride, padding = a["kernel_size"], a["stride"], a["padding"]
    dilation = a.get("dilation", [1] * len(kernel))
    ones = [1] * (2 - len(kernel))
    pairs = [*ones, *kernel, *ones, *stride, *[0] * len(ones), *padding, *ones, *dilation]

    def size(image: Sequence[int]) -> tuple[int, ...]:
        parts = zip(image, kernel, stride, padding, dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in parts)

    return tuple(pairs), size


# ---------------------------------------------------------------- convolutions and products by constant matrices
def _reads_int16(node_plan: NodePlan) -> bool:
    return node_plan.operands[0] is not None and stored_type(node_plan.operands[0]) == 2


def _has_conv(kernels: ExactKernels, node_plan: NodePlan) -> bool:
    if _reads_int16(node_plan):
        return kernels.conv.exact and kernels.words.exact
    return kernels.conv.exact or kernels.onednn.exact


def geometry_of(node: Node, node_plan: NodePlan) -> Geometry | str:
    """The convolution that a convolution, a product by a constant matrix or an affine transform is, or why it is
    none."""
    if node.op == "matmul" and (1 not in node_plan.consts or node_plan.consts[1].ndim != 2):
        return "no operand is a constant matrix on the right"
    if node.op == "affine" and (1 not in node_plan.consts or not 2 <= len(node.shape or ()) <= 4):
        return "a weight that is no constant, or more than two axes after the channels"
    if 1 not in node_plan.consts:
        return "a weight that is no constant"
    weight = node_plan.consts[1]
    if node.op == "affine":
        channels = out = groups = weight.numel()
    elif node.op in ("linear", "matmul"):
        sizes = [int(n) for n in weight.shape]
        out, channels = sizes if node.op == "linear" else sizes[::-1]
        groups = 1
    else:
        found = conv_geometry(node_plan.attrs, weight)
        if isinstance(found, str) or node.op != "conv2d" or node.shape is None:
            return found
        return replace(found, sample=(node.shape[-2], node.shape[-1]))
    return Geometry(channels, out, groups, (1, 1), (1, 1), (0, 0), (1, 1))


def _match_conv(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    geometry = geometry_of(node, node_plan)
    if isinstance(geometry, str):
        return geometry
    x, words = node_plan.operands[0], _reads_int16(node_plan)
    if x is None or stored_type(x) not in (0, 1, 2):
        return f"activations of {x and x.dtype}"
    if words and int(x.zero_point):
        return "activations of 16 bits with a zero point"
    if node_plan.consts[1].dtype not in ((torch.int8, torch.int16) if words else (torch.int8,)):
        return f"weights that int{16 if words else 8} does not hold, centered"
    if 2 in node_plan.consts and int(node_plan.consts[2].abs().max()) >= 2**31:
        return "a bias beyond int32"
    if len(node.inputs) > 2 and 2 not in node_plan.consts:
        return "a bias that is no constant"
    overflow = overflow_rule(node_plan)
    return overflow if isinstance(overflow, str) else Match(f"{'s16 x s16' if words else 'u8 x s8'} products in int32")


def _emit_conv(state: LoweringState, node: Node) -> Call | str:
    node_plan = state.plan.nodes[node.name]
    g = geometry_of(node, node_plan)
    assert not isinstance(g, str)
    name = state.layouts.names[node.edges[0]]
    if not state.kernels.conv.exact:
        return _emit_onednn(state, node, g)
    epilogue = state.epilogues.after(node, g.out_channels)
    if epilogue is None:
        return _NO_FORM
    calls, words = state.kernels.calls, _reads_int16(node_plan)
    most = None if words else _largest_byte(node_plan.operands[0])
    tiles = state.kernels.tiles.exact and tiles_pay(g)
    packed = state.constant_cache.packed(
        calls, node_plan.consts[1], g, most, tiles=tiles, transposed=node.op == "matmul", direct=direct_products
    )
    pooled = state.epilogues.pooled(epilogue) if node.op == "conv2d" and not g.pointwise else None
    if pooled is not None:
        end, epilogue, after = pooled
    bias, built = node_plan.consts.get(2), epilogue.build()
    source = storage_format(node_plan.operands[0])
    call = conv_call(calls, g, packed, source, built, bias, _is_flat(node))
    kernel = f"native conv{' of words' if words else packed.way}"
    if pooled is None:
        return _call_with_epilogue(kernel, epilogue, [name], call)
    run = ConvPoolCall(call, *_window(state.plan.nodes[end.name]), after.build())
    fused = replace(epilogue, nodes=[*epilogue.nodes, *after.nodes], stored=after.stored)
    return _call_with_epilogue(kernel, fused, [name], run)


def _largest_byte(x: QParams | None) -> int:
    """The largest byte of an operand or of its padding, as it is read: with 128 added to int8."""
    assert x is not None
    return max(int(x.qmax), int(x.zero_point)) + 128 * (x.dtype.torch == torch.int8)


def _emit_onednn(state: LoweringState, node: Node, g: Geometry) -> Call | str:
    """The call of oneDNN's convolution.

    oneDNN requantizes as the Plan does if every ratio of scales is a power of two, not finer than `FINEST`, rounding
    is half to even, and sums stay below 2**24. Otherwise it stores the sums, and a pass requantizes them.
    """
    node_plan, how = state.plan.nodes[node.name], state.plan.hardware.requantize
    x, inputs = node_plan.operands[0], (state.layouts.names[node.edges[0]],)
    assert x is not None
    if not node_plan.proved:
        return "sums that may leave their register"
    if node_plan.bound >= EXACT_FLOAT32:
        return "sums that float32 does not hold, which is how oneDNN gives them"
    zero, signed = int(x.zero_point), x.dtype.torch == torch.int8
    zero += 128 * signed

    def packed(weight: Tensor) -> Tensor:
        rows = weight.t() if node.op == "matmul" else weight
        return prepack(rows.reshape(g.out_channels, -1, *g.kernel).contiguous(), g, zero)

    weight = state.constant_cache.derive(node_plan.consts[1], (g, node.op, zero), packed)
    simq, name = _only_conversion(state.layouts, node, node_plan)
    target = None if simq is None else simq.target
    if state.kernels.fused.exact and simq is not None and target is not None and requantizes_exactly(simq, how):
        scales = ratio(node_plan.register, target).to(torch.float32).flatten().expand(g.out_channels).contiguous()
        bias = _onednn_bias(node_plan, scales)
        conv = OnednnConv(weight, g, zero, scales, bias, int(target.zero_point), target.dtype.torch)
        clip = None if target.qmax - target.qmin == 255 else (target.qmin, target.qmax)
        return Call(
            (node.name,),
            "oneDNN, requantized",
            inputs,
            (name,),
            run_on_any_rank(conv, _is_flat(node), signed, clip, None),
        )
    scales = torch.ones(g.out_channels)
    conv = OnednnConv(weight, g, zero, scales, _onednn_bias(node_plan, scales), 0, torch.float32)

    def stored(sums: Tensor) -> Tensor:
        integers = sums.to(node_plan.register.dtype.torch)
        return integers if node_plan.out_simq is None else move_stored(integers, node_plan.out_simq, how)

    run = run_on_any_rank(conv, _is_flat(node), signed, None, stored)
    return Call((node.name,), "oneDNN", inputs, (node.name,), run)


def _only_conversion(layouts: RequestedLayouts, node: Node, node_plan: NodePlan) -> tuple[SimQ | None, str]:
    """The conversion of a node's value, if it is the only one that is requested, and its name."""
    if node_plan.out_simq is not None:
        return node_plan.out_simq, node.name
    conversions = layouts.conversions(node.name)
    name, simq = next(iter(conversions.items()), (node.name, None))
    return (simq if len(conversions) == 1 else None), name


def _onednn_bias(node_plan: NodePlan, scales: Tensor) -> Tensor | None:
    return None if 2 not in node_plan.consts else node_plan.consts[2].flatten().to(torch.float32) * scales


def _rank_is_kept(plan: Plan, node: Node) -> bool:
    """Whether the first axis of a matrix product is that of its first operand."""
    return node.op != "matmul" or len(node.shape or ()) == len(plan.graph[node.inputs[0]].shape or ())


CONV: Final = Kernel("native conv", _match_conv, _emit_conv, _has_conv, by_sample=_rank_is_kept)


# ---------------------------------------------------------------- products of two values
def _match_matmul(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    """Both operands are centered to int16."""
    for q in node_plan.operands[:2]:
        if q is None or stored_type(q) not in (0, 1, 2) or largest_of(q) >= 2**15 + (not int(q.zero_point)):
            return f"operands of {q and q.dtype} that int16 does not hold, centered"
    if len(node.inputs) > 2 and (2 not in node_plan.consts or int(node_plan.consts[2].abs().max()) >= 2**31):
        return "a bias that is no constant, or beyond int32"
    if channel_axis(node_plan.register.scale, len(node.shape or ())) not in (None, len(node.shape or ()) - 1):
        return "scales that vary along another axis than the columns"
    overflow = overflow_rule(node_plan)
    return overflow if isinstance(overflow, str) else Match("s16 x s16 products in int32")


def _emit_matmul(state: LoweringState, node: Node) -> Call | str:
    attention = _emit_attention(state, node)
    if attention is not None:
        return attention
    node_plan, shape = state.plan.nodes[node.name], node.shape or ()
    epilogue = state.epilogues.after(node, 1 if node_plan.register.scale.numel() == 1 else shape[-1])
    if epilogue is None:
        return _NO_FORM
    consts = _stored_const(node_plan, 0), _stored_const(node_plan, 1)
    offset = node_plan.consts[2].flatten().to(torch.int32).contiguous() if 2 in node_plan.consts else None
    formats = storage_format(node_plan.operands[0]), storage_format(node_plan.operands[1])
    call = MatmulCall(state.kernels.calls, epilogue.build(), formats, consts, offset, node.op == "linear")
    return _call_of_product(state, "native matmul", node, epilogue, call)


def _emit_attention(state: LoweringState, node: Node) -> Call | None:
    """The call that computes a product, the softmax that is its only reader, and the product that is the only reader of
    that; None if they do not follow each other so, or if the kernel does not have one of them."""
    plan, layouts = state.plan, state.layouts
    softmax = layouts.only_reader(node.name)
    end = None if softmax is None else layouts.only_reader(softmax.name)
    if softmax is None or end is None or node.op != "matmul" or not state.kernels.softmax.exact:
        return None
    to, batches = _stored_softmax(state, softmax, end), [(n.shape or ())[:-2] for n in (node, softmax, end)]
    if to is None or not batches[0] or len(set(batches)) > 1:
        return None
    products = [plan.nodes[n.name] for n in (node, end)]
    if any(p.consts for p in products):
        return None
    mask = [layouts.names[e] for e in softmax.edges[1:]]
    needed = [layouts.names[end.edges[1]], *mask]
    if not all(name in state.epilogues.available for name in needed):
        return None
    scores = state.epilogues.after(node, 1)
    if scores is None or [s.qparams for s in scores.stored] != [None] or products[0].register.scale.numel() > 1:
        return None
    epilogue = state.epilogues.after(end, 1 if products[1].register.scale.numel() == 1 else (end.shape or ())[-1])
    if epilogue is None:
        return None
    attrs = softmax.attrs
    how = Softmax(attrs.get("scale", 1.0), attrs.get("is_causal", False), state.kernels.softmax_registers, to)
    operands = products[0].operands[0], products[0].operands[1], products[1].operands[1]
    formats = storage_format(operands[0]), storage_format(operands[1]), storage_format(operands[2])
    call = AttentionCall(state.kernels.calls, scores.build(), epilogue.build(), formats, how, bool(mask))
    names = [layouts.names[e] for e in (*node.edges, end.edges[1])]
    fused = replace(epilogue, nodes=[node.name, softmax.name, *epilogue.nodes])
    return _call_with_epilogue("native attention", fused, [*names, *mask], call)


def _stored_softmax(state: LoweringState, softmax: Node, end: Node) -> FloatQuantization | None:
    """How the product `end` reads a softmax of floats along the last axis; None if it is no such softmax, or `end`
    reads it in another way."""
    plan, layouts, rank = state.plan, state.layouts, len(softmax.shape or ())
    if softmax.op not in ("softmax", "masked_softmax") or plan.ops[softmax.op] is not OPS[softmax.op]:
        return None
    last = softmax.op == "masked_softmax" or softmax.attrs["axis"] in (-1, rank - 1)
    real = all(plan.edges[e] is None or not layouts.is_own(e) for e in softmax.edges)
    masks = [plan.graph[name] for name in softmax.inputs[1:]]
    if softmax.name in plan.nodes or not last or not real or any(m.dtype not in ("float32", "bool") for m in masks):
        return None
    simq = plan.edges[end.edges[0]]
    follows = layouts.kernels[end.name] is MATMUL and end.op == "matmul" and end.inputs[0] == softmax.name
    if not follows or simq is None or simq.source is not None or simq.target is None or simq.via is not None:
        return None
    to = quantization_of(simq.target, plan.hardware.requantize)
    return to if to is not None and to.stored[0] <= native.TYPES["int8"] else None


def _match_multiply(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    for q in node_plan.operands:
        if q is None or stored_type(q) is None:
            return f"an operand of {q and q.dtype}"
    axis, overflow = channel_axis(node_plan.register.scale, len(node.shape or ())), overflow_rule(node_plan)
    if isinstance(axis, str) or isinstance(overflow, str):
        return axis if isinstance(axis, str) else str(overflow)
    return Match("both operands multiplied in one pass, in int32")


def _emit_multiply(state: LoweringState, node: Node) -> Call | str:
    node_plan, shape = state.plan.nodes[node.name], node.shape or ()
    axis = channel_axis(node_plan.register.scale, len(shape))
    assert not isinstance(axis, str)
    channels = 1 if axis is None else shape[axis]
    epilogue = state.epilogues.after(node, channels)
    if epilogue is None:
        return _NO_FORM
    consts = _stored_const(node_plan, 0), _stored_const(node_plan, 1)
    formats = storage_format(node_plan.operands[0]), storage_format(node_plan.operands[1])
    call = MultiplyCall(state.kernels.calls, epilogue.build(), formats, consts, channels, axis)
    return _call_of_product(state, "native multiply", node, epilogue, call)


def _call_of_product(
    state: LoweringState, kernel: str, node: Node, epilogue: Epilogue, run: MatmulCall | MultiplyCall
) -> Call:
    names = [state.layouts.names[e] for e, const in zip(node.edges, run.consts, strict=False) if const is None]
    return _call_with_epilogue(kernel, epilogue, names, run)


def _batches_agree(plan: Plan, node: Node) -> bool:
    """Whether the first axis of every operand that is not a constant is that of the result."""
    node_plan, rank = plan.nodes[node.name], len(node.shape or ())
    variable = [s for s in range(len(node.inputs)) if s not in node_plan.consts]
    if node.op in ("matmul", "linear") and 1 in variable and rank < 3:
        return False
    return all(len(plan.graph[node.inputs[s]].shape or ()) == rank for s in variable)


def _matmul_by_sample(plan: Plan, node: Node) -> bool:
    return _batches_agree(plan, node) and _rank_is_kept(plan, node)


MATMUL: Final = Kernel("native matmul", _match_matmul, _emit_matmul, _has_products, by_sample=_matmul_by_sample)
MULTIPLY: Final = Kernel("native multiply", _match_multiply, _emit_multiply, _has_products, by_sample=_batches_agree)


# ---------------------------------------------------------------- sums over windows and axes
def _match_sum_pool(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    x, overflow = node_plan.operands[0], overflow_rule(node_plan)
    if x is None or stored_type(x) is None or node_plan.attrs.get("ceil_mode"):
        return f"values of {x and x.dtype}, or ceil_mode"
    return overflow if isinstance(overflow, str) else Match("window sums in int32")


def _emit_sum_pool(state: LoweringState, node: Node) -> Call | str:
    node_plan, epilogue = state.plan.nodes[node.name], state.epilogues.after(node, (node.shape or ())[1])
    if epilogue is None:
        return _NO_FORM
    call = PoolCall(state.kernels.calls, *_window(node_plan), storage_format(node_plan.operands[0]), epilogue.build())
    return _call_with_epilogue("native sum pool", epilogue, [state.layouts.names[node.edges[0]]], call)


def _match_reduce(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    x, overflow, axes = node_plan.operands[0], overflow_rule(node_plan), node_plan.attrs["axes"]
    rank = len(plan.graph[node.inputs[0]].shape or ())
    if x is None or stored_type(x) is None or node_plan.register.scale.numel() > 1:
        return f"values of {x and x.dtype}, or a scale per channel"
    if 0 in axes or rank - len(axes) < 2:
        return "sums over the batch, or over everything else"
    return overflow if isinstance(overflow, str) else Match("sums in int32")


def _emit_reduce(state: LoweringState, node: Node) -> Call | str:
    node_plan, epilogue = state.plan.nodes[node.name], state.epilogues.after(node, 1)
    if epilogue is None:
        return _NO_FORM
    axes, keepdim = tuple(node_plan.attrs["axes"]), bool(node_plan.attrs["keepdim"])
    call = ReduceCall(state.kernels.calls, axes, keepdim, storage_format(node_plan.operands[0]), epilogue.build())
    return _call_with_epilogue("native sum over axes", epilogue, [state.layouts.names[node.edges[0]]], call)


SUM_POOL: Final = Kernel("native sum pool", _match_sum_pool, _emit_sum_pool, _has_passes)
REDUCE: Final = Kernel("native sum over axes", _match_reduce, _emit_reduce, _has_passes)


# ---------------------------------------------------------------- sums of two values
def _why_no_sum(plan: Plan, node: Node, node_plan: NodePlan) -> str:
    """The reason why neither `ADD` nor `BROADCAST_ADD` can compute a sum; empty if one of them may."""
    form, overflow = plan.ops[node.op].integer, overflow_rule(node_plan)
    if form is None or form.slots != ("common",):
        return "no common scale"
    return overflow if isinstance(overflow, str) else ""


def _has_one_shape(plan: Plan, node: Node) -> bool:
    """Whether both operands of a sum are values of one shape, neither of them a constant."""
    operands = [plan.graph[name] for name in node.inputs]
    return len({x.shape for x in operands}) == 1 and all(x.op != CONST for x in operands)


def _match_add(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    """Both operands are values of one shape."""
    if not _has_one_shape(plan, node):
        return ""
    reasons = (_why_no_sum(plan, node, node_plan), *(_why_not_requantized(plan, node_plan, slot) for slot in range(2)))
    return next(filter(None, reasons), None) or Match("both operands requantized and added in one pass")


def _why_not_requantized(plan: Plan, node_plan: NodePlan, slot: int) -> str:
    """The reason why the kernel cannot requantize an operand of a sum; empty if it can."""
    simq, read = conversion_of_read(node_plan, slot), read_qparams(node_plan, slot)
    if node_plan.operands[slot] is None or read is None or stored_type(read) is None:
        return f"an operand of {read and read.dtype}"
    requantization = requantization_of(simq, plan.hardware.requantize, max(1, read.scale.numel()), largest_of(read))
    return requantization if isinstance(requantization, str) else ""


def _emit_add(state: LoweringState, node: Node) -> Call | str:
    node_plan, shape = state.plan.nodes[node.name], node.shape or ()
    simqs = [conversion_of_read(node_plan, slot) for slot in range(2)]
    axes = {channel_axis(s.source.scale, len(shape)) for s in simqs if s is not None and s.source is not None} - {None}
    axis = next(iter(axes), None)
    if len(axes) > 1 or isinstance(axis, str):
        return "scales that vary along two axes"
    epilogue = Epilogue(1 if axis is None else shape[axis], [node.name])
    epilogue.added = state.epilogues.added_operand(epilogue, node, 0)
    if epilogue.added is None or not state.epilogues.finish(epilogue, node):
        return "an operand that the pass cannot requantize"
    first = read_qparams(node_plan, 0)
    assert first is not None
    return _call_of_rows(state, "native add", epilogue, first, axis, state.layouts.names[node.edges[0]])


def _match_broadcast_add(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    """One operand has the shape of the result. The other one is broadcast; it may be a constant."""
    if _has_one_shape(plan, node):
        return ""
    why = _why_no_sum(plan, node, node_plan)
    if why:
        return why
    whole_slots = [
        s for s, n in enumerate(node.inputs) if s not in node_plan.consts and plan.graph[n].shape == node.shape
    ]
    if (
        not whole_slots
        or any(q is None or stored_type(q) is None for q in node_plan.operands)
        or node_plan.out.scale.numel() > 1
    ):
        return "no operand has the shape of the sum, or types that the pass does not know"
    return Match("an operand broadcast, and added in one pass")


def _emit_broadcast_add(state: LoweringState, node: Node) -> Call | str:
    node_plan, how = state.plan.nodes[node.name], state.plan.hardware.requantize
    overflow = overflow_rule(node_plan)
    assert not isinstance(overflow, str)
    slot, moves = _whole_slot(state, node), list[Requantization]()
    for s in (slot, 1 - slot):
        operand, rescaling = node_plan.operands[s], node_plan.rescaling(s)
        assert operand is not None
        move = state.constant_cache.requantization(rescaling, how, 1, largest_of(operand))
        if isinstance(move, str):
            return move
        moves.append(move)
    epilogue = Epilogue(1, [node.name], added=_other_operand(state, node, slot, (moves[0], moves[1]), overflow))
    return _call_of_sum(state, node, slot, epilogue) if state.epilogues.finish(epilogue, node) else _NO_FORM


def _match_tflite_sum(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    """TFLite's sum requantizes both operands to one scale and then the sum to the scale of the output."""
    if node_plan.desc.form != "tflite":
        return ""
    shapes = [plan.graph[n].shape for n in node.inputs]
    overflow = overflow_rule(node_plan)
    if isinstance(overflow, str):
        return overflow
    if any(q is None or stored_type(q) is None or q.dtype.bits > 16 for q in (*node_plan.operands, node_plan.out)):
        return "values of more than 16 bits"
    if not node_plan.proved or not any(s not in node_plan.consts and shapes[s] == node.shape for s in (0, 1)):
        return "no operand has the shape of the result"
    return Match("three multipliers")


def _emit_tflite_sum(state: LoweringState, node: Node) -> Call | str:
    node_plan = state.plan.nodes[node.name]
    low, high = clip_range(node_plan.out)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return "zero points per channel"
    requantizations = tflite_sum_requantizations(node_plan.attrs, (low, high))
    if isinstance(requantizations, str):
        return requantizations
    out, *operands = requantizations
    slot = _whole_slot(state, node)
    added = _other_operand(state, node, slot, (operands[slot], operands[1 - slot]), native.OverflowRule())
    epilogue = Epilogue(1, [node.name], added=added, stored=[StoredOutput(node.name, out, node_plan.out)])
    return _call_of_sum(state, node, slot, epilogue)


def _whole_slot(state: LoweringState, node: Node) -> int:
    """The slot of an operand that is not a constant and has the shape of the result."""
    node_plan, shapes = state.plan.nodes[node.name], [state.plan.graph[n].shape for n in node.inputs]
    return next(s for s in (0, 1) if s not in node_plan.consts and shapes[s] == node.shape)


def _other_operand(
    state: LoweringState,
    node: Node,
    slot: int,
    requantizations: tuple[Requantization, Requantization],
    overflow: native.OverflowRule,
) -> AddedOperand:
    """The operand that is added to the one in `slot`.

    Args:
        requantizations: of the operand in `slot`, then of the other one.
    """
    other = state.plan.nodes[node.name].operands[1 - slot]
    assert other is not None
    name = state.layouts.names[node.edges[1 - slot]]
    return AddedOperand(name, other, *requantizations, addition_sign(node.op, slot), overflow)


def _call_of_sum(state: LoweringState, node: Node, slot: int, epilogue: Epilogue) -> Call:
    """The call of a pass over the operand in `slot`, to which the other operand of any shape is added."""
    node_plan, const = state.plan.nodes[node.name], _stored_const(state.plan.nodes[node.name], 1 - slot)
    source, name = storage_format(node_plan.operands[slot]), state.layouts.names[node.edges[slot]]
    run = RowsCall(state.kernels.calls, epilogue.build(), source, None, period(1), const)
    call = _call_with_epilogue("native add", epilogue, [name], run)
    return call if const is None else replace(call, inputs=(name,))  # the call holds the other operand


ADD: Final = Kernel("native add", _match_add, _emit_add, _has_passes, converts="integers", fuses_as="add")
BROADCAST_ADD: Final = Kernel(
    "native add, broadcast", _match_broadcast_add, _emit_broadcast_add, _has_passes, by_sample=_batches_agree
)
TFLITE_SUM: Final = Kernel("native add, TFLite's", _match_tflite_sum, _emit_tflite_sum, _has_passes, any_form=True)


# ---------------------------------------------------------------- clamps and maxima
def _match_clamp(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    if (
        stored_type(node_plan.out) is None
        or node_plan.operands[0] is None
        or stored_type(node_plan.operands[0]) is None
    ):
        return f"values of {node_plan.out.dtype}"
    return Match("one pass")


def _emit_clamp(state: LoweringState, node: Node) -> Call | str:
    node_plan, shape = state.plan.nodes[node.name], node.shape or ()
    form, x, axis = (
        state.plan.ops[node.op].integer,
        node_plan.operands[0],
        channel_axis(node_plan.out.scale, len(shape)),
    )
    assert form is not None and form.limits is not None and x is not None
    if isinstance(axis, str):
        return axis
    epilogue = Epilogue(1 if axis is None else shape[axis], [node.name])
    epilogue.clamp(*form.limits(node_plan.attrs))
    if not state.epilogues.finish(epilogue, node):
        return _NO_FORM
    return _call_of_rows(state, "native clamp", epilogue, x, axis, state.layouts.names[node.edges[0]])


def _match_max_pool(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    if stored_type(node_plan.out) is None or node_plan.attrs["ceil_mode"]:
        return f"values of {node_plan.out.dtype}, or ceil_mode"
    if why := _why_not_moved(node, node_plan):
        return why
    return Match(f"on {node_plan.out.dtype.torch} with channels innermost".replace("torch.", ""))


def _emit_max_pool(state: LoweringState, node: Node) -> Call | str:
    node_plan = state.plan.nodes[node.name]
    code = stored_type(node_plan.out)
    assert code is not None
    return _call_of_node(
        state, node, "native max pool", PoolCall(state.kernels.calls, *_window(node_plan), (code, 0), None)
    )


CLAMP: Final = Kernel("native clamp", _match_clamp, _emit_clamp, _has_passes, fuses_as="clamp")
MAX_POOL: Final = Kernel("native max pool", _match_max_pool, _emit_max_pool, _has_passes, fuses_as="max_pool")


# ---------------------------------------------------------------- tables
def _match_table(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    x = node_plan.operands[0]
    if x is None or stored_type(x) not in (0, 1) or stored_type(node_plan.out) not in (0, 1):
        return "a table of other than bytes"
    return Match("256 entries")


def _emit_table(state: LoweringState, node: Node) -> Call | str:
    node_plan = state.plan.nodes[node.name]
    x = node_plan.operands[0]
    assert node_plan.table is not None and x is not None
    entries = torch.zeros(256, dtype=node_plan.out.dtype.torch)
    entries[torch.arange(x.qmin, x.qmax + 1) % 256] = store(node_plan.table, node_plan.out)
    return _call_of_node(
        state, node, "native table", TableCall(state.kernels.calls, entries, node_plan.out.dtype.torch)
    )


def _match_pair_table(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    """Any arithmetic of two bytes that gives a byte."""
    values = (*node_plan.operands, node_plan.out)
    if all(q is not None and stored_type(q) in (0, 1) and q.scale.numel() == 1 for q in values):
        return Match("an entry for every pair of bytes")
    return ""


def _emit_pair_table(state: LoweringState, node: Node) -> Call | str:
    node_plan = state.plan.nodes[node.name]
    consts = _stored_const(node_plan, 0), _stored_const(node_plan, 1)
    # the digest of a node does not cover the qparams of its operands
    key = (node.op, node_plan.digest, *(q and q.key for q in node_plan.operands))
    entries = state.constant_cache.tables.get_or_make(key, lambda: pair_table_entries(state.plan, node))
    inputs = tuple(state.layouts.names[e] for e in node.edges if e.slot not in node_plan.consts)
    call = PairTableCall(state.kernels.calls, entries, consts)
    return Call((node.name,), "native pair table", inputs, (node.name,), call)


def pair_table_entries(plan: Plan, node: Node) -> Tensor:
    """The results of a node for every pair of bytes, in the order of `PairTableCall`, by the reference arithmetic."""
    node_plan, byte = plan.nodes[node.name], torch.arange(256, dtype=torch.uint8)
    dtypes = [q.dtype.torch for q in node_plan.operands if q is not None]
    values = [x.view(dtype) for x, dtype in zip((byte.repeat_interleave(256), byte.repeat(256)), dtypes, strict=True)]
    arriving = replace(node_plan, simqs=(None, None), consts={})
    return compute_integer(plan, node, arriving, values, lambda _, slot: values[slot])


TABLE: Final = Kernel("native table", _match_table, _emit_table, _has_passes, any_form=True)
PAIR_TABLE: Final = Kernel("native pair table", _match_pair_table, _emit_pair_table, _has_passes, any_form=True)


# ---------------------------------------------------------------- ops that only move values
def _why_not_moved(node: Node, node_plan: NodePlan) -> str:
    values = [o for o in node_plan.operands if o is not None]
    zeros = {int(q.zero_point) for q in (*values, node_plan.out) if q.zero_point.numel() == 1}
    dtypes = {q.dtype.torch for q in (*values, node_plan.out)}
    if (
        node_plan.consts
        or len(values) != len(node.inputs)
        or len(zeros) != 1
        or len(dtypes) != 1
        or not node_plan.proved
    ):
        return "operands that differ"
    if node_plan.out_simq is not None or any(q.zero_point.numel() != 1 for q in (*values, node_plan.out)):
        return "requantizes at the output"
    if node.op == "upsample_nearest2d" and node_plan.out.dtype.torch != torch.uint8:
        return "torch enlarges bytes only"
    return ""


def _match_move(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    return _why_not_moved(node, node_plan) or Match("moves values as they are stored")


def _emit_move(state: LoweringState, node: Node) -> Call | str:
    node_plan, rule = state.plan.nodes[node.name], state.plan.ops[node.op]

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        return (rule.compute(node_plan.attrs, *values),)

    return _call_of_node(state, node, "torch on bytes", run)


def _batch_stays_first(plan: Plan, node: Node) -> bool:
    """Whether an op that moves values leaves the batch as the first axis whatever its size."""
    first = {"reshape": "shape", "permute": "axes"}.get(node.op)
    if first is not None:
        return bool(node.attrs[first][0] == (-1 if node.op == "reshape" else 0))
    return node.op in ("concat", "slice") and node.attrs["axis"] % len(node.shape or ()) > 0


def _match_pad(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    return _why_not_moved(node, node_plan) or Match("pads values as they are stored")


def _emit_pad(state: LoweringState, node: Node) -> Call | str:
    node_plan = state.plan.nodes[node.name]
    sizes, mode = node_plan.attrs["pad"], node_plan.attrs["mode"]
    value = int(node_plan.attrs["value"] or 0) + int(node_plan.out.zero_point) if mode == "constant" else None

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        return (F.pad(values[0], sizes, mode, value),)

    return _call_of_node(state, node, "torch on bytes", run)


MOVE: Final = Kernel("torch on stored values", _match_move, _emit_move, _in_torch, by_sample=_batch_stays_first)
PAD: Final = Kernel("torch's padding of stored values", _match_pad, _emit_pad, _in_torch, any_form=True)


# ---------------------------------------------------------------- kernels that compute every Plan
def _match_any(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    return Match("computes every node")


def _match_floats(plan: Plan, node: Node, node_plan: NodePlan) -> Match | str:
    # torch has kernels for sums of products, which a rule can split, in floats but not in int64
    form = plan.ops[node.op].integer
    exact = form is not None and form.split is not None and node_plan.bound <= 2.0**53
    return Match("sums of products, exact on float carriers") if exact else ""


def _emit_float(state: LoweringState, node: Node) -> Call | str:
    call = _call_of_node(state, node, "float", _float_run(state, node))
    return _fused_norm(state, node, call) or call


def _float_run(state: LoweringState, node: Node) -> Run:
    plan, layouts, weights = state.plan, state.layouts, state.plan.weights
    stored = {e.slot: weights[e] for e in node.edges if e in weights}
    # values that a step before dequantized arrive as the node reads them, and so do weights
    simqs = {e: plan.edges[e] if layouts.is_own(e) and e not in weights else None for e in node.edges}

    @functools.cache
    def real_weight(name: str, slot: int) -> Tensor:
        return dequantize(stored[slot].integers, stored[slot].qparams)

    def run(values: Sequence[Any]) -> Sequence[Any]:
        return (compute_float(plan, node, values, real_weight, simqs),)

    return run


def _fused_norm(state: LoweringState, node: Node, alone: Call) -> Call | None:
    """The call that computes a layer norm and quantizes it for its readers; None if the kernel cannot compute it, or no
    reader quantizes it.

    Args:
        alone: the call that computes the norm in torch.
    """
    plan, layouts, conversions = state.plan, state.layouts, state.layouts.conversions(node.name)
    if node.op != "layer_norm" or plan.ops[node.op] is not OPS[node.op] or not state.kernels.norm.exact:
        return None
    consts = {e.slot: plan.graph.consts.get(plan.graph.source(e)) for e in node.edges[1:]}
    real = plan.edges[node.edges[0]] is None or not layouts.is_own(node.edges[0])
    known = all(v is not None and v.dtype == torch.float32 for v in consts.values())
    if not real or not known or any(e in plan.weights for e in node.edges):
        return None
    quantized = {
        name: to
        for name, simq in conversions.items()
        if simq is not None and simq.source is None and simq.target is not None and simq.via is None
        if (to := quantization_of(simq.target, plan.hardware.requantize)) is not None
    }
    if not quantized:
        return None
    outputs: dict[str, FloatQuantization | None] = dict(quantized)
    if conversions.keys() != quantized.keys():  # a reader needs the floats, or a step that converts them does
        outputs[node.name] = None

    def in_torch(values: Sequence[Any]) -> Sequence[Any]:
        (norm,) = alone.run([*values, *(consts[e.slot] for e in node.edges[1:])])
        simqs = [conversions.get(name) for name in outputs]
        return tuple(norm if s is None else move_stored(norm, s, plan.hardware.requantize) for s in simqs)

    weight, bias = (None if v is None else v.flatten().contiguous() for v in (consts.get(1), consts.get(2)))
    columns, epsilon = math.prod(node.attrs["normalized_shape"]), node.attrs["eps"]
    call = NormCall(state.kernels.calls, in_torch, columns, epsilon, weight, bias, tuple(outputs.values()))
    return Call((node.name,), "native layer norm", (layouts.names[node.edges[0]],), tuple(outputs), call)


def _emit_reference(state: LoweringState, node: Node, name: str = "reference", *, floats: bool = False) -> Call:
    plan, node_plan = state.plan, state.plan.nodes[node.name]
    # values that a step before requantized arrive as the operand
    simqs = [s if state.layouts.is_own(e) else None for e, s in zip(node.edges, node_plan.simqs, strict=True)]
    arriving = replace(node_plan, simqs=tuple(simqs))

    def constant(name: str, slot: int) -> Tensor:
        qparams = node_plan.operands[slot]
        assert qparams is not None
        return store(node_plan.consts[slot], qparams)

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        return (compute_integer(plan, node, arriving, values, constant, floats=floats),)

    return _call_of_node(state, node, name, run)


def _emit_floats(state: LoweringState, node: Node) -> Call | str:
    return _emit_reference(state, node, "torch in floats", floats=True)


FLOAT: Final = Kernel(
    "float", _match_any, _emit_float, _in_torch, converts="everything", reads_real=True, by_sample=_never
)
FLOATS: Final = Kernel(
    "torch in floats", _match_floats, _emit_floats, _in_torch, converts="everything", by_sample=_never
)
REFERENCE: Final = Kernel(
    "reference", _match_any, _emit_reference, _in_torch, any_form=True, converts="everything", by_sample=_never
)


# ---------------------------------------------------------------- the table and its reader
_SUM_OF_TWO: Final = (ADD, BROADCAST_ADD, PAIR_TABLE, TFLITE_SUM)
#: Integer ops without a kernel. Their products run on float carriers (`FLOATS`), the rest on the reference arithmetic.
_NO_KERNELS: Final = (
    *("adaptive_max_pool2d", "channel_clamp", "conv3d", "conv_transpose1d", "conv_transpose2d"),
    *("div", "embedding", "index", "neg", "softmax"),
)
#: By op, its kernels in the order in which they are tried. Every integer op that is not a table has an entry.
KERNELS: Final[Mapping[str, tuple[Kernel, ...]]] = {
    **dict.fromkeys(MOVERS | JOINERS, (MOVE,)),
    **dict.fromkeys(_NO_KERNELS, ()),
    "conv1d": (CONV,),
    "conv2d": (CONV,),
    "linear": (CONV, MATMUL),
    "matmul": (CONV, MATMUL),
    "affine": (CONV,),
    "mul": (MULTIPLY, PAIR_TABLE),
    "add": _SUM_OF_TWO,
    "sub": _SUM_OF_TWO,
    "mean": (REDUCE,),
    "sum": (REDUCE,),
    "pad": (PAD,),
    "relu": (CLAMP,),
    "clamp": (CLAMP,),
    "max_pool1d": (MAX_POOL,),
    "max_pool2d": (MAX_POOL,),
    "avg_pool1d": (SUM_POOL,),
    "avg_pool2d": (SUM_POOL,),
    "adaptive_avg_pool1d": (SUM_POOL,),
    "adaptive_avg_pool2d": (SUM_POOL,),
}
#: The kernels of nodes that look their results up, whatever the op.
TABLE_KERNELS: Final = (TABLE,)


def select_kernel(plan: Plan, node: Node, kernels: ExactKernels) -> SelectedKernel:
    """The first kernel that can compute a node, and why: called by `Lowering` once for every node that it computes.

    Args:
        kernels: the native kernels that may be selected.
    """
    node_plan = plan.nodes.get(node.name)
    if node_plan is None:
        return SelectedKernel(FLOAT, "a float node")
    form = plan.ops[node.op].integer
    has_own_attrs = form is not None and form.attrs_at is not None and form.common is None
    special_form = form is None or form.requantizes_output or has_own_attrs
    why = "computes, or goes to the output's scale, in a way of its own" if special_form else "no kernel of its own"
    for kernel in TABLE_KERNELS if node_plan.table is not None else KERNELS.get(node.op, ()):
        if special_form and not kernel.any_form:
            continue
        present = kernel.present(kernels, node_plan)
        match = kernel.matches(plan, node, node_plan) if present else "no native kernels here"
        if isinstance(match, Match):
            return SelectedKernel(kernel, match.why)
        why = match or why
    match = "" if special_form else FLOATS.matches(plan, node, node_plan)
    if isinstance(match, Match):
        return SelectedKernel(FLOATS, f"{match.why} ({why})")
    return SelectedKernel(REFERENCE, why)
