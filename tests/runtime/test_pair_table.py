"""Elementwise operations on two bytes, in any arithmetic, are one table that holds the reference's integers."""

from __future__ import annotations

import itertools

import pytest
import torch
from building import Builder, seeded
from plans import resolver_of

from hago.arithmetic.equality import count_differing
from hago.hardware.file import load_hardware
from hago.runtime.native.executor import Executor
from hago.runtime.native.self_test import exact_kernels
from hago.runtime.reference import IntegerModel


@pytest.mark.parametrize("other", ["equal", "a gate", "a constant", "itself"])
@pytest.mark.parametrize("op", ["add", "sub", "mul"])
@pytest.mark.parametrize("hardware", ["tflite", "onnxruntime_cpu", "tpu_mlir_bm1684x_asym"])
def test_two_bytes(hardware: str, op: str, other: str) -> None:
    b = Builder()
    x, gate = (b.conv2d(b.input(3, 4, 5), seeded(6, 3, 3, 3, seed=i)) for i in (1, 2))
    if other == "a gate":
        gate = b.call("mean", gate, axes=[2, 3], keepdim=True, count=20)
    second = {"a constant": lambda: b.const(seeded(1, 6, 1, 1, seed=3)), "itself": lambda: x}.get(other, lambda: gate)()
    b.call(op, x, second, name="both")
    graph, data = b.graph(), [seeded(4, 3, 4, 5, seed=s) for s in range(2)]
    chip = load_hardware(hardware)
    resolver = resolver_of(graph, chip, data)
    plan = resolver(resolver.space.widest())
    executor = Executor(plan)
    if exact_kernels().passes.exact:
        assert next(r.kernel for r in executor.explain().rows if r.node == "both") == "native pair table"
    for size, layout in itertools.product((4, 1), (torch.contiguous_format, torch.channels_last)):
        inputs = [(3 * v[:size]).to(memory_format=layout) for v in data]
        (fast,), (exact,) = executor.run(inputs), IntegerModel(plan).run(inputs)
        assert fast.shape == exact.shape and count_differing(fast, exact) == 0
