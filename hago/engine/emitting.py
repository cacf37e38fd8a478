"""Call: what the lowering makes of a node for a kernel, and what every kind of call is made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor

from hago.engine.calls import RowsCall
from hago.engine.chains import Chains
from hago.engine.kernels import Kernels
from hago.engine.moves import period, stored_type
from hago.engine.pack import Packs
from hago.engine.products import Place
from hago.engine.tail import Tail
from hago.engine.wants import Wants
from hago.graph import Node
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
