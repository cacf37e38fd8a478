"""Quantize the networks of a collection, with random weights, and count the values in which the engines differ.

Every network is imported, calibrated on random images, and quantized to its most bits. The simulator, the integer model
and the native engine are compared value by value. With --onnx, ONNX Runtime runs the exported file, too, and is
compared node by node; where a scale is no power of two, an addition may differ by one quantum. The collections are
torchvision's and timm's, whichever is installed, and small models of the architectures of transformers. The exit status
is 1 if the simulator and the integer model differ anywhere.

    python scripts/check_zoo.py --from timm --names mobilenetv4_conv_small fastvit_t8 --hardware x86_vnni

With --search every network is searched with every searcher on every hardware. Each case runs in a process of its own
with limits on time and memory, and becomes a JSON line of the log. Cases that are in the log are not run again, unless
they were skipped. The table is of the whole log; --write puts it into a Markdown file, between two comments. Times and
limits are processor time on one thread. The exit status is 1 if a case crashed or its values differ.

    python scripts/check_zoo.py --search --from torchvision timm transformers --log zoo.jsonl --write docs/zoo.md
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _documents import check_marks, replace_between
from _zoo import COLLECTIONS, Collection
from torch import Tensor, nn

from hago import HagoError, create_quantizer
from hago.cost import plan_cost
from hago.export.onnx import check_onnx, make_onnx
from hago.export.onnx.export import FORMS
from hago.graph import from_torch
from hago.hardware import load_hardware
from hago.plan import Plan
from hago.runtime import compare_plan_exactly
from hago.search import SearchOptions, prepare, run_search
from hago.search import session as search

SEED = 0
BEGIN, END = "<!-- zoo:begin -->", "<!-- zoo:end -->"
#: A case may take this many times its limit of processor time by the clock, because the machine may be busy.
PATIENCE = 6


def main(words: Sequence[str] | None = None) -> int:
    """Run the check, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="collections", nargs="+", choices=sorted(COLLECTIONS), default=["torchvision"])
    parser.add_argument("--names", nargs="+", help="all that have at most --largest parameters by default")
    parser.add_argument("--hardware", nargs="+", default=["x86_vnni"])
    parser.add_argument("--size", type=int, help="of the images, where a network takes any (96; 64 with --search)")
    parser.add_argument("--largest", type=float, default=60e6, help="parameters of a network, at most")
    parser.add_argument("--onnx", choices=sorted(FORMS), help="compare the ONNX file in this form, too")
    parser.add_argument("--search", action="store_true", help="search: by default one network of each family")
    parser.add_argument("--all", action="store_true", help="with --search, of all networks, not one of each family")
    parser.add_argument("--searchers", nargs="+", default=["gradient", "pareto"])
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--log", type=Path, default=Path("zoo.jsonl"), help="of --search: one line a case")
    parser.add_argument("--seconds", type=int, default=120, help="of processor time that a case may take")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of memory that a case may take")
    parser.add_argument("--minutes", type=float, help="after which no further case is begun")
    parser.add_argument("--table", action="store_true", help="only print the table of the log")
    parser.add_argument("--write", type=Path, help=f"the table to a file, between {BEGIN} and {END}")
    options = parser.parse_args(words)
    options.size = options.size or (64 if options.search else 96)
    if options.search or options.table:
        return search_all(options)
    wrong = 0
    for collection in options.collections:
        found = COLLECTIONS[collection]()
        for hardware in options.hardware:
            wrong += sum(check(found, name, hardware, options) for name in options.names or found.names)
    print(f"{wrong} values differ")
    return 1 if wrong else 0


def check(collection: Collection, name: str, hardware: str, options: Any) -> int:
    """Check one network at its most bits, print a line, and return the number of values that differ."""
    started = time.perf_counter()
    torch.manual_seed(SEED)
    network = collection.network(name, options.size)
    count = parameters(network)
    if count > options.largest:
        print(f"{name:32} skipped: {count:,} parameters", flush=True)
        return 0
    try:
        differ, figures = checked(network, collection.samples(name, network, 4, options.size), hardware, options.onnx)
    except HagoError as error:
        print(f"{name:32} {str(error).splitlines()[0][:200]}", flush=True)
        return 0
    print(f"{name:32} {figures} {time.perf_counter() - started:6.1f} s", flush=True)
    return differ


