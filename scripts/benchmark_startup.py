"""Time what users wait for: hago's import, its answers to help, version and usage errors, and whole commands by part.

Every call runs in a process of its own, in interleaved rounds; the first round, which fills caches, is not counted.
Figures are medians in seconds, with quartiles. What an import adds to torch is the median of the differences of rounds.

With --assets, `hago quantize` of pretrained networks is divided into its parts instead: medians over --rounds of the
seconds of each part, in a first run, for which kernels are compiled, and in later ones, which find them in the cache.

    python scripts/benchmark_startup.py
    python scripts/benchmark_startup.py --rounds 21 --json
    python scripts/benchmark_startup.py --assets DIR --nets mobilenetv2_cifar96 mlperf_resnet8 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _command_shares import PARTS

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


# ---------------------------------------------------------------- the parts of a command
#: A module that a command reads its model and its data from: pretrained ones, of the folder and with the name and the
#: number of samples that the environment names.
SUBJECT = """
import os, sys
sys.path.insert(0, os.environ["SUBJECT_SCRIPTS"])
from _assets import load
asset = load(os.environ["SUBJECT_ASSETS"], os.environ["SUBJECT_NET"], int(os.environ["SUBJECT_SAMPLES"]), test=1)
def net(): return asset.module
def data(): return asset.calibration
"""


def command_parts(words: list[str], folder: Path, environment: dict[str, str], cpu: bool) -> dict[str, float]:
    """The seconds of every part of a command; ends the script if the command fails.

    Args:
        cpu: processor time, not wall time.
    """
    shares = folder / "shares.json"
    script = Path(__file__).with_name("_command_shares.py")
    # the folder of hago comes first, wherever the command runs
    path = os.pathsep.join(filter(None, [str(script.parents[1]), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, str(script), str(shares), "cpu" if cpu else str(time.time()), *words]
    environment = {**os.environ, **environment, "PYTHONPATH": path}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    if ended.returncode:
        sys.exit(f"hago {' '.join(words)} ended with code {ended.returncode}:\n{ended.stderr.strip()}")
    return {name: float(seconds) for name, seconds in json.loads(shares.read_text()).items()}


def quantize_parts(args: argparse.Namespace, net: str) -> dict[str, list[dict[str, float]]]:
    """The seconds of every part of `hago quantize`, of first runs and of later ones, which follow them."""
    runs: dict[str, list[dict[str, float]]] = {"first run": [], "later runs": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "subject.py").write_text(SUBJECT)
            environment = {
                "SUBJECT_SCRIPTS": str(Path(__file__).parent),
                "SUBJECT_ASSETS": str(Path(args.assets).resolve()),
                "SUBJECT_NET": net,
                "SUBJECT_SAMPLES": str(args.samples),
                "HAGO_CACHE": str(folder / "cache"),
            }
            words = ["quantize", "subject:net", "--hardware", args.hardware, "--data", "subject:data"]
            for run in runs.values():
                run.append(command_parts(words, folder, environment, args.cpu))
    return runs


def print_parts(title: str, runs: dict[str, list[dict[str, float]]]) -> None:
    """Print a table of the parts, each in seconds and as a share of the whole."""
    totals = {run: statistics.median(sum(s.values()) for s in rounds) for run, rounds in runs.items()}
    print(f"{title:36}" + "".join(f"{run:>18}" for run in runs))
    for part in [*PARTS, ""]:
        figures = []
        for run, rounds in runs.items():
            seconds = statistics.median(s.get(part, 0.0) for s in rounds) if part else totals[run]
            figures.append(f"{seconds:10.2f} s {seconds / totals[run]:5.0%}")
        print(f"  {part or 'whole':34}" + "".join(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", metavar="DIR", help="pretrained networks, of which `hago quantize` is divided")
    parser.add_argument("--nets", nargs="+", default=["mobilenetv2_cifar96", "mlperf_resnet8"])
    parser.add_argument("--cpu", action="store_true", help="with --assets: processor time, not wall time")
    parser.add_argument("--hardware", default="x86_vnni", help="of `hago quantize`; default: %(default)s")
    parser.add_argument("--samples", type=int, default=128, help="for calibration; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="at least 2; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the seconds of every round as JSON")
    args = parser.parse_args()
    if args.assets:
        parts = {net: quantize_parts(args, net) for net in args.nets}
        if args.json:
            print(json.dumps(parts, indent=2))
        for net, runs in () if args.json else parts.items():
            print_parts(f"{net}, {args.hardware}, {args.samples} samples", runs)
        return
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
