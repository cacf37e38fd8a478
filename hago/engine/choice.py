"""Choice: which kernel a node runs on, decided from the Plan alone, with the reason.

Every function here takes a node and gives a Choice, or the reason why the kernel cannot stand for the Plan's
arithmetic; the reference arithmetic always can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from hago.crossing import varies_along
from hago.engine.moves import largest_of, move_of, stored_type
from hago.engine.pack import Geometry, conv_geometry
from hago.engine.tail import register_of
from hago.engine.wiring import JOINERS, MOVERS
from hago.graph import CONST, Node
from hago.plan import NodePlan, Plan

#: What a kernel reads on an edge: the producer's own value, or what the edge requantizes it to.
Takes = Literal["own", "moved"]
Sums = Literal["conv", "matmul", "multiply", "sum_pool", "reduce"]
Passes = Literal["add", "spread_add", "landed_sum", "clamp", "max_pool", "table", "pair_table", "pad", "move"]
Kind = Sums | Passes | Literal["double", "reference", "float"]
#: Ops that make an entry of one entry of each operand.
_BY_ENTRY: Final = frozenset({"add", "sub", "mul"})
#: Ops whose sums of products torch makes in float64 with kernels that it has not for int64.
_PRODUCTS: Final = frozenset({"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "linear", "matmul"})


@dataclass(frozen=True, slots=True)
class Choice:
    """How a node runs.

    Args:
        takes: on every edge; the last repeats.
        geometry: of a convolution.
    """

    kind: Kind
    why: str
    takes: Takes = "moved"
    geometry: Geometry | None = None


def choose(plan: Plan, node: Node, *, conv: bool, passes: bool, products: bool = False, words: bool = False) -> Choice:
    """The kernel of a node.

    Args:
        conv, passes, products: which of the native kernels may be used.
        words: whether convolutions may read values of 16 bits.
    """
    made = plan.nodes.get(node.name)
    if made is None:
        return Choice("float", "a float node", "own")
    found: Choice | str = "no kernel of its own"
    try_ = _CHOICES.get(node.op, _mover if node.op in MOVERS | JOINERS else None)
    form = plan.ops[node.op].integer
    own_way = form is None or form.lands or (form.attrs_at is not None and try_ is not _pad)
    if made.table is not None:
        try_ = _table
    elif own_way:
        try_, found = None, "computes, or goes to the output's scale, in a way of its own"
    if try_ is not None:
        found = "no native kernels here"
        sums = (words if _reads_words(made) else conv) if try_ in (_conv, _linear, _matmul, _affine) else passes
        if try_ in (_mover, _pad) or (products if try_ is _multiply else sums):
            found = try_(plan, node, made)
    if isinstance(found, str) and products and made.table is None and try_ in (_linear, _matmul):
        found = _words(plan, node, made)
    if isinstance(found, str) and passes and node.op in _BY_ENTRY:
        found = _pair_table(made) or found
    if isinstance(found, str) and passes and made.desc.form == "tflite" and node.op in ("add", "sub"):
        found = _landed_sum(plan, node, made)
    if isinstance(found, str) and node.op in _PRODUCTS and not own_way and made.bound <= 2.0**53:
        return Choice("double", f"sums of products, exact in float64 ({found})", "own")
    return found if isinstance(found, Choice) else Choice("reference", found, "own")


Chooser = Callable[[Plan, Node, NodePlan], "Choice | str"]


# ---------------------------------------------------------------- convolutions
def _macs(node: Node, made: NodePlan, geometry: Geometry | str) -> Choice | str:
    if isinstance(geometry, str):
        return geometry
    x, words = made.operands[0], _reads_words(made)
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


def _reads_words(made: NodePlan) -> bool:
    return made.operands[0] is not None and stored_type(made.operands[0]) == 2


def _conv(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if 1 not in made.consts:
        return "a weight that is no constant"
    return _macs(node, made, conv_geometry(made.attrs, made.consts[1]))


def _linear(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if 1 not in made.consts:
        return "a weight that is no constant"
    out, channels = made.consts[1].shape
    return _macs(node, made, _matrix(int(channels), int(out)))


def _matmul(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if 1 not in made.consts or made.consts[1].ndim != 2:
        return "no operand is a constant matrix on the right"
    channels, out = made.consts[1].shape
    return _macs(node, made, _matrix(int(channels), int(out)))


def _affine(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if 1 not in made.consts or not 2 <= len(node.shape or ()) <= 4:
        return "a weight that is no constant, or more than two axes after the channels"
    n = made.consts[1].numel()
    return _macs(node, made, Geometry(n, n, n, (1, 1), (1, 1), (0, 0), (1, 1)))


def is_flat(node: Node) -> bool:
    """Whether a sum of products has its channels last, so that rows are its pixels."""
    return node.op in ("linear", "matmul") or len(node.shape or ()) == 2


def _matrix(channels: int, out: int) -> Geometry:
    return Geometry(channels, out, 1, (1, 1), (1, 1), (0, 0), (1, 1))


# ---------------------------------------------------------------- products of two values
def _words(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
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


def _multiply(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    for q in made.operands:
        if q is None or stored_type(q) is None:
            return f"an operand of {q and q.dtype}"
    axis, register = axis_of(made.register.scale, len(node.shape or ())), register_of(made)
    if isinstance(axis, str) or isinstance(register, str):
        return axis if isinstance(axis, str) else str(register)
    return Choice("multiply", "both operands multiplied in one pass, in int32")


# ---------------------------------------------------------------- passes
def _add(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
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


def _clamp(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if stored_type(made.out) is None or made.operands[0] is None or stored_type(made.operands[0]) is None:
        return f"values of {made.out.dtype}"
    return Choice("clamp", "one pass")


def _max_pool(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    if stored_type(made.out) is None or made.attrs["ceil_mode"]:
        return f"values of {made.out.dtype}, or ceil_mode"
    return Choice("max_pool", f"on {made.out.dtype.torch} with channels innermost".replace("torch.", ""))


def _sum_pool(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    x, register = made.operands[0], register_of(made)
    if x is None or stored_type(x) is None or made.attrs.get("ceil_mode"):
        return f"values of {x and x.dtype}, or ceil_mode"
    return register if isinstance(register, str) else Choice("sum_pool", "window sums in int32")


def _reduce(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    x, register, axes = made.operands[0], register_of(made), made.attrs["axes"]
    rank = len(plan.graph[node.inputs[0]].shape or ())
    if x is None or stored_type(x) is None or made.register.scale.numel() > 1:
        return f"values of {x and x.dtype}, or a scale per channel"
    if 0 in axes or rank - len(axes) < 2:
        return "sums over the batch, or over everything else"
    return register if isinstance(register, str) else Choice("reduce", "sums in int32")


def _pad(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    found = _mover(plan, node, made)
    return found if isinstance(found, str) else Choice("pad", "pads values as they are stored")


def _table(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    x = made.operands[0]
    if x is None or stored_type(x) not in (0, 1) or stored_type(made.out) not in (0, 1):
        return "a table of other than bytes"
    return Choice("table", "256 entries")


def _pair_table(made: NodePlan) -> Choice | None:
    """Whatever the arithmetic is, where both operands are bytes."""
    values = (*made.operands, made.out)
    if len(values) == 3 and all(q is not None and stored_type(q) in (0, 1) and q.scale.numel() == 1 for q in values):
        return Choice("pair_table", "an entry for every pair of bytes")
    return None


def _landed_sum(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    """TFLite's, of values that tables have no entries for."""
    shapes = [plan.graph[n].shape for n in node.inputs]
    register = register_of(made)
    if isinstance(register, str):
        return register
    if any(q is None or stored_type(q) is None or q.dtype.bits > 16 for q in (*made.operands, made.out)):
        return "values of more than 16 bits"
    if not made.proved or not any(s not in made.consts and shapes[s] == node.shape for s in (0, 1)):
        return "no operand has the shape of the result"
    return Choice("landed_sum", "three multipliers")


