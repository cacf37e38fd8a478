"""The time of a trial by the number of edges and images, and the gain of worker processes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from _fronts import Row
from _search_subjects import subjects
from _timing import float_forward, seconds_of

from hago import Graph, search_quantize_strategy
from hago.graph import Node
from hago.plan import Bits
from hago.search import Evaluator, Prepared, QuantizationOptions, prepare
from hago.search.objective import named_objective
from hago.search.workers import PointScorer, Workers, open_executor, worker_spec_of
from hago.study import Score, read_log


def chain(edges: int) -> Graph:
    """Convolutions in a row with a residual add after every fourth, with at least `edges` edges that have bits."""
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


def scaling(options: Any) -> list[Row]:
    """Time of a trial, resolving included, as edges and images grow, and of a whole search with all its files; each
    trial changes one edge at random."""
    titles = f"{'edges':>6} {'images':>7} {'ms a trial':>11} {'us an edge':>11} {'float forwards':>15}"
    print(f"{titles} {'whole search':>13} {'ms an edge':>11} {'trials':>7}")
    rows: list[Row] = []
    sizes = [(e, options.images) for e in options.edges] + [(100, options.images * k) for k in (1, 2, 4)]
    for edges, images in sizes:
        graph = chain(edges)
        data = [(x,) for x in torch.randn(images, 8, 8, 8).split(options.batch)]
        prepared = prepare(graph, options.hardware[0], data, QuantizationOptions(estimator="power2_range"))
        forward = float_forward(prepared.graph, data)
        evaluator = Evaluator(prepared.graph, prepared.batches, named_objective("sqnr"), prepared.resolver.ops)
        scorer = PointScorer(prepared.resolver, evaluator)
        points = one_edge_at_a_time(prepared, 40)
        floats = [seconds_of(forward, options.clock) for _ in range(options.pairs + 1)][1:]
        spent = [seconds_of(partial(scorer.score, point), options.clock) for point in points][8:]
        one = statistics.mean(spent)
        groups = len(prepared.space.groups)
        part = one / statistics.median(floats)
        whole, trials = whole_search(graph, data, options)
        rows.append({"edges": groups, "images": images, "seconds_a_trial": one, "float_forwards": part})
        rows[-1] |= {"seconds": whole, "trials": trials}
        print(
            f"{groups:6} {images:7} {1e3 * one:11.2f} {1e6 * one / groups:11.1f} {part:15.3f} {whole:11.1f} s "
            f"{1e3 * whole / groups:11.1f} {trials:7}",
            flush=True,
        )
    return rows


def whole_search(graph: Graph, data: Sequence[Any], options: Any) -> tuple[float, int]:
    """Seconds of the default search from calibration to its end, log, strategy and front on disk; its trials."""
    with tempfile.TemporaryDirectory() as folder:
        log, save, front = (f"{folder}/{name}" for name in ("log.jsonl", "best.json", "front.json"))
        search = partial(
            search_quantize_strategy, graph, options.hardware[0], data, searcher=options.searcher, log=log, save=save,
            front=front, progress=False,
        )  # fmt: skip
        return seconds_of(search, options.clock), len(read_log(log).trials)


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
def workers(options: Any) -> list[Row]:
    """Trials per second of one worker process and of several, threads per worker as given."""
    rows: list[Row] = []
    for subject in subjects(options):
        prepared = prepare(
            subject.network, options.hardware[0], subject.batches, QuantizationOptions(estimator="power2_range")
        )
        work = worker_spec_of(prepared, named_objective("sqnr"))
        points = one_edge_at_a_time(prepared, 10 * options.workers)[1:]
        rates = {count: _rate(count, work, points, options.pairs) for count in (1, options.workers)}
        ratios = [many / one for one, many in zip(rates[1], rates[options.workers], strict=True)]
        one, many = (statistics.median(rates[count]) for count in (1, options.workers))
        times = statistics.median(ratios)
        rows.append({"network": subject.name, "workers": options.workers, "one": one, "many": many, "times": times})
        print(
            f"{subject.name:22} one {one:.2f} trials/s, {options.workers} workers {many:.2f}: {times:.2f} times",
            flush=True,
        )
    return rows


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
