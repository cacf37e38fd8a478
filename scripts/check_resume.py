"""Check that a search writes the same log in one process, on workers, and when it is killed and resumed.

    python scripts/check_resume.py --kills 20 --workers 4

Every search runs in processes of its own. Some are killed at random moments with SIGKILL, together with their workers,
and started again with the same arguments until one ends by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from hago import search_quantize_strategy
from hago.searchers import SEARCHERS, parse_searcher

SEARCHES = {
    "greedy": "40 trials", "random:trials=60,batch=6": "60 trials", "annealing:cooling=0.9": "40 trials",
    "sensitivity": "40 trials", "pareto": "40 trials", "gradient": "40 trials", "limited": "40 trials",
}  # fmt: skip


def main() -> int:
    """Run every search in every way and compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each search")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--hardware", default="int16_accumulator")
    parser.add_argument("--searchers", nargs="+", default=list(SEARCHES))
    parser.add_argument("--race", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("LOG", "EXECUTOR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options, *options.child)
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for searcher in options.searchers:
            if not (options.race and SEARCHERS[parse_searcher(searcher)[0]].front):
                wrong += check(options, searcher, Path(folder))
    return 1 if wrong else 0


def child(options: argparse.Namespace, log: str, executor: str) -> None:
    """One search."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    ).eval()  # fmt: skip
    data = [torch.randn(32, 3, 24, 24) for _ in range(4)]
    (searcher,) = options.searchers
    search_quantize_strategy(
        network, options.hardware, data, searcher=searcher, budget=SEARCHES.get(searcher), seed=7, log=log,
        save=f"{log}.best", front=f"{log}.front", executor=executor or None, race=options.race, progress=False,
    )  # fmt: skip


def check(options: argparse.Namespace, searcher: str, folder: Path) -> int:
    """Compare the logs of one search, each as soon as it is written; returns the number of logs that differ."""
    stem, wrong = searcher.partition(":")[0], 0
    first = folder / f"{stem}.alone"
    start(options, searcher, first, "").wait()
    expected = timeless(first)

    def compare(way: str, log: Path, kills: int = 0) -> None:
        nonlocal wrong
        same = timeless(log) == expected and outcome(log) == outcome(first)
        wrong += not same
        said = f", {kills} kills" if kills else ""
        verdict = "the same" if same else "DIFFERENT"
        print(f"{searcher:28} {way:17} {len(expected) - 1} trials{said}: {verdict}", flush=True)

    workers = f"processes:{options.workers}"
    for way, executor in (("again", ""), ("workers", workers)):
        log = folder / f"{stem}.{way}"
        start(options, searcher, log, executor).wait()
        compare(way, log)
    draw = random.Random(options.seed)
    for way, executor in (("killed", ""), ("killed workers", workers)):
        left, number = options.kills, 0
        while left > 0:  # a search that ended before all its kills is run again
            number += 1
            log = folder / f"{stem}.{way.replace(' ', '-')}.{number}"
            kills = kill_and_resume(options, searcher, log, executor, draw, left)
            compare(way if number == 1 else f"{way}, {number}", log, kills)
            left -= max(1, kills)
    return wrong


def start(options: argparse.Namespace, searcher: str, log: Path, executor: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, __file__, "--searchers", searcher, "--hardware", options.hardware]
    words += ["--race"] if options.race else []
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*words, "--child", str(log), executor], start_new_session=True, **quiet)  # type: ignore[call-overload,no-any-return]


def kill_and_resume(
    options: argparse.Namespace, searcher: str, log: Path, executor: str, draw: random.Random, most: int
) -> int:
    """Kill and resume a search at most `most` times until it ends; returns the number of kills."""
    kills = 0
    while True:
        before = size(log)
        running = start(options, searcher, log, executor)
        if kills < most:
            # Most kills wait for a new line, because while it imports there is nothing to lose; one in four does not.
            early = draw.random() < 0.25
            deadline = time.monotonic() + draw.uniform(1.0, 6.0)
            while running.poll() is None and (time.monotonic() < deadline if early else size(log) <= before):
                time.sleep(0.01)
            time.sleep(draw.expovariate(10))
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                kills += 1
        if running.wait() != -signal.SIGKILL:
            return kills


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def timeless(log: Path) -> list[str]:
    """The lines of a log without the field of times."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [json.dumps({k: v for k, v in line.items() if k != "time"}, sort_keys=True) for line in lines]


def outcome(log: Path) -> tuple[bytes, bytes]:
    """The files of the best strategy and of the front."""
    return Path(f"{log}.best").read_bytes(), Path(f"{log}.front").read_bytes()


if __name__ == "__main__":
    sys.exit(main())
