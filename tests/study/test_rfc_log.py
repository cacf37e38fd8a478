"""Logs of the RFC's prototype: every form of line that it wrote can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import TOY, make_space

from hago.errors import InfeasibleBits, LogError
from hago.study.rfc_log import RfcTrial, best_rfc_trial, parse_rfc_line, read_rfc_log

STRATEGY = {"bits": [8, 8, 16], "model_hash": -2157293650320921168, "thresholds": [2.632871389389038, 0.5]}


def line(results: object, key: str = "result", **more: object) -> str:
    strategy = {**STRATEGY, **more}
    return json.dumps({key: results, "strategy": strategy, "version": 0.1}, sort_keys=True)


@pytest.mark.parametrize(
    "text",
    [
        line({"accuracy": 0.6171875, "kl_distance": None}),
        line({"sim_acc": 0.7, "quant_acc": 0.69, "kl_divergence": 0.1}),
        line({"accuracy": 0.7, "validation_acc": 0.6}),
        line({"sim_acc": 0.7}, topology={"node_conds": [False, True], "edge_conds": [True]}),
    ],
)
def test_a_line_reads_back_as_it_was(text: str) -> None:
    trial = parse_rfc_line(text)
    assert trial.model_hash == -2157293650320921168
    assert trial.to_line() == text
    assert "\n" not in trial.to_line()


def test_results_may_have_either_key() -> None:
    assert parse_rfc_line(line({"sim_acc": 0.5}, "results")) == parse_rfc_line(line({"sim_acc": 0.5}))


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.integers(1, 32)),
    st.lists(st.floats(allow_nan=False, allow_infinity=False)),
)
def test_round_trip(model_hash: int, bits: list[int], thresholds: list[float]) -> None:
    trial = RfcTrial(0.1, model_hash, tuple(bits), tuple(thresholds), None, {"accuracy": 0.7})
    assert parse_rfc_line(trial.to_line()) == trial


def test_fewest_bits_win_ties_and_the_first_wins_exact_ones(tmp_path: Path) -> None:
    found = [(0.7, [10, 10]), (0.7, [9, 9]), (0.7, [8, 10]), (0.6, [1, 1])]
    lines = [line({"accuracy": accuracy}, bits=bits) for accuracy, bits in found]
    path = tmp_path / "old.log"
    path.write_text("\n".join(lines) + "\n")
    assert best_rfc_trial(read_rfc_log(path)).bits == (9, 9)


def test_logs_without_a_best_trial_are_refused() -> None:
    with pytest.raises(LogError, match=r"no number called 'sim_ac'.*Did you mean 'sim_acc'"):
        best_rfc_trial([parse_rfc_line(line({"sim_acc": 0.5}))], "sim_ac")
    with pytest.raises(LogError, match="without trials"):
        best_rfc_trial([])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        "1",
        '{"strategy": 1, "version": 0.1, "result": {}}',
        line([1]),
        line({}, bits=[1.5]),
        line({}, bits=8),
    ],
)
def test_other_lines_are_refused_by_number(text: str, tmp_path: Path) -> None:
    path = tmp_path / "old.log"
    path.write_text(line({"accuracy": 0.5}) + "\n" + text + "\n")
    with pytest.raises(LogError, match=r"old\.log, line 2"):
        read_rfc_log(path)


def test_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="cannot read"):
        read_rfc_log(tmp_path / "absent")


def test_bits_are_assigned_to_the_groups_of_a_space() -> None:
    space = make_space({"conv:0": (8, 7), "conv:1": (8, 7), "add:0": (16, 15)})
    trial = parse_rfc_line(line({"accuracy": 0.5}))
    assert trial.bits_by_group(space) == {"conv:0": 8, "conv:1": 8, "add:0": 16}
    with pytest.raises(LogError, match="3 bits, the space 4 groups"):
        trial.bits_by_group(TOY)
    with pytest.raises(InfeasibleBits):
        parse_rfc_line(line({}, bits=[8, 8, 3])).bits_by_group(space)
