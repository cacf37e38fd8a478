"""Inspection of a model: batches, memory, blame, infinite values, bad input, golden reports."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hago.analysis.inspect import Moments, inspect_plan
from hago.data.batches import Batch
from hago.errors import DataError
from hago.graph.execute import compute_real
from hago.graph.graph import Node
from hago.hardware.hardware import Hardware
from hago.ops import Ops

from .golden_files import assert_golden
from .models import NARROW, OUTPUT, WIDE, Concat, Island, Pooled, Residual, batches, make_plan, sample, set_weights
from .test_causes import Channels, Heavy


def test_batches_add_up() -> None:
    x = sample(8)
    plan = make_plan(Concat(), WIDE, x, at_most=5)
    at_once, parts = inspect_plan(plan, batches(x)), inspect_plan(plan, batches(*x.split(2)))
    assert (at_once.batches, at_once.samples, parts.batches, parts.samples) == (1, 8, 4, 8)
    for one, other in zip(at_once.rows, parts.rows, strict=True):
        assert one.count == other.count
        assert one.max_error == other.max_error
        assert one.error_power == pytest.approx(other.error_power)
        assert one.float_values.minimum == other.float_values.minimum
        assert one.simulated_values.deviation == pytest.approx(other.simulated_values.deviation)
        assert [e.saturated for e in one.edges] == [e.saturated for e in other.edges]
        for cause in one.causes:
            assert one.causes[cause].power == pytest.approx(other.causes[cause].power)


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), min_size=1, max_size=6),
)
def test_moments_are_those_of_all_values(chunks: list[list[float]]) -> None:
    moments = Moments()
    for chunk in chunks:
        moments.add(torch.tensor(chunk, dtype=torch.float64))
    everything = np.concatenate([np.array(c) for c in chunks])
    scale = float(np.abs(everything).max()) + 1.0
    assert moments.count == everything.size
    assert moments.mean == pytest.approx(everything.mean(), abs=1e-9 * scale)
    assert moments.deviation == pytest.approx(everything.std(), abs=1e-6 * scale)
    assert (moments.low, moments.high) == (everything.min(), everything.max())


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(12))
        set_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_values_are_dropped_after_their_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(Chain(), WIDE)
    refs: list[weakref.ref[Tensor]] = []
    most = 0

    def counted(node: Node, values: Sequence[Any], ops: Ops) -> Any:
        nonlocal most
        value = compute_real(node, values, ops)
        most = max(most, sum(r() is not None for r in refs))
        refs.append(weakref.ref(value))
        return value

    monkeypatch.setattr("hago.analysis.inspect.compute_real", counted)
    gc.collect()
    inspect_plan(plan, batches(sample()))
    assert len(refs) == 24
    assert most <= 2


def test_the_node_to_blame_is_the_one_to_keep_float() -> None:
    x = sample()

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.wide, self.last = nn.Conv2d(2, 2, 1), Channels(0.01), nn.Conv2d(1, 2, 1)
            for layer in (self.first, self.last):
                set_weights(layer, step=0.013)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.wide(self.first(x)))

    model = Deep()
    statistic = inspect_plan(make_plan(model, WIDE, x), batches(x))
    parts = statistic.blame
    blamed = max(parts, key=lambda n: parts[n])
    sqnr_without = {n: inspect_plan(make_plan(model, WIDE, x, keep_float=[n]), batches(x))["last"].sqnr for n in parts}
    assert len(sqnr_without) >= 3
    assert max(sqnr_without, key=lambda n: sqnr_without[n] or 0.0) == blamed
    wrong = statistic.first_wrong
    assert wrong is not None and wrong.node == blamed and wrong.part > 0.5


def test_a_good_model_has_no_first_wrong() -> None:
    statistic = inspect_plan(make_plan(Residual(), WIDE), batches(sample()))
    assert statistic.first_wrong is None and statistic.to_json()["first_wrong"] is None
    assert "no node falls below 20 dB" in str(statistic)


def test_infinite_values_are_left_out() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
            set_weights(self)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.conv(x).masked_fill(x > 0, -math.inf), 1)

    x = sample()
    x[:, 0] = -x[:, 0].abs() - 1  # no row is masked out as a whole
    statistic = inspect_plan(make_plan(Masked(), WIDE, x), batches(x))
    masked = statistic["masked_fill"]
    assert (masked.left_out, masked.count) == (int((x > 0).sum()), int((x <= 0).sum()))
    assert masked.float_values.minimum is not None
    assert statistic["softmax"].left_out == 0 and statistic.total_differences == 0
    json.dumps(statistic.to_json(), allow_nan=False)


def test_values_that_are_not_tensors() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
            set_weights(self)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) * x.shape[0]

    statistic = inspect_plan(make_plan(Sized(), WIDE), batches(sample()))
    sizes = [r for r in statistic.rows if r.count == 0]
    assert sizes and all(r.sqnr is None and r.differences == 0 for r in sizes)
    json.dumps(statistic.to_json(), allow_nan=False)
    assert str(statistic)


def test_no_batches() -> None:
    with pytest.raises(DataError, match="empty"):
        inspect_plan(make_plan(Residual(), WIDE), [])


def test_wrong_number_of_inputs() -> None:
    with pytest.raises(DataError, match="batch 0 holds 2 tensors; the model takes 1: x"):
        inspect_plan(make_plan(Residual(), WIDE), [Batch((sample(), sample()), None)])


@pytest.mark.parametrize(
    ("name", "model", "chip", "at_most"),
    [
        ("residual_wide", Residual, WIDE, 8),
        ("heavy_narrow", Heavy, NARROW, 64),
        ("pooled_output", Pooled, OUTPUT, 6),
        ("island_wide", Island, WIDE, 4),
        ("channels_wide", Channels, WIDE, 8),
    ],
)
def test_golden_report(name: str, model: type[nn.Module], chip: Hardware, at_most: int) -> None:
    x = sample().abs() if model is Heavy else sample()
    statistic = inspect_plan(make_plan(model(), chip, x, at_most=at_most), batches(x, x.flip(0)))
    assert_golden(f"{name}.txt", f"{statistic}\n\n{statistic.values()}\n")
