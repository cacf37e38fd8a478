"""Headroom: at how many bits an accumulator cannot overflow, whatever weights and thresholds are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hago.graph import Graph, Node
from hago.hardware import Hardware, OpDesc
from hago.ops import Ops
from hago.ops._integer import Operand
from hago.pairs import CUTS
from hago.schemes import TWO_SIDED
from hago.types import INT16


def safe_bits(
    graph: Graph,
    node: Node,
    hardware: Hardware,
    descs: Sequence[OpDesc],
    choices: Sequence[Sequence[int]],
    ops: Ops,
) -> tuple[int | None, bool]:
    """The most bits that are safe on all operands of an integer node, and whether every choice is safe.

    Args:
        descs: its integer signatures.
        choices: of each operand, widest first; empty where there is nothing to choose.

    Returns:
        (None, False) where it depends on weights and thresholds.
    """
    form = ops[node.op].integer
    assert form is not None
    moves = form.within_hull and all(d.register.dtype == d.in_dtype(0) for d in descs)
    if form.table or moves:
        return None, True
    rescaled = form.lands or ("common" in form.slots and any(d.requantize_at == "output" for d in descs))
    ones = [torch.ones((), dtype=torch.float64)] * len(choices)
    if rescaled or form.attrs_at or form.attrs(node.attrs, ones) is not node.attrs or not all(choices):
        return None, False  # decided by scales: a derived bias, or integers as the producer emits them
    affine = not TWO_SIDED.isdisjoint((hardware.activation.scheme, hardware.weight.scheme))
    widest = max(c[0] for c in choices)
    for bits in range(widest, min(c[-1] for c in choices) - 1, -1):
        if _fits(graph, node, descs, [min(bits, c[0]) for c in choices], affine, ops):
            return bits, bits == widest
    return None, False


def _fits(graph: Graph, node: Node, descs: Sequence[OpDesc], bits: Sequence[int], affine: bool, ops: Ops) -> bool:
    """Whether the worst operands of these bits stay inside every register that could be chosen."""
    form = ops[node.op].integer
    assert form is not None
    for desc in descs:
        if any(b > desc.in_dtype(slot).bits for slot, b in enumerate(bits)):
            continue
        operands = []
        for slot, b in enumerate(bits):
            one_sided = affine or not desc.in_dtype(slot).signed
            largest = torch.tensor(float((1 << b) - 1 if one_sided else (1 << (b - 1)) - 1), dtype=torch.float64)
            operands.append(Operand(None, largest, graph[node.inputs[slot]].shape or ()))
        if float(form.bound(node.attrs, operands).max()) > desc.register.dtype.max:
            return False
        if desc.register.overflow in CUTS and form.product is not None:
            pair = 2 * float(operands[0].magnitude) * float(operands[1].magnitude)
            if pair > INT16.max:
                return False
    return True
