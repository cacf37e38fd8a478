"""The header: a log of another search is refused, and no log is overwritten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from toys import TOY, chain, header_of, run, separable

from hago.errors import LogError, StrategyMismatch
from hago.plan.strategy import HardwareId
from hago.searchers.registry import make_searcher
from hago.study.log import make_header
from hago.study.loop import run_study


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_hash": "other"}, StrategyMismatch, ['model_hash is "mmmmmmmm"', '"other"']),
        ({"hardware": HardwareId("toy", "x")}, StrategyMismatch, ['hardware.hash is "hhhhhhhh"', '"x"']),
        ({"data_hash": "other"}, StrategyMismatch, ['data_hash is "dddddddd"', '"other"']),
        ({"seed": 4}, LogError, ["seed is 0", "has 4"]),
        ({"estimator": "kl"}, LogError, ['estimator is "avg_range"', '"kl"']),
        ({"objective": {"name": "kl"}}, LogError, ['objective.name is "sqnr"', '"kl"']),
        ({"keep_float": []}, LogError, ['keep_float is ["fc"]', "[]"]),
        ({"fix_bits": {}}, LogError, ["fix_bits.conv:0 is 8", "has null"]),
        ({"settings": {"tolerance": 1}}, LogError, ["settings.tolerance is null", "has 1"]),
    ],
)
def test_a_log_of_another_search_is_refused(changes, error, words, tmp_path: Path) -> None:
    run("greedy", tmp_path / "log", options={"max_passes": 3})
    before = (tmp_path / "log").read_bytes()
    searcher = make_searcher("greedy", TOY, options={"max_passes": 3})
    with pytest.raises(error) as caught:
        run_study(TOY, searcher, separable, log=tmp_path / "log", header=header_of(searcher, **changes))
    for word in [*words, str(tmp_path / "log")]:
        assert word in str(caught.value)
    assert (tmp_path / "log").read_bytes() == before


def test_a_log_of_another_searcher_option_or_space_is_refused(tmp_path: Path) -> None:
    run("greedy", tmp_path / "log")
    with pytest.raises(LogError, match=r'searcher.name is "greedy", this search has "random"'):
        run("random", tmp_path / "log")
    with pytest.raises(LogError, match=r"searcher.options.max_passes is 8, this search has 2"):
        run("greedy", tmp_path / "log", options={"max_passes": 2})
    space, evaluate = chain(2, 16)
    with pytest.raises(StrategyMismatch, match=r"space.choices is 11, this search has 28"):
        run("greedy", tmp_path / "log", evaluate, space=space)


def test_other_versions_give_a_notice(tmp_path: Path) -> None:
    run("greedy", tmp_path / "log", budget=3)
    searcher = make_searcher("greedy", TOY)
    notices: list[str] = []
    header = header_of(searcher, threads=2)
    run_study(TOY, searcher, separable, log=tmp_path / "log", header=header, notice=notices.append)
    assert len(notices) == 1
    assert "made_by.threads 1, this is 2" in notices[0]


def test_an_existing_log_is_never_overwritten(tmp_path: Path) -> None:
    run("greedy", tmp_path / "log")
    before = (tmp_path / "log").read_bytes()
    with pytest.raises(LogError, match="exists; resume it, or give another path"):
        run("greedy", tmp_path / "log", resume=False)
    assert (tmp_path / "log").read_bytes() == before
    assert run("greedy", tmp_path / "new", resume=False).trials


def test_a_log_needs_a_header(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="needs a header"):
        run_study(TOY, make_searcher("greedy", TOY), separable, log=tmp_path / "log")


#: Locks the file that it is given, as a search does, until its input ends.
HOLDER = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX locks")
def test_two_searches_cannot_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole = run("greedy", path)
    path.write_bytes(path.read_bytes()[:-9])
    before = path.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(LogError, match="another search is writing"):
            run("greedy", path)
        assert path.read_bytes() == before
        other.communicate(b"")
    assert len(run("greedy", path).trials) == len(whole.trials)


def test_the_header_has_the_settings() -> None:
    searcher = make_searcher("greedy", TOY)
    header = make_header(
        TOY,
        searcher,
        seed=1,
        model_hash="m",
        hardware=HardwareId("n", "h"),
        data_hash="d",
        estimator=None,
        objective=None,
        settings={"batches": 4},
    )
    record = header.to_json("now")
    assert record["settings"] == {"batches": 4}
    assert record["searcher"] == {"name": "greedy", "options": {"tolerance": 0.0, "max_passes": 8}}
    assert record["made_by"]["numpy"]
