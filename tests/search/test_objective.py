"""Objectives: known values, and what must hold whatever the batches."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from building import residual_block, seeded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from toys import SCHEMAS

import hago
from hago.errors import DataError, HagoError
from hago.qat.losses import LOSSES
from hago.search.intervals import paired_interval, wilson_interval
from hago.search.objective import OBJECTIVES, Objective, ObjectiveLike, decibels, named_objective
from hago.search.objective import cross_entropy_probe as gradient_of_cross_entropy
from hago.serialization.summary import MOST_DB


def value(name: str, reference: Tensor, outputs: Tensor, labels: Tensor | None = None) -> float:
    measure = named_objective(name)
    return measure.finish(measure.per_sample([reference], [outputs], labels).mean(0))


REF, OUT = torch.tensor([[3.0, 4.0], [0.0, 5.0]]), torch.tensor([[3.0, 3.0], [1.0, 5.0]])


def test_known_values() -> None:
    assert value("sqnr", REF, OUT) == pytest.approx(10 * math.log10(50 / 2))
    assert value("mse", REF, OUT) == -0.5
    assert value("cosine", REF, OUT) == pytest.approx((21 / (5 * math.sqrt(18)) + 25 / (5 * math.sqrt(26))) / 2)
    assert value("agreement", REF, OUT) == 0.5  # 4 against a tie of 3 and 3, where the first counts; 5 against 5
    assert value("accuracy", REF, OUT, torch.tensor([0, 1])) == 1.0
    p = torch.softmax(REF.double(), 1)
    q = torch.softmax(OUT.double(), 1)
    assert value("kl", REF, OUT) == pytest.approx(-float((p * (p / q).log()).sum(1).mean()))


@pytest.mark.parametrize("name", [n for n, o in OBJECTIVES.items() if not o.needs_labels])
def test_nothing_is_better_than_the_reference(name: str) -> None:
    reference = seeded(20, 5)
    best = value(name, reference, reference)
    measure = OBJECTIVES[name]
    assert best == (0.0 if measure.is_loss else {"dB": MOST_DB, "share": pytest.approx(1.0), "": best}[measure.unit])
    for seed in range(5):
        assert value(name, reference, reference + seeded(20, 5, seed=seed) * 0.3) <= best


@pytest.mark.parametrize("name", OBJECTIVES)
@given(st.integers(1, 19))
def test_batches_do_not_matter(name: str, cut: int) -> None:
    """A mean over samples, so that it streams."""
    reference, outputs, labels = seeded(20, 5), seeded(20, 5, seed=1), torch.arange(20) % 5
    measure = named_objective(name)
    whole = measure.per_sample([reference], [outputs], labels)
    parts = [measure.per_sample([reference[s]], [outputs[s]], labels[s]) for s in (slice(cut), slice(cut, None))]
    assert torch.cat(parts).equal(whole) and whole.dtype == torch.float64 and len(whole) == 20


def test_every_output_counts() -> None:
    measure = named_objective("mse")
    both = measure.per_sample([REF, REF], [REF, OUT], None)
    assert float(both.mean()) == 0.25


def test_images_are_compared_pixel_by_pixel() -> None:
    reference, labels = seeded(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)
    shares = named_objective("accuracy").per_sample([reference], [reference], labels)
    assert shares.shape == (2, 1)
    assert float(shares.mean()) == float((reference.argmax(1) == 0).double().mean())


def test_decibels_at_the_ends() -> None:
    assert decibels(1.0, 0.0) == decibels(1.0, 1e-30) == MOST_DB
    assert decibels(0.0, 0.0) == MOST_DB and decibels(0.0, 1.0) == 0.0
    assert decibels(1.0, 100.0) == -20.0


def test_a_function_of_ones_own() -> None:
    def worst(reference: list[Tensor], outputs: list[Tensor], labels: Tensor | None) -> float:
        return -float((reference[0] - outputs[0]).abs().max())

    made = named_objective(worst)  # type: ignore[arg-type]
    assert made.name == "worst" and made.finish(made.per_sample([REF], [OUT], None).mean(0)) == -1.0
    with pytest.raises(HagoError, match="inf"):
        named_objective(lambda r, o, y: math.inf).per_sample([REF], [OUT], None)


def test_a_trial_in_the_log_may_hold_every_figure() -> None:
    schema = json.loads((SCHEMAS / "trial.schema.json").read_text("utf-8"))
    figures = set(schema["properties"]["results"]["properties"])
    assert figures == {"samples", *(objective.figure for objective in OBJECTIVES.values())}


def test_an_unknown_objective() -> None:
    with pytest.raises(HagoError, match="Did you mean 'sqnr'"):
        named_objective("sqrn")
    with pytest.raises(HagoError, match="needs labels"):
        value("accuracy", REF, OUT)


# ---------------------------------------------------------------- intervals
def test_wilson_known_values() -> None:
    """E. B. Wilson's interval for 8 of 10 at 95 %: 0.4902 to 0.9433."""
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 10)[0] == 0.0 and wilson_interval(10, 10)[1] == pytest.approx(1.0)


