"""The forward passes of a QatModel in training: quantized, quantized with live batch norms, and in float.

The rules that give an operand its scale are those of `hago.plan.operands`. Their inputs are live weights and thresholds
here, and gradients reach them. Signatures, bits and signs, which cannot change in training, are those of the Plan that
training started from.

`QatModel` makes one pass object per forward pass, and `hago.graph.execute.run_graph` calls it once per node. State that
outlives a pass is kept in `Training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.fake_quantize import Ends, Slope, fake_quantize_edge, trained_to_real
from hago.arithmetic.numerics import apply_overflow, apply_simq
from hago.arithmetic.schemes import TWO_SIDED, Grid, make_qparams
from hago.arithmetic.straight_through import straight_through
from hago.arithmetic.types import DType, Edge, QParams, SimQ
from hago.graph import Graph, Node, compute_real
from hago.hardware import Hardware, OpDesc
from hago.ops import IntegerForm, Ops, Site, Weight, is_narrow
from hago.plan import NodePlan, Operands, Plan, ThresholdSource, Topology
from hago.plan.accumulators import Bounds, additions_of, pairs_of
from hago.plan.topology import weight_edge
from hago.qat.batch_norm import FoldedConstants, FoldedNorm, LayerFunction
from hago.qat.ranges import TrainableRange

#: The dependencies of a cached value (qparams of producers, states of ranges), and the value.
CacheEntry = tuple[tuple[Any, ...], Any]


@dataclass(frozen=True, eq=False)
class Training:
    """The state that all passes of one QatModel share. QatModel makes it, and owns the ranges and the cache.

    Args:
        plan: the Plan that training starts from.
        topology: of its graph.
        bits: by key of the group.
        groups: for every edge, the key of the group whose bits it has.
        ranges: by the key of the threshold; edges that read the same integers share one.
        fused_relus: relus that are not computed, because the clipping at their readers does the same.
        slope: how gradients pass fake quantization.
        cache: by key, qparams that were resolved in an earlier pass and take no gradient.
    """

    plan: Plan
    topology: Topology
    bits: Mapping[str, int]
    groups: Mapping[Edge, str]
    ranges: Mapping[str, TrainableRange]
    fused_relus: frozenset[str]
    slope: Slope
    cache: dict[str, CacheEntry] = field(default_factory=dict)

    def range_of(self, edge: Edge) -> TrainableRange | None:
        """The range of an edge; None if it has none."""
        return self.ranges.get(str(edge))


# ---------------------------------------------------------------- operands
@dataclass(slots=True)
class LiveOperands(Operands):
    """The operands of one node in one pass, whose thresholds may require gradients; `LivePass` makes it.

    The gradient of a scale is that of a value proportional to the size of its range.

    Args:
        ranges: of each in-edge; an edge that passes the producer's own integers has the producer's range.
        out: the range of the output, if it requantizes.
        shared: qparams made in this pass, so that all edges of a range have the same object.
        biases: the current values of biases, by slot, float64 (channels,).
    """

    ranges: Sequence[TrainableRange | None] = ()
    out: TrainableRange | None = None
    shared: dict[tuple[int, int, str, bool], QParams] = field(default_factory=dict)
    biases: Mapping[int, Tensor] = field(default_factory=dict)

    def bias(self, slot: int) -> Tensor | None:
        return self.biases.get(slot)

    def quantized(self, slot: int, bits: int, dtype: DType, group: int | None = None) -> QParams:
        assert group is None, "scales of groups are not trained"
        key = (id(self.ranges[slot]), bits, dtype.name, dtype.signed or self._is_signed(slot, dtype))
        qparams = self.shared.get(key)
        if qparams is None:
            qparams = self.shared[key] = Operands.quantized(self, slot, bits, dtype)
        else:
            self.thresholds[str(self.node.edges[slot])] = _ends(self.ranges[slot])
        return qparams

    def first(self, desc: OpDesc) -> QParams:
        """The qparams of the first operand, which do not depend on the other operands."""
        return self._operand(0, desc)

    def output(self, bits: int, desc: OpDesc) -> QParams:
        dtype = desc.out_dtype
        key = (id(self.out), bits, dtype.name, dtype.signed or (self.out is not None and self.out.signed))
        if key not in self.shared:
            self.shared[key] = Operands.output(self, bits, desc)
        return self.shared[key]

    def register(self, site: Site, desc: OpDesc) -> QParams:
        register, first = Operands.register(self, site, desc), site.operands[0]
        if first is None or register.scale is not first.scale or register.dtype != first.dtype:
            return register
        same_range = (register.qmin, register.qmax) == (first.qmin, first.qmax)
        return first if same_range and register.zero_point is first.zero_point else register

    def qparams_of_range(
        self, scheme: str, lo: Tensor, hi: Tensor, bits: int, dtype: DType, group: int | None = None
    ) -> QParams:
        power = self.owner.hardware.requantize.power_of_two
        qparams = make_qparams(scheme, lo.detach(), hi.detach(), bits, dtype, power_of_two=power)
        if not (lo.requires_grad or hi.requires_grad):
            return qparams
        size = hi - lo if scheme in TWO_SIDED and not power else torch.maximum(lo.abs(), hi.abs())
        relative = size / torch.where(size > 0, size, torch.ones_like(size)).detach()
        return replace(qparams, scale=qparams.scale * torch.where(size > 0, relative, torch.ones_like(size)))


def _ends(trained: TrainableRange | None) -> tuple[Tensor, Tensor]:
    assert trained is not None
    return trained.ends()


class RangeThresholds:
    """A ThresholdSource that gives the current ends of ranges."""

    def __init__(self, ranges: Mapping[str, TrainableRange]) -> None:
        self._ranges = ranges

    def signed(self, key: str, source: str) -> bool:
        """Whether the range contains negative values."""
        return self._ranges[key].signed

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        """Copies of the ends of the range."""
        low, high = self._ranges[key].ends()
        return low.clone(), high.clone()


def batch_extremes(
    value: Tensor, source: QParams | None, observed: TrainableRange, weight: Weight | None
) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of a batch, in real units.

    Args:
        value: real values if `source` is None, else centered integers of `source`.
        observed: the range that will be updated with them.
        weight: the axis of the channels of a weight; required if the range is per channel.

    Returns:
        (low, high) of shape (1,), or (channels,) if the range is per channel.
    """
    x = value.detach()
    if observed.low.numel() > 1:
        assert weight is not None
        reduced = tuple(d for d in range(x.ndim) if d != weight.axis % x.ndim)
        return x.amin(reduced), x.amax(reduced)
    if source is None or source.scale.numel() == 1:
        low, high = (t.reshape(1).to(torch.float64) for t in torch.aminmax(x))
        step = 1.0 if source is None else source.scale.detach().reshape(1)
        return low * step, high * step
    scale = source.scale.detach()
    reduced = tuple(d for d in range(x.ndim) if x.ndim - d > scale.ndim or scale.shape[d - x.ndim] == 1)
    return (x.amin(reduced, True) * scale).amin().reshape(1), (x.amax(reduced, True) * scale).amax().reshape(1)


