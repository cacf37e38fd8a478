"""Run one command of hago, and write how long each of its parts took. `benchmark_startup.py` starts it as a process.

A timer interrupts the command every few milliseconds, and the time since the last interrupt counts for the part that
the innermost function on the stack with a rule in PARTS belongs to. Nothing is wrapped, so the command runs as always.
`benchmark_effort.py` divides one shot in the same way (`sampled`).

    python scripts/_command_shares.py SHARES.json STARTED|cpu quantize MODEL --hardware NAME --data DATA
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

#: Seconds between two interrupts.
INTERVAL = 0.002
START, IMPORTS, OTHER = "start of Python", "import of hago and other packages", "the rest"
#: By part, functions by a piece of their module's path and their name ("" for all of the module).
Parts = Mapping[str, tuple[tuple[str, str], ...]]
PARTS: Parts = {
    START: (),
    "import of torch": (("torch/__init__.py", "<module>"),),
    IMPORTS: (),
    "import of torch's exporter": (("torch/export/_trace.py", "<module>"),),
    "torch.export": (("hago/graph/frontend/exported_program.py", "_export"),),
    "reading the graph": (("hago/graph/frontend/exported_program.py", ""), ("hago/importing.py", "")),
    "model and data": (("hago/graph/model_source.py", ""), ("hago/data/batches.py", ""), ("hago/cli/options.py", "")),
    "calibration": (("hago/calibration/collection.py", ""),),
    "thresholds": (("hago/calibration/threshold_cache.py", ""),),
    "plans": (("hago/plan/resolve.py", ""), ("hago/plan/feasibility.py", ""), ("hago/plan/topology.py", "")),
    "compiling kernels": (("hago/runtime/native/build.py", ""),),
    "self-tests of kernels": (("hago/runtime/native/self_test.py", ""),),
    "integer model": (("hago/runtime/native/lowering.py", ""),),
    "float and integer passes": (("hago/search/evaluate.py", ""), ("hago/analysis/answer.py", "")),
    OTHER: (),
}


def part_of(frame: FrameType | None, parts: Parts) -> str:
    """The part that the innermost frame with a rule belongs to."""
    imports = False
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        for part, rules in parts.items():
            if any(piece in path and function in ("", name) for piece, function in rules):
                return part
        imports = imports or "importlib._bootstrap" in path
        frame = frame.f_back
    return IMPORTS if imports else OTHER


def processor_seconds() -> float:
    """The processor time of this process and of those that it waited for, such as a compiler."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


@contextmanager
def sampled(seconds: dict[str, float], parts: Parts, clock: Callable[[], float]) -> Iterator[None]:
    """Add the seconds of every part of what runs in the context."""
    last = clock()

    def count(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = clock()
        seconds[part_of(frame, parts)] += now - last
        last = now
        # set anew each time: on a busy machine, a timer that repeats would interrupt this function again and again
        signal.setitimer(signal.ITIMER_REAL, INTERVAL)

    signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, INTERVAL)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds[OTHER] += clock() - last


def main() -> int:
    """Run the command; its exit code."""
    to, started, *words = sys.argv[1:]
    clock = processor_seconds if started == "cpu" else time.perf_counter
    seconds: dict[str, float] = defaultdict(float)
    seconds[START] = processor_seconds() if started == "cpu" else time.time() - float(started)
    with sampled(seconds, PARTS, clock):
        from hago.cli import main as command

        code = command(words)
    Path(to).write_text(json.dumps(seconds))
    return code


if __name__ == "__main__":
    sys.exit(main())
