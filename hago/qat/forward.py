"""Training: what stays the same while a Plan is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import Lost, apply_simq
from hago.arithmetic.schemes import TWO_SIDED, Grid, make_qparams
from hago.arithmetic.straight_through import straight_through
from hago.arithmetic.types import DType, Edge, QParams, SimQ
from hago.errors import HagoError
from hago.graph.execute import compute_real
from hago.graph.graph import Graph, Node
from hago.hardware.hardware import Hardware, OpDesc
from hago.ops._rule import IntegerForm, Site, Weight
from hago.plan.operands import Operands, ThresholdSource
from hago.plan.plan import NodePlan, Plan
from hago.plan.topology import Topology, weight_edge
from hago.qat.batch_norm import Folded, FoldedLayer, FoldedNorm
from hago.qat.fake_quantize import Ends, Slope, move_on_edge, trained_to_real
from hago.qat.ranges import TrainableRange

#: What qparams depend on (producers' qparams, states of ranges), and what they were last time.
KnownOperands = tuple[tuple[Any, ...], Any]


@dataclass(frozen=True, eq=False)
class Training:
    """What stays the same in training.

    Args:
        plan: that training starts from.
        topology: of its graph.
        bits: by group.
        groups: whose bits each edge has.
        ranges: by the key of the threshold; edges that ask for the same integers share one.
        cut: relus that are part of their readers' clipping.
        slope: how gradients pass.
        known: qparams that were resolved before and take no gradient.
    """

    plan: Plan
    topology: Topology
    bits: Mapping[str, int]
    groups: Mapping[Edge, str]
    ranges: Mapping[str, TrainableRange]
    cut: frozenset[str]
    slope: Slope
    known: dict[str, KnownOperands] = field(default_factory=dict)

    def range_of(self, edge: Edge) -> TrainableRange | None:
        """The range of an edge that has one."""
        return self.ranges.get(str(edge))


# ---------------------------------------------------------------- operands
# Operands in training: live thresholds to qparams, by the rules of `hago.plan.operands`, with gradients.


@dataclass(slots=True)
class LiveOperands(Operands):
    """Operands whose thresholds may take gradients: the scale's is that of one proportional to its range.

    Args:
        ranges: of each in-edge; those that stand for the producer's own integers are the producer's.
        out: of the output, where it requantizes.
        shared: qparams made in this pass, so that edges of one range get one object.
        biases: their values now, by slot, float64 (channels,).
    """

    ranges: Sequence[TrainableRange | None] = ()
    out: TrainableRange | None = None
    shared: dict[tuple[int, int, str, bool], QParams] = field(default_factory=dict)
    biases: Mapping[int, Tensor] = field(default_factory=dict)

    def bias(self, slot: int) -> Tensor | None:
        return self.biases.get(slot)

    def quantized(self, slot: int, bits: int, dtype: DType) -> QParams:
        key = (id(self.ranges[slot]), bits, dtype.name, dtype.signed or self._signed(slot))
        found = self.shared.get(key)
        if found is None:
            found = self.shared[key] = Operands.quantized(self, slot, bits, dtype)
        else:
            self.thresholds[str(self.node.edges[slot])] = _ends(self.ranges[slot])
        return found

    def first(self, desc: OpDesc) -> QParams:
        """The qparams that the first operand arrives in, which do not depend on the others."""
        return self._operand(0, desc)

    def output(self, bits: int, desc: OpDesc) -> QParams:
        dtype = desc.out_dtype
        key = (id(self.out), bits, dtype.name, dtype.signed or (self.out is not None and self.out.signed))
        if key not in self.shared:
            self.shared[key] = Operands.output(self, bits, desc)
        return self.shared[key]

    def register(self, site: Site, desc: OpDesc) -> QParams:
        found, first = Operands.register(self, site, desc), site.operands[0]
        if first is None or found.scale is not first.scale or found.dtype != first.dtype:
            return found
        moved_only = (found.qmin, found.qmax) == (first.qmin, first.qmax) and found.zero_point is first.zero_point
        return first if moved_only else found

    def made(self, scheme: str, lo: Tensor, hi: Tensor, bits: int, dtype: DType) -> QParams:
        power = self.owner.hardware.requantize.power_of_two
        found = make_qparams(scheme, lo.detach(), hi.detach(), bits, dtype, power_of_two=power)
        if not (lo.requires_grad or hi.requires_grad):
            return found
        size = hi - lo if scheme in TWO_SIDED and not power else torch.maximum(lo.abs(), hi.abs())
        relative = size / torch.where(size > 0, size, torch.ones_like(size)).detach()
        return replace(found, scale=found.scale * torch.where(size > 0, relative, torch.ones_like(size)))


def _ends(found: TrainableRange | None) -> tuple[Tensor, Tensor]:
    assert found is not None
    return found.ends()


class RangeThresholds:
    """A ThresholdSource that reads ranges as they are when asked."""

    def __init__(self, ranges: Mapping[str, TrainableRange]) -> None:
        self._ranges = ranges

    def signed(self, key: str, source: str) -> bool:
        """Whether the range holds negative values."""
        return self._ranges[key].signed

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """The range's ends, in memory of their own."""
        low, high = self._ranges[key].ends()
        return low.clone(), high.clone()


