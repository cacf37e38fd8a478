"""Live: one forward pass of a Plan whose weights and thresholds are being trained.

The rules that give an operand its scale are those of `operands`; here their inputs are live, and
gradients reach them. What cannot change in training (signatures, bits, signs) is read off the Plan
that training started from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.errors import HagoError
from hago.execute import compute_real
from hago.graph import Graph, Node
from hago.hardware import Hardware
from hago.numerics import Lost, apply_simq
from hago.operands import ThresholdSource
from hago.ops._integer import IntegerForm, Site
from hago.plan import NodePlan
from hago.qat.moves import Ends, move, to_real
from hago.qat.operands import LiveOperands, RangeThresholds, extremes
from hago.qat.ranges import Range
from hago.qat.straight_through import straight_through
from hago.qat.training import Training
from hago.types import Edge, QParams, SimQ

#: In the place of the state of a range that takes a gradient.
_MOVING: Final = object()


class LivePass:
    """One forward pass, quantized; a `Step` of `execute.run`, and the Owner of its operands.

    Args:
        observing: whether ranges take in what they see.
    """

    def __init__(self, training: Training, *, observing: bool) -> None:
        plan = training.plan
        self.training, self.plan, self.observing = training, plan, observing
        self.graph: Graph = plan.graph
        self.hardware: Hardware = plan.hardware
        self.topology, self.ops = training.topology, plan.ops
        self.thresholds: ThresholdSource = RangeThresholds(training.ranges)
        self.gradients: Callable[[Tensor], Tensor] | None = None
        self.qparams: dict[str, QParams | None] = {}
        self._moved: dict[tuple[str, int], Tensor] = {}
        self._made: dict[tuple[int, int, str, bool], QParams] = {}
        self._seen: set[int] = set()
        self._interned: list[QParams] = []

    def intern(self, qparams: QParams) -> QParams:
        """Live qparams are made once per range; equal ones are not looked for.

        They live as long as the pass, which tells them apart by identity.
        """
        self._interned.append(qparams)
        return qparams

    def const(self, name: str, target: QParams) -> Tensor:
        """Never asked: constants are operands like others here.

        Raises:
            HagoError: always.
        """
        raise HagoError(f"constant {name!r} is being trained; it has no integers yet")

    # ------------------------------------------------------------ one node
    def __call__(self, node: Node, values: Sequence[Any]) -> Any:
        plan = self.plan.nodes.get(node.name)
        if plan is None:
            return self._float(node, values)
        if node.name in self.training.cut:
            self.qparams[node.name] = self.qparams[node.inputs[0]]
            return values[0]
        self._observe_operands(node, values)
        targets = self._targets(node, plan, values)
        operands = [self._operand(node, plan, targets[slot], slot, v) for slot, v in enumerate(values)]
        return self._compute(node, plan, targets, operands)

    def _float(self, node: Node, values: Sequence[Any]) -> Any:
        """A float node, whose weight may rest as integers."""
        self.qparams[node.name] = None
        self._observe_operands(node, values)
        real = [
            self._weight(node, e, v) if e in self.plan.weights else self.real(s, v)
            for e, s, v in zip(node.edges, node.inputs, values, strict=True)
        ]
        return compute_real(node, real, self.ops)

    def _weight(self, node: Node, edge: Edge, value: Tensor) -> Tensor:
        """What a float node reads of a weight that rests as integers."""
        dtype = self.plan.weights[edge].desc.in_dtype(edge.slot)
        bits = self.training.bits[self.training.groups[edge]]
        target = self._operands(node).quantized(edge.slot, bits, dtype)
        return to_real(self._quantized(node, edge.slot, value, target, None), target).contiguous()

    def real(self, source: str, value: Any) -> Any:
        """A value as a float node, or the caller, reads it."""
        qparams = self.qparams.get(source)
        if qparams is not None:
            value = to_real(value, qparams)
        return value.contiguous() if isinstance(value, Tensor) else value

    def _operand(self, node: Node, plan: NodePlan, target: QParams | None, slot: int, value: Any) -> Any:
        name = node.inputs[slot]
        source = self.qparams.get(name)
        if target is None:
            return self.real(name, value)
        if target is source:
            return value.to(self._carrier(plan))
        return self._quantized(node, slot, value, target, source).to(self._carrier(plan))

    def _quantized(self, node: Node, slot: int, value: Any, target: QParams, source: QParams | None) -> Tensor:
        """The centered integers of an operand, made once for all edges that ask for the same."""
        name, edge = node.inputs[slot], node.edges[slot]
        key = (name, id(target))
        found = self._moved.get(key)
        if found is None:
            const = name in self.graph.consts
            found = move(
                value.to(torch.float64) if const else value,
                source,
                self._narrowed(name, target),
                self.hardware.requantize,
                self.training.slope,
                cut=name in self.training.cut,
                ends=self._moving_ends(edge, target),
            )
            self._moved[key] = found
        return found

    def _narrowed(self, name: str, target: QParams) -> QParams:
        """The target past a relu that is part of its clipping."""
        if name not in self.training.cut:
            return target
        return replace(target, qmin=max(target.qmin, int(target.zero_point)))

    def _moving_ends(self, edge: Edge, target: QParams) -> Ends | None:
        found = self.training.range_of(edge)
        if found is None or not (found.moves and found.two_sided) or found.low.numel() > 1:
            return None
        low, high = found.ends()
        return Ends((low / target.scale).reshape(()), (high / target.scale).reshape(()))

    @staticmethod
    def _carrier(plan: NodePlan) -> torch.dtype:
        """What holds the sums. Where only an extreme input could pass 2**24, training stays in float32."""
        return torch.float32 if plan.parts > 1 else plan.carrier

    def _compute(self, node: Node, plan: NodePlan, targets: Sequence[QParams | None], operands: list[Any]) -> Tensor:
        form = self._form(node)
        if form.table or form.lands:
            return self._land(node, plan, targets, operands)
        register, attrs = self._remembered(
            f"{node.name}:register", tuple(targets), lambda: self._register(node, plan, targets, None)
        )
        c = self.ops[node.op].compute_int(attrs, *operands)
        if self.gradients is not None and form.seed:
            c = self.gradients(c)
        if not plan.proved:
            c = straight_through(c, plan.held(c.detach(), _lost(plan, targets, operands)).to(c.dtype))
        return self._leave(node, plan, register, c)

    def _leave(self, node: Node, plan: NodePlan, register: QParams, c: Tensor) -> Tensor:
        """The node's value, requantized where its signature says so."""
        out = self._out(node, plan, c, register)
        self.qparams[node.name] = out or register
        return c if out is None else move(c, register, out, self.hardware.requantize, self.training.slope)

    def _land(self, node: Node, plan: NodePlan, targets: Sequence[QParams | None], operands: list[Any]) -> Tensor:
        """An op that goes to the output's scale by itself: its integers, with the gradient of the real op."""
        reals = [x if t is None else to_real(x, t) for x, t in zip(operands, targets, strict=True)]
        real = compute_real(node, reals, self.ops)
        out = self.qparams[node.name] = self._out(node, plan, real, None)
        assert out is not None
        how, slope = self.hardware.requantize, self.training.slope
        nearest = move(real, None, out, how, slope)
        if plan.table is not None:
            return nearest
        register, attrs = self._register(node, plan, targets, out)
        with torch.no_grad():
            c = plan.held(self.ops[node.op].compute_int(attrs, *operands))
            exact = apply_simq(c, SimQ(register, out), how)
        return straight_through(nearest, exact.to(nearest.dtype))

    def _out(self, node: Node, plan: NodePlan, value: Tensor, register: QParams | None) -> QParams | None:
        """The output's own qparams, where it requantizes; `value` is what will be."""
        key = f"{node.name}:out"
        found = self.training.ranges.get(key)
        if found is None:
            return self._operands(node).fixed(plan.desc)
        if self.observing and found.observes:
            found.observe(*extremes(value, register, found, None))
        bits = self.training.bits[key]
        made: QParams = self._remembered(
            key, tuple(self._stamps([found])), lambda: self._operands(node).output(bits, plan.desc)
        )
        return made

    # ------------------------------------------------------------ qparams
    def _targets(self, node: Node, plan: NodePlan, values: Sequence[Any]) -> tuple[QParams | None, ...]:
        """The qparams that operands arrive in."""
        sources = [self.qparams.get(s) for s in node.inputs]
        stamps = self._stamps([self.training.range_of(e) for e in node.edges])
        form = self._form(node)
        biases = {
            slot: values[slot].detach().to(torch.float64).flatten()
            for slot, name in enumerate(node.inputs)
            if form.slot(slot) == "bias" and name in self.graph.consts
        }
        # scales of weights depend on biases that would not fit
        stamps += [tuple(b.view(torch.int64).tolist()) for b in biases.values()]
        made: tuple[QParams | None, ...] = self._remembered(
            node.name,
            (*sources, *stamps),
            lambda: tuple(replace(self._operands(node), biases=biases).targets(plan.desc)),
        )
        return made

    def _register(
        self, node: Node, plan: NodePlan, targets: Sequence[QParams | None], out: QParams | None
    ) -> tuple[QParams, Mapping[str, Any]]:
        """The accumulator's qparams, and the attributes in integer units."""
        site = Site(tuple(targets), out, self.hardware.requantize)
        register = self._operands(node).register(site, plan.desc)
        with torch.no_grad():
            return register, self._form(node).integer_attrs(node.attrs, site)

    def _remembered(self, key: str, depends: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What was made from the same things before; what takes a gradient is made anew."""
        if any(d is _MOVING or (isinstance(d, QParams) and d.scale.requires_grad) for d in depends):
            return make()
        known = self.training.known
        if key not in known or not all(map(_same, known[key][0], depends)):
            known[key] = (depends, make())
        return known[key][1]

    @staticmethod
    def _stamps(ranges: Sequence[Range | None]) -> list[Any]:
        grad = torch.is_grad_enabled()
        return [None if r is None else _MOVING if r.moves and grad else r.stamp for r in ranges]

    def _operands(self, node: Node) -> LiveOperands:
        keys = [self.training.groups.get(e) for e in node.edges]
        return LiveOperands(
            self,
            node,
            self._form(node),
            [None if k is None else self.training.bits[k] for k in keys],
            [self.qparams.get(s) for s in node.inputs],
            ranges=[self.training.range_of(e) for e in node.edges],
            out=self.training.ranges.get(f"{node.name}:out"),
            shared=self._made,
        )

    def _form(self, node: Node) -> IntegerForm:
        form = self.ops[node.op].integer
        assert form is not None
        return form

    # ------------------------------------------------------------ observing
    def _observe_operands(self, node: Node, values: Sequence[Any]) -> None:
        for edge, value in zip(node.edges, values, strict=False):  # a layer's first operand comes before the others
            found = self.training.range_of(edge)
            if self.observing and found is not None and found.observes and id(found) not in self._seen:
                self._seen.add(id(found))
                name = node.inputs[edge.slot]
                low, high = extremes(value, self.qparams.get(name), found, self._form(node).weight)
                found.observe(low.clamp_min(0.0) if name in self.training.cut else low, high)


def _same(a: Any, b: Any) -> bool:
    """Whether both are one object, one number, or a tuple of such."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def _lost(plan: NodePlan, targets: Sequence[QParams | None], operands: Sequence[Any]) -> Lost | None:
    """What pairs of products, at the present qparams, or clamped partial sums change in the accumulators."""
    if plan.additions is not None:
        return plan.additions.lost([c.detach() for c in operands])
    x, w = (*targets, None)[:2]
    if plan.pairs is None or x is None or w is None:
        return None
    return replace(plan.pairs, x=x, w=w).lost([c.detach() for c in operands[:2]])
