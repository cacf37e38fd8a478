"""Recorded passes: a program that is repeated on other inputs gives what every pass by itself gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from building import Builder, residual_block, seeded
from plans import resolver_of
from random_graphs import random_graph, random_inputs
from specs import EVERY
from torch import Tensor

from hago.arithmetic.equality import count_differing
from hago.graph import Graph
from hago.plan import Plan
from hago.runtime.native.executor import MOST_PROGRAMS, Executor
from hago.runtime.native.program import MOST_COPIED, Memory
from hago.runtime.native.self_test import exact_kernels
from hago.runtime.reference import IntegerModel

pytestmark = pytest.mark.skipif(exact_kernels().calls is None, reason="no native kernels")


def plan_of(graph: Graph, name: str, inputs: Sequence[Tensor]) -> Plan:
    resolver = resolver_of(graph, EVERY[name], list(inputs))
    return resolver(resolver.space.widest())


def differing(executor: Executor, batches: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> int:
    """In how many values three rounds over batches differ, of which the second is recorded and the third repeated."""
    wrong = 0
    for _ in range(3):
        for batch, outputs in zip(batches, expected, strict=True):
            pairs = zip(executor.run(batch), outputs, strict=True)
            wrong += sum(count_differing(x, y) for x, y in pairs)
    return wrong


def differing_values(seed: int) -> int:
    """The law: a random network on random inputs of two shapes, whole and in parts."""
    rng, graph = random.Random(seed), random_graph(seed)
    name = rng.choice(sorted(EVERY))
    plan = plan_of(graph, name, random_inputs(graph, seed))
    batches = [random_inputs(graph, seed + 1 + i, batch=size, size=3.0) for i, size in enumerate((2, 5, 2, 5))]
    expected = [IntegerModel(plan).run(batch) for batch in batches]
    return sum(differing(Executor(plan, cached_bytes=room), batches, expected) for room in (1, 1 << 20))


@pytest.mark.parametrize("seed", range(500, 520))
def test_repeated_passes_are_those_of_other_inputs(seed: int) -> None:
    assert differing_values(seed) == 0


def test_the_law_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is free too early is overwritten before it is read."""

    def retain(memory: Memory, value: object) -> None:
        Memory.release(memory, value)

    def allocate(memory: Memory, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        there = made(memory, shape, dtype)
        memory._free.append(there.untyped_storage().data_ptr())
        return there

    made = Memory.allocate
    monkeypatch.setattr(Memory, "allocate", allocate)
    assert any(differing_values(seed) for seed in range(500, 510))


def deep() -> tuple[Plan, Sequence[Tensor]]:
    graph, x = residual_block(), seeded(2, 3, 8, 8)
    return plan_of(graph, "x86_vnni", [x]), [x]


def test_outputs_are_not_overwritten_by_later_passes() -> None:
    plan, (x,) = deep()
    executor = Executor(plan)
    first = [executor.run([x])[0] for _ in range(4)]
    kept = [y.clone() for y in first]
    for seed in range(4):
        executor.run([seeded(2, 3, 8, 8, seed=seed, size=5.0)])
    assert all(y.equal(z) for y, z in zip(first, kept, strict=True))
    first[3].zero_()
    assert executor.run([x])[0].equal(first[0])


def test_several_threads_run_one_executor() -> None:
    plan, _ = deep()
    executor, model = Executor(plan), IntegerModel(plan)
    batches = [seeded(2, 3, 8, 8, seed=seed, size=2.0) for seed in range(8)]
    expected = [model.run([x])[0] for x in batches]

    def run(index: int) -> bool:
        return bool(executor.run([batches[index % 8]])[0].equal(expected[index % 8]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))


def test_few_programs_are_kept() -> None:
    plan, _ = deep()
    executor = Executor(plan)
    for size in (*range(1, 6), *range(1, 6)):
        executor.run([seeded(size, 3, 8, 8)])
    assert len(executor._programs._idle) == MOST_PROGRAMS


def test_a_program_runs_with_and_without_inference_mode() -> None:
    plan, inputs = deep()
    executor, (expected,) = Executor(plan), IntegerModel(plan).run(inputs)
    with torch.inference_mode():
        for _ in range(3):
            assert executor.run(inputs)[0].equal(expected)
    for _ in range(2):
        output = executor.run(inputs)[0]
        assert output.equal(expected) and not output.is_inference()


@pytest.mark.parametrize("width", [4, MOST_COPIED // 32])
def test_small_and_large_values_of_float_nodes(width: int) -> None:
    b = Builder()
    x = b.call("softmax", b.input(2, 4, width, name="x"), name="soft", axis=1)
    y = b.conv2d(x, seeded(3, 2, 1, 1), name="conv", padding=[0, 0])
    graph = b.graph(b.call("add", y, b.call("softmax", y, name="again", axis=1), name="sum"))
    plan = plan_of(graph, "x86_vnni", [seeded(2, 2, 4, width)])
    batches = [[seeded(2, 2, 4, width, seed=seed, size=4.0)] for seed in range(3)]
    assert differing(Executor(plan), batches, [IntegerModel(plan).run(batch) for batch in batches]) == 0


def test_memory_is_used_again() -> None:
    memory = Memory()
    first = memory.allocate((100,), torch.float32)
    memory.retain(first)
    memory.retain([first[:3], (first.view(10, 10),)])
    memory.release(first)
    assert not memory.holds(torch.empty(3)) and memory.allocate((100,), torch.int32).data_ptr() != first.data_ptr()
    memory.release((first,))
    second = memory.allocate((7, 50), torch.uint8)
    assert memory.holds(second) and second.data_ptr() == first.data_ptr() and second.shape == (7, 50)