def checked(network: nn.Module, images: Tensor, hardware: str, onnx: str | None) -> tuple[int, str]:
    """The number of values that differ, and the figures of the check as text."""
    prepared = prepare(network, hardware, [images[:2], images[2:]])
    plan = prepared.resolver(prepared.space.widest())
    found = compare_plan_exactly(plan, [images[:1]])
    differ = sum(found.differences.values())
    counts = f"{len(plan.nodes):5} integer nodes {in_float(plan):4} float, {found.compared:11} values, {differ} differ"
    return differ, counts + (in_onnx(plan, images, onnx) if onnx else "")


def in_float(plan: Plan) -> int:
    """The number of computed nodes that are not quantized."""
    return sum(n.name not in plan.nodes and n.op not in ("input", "const") for n in plan.graph)


def in_onnx(plan: Plan, images: Tensor, form: str) -> str:
    """The differences of ONNX Runtime on the exported file, as text."""
    try:
        found = check_onnx(make_onnx(plan, form), plan, [[images[:2]]])
    except HagoError as error:
        return f"; onnx: {str(error).splitlines()[-1].strip()[:160]}"
    return f"; onnx: {found.differing} of {found.compared}"


def parameters(network: nn.Module) -> int:
    """The number of parameters of a network."""
    return sum(p.numel() for p in network.parameters())


# ---------------------------------------------------------------------------------------------------- searching
Say = Callable[[Mapping[str, Any]], None]


def search_all(options: Any) -> int:
    """Run every case that the log lacks, print the table, and return the exit status."""
    if options.write is not None:
        check_marks(options.write, BEGIN, END)
    done = read_log(options.log)
    cases = list(dict.fromkeys(cases_of(options)))
    left = [case for case in cases if done.get(case, {"status": "skipped"})["status"] == "skipped"]
    print(f"{len(cases) - len(left)} of {len(cases)} cases stand in {options.log}", flush=True)
    if left and not options.table:
        warm()
        begun = time.monotonic()
        for at, case in enumerate(left):
            if options.minutes is not None and time.monotonic() - begun > options.minutes * 60:
                print(f"stopped after {options.minutes} minutes: {len(left) - at} cases are left", flush=True)
                break
            row = in_child(functools.partial(one_search, case, options), options.seconds, options.gigabytes)
            done[case] = {**dict(zip(CASE, case, strict=True)), **row}
            append(options.log, done[case])
            print(f"{len(cases) - len(left) + at + 1}/{len(cases)} {line(done[case])}", flush=True)
    made = table(done.values())
    print(made)
    if options.write is not None:
        replace_between(options.write, BEGIN, END, made)
    return 1 if any(r["status"] == "crashed" or r.get("differ") for r in done.values()) else 0


CASE = ("collection", "network", "hardware", "searcher")
Case = tuple[str, str, str, str]


def cases_of(options: Any) -> Iterator[Case]:
    """All cases: every network with the first pair of a hardware and a searcher, then with the next pair, and so on."""
    chips, searchers = options.hardware, options.searchers
    order = [(chips[(i + shift) % len(chips)], s) for shift in range(len(chips)) for i, s in enumerate(searchers)]
    for hardware, searcher in order:
        for collection in options.collections:
            found = COLLECTIONS[collection]()
            for name in options.names or (found.names if options.all else found.families):
                if not options.names or name in found.names:
                    yield collection, name, hardware, searcher


def read_log(path: Path) -> dict[Case, dict[str, Any]]:
    """The last line of every case in a log; a line that was cut off by a kill is ignored."""
    found: dict[Case, dict[str, Any]] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(text)
        except json.JSONDecodeError:
            continue
        found[row["collection"], row["network"], row["hardware"], row["searcher"]] = row
    return found


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line to the log, on a line of its own even if the last line was cut off by a kill."""
    with path.open("ab+") as log:
        whole = log.tell() == 0
        if not whole:
            log.seek(-1, os.SEEK_END)
            whole = log.read(1) == b"\n"
        log.write(("" if whole else "\n").encode() + json.dumps(row).encode() + b"\n")


def warm() -> None:
    """Load the modules that every case needs, so that no case is charged for it."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    with torch.no_grad():
        from_torch(network, [torch.zeros(2, 3, 8, 8)])


