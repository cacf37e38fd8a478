"""Times of calls, measured in interleaved rounds, and the float forward pass with which they are compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hago import Graph
from hago.graph import channels_last, compute_real, run_graph

#: A function that returns seconds: `time.perf_counter` or `time.process_time`.
Clock = Callable[[], float]


def seconds_of(part: Callable[[], Any], clock: Clock) -> float:
    """The seconds that one call takes."""
    started = clock()
    part()
    return clock() - started


def interleaved(parts: Mapping[str, Callable[[], Any]], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """The seconds of every part in every round, after a round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(rounds + 1):
        for name, part in parts.items():
            spent = seconds_of(part, clock)
            if number:
                seconds[name].append(spent)
    return seconds


def ratio(seconds: Mapping[str, list[float]], part: str, base: str) -> str:
    """The median of the ratios of the rounds, and their quartiles."""
    ratios = [a / b for a, b in zip(seconds[part], seconds[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def float_forward(graph: Graph, batches: Sequence[Sequence[Tensor]]) -> Callable[[], Any]:
    """A pass of the float model over all batches, with activations and weights in channels_last."""
    consts: Mapping[str, Tensor] = {n: channels_last(c) for n, c in graph.consts.items()}
    laid_out = [[channels_last(x) for x in batch] for batch in batches]

    def forward() -> Any:
        with torch.no_grad():
            return [run_graph(graph, batch, compute_real, consts=consts) for batch in laid_out]

    return forward
