"""Histograms of channels of constants: logs go on with the bins that they were begun with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from building import residual_block, seeded

import hago
from hago.arithmetic.schemes import Grid
from hago.calibration import BINS, CHANNEL_BINS, Mse, ThresholdCache
from hago.errors import LogError
from hago.search.session import SearchOptions, run_search

DATA = [(seeded(8, 3, 8, 8, seed=seed),) for seed in range(2)]


def begun_with(bins: int, path: Path) -> bytes:
    how = SearchOptions.of(progress=False, log=path, channel_bins=bins, corrections="none", estimator="percentile:90")
    run_search(residual_block(), "tflite", DATA, how)
    return path.read_bytes()


def test_logs_that_state_no_bins_are_replayed_and_continued_with_more(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    content = begun_with(BINS, path)
    assert b"channel_bins" not in content
    assert hago.replay(residual_block(), "tflite", path, DATA).same
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    how = SearchOptions.of(progress=False, log=path, corrections="none", estimator="percentile:90")
    run_search(residual_block(), "tflite", DATA, how)
    trials = [
        [{**json.loads(line), "time": None} for line in text.splitlines()[1:]] for text in (content, path.read_bytes())
    ]
    assert trials[0] == trials[1]
    # the law bites: with other bins, thresholds are others
    header = {**json.loads(lines[0])}
    header["settings"]["channel_bins"] = 16
    path.write_bytes(json.dumps(header, sort_keys=True).encode() + b"\n" + b"".join(lines[1:]))
    assert not hago.replay(residual_block(), "tflite", path, DATA).same


def test_a_new_log_states_them(tmp_path: Path) -> None:
    header = json.loads(begun_with(CHANNEL_BINS, tmp_path / "log.jsonl").splitlines()[0])
    assert header["settings"]["channel_bins"] == CHANNEL_BINS


@pytest.mark.parametrize("bins", ["many", True, 0, 2, 7, BINS + 2, 1.5])
def test_other_values_are_refused(bins: object, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    header, *trials = begun_with(CHANNEL_BINS, path).splitlines(keepends=True)
    edited = json.loads(header)
    edited["settings"]["channel_bins"] = bins
    path.write_bytes(json.dumps(edited, sort_keys=True).encode() + b"\n" + b"".join(trials))
    with pytest.raises(LogError, match="edited"):
        hago.replay(residual_block(), "tflite", path, DATA)


def test_fewer_bins_lose_next_to_nothing() -> None:
    weight, grid = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).double(), Grid(4)

    def error(bins: int) -> float:
        low, _ = ThresholdCache({}, {"w": weight.float()}, Mse(), bins)("w", grid, 0)
        near = torch.round(weight / (low / -8).unsqueeze(1)).clamp(-8, 7) * (low / -8).unsqueeze(1)
        return float((near - weight).square().sum())

    assert error(CHANNEL_BINS) <= 1.002 * error(BINS)
    assert error(16) > 1.002 * error(BINS)  # the law bites