class RangeUpdater:
    """Updates ranges with the values of one pass, each range once. A pass makes it."""

    def __init__(self, training: Training) -> None:
        self.ranges, self.ops = training.ranges, training.plan.ops
        self._updated: set[int] = set()  # identities of ranges

    def __call__(
        self, key: str, node: Node, value: Tensor, source: QParams | None = None, *, relu_fused: bool = False
    ) -> None:
        """Update the range of a threshold, if it changes with the batches of training.

        Args:
            key: of the threshold.
            node: reads `value`, or computes it.
            value: real values if `source` is None, else centered integers of `source`.
            relu_fused: whether the range is that of the value after a relu.
        """
        observed = self.ranges.get(key)
        if observed is None or not observed.observes or id(observed) in self._updated:
            return
        self._updated.add(id(observed))
        form = self.ops[node.op].integer
        low, high = batch_extremes(value, source, observed, None if form is None else form.weight)
        observed.observe(low.clamp_min(0.0) if relu_fused else low, high)


# ---------------------------------------------------------------- the quantized pass
#: In the dependencies of a cached value, a range that requires a gradient: such a value is never cached.
_LEARNED: Final = object()


class LivePass:
    """One quantized forward pass: a step of `run_graph`, called once per node, and the OperandContext of its operands.

    Args:
        training: shared by all passes.

    Attributes:
        qparams: by node, of the value that it emitted in this pass; None for real values.
        gradients: an identity that quantizes the gradient in the backward pass (DoReFa-Net), applied to the
            accumulators of layers; None for no quantization of gradients.
    """

    def __init__(self, training: Training) -> None:
        plan = training.plan
        self.training, self.plan = training, plan
        self.graph: Graph = plan.graph
        self.hardware: Hardware = plan.hardware
        self.topology, self.ops = training.topology, plan.ops
        self.thresholds: ThresholdSource = RangeThresholds(training.ranges)
        self.gradients: Callable[[Tensor], Tensor] | None = None
        self.qparams: dict[str, QParams | None] = {}
        self._quantized: dict[tuple[str, int], Tensor] = {}  # by source and identity of the target
        self._shared: dict[tuple[int, int, str, bool], QParams] = {}
        self._update_range = RangeUpdater(training)
        self._interned: list[QParams] = []

    def intern(self, qparams: QParams) -> QParams:
        """Keep qparams alive for the whole pass, whose keys contain their identities.

        They are made once per range, so that equal ones need not be merged.
        """
        self._interned.append(qparams)
        return qparams

    # ------------------------------------------------------------ one node
    def __call__(self, node: Node, values: Sequence[Any]) -> Any:
        plan = self.plan.nodes.get(node.name)
        if plan is None:
            return self._float(node, values)
        if node.name in self.training.fused_relus:
            self.qparams[node.name] = self.qparams[node.inputs[0]]
            return values[0]
        self._observe_operands(node, values)
        targets = self._targets(node, plan, values)
        operands = [self._operand(node, plan, targets[slot], slot, v) for slot, v in enumerate(values)]
        return self._compute(node, plan, targets, operands)

    def _float(self, node: Node, values: Sequence[Any]) -> Any:
        """Compute a float node, whose weight may be stored as integers."""
        self.qparams[node.name] = None
        self._observe_operands(node, values)
        real = [
            self._weight(node, e, v) if e in self.plan.weights else self.real(s, v)
            for e, s, v in zip(node.edges, node.inputs, values, strict=True)
        ]
        return compute_real(node, real, self.ops)

    def _weight(self, node: Node, edge: Edge, value: Tensor) -> Tensor:
        """The real values of a weight that is stored as integers, for the float node that reads it."""
        dtype = self.plan.weights[edge].desc.in_dtype(edge.slot)
        bits = self.training.bits[self.training.groups[edge]]
        target = self._operands(node).quantized(edge.slot, bits, dtype)
        return trained_to_real(self._quantize(node, edge.slot, value, target, None), target).contiguous()

    def real(self, source: str, value: Any) -> Any:
        """The real values of the output of `source`."""
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
        return self._quantize(node, slot, value, target, source).to(self._carrier(plan))

    def _quantize(self, node: Node, slot: int, value: Any, target: QParams, source: QParams | None) -> Tensor:
        """The centered integers of an operand, computed once for all edges that read the same integers."""
        name, edge = node.inputs[slot], node.edges[slot]
        key = (name, id(target))
        c = self._quantized.get(key)
        if c is None:
            const = name in self.graph.consts
            c = fake_quantize_edge(
                value.to(torch.float64) if const else value,
                source,
                self._without_negatives(name, target),
                self.hardware.requantize,
                self.training.slope,
                relu_fused=name in self.training.fused_relus,
                ends=self._learned_ends(edge, target),
            )
            self._quantized[key] = c
        return c

    def _without_negatives(self, name: str, target: QParams) -> QParams:
        """The target of an edge, clipped at zero if its source is a fused relu."""
        if name not in self.training.fused_relus:
            return target
        return replace(target, qmin=max(target.qmin, int(target.zero_point)))

    def _learned_ends(self, edge: Edge, target: QParams) -> Ends | None:
        """The ends of the clipping, in quanta, if a range of two ends is learned for the whole tensor."""
        trained = self.training.range_of(edge)
        if trained is None or not (trained.learns and trained.two_sided) or trained.low.numel() > 1:
            return None
        low, high = trained.ends()
        return Ends((low / target.scale).reshape(()), (high / target.scale).reshape(()))

    @staticmethod
    def _carrier(plan: NodePlan) -> torch.dtype:
        """The dtype of sums; in training it is float32 even where an extreme input could exceed 2**24."""
        return torch.float32 if plan.parts > 1 else plan.carrier

    def _compute(self, node: Node, plan: NodePlan, targets: Sequence[QParams | None], operands: list[Any]) -> Tensor:
        form = self._form(node)
        if form.table or form.requantizes_output:
            return self._compute_requantized(node, plan, targets, operands)
        register, attrs = self._cached(
            f"{node.name}:register", tuple(targets), lambda: self._register(node, plan, targets, None)
        )
        if form.common is None:
            c = self.ops[node.op].compute_int(attrs, *operands)
        else:
            c = self._rescaled(node, attrs, operands)
        if self.gradients is not None and form.starts_region:
            c = self.gradients(c)
        c = _through(c, self._held(node, plan, targets, attrs, operands, c))
        return self._requantize_output(node, plan, register, c)

    @torch.no_grad()  # attributes may hold learned scales
    def _held(
        self,
        node: Node,
        plan: NodePlan,
        targets: Sequence[QParams | None],
        attrs: Mapping[str, Any],
        operands: Sequence[Any],
        c: Tensor,
    ) -> Tensor | None:
        """What the register holds of exact sums with the present weights and qparams; None where it holds them all.

        The verdict of the Plan is that of the weights that training started from, which says nothing of these.

        Args:
            attrs: attributes in integer units.
            c: the exact sums.
        """
        if plan.keeps_input_dtype or plan.table is not None:
            return None
        form, register = self._form(node), plan.desc.register
        c, live = c.detach(), [x.detach() if isinstance(x, Tensor) else x for x in operands]
        largest = self._largest_sum(node, targets, attrs, live)
        fits = register.dtype.signed and largest <= register.dtype.max
        targets = targets[: len(live)]
        pairs = pairs_of(form, node.attrs, targets, None, (), register.overflow)
        if pairs is not None and node.inputs[1] in self.graph.consts:
            pairs = pairs_of(form, node.attrs, targets, live[1], self._shapes(node), register.overflow)
        partial = pairs or (None if fits else additions_of(self.ops[node.op], attrs, register, largest))
        if partial is not None:
            c = c.to(torch.float64) + partial.lost(live).amount
        elif fits:
            return None
        return apply_overflow(c, register.dtype, register.overflow)

    def _largest_sum(
        self, node: Node, targets: Sequence[QParams | None], attrs: Mapping[str, Any], live: Sequence[Any]
    ) -> float:
        """A bound of the sums of a node that holds for any weights of its bits, with the present bias."""
        form = self._form(node)
        biases = [slot for slot in range(len(live)) if form.slot(slot) == "bias"]
        limits = tuple(0 if t is None or s in biases else _largest(t) for s, t in enumerate(targets[: len(live)]))

        def bound() -> float:
            return Bounds(form, attrs, targets, {}, limits, self._shapes(node)[: len(live)]).centered

        # attributes in integer units depend on scales
        products = self._cached(f"{node.name}:bound", limits, bound) if attrs is node.attrs else bound()
        return products + sum(float(live[slot].abs().max()) for slot in biases)

    def _shapes(self, node: Node) -> list[tuple[int, ...]]:
        return [self.graph[name].shape or () for name in node.inputs]

    def _rescaled(self, node: Node, attrs: Mapping[str, Any], operands: Sequence[Tensor]) -> Tensor:
        """The op on integers of the common scale, to which narrow operands are requantized."""
        common_of, qparams = self._form(node).common, attrs["operands"]
        assert common_of is not None
        common = common_of(qparams)  # with its gradient, which attributes are made without
        moved = [
            fake_quantize_edge(c, q, common, self.hardware.requantize, self.training.slope).to(c.dtype)
            if is_narrow(q.dtype)
            else c
            for c, q in zip(operands, qparams, strict=True)
        ]
        return self.ops[node.op].compute(node.attrs, *moved)  # type: ignore[no-any-return]

    def _requantize_output(self, node: Node, plan: NodePlan, register: QParams, c: Tensor) -> Tensor:
        """The value of a node from its accumulators, requantized if its signature requantizes the output."""
        out = self._output_qparams(node, plan, c, register)
        self.qparams[node.name] = out or register
        return c if out is None else fake_quantize_edge(c, register, out, self.hardware.requantize, self.training.slope)

    def _compute_requantized(
        self, node: Node, plan: NodePlan, targets: Sequence[QParams | None], operands: list[Any]
    ) -> Tensor:
        """Compute an op that requantizes its own output: its integers, with the gradient of the real op."""
        reals = [x if t is None else trained_to_real(x, t) for x, t in zip(operands, targets, strict=True)]
        real = compute_real(node, reals, self.ops)
        out = self.qparams[node.name] = self._output_qparams(node, plan, real, None)
        assert out is not None
        nearest = fake_quantize_edge(real, None, out, self.hardware.requantize, self.training.slope)
        if plan.table is not None:
            return nearest
        register, attrs = self._register(node, plan, targets, out)
        with torch.no_grad():
            c = self.ops[node.op].compute_int(attrs, *operands)
            held = self._held(node, plan, targets, attrs, operands, c)
            exact = apply_simq(c if held is None else held, SimQ(register, out), self.hardware.requantize)
        return straight_through(nearest, exact.to(nearest.dtype))

    def _output_qparams(self, node: Node, plan: NodePlan, value: Tensor, register: QParams | None) -> QParams | None:
        """The qparams of the output, if it requantizes; its range observes `value` first."""
        key = f"{node.name}:out"
        trained = self.training.ranges.get(key)
        if trained is None:
            return self._operands(node).fixed_output(plan.desc)
        if trained.observes:
            trained.observe(*batch_extremes(value, register, trained, None))
        bits = self.training.bits[key]
        qparams: QParams = self._cached(
            key, tuple(self._stamps([trained])), lambda: self._operands(node).output(bits, plan.desc)
        )
        return qparams

    # ------------------------------------------------------------ qparams
    def _targets(self, node: Node, plan: NodePlan, values: Sequence[Any]) -> tuple[QParams | None, ...]:
        """The qparams of the operands that the node computes with."""
        sources = [self.qparams.get(s) for s in node.inputs]
        stamps = self._stamps([self.training.range_of(e) for e in node.edges])
        form = self._form(node)
        biases = {
            slot: values[slot].detach().to(torch.float64).flatten()
            for slot, name in enumerate(node.inputs)
            if form.slot(slot) == "bias" and name in self.graph.consts
        }
        # if a bias does not fit its accumulator, the scale of the weight depends on it
        stamps += [tuple(b.view(torch.int64).tolist()) for b in biases.values()]
        targets: tuple[QParams | None, ...] = self._cached(
            node.name,
            (*sources, *stamps),
            lambda: tuple(replace(self._operands(node), biases=biases).targets(plan.desc)),
        )
        return targets

    def _register(
        self, node: Node, plan: NodePlan, targets: Sequence[QParams | None], out: QParams | None
    ) -> tuple[QParams, Mapping[str, Any]]:
        """The accumulator's qparams, and the attributes in integer units."""
        site = Site(tuple(targets), out, self.hardware.requantize)
        register = self._operands(node).register(site, plan.desc)
        with torch.no_grad():
            return register, self._form(node).integer_attrs(node.attrs, site)

    def _cached(self, key: str, depends: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The value that an earlier pass made from the same dependencies, unless it requires a gradient."""
        if any(d is _LEARNED or (isinstance(d, QParams) and d.scale.requires_grad) for d in depends):
            return make()
        cache = self.training.cache
        if key not in cache or not all(map(_same, cache[key][0], depends)):
            cache[key] = (depends, make())
        return cache[key][1]

    @staticmethod
    def _stamps(ranges: Sequence[TrainableRange | None]) -> list[Any]:
        """The states of ranges, as dependencies of a cached value."""
        grad = torch.is_grad_enabled()
        return [None if r is None else _LEARNED if r.learns and grad else r.stamp for r in ranges]

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
            shared=self._shared,
        )

    def _form(self, node: Node) -> IntegerForm:
        form = self.ops[node.op].integer
        assert form is not None
        return form

    # ------------------------------------------------------------ observing
    def _observe_operands(self, node: Node, values: Sequence[Any]) -> None:
        """Update the ranges of a node's operands with this batch."""
        # NormedPass passes the data alone, before it has the weight
        for edge, name, value in zip(node.edges, node.inputs, values, strict=False):
            relu_fused = name in self.training.fused_relus
            self._update_range(str(edge), node, value, self.qparams.get(name), relu_fused=relu_fused)


def _same(a: Any, b: Any) -> bool:
    """Whether both are one object, equal integers, or tuples of such."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def _through(c: Tensor, held: Tensor | None) -> Tensor:
    """What a register holds of exact sums, with their gradient; the sums themselves where it holds them all."""
    return c if held is None else straight_through(c, held.to(c.dtype))


def _largest(target: QParams) -> int:
    """The largest integer of an operand, stored or centered, whatever its zero point."""
    return max(target.qmax - target.qmin, abs(target.qmin), abs(target.qmax))


# ---------------------------------------------------------------- with live batch norms
#: Batch norms that are trained through the statistics of the batch, by the layer that they are folded into.
NormsByLayer = Mapping[str, FoldedNorm]


class NormedPass(LivePass):
    """A quantized pass in which batch norms that are folded into layers use the statistics of the batch."""

    def __init__(self, training: Training, norms: NormsByLayer) -> None:
        super().__init__(training)
        self.norms = norms
        self._folded: dict[str, FoldedConstants] = {}
        self._outputs: dict[str, Tensor] = {}  # of layers on DoReFa's levels, whose gradient is quantized

    def __call__(self, node: Node, values: Sequence[Any]) -> Any:
        norm, plan = self.norms.get(node.name), self.plan.nodes.get(node.name)
        if norm is None:
            return super().__call__(node, values)
        if plan is None:
            return self._float_layer(node, norm, values[0])
        self._observe_operands(node, values[:1])
        first = self._operands(node).first(plan.desc)
        x = trained_to_real(self._operand(node, plan, first, 0, values[0]), first)
        layer = self._layer(node, x)
        if self.gradients is not None and norm.style == "tensorflow" and norm.quantizer is not None:
            layer = partial(self._quantizing_gradient, node.name, layer, self.gradients)
        folded = self._folded[node.name] = norm.in_training(layer)
        return super().__call__(node, [values[0], folded.weight, folded.bias])

    def _float_layer(self, node: Node, norm: FoldedNorm, value: Any) -> Tensor:
        """Compute a float layer, whose folded weight may be stored as integers."""
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

    def _quantizing_gradient(
        self,
        name: str,
        layer: LayerFunction,
        gradients: Callable[[Tensor], Tensor],
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """The output of a layer, which `_compute` reads too, so that its whole gradient is quantized at once.

        The whole is what comes from the normalized values and from the statistics of the batch.
        """
        y = gradients(layer(weight, bias))
        self._outputs[name] = y if bias is None else y - bias.reshape(1, -1, *[1] * (y.ndim - 2))
        return y

    def _layer(self, node: Node, x: Tensor) -> LayerFunction:
        return partial(_layer_output, node, x, self.ops)

    def _compute(self, node: Node, plan: NodePlan, targets: Sequence[QParams | None], operands: list[Any]) -> Tensor:
        folded = self._folded.get(node.name)
        if folded is None or folded.correction is None or folded.shift is None:
            return super()._compute(node, plan, targets, operands)
        register, attrs = self._register(node, plan, targets, None)
        c = self.ops[node.op].compute_int(attrs, *operands[:2])
        c = _through(c, self._held(node, plan, targets, attrs, operands[:2], c))
        shape = [1, -1, *[1] * (c.ndim - 2)]
        if (output := self._outputs.pop(node.name, None)) is not None and folded.multiplier is not None:
            real = output * folded.multiplier.reshape(shape)
            c = straight_through((real / register.scale.detach()).to(c.dtype), c)
        elif self.gradients is not None:
            c = self.gradients(c)
        # in units of the accumulator's scale, but not rounded to integers
        shift = (folded.shift.reshape(shape) / register.scale).to(c.dtype)
        return self._requantize_output(node, plan, register, c * folded.correction.reshape(shape) + shift)


# ---------------------------------------------------------------- in float
class FloatPass:
    """A forward pass in float, before quantization begins, or in eval without quantization.

    Args:
        training: shared by all passes.
        norms: batch norms that use the statistics of the batch; empty if they are folded.
        observing: whether ranges are updated with the extremes of this batch.
    """

    def __init__(self, training: Training, norms: NormsByLayer, *, observing: bool) -> None:
        self.training, self.norms, self.observing = training, norms, observing
        self.ops = training.plan.ops
        self._update_range = RangeUpdater(training)

    def __call__(self, node: Node, values: Sequence[Any]) -> Any:
        norm = self.norms.get(node.name)
        if norm is None:
            value = compute_real(node, values, self.ops)
        else:
            value = norm.normalized(partial(_layer_output, node, values[0], self.ops))
        plan = self.training.plan
        if self.observing and (node.name in plan.nodes or any(e in plan.weights for e in node.edges)):
            inputs = values if norm is None else [values[0], *norm.folded()]
            for edge, x in zip(node.edges, inputs, strict=True):
                self._update_range(str(edge), node, x)
            self._update_range(f"{node.name}:out", node, value)
        return value


def _layer_output(node: Node, x: Tensor, ops: Ops, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The real output of a layer with this weight and bias in place of those of the graph."""
    output: Tensor = compute_real(node, [x, weight] if bias is None else [x, weight, bias], ops)
    return output
