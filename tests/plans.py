"""Plans for tests: a graph on a piece of hardware, calibrated on a few inputs or with thresholds as given."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hago import from_torch
from hago.arithmetic.equality import count_differing
from hago.arithmetic.schemes import Grid
from hago.calibration.collection import collect
from hago.calibration.estimators import named_estimator
from hago.data.batches import Batches
from hago.graph.graph import CONST, Graph
from hago.hardware.hardware import Hardware
from hago.ops import OPS, Ops
from hago.plan import Plan
from hago.plan.resolve import Resolver
from hago.plan.space import Space, build_space
from hago.plan.threshold_sources import EstimatedThresholds
from hago.plan.topology import analyze
from hago.runtime.native.executor import Executor
from hago.runtime.native.self_test import ExactKernels
from hago.runtime.reference import IntegerModel


def resolver_of(
    graph: Graph, hardware: Hardware, inputs: Sequence[Tensor], estimator: str = "max_range", ops: Ops = OPS
) -> Resolver:
    """What `hago.search.preparation` makes, for any table of ops."""
    batches = Batches([tuple(inputs)], graph.inputs)
    topology = analyze(graph, hardware, ops=ops)
    space = build_space(graph, hardware, topology, ops=ops)
    calibration = collect(graph, batches, {g.source for g in space.groups.values()}, ops)
    thresholds = EstimatedThresholds(graph, calibration, named_estimator(estimator))
    return Resolver(graph, hardware, topology, space, thresholds, ops)


def widest_plan(model: nn.Module | Graph, hardware: Hardware, *inputs: Tensor) -> Plan:
    """The Plan with the most bits."""
    graph = model if isinstance(model, Graph) else from_torch(model.eval(), inputs)
    resolver = resolver_of(graph, hardware, list(inputs))
    return resolver(resolver.space.widest())


def check_passes(plan: Plan, *inputs: Tensor, using: ExactKernels | None = None) -> Executor:
    """Compare three passes on kernels, of which the second is recorded and the third repeats it, with the reference."""
    executor, expected = Executor(plan, using=using), IntegerModel(plan).run(inputs)
    for _ in range(3):
        for fast, exact in zip(executor.run(inputs), expected, strict=True):
            assert count_differing(fast, exact) == 0, executor.explain()
    return executor


@dataclass(frozen=True)
class Fixed:
    """Thresholds as given, by group key; constants have their own range, and outputs [-1, 1] unless given."""

    ranges: Mapping[str, tuple[float, float]]
    consts: Mapping[str, Tensor]

    def _pair(self, key: str, source: str) -> tuple[float, float]:
        if key in self.ranges:
            return self.ranges[key]
        if key.endswith(":out"):
            return -1.0, 1.0
        return min(0.0, float(self.consts[source].min())), max(0.0, float(self.consts[source].max()))

    def signed(self, key: str, source: str) -> bool:
        return self._pair(key, source)[0] < 0

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        lo, hi = self._pair(key, source)
        shape = (1,) if channel_axis is None else (grid.thresholds_of(self.consts[source].shape, channel_axis),)
        return torch.full(shape, lo, dtype=torch.float64), torch.full(shape, hi, dtype=torch.float64)


def fixed_resolver(
    graph: Graph, hardware: Hardware, ranges: Mapping[str, tuple[float, float]], ops: Ops = OPS
) -> Resolver:
    """A Resolver with thresholds as given."""
    topology = analyze(graph, hardware, ops=ops)
    space = build_space(graph, hardware, topology, ops=ops)
    return Resolver(graph, hardware, topology, space, Fixed(ranges, graph.consts), ops)


def points(space: Space, seed: int) -> Iterator[dict[str, int]]:
    """The widest point, the narrowest, and random ones without end."""
    yield space.widest()
    yield space.narrowest()
    rng = random.Random(seed)
    while True:
        yield {k: rng.choice(g.choices) for k, g in space.groups.items()}


def const_nodes(graph: Graph) -> list[str]:
    return [n.name for n in graph if n.op == CONST]
