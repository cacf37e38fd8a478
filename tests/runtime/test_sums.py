"""A sum of two values whose register may overflow equals the reference, both by itself and fused into a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
from building import Builder, seeded
from plans import resolver_of

from hago.arithmetic.equality import count_differing
from hago.arithmetic.types import INT16
from hago.hardware.file import load_hardware
from hago.hardware.hardware import Accumulator
from hago.runtime.native.executor import Executor
from hago.runtime.native.self_test import exact_kernels
from hago.runtime.reference import IntegerModel


@pytest.mark.parametrize("overflow", ["wrap", "saturate_end", "saturate_each"])
@pytest.mark.parametrize("op", ["add", "sub"])
@pytest.mark.parametrize("after", ["a convolution", "a value", "a value that is broadcast"])
def test_sums_that_overflow_their_register(after: str, op: str, overflow: str) -> None:
    b = Builder()
    x, y = b.input(3, 6, 6), b.conv2d(b.input(3, 6, 6), seeded(3, 3, 3, 3, seed=1))
    if after == "a value":
        y = b.call("clamp", y, min=-9.0, max=None)
    if after == "a value that is broadcast":
        y = b.call("adaptive_max_pool2d", y, output_size=[1, 1])
    b.call("relu", b.call(op, x, y, name="sum"))
    graph, data = b.graph(), [seeded(4, 3, 6, 6, seed=s) for s in range(2)]
    chip = load_hardware("int16_accumulator")
    descs = chip.ops[op]
    order = ("channels_outer", "first") if overflow == "saturate_each" else ()  # a sum of two is clamped once
    register = Accumulator(INT16, overflow, *order)
    sums = [replace(d, accumulator=register) if d.out_dtypes == (INT16,) else d for d in descs]
    resolver = resolver_of(graph, replace(chip, ops={**chip.ops, op: sums}), data)
    plan = resolver(resolver.space.widest())
    assert not plan.nodes["sum"].proved
    executor = Executor(plan)
    if exact_kernels().passes.exact:
        assert next(r.kernel for r in executor.explain().rows if r.node == "sum").startswith("native ")
    inputs = [8 * v for v in data]  # so that one operand is at its ends
    (fast,), (exact,) = executor.run(inputs), IntegerModel(plan).run(inputs)
    assert fast.shape == exact.shape and count_differing(fast, exact) == 0