def batch_extremes(
    value: Tensor, source: QParams | None, found: TrainableRange, weight: Weight | None
) -> tuple[Tensor, Tensor]:
    """(low, high) of a value in real units, of shape (1,), or (channels,) where the range has channels."""
    x = value.detach()
    if found.low.numel() > 1:
        assert weight is not None
        rest = tuple(d for d in range(x.ndim) if d != weight.axis % x.ndim)
        return x.amin(rest), x.amax(rest)
    if source is None or source.scale.numel() == 1:
        low, high = (t.reshape(1).to(torch.float64) for t in torch.aminmax(x))
        step = 1.0 if source is None else source.scale.detach().reshape(1)
        return low * step, high * step
    scale = source.scale.detach()
    rest = tuple(d for d in range(x.ndim) if x.ndim - d > scale.ndim or scale.shape[d - x.ndim] == 1)
    return (x.amin(rest, True) * scale).amin().reshape(1), (x.amax(rest, True) * scale).amax().reshape(1)


# ---------------------------------------------------------------- live
# Live: one forward pass of a Plan whose weights and thresholds are being trained.
# The rules that give an operand its scale are those of `operands`; here their inputs are live, and gradients reach
# them. What cannot change in training (signatures, bits, signs) is read off the Plan that training started from.

#: In the place of the state of a range that takes a gradient.
_MOVING: Final = object()


class LivePass:
    """One forward pass, quantized; a `SplitStep` of `execute.run`, and the Owner of its operands.

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
        return trained_to_real(self._quantized(node, edge.slot, value, target, None), target).contiguous()

    def real(self, source: str, value: Any) -> Any:
        """A value as a float node, or the caller, reads it."""
        qparams = self.qparams.get(source)
        if qparams is not None:
            value = trained_to_real(value, qparams)
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
            found = move_on_edge(
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
        if form.table or form.requantizes_output:
            return self._land(node, plan, targets, operands)
        register, attrs = self._remembered(
            f"{node.name}:register", tuple(targets), lambda: self._register(node, plan, targets, None)
        )
        c = self.ops[node.op].compute_int(attrs, *operands)
        if self.gradients is not None and form.starts_region:
            c = self.gradients(c)
        if not plan.proved:
            c = straight_through(c, plan.held(c.detach(), _lost(plan, targets, operands)).to(c.dtype))
        return self._leave(node, plan, register, c)

    def _leave(self, node: Node, plan: NodePlan, register: QParams, c: Tensor) -> Tensor:
        """The node's value, requantized where its signature says so."""
        out = self._out(node, plan, c, register)
        self.qparams[node.name] = out or register
        return c if out is None else move_on_edge(c, register, out, self.hardware.requantize, self.training.slope)

    def _land(self, node: Node, plan: NodePlan, targets: Sequence[QParams | None], operands: list[Any]) -> Tensor:
        """An op that goes to the output's scale by itself: its integers, with the gradient of the real op."""
        reals = [x if t is None else trained_to_real(x, t) for x, t in zip(operands, targets, strict=True)]
        real = compute_real(node, reals, self.ops)
        out = self.qparams[node.name] = self._out(node, plan, real, None)
        assert out is not None
        how, slope = self.hardware.requantize, self.training.slope
        nearest = move_on_edge(real, None, out, how, slope)
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
            found.observe(*batch_extremes(value, register, found, None))
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
    def _stamps(ranges: Sequence[TrainableRange | None]) -> list[Any]:
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
                low, high = batch_extremes(value, self.qparams.get(name), found, self._form(node).weight)
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


