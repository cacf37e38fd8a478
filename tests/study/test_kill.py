"""A search that is killed at random moments and restarted ends with the same log as an uninterrupted one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toys import run, timeless

#: Runs each search in children that it kills, until one ends by itself. One process for all, so that
#: torch is imported once.
SCRIPT = """
import json, os, random, signal, sys, time
from toys import run, separable

def evaluate(bits):
    if not workers:
        # A worker process that outlives its search, with whatever it inherited.
        workers.append(os.fork())
        if workers[0] == 0:
            os.close(1)
            os.close(2)
            time.sleep(3)
            os._exit(0)
    time.sleep(0.001)
    return separable(bits)

folder, searches = sys.argv[1], json.loads(sys.argv[2])
draw, counts = random.Random(1), []
for name, options in searches.items():
    workers = []
    kills, patience = 0, 0.02
    while True:
        child = os.fork()
        if child == 0:
            run(name, os.path.join(folder, name), evaluate, options=options, notice=lambda _: None)
            os._exit(0)
        time.sleep(draw.uniform(0, patience))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            break
        assert os.WIFSIGNALED(status), status
        kills += 1
        patience *= 1.5
    counts.append(kills)
print(json.dumps(counts))
"""

SEARCHES = {"random": {"trials": 48, "batch": 4}, "annealing": {"cooling": 0.9}, "greedy": {}}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_searches_leave_the_same_logs(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(SEARCHES)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)) >= 2
    for name, options in SEARCHES.items():
        run(name, tmp_path / "whole", options=options)
        assert timeless((tmp_path / name).read_bytes()) == timeless((tmp_path / "whole").read_bytes())
        (tmp_path / "whole").unlink()
