"""The time of integer models: what is reported, and on which samples; no time is asserted."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from building import residual_block, seeded
from torch import Tensor

import hago
from hago.analysis import speed
from hago.analysis.speed import NO_CALL, BatchSpeed, time_against_float
from hago.data.batches import Batches
from hago.errors import HagoError
from hago.plan.plan import Plan
from hago.runtime.native import executor
from hago.runtime.native.executor import Executor, NativeIntegerModel
from hago.runtime.native.self_test import NOTHING

DATA = [seeded(8, 3, 8, 8, seed=s) for s in range(2)]


def resolved() -> tuple[Plan, Batches]:
    quantizer = hago.quantize(residual_block(), "x86_vnni", DATA)
    return quantizer.plan, Batches(DATA, quantizer.plan.graph.inputs)


def test_every_batch_size_is_timed_on_samples_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, batches = resolved()
    seen: dict[int, Tensor] = {}
    run = NativeIntegerModel.run

    def watched(self: NativeIntegerModel, inputs: list[Tensor]) -> list[Tensor]:
        seen[len(inputs[0])] = inputs[0]
        return run(self, inputs)

    monkeypatch.setattr(NativeIntegerModel, "run", watched)
    report = time_against_float(plan, batches, (1, 12, 40), rounds=2)
    assert [b.batch for b in report.batches] == [1, 12, 40] == sorted(seen)
    samples = torch.cat(DATA)
    assert torch.equal(seen[12], samples[:12]) and torch.equal(seen[40], torch.cat([samples] * 3)[:40])
    assert all(b.rounds == 2 and b.float_seconds > 0 and b.integer_seconds > 0 for b in report.batches)
    computed = sum(report.kernels.values())
    assert computed == len(Executor(plan).explain().rows)


def test_without_kernels_what_the_user_runs_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums in float32, not kernels of torch node by node, which take ten times as long."""
    plan, batches = resolved()
    monkeypatch.setattr(executor, "exact_kernels", lambda: NOTHING)
    monkeypatch.setattr(Executor, "run", lambda *_: pytest.fail("an engine that no model runs on"))
    report = time_against_float(plan, batches, (1,), rounds=1)
    assert report.kernels == NativeIntegerModel(plan).explain().kernels and "float32 sums" in report.kernels
    assert report.exact_kernels.count("switched off") == 1


def test_the_report_says_where_and_how() -> None:
    report = time_against_float(*resolved(), (1,), rounds=1)
    text = str(report)
    kernels = [name for name in report.kernels if name != NO_CALL]
    for part in (report.machine, f"{torch.get_num_threads()} thread", f"torch {torch.__version__}", *kernels):
        assert part in text
    for quartiles, noisy in (((0.5, 0.6), False), ((0.5, 2.0), True)):
        batch = replace(report.batches[0], quartiles=quartiles)
        assert ("uncertain at batch 1" in str(replace(report, batches=(batch,)))) == noisy
    assert report.to_json()["batches"][0]["batch"] == 1


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    pairs = [(1.0, 0.5), (2.0, 0.5), (1.0, 2.0)]
    summary = speed._summary(4, pairs)
    assert summary.ratio == 0.5 and summary.float_seconds == 1.0 and summary.integer_seconds == 0.5
    assert summary.quartiles[0] <= summary.ratio <= summary.quartiles[1]
    assert speed._summary(1, [(1.0, 0.25)]) == BatchSpeed(1, 1.0, 0.25, 0.25, (0.25, 0.25), 1)
    assert statistics.median([0.5, 0.25, 2.0]) == summary.ratio


def test_slow_models_take_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MOST_SECONDS", 0.0)
    (batch,) = time_against_float(*resolved(), (1,), rounds=50).batches
    assert batch.rounds == speed.LEAST_ROUNDS


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"batch_sizes": (0,)}, {"batch_sizes": (True,)}, {"rounds": 1.5}])
def test_wrong_numbers_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(HagoError, match="expected an integer, 1 or more"):
        time_against_float(*resolved(), **wrong)  # type: ignore[arg-type]
