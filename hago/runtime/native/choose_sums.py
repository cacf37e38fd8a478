"""Choosers of the kernels that sum products, or values, in a register."""

from __future__ import annotations

import torch

from hago.graph.graph import Node
from hago.plan.plan import NodePlan, Plan
from hago.runtime.native.choice import Choice, axis_of
from hago.runtime.native.epilogue import register_of
from hago.runtime.native.requantize import largest_of, stored_type
from hago.runtime.native.weights import Geometry, conv_geometry


# ---------------------------------------------------------------- convolutions
def _macs(node: Node, made: NodePlan, geometry: Geometry | str) -> Choice | str:
    if isinstance(geometry, str):
        return geometry
    x, words = made.operands[0], reads_words(made)
    if x is None or stored_type(x) not in (0, 1, 2):
        return f"activations of {x and x.dtype}"
    if words and int(x.zero_point):
        return "activations of 16 bits with a zero point"
    if made.consts[1].dtype not in ((torch.int8, torch.int16) if words else (torch.int8,)):
        return f"weights that int{16 if words else 8} does not hold, centered"
    if 2 in made.consts and int(made.consts[2].abs().max()) >= 2**31:
        return "a bias beyond int32"
    if len(node.inputs) > 2 and 2 not in made.consts:
        return "a bias that is no constant"
    register = register_of(made)
    why = f"{'s16 x s16' if words else 'u8 x s8'} products in int32"
    return register if isinstance(register, str) else Choice("conv", why, "moved", geometry)


def reads_words(made: NodePlan) -> bool:
    return made.operands[0] is not None and stored_type(made.operands[0]) == 2


def conv(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if 1 not in made.consts:
        return "a weight that is no constant"
    return _macs(node, made, conv_geometry(made.attrs, made.consts[1]))


def linear(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if 1 not in made.consts:
        return "a weight that is no constant"
    out, channels = made.consts[1].shape
    return _macs(node, made, _matrix(int(channels), int(out)))


def matmul(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if 1 not in made.consts or made.consts[1].ndim != 2:
        return "no operand is a constant matrix on the right"
    channels, out = made.consts[1].shape
    return _macs(node, made, _matrix(int(channels), int(out)))


def affine(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if 1 not in made.consts or not 2 <= len(node.shape or ()) <= 4:
        return "a weight that is no constant, or more than two axes after the channels"
    n = made.consts[1].numel()
    return _macs(node, made, Geometry(n, n, n, (1, 1), (1, 1), (0, 0), (1, 1)))


def _matrix(channels: int, out: int) -> Geometry:
    return Geometry(channels, out, 1, (1, 1), (1, 1), (0, 0), (1, 1))


# ---------------------------------------------------------------- products of two values
def matrices(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    """A product of matrices whose entries int16 holds, centered."""
    for q in made.operands[:2]:
        if q is None or stored_type(q) not in (0, 1, 2) or largest_of(q) >= 2**15 + (not int(q.zero_point)):
            return f"operands of {q and q.dtype} that int16 does not hold, centered"
    if len(node.inputs) > 2 and (2 not in made.consts or int(made.consts[2].abs().max()) >= 2**31):
        return "a bias that is no constant, or beyond int32"
    if axis_of(made.register.scale, len(node.shape or ())) not in (None, len(node.shape or ()) - 1):
        return "scales that vary along another axis than the columns"
    register = register_of(made)
    return register if isinstance(register, str) else Choice("matmul", "s16 x s16 products in int32")


def multiply(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    for q in made.operands:
        if q is None or stored_type(q) is None:
            return f"an operand of {q and q.dtype}"
    axis, register = axis_of(made.register.scale, len(node.shape or ())), register_of(made)
    if isinstance(axis, str) or isinstance(register, str):
        return axis if isinstance(axis, str) else str(register)
    return Choice("multiply", "both operands multiplied in one pass, in int32")


# ---------------------------------------------------------------- sums of values
def sum_pool(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    x, register = made.operands[0], register_of(made)
    if x is None or stored_type(x) is None or made.attrs.get("ceil_mode"):
        return f"values of {x and x.dtype}, or ceil_mode"
    return register if isinstance(register, str) else Choice("sum_pool", "window sums in int32")


def reduce(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    x, register, axes = made.operands[0], register_of(made), made.attrs["axes"]
    rank = len(plan.graph[node.inputs[0]].shape or ())
    if x is None or stored_type(x) is None or made.register.scale.numel() > 1:
        return f"values of {x and x.dtype}, or a scale per channel"
    if 0 in axes or rank - len(axes) < 2:
        return "sums over the batch, or over everything else"
    return register if isinstance(register, str) else Choice("reduce", "sums in int32")
