"""Storages: a PostgreSQL server that processes share, and the errors if a storage cannot be reached."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from postgres_server import Server, binaries, server
from toys import TOY, run, separable

from hago.errors import HagoError
from hago.searchers.optuna import close_storage, complete_url, hide_password, open_storage, study_numbers
from hago.searchers.registry import make_searcher

#: One search on the storage named first, with the log named second.
SEARCH = """
import sys, torch, hago
print("begins", flush=True)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3)).eval()
storage, log, seed = sys.argv[1:]
searcher = f"tpe:trials=6,startup=2,warm=2,study=shared,storage={storage}"
hago.search_quantize_strategy(
    net, "vta", [torch.randn(4, 1, 6, 6)], searcher=searcher, seed=int(seed), log=log, progress=False
)
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    pytest.importorskip("psycopg", reason="the extra [postgres] is not installed")
    found = binaries()
    if found is None:
        pytest.skip("no PostgreSQL server on this machine (initdb and pg_ctl)")
    with server(found) as made:
        yield made


def test_two_processes_work_on_one_study(postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process and another one search on the same study."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"{seed}.jsonl" for seed in range(2)]
    one, other = ([postgres.url, str(log), str(seed)] for seed, log in enumerate(logs))
    with subprocess.Popen(
        [sys.executable, "-c", SEARCH, *other],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        monkeypatch.setattr(sys, "argv", ["-c", *one])
        exec(SEARCH, {})
        said = process.communicate(timeout=300)[1]
    assert process.returncode == 0, said
    storage = open_storage(postgres.url)
    study = optuna.load_study(study_name="shared", storage=storage)
    told = [t for t in study.trials if t.state.is_finished()]
    assert len(told) >= 12
    assert len({t.number for t in told}) == len(told)
    trials = [json.loads(line) for log in logs for line in log.read_text().splitlines()[1:]]
    assert len(trials) == 12
    assert study.best_value == max(t["score"]["value"] for t in trials)
    assert all("secret" not in log.read_text() for log in logs)
    close_storage(storage)


def test_a_dashboard_finds_the_study_and_its_trials(postgres: Server) -> None:
    run("nsga2", evaluate=separable, options={"trials": 6, "storage": postgres.url, "study": "seen", "startup": 2})
    # what optuna-dashboard reads: studies, their directions, and trials with states, parameters and values
    storage = open_storage(postgres.url)
    (study,) = [s for s in storage.get_all_studies() if s.study_name == "seen"]
    assert [d.name for d in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    trials = storage.get_all_trials(study._study_id)
    assert {k for t in trials for k in t.params} == set(TOY.groups)
    assert all(len(t.values) == 2 for t in trials if t.state.name == "COMPLETE")
    close_storage(storage)


def test_a_wrong_password_is_one_line_without_it(postgres: Server) -> None:
    with pytest.raises(HagoError) as caught:
        run("tpe", options={"trials": 3, "storage": postgres.url.replace("secret", "hunter2")})
    assert "password authentication failed" in str(caught.value)
    assert "hunter2" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_that_goes_away_loses_nothing(postgres: Server, tmp_path: Path) -> None:
    told = []

    def evaluate(bits):
        told.append(bits)
        if len(told) == 4:
            postgres.stop()
        return separable(bits)

    options = {"trials": 9, "storage": postgres.url, "study": "lost", "warm": 2, "startup": 2}
    try:
        with pytest.raises(HagoError, match="storage.*a log of the search holds all") as caught:
            run("tpe", evaluate=evaluate, options=options, log=tmp_path / "log.jsonl")
    finally:
        postgres.start()
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert len(lines) == 1 + len(told)


# ---------------------------------------------------------------- without a server
def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setattr("hago.searchers.optuna.CONNECT_SECONDS", 2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        begun = time.monotonic()
        with pytest.raises(HagoError, match="cannot open storage"):
            run("tpe", options={"trials": 3, "storage": f"postgresql://u:p@127.0.0.1:{mute.getsockname()[1]}/x"})
        assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("url", "opened"),
    [
        ("", ""),
        ("sqlite:///x.db", "sqlite:///x.db"),
        ("postgresql+psycopg://u@h/x?connect_timeout=3", "postgresql+psycopg://u@h/x?connect_timeout=3"),
        ("postgresql+psycopg://u@h/x?a=b", "postgresql+psycopg://u@h/x?a=b&connect_timeout=15"),
    ],
)
def test_urls(url: str, opened: str) -> None:
    assert complete_url(url) == opened


def test_the_driver_that_is_installed_is_taken() -> None:
    pytest.importorskip("psycopg")
    for name in ("postgres", "postgresql"):
        assert complete_url(f"{name}://h/x") == "postgresql+psycopg://h/x?connect_timeout=15"


def test_passwords_are_not_said() -> None:
    url = "postgresql://me:p@ss@host:5432/x"
    assert hide_password(url) == "postgresql://me:***@host:5432/x"
    assert hide_password("postgresql://host:5432/x") == "postgresql://host:5432/x"
    options = make_searcher("tpe", TOY, options={"storage": url}).options
    assert "p@ss" not in json.dumps(dict(options))


@pytest.mark.parametrize("kind", ["sqlite:///{}", "journal:{}"])
def test_a_dashboard_shows_bits(kind: str, tmp_path: Path) -> None:
    storage = kind.format(tmp_path / "study")
    run("nsga2", evaluate=separable, options={"trials": 6, "storage": storage, "study": "seen", "startup": 2})
    opened = open_storage(storage)
    (study,) = opened.get_all_studies()
    trials = [t for t in opened.get_all_trials(study._study_id) if t.state.name == "COMPLETE"]
    assert trials and all(t.params[k] in g.choices for t in trials for k, g in TOY.groups.items())
    close_storage(opened)


def test_choices_that_are_not_evenly_spaced_are_numbered() -> None:
    assert study_numbers((8, 6, 4)) == ((8, 6, 4), 2) and study_numbers((8,)) == ((8,), 1)
    shown, step = study_numbers((16, 8, 7))
    assert (list(shown), step) == ([2, 1, 0], 1)
