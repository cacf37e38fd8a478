"""Time what passes before hago computes anything: its import and its answers to help, version and usage errors.

Every call runs in a process of its own, in interleaved rounds; the first round, which fills caches, is not counted.
Figures are medians in seconds, with quartiles. What an import adds to torch is the median of the differences of rounds.

    python scripts/benchmark_startup.py
    python scripts/benchmark_startup.py --rounds 21 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

PYTHON = "python"
TORCH = "import torch"
USAGE_ERROR = "hago search (a usage error)"
#: The arguments of Python by the name of the call.
CALLS = {
    PYTHON: ["-c", "pass"],
    TORCH: ["-c", "import torch"],
    "import torch, hago": ["-c", "import torch, hago"],
    "import torch, hago and its public names": [
        "-c",
        "import torch, hago; [getattr(hago, name) for name in hago.__all__]",
    ],
    "hago --help": ["-m", "hago", "--help"],
    "hago --version": ["-m", "hago", "--version"],
    "hago search --help": ["-m", "hago", "search", "--help"],
    USAGE_ERROR: ["-m", "hago", "search"],
    "hago hardware list": ["-m", "hago", "hardware", "list"],
}
#: The exit codes of calls that do not end with 0.
EXIT_CODES = {USAGE_ERROR: 2}


def seconds_of(name: str) -> float:
    """The seconds that Python takes for a call, from its start to its end; ends the script if the call fails."""
    started = time.perf_counter()
    ended = subprocess.run([sys.executable, *CALLS[name]], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if ended.returncode != EXIT_CODES.get(name, 0):
        expected = EXIT_CODES.get(name, 0)
        sys.exit(f"{name} ended with code {ended.returncode}; expected {expected}:\n{ended.stderr.strip()}")
    return seconds


def measure(rounds: int) -> dict[str, list[float]]:
    """The seconds of every call in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in CALLS}
    for number in range(rounds + 1):
        for name in CALLS:
            spent = seconds_of(name)
            if number:
                seconds[name].append(spent)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="at least 2; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the seconds of every round as JSON")
    args = parser.parse_args()
    seconds = measure(max(args.rounds, 2))
    if args.json:
        print(json.dumps(seconds, indent=2))
        return
    print(f"{'':42}{'median':>8}  {'quartiles':17}{'beyond torch':>12}")
    for name, spent in seconds.items():
        low, middle, high = statistics.quantiles(spent, n=4)
        more = ""
        if name.startswith(TORCH) and name != TORCH:
            more = f"{statistics.median(a - b for a, b in zip(spent, seconds[TORCH], strict=True)):+.3f}"
        print(f"{name:42}{middle:8.3f}  [{low:.3f}, {high:.3f}]{more:>16}")


if __name__ == "__main__":
    main()
