"""Scores of points, the overflows that are seen, and a start that has none."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from building import Builder, residual_block, seeded
from chips import Chip
from ops.laws import accumulators
from plans import fixed_resolver, resolver_of

from hago.data.batches import Batch, Batches
from hago.errors import DataError, HagoWarning, InfeasibleBits
from hago.graph.execute import run_real
from hago.hardware.file import load_hardware
from hago.hardware.hardware import Hardware, OpDesc
from hago.plan import Plan
from hago.search.evaluate import Evaluator, Measurement
from hago.search.objective import named_objective
from hago.search.preparation import Prepared, QuantizationOptions, prepare
from hago.search.safe_bits import first_safe_bits, widest_safe_bits
from hago.simulation.overflow import AccumulatorExtremes, AccumulatorWatch
from hago.simulation.simulator import Simulator

DATA = [(seeded(8, 3, 8, 8, seed=s), torch.arange(8) % 5) for s in range(2)]


@pytest.fixture(scope="module")
def narrow() -> Prepared:
    return prepare(residual_block(), "int16_accumulator", DATA)


# ---------------------------------------------------------------- overflow
def test_peaks_count_what_does_not_fit(narrow: Prepared) -> None:
    plan = narrow.resolver(narrow.space.widest())
    watch = AccumulatorWatch(plan)
    x = [DATA[0][0] * 8]
    Simulator(plan, watch=watch).run(x)
    for name, c in accumulators(plan, x).items():
        node = plan.nodes[name]
        dtype = node.desc.register.dtype
        outside = int(((c < dtype.min) | (c > dtype.max)).sum())
        assert watch.extremes.overflows.get(name, 0) == outside
        assert watch.extremes.accumulators.get(name, 0) == (0 if node.proved else c.numel())
        if outside:
            largest = max(float(c.max()) / dtype.max, float(c.min()) / dtype.min)
            assert watch.extremes.peaks[name] == largest and 2 ** watch.extremes.excess_bits[name] >= largest
    assert watch.extremes.overflows


def test_one_too_many_is_an_overflow_of_one_bit() -> None:
    b = Builder()
    b.linear(b.input(3, name="x"), torch.ones(1, 3), name="fc")
    chip = Chip(register="int16").hardware()
    plan = fixed_resolver(b.graph(), chip, {"fc:0": (-1.0, 1.0)})({"fc:0": 8, "fc:1": 8})
    for values, overflows in (
        ((127, 127, 3), {}),
        ((127, 127, 5), {"fc": 1}),
        ((-127, -127, -4), {}),
        ((-127, -127, -5), {"fc": 1}),
    ):
        watch = AccumulatorWatch(plan)
        Simulator(plan, watch=watch).run([torch.tensor([values]) / 128])
        assert watch.extremes.overflows == overflows  # 127 * 127 * 2 + 127 * 4 = 32766
        assert set(watch.extremes.excess_bits.values()) <= {1}


def test_a_safe_start_holds_what_was_seen(narrow: Prepared) -> None:
    bits = widest_safe_bits(narrow.resolver, narrow.calibration.peaks)
    narrow.space.check(bits)
    plan = narrow.resolver(bits)
    for name, node in plan.nodes.items():
        largest = narrow.calibration.peaks[name]
        assert node.proved or largest / float(node.register.scale.min()) <= node.desc.register.dtype.max
    wide = prepare(residual_block(), "x86_vnni", DATA)
    assert widest_safe_bits(wide.resolver, wide.calibration.peaks) == wide.space.widest()


def test_the_first_safe_point_does_not_overflow(narrow: Prepared) -> None:
    evaluator = Evaluator(narrow.graph, narrow.batches, named_objective("sqnr"))
    bits, score, _ = first_safe_bits(evaluator, narrow.resolver, narrow.calibration.peaks)
    assert not score.overflows and sum(bits.values()) < sum(narrow.space.widest().values())
    assert evaluator.score(narrow.resolver(narrow.space.widest()), narrow.space.widest()).overflows


def test_no_point_is_safe() -> None:
    graph = residual_block()
    hopeless = Hardware({"conv2d": [OpDesc("int8", "int8")]}, name="hopeless")
    prepared = prepare(graph, hopeless, DATA)
    evaluator = Evaluator(graph, prepared.batches, named_objective("sqnr"))
    with pytest.raises(InfeasibleBits, match=r"overflows its accumulator \(int8\).* \d+ times.*wider accumulator"):
        first_safe_bits(evaluator, prepared.resolver, prepared.calibration.peaks)


# ---------------------------------------------------------------- scores
def test_a_score_says_all_there_is() -> None:
    graph = residual_block()
    resolver = resolver_of(graph, load_hardware("x86_vnni"), [DATA[0][0]])
    batches = Batches(DATA, graph.inputs)
    evaluator = Evaluator(graph, batches, named_objective("cosine"), measurement_bytes=0)
    bits = resolver.space.widest()
    plan = resolver(bits)
    score = evaluator.score(plan, bits)
    assert set(score.results) == {"samples", "sqnr", "agreement", "sim_acc", "sim_acc_interval", "cosine"}
    assert score.value == score.results["cosine"] and score.results["samples"] == 16
    assert score.total_bits == sum(bits.values()) and score.plan_key == plan.key and score.unproved == 0
    assert evaluator.score(plan, bits) == score
    outputs = torch.cat([Simulator(plan)(x) for x, _ in DATA])
    reference = torch.cat([run_real(graph, [x])[0] for x, _ in DATA])
    labels = torch.cat([y for _, y in DATA])
    assert score.results["sim_acc"] == float((outputs.argmax(1) == labels).double().mean())
    noise = float((outputs.double() - reference.double()).square().sum())
    assert score.results["sqnr"] == pytest.approx(10 * torch.log10(reference.double().square().sum() / noise).item())


def test_measurements_are_kept_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point that is measured once more is found, without its Plan, and equal to what a pass gives."""
    graph, simulated = residual_block(), list[str]()
    simulate = Evaluator._simulate

    def counted(self: Evaluator, plan: Plan, *more: Any) -> Measurement:
        simulated.append(plan.key)
        return simulate(self, plan, *more)

    monkeypatch.setattr(Evaluator, "_simulate", counted)
    resolver = resolver_of(graph, load_hardware("x86_vnni"), [DATA[0][0]])
    plans = [resolver(bits) for bits in (resolver.space.widest(), resolver.space.narrowest())]
    batches, sqnr = Batches(DATA, graph.inputs), named_objective("sqnr")
    for size, passes in ((1 << 20, 2), (1, 4), (0, 4)):
        simulated.clear()
        evaluator = Evaluator(graph, batches, sqnr, measurement_bytes=size)
        first, again = ([evaluator.measure(plan) for plan in plans] for _ in range(2))
        assert len(simulated) == passes
        for one, other in zip(first, again, strict=True):
            assert one.extremes == other.extremes and one.contributions.keys() == other.contributions.keys()
            assert all(torch.equal(t, other.contributions[n]) for n, t in one.contributions.items())
    evaluator = Evaluator(graph, batches, sqnr)
    seen: list[Batch] = []
    evaluator.measure(plans[0])
    evaluator.measure(plans[0], see=lambda batch, outputs: seen.append(batch))  # outputs are not kept
    assert len(seen) == len(DATA)
    partial = evaluator.measure(plans[0], lambda contributions, extremes: True)
    assert len(partial.contributions["sqnr"]) == len(DATA[0][0])
    cosine = evaluator.judging_by(named_objective("cosine"))
    assert set(cosine.measure(plans[0]).contributions) == {"cosine"}


