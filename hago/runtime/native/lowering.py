"""Conversions: passes that quantize, requantize or dequantize a whole value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hago.arithmetic.numerics import clip_range, passes_float32
from hago.arithmetic.types import Edge, SimQ
from hago.graph.graph import CONST, INPUT, OUTPUT, Node
from hago.graph.schedule import Step
from hago.plan.plan import Plan
from hago.runtime.native import library as native
from hago.runtime.native.calls import QuantizeCall, RowsCall
from hago.runtime.native.chains import Chains, largest_value
from hago.runtime.native.choice import Choice, axis_of
from hago.runtime.native.choose import choose
from hago.runtime.native.emit import EMIT
from hago.runtime.native.emitting import Call
from hago.runtime.native.epilogue import Stored, Tail
from hago.runtime.native.layouts import Wants, Wiring
from hago.runtime.native.requantize import move_of, period, stored_type, to_real
from hago.runtime.native.self_test import Kernels
from hago.runtime.native.weights import Packs
from hago.runtime.reference import compute_float, compute_integer, move_stored, real_value, store

Run = Callable[[Sequence[Any]], Sequence[Any]]


def conversion(plan: Plan, root: str, simq: SimQ, calls: Any) -> tuple[str, Run]:
    """The kernel and the call that make a form of a root's value.

    Args:
        calls: the library, or None.
    """
    found: Run | None = None
    if calls is not None:
        found = _quantize(plan, root, simq, calls) if simq.source is None else _rows(plan, root, simq, calls)
    if found is not None:
        return f"native {simq.kind}", found
    how = plan.hardware.requantize
    if simq.target is None:
        return "reference", lambda values: (real_value(simq, values[0]),)
    return "reference", lambda values: (move_stored(values[0], simq, how),)


def _quantize(plan: Plan, root: str, simq: SimQ, calls: Any) -> Run | None:
    """Float32 values; what float nodes make may be of any dtype, and goes the way of the reference where it is."""
    target, node, how = simq.target, plan.graph[root], plan.hardware.requantize
    assert target is not None
    code, dtype = stored_type(target), node.attrs.get("dtype", "float32") if node.op == INPUT else "float32"
    if dtype != "float32" or code is None or target.scale.numel() > 1 or passes_float32(target):
        return None
    low, high = (float(v) for v in clip_range(target))
    rounding, stored = native.ROUNDINGS.index(how.rounding), (code, int(target.zero_point))
    scale = float(target.scale.to(torch.float32))
    quantize = QuantizeCall(calls, scale, low, high, rounding, stored, target.dtype.torch)

    def run(values: Sequence[Any]) -> Sequence[Any]:
        if values[0].dtype == torch.float32:
            return quantize(values)
        return (move_stored(values[0], simq, how),)

    return quantize if node.op == INPUT else run


def _rows(plan: Plan, root: str, simq: SimQ, calls: Any) -> RowsCall | None:
    source, shape = simq.source, plan.graph[root].shape
    assert source is not None
    code, made = stored_type(source), plan.nodes.get(root)
    axis = axis_of(source.scale, len(shape or ()))
    if code is None or made is None or not shape or isinstance(axis, str):
        return None
    channels = 1 if axis is None else shape[axis]
    if simq.target is None:
        moved = to_real(source, channels)
    elif stored_type(simq.target) is None:
        return None
    else:
        moved = move_of(simq, plan.hardware.requantize, channels, largest_value(made))
    if isinstance(moved, str):
        return None
    tail = Tail(channels, [], stored=[Stored(root, moved, simq.target)]).build()
    return RowsCall(calls, tail, (code, int(source.zero_point)), axis, period(channels))


# ---------------------------------------------------------------- lowering
# Lowering: a wired Plan to Steps, node by node in order.
# Every root is given the kernel that `choice` names, with its chain (`chains`); the forms of its value that the
# kernel does not store are passes of their own.


@dataclass(frozen=True, slots=True)
class Ran:
    """Which nodes a kernel computes, in order, and why it was chosen."""

    nodes: tuple[str, ...]
    kernel: str
    why: str


class Lowering:
    """Makes the steps of one Plan; lives while an executor is built.

    Args:
        wiring: the Plan and its skipped nodes.
        packs: packed weights, shared by the executors of one search.
        kernels: which may be used.
    """

    def __init__(self, wiring: Wiring, packs: Packs, kernels: Kernels) -> None:
        self.wiring, self.plan, self.graph = wiring, wiring.plan, wiring.plan.graph
        self.packs, self.kernels = packs, kernels
        sums, passes = kernels.conv.exact or kernels.onednn.exact, kernels.calls is not None
        products, words = passes and kernels.products.exact, kernels.conv.exact and kernels.words.exact
        self.choices: dict[str, Choice] = {
            n.name: choose(self.plan, n, conv=sums, passes=passes, products=products, words=words)
            for n in self.graph
            if n.op not in (INPUT, CONST) and n.name not in wiring.skipped
        }
        self.wants = Wants(wiring, self.choices)
        self.made: set[str] = set(self.graph.consts)
        self.chains = Chains(self.wants, self.made, packs)
        self.steps: list[Step] = []
        self.ran: list[Ran] = []
        self.sizes: list[int] = []  # bytes of the largest value of each step at batch 1
        self._done: set[str] = set()

    def lower(self) -> list[Step]:
        """The steps, in order."""
        for node in self.graph:
            if node.op in (INPUT, CONST):
                self.made.add(node.name)
                self._convert(node.name)
            elif node.name not in self.wiring.skipped and node.name not in self._done:
                self._node(node, self.choices[node.name])
        return self.steps

    @property
    def outputs(self) -> list[str]:
        """The names of the values that the graph's outputs are."""
        return [self.wants.names[Edge(OUTPUT, i)] for i in range(len(self.graph.outputs))]

    def _node(self, node: Node, choice: Choice) -> None:
        why = choice.why
        if choice.kind == "float":
            return self._whole(node, "float", why, self._float(node))
        if choice.kind == "double":
            return self._whole(node, "torch in float64", why, self._reference(node, torch.float64))
        if choice.kind != "reference":
            call = EMIT[choice.kind](self, node, choice)
            if isinstance(call, Call):
                return self._add(call.nodes, call.kernel, why, call.inputs, call.outputs, call.run)
            why = call
        return self._whole(node, "reference", why, self._reference(node))

    def _whole(self, node: Node, kernel: str, why: str, run: Run) -> None:
        """A step that makes a node's own value of its inputs."""
        self._add((node.name,), kernel, why, [self.wants.names[e] for e in node.edges], (node.name,), run)

    def _float(self, node: Node) -> Run:
        plan, weights = self.plan, self.plan.weights
        stored = {e.slot: store(w.integers, w.qparams) for e in node.edges if (w := weights.get(e))}
        # what was dequantized before arrives as it is read
        left = {e: plan.edges[e] if self.wants.is_own(e) else None for e in node.edges}

        def run(values: Sequence[Any]) -> Sequence[Any]:
            return (compute_float(plan, node, values, lambda _, slot: stored[slot], left),)

        return run

    def _reference(self, node: Node, carrier: torch.dtype = torch.int64) -> Run:
        plan, made = self.plan, self.plan.nodes[node.name]
        # what was requantized before arrives as the operand
        left = [s if self.wants.is_own(e) else None for e, s in zip(node.edges, made.simqs, strict=True)]
        told = replace(made, simqs=tuple(left))

        def constant(name: str, slot: int) -> Tensor:
            qparams = made.operands[slot]
            assert qparams is not None
            return store(made.consts[slot], qparams)

        def run(values: Sequence[Any]) -> Sequence[Tensor]:
            return (compute_integer(plan, node, told, values, constant, carrier=carrier),)

        return run

    # ------------------------------------------------------------ steps
    def _add(
        self, nodes: Sequence[str], kernel: str, why: str, inputs: Sequence[str], outputs: Sequence[str], run: Run
    ) -> None:
        said = [(n, self.plan.nodes[n].digest if n in self.plan.nodes else None) for n in nodes]
        edges = [self._edge_key(e) for n in nodes for e in self.graph[n].edges]
        forms = [self._form_key(nodes[-1], name) for name in outputs]
        digest = repr((kernel, said, edges, forms)).encode()
        self.steps.append(Step(tuple(inputs), tuple(outputs), run, digest, (None,) * len(outputs)))
        self.ran.append(Ran(tuple(nodes), kernel, why))
        self.made.update(outputs)
        self.sizes.append(max(self._bytes(nodes[-1], name) for name in outputs))
        self._done.update(nodes)
        self._convert(nodes[-1])

    def _edge_key(self, edge: Edge) -> object:
        simq = self.plan.edges[edge]
        return None if simq is None else simq.key

    def _form_key(self, root: str, name: str) -> object:
        """What tells the forms of a value apart."""
        simq, made = self.wants.forms(root).get(name), self.plan.nodes.get(root)
        return simq.key if simq is not None else None if made is None else made.out.key

    def _bytes(self, root: str, name: str) -> int:
        """What a value takes at batch 1."""
        simq, made = self.wants.forms(root).get(name), self.plan.nodes.get(root)
        qparams = simq.target if simq is not None else None if made is None else made.out
        each = 4 if qparams is None else qparams.dtype.torch.itemsize
        return each * math.prod(self.graph[root].shape or ())

    @property
    def by_sample(self) -> bool:
        """Whether every sample of a batch is computed by itself, whatever else is in the batch."""
        nodes = [n for n in self.graph if n.op not in (INPUT, CONST) and n.name not in self.wiring.skipped]
        ends = [n.shape for n in (self.graph[name] for name in (*self.graph.inputs, *self.graph.outputs))]
        return (
            bool(nodes) and all(s is not None and s[:1] == (1,) for s in ends) and all(map(self._keeps_samples, nodes))
        )

    def _keeps_samples(self, node: Node) -> bool:
        kind, attrs = self.choices[node.name].kind, node.attrs
        if node.shape is None or node.shape[:1] != (1,) or kind in ("float", "reference", "double"):
            return False
        if kind in ("matmul", "multiply", "spread_add") and not self._batches_agree(node):
            return False
        if kind != "move":
            return node.op != "matmul" or len(node.shape) == len(self.graph[node.inputs[0]].shape or ())
        first = {"reshape": "shape", "permute": "axes"}.get(node.op)
        if first is not None:
            return bool(attrs[first][0] == (-1 if node.op == "reshape" else 0))
        return node.op in ("concat", "slice") and attrs["axis"] % len(node.shape) > 0

    def _batches_agree(self, node: Node) -> bool:
        """Whether the first axis of every operand that is no constant is that of the result."""
        made, rank = self.plan.nodes[node.name], len(node.shape or ())
        free = [s for s in range(len(node.inputs)) if s not in made.consts]
        matrices = node.op in ("matmul", "linear") and 1 in free and rank < 3
        return not matrices and all(len(self.graph[node.inputs[s]].shape or ()) == rank for s in free)

    def _convert(self, root: str) -> None:
        """Passes for the forms of a value that its kernel did not store."""
        for name, simq in self.wants.forms(root).items():
            if name not in self.made:
                assert simq is not None
                kernel, run = conversion(self.plan, root, simq, self.kernels.calls)
                digest = repr((kernel, simq.key)).encode()
                self.steps.append(Step((root,), (name,), run, digest, (None,)))
                self.sizes.append(self._bytes(root, name))
                self.made.add(name)
