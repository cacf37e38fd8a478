"""Logs of searches whose integer programs did not merge groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from networks import Uneven, images, randomized

import hago
from hago.errors import LogError
from hago.search import replay, session

DATA = [images(16, 3, 8, 8)]
HOW: dict[str, Any] = {
    "searcher": "pareto:points=5,rounds=1",
    "search_topology": True,
    "corrections": "none",
    "effort": "fast",
    "progress": False,
}


def searched(log: Path, **others: Any) -> list[dict[str, Any]]:
    hago.search_quantize_strategy(randomized(Uneven(), seed=3).eval(), "x86_vnni", DATA, log=log, **(HOW | others))
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_an_earlier_log_goes_on_as_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, new = tmp_path / "earlier.jsonl", tmp_path / "new.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(session, "merges_groups", lambda logged: False)
        before, *trials = searched(log)
    assert "merged_groups" not in before["settings"]
    merged, *others = searched(new)
    assert merged["settings"]["merged_groups"] is True
    bits = [[t["strategy"]["bits"] for t in some] for some in (trials, others)]
    assert bits[0] != bits[1]  # of points with equal losses and costs, others

    log.write_text("".join(json.dumps(line) + "\n" for line in (before, *trials[:-2])))
    assert [line["strategy"]["bits"] for line in searched(log)[1:]] == bits[0]
    for path in (log, new):
        assert hago.replay(randomized(Uneven(), seed=3).eval(), "x86_vnni", path, DATA).same

    edited = {**before, "settings": {**before["settings"], "merged_groups": True}}
    log.write_text("".join(json.dumps(line) + "\n" for line in (edited, *trials[:-2])))
    with pytest.raises(LogError, match="was written by a different searcher"):
        searched(log)


def test_replays_of_earlier_logs_merge_no_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds may be refined at a point that an integer program finds."""
    log = tmp_path / "log.jsonl"
    searched(log, effort="good")
    seen: list[bool] = []
    find = replay.find_starting_point

    def watched(searcher: Any, refines: Any, scorer: Any, **how: Any) -> Any:
        start = find(searcher, refines, scorer, **how)
        assert start.surrogate is not None
        seen.append(start.surrogate.merges)
        return start

    monkeypatch.setattr(replay, "find_starting_point", watched)
    model = randomized(Uneven(), seed=3).eval()
    hago.replay(model, "x86_vnni", log, DATA)
    header, *rest = log.read_text().splitlines()
    settings = json.loads(header)["settings"]
    del settings["merged_groups"]
    log.write_text("\n".join([json.dumps({**json.loads(header), "settings": settings}), *rest]) + "\n")
    hago.replay(model, "x86_vnni", log, DATA)
    assert seen == [True, False]