@given(st.integers(1, 500), st.data())
def test_wilson_holds_the_proportion(samples: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, samples))
    low, high = wilson_interval(successes, samples)
    assert 0 <= low <= successes / samples <= high + 1e-12 <= 1 + 1e-9


def test_paired_interval() -> None:
    mean, low, high = paired_interval(torch.tensor([1.0, 0.0, -1.0, 1.0]))
    assert mean == 0.25 and low < mean < high
    assert high - mean == pytest.approx(1.959964 * torch.tensor([1.0, 0.0, -1.0, 1.0]).std().item() / 2, rel=1e-5)
    assert paired_interval(torch.tensor([1.0])) == (1.0, -math.inf, math.inf)


@pytest.mark.parametrize(
    ("labels", "outputs", "says"),
    [
        (
            torch.zeros(4, 1, dtype=torch.int64),
            (4, 3),
            r"labels of shape \(4, 1\) do not fit outputs of shape \(4, 3\)",
        ),
        (torch.ones(4, 3, dtype=torch.int64), (4, 3), r"expected \(4,\): one class per position"),
        (torch.zeros(4, dtype=torch.int64), (4, 3, 2), r"expected \(4, 2\)"),
        (torch.zeros(4), (4, 1), "two classes or more on axis 1"),
        (torch.zeros(4), (4,), "two classes or more on axis 1"),
        (torch.zeros(4, 1), (4, 1), "two classes or more on axis 1"),
        (torch.tensor([0, 1, 3, 2]), (4, 3), "labels from 0 to 3 do not fit outputs of 3 classes; expected 0 to 2"),
        (torch.tensor([0, -1, 1, 2]), (4, 3), "labels from -1 to 2 do not fit"),
        (torch.tensor([0.0, 0.5, 1.0, 2.0]), (4, 3), "not whole numbers"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels: Tensor, outputs: tuple[int, ...], says: str) -> None:
    """By the measure, by the pass for gradients and by training."""
    made = seeded(*outputs)
    with pytest.raises(DataError, match=says):
        OBJECTIVES["accuracy"].per_sample([made], [made], labels)
    with pytest.raises(DataError, match=says):
        gradient_of_cross_entropy([made], labels, torch.Generator())
    with pytest.raises(DataError, match=says):
        LOSSES["labels"]([made], [made], labels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.float32])
def test_classes_have_any_dtype(dtype: torch.dtype) -> None:
    made, labels = seeded(4, 3, 2), torch.tensor([[0, 2]] * 4)
    expected = LOSSES["labels"]([made], [made], labels)
    assert LOSSES["labels"]([made], [made], labels.to(dtype)).equal(expected)
    hot = torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).float()
    torch.testing.assert_close(LOSSES["labels"]([made], [made], hot), expected)  # probabilities of classes
    right = OBJECTIVES["accuracy"].per_sample([made], [made], labels)
    assert OBJECTIVES["accuracy"].per_sample([made], [made], labels.to(dtype)).equal(right)


@pytest.mark.parametrize("function", [lambda reference, outputs: 0.0, lambda *, x: 0.0, lambda: 0.0])
def test_a_function_of_other_arguments_is_no_objective(function: Any) -> None:
    with pytest.raises(HagoError, match=r"takes \(.*expected a function of \(reference, outputs, labels\)"):
        named_objective(function)