def in_child(work: Callable[[Say], str | None], seconds: int, gigabytes: float) -> dict[str, Any]:
    """Run a case in a forked process.

    Args:
        work: reports its results, by the function that it is given, as soon as it has them.
        seconds: the limit of processor time; the clock may show PATIENCE times as many.
        gigabytes: the limit of memory.

    Returns:
        All that it reported, and its `status`: ok, skipped, refused (by a HagoError), crashed, slow, or large.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(work, writer, seconds, gigabytes)
    os.close(writer)
    said, late = _listen(reader, time.monotonic() + PATIENCE * seconds)
    os.close(reader)
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    row: dict[str, Any] = {"status": "crashed"}
    for text in said.decode(errors="replace").splitlines():
        try:
            row.update(json.loads(text))
        except json.JSONDecodeError:
            continue  # the process ended while it wrote
    if late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        row |= {"status": "slow", "why": f"more than {seconds} s of processor time" if not late else "the clock"}
    elif os.WIFSIGNALED(status):
        row |= {"status": "crashed", "why": signal.Signals(os.WTERMSIG(status)).name}
    return row | {"peak_mb": usage.ru_maxrss // 1024, "seconds": round(usage.ru_utime + usage.ru_stime, 2)}


def _listen(reader: int, until: float) -> tuple[bytes, bool]:
    """Everything that is read until the other end is closed, and whether that took too long."""
    said = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return said, True
        part = os.read(reader, 1 << 16)
        if not part:
            return said, False
        said += part


def _child(work: Callable[[Say], str | None], writer: int, seconds: int, gigabytes: float) -> None:
    """Run a case in the forked process; this never returns."""
    code = 1
    try:
        torch.set_num_threads(1)  # threads of the first process do not outlive the fork
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        room = int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))

        def say(what: Mapping[str, Any]) -> None:
            os.write(writer, (json.dumps(what) + "\n").encode())

        try:
            say({"status": work(say) or "ok"})
        except HagoError as error:
            say({"status": "refused", "why": f"{type(error).__name__}: {error}"})
        except MemoryError:
            say({"status": "large", "why": f"more than {gigabytes} GB"})
        except BaseException as error:
            large = "DefaultCPUAllocator" in str(error)
            why = f"more than {gigabytes} GB" if large else f"{type(error).__name__}: {error}"
            say({"status": "large" if large else "crashed", "why": why, "traceback": traceback.format_exc()})
        code = 0
    finally:
        os._exit(code)


def one_search(case: Case, options: Any, say: Say) -> str | None:
    """Import, calibrate, search, realize and compare one network; the result is "skipped" if it is too large."""
    collection, name, hardware, searcher = case
    torch.manual_seed(SEED)
    made = COLLECTIONS[collection]()
    steps = Steps(say)
    with steps("making"):
        network = made.network(name, options.size)
        samples = made.samples(name, network, options.images, options.size)
    say({"parameters": parameters(network), "shape": list(samples.shape[1:])})
    if parameters(network) > options.largest:
        say({"why": f"{parameters(network):,} parameters; --largest says {options.largest:,.0f}"})
        return "skipped"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        say({"forward": (forward := float_forward(network, samples))})
        spent = searched(network, list(samples.split((len(samples) + 1) // 2)), hardware, searcher, options, steps, say)
    own = [f"{w.category.__name__}: {w.message}" for w in heard if f"{os.sep}torch{os.sep}" not in w.filename]
    say({"costs_forwards": round(spent / forward, 1), "warnings": list(dict.fromkeys(own))[:5]})
    return None


def searched(
    network: nn.Module, batches: list[Tensor], hardware: str, searcher: str, options: Any, steps: Steps, say: Say
) -> float:
    """Search and compare; returns the seconds of the import, the calibration and the search."""
    with steps("importing"):
        graph = from_torch(network, [batches[0][:2]], ops=load_hardware(hardware).known_ops)
    say({"nodes": len(graph.nodes)})

    def timed(*args: Any, **kwargs: Any) -> Any:
        with steps("calibrating"):
            return prepare(*args, **kwargs)

    with steps("searching"), mock.patch.object(search, "prepare", timed):
        how = SearchOptions.of(searcher=searcher, progress=False, budget=options.trials, seed=SEED)
        found = run_search(graph, hardware, batches, how)
    quantizer = create_quantizer(graph, hardware, found.strategy)
    plan = quantizer.simulate().plan
    rows = plan_cost(plan).nodes
    macs = sum(r.macs for r in rows)
    say({
        "sqnr": found.score, "trials": len(found.result.trials), "passes": round(found.forwards, 1), "macs": macs,
        "integer_share": sum(r.macs for r in rows if r.integer) / macs if macs else None,
        "integer_nodes": len(plan.nodes), "float_nodes": in_float(plan),
    })  # fmt: skip
    with steps("realizing"):
        model = quantizer.realize()
    with torch.no_grad():
        model(batches[0][:1])
    with steps("comparing"):
        result = compare_plan_exactly(plan, [batches[0][:1]])
    say({"compared": result.compared, "differ": sum(result.differences.values()), "where": dict(result.differences)})
    return steps.spent["importing"] + steps.spent["searching"]


class Steps:
    """Times the steps of a case, and reports which step is running.

    Args:
        say: reports values.
    """

    def __init__(self, say: Say) -> None:
        self.say = say
        self.spent: dict[str, float] = {}
        self.running: list[tuple[str, float]] = []

    def __call__(self, name: str) -> Steps:
        self.say({"step": name})
        self.running.append((name, time.process_time()))
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        name, begun = self.running.pop()
        self.spent[name] = round(time.process_time() - begun, 3)
        outer = self.running[-1][0] if self.running else name
        self.say({"spent": self.spent, **({"step": outer} if outer != name and not sys.exc_info()[0] else {})})


def float_forward(network: nn.Module, samples: Tensor) -> float:
    """The seconds of a float pass over all samples.

    It is the mean of as many passes as take half a second, because processor clocks are coarse, after one pass that is
    not counted.
    """
    spent, passes = 0.0, 0
    with torch.no_grad():
        network(samples)
        begun = time.process_time()
        while spent < 0.5:
            network(samples)
            spent, passes = time.process_time() - begun, passes + 1
    return spent / passes


# ---------------------------------------------------------------------------------------------------- the table
COLUMNS = ("importing", "calibrating", "searching", "realizing", "comparing")


def line(row: Mapping[str, Any]) -> str:
    """A case in a line."""
    head = f"{row['network']} {row['hardware']} {row['searcher']}: {row['status']}"
    if row["status"] != "ok":
        return f"{head} at {row.get('step')} after {row['seconds']} s: {str(row.get('why')).splitlines()[0][:200]}"
    spent = ", ".join(f"{k} {row['spent'].get(k, 0.0):.1f}" for k in COLUMNS)
    return f"{head}, {share(row)} in integers, {row['sqnr']:.1f} dB, {row['differ']} differ, {spent} s"


def share(row: Mapping[str, Any]) -> str:
    """The share of multiply-accumulates in integers, as text."""
    found = row.get("integer_share")
    return "" if found is None else f"{100 * found:.1f} %"


def table(rows: Any) -> str:
    """All cases as Markdown: the number of cases by status, a row for each, and the messages of those that failed."""
    rows = sorted(rows, key=lambda row: [str(row[k]).lower() for k in CASE])
    counts = {s: sum(r["status"] == s for r in rows) for s in dict.fromkeys(r["status"] for r in rows)}
    ended = ", ".join(f"{n} {s}" for s, n in sorted(counts.items(), key=lambda item: -item[1]))
    networks = len({(r["collection"], r["network"]) for r in rows if r["status"] == "ok"})
    compared, differ = (sum(r.get(k) or 0 for r in rows) for k in ("compared", "differ"))
    lines = [f"{len(rows)} cases: {ended}. {networks} networks; {differ:,} of {compared:,} values differ.", ""]
    title = ("", "network", "chip", "searcher", "status", "integers", "dB", "differ", "forwards", "passes", "peak MB")
    lines.append(cells((*title, "import", "calibrate", "search", "realize")))
    lines.append("|" + "---|" * (len(title) + 4))
    for row in rows:
        spent = row.get("spent", {})
        alone = {**spent, "searching": max(0.0, spent.get("searching", 0.0) - spent.get("calibrating", 0.0))}
        figures = ("" if row.get(k) is None else f"{row[k]:{form}}" for k, form in FIGURES)
        seconds = (f"{alone[k]:.1f}" if k in spent else "" for k in COLUMNS[:4])
        lines.append(cells((*(row[k] for k in CASE), row["status"], share(row), *figures, *seconds)))
    failed = [f"- {line(row)}" for row in rows if row["status"] != "ok"]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def cells(words: Sequence[str]) -> str:
    """A row of the table."""
    return f"| {' | '.join(words)} |"


FIGURES: Sequence[tuple[str, str]] = (
    ("sqnr", ".1f"), ("differ", "d"), ("costs_forwards", ",.0f"), ("passes", ".0f"), ("peak_mb", ",d"),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
