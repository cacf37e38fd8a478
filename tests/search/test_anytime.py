"""What a search leaves on disk and shows after every trial."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch
from building import residual_block, seeded
from toys import timeless

from hago.data.progress import JobProgress, StatusLine
from hago.errors import LogError
from hago.importing import as_strategy
from hago.search.pareto_front import load_front
from hago.search.session import SearchOptions, run_search
from hago.study.log import best_trial, read_log
from hago.study.trial_front import TrialFront

DATA = [(seeded(4, 3, 8, 8), torch.arange(4) % 5)]


class Looking:
    """A searcher that looks, before every trial, at what the last one left."""

    def __init__(self, inner, folder: Path) -> None:
        self.inner, self.folder, self.looks = inner, folder, 0

    name = property(lambda self: self.inner.name)
    options = property(lambda self: self.inner.options)
    why = property(lambda self: self.inner.why)

    def ask(self):
        if (self.folder / "log").exists() and (trials := read_log(self.folder / "log").trials):
            best, front = best_trial(trials), TrialFront("sqnr", "weight_bytes")
            assert best is not None
            assert as_strategy(self.folder / "best.json").bits == best.bits
            for trial in trials:
                front.add(trial)
            points = load_front(self.folder / "front.json")
            assert [p.trial for p in points] == [t.index for t in front.trials]
            assert [p.strategy.bits for p in points] == [t.bits for t in front.trials]
            self.looks += 1
        return self.inner.ask()

    def tell(self, bits, score) -> None:
        self.inner.tell(bits, score)


def options_of(folder: Path, **given) -> SearchOptions:
    paths = {"log": folder / "log", "save": folder / "best.json", "front": folder / "front.json"}
    return SearchOptions.of(**{"estimator": "max_range", "progress": False, **paths, **given})


def test_the_best_and_the_front_are_on_disk_after_every_trial(tmp_path: Path) -> None:
    from hago.searchers.registry import make_searcher

    made = []

    def searcher(space, start, seed):
        made.append(Looking(make_searcher("greedy", space, start, seed), tmp_path))
        return made[0]

    run_search(residual_block(), "int16_accumulator", DATA, options_of(tmp_path, searcher=searcher, budget=12))
    assert made[0].looks >= 11


def test_a_finished_log_gives_its_files_again(tmp_path: Path) -> None:
    run_search(residual_block(), "x86_vnni", DATA, options_of(tmp_path, budget=5))
    before = {n: (tmp_path / n).read_bytes() for n in ("best.json", "front.json")}
    for name in before:
        (tmp_path / name).unlink()
    run_search(residual_block(), "x86_vnni", DATA, options_of(tmp_path, budget=5))
    assert {n: (tmp_path / n).read_bytes() for n in before} == before


def test_the_line_shows_cost_front_cache_and_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(StatusLine, "show", lambda self, text, force=False: shown.append(text))
    options = options_of(tmp_path, searcher="greedy", budget="8 trials, 1h", corrections="none")
    run_search(residual_block(), "x86_vnni", DATA, options)
    figures = (
        r"search: 8 of 8 trials, best sqnr [-.\d]+ dB, \d+s left, weight_bytes [.\d]+ k?B, front of [1-9]\d*, "
        r"\d+ forwards, \d+ % cached(, \d+ repeats)?"
    )
    assert re.fullmatch(figures, shown[-1])


@pytest.mark.parametrize("name", ["best.json", "front.json", "log"])
def test_a_disk_that_is_full_is_said_and_what_was_found_is_continued(name: str, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    whole, short = tmp_path / "whole", tmp_path / "short"
    for folder in (whole, short):
        folder.mkdir()
    run_search(residual_block(), "x86_vnni", DATA, options_of(whole, budget=5))
    sizes = {n: (whole / n).stat().st_size for n in ("best.json", "front.json", "log")}
    # the files are of different sizes: what is left out is not in the way
    kept = {k: short / n for k, n in (("log", "log"), ("save", "best.json"), ("front", "front.json")) if n == name}
    options = options_of(short, **{"log": None, "save": None, "front": None, **kept}, budget=5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[name] - 20, limits[1]))
    try:
        with pytest.raises(LogError, match=f"cannot write .*{name}"):
            run_search(residual_block(), "x86_vnni", DATA, options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run_search(residual_block(), "x86_vnni", DATA, options_of(short, budget=5))
    for other in ("best.json", "front.json"):
        assert (short / other).read_bytes() == (whole / other).read_bytes()
    assert timeless((short / "log").read_bytes()) == timeless((whole / "log").read_bytes())


@pytest.mark.parametrize("searcher, race", [("nsga2", False), ("default", False), ("default", True)])
def test_neither_trials_nor_the_outcome_call_the_progress_of_the_steps_before(
    searcher: str, race: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(JobProgress, "on_batch", lambda _, done, samples: calls.append(done))
    data, before = [(seeded(8, 3, 8, 8, seed=s), torch.arange(8) % 5) for s in range(3)], list[int]()
    options = SearchOptions.of(searcher, budget=4, race=race)
    outcome = run_search(residual_block(), "x86_vnni", data, options, lambda: before.append(len(calls)))
    batches = outcome.prepared.batches
    assert sum(batch.size for batch in batches) == 24
    assert before and before[0] > 0 and len(calls) == before[0]
    assert pickle.loads(pickle.dumps(batches)).sha256 == batches.sha256
