"""Reuse of values of earlier passes: scores, outputs and peaks do not change, and fewer steps run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from building import Builder, residual_block, seeded
from plans import points
from random_graphs import random_graph, random_inputs
from specs import EVERY

from hago.data.batches import Batches
from hago.graph.execute import run_real
from hago.graph.graph import Graph
from hago.graph.schedule import make_schedule
from hago.plan.space import Bits
from hago.search.evaluate import EvaluationEngine, Evaluator
from hago.search.objective import named_objective
from hago.search.preparation import Prepared, QuantizationOptions, prepare
from hago.simulation.overflow import AccumulatorWatch
from hago.simulation.simulator import Simulator


def prepared_at(seed: int) -> Prepared:
    rng = random.Random(seed)
    graph = random_graph(seed)
    data = [tuple(random_inputs(graph, 10 * seed + i, batch=3 - i)) for i in range(2)]
    estimator = rng.choice(["max_range", "percentile", "power2_range"])
    return prepare(graph, EVERY[rng.choice(sorted(EVERY))], data, QuantizationOptions(estimator=estimator))


def evaluator_of(prepared: Prepared, cache_bytes: int | None = None, engine: EvaluationEngine = "float") -> Evaluator:
    ops = prepared.hardware.known_ops
    return Evaluator(
        prepared.graph,
        prepared.batches,
        named_objective("sqnr"),
        ops,
        cache_bytes=cache_bytes,
        engine=engine,
        measurement_bytes=0,
    )


def walk(prepared: Prepared, seed: int, length: int) -> list[Bits]:
    """Points that differ from an earlier one in one or two groups, as a search asks them."""
    rng, found = random.Random(seed), [prepared.space.widest()]
    groups = list(prepared.space.groups.values())
    while len(found) < length:
        start = dict(rng.choice(found[-3:]))
        for group in rng.sample(groups, min(len(groups), rng.choice([1, 1, 2]))):
            start[group.key] = rng.choice(group.choices)
        found.append(start)
    return found


@pytest.mark.parametrize("seed", range(24))
def test_a_cache_changes_no_score(seed: int) -> None:
    """Any network on any hardware, any walk, any bound of memory, either engine: equal in every figure and overflow."""
    prepared = prepared_at(seed)
    capacity = random.Random(seed).choice([None, 1 << 24, 20_000, 3_000, 500])
    names = {
        "fast": evaluator_of(prepared, capacity, "auto"),
        "with": evaluator_of(prepared, capacity),
        "without": evaluator_of(prepared, 0),
    }
    for bits in walk(prepared, seed, 10):
        plan = prepared.resolver(bits)
        scores = {name: evaluator.score(plan, bits) for name, evaluator in names.items()}
        assert repr(scores["fast"]) == repr(scores["with"]) == repr(scores["without"])
    assert len(names["without"].reuse.cache) == 0


@pytest.mark.parametrize("seed", range(6))
def test_outputs_and_peaks_are_those_of_a_pass_from_the_start(seed: int) -> None:
    prepared = prepared_at(100 + seed)
    evaluator = evaluator_of(prepared, 100_000)
    for bits in walk(prepared, seed, 6):
        plan = prepared.resolver(bits)
        whole, measured = AccumulatorWatch(plan), evaluator.measure(plan)
        simulator = Simulator(plan, watch=whole)
        outputs = (simulator.run(b.inputs) for b in prepared.batches)
        found = evaluator.contributions(outputs)
        assert {n: t.tolist() for n, t in measured.contributions.items()} == {n: t.tolist() for n, t in found.items()}
        assert measured.extremes == whole.extremes


def test_only_steps_that_a_change_reaches_run_again() -> None:
    b = Builder()
    x = b.input(3, 8, 8, name="x")
    for i in range(6):
        x = b.conv2d(x, seeded(3, 3, 1, 1, seed=i), name=f"conv{i}")
    prepared = prepare(b.graph(), "x86_vnni", [seeded(4, 3, 8, 8), seeded(2, 3, 8, 8, seed=1)])
    evaluator = evaluator_of(prepared)
    bits = prepared.space.widest()
    spent = evaluator.reuse.spent

    def steps_of(point: Bits) -> int:
        before = spent.ran
        evaluator.score(prepared.resolver(point), point)
        return spent.ran - before

    assert steps_of(bits) == 2 * 12  # two batches; integers of an edge, and a convolution, each six times
    assert steps_of({**bits, "conv5:1": 4}) == 2 * 12  # now kept, as it was made twice
    assert steps_of({**bits, "conv5:1": 5}) == 2 * 1
    assert steps_of({**bits, "conv5:0": 4}) == 2 * 2
    assert steps_of({**bits, "conv3:1": 4}) == 2 * 5
    assert steps_of({**bits, "conv3:1": 4, "conv5:1": 4}) == 2 * 5
    assert steps_of({**bits, "conv3:1": 4, "conv5:1": 5}) == 2 * 1
    assert steps_of({**bits, "conv3:1": 5, "conv5:1": 5}) == 2 * 5


def test_a_sweep_over_edges_in_little_memory_runs_only_later_steps() -> None:
    """Edges are changed from the first to the last, with room for two values per batch. Each trial runs the steps that
    follow its edge, and few more."""
    length = 12
    b = Builder()
    x = b.input(4, 8, 8, name="x")
    for i in range(length):
        x = b.conv2d(x, seeded(4, 4, 1, 1, seed=i), name=f"conv{i}")
    prepared = prepare(b.graph(), "x86_vnni", [seeded(2, 4, 8, 8, seed=s) for s in range(3)])
    value = 4 * 2 * 4 * 8 * 8  # an accumulator in float32; the integers of an edge take a quarter of it
    evaluator = evaluator_of(prepared, 3 * 3 * value)
    bits = prepared.space.widest()
    evaluator.score(prepared.resolver(bits), bits)
    before = evaluator.reuse.spent.ran
    for i in range(length):
        for few in (5, 4):
            point = {**bits, f"conv{i}:0": few}
            evaluator.score(prepared.resolver(point), point)
    ideal = 3 * 2 * sum(2 * (length - i) for i in range(length))
    assert evaluator.reuse.spent.ran - before <= 1.25 * ideal < 0.75 * 3 * 2 * length * 2 * length


def test_evicted_observations_are_made_again() -> None:
    prepared = prepare(residual_block(), "int16_accumulator", [seeded(8, 3, 8, 8)])
    bits = prepared.space.widest()
    plan = prepared.resolver(bits)
    evaluator = evaluator_of(prepared)
    first = evaluator.score(plan, bits)
    assert first.overflows
    assert [evaluator.score(plan, bits), evaluator.score(plan, bits)] == [first, first]
    evaluator.reuse._observations = type(evaluator.reuse._observations)(1)
    assert evaluator.score(plan, bits) == first


def test_values_of_different_resolvers_are_not_shared() -> None:
    graph, data = residual_block(), [seeded(4, 3, 8, 8)]
    ones = [prepare(graph, "x86_vnni", data, QuantizationOptions(estimator=e)) for e in ("max_range", "percentile:90")]
    shared = Evaluator(graph, ones[0].batches, named_objective("sqnr"), measurement_bytes=0)
    for _ in range(2):
        for one in ones:
            bits = one.space.widest()
            alone = Evaluator(graph, one.batches, named_objective("sqnr"), cache_bytes=0)
            assert shared.score(one.resolver(bits), bits) == alone.score(one.resolver(bits), bits)


# ---------------------------------------------------------------- steps
@pytest.mark.parametrize("seed", range(4))
def test_steps_keep_their_spans_and_names(seed: int) -> None:
    """Integers within their span, inputs made before, and names of their own."""
    prepared = prepared_at(200 + seed)
    for bits, _ in zip(points(prepared.space, seed), range(3), strict=False):
        simulator = Simulator(prepared.resolver(bits))
        for fuse in (True, False):
            values = simulator.begin(next(iter(prepared.batches)).inputs)
            for step in simulator.steps(fuse=fuse):
                assert not set(step.outputs) & set(values) and set(step.inputs) <= set(values)
                with torch.no_grad():
                    made = step.compute([values[n] for n in step.inputs])
                values.update(zip(step.outputs, made, strict=True))
                for value, span in zip(made, step.spans, strict=True):
                    if span is not None and value.numel():
                        assert span[0] <= float(value.min()) and float(value.max()) <= span[1]
                        assert value.equal(value.round())


def test_values_are_freed_after_their_last_use() -> None:
    graph: Graph = residual_block()
    prepared = prepare(graph, "x86_vnni", [seeded(2, 3, 8, 8)])
    steps = Simulator(prepared.resolver(prepared.space.widest())).steps()
    uses = {s.step.name: s.dropped for s in make_schedule(steps, graph.outputs)}
    gone = [name for names in uses.values() for name in names]
    read = {name for step in steps for name in step.inputs} | {step.name for step in steps}
    assert sorted(gone) == sorted(read - set(graph.outputs))
    later: set[str] = set()
    for step in reversed(steps):
        assert not later & set(uses.get(step.name, ()))
        later |= {*step.inputs}


def test_data_that_is_read_again_is_read_batch_by_batch() -> None:
    class Source:
        """Gives its batches anew each time."""

        reads = 0

        def __iter__(self):
            self.reads += 1
            return (seeded(2, 3, 8, 8, seed=s) for s in range(4))

    graph = residual_block()
    prepared = prepare(graph, "x86_vnni", [seeded(2, 3, 8, 8, seed=s) for s in range(4)])
    bits = prepared.space.widest()
    source = Source()
    streamed = Evaluator(
        graph, Batches(source, graph.inputs, cache_bytes=100), named_objective("sqnr"), measurement_bytes=0
    )
    plan = replace(prepared.resolver(bits), graph=graph)
    whole = Evaluator(graph, prepared.batches, named_objective("sqnr"), cache_bytes=0)
    for _ in range(2):
        read_before = source.reads
        assert streamed.score(plan, bits).value == whole.score(plan, bits).value
        assert source.reads == read_before + 1
    assert run_real(graph, [seeded(2, 3, 8, 8)])[0].shape[0] == 2