def test_a_function_with_further_defaults_is_an_objective() -> None:
    assert named_objective(lambda reference, outputs, labels, weight=1.0: 0.0).name == "<lambda>"


def test_a_function_that_fails_is_named_with_its_line() -> None:
    def broken(reference: Any, outputs: Any, labels: Any) -> float:
        raise KeyError("boxes")

    with pytest.raises(HagoError, match=r"objective function failed in .*test_objective\.py, line \d+: KeyError") as at:
        named_objective(broken).per_sample([REF], [OUT], None)
    assert isinstance(at.value.__cause__, KeyError)


@pytest.mark.parametrize(("wrong", "says"), [(math.nan, "is nan, .* first for sample 3;"), (math.inf, "is -inf;")])
def test_an_objective_whose_value_is_no_number_is_refused(wrong: float, says: str) -> None:
    def errors(reference: Any, outputs: Any, labels: Any) -> Tensor:
        made = (reference[0] - outputs[0]).abs().flatten(1).double()
        made[3] = wrong
        return made

    measure = Objective("errors", errors, lambda mean: -float(mean[0]))
    with pytest.raises(HagoError, match=f"the objective 'errors' {says}.*expected a finite number"):
        searched(measure)


@pytest.mark.parametrize(
    ("per_sample", "finish", "says"),
    [
        (
            lambda r, o, y: r[0].double(),
            lambda mean: None,
            "finish of objective 'own' returned None; expected a number",
        ),
        (lambda r, o, y: r[0].double(), lambda mean: mean, r"finish of objective 'own' returned tensor"),
        (lambda r, o, y: 1.0, lambda mean: 1.0, "per_sample of objective 'own' returned 1.0; expected a tensor"),
    ],
)
def test_an_objective_that_returns_something_else_is_refused(per_sample: Any, finish: Any, says: str) -> None:
    with pytest.raises(HagoError, match=says):
        searched(Objective("own", per_sample, finish))


def test_an_objective_with_a_unit_that_is_none_is_refused() -> None:
    with pytest.raises(HagoError, match="objective 'own' has the unit 'percent'; expected one of '', 'dB', 'share'"):
        named_objective(replace(OBJECTIVES["sqnr"], name="own", unit="percent"))  # type: ignore[arg-type]


def test_the_names_of_hagos_own_objectives_are_taken() -> None:
    def mse(reference: Any, outputs: Any, labels: Any) -> float:
        return 0.0

    ours = OBJECTIVES["sqnr"]
    for taken in (mse, replace(ours), replace(ours, name="own", reported_as="sim_acc")):
        with pytest.raises(HagoError, match="an objective of your own has the name '(mse|sqnr|sim_acc)'"):
            named_objective(taken)
    assert named_objective(ours) is ours and named_objective(replace(ours, name="own")).figure == "own"


def test_what_an_objective_changes_in_place_changes_nothing_else() -> None:
    def error(reference: Any, outputs: Any, labels: Any) -> float:
        return -float((reference[0] / 2 - outputs[0] / 4).norm())

    def in_place(reference: Any, outputs: Any, labels: Any) -> float:
        return -float(reference[0].div_(2).sub_(outputs[0].div_(4)).norm())

    def errors(reference: Any, outputs: Any, labels: Any) -> Tensor:
        return torch.full((len(outputs[0]), 1), in_place(reference, outputs, labels))

    expected = searched(error).result.trials
    for measure in (in_place, Objective("errors", errors, lambda mean: float(mean[0]))):
        found = searched(measure).result.trials
        assert [t.results["sqnr"] for t in found] == [t.results["sqnr"] for t in expected]
        assert [t.score.value for t in found] == pytest.approx([t.score.value for t in expected])


def searched(measure: ObjectiveLike) -> Any:
    """The score of a short search for an objective."""
    data = [seeded(8, 3, 8, 8)]
    how = {"searcher": "greedy", "budget": 3, "corrections": "none", "progress": False}
    return hago.search_quantize_strategy(residual_block(), "vta", data, objective=measure, **how)[1]  # type: ignore[arg-type]
