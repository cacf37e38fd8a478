"""Emit: the call of every kind of kernel for a node, or why it cannot be made after all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from hago.graph.graph import Node
from hago.runtime.native import emit_pairs as pairs
from hago.runtime.native import emit_passes as passes
from hago.runtime.native import emit_sums as sums
from hago.runtime.native.choice import Choice
from hago.runtime.native.emitting import Call, Owner

Emitter = Callable[[Owner, Node, Choice], Call | str]
EMIT: Final[Mapping[str, Emitter]] = {
    "conv": sums.conv,
    "matmul": sums.matmul,
    "multiply": sums.multiply,
    "add": pairs.add,
    "spread_add": pairs.spread_add,
    "landed_sum": pairs.landed_sum,
    "clamp": passes.clamp,
    "max_pool": passes.max_pool,
    "sum_pool": sums.sum_pool,
    "reduce": sums.reduce,
    "pad": passes.pad,
    "table": passes.table,
    "pair_table": passes.pair_table,
    "move": passes.move,
}
