"""Cost: what a Plan takes on its hardware, node by node and edge by edge; `costing` works it out.

Invariants: totals are sums over the rows; a figure that the hardware file does not give is named in
`missing` and its term left out, never guessed, so a latency or energy with something missing is a
lower bound. What is counted and what is not: docs/cost.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from hago.errors import HagoError, did_you_mean

#: What can be minimized or bounded, with its unit.
METRICS: Final[Mapping[str, str]] = {
    "weight_bytes": "B",
    "activation_bytes": "B",
    "bytes_moved": "B",
    "macs": "",
    "bops": "",
    "effective_bits": "bits",
    "requantized": "",
    "cycles": "cycles",
    "latency": "s",
    "energy": "J",
}

EdgeKind = Literal["as stored", "quantize", "requantize", "dequantize", "weight", "bias", "constant"]


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """What one edge takes.

    Args:
        kind: what happens on it; constants are made ready ahead of time.
        elements: values that travel on it.
        bits: that each of them has in use.
        dtype: in which the reader takes them.
        weight_bytes: of a constant, packed to its bits; 0 where another edge reads the same integers.
        requantized: elements that are quantized, requantized or dequantized while the model runs.
        cycles, picojoules: of that; None where the spec does not say.
    """

    edge: str
    kind: EdgeKind
    elements: int
    bits: int
    dtype: str
    weight_bytes: int = 0
    requantized: int = 0
    cycles: float | None = None
    picojoules: float | None = None


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one node takes.

    Args:
        signature: of the hardware file.
        macs: multiply-accumulates.
        bops: each of them times the bits of both its operands.
        read_bytes: of all operands, as they stand in memory.
        write_bytes: of its value.
        requantized: elements that it requantizes at its output.
        compute_cycles: of the op and its output's requantization.
        memory_cycles: of what it reads and writes.
        cycles: the larger of the two: a roofline. None where the spec says nothing.
        picojoules: None where the spec says nothing.
    """

    node: str
    op: str
    integer: bool
    signature: str
    macs: int
    bops: int
    read_bytes: int
    write_bytes: int
    requantized: int
    compute_cycles: float | None
    memory_cycles: float | None
    cycles: float | None
    picojoules: float | None


@dataclass(frozen=True)
class Cost:
    """What a Plan takes for one run over `batch` samples.

    Args:
        nodes, edges: rows in the order of the graph.
        effective_bits: mean bits of a weight, biases of convolutions and linear layers aside; 0 without weights.
        clock_hz: of the hardware, times nothing; None where the spec does not say.
        missing: figures that the spec does not give and that something here would need.
    """

    hardware: str
    batch: int
    nodes: tuple[NodeCost, ...]
    edges: tuple[EdgeCost, ...]
    effective_bits: float
    clock_hz: float | None
    missing: tuple[str, ...]

    @functools.cached_property
    def figures(self) -> Mapping[str, float]:
        """The totals by name, see METRICS; what the spec gives nothing for is absent."""
        rows: tuple[NodeCost | EdgeCost, ...] = (*self.nodes, *self.edges)
        found: dict[str, float] = {
            "weight_bytes": sum(e.weight_bytes for e in self.edges),
            "activation_bytes": sum(n.write_bytes for n in self.nodes),
            "bytes_moved": sum(n.read_bytes + n.write_bytes for n in self.nodes),
            "macs": sum(n.macs for n in self.nodes),
            "bops": sum(n.bops for n in self.nodes),
            "effective_bits": self.effective_bits,
            "requantized": sum(r.requantized for r in rows),
        }
        cycles = [r.cycles for r in rows if r.cycles is not None]
        energy = [r.picojoules for r in rows if r.picojoules is not None]
        if cycles:
            found["cycles"] = math.fsum(cycles)
            if self.clock_hz is not None:
                found["latency"] = found["cycles"] / self.clock_hz
        if energy:
            found["energy"] = math.fsum(energy) * 1e-12
        return found

    def __getitem__(self, metric: str) -> float:
        """The total of one metric.

        Raises:
            HagoError: an unknown metric, or one that the hardware file gives no figures for.
        """
        if metric in self.figures:
            return self.figures[metric]
        if metric not in METRICS:
            raise HagoError(f"unknown cost {metric!r}; known: {', '.join(METRICS)}.{did_you_mean(metric, METRICS)}")
        in_cycles = metric == "latency" and "cycles" in self.figures
        instead = ", so it is known in cycles only: use 'cycles'" if in_cycles else ""
        raise HagoError(
            f"hardware {self.hardware!r} does not give what {metric!r} needs{instead}. Not given: "
            f"{'; '.join(self.missing)}"
        )

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "hardware": self.hardware,
            "batch": self.batch,
            "totals": dict(self.figures),
            "missing": list(self.missing),
            "nodes": [asdict(n) for n in self.nodes],
            "edges": [asdict(e) for e in self.edges],
        }


def rows_of(cost: Cost) -> Iterator[tuple[NodeCost, tuple[EdgeCost, ...]]]:
    """Each node with its in-edges."""
    of: dict[str, list[EdgeCost]] = {}
    for edge in cost.edges:
        of.setdefault(edge.edge.rpartition(":")[0], []).append(edge)
    for node in cost.nodes:
        yield node, tuple(of.get(node.node, ()))
