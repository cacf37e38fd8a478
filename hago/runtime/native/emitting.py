"""Call: what the lowering makes of a node for a kernel, and what every kind of call is made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from hago.arithmetic.numerics import EXACT_FLOAT32, Requantize, is_power_of_two, ratio
from hago.arithmetic.types import QParams, SimQ
from hago.graph.graph import Node
from hago.plan.plan import NodePlan, Plan
from hago.runtime.native.calls import Place, RowsCall
from hago.runtime.native.chains import Chains
from hago.runtime.native.choice import is_flat
from hago.runtime.native.epilogue import Tail
from hago.runtime.native.layouts import Wants
from hago.runtime.native.onednn import FINEST, OnednnConv, prepack
from hago.runtime.native.requantize import period, stored_type
from hago.runtime.native.self_test import Kernels
from hago.runtime.native.weights import Geometry, Packs
from hago.runtime.reference import move_stored, store


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


NO_FORM: Final = "what follows has no form in the kernels"


def stored_const(made: NodePlan, slot: int) -> Tensor | None:
    """The constant operand of a slot as it is stored; None where it is none."""
    qparams = made.operands[slot]
    assert qparams is not None
    return store(made.consts[slot], qparams) if slot in made.consts else None


def place(qparams: QParams | None) -> Place:
    """Code and zero point of a value whose type the kernels know."""
    code = None if qparams is None else stored_type(qparams)
    assert qparams is not None and code is not None
    return code, int(qparams.zero_point)


def rows(owner: Owner, kernel: str, tail: Tail, source: QParams, axis: int | None, name: str) -> Call:
    """A pass over a value, requantized and clamped as the tail says."""
    code = stored_type(source)
    assert code is not None
    source_type = (code, int(source.zero_point))
    call = RowsCall(owner.kernels.calls, tail.build(), source_type, axis, period(tail.channels))
    return with_tail(kernel, tail, name, call)


def with_tail(kernel: str, tail: Tail, name: str, run: Callable[[Sequence[Any]], Sequence[Any]]) -> Call:
    """The call of a kernel that stores what its tail says."""
    inputs = (name, *((tail.added.name,) if tail.added else ()))
    return Call(tuple(dict.fromkeys(tail.nodes)), kernel, inputs, tuple(s.name for s in tail.stored), run)


def one(owner: Owner, node: Node, kernel: str, run: Callable[[Sequence[Any]], Sequence[Any]]) -> Call:
    """The call of a kernel that stores its node's value as it is."""
    return Call((node.name,), kernel, tuple(owner.wants.names[e] for e in node.edges), (node.name,), run)


def window(made: NodePlan) -> tuple[tuple[int, ...], Callable[[Sequence[int]], tuple[int, ...]]]:
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


# ---------------------------------------------------------------- onednn call
# oneDNN's kernels for a node, where the arithmetic of the Plan is theirs.
# Requantization in the kernel is that of the Plan where every ratio is a power of two, half to even, not finer than
# `FINEST`, and sums stay below 2**24; else the sums come out and are requantized by a pass.


@dataclass(frozen=True, slots=True)
class OnednnCall:
    """The call, and what it makes."""

    kernel: str
    outputs: tuple[str, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]


def onednn_call(wants: Wants, packs: Packs, kernels: Kernels, node: Node, g: Geometry) -> OnednnCall | str:
    """The kernel of a convolution or a matrix product by a constant, or why there is none."""
    made, how = wants.plan.nodes[node.name], wants.plan.hardware.requantize
    x = made.operands[0]
    assert x is not None
    if not made.proved:
        return "sums that may leave their register"
    if made.bound >= EXACT_FLOAT32:
        return "sums that float32 does not hold, which is how oneDNN gives them"
    zero, signed = int(x.zero_point), x.dtype.torch == torch.int8
    zero += 128 * signed
    weight = packs.kept(made.consts[1], (g, node.op, zero), lambda w: prepack(_laid(w, g, node.op), g, zero))
    simq, name = _single_form(wants, node, made)
    target = None if simq is None else simq.target
    if kernels.fused.exact and simq is not None and target is not None and _fuses(simq, how):
        scales = ratio(made.register, target).to(torch.float32).flatten().expand(g.out_channels).contiguous()
        conv = OnednnConv(weight, g, zero, scales, _bias(made, scales), int(target.zero_point), target.dtype.torch)
        clip = None if target.qmax - target.qmin == 255 else (target.qmin, target.qmax)
        return OnednnCall("oneDNN, requantized", (name,), _run(conv, node, signed, clip, None))
    scales = torch.ones(g.out_channels)
    conv = OnednnConv(weight, g, zero, scales, _bias(made, scales), 0, torch.float32)

    def stored(sums: Tensor) -> Tensor:
        moved = sums.to(made.register.dtype.torch)
        return moved if made.out_simq is None else move_stored(moved, made.out_simq, how)

    return OnednnCall("oneDNN", (node.name,), _run(conv, node, signed, None, stored))


def _single_form(wants: Wants, node: Node, made: NodePlan) -> tuple[SimQ | None, str]:
    """The only requantized form that is wanted of a node, and its name."""
    if made.out_simq is not None:
        return made.out_simq, node.name
    forms = wants.forms(node.name)
    name, simq = next(iter(forms.items()), (node.name, None))
    return (simq if len(forms) == 1 else None), name


def _fuses(simq: SimQ, how: Requantize) -> bool:
    source, target = simq.source, simq.target
    if (
        source is None
        or target is None
        or simq.via is not None
        or how.form == "multiplier_shift"
        or how.rounding != "half_even"
    ):
        return False
    r = ratio(source, target)
    bytes_ = target.dtype.torch in (torch.uint8, torch.int8) and target.scale.numel() == 1
    return bytes_ and is_power_of_two(r) and float(r.min()) >= FINEST and float(r.max()) <= 1.0 / FINEST


def _bias(made: NodePlan, scales: Tensor) -> Tensor | None:
    return None if 2 not in made.consts else made.consts[2].flatten().to(torch.float32) * scales


def _laid(weight: Tensor, g: Geometry, op: str) -> Tensor:
    laid = weight.t() if op == "matmul" else weight
    return laid.reshape(g.out_channels, -1, *g.kernel).contiguous()


def _run(
    conv: OnednnConv, node: Node, signed: bool, clip: tuple[int, int] | None, stored: Callable[[Tensor], Tensor] | None
) -> Callable[[Sequence[Any]], Sequence[Tensor]]:
    """The call on a value of any rank.

    Args:
        clip: limits of q, where they are not the dtype's.
        stored: what becomes of sums that come out as they are.
    """
    flat = is_flat(node)

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        x = values[0]
        image = (x.view(torch.uint8) ^ 128) if signed else x
        if flat:
            image = image.reshape(-1, conv.geometry.channels, 1, 1)
        elif x.ndim == 3:
            image = image.unsqueeze(2)
        made = conv(image)
        if clip is not None:
            made.clamp_(*clip)
        if flat:
            made = made.reshape(*x.shape[:-1], conv.geometry.out_channels)
        elif x.ndim == 3:
            made = made.squeeze(2)
        return (made if stored is None else stored(made),)

    return run
