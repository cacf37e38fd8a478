"""A small search with its files, of which the tests of reports make reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from networks import Small

import hago
from hago.graph.graph import Graph

CHIP = "vta"
#: A name that would end the element it stands in, run code, or load something, if a page did not escape it.
HOSTILE = "</script><img src=//example.org/x onerror=alert(1)>\"'&<!--"


def data(seed: int = 1, batches: int = 2) -> list[Any]:
    """Batches of 8 samples with labels."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 1, 6, 6, generator=generator), torch.arange(8) % 3) for _ in range(batches)]


def network() -> Graph:
    """A network whose second convolution has a hostile name."""
    torch.manual_seed(0)
    graph = hago.from_torch(Small().eval(), (data()[0][0],))
    old = [node.name for node in graph if node.op == "conv2d"][-1]
    names = {old: HOSTILE}
    nodes = [replace(n, name=names.get(n.name, n.name), inputs=tuple(names.get(i, i) for i in n.inputs)) for n in graph]
    return graph.with_nodes(nodes, outputs=tuple(names.get(o, o) for o in graph.outputs))


def searched(folder: Path) -> None:
    """Search in a folder: `net.jsonl`, `net.json` and `net.front.json`."""
    hago.search_quantize_strategy(
        network(),
        CHIP,
        data(),
        searcher="pareto:points=6",
        budget="10 trials",
        log=folder / "net.jsonl",
        save=folder / "net.json",
        front=folder / "net.front.json",
        progress=False,
    )
