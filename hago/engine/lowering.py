"""Lowering: a wired Plan to Steps.

Every node that stands for itself (not skipped by the wiring) is a *root*. Its readers want its value in one
or more forms: its own, requantized to a target, or real. A kernel that sums emits as many of them at once as
it can, with a clamp or a residual add that alone reads it done on the way; the rest are passes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hago.engine import native
from hago.engine.calls import ConvCall, PoolCall, QuantizeCall, RowsCall, TableCall
from hago.engine.choice import Choice, axis_of, choose, largest_of, movable
from hago.engine.kernels import Kernels
from hago.engine.moves import SLACK, Moved, move_of, period, stored_type, to_real
from hago.engine.pack import Packs
from hago.engine.tail import MOST_OUTPUTS, Added, Stored, Tail, raw, register_of
from hago.engine.wiring import Wiring
from hago.execute import compute_real
from hago.graph import CONST, INPUT, OUTPUT, Node
from hago.numerics import clip_range
from hago.plan import NodePlan, Plan
from hago.realization import compute_integer, move_stored, real_value, store
from hago.steps import Step
from hago.types import Edge, QParams, SimQ


@dataclass(frozen=True, slots=True)
class Ran:
    """Which nodes a kernel computes, in order, and why it was chosen."""

    nodes: tuple[str, ...]
    kernel: str
    why: str


class Lowering:
    """Makes the steps of one Plan; lives while an engine is built.

    Args:
        wiring: the Plan and its skipped nodes.
        packs: packed weights, shared by the engines of one search.
    """

    def __init__(self, wiring: Wiring, packs: Packs, kernels: Kernels) -> None:
        self.wiring, self.plan, self.graph = wiring, wiring.plan, wiring.plan.graph
        self.packs, self.constant = packs, _quanta(wiring.plan)
        self.calls = kernels.calls
        self.how = self.plan.hardware.requantize
        usable = {"conv": kernels.conv.exact, "passes": self.calls is not None}
        self.choices: dict[str, Choice] = {
            n.name: choose(self.plan, n, **usable)
            for n in self.graph
            if n.op not in (INPUT, CONST) and n.name not in wiring.skipped
        }
        self.steps: list[Step] = []
        self.ran: list[Ran] = []
        self.made: set[str] = set(self.graph.consts)
        self.done: set[str] = set()
        self.names: dict[Edge, str] = {}
        self.wanted: dict[str, dict[str, SimQ | None]] = {}
        for edge in self.graph.edges:
            self._want(edge)

    def lower(self) -> list[Step]:
        """The steps, in order."""
        for node in self.graph:
            if node.op in (INPUT, CONST):
                self.made.add(node.name)
                self._convert(node.name)
            elif node.name not in self.wiring.skipped and node.name not in self.done:
                _EMIT[self.choices[node.name].kind](self, node, self.choices[node.name])
        return self.steps

    @property
    def outputs(self) -> list[str]:
        """The names of the values that the graph's outputs are."""
        return [self.names[Edge(OUTPUT, i)] for i in range(len(self.graph.outputs))]

    # ------------------------------------------------------------ who wants what
    def _want(self, edge: Edge) -> None:
        if edge.dst in self.wiring.skipped:
            return
        root, simq = self.wiring.root(self.graph.source(edge)), self.plan.edges[edge]
        wanted = self.wanted.setdefault(root, {})
        name = root
        if edge.dst == OUTPUT:
            name = root if simq is None else f"{root}!"
        elif simq is not None and self.graph[root].op != CONST and self._moved_before(edge, simq):
            same = [k for k, s in wanted.items() if s is not None and s.target is simq.target]
            name = same[0] if same else f"{root}>{1 + len(wanted)}"
        self.names[edge] = name
        wanted.setdefault(name, None if name == root else simq)

    def _moved_before(self, edge: Edge, simq: SimQ) -> bool:
        """Whether the reader takes what the edge makes, rather than doing it itself."""
        choice = self.choices[edge.dst]
        return choice.takes == "moved" or (choice.kind == "add" and simq.source is None)

    def _readers(self, root: str) -> list[Edge]:
        """The edges that a root's value travels on, past skipped nodes."""
        found: list[Edge] = []
        for edge in self.graph.out_edges[root]:
            found += self._readers(edge.dst) if edge.dst in self.wiring.skipped else [edge]
        return found

    # ------------------------------------------------------------ chains
    def _chain(self, node: Node, axis: int | None, channels: int) -> Tail | None:
        """What can follow the node's sums in the same kernel; None where not even its own value can."""
        register = register_of(self.plan.nodes[node.name])
        assert not isinstance(register, str)
        tail = Tail(channels, [node.name], *register)
        end = node
        if self.plan.nodes[node.name].out_simq is None:
            end = self._absorb_add(tail, node)
        return tail if self._finish(tail, end, axis if end is node else None) else None

    def _finish(self, tail: Tail, end: Node, axis: int | None) -> bool:
        """The end of a chain: requantization at the output, a clamp, and what is stored."""
        made = self.plan.nodes[end.name]
        if made.out_simq is not None:
            moved = self._move(made.out_simq, made, tail.channels)
            if moved is None or stored_type(made.out) is None:
                return False
            tail.stored = [Stored(end.name, moved, made.out)]
        end = self._absorb_clamp(tail, end, axis)
        if tail.stored:  # requantized at the output: further forms are passes of their own
            tail.stored = [replace(tail.stored[0], name=end.name)]
        else:
            self._store(tail, end)
        return bool(tail.stored)

    def _sole(self, name: str) -> Node | None:
        """The node that alone reads a root, through one edge."""
        readers = self._readers(name)
        sole = len(readers) == 1 and readers[0].dst != OUTPUT
        return self.graph[readers[0].dst] if sole else None

    def _absorb_add(self, tail: Tail, node: Node) -> Node:
        """The add that alone reads the node, where its other operand is there already; else the node."""
        end = self._sole(node.name)
        if end is None or self.choices[end.name].kind != "add" or end.name in self.wiring.skipped:
            return node
        slot = 0 if self.wiring.root(end.inputs[0]) == node.name else 1
        other = self.names[end.edges[1 - slot]]
        if other not in self.made or self.graph[end.name].shape != node.shape:
            return node
        added, out = self._added(tail, end, slot), self.plan.nodes[end.name]
        if added is None or (out.out_simq is not None and self._move(out.out_simq, out, tail.channels) is None):
            return node
        tail.added = added
        tail.nodes.append(end.name)
        return end

    def _added(self, tail: Tail, end: Node, slot: int) -> Added | None:
        plan = self.plan.nodes[end.name]
        moves: list[Moved] = []
        for s in (slot, 1 - slot):
            simq = plan.simqs[s]
            integer = simq is not None and simq.source is not None
            source = self.plan.nodes.get(self.wiring.root(end.inputs[s]))
            largest = _largest(source) if source is not None else 0.0
            found = move_of(simq if integer else None, self.how, tail.channels, largest)
            if isinstance(found, str):
                return None
            moves.append(found)
        simq, target = plan.simqs[1 - slot], plan.operands[1 - slot]
        qparams = target if simq is None or simq.source is None else simq.source
        if qparams is None or stored_type(qparams) is None:
            return None
        return Added(self.names[end.edges[1 - slot]], qparams, moves[0], moves[1])

    def _absorb_clamp(self, tail: Tail, node: Node, axis: int | None) -> Node:
        """The clamp that alone reads the node, if its limits can be had; else the node."""
        end = self._sole(node.name)
        if end is None or self.choices[end.name].kind != "clamp" or self.plan.edges[end.edges[0]] is not None:
            return node
        form, made = self.plan.ops[end.op].integer, self.plan.nodes[end.name]
        assert form is not None and form.limits is not None
        low, high = form.limits(made.attrs)
        numbers = all(v is None or isinstance(v, int) for v in (low, high))
        if made.out_simq is not None or stored_type(made.out) is None or not (numbers or axis is not None):
            return node
        if tail.stored:
            if not numbers or int(made.out.zero_point) != int(self.plan.nodes[node.name].out.zero_point):
                return node
            tail.clamp_stored(low, high)
        else:
            if not all(v is None or isinstance(v, int) or v.numel() in (1, tail.channels) for v in (low, high)):
                return node
            tail.clamp(low, high)
        tail.nodes.append(end.name)
        return end

    def _store(self, tail: Tail, end: Node) -> None:
        """As many of the forms that readers want as the kernel can store."""
        made = self.plan.nodes[end.name]
        wanted = self.wanted.get(end.name, {end.name: None})
        found: list[Stored] = []
        for name, simq in wanted.items():
            stored = self._stored(name, simq, made, tail.channels)
            if stored is not None:
                found.append(stored)
        left = len(wanted) - len(found)
        own = [s for s in found if s.name == end.name]
        if left + max(0, len(found) - MOST_OUTPUTS) and not own:
            plain = raw(end.name, made.out)
            found = [] if isinstance(plain, str) else [plain, *found]
        found.sort(key=lambda s: s.name != end.name)  # its own value first: the rest can be had from it
        tail.stored = found[:MOST_OUTPUTS]

    def _stored(self, name: str, simq: SimQ | None, made: NodePlan, channels: int) -> Stored | None:
        if simq is None:
            plain = raw(name, made.out)
            return None if isinstance(plain, str) else plain
        if simq.target is None:
            assert simq.source is not None
            real = to_real(simq.source, channels)
            return None if isinstance(real, str) else Stored(name, real, None)
        moved = self._move(simq, made, channels)
        return None if moved is None else Stored(name, moved, simq.target)

    def _move(self, simq: SimQ, made: NodePlan, channels: int) -> Moved | None:
        assert simq.source is not None and simq.target is not None
        if stored_type(simq.target) is None:
            return None
        found = move_of(simq, self.how, channels, _largest(made))
        return None if isinstance(found, str) else found

    # ------------------------------------------------------------ kernels that sum
    def _conv(self, node: Node, choice: Choice) -> None:
        made, g = self.plan.nodes[node.name], choice.geometry
        assert g is not None and made.operands[0] is not None
        tail = self._chain(node, 1 if node.op.startswith("conv") else -1, g.out_channels)
        if tail is None:
            return self._reference(node, Choice("reference", "what follows has no native form", "own"))
        x = made.operands[0]
        packed = self.packs(made.consts[1], g, node.op == "matmul")
        zero, signed = int(x.zero_point), x.dtype.torch == torch.int8
        offset = packed.offsets(made.consts.get(2), zero + 128 * signed, g.groups)
        zeros = torch.full((g.channels + SLACK,), zero % 256, dtype=torch.uint8)
        template = native.conv_of(g, packed, signed, offset, zeros)
        built = tail.build()
        kept = (packed.weight, offset, zeros)
        call = ConvCall(self.calls, template, g, built, kept, not node.op.startswith("conv"))
        inputs = (self.names[node.edges[0]], *((tail.added.name,) if tail.added else ()))
        self._step(tail.nodes, "native conv", choice.why, inputs, [s.name for s in tail.stored], call)

    def _add(self, node: Node, choice: Choice) -> None:
        made = self.plan.nodes[node.name]
        scales = [s.source.scale for s in made.simqs if s is not None and s.source is not None]
        ndim = len(node.shape or ())
        axes = {axis_of(s, ndim) for s in scales} - {None}
        axis = next(iter(axes), None)
        if len(axes) > 1 or isinstance(axis, str):
            return self._reference(node, Choice("reference", "scales that vary along two axes", "own"))
        channels = 1 if axis is None else (node.shape or ())[axis]
        tail = Tail(channels, [node.name])
        tail.added = self._added(tail, node, 0)
        if tail.added is None or not self._finish(tail, node, None):
            return self._reference(node, Choice("reference", "an operand that the pass cannot requantize", "own"))
        first = made.operands[0] if (s := made.simqs[0]) is None or s.source is None else s.source
        assert first is not None
        self._rows(tail, first, axis, self.names[node.edges[0]], "native add", choice.why)

    def _clamp(self, node: Node, choice: Choice) -> None:
        made = self.plan.nodes[node.name]
        form, x = self.plan.ops[node.op].integer, made.operands[0]
        assert form is not None and form.limits is not None and x is not None
        axis = axis_of(made.out.scale, len(node.shape or ()))
        if isinstance(axis, str):
            return self._reference(node, Choice("reference", axis, "own"))
        tail = Tail(1 if axis is None else (node.shape or ())[axis], [node.name])
        tail.clamp(*form.limits(made.attrs))
        if not self._finish(tail, node, axis):
            return self._reference(node, Choice("reference", "what follows has no native form", "own"))
        self._rows(tail, x, axis, self.names[node.edges[0]], "native clamp", choice.why)

    def _rows(self, tail: Tail, source: QParams, axis: int | None, name: str, kernel: str, why: str) -> None:
        code = stored_type(source)
        assert code is not None
        call = RowsCall(self.calls, tail.build(), (code, int(source.zero_point)), axis, period(tail.channels))
        inputs = (name, *((tail.added.name,) if tail.added else ()))
        self._step(tail.nodes, kernel, why, inputs, [s.name for s in tail.stored], call)

    def _sum_pool(self, node: Node, choice: Choice) -> None:
        made, shape = self.plan.nodes[node.name], node.shape or ()
        x = made.operands[0]
        tail = self._chain(node, 1, shape[1])
        code = None if x is None else stored_type(x)
        if tail is None or x is None or code is None:
            return self._reference(node, Choice("reference", "what follows has no native form", "own"))
        call = PoolCall(self.calls, *_window(node, made), (code, int(x.zero_point)), tail.build())
        names = [s.name for s in tail.stored]
        self._step(tail.nodes, "native sum pool", choice.why, (self.names[node.edges[0]],), names, call)

    # ------------------------------------------------------------ kernels that store one value
    def _max_pool(self, node: Node, choice: Choice) -> None:
        made = self.plan.nodes[node.name]
        code = stored_type(made.out)
        assert code is not None
        call = PoolCall(self.calls, *_window(node, made), (code, 0), None)
        self._step([node.name], "native max pool", choice.why, (self.names[node.edges[0]],), [node.name], call)

    def _table(self, node: Node, choice: Choice) -> None:
        made = self.plan.nodes[node.name]
        x = made.operands[0]
        assert made.table is not None and x is not None
        entries = torch.zeros(256, dtype=made.out.dtype.torch)
        places = torch.arange(x.qmin, x.qmax + 1) % 256
        entries[places] = store(made.table, made.out)
        call = TableCall(self.calls, entries, made.out.dtype.torch)
        self._step([node.name], "native table", choice.why, (self.names[node.edges[0]],), [node.name], call)

    def _move_values(self, node: Node, choice: Choice) -> None:
        made, rule = self.plan.nodes[node.name], self.plan.ops[node.op]

        def run(values: Sequence[Any]) -> Sequence[Tensor]:
            return (rule.compute(made.attrs, *values),)

        self._step([node.name], "torch on bytes", choice.why, [self.names[e] for e in node.edges], [node.name], run)

    def _reference(self, node: Node, choice: Choice) -> None:
        plan, constant, made = self.plan, self.constant, self.plan.nodes[node.name]
        asis = [self.names[e] != self.wiring.root(self.graph.source(e)) for e in node.edges]
        left = tuple(None if moved else s for s, moved in zip(made.simqs, asis, strict=True))
        made = replace(made, simqs=left)  # what was requantized before arrives as the operand

        def run(values: Sequence[Any]) -> Sequence[Tensor]:
            return (compute_integer(plan, node, made, values, constant),)

        self._step([node.name], "reference", choice.why, [self.names[e] for e in node.edges], [node.name], run)

    def _float(self, node: Node, choice: Choice) -> None:
        ops, simqs = self.plan.ops, [self.plan.edges[e] for e in node.edges]

        def run(values: Sequence[Any]) -> Sequence[Any]:
            return (compute_real(node, [real_value(s, v) for s, v in zip(simqs, values, strict=True)], ops),)

        self._step([node.name], "float", choice.why, [self.names[e] for e in node.edges], [node.name], run)

    def _step(
        self,
        nodes: Sequence[str],
        kernel: str,
        why: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        run: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> None:
        said = [(n, self.plan.nodes[n].digest if n in self.plan.nodes else None) for n in nodes]
        edges = [self._edge_key(e) for n in nodes for e in self.graph[n].edges]
        forms = [self._form_key(nodes[-1], name) for name in outputs]
        digest = repr((kernel, said, edges, forms)).encode()
        self.steps.append(Step(tuple(inputs), tuple(outputs), run, digest, (None,) * len(outputs)))
        self.ran.append(Ran(tuple(nodes), kernel, why))
        self.made.update(outputs)
        self.done.update(nodes)
        self._convert(nodes[-1])

    def _edge_key(self, edge: Edge) -> object:
        simq = self.plan.edges[edge]
        return None if simq is None else simq.key

    def _form_key(self, root: str, name: str) -> object:
        """What tells the forms of a value apart."""
        simq = self.wanted.get(root, {}).get(name)
        made = self.plan.nodes.get(root)
        return simq.key if simq is not None else None if made is None else made.out.key

    # ------------------------------------------------------------ what is left to requantize
    def _convert(self, root: str) -> None:
        """Passes for the forms of a value that its kernel did not store."""
        for name, simq in self.wanted.get(root, {}).items():
            if name not in self.made:
                assert simq is not None
                kernel, run = self._conversion(root, simq)
                digest = repr((kernel, simq.key)).encode()
                self.steps.append(Step((root,), (name,), run, digest, (None,)))
                self.made.add(name)

    def _conversion(self, root: str, simq: SimQ) -> tuple[str, Callable[[Sequence[Any]], Sequence[Any]]]:
        shape = self.graph[root].shape or ()
        if self.calls is not None and simq.source is None and (call := self._quantize(root, simq)) is not None:
            return "native quantize", call
        if self.calls is not None and simq.source is not None and simq.target is not None and shape:
            axis = axis_of(simq.source.scale, len(shape))
            channels = shape[axis] if isinstance(axis, int) else 1
            if not movable(simq, self.how, len(shape), channels):
                assert not isinstance(axis, str)
                made = self.plan.nodes[root]
                moved = move_of(simq, self.how, channels, _largest(made))
                code = stored_type(simq.source)
                if not isinstance(moved, str) and code is not None:
                    tail = Tail(channels, [], stored=[Stored(root, moved, simq.target)]).build()
                    source = (code, int(simq.source.zero_point))
                    return "native requantize", RowsCall(self.calls, tail, source, axis, period(channels))
        if simq.target is None:
            return "reference", lambda values: (real_value(simq, values[0]),)
        return "reference", lambda values: (move_stored(values[0], simq, self.how),)

    def _quantize(self, root: str, simq: SimQ) -> QuantizeCall | None:
        target = simq.target
        assert target is not None
        real = self.graph[root].attrs.get("dtype", "float32") == "float32" and self.graph[root].op == INPUT
        code = stored_type(target)
        if not real or code is None or target.scale.numel() > 1 or target.qmax - target.qmin >= 1 << 24:
            return None
        low, high = (float(v) for v in clip_range(target))
        rounding = native.ROUNDINGS.index(self.how.rounding)
        scale = float(target.scale.to(torch.float32))
        return QuantizeCall(self.calls, scale, low, high, rounding, (code, int(target.zero_point)), target.dtype.torch)


def _largest(made: NodePlan) -> float:
    """The largest |c| of a node's own value."""
    emits = made.out_simq is None and made.table is None and made.proved
    return min(largest_of(made.out), made.bound) if emits and not made.within_hull else largest_of(made.out)


def _window(node: Node, made: NodePlan) -> tuple[tuple[int, ...], Callable[[Sequence[int]], tuple[int, ...]]]:
    """(kernel, stride, padding, dilation, two each; the size of the result from that of the image)."""
    a = made.attrs
    if "kernel_size" in a:
        dims = len(a["kernel_size"])
        kernel, stride, padding = a["kernel_size"], a["stride"], a["padding"]
        dilation = a.get("dilation", [1] * dims)
    else:
        kernel = [i // o for i, o in zip(a["input_size"], a["output_size"], strict=True)]
        dims = len(kernel)
        stride, padding, dilation = kernel, [0] * dims, [1] * dims
    ones = [1] * (2 - dims)
    pairs = [*ones, *kernel, *ones, *stride, *[0] * (2 - dims), *padding, *ones, *dilation]

    def size(image: Sequence[int]) -> tuple[int, ...]:
        parts = zip(image, kernel, stride, padding, dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in parts)

    return tuple(pairs), size


def _quanta(plan: Plan) -> Callable[[str, int], Tensor]:
    """Constant operands as they rest."""

    def constant(node: str, slot: int) -> Tensor:
        made = plan.nodes[node]
        qparams = made.operands[slot]
        assert qparams is not None
        return store(made.consts[slot], qparams)

    return constant


_EMIT: dict[str, Callable[[Lowering, Node, Choice], None]] = {
    "conv": Lowering._conv,
    "add": Lowering._add,
    "clamp": Lowering._clamp,
    "max_pool": Lowering._max_pool,
    "sum_pool": Lowering._sum_pool,
    "table": Lowering._table,
    "move": Lowering._move_values,
    "reference": Lowering._reference,
    "float": Lowering._float,
}
