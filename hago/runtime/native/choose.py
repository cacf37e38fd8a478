"""Choose: the kernel of every node, decided from the Plan alone, with the reason.

Every chooser takes a node and gives a Choice, or the reason why the kernel cannot stand for the Plan's arithmetic;
the reference arithmetic always can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from hago.graph.graph import Node
from hago.plan.plan import Plan
from hago.runtime.native import choose_passes as passing
from hago.runtime.native import choose_sums as sums
from hago.runtime.native.choice import Choice, Chooser
from hago.runtime.native.layouts import JOINERS, MOVERS

#: Ops whose sums of products torch makes in float64 with kernels that it has not for int64.
_PRODUCTS: Final = frozenset({"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "linear", "matmul"})


class _Try(NamedTuple):
    """A kernel to try.

    Args:
        needs: the kernels that it is one of.
        any_way: whether it can stand for ops that compute, or go to the output's scale, in a way of their own.
    """

    chooser: Chooser
    needs: Literal["conv", "passes", "products", "torch"]
    any_way: bool = False


def choose(plan: Plan, node: Node, *, conv: bool, passes: bool, products: bool = False, words: bool = False) -> Choice:
    """The kernel of a node: the first that can stand for it.

    Args:
        conv, passes, products: which of the native kernels may be used.
        words: whether convolutions may read values of 16 bits.
    """
    made = plan.nodes.get(node.name)
    if made is None:
        return Choice("float", "a float node", "own")
    form = plan.ops[node.op].integer
    own_way = form is None or form.requantizes_output or form.attrs_at is not None
    have = {
        "conv": words if sums.reads_words(made) else conv,
        "passes": passes,
        "products": products,
        "torch": True,
    }
    why = "computes, or goes to the output's scale, in a way of its own" if own_way else "no kernel of its own"
    for chooser, needs, any_way in _TABLE if made.table is not None else _TRIES.get(node.op, ()):
        if own_way and not any_way:
            continue
        found = chooser(plan, node, made) if have[needs] else "no native kernels here"
        if isinstance(found, Choice):
            return found
        why = found or why
    if node.op in _PRODUCTS and not own_way and made.bound <= 2.0**53:
        return Choice("double", f"sums of products, exact in float64 ({why})", "own")
    return Choice("reference", why, "own")


_TABLE: Final = (_Try(passing.table, "passes", any_way=True),)
_PAIRS: Final = _Try(passing.pair_table, "passes", any_way=True)
_POOL: Final = (_Try(sums.sum_pool, "passes"),)
_ADD: Final = (_Try(passing.add, "passes"), _PAIRS, _Try(passing.landed_sum, "passes", any_way=True))

_TRIES: Final[Mapping[str, tuple[_Try, ...]]] = {
    **dict.fromkeys(MOVERS | JOINERS, (_Try(passing.mover, "torch"),)),
    "conv1d": (_Try(sums.conv, "conv"),),
    "conv2d": (_Try(sums.conv, "conv"),),
    "linear": (_Try(sums.linear, "conv"), _Try(sums.matrices, "products")),
    "matmul": (_Try(sums.matmul, "conv"), _Try(sums.matrices, "products")),
    "affine": (_Try(sums.affine, "conv"),),
    "mul": (_Try(sums.multiply, "products"), _PAIRS),
    "add": _ADD,
    "sub": _ADD,
    "mean": (_Try(sums.reduce, "passes"),),
    "sum": (_Try(sums.reduce, "passes"),),
    "pad": (_Try(passing.pad, "torch", any_way=True),),
    "relu": (_Try(passing.clamp, "passes"),),
    "clamp": (_Try(passing.clamp, "passes"),),
    "max_pool1d": (_Try(passing.max_pool, "passes"),),
    "max_pool2d": (_Try(passing.max_pool, "passes"),),
    "avg_pool1d": _POOL,
    "avg_pool2d": _POOL,
    "adaptive_avg_pool1d": _POOL,
    "adaptive_avg_pool2d": _POOL,
}