def _mover(plan: Plan, node: Node, made: NodePlan) -> Choice | str:
    values = [o for o in made.operands if o is not None]
    zeros = {int(q.zero_point) for q in (*values, made.out) if q.zero_point.numel() == 1}
    same = {q.dtype.torch for q in (*values, made.out)}
    if made.consts or len(values) != len(node.inputs) or len(zeros) != 1 or len(same) != 1 or not made.proved:
        return "operands that differ"
    if made.out_simq is not None or any(q.zero_point.numel() != 1 for q in (*values, made.out)):
        return "requantizes at the output"
    if node.op == "upsample_nearest2d" and made.out.dtype.torch != torch.uint8:
        return "torch enlarges bytes only"
    if node.op in ("max_pool1d", "max_pool2d", "adaptive_max_pool2d"):
        return "no kernel of its own"
    return Choice("move", "moves values as they are stored")


def axis_of(scale: torch.Tensor, ndim: int) -> int | str | None:
    """The one axis along which a scale varies; None where it does not."""
    axes = varies_along(scale, ndim)
    if len(axes) > 1:
        return "scales that vary along two axes"
    return axes[0] if axes else None


_CHOICES: Final[Mapping[str, Chooser]] = {
    "conv1d": _conv,
    "conv2d": _conv,
    "linear": _linear,
    "matmul": _matmul,
    "affine": _affine,
    "mul": _multiply,
    "add": _add,
    "sub": _add,
    "mean": _reduce,
    "sum": _reduce,
    "pad": _pad,
    "relu": _clamp,
    "clamp": _clamp,
    "max_pool1d": _max_pool,
    "max_pool2d": _max_pool,
    "avg_pool1d": _sum_pool,
    "avg_pool2d": _sum_pool,
    "adaptive_avg_pool1d": _sum_pool,
    "adaptive_avg_pool2d": _sum_pool,
}
