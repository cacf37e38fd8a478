"""Gradients: how strongly the loss reacts to errors on each edge, from forward and backward passes.

A probe (see `hago.search.objective.Curvature`) is a random vector v on the outputs with E[v v^T] = H, where H is the
curvature of the loss in the outputs. The gradient g of <v, outputs> at an edge then has E[g g^T] = J^T H J, the
Gauss-Newton matrix of that edge. So the expected loss of a small error d on the edge is E[(g . d)^2] / 2, or, if errors
of elements are independent, E[sum g^2 d^2] / 2. Signs of v differ from sample to sample, so that one backward pass of a
batch gives unbiased sums over its samples.

`search.sensitivity` and refinement call `gradients`; the graph that is differentiated is the float model.

References:
    L. Theis et al., "Faster gaze prediction with dense networks and Fisher pruning", 2018; Z. Dong et
    al., "HAWQ-V2", NeurIPS 2020; Y. Li et al., "BRECQ", ICLR 2021; M. Hutchinson, 1989.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import Edge
from hago.data import Batch
from hago.errors import HagoError
from hago.graph import CONST, OUTPUT, Graph, Node, channels_last, compute_real, run_graph
from hago.ops import OPS, Ops
from hago.search.objective import Probe

#: Number of samples that are differentiated at once; all their intermediate values are in memory together.
GRADIENT_CHUNK: Final = 16
#: Number of samples that share one random vector where gradients of weights are kept, unless there are many samples.
CHUNK_SAMPLES: Final = 4
#: Cost of a forward and a backward pass, in forward passes.
GRADIENT_FORWARDS: Final = 3.0
#: Bins of a weighted histogram.
SPECTRUM_BINS: Final = 2048

#: The most values of an edge that are used from each sample.
VALUES_PER_SAMPLE: Final = 1 << 12

#: Edge of a constant -> the quantization errors of the constant at each choice of bits; empty where it has no choice.
ErrorsOf = Callable[[Edge], Sequence[Tensor]]
#: Called with an edge and the gradients of the constant, or of the activations, on it, once per chunk.
OnGradients = Callable[[Edge, Tensor], None]


@dataclass(slots=True, eq=False)
class Spectrum:
    """A histogram of the values of one edge, weighted by their squared gradients.

    Args:
        low, high: the range of the values.
        mass: float64 (SPECTRUM_BINS,), the sum of g**2 over the values in each bin. Exact zeros are left out, since
            they have no quantization error on any grid.
    """

    low: float
    high: float
    mass: Tensor = field(default_factory=lambda: torch.zeros(SPECTRUM_BINS, dtype=torch.float64))

    @property
    def width(self) -> float:
        """The width of a bin."""
        return max((self.high - self.low) / SPECTRUM_BINS, 1e-38)

    @property
    def centers(self) -> Tensor:
        """The middle of every bin."""
        return self.low + self.width * (torch.arange(SPECTRUM_BINS, dtype=torch.float64) + 0.5)

    def add(self, x: Tensor, g: Tensor) -> None:
        """Add values and their gradients; of more than VALUES_PER_SAMPLE per sample, only a part with equally many per
        channel."""
        order = sorted(range(x.ndim), key=x.stride, reverse=True)  # the order in memory
        step = max(1, x.numel() // (VALUES_PER_SAMPLE * (len(x) if x.ndim else 1)))
        while math.gcd(step, x.shape[order[-1]] if order else 1) > 1:
            step -= 1
        flat = x.permute(order).reshape(-1)[::step].contiguous()  # a copy, since strided values are slow
        weights = g.permute(order).reshape(-1)[::step].square().mul_(flat != 0)
        index = flat.to(torch.float32).sub(self.low).mul_(1.0 / self.width).clamp_(0, SPECTRUM_BINS - 1).to(torch.int16)
        self.mass += torch.bincount(index, weights, SPECTRUM_BINS) * step


def thinned(parts: Iterable[Sequence[Tensor]], step: int) -> tuple[Tensor, ...]:
    """Every `step`-th row of tensors whose rows are given in parts.

    Args:
        parts: for each part, its rows of every tensor.

    >>> thinned([[torch.arange(3)], [torch.arange(3, 8)]], 2)
    (tensor([0, 2, 4, 6]),)
    """
    kept: list[Sequence[Tensor]] = []
    count = 0
    for part in parts:
        kept.append([t[-count % step :: step] for t in part])
        count += len(part[0])
    return tuple(torch.cat(rows) for rows in zip(*kept, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """The statistics of gradients, summed over samples; returned by `gradients`.

    Args:
        spectra: by edge of an activation.
        weights: by edge of a constant, for every choice the sum over output channels of (g . d)**2, where d is the
            error of the channel: errors within a channel may add up or cancel, those of different channels do not.
        samples: number of samples.
        signal: the sum of squared outputs.
    """

    spectra: Mapping[Edge, Spectrum]
    weights: Mapping[Edge, Sequence[float]]
    samples: int
    signal: float

    @staticmethod
    def added(parts: Sequence[Gradients]) -> Gradients:
        """The sum of passes over different samples with the same ranges."""
        first = parts[0]
        masses = {e: torch.stack([p.spectra[e].mass for p in parts]).sum(0) for e in first.spectra}
        spectra = {e: replace(s, mass=masses[e]) for e, s in first.spectra.items()}
        weights = {e: [math.fsum(of) for of in zip(*(p.weights[e] for p in parts), strict=True)] for e in first.weights}
        return Gradients(spectra, weights, sum(p.samples for p in parts), math.fsum(p.signal for p in parts))


def gradients(
    graph: Graph,
    batches: Iterable[Batch],
    ranges: Mapping[str, tuple[float, float]],
    probe: Probe,
    errors: ErrorsOf,
    ops: Ops = OPS,
    seed: int | torch.Generator = 0,
    chunk: int = GRADIENT_CHUNK,
    on_constant: OnGradients | None = None,
    on_activation: OnGradients | None = None,
    on_value: Callable[[Node, Any], None] | None = None,
) -> Gradients:
    """Make one forward and one backward pass over the data, `chunk` samples at a time.

    Args:
        ranges: (smallest, largest) value of every float-valued node whose edges are to have a spectrum.
        probe: makes the random vectors on the outputs, which define the loss.
        errors: gives the errors of constants at each choice.
        chunk: number of samples that are differentiated at once.
        on_constant: called with the gradients of every constant, once per chunk.
        on_activation: called with those of every edge whose values are no constant, (samples, ...).
        on_value: called with every node and its value, once per chunk.

    Raises:
        HagoError: it is called in torch.inference_mode.
    """
    if torch.is_inference_mode_enabled():
        raise HagoError(
            "searches and corrections need gradients, which torch.inference_mode() has not; call hago outside it, or "
            "in torch.no_grad()"
        )
    generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    sums = _Pass(graph, ranges, probe, errors, ops, generator, on_constant, on_activation, on_value)
    for batch in batches:
        for start in range(0, batch.size, chunk):
            labels = None if batch.labels is None else batch.labels[start : start + chunk]
            sums.add([x[start : start + chunk] for x in batch.inputs], labels)
    return Gradients(sums.spectra, sums.weights, sums.samples, sums.signal)


class _Pass:
    """The sums of one pass; `gradients` calls `add` once per chunk."""

    def __init__(
        self,
        graph: Graph,
        ranges: Mapping[str, tuple[float, float]],
        probe: Probe,
        errors: ErrorsOf,
        ops: Ops,
        generator: torch.Generator,
        on_constant: OnGradients | None,
        on_activation: OnGradients | None,
        on_value: Callable[[Node, Any], None] | None,
    ) -> None:
        self.graph, self.probe, self.errors, self.ops, self.generator = graph, probe, errors, ops, generator
        self.on_constant, self.on_activation, self.on_value = on_constant, on_activation, on_value
        self.spectra: dict[Edge, Spectrum] = {}
        self.weights: dict[Edge, list[float]] = {}
        self.samples, self.signal = 0, 0.0
        self.consts = {n: channels_last(t.detach()) for n, t in graph.consts.items()}
        # operators without a rule keep their constants, and may have no gradients of them (running means)
        self.differentiated = {graph.source(e) for e in graph.edges if e.dst == OUTPUT or graph[e.dst].op in ops}
        for edge in graph.edges:
            source = graph.source(edge)
            if graph[source].op != CONST and source in ranges:
                self.spectra[edge] = Spectrum(*ranges[source])

    def add(self, inputs: Sequence[Tensor], labels: Tensor | None) -> None:
        """Run one chunk forward and backward, and add its statistics."""
        # without spectra, only gradients of constants are wanted
        observed = bool(self.spectra) or self.on_activation is not None
        leaves = [channels_last(x.detach().clone()).requires_grad_(observed and x.is_floating_point()) for x in inputs]
        consts = {
            n: t.detach().requires_grad_(t.is_floating_point() and n in self.differentiated)
            for n, t in self.consts.items()
        }
        with torch.enable_grad():
            outputs = run_graph(self.graph, leaves, self._step, consts=consts, on_value=self.on_value)
            outputs = [self._alias_with_hook(Edge(OUTPUT, slot), o) for slot, o in enumerate(outputs)]
            vectors = self.probe(outputs, labels, self.generator)
            pairs = [(o, v) for o, v in zip(outputs, vectors, strict=True) if v is not None and o.requires_grad]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [v for _, v in pairs])
        self.samples += int(inputs[0].shape[0])
        values = (torch.where(o.isinf(), 0.0, o) for o in (o.detach() for o, _ in pairs))  # masked logits are
        self.signal += sum(float(o.square().sum(dtype=torch.float64)) for o in values)

    def _step(self, node: Node, values: Sequence[Any]) -> Any:
        return compute_real(
            node, [self._alias_with_hook(e, v) for e, v in zip(node.edges, values, strict=True)], self.ops
        )

    def _alias_with_hook(self, edge: Edge, value: Any) -> Any:
        """An alias of the value for one edge, with a hook that takes the gradient on this edge into the sums."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        alias = value.view_as(value)
        kept = alias.detach()
        if edge in self.spectra:
            alias.register_hook(lambda g: self.spectra[edge].add(kept, g))  # type: ignore[no-untyped-call]
        elif self.graph[self.graph.source(edge)].op == CONST:
            alias.register_hook(lambda g: self._add_weight(edge, g))  # type: ignore[no-untyped-call]
        elif self.on_activation is not None:
            on_activation = self.on_activation
            alias.register_hook(lambda g: on_activation(edge, g))  # type: ignore[no-untyped-call]
        return alias

    def _add_weight(self, edge: Edge, g: Tensor) -> None:
        """Add the gradients of a constant on one edge."""
        if self.on_constant is not None:
            self.on_constant(edge, g)
        errors = self.errors(edge)
        sums = self.weights.setdefault(edge, [0.0] * len(errors))
        axis = channel_axis(self.graph, edge, self.ops)
        for index, error in enumerate(errors):
            products = g * error
            channels = products.movedim(axis, 0).flatten(1) if products.ndim > 1 else products.reshape(-1, 1)
            sums[index] += float(channels.sum(1).square().sum(dtype=torch.float64))


def channel_axis(graph: Graph, edge: Edge, ops: Ops = OPS) -> int:
    """The axis of a constant along which the output channels of its reader run; 0 if its rule has none."""
    rule = ops.get(graph[edge.dst].op)
    weight = None if rule is None else rule.weight
    return weight.axis if weight is not None and weight.slot == edge.slot else 0