# ---------------------------------------------------------------- passes
# Passes: a quantized pass through batch norms in training, and a pass that is not quantized.

Norms = Mapping[str, FoldedNorm]


class NormedPass(LivePass):
    """A quantized pass in which layers have the batch norm of this batch.

    Args:
        norms: by layer.
    """

    def __init__(self, training: Training, norms: Norms, *, observing: bool) -> None:
        super().__init__(training, observing=observing)
        self.norms = norms
        self._folded: dict[str, Folded] = {}

    def __call__(self, node: Node, values: Sequence[Any]) -> Any:
        norm, plan = self.norms.get(node.name), self.plan.nodes.get(node.name)
        if norm is None:
            return super().__call__(node, values)
        if plan is None:
            return self._float_layer(node, norm, values[0])
        self._observe_operands(node, values[:1])
        first = self._operands(node).first(plan.desc)
        x = trained_to_real(self._operand(node, plan, first, 0, values[0]), first)
        folded = self._folded[node.name] = norm.in_training(self._layer(node, x))
        return super().__call__(node, [values[0], folded.weight, folded.bias])

    def _float_layer(self, node: Node, norm: FoldedNorm, value: Any) -> Tensor:
        """A float layer, whose folded weight may rest as integers."""
        self.qparams[node.name] = None
        layer = self._layer(node, self.real(node.inputs[0], value))
        edge = weight_edge(node, self.ops)
        if edge is None or edge not in self.plan.weights:
            return norm.normalized(layer)
        folded = norm.in_training(layer)
        self._observe_operands(node, [value, folded.weight])
        weight = self._weight(node, edge, folded.weight)
        if folded.correction is None or folded.shift is None:
            return layer(weight, folded.bias)
        y = layer(weight, None)
        shape = [1, -1, *[1] * (y.ndim - 2)]
        return y * folded.correction.reshape(shape) + folded.shift.reshape(shape)

    def _layer(self, node: Node, x: Tensor) -> FoldedLayer:
        def layer(weight: Tensor, bias: Tensor | None) -> Tensor:
            found: Tensor = compute_real(node, [x, weight] if bias is None else [x, weight, bias], self.ops)
            return found

        return layer

    def _compute(self, node: Node, plan: NodePlan, targets: Sequence[QParams | None], operands: list[Any]) -> Tensor:
        folded = self._folded.get(node.name)
        if folded is None or folded.correction is None or folded.shift is None:
            return super()._compute(node, plan, targets, operands)
        register, attrs = self._register(node, plan, targets, None)
        c = self.ops[node.op].compute_int(attrs, *operands[:2])
        if self.gradients is not None:
            c = self.gradients(c)
        shape = [1, -1, *[1] * (c.ndim - 2)]
        # in quanta of the accumulator, though no longer whole ones
        shift = (folded.shift.reshape(shape) / register.scale).to(c.dtype)
        return self._leave(node, plan, register, c * folded.correction.reshape(shape) + shift)


class FloatPass:
    """A pass that is not quantized; ranges may take in what they see.

    Args:
        norms: by layer.
    """

    def __init__(self, training: Training, norms: Norms, *, observing: bool) -> None:
        self.training, self.norms, self.observing = training, norms, observing
        self.ops = training.plan.ops
        self._seen: set[int] = set()

    def __call__(self, node: Node, values: Sequence[Any]) -> Any:
        norm = self.norms.get(node.name)
        if norm is None:
            found = compute_real(node, values, self.ops)
        else:
            found = norm.normalized(lambda weight, bias: self._layer(node, values[0], weight, bias))
        plan = self.training.plan
        if self.observing and (node.name in plan.nodes or any(e in plan.weights for e in node.edges)):
            seen = values if norm is None else [values[0], *norm.folded()]
            for edge, value in zip(node.edges, seen, strict=True):
                self._observe(str(edge), node, value)
            self._observe(f"{node.name}:out", node, found)
        return found

    def _layer(self, node: Node, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = compute_real(node, [x, weight] if bias is None else [x, weight, bias], self.ops)
        return found

    def _observe(self, key: str, node: Node, value: Any) -> None:
        found = self.training.ranges.get(key)
        if found is not None and found.observes and id(found) not in self._seen:
            self._seen.add(id(found))
            form = self.ops[node.op].integer
            found.observe(*batch_extremes(value, None, found, None if form is None else form.weight))
