"""Choosers of the kernels that make an entry of an entry, of a few, or move entries."""

from __future__ import annotations

import torch

from hago.graph.graph import CONST, Node
from hago.plan.plan import NodePlan, Plan
from hago.runtime.native.choice import Choice
from hago.runtime.native.epilogue import register_of
from hago.runtime.native.requantize import largest_of, move_of, stored_type


# ---------------------------------------------------------------- passes
def add(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    form, shapes = plan.ops[node.op].integer, {plan.graph[s].shape for s in node.inputs}
    if form is None or form.slots != ("common",):
        return "no common scale"
    register = register_of(made)
    if isinstance(register, str):
        return register
    if len(shapes) > 1 or any(plan.graph[s].op == CONST for s in node.inputs):
        return _spread_add(plan, node, made)
    for slot in range(2):
        why = _operand_moves(plan, made, slot)
        if why:
            return why
    return Choice("add", "both operands requantized and added in one pass", "own")


def _spread_add(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    whole = [s for s, n in enumerate(node.inputs) if s not in made.consts and plan.graph[n].shape == node.shape]
    if not whole or any(q is None or stored_type(q) is None for q in made.operands) or made.out.scale.numel() > 1:
        return "no operand has the shape of the sum, or types that the pass does not know"
    return Choice("spread_add", "an operand broadcast, and added in one pass")


def _operand_moves(plan: Plan, made: NodePlan, slot: int) -> str:
    """Why the kernel cannot requantize an operand of an add, or nothing."""
    simq, target = made.simqs[slot], made.operands[slot]
    source = target if simq is None else simq.source
    stored = target if source is None else source
    if target is None or stored is None or stored_type(stored) is None:
        return f"an operand of {stored and stored.dtype}"
    if source is None:
        return ""  # quantized before
    found = move_of(simq, plan.hardware.requantize, max(1, source.scale.numel()), largest_of(source))
    return found if isinstance(found, str) else ""


def clamp(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if stored_type(made.out) is None or made.operands[0] is None or stored_type(made.operands[0]) is None:
        return f"values of {made.out.dtype}"
    return Choice("clamp", "one pass")


def max_pool(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if stored_type(made.out) is None or made.attrs["ceil_mode"]:
        return f"values of {made.out.dtype}, or ceil_mode"
    return Choice("max_pool", f"on {made.out.dtype.torch} with channels innermost".replace("torch.", ""))


def pad(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    found = mover(plan, node, made)
    return found if isinstance(found, str) else Choice("pad", "pads values as they are stored")


def table(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    x = made.operands[0]
    if x is None or stored_type(x) not in (0, 1) or stored_type(made.out) not in (0, 1):
        return "a table of other than bytes"
    return Choice("table", "256 entries")


def pair_table(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    """Whatever the arithmetic is, where both operands are bytes."""
    values = (*made.operands, made.out)
    if all(q is not None and stored_type(q) in (0, 1) and q.scale.numel() == 1 for q in values):
        return Choice("pair_table", "an entry for every pair of bytes")
    return ""


def landed_sum(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    """TFLite's, of values that tables have no entries for."""
    if made.desc.form != "tflite":
        return ""
    shapes = [plan.graph[n].shape for n in node.inputs]
    register = register_of(made)
    if isinstance(register, str):
        return register
    if any(q is None or stored_type(q) is None or q.dtype.bits > 16 for q in (*made.operands, made.out)):
        return "values of more than 16 bits"
    if not made.proved or not any(s not in made.consts and shapes[s] == node.shape for s in (0, 1)):
        return "no operand has the shape of the result"
    return Choice("landed_sum", "three multipliers")


def mover(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    values = [o for o in made.operands if o is not None]
    zeros = {int(q.zero_point) for q in (*values, made.out) if q.zero_point.numel() == 1}
    same = {q.dtype.torch for q in (*values, made.out)}
    if made.consts or len(values) != len(node.inputs) or len(zeros) != 1 or len(same) != 1 or not made.proved:
        return "operands that differ"
    if made.out_simq is not None or any(q.zero_point.numel() != 1 for q in (*values, made.out)):
        return "requantizes at the output"
    if node.op == "upsample_nearest2d" and made.out.dtype.torch != torch.uint8:
        return "torch enlarges bytes only"
    if node.op == "adaptive_max_pool2d":
        return "no kernel of its own"
    return Choice("move", "moves values as they are stored")
