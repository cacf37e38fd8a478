"""Concatenations, and ops that move values, run on the narrowest integers that their readers request, with equal
outputs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from building import Builder, seeded
from plans import points, resolver_of
from products import some
from specs import SHIPPED
from torch import Tensor

from hago.arithmetic.equality import count_differing
from hago.arithmetic.numerics import apply_simq
from hago.arithmetic.types import SimQ
from hago.graph.graph import Graph
from hago.plan.plan import Plan
from hago.runtime.native.executor import Executor
from hago.runtime.native.requantize import requantization_of
from hago.runtime.native.self_test import NOTHING, exact_kernels
from hago.runtime.reference import IntegerModel


def fire(b: Builder, x: str, channels: int, name: str) -> str:
    """SqueezeNet's module: two convolutions of the same, joined."""
    narrow = b.call("relu", b.conv2d(x, seeded(4, channels, 1, 1, seed=1), name=f"{name}.squeeze", padding=[0, 0]))
    one = b.conv2d(narrow, seeded(5, 4, 1, 1, seed=2, size=0.3), name=f"{name}.one", padding=[0, 0])
    three = b.conv2d(narrow, seeded(7, 4, 3, 3, seed=3), seeded(7, seed=4), name=f"{name}.three")
    return b.call("concat", b.call("relu", one), b.call("relu", three), name=f"{name}.cat", axis=1)


def fires(both: bool = True) -> Graph:
    """Joined values that a convolution, a pooling and, if asked for, another joining read."""
    b = Builder()
    first = fire(b, b.input(3, 8, 8, name="x"), 3, "first")
    pool = b.call("max_pool2d", first, name="pool", kernel_size=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1],
                  ceil_mode=False)  # fmt: skip
    second = fire(b, pool, 12, "second")
    if both:
        second = b.call("concat", second, pool, name="both", axis=1)
    b.conv2d(second, seeded(6, 24 if both else 12, 1, 1, seed=5), name="last", padding=[0, 0])
    return b.graph()


def dense() -> Graph:
    """Values that several joinings read, at scales that differ."""
    b = Builder()
    values = [b.conv2d(b.input(3, 6, 6, name="x"), seeded(4, 3, 3, 3, seed=1), name="stem")]
    for i in range(3):
        joined = values[0] if not i else b.call("concat", *values, name=f"cat{i}", axis=1)
        made = b.conv2d(joined, seeded(4, 4 * len(values), 3, 3, seed=i, size=3.0**i), name=f"conv{i}")
        values.append(b.call("relu", made))
    b.call("concat", *values, name="end", axis=1)
    return b.graph()


def heads() -> Graph:
    """Products of values that linear layers make at a scale per channel, divided into heads."""
    b = Builder()
    x = b.call("permute", b.call("reshape", b.input(3, 6, 6, name="x"), shape=[-1, 3, 36]), axes=[0, 2, 1])
    made = []
    for name, axes in (("queries", [0, 2, 1, 3]), ("keys", [0, 2, 3, 1])):
        weight = seeded(8, 3, seed=len(name)) * torch.logspace(-1, 1, 8)[:, None]
        heads = b.call("reshape", b.call("linear", x, b.const(weight)), name=f"{name}.heads", shape=[-1, 36, 2, 4])
        made.append(b.call("permute", heads, name=name, axes=axes))
    b.call("matmul", *made, name="end")
    return b.graph()


def check(plan: Plan, x: Tensor, executor: Executor) -> None:
    for fast, exact in zip(executor.run([x]), IntegerModel(plan).run([x]), strict=True):
        assert count_differing(fast, exact) == 0, executor.explain()


@pytest.mark.parametrize(("name", "made"), some(2, sorted(SHIPPED), [fires, dense, heads]))
def test_outputs_are_those_of_the_reference(name: str, made: Callable[[], Graph]) -> None:
    graph, size = made(), 8 if made is fires else 6
    x = seeded(2, 3, size, size)
    for estimator in ("max_range", "power2_range"):
        resolver = resolver_of(graph, SHIPPED[name], [x], estimator)
        for bits in islice(points(resolver.space, 3), 3):
            plan = resolver(bits)
            check(plan, seeded(2, 3, size, size, seed=9, size=2.0), Executor(plan))
        check(plan, x, Executor(plan, using=NOTHING))


@pytest.mark.parametrize("estimator", ["max_range", "power2_range"])
def test_bytes_are_concatenated_if_readers_read_bytes(estimator: str) -> None:
    if not exact_kernels().conv.exact:
        pytest.skip(exact_kernels().conv.why)
    graph, x = fires(both=False), seeded(2, 3, 8, 8)
    resolver = resolver_of(graph, SHIPPED["x86_vnni"], [x], estimator)
    executor = Executor(resolver(resolver.space.widest()))
    values = executor.begin([x])
    for step in executor.steps():
        values.update(zip(step.outputs, step.compute([values[n] for n in step.inputs]), strict=True))
    assert {values[f"{name}.cat"].dtype for name in ("first", "second")} == {torch.uint8}


def test_two_requantizations_are_merged_only_if_the_first_shifts_to_the_left() -> None:
    graph, x = fires(both=False), seeded(2, 3, 8, 8)
    for estimator, one in (("power2_range", True), ("max_range", False)):
        plan = resolver_of(graph, SHIPPED["x86_vnni"], [x], estimator)
        made = plan(plan.space.widest())
        first, second = made.edges[graph["first.cat"].edges[0]], made.edges[graph["second.squeeze"].edges[0]]
        assert first is not None and second is not None
        both, how = SimQ(first.source, second.target, first.target), made.hardware.requantize
        moved = requantization_of(both, how, 5, 2.0**20)
        assert not isinstance(moved, str) and (moved.params.first is None) == one
        c = torch.arange(-(2**20), 2**20, 4099).reshape(-1, 1, 1, 1).expand(-1, 5, 1, 1)
        steps = apply_simq(apply_simq(c, first, how), SimQ(first.target, second.target), how)
        assert apply_simq(c, both, how).equal(steps) and both.key != SimQ(first.source, second.target).key


def test_bytes_are_moved_if_readers_read_bytes_of_sums_with_a_scale_per_channel() -> None:
    if not exact_kernels().conv.exact:
        pytest.skip(exact_kernels().conv.why)
    x = seeded(2, 3, 6, 6)
    resolver = resolver_of(heads(), SHIPPED["x86_vnni"], [x], "max_range")
    executor = Executor(resolver(resolver.space.widest()))
    values = executor.begin([x])
    for step in executor.steps():
        values.update(zip(step.outputs, step.compute([values[n] for n in step.inputs]), strict=True))
    assert [values[name].dtype.itemsize for name in ("queries.heads", "queries", "keys.heads", "keys")] == [1, 1, 1, 1]