def test_kept_measurements_are_not_those_of_other_weights() -> None:
    """Training gives a model other weights, and the keys of its Plans may stay, since they cover scales alone."""
    graph, batches, sqnr = residual_block(), Batches(DATA, ["x"]), named_objective("sqnr")
    trained = {n: c * 0.998 if c.ndim == 4 else c for n, c in graph.consts.items()}
    graphs = graph, replace(graph, consts=trained)
    plans = [prepare(of, "vta", DATA, QuantizationOptions(estimator="power2_range")) for of in graphs]
    one, other = (prepared.resolver(prepared.space.widest()) for prepared in plans)
    assert one.key == other.key
    shared, fresh = (Evaluator(graph, batches, sqnr) for _ in range(2))
    before = shared.measure(one).contributions["sqnr"]
    after, wanted = (evaluator.measure(other).contributions["sqnr"] for evaluator in (shared, fresh))
    assert torch.equal(after, wanted) and not torch.equal(after, before)


def test_many_small_measurements_are_bounded() -> None:
    """What a measurement of one sample takes beside its values counts, too."""
    extremes = AccumulatorExtremes({"a": 1}, {"a": 2.0, "b": 0.5}, {"a": 3, "b": 3})
    few, many = (Measurement({"sqnr": torch.zeros(n, 2)}, extremes) for n in (1, 1001))
    assert few.bytes > 1000 and many.bytes - few.bytes == 8000


