"""What a search costs, in forward passes of the float model measured in the same run.

The baseline of every ratio is the folded float model over the same images, activations and weights in
channels_last, on the same threads. A trial is what a search evaluates: its time is all evaluation time of a
greedy search from a cold cache, divided by its distinct Plans. Baselines: the RFC's naive simulation (seven
passes on every edge, nothing kept) and the RFC's greedy (every choice of every edge in turn). Medians are over
--pairs interleaved measurements; nothing is asserted.

    python scripts/benchmark_search.py --assets DIR
    python scripts/benchmark_search.py --only trial,workers --images 32 --size 64 --trials 40 --pairs 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _assets import load
from _naive import float_forward, naive_forward
from _networks import MobileNetV2, ResNet, with_statistics
from torch import Tensor, nn

from hago import Graph
from hago.bench import Bench, make_bench, work_of
from hago.evaluate import Evaluator, safe_start
from hago.executors import open_executor
from hago.graph import Node
from hago.objective import objective
from hago.prepare import Prepared, prepare
from hago.search.driver import SearchResult, search
from hago.search.searcher import Score
from hago.search.searchers import make_searcher
from hago.searching import SearchOptions, find
from hago.space import Bits
from hago.workers import Workers

SECTIONS = ("trial", "search", "scaling", "workers")
SCALES = {"powers of two": "power2_range", "float scales": "mse"}
ASSETS = ("squeezenet1_1", "mobilenetv2_cifar96", "cifar_resnet20", "mlperf_resnet8", "mlperf_kws")


@dataclass(frozen=True)
class Subject:
    """A network and its images."""

    name: str
    network: nn.Module | Graph
    batches: list[tuple[Tensor, ...]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--assets", help="the folder of pretrained networks; without it SqueezeNet is left out")
    parser.add_argument("--nets", nargs="+", help="of these only")
    parser.add_argument("--hardware", nargs="+", default=["x86_vnni", "arm_dot"])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--size", type=int, default=224, help="of images for ResNet-18 and MobileNetV2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--trials", type=int, help="of a search, at most; by default until it ends")
    parser.add_argument("--searcher", default="greedy", help="the default search of the section `search`")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--edges", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--cpu", action="store_true", help="processor time, not wall time: for a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.clock = time.process_time if options.cpu else time.perf_counter
    how = f"{options.images} images in batches of {options.batch}, {'processor' if options.cpu else 'wall'} time"
    print(f"torch {torch.__version__}, {options.threads} threads, {how}", flush=True)
    sections: dict[str, Callable[[Any], None]] = {
        "trial": trial_cost, "search": search_cost, "scaling": scaling, "workers": workers,
    }  # fmt: skip
    for name in options.only.split(","):
        print(f"\n== {name}", flush=True)
        sections[name](options)


# ---------------------------------------------------------------- what is measured
def subjects(options: Any) -> Iterable[Subject]:
    """SqueezeNet with its images, MobileNetV2 and ResNet-18 with statistics of random ones."""
    if options.assets and _wanted(options, "squeezenet1_1"):
        yield asset(options, "squeezenet1_1")
    images = torch.randn(options.images, 3, options.size, options.size, generator=torch.Generator().manual_seed(0))
    for name, make in (("MobileNetV2", MobileNetV2), ("ResNet-18", ResNet)):
        if _wanted(options, name):
            torch.manual_seed(0)
            network = with_statistics(make(), images[: options.batch])
            yield Subject(name, network, [(x,) for x in images.split(options.batch)])


def asset(options: Any, name: str) -> Subject:
    """A pretrained network with images that it was not tested on."""
    found = load(options.assets, name, options.images, 1)
    rows = [torch.cat(parts) for parts in zip(*found.calibration, strict=True)]
    return Subject(name, found.module, list(zip(*(r.split(options.batch) for r in rows), strict=True)))


def _wanted(options: Any, name: str) -> bool:
    return options.nets is None or name in options.nets


@dataclass
class Timed:
    """A bench whose evaluation time is counted; a float forward is timed now and then between."""

    bench: Bench
    clock: Callable[[], float]
    seconds: float = 0.0
    evaluated: int = 0

    def __call__(self, bits: Bits) -> Score:
        begun = self.clock()
        score = self.bench.score(bits)
        self.seconds += self.clock() - begun
        self.evaluated += 1
        return score


def seconds_of(part: Callable[[], Any], clock: Callable[[], float]) -> float:
    begun = clock()
    part()
    return clock() - begun


def greedy_search(prepared: Prepared, score: Callable[[Bits], Score], trials: int | None) -> SearchResult:
    start = safe_start(prepared.resolver, prepared.calibration.peaks)
    searcher = make_searcher("greedy", prepared.space, start)
    return search(prepared.space, searcher, score, budget=trials, plan_key=lambda b: prepared.resolver(b).key)


# ---------------------------------------------------------------- cost of a trial
def trial_cost(options: Any) -> None:
    """All evaluation time of a greedy search / distinct Plans / a float forward."""
    print(f"{'network':22} {'scales':14} {'engine':6} {'trials':>6} {'a trial':>9} {'reused':>7} {'naive trial':>12}")
    for subject in subjects(options):
        for scales, estimator in SCALES.items():
            prepared = prepare(subject.network, options.hardware[0], subject.batches, estimator=estimator)
            forward = float_forward(prepared.graph, subject.batches)
            pairs = naive_and_float(prepared, subject, options)
            said = statistics.median(n / f for n, f in pairs)
            for engine in ("auto", "float"):
                row = _trial(prepared, engine, forward, options)
                print(f"{subject.name:22} {scales:14} {engine:6} {row} {said:12.2f}", flush=True)


def naive_and_float(prepared: Prepared, subject: Subject, options: Any) -> list[tuple[float, float]]:
    """Seconds of a naive trial and of a float forward, pair by pair."""
    forward = float_forward(prepared.graph, subject.batches)
    naive = naive_forward(prepared.resolver(prepared.space.widest()), subject.batches)
    forward()
    return [(seconds_of(naive, options.clock), seconds_of(forward, options.clock)) for _ in range(options.pairs)]


def _trial(prepared: Prepared, engine: Any, forward: Callable[[], Any], options: Any) -> str:
    ops = prepared.hardware.known_ops
    evaluator = Evaluator(prepared.graph, prepared.batches, objective("sqnr"), ops, engine=engine)
    timed = Timed(Bench(prepared.resolver, evaluator), options.clock)
    floats: list[float] = []

    def score(bits: Bits) -> Score:
        if timed.evaluated % 16 == 0 or len(floats) < options.pairs:
            floats.append(seconds_of(forward, options.clock))
        return timed(bits)

    greedy_search(prepared, score, options.trials)
    ratio = timed.seconds / timed.evaluated / statistics.median(floats)
    return f"{timed.evaluated:6} {ratio:9.3f} {100 * evaluator.reuse.spent.share:5.0f} %"


# ---------------------------------------------------------------- cost of a search
def search_cost(options: Any) -> None:
    """A search against the RFC's greedy: what each finds, and what it pays, calibration and all. What the RFC's
    finds is worked out here with all that makes it fast; what it pays is its evaluations times a naive trial."""
    nets = [asset(options, n) for n in ASSETS if _wanted(options, n)] if options.assets else list(subjects(options))
    for subject in nets:
        for spec in options.hardware:
            prepared = prepare(subject.network, spec, subject.batches)
            pairs = naive_and_float(prepared, subject, options)
            naive, forward = (statistics.median(x) for x in zip(*pairs, strict=True))
            asked = sum(len(g.choices) for g in prepared.space.groups.values())
            print(f"{subject.name} on {spec}, {len(prepared.space.groups)} groups, a float forward {forward:.3f} s")
            mine = _searched(subject, spec, options.searcher, options)
            theirs = _searched(subject, spec, "rfc_greedy", options)
            paid = sum(t.score.forwards for t in mine.result.trials if t.same_as is None)
            rows = ((options.searcher, mine, paid, mine.seconds), ("rfc_greedy", theirs, asked, asked * naive))
            for name, found, forwards, seconds in rows:
                score = found.result.score
                print(
                    f"  {name:12} sqnr {score.results['sqnr']:7.3f} dB, weights {score.costs['weight_bytes']:.0f} B, "
                    f"activations {score.costs['activation_bytes']:.0f} B; {forwards:.0f} forwards by the algorithm, "
                    f"time of {seconds / forward:.1f}"
                )
            less = asked * naive / mine.seconds
            print(f"  {asked / paid:.1f} times fewer forwards, {less:.1f} times less time", flush=True)


@dataclass(frozen=True)
class Searched:
    """A search and its time, calibration included."""

    result: SearchResult
    seconds: float


def _searched(subject: Subject, spec: str, searcher: str, options: Any) -> Searched:
    begun = options.clock()
    how = SearchOptions(searcher=searcher, progress=False, budget=options.trials)
    found = find(subject.network, spec, subject.batches, how)
    return Searched(found.result, options.clock() - begun)


# ---------------------------------------------------------------- scaling
def chain(edges: int) -> Graph:
    """Convolutions in a row with a residual add after every fourth, so many edges with bits to choose."""
    nodes, consts = [Node("x", "input", (), {"dtype": "float32"}, (1, 8, 8, 8))], {}
    draw, source, kept, count, made = torch.Generator().manual_seed(0), "x", "x", 0, 0
    attrs = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    while count < edges:
        name = f"conv{made}"
        consts[f"{name}.weight"] = torch.randn(8, 8, 3, 3, generator=draw) / 8.0
        nodes += [Node(f"{name}.weight", "const", (), {}, (8, 8, 3, 3))]
        nodes += [Node(name, "conv2d", (source, f"{name}.weight"), attrs, (1, 8, 8, 8))]
        source, count, made = name, count + 2, made + 1
        if made % 4 == 0:
            nodes += [Node(f"add{made}", "add", (source, kept), {}, (1, 8, 8, 8))]
            source = kept = f"add{made}"
            count += 2
    return Graph(tuple(nodes), ("x",), (source,), consts)


def scaling(options: Any) -> None:
    """Time of a trial, resolving included, as edges and images grow; each trial changes one edge at random."""
    print(f"{'edges':>6} {'images':>7} {'ms a trial':>11} {'us an edge':>11} {'float forwards':>15}")
    sizes = [(e, options.images) for e in options.edges] + [(100, options.images * k) for k in (1, 2, 4)]
    for edges, images in sizes:
        graph = chain(edges)
        data = [(x,) for x in torch.randn(images, 8, 8, 8).split(options.batch)]
        prepared = prepare(graph, options.hardware[0], data, estimator="power2_range")
        forward = float_forward(prepared.graph, data)
        bench = make_bench(prepared.resolver, prepared.batches, objective("sqnr"))
        points = one_edge_at_a_time(prepared, 40)
        floats = [seconds_of(forward, options.clock) for _ in range(options.pairs + 1)][1:]
        spent = [seconds_of(partial(bench.score, point), options.clock) for point in points][8:]
        one = statistics.mean(spent)
        groups = len(prepared.space.groups)
        print(
            f"{groups:6} {images:7} {1e3 * one:11.2f} {1e6 * one / groups:11.1f} "
            f"{one / statistics.median(floats):15.3f}",
            flush=True,
        )


def one_edge_at_a_time(prepared: Prepared, count: int) -> list[Bits]:
    """The widest point, and others that differ from it in one group each, spread over the network."""
    widest = prepared.space.widest()
    groups = [g for g in prepared.space.groups.values() if len(g.choices) > 1]
    found = [widest]
    for i in range(count):
        group = groups[(i * 7919) % len(groups)]
        found.append({**widest, group.key: group.choices[1 + (i // len(groups)) % (len(group.choices) - 1)]})
    return found


# ---------------------------------------------------------------- workers
def workers(options: Any) -> None:
    """Trials per second of one worker process and of several, threads per worker as given."""
    for subject in subjects(options):
        prepared = prepare(subject.network, options.hardware[0], subject.batches, estimator="power2_range")
        work = work_of(prepared, objective("sqnr"))
        points = one_edge_at_a_time(prepared, 10 * options.workers)[1:]
        rates = {count: _rate(count, work, points, options.pairs) for count in (1, options.workers)}
        ratios = [many / one for one, many in zip(rates[1], rates[options.workers], strict=True)]
        print(
            f"{subject.name:22} one {statistics.median(rates[1]):.2f} trials/s, {options.workers} workers "
            f"{statistics.median(rates[options.workers]):.2f}: {statistics.median(ratios):.2f} times",
            flush=True,
        )


def _rate(count: int, work: Any, points: Sequence[Bits], rounds: int) -> list[float]:
    """Trials per second in each round, after one that is not counted."""
    with open_executor(f"processes:{count}") as hands:
        assert hands is not None
        send = Workers(hands, work, lambda bits, rival: Score(0.0), print)
        found = []
        for number in range(rounds + 1):
            begun = time.perf_counter()
            part = points[number :: rounds + 1] if len(points) > 4 * rounds else points
            for pending in [send(p) for p in part]:
                pending.result()
            found.append(len(part) / (time.perf_counter() - begun))
    return found[1:]


if __name__ == "__main__":
    main()