def test_the_float_model_agrees_with_itself() -> None:
    graph = residual_block()
    evaluator = Evaluator(graph, Batches(DATA, graph.inputs), named_objective("sqnr"))
    found = evaluator.summary(evaluator.float_contributions())
    assert found["agreement"] == 1.0 and found["sqnr"] == 200.0


def test_more_bits_are_more_like_the_float_model() -> None:
    graph = residual_block()
    resolver = resolver_of(graph, load_hardware("x86_vnni"), [DATA[0][0]])
    evaluator = Evaluator(graph, Batches(DATA, graph.inputs), named_objective("sqnr"))
    values = [evaluator.score(resolver(b), b).value for b in (resolver.space.narrowest(), resolver.space.widest())]
    assert values[0] + 10 < values[1]


@pytest.mark.parametrize(
    ("labels", "says"), [((), "got none"), ((torch.full((4,), 0.5),), "got some that are not whole numbers")]
)
def test_classes_are_needed_for_accuracy(labels: tuple[torch.Tensor, ...], says: str) -> None:
    graph = residual_block()
    with pytest.raises(DataError, match=f"'accuracy' needs labels that are classes, {says}"):
        Evaluator(graph, Batches([(DATA[0][0][:4], *labels)], graph.inputs), named_objective("accuracy"))


def test_accuracy_is_of_classes_alone() -> None:
    """Other labels are for the user's own objective."""
    graph, x = residual_block(), DATA[0][0][:4]
    classes = run_real(graph, [x])[0].argmax(1)
    for labels, right in ((classes, 1.0), (classes.double(), 1.0), (classes + 0.25, None)):
        with nullcontext() if right else pytest.warns(HagoWarning, match="not whole numbers"):
            evaluator = Evaluator(graph, Batches([(x, labels)], graph.inputs), named_objective("sqnr"))
        assert evaluator.summary(evaluator.float_contributions()).get("sim_acc") == right


def test_one_value_is_no_choice_of_classes() -> None:
    """Of a regression's labels, also where they happen to be whole, no accuracy is said."""
    b = Builder()
    graph = b.graph(b.linear(b.input(3, name="x"), seeded(1, 3)))
    with pytest.warns(HagoWarning, match="two classes or more"):
        found = Evaluator(graph, Batches([(seeded(4, 3), torch.arange(4))], graph.inputs), named_objective("sqnr"))
    assert set(found.summary(found.float_contributions())) == {"samples", "sqnr", "agreement"}
    with pytest.raises(DataError, match="two classes or more"):
        Evaluator(
            graph, Batches([(seeded(4, 3), torch.arange(4))], graph.inputs), named_objective("accuracy")
        ).float_contributions()


@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 9, 1, 255]), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 5)]
)
def test_labels_that_are_no_classes_are_a_warning_where_none_are_needed(labels: torch.Tensor) -> None:
    """Ignored pixels, labels of another shape, several classes at once: they may be for an objective of the user's."""
    b = Builder()
    graph = b.graph(b.linear(b.input(3, name="x"), seeded(5, 3)))
    with pytest.warns(HagoWarning, match="Accuracy is not measured"):
        found = Evaluator(graph, Batches([(seeded(4, 3), labels)], graph.inputs), named_objective("sqnr"))
    assert set(found.summary(found.float_contributions())) == {"samples", "sqnr", "agreement"}
