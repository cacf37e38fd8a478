"""The whole idea of hago in one file of plain torch: run it, read it from top to bottom.

A model is a list of nodes. Hardware says how many bits an op's operands and its accumulator have. A
point of the search is a number of bits for every edge. A plan turns bits into integer scales. The
simulator runs a plan on floats, the integer model runs it on integers, and both give the same numbers,
overflow included. So the search can trust the simulator, and the winner can be trusted on the chip.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Node:
    """One operation; `inputs` are names of nodes, of weights, or "x", the input of the model."""

    name: str
    op: str
    inputs: tuple[str, ...]

    @property
    def edges(self) -> list[str]:
        """An edge is a consumer's slot, since a node may read the same value twice."""
        return [f"{self.name}:{slot}" for slot in range(len(self.inputs))]


#: What each op does to real values, and to integers, in any dtype.
OPS: dict[str, Callable[..., Tensor]] = {
    "conv": lambda x, w: F.conv2d(x, w, padding=1),
    "relu": torch.relu,
    "add": torch.add,
    "linear": lambda x, w: F.linear(x.flatten(1), w),
}
#: The scale of an op's result from the scales of its operands.
SCALES = {"conv": lambda s: s[0] * s[1], "linear": lambda s: s[0] * s[1], "add": max, "relu": lambda s: s[0]}
#: The hardware: bits of the operands and of the accumulator, which wraps around. A relu works on what
#: an accumulator holds, so its input has no bits to choose.
HARDWARE = {"conv": (8, 16), "linear": (8, 16), "add": (16, 16), "relu": (None, 16)}
FEWEST_BITS = 4

Bits = dict[str, int]
Values = dict[str, Tensor]


def run(nodes: list[Node], values: Values, step: Callable[[Node, list[Tensor]], Tensor]) -> Values:
    """The one loop: every model below is this with another step."""
    values = dict(values)
    for node in nodes:
        values[node.name] = step(node, [values[i] for i in node.inputs])
    return values


def run_float(nodes: list[Node], values: Values) -> Values:
    return run(nodes, values, lambda node, operands: OPS[node.op](*operands))


def space(nodes: list[Node]) -> dict[str, list[int]]:
    """What the search may choose: bits of every edge that is quantized, widest first."""
    widths = {edge: HARDWARE[node.op][0] for node in nodes for edge in node.edges}
    return {edge: list(range(w, FEWEST_BITS - 1, -1)) for edge, w in widths.items() if w is not None}


def thresholds(nodes: list[Node], values: Values) -> dict[str, float]:
    """The largest magnitude of every value on the calibration data."""
    return {name: float(v.abs().max()) for name, v in run_float(nodes, values).items()}


@dataclass(frozen=True)
class SimQ:
    """What happens on an edge: integers of one scale become integers of another, clipped."""

    multiplier: float
    largest: int

    def __call__(self, x: Tensor) -> Tensor:
        """The only rounding there is; its result is an integer, whatever dtype carries it."""
        moved = torch.round(x.to(torch.float64) * self.multiplier)
        return moved.clamp(-self.largest, self.largest).to(x.dtype)


@dataclass(frozen=True)
class Plan:
    """All that the simulator and the integer model need to know; neither works out scales itself."""

    simqs: dict[str, SimQ]
    scales: dict[str, float]


def resolve(nodes: list[Node], bits: Bits, limits: dict[str, float], real: set[str]) -> Plan:
    """Bits and thresholds to a plan; `real` names the input and the weights, all else is integers."""
    simqs: dict[str, SimQ] = {}
    scales = dict.fromkeys(real, 1.0)  # a real value is an integer of scale 1 that need not be whole
    for node in nodes:
        chosen = [bits.get(edge) for edge in node.edges]
        pairs = zip(node.inputs, chosen, strict=True)
        wanted = [scales[i] if b is None else limits[i] / (2 ** (b - 1) - 1) for i, b in pairs]
        if node.op == "add":  # only equal scales can be added
            wanted = [max(wanted)] * len(wanted)
        for edge, source, b, scale in zip(node.edges, node.inputs, chosen, wanted, strict=True):
            if b is not None:
                simqs[edge] = SimQ(scales[source] / scale, 2 ** (b - 1) - 1)
        scales[node.name] = SCALES[node.op](wanted)
    return Plan(simqs, scales)


def wrap(x: Tensor, bits: int) -> Tensor:
    """What a register of so many bits holds of x."""
    return torch.remainder(x + 2 ** (bits - 1), 2**bits) - 2 ** (bits - 1)


def execute(nodes: list[Node], plan: Plan, values: Values, carrier: torch.dtype) -> tuple[Tensor, int]:
    """The real output of a plan whose integers `carrier` holds, and how many accumulators overflowed."""
    overflows = 0

    def step(node: Node, operands: list[Tensor]) -> Tensor:
        nonlocal overflows
        pairs = zip(node.edges, operands, strict=True)
        exact = OPS[node.op](*[plan.simqs[e](x).to(carrier) if e in plan.simqs else x for e, x in pairs])
        held = wrap(exact, HARDWARE[node.op][1])
        overflows += int((held != exact).sum())
        return held

    last = nodes[-1].name
    out = run(nodes, values, step)[last]
    return out.to(torch.float64) * plan.scales[last], overflows


#: Simulated on floats: fast, and exact, since float64 holds every integer below 2**53.
simulate = partial(execute, carrier=torch.float64)
#: Realized on integers, as the chip does it.
realize = partial(execute, carrier=torch.int64)


def sqnr(reference: Tensor, output: Tensor) -> float:
    """Signal to noise in dB: how near the float model the output is."""
    noise = (output - reference).square().sum().clamp_min(1e-30)
    return float(10 * torch.log10(reference.square().sum() / noise))


def search(nodes: list[Node], values: Values) -> Iterator[tuple[Bits, float, int]]:
    """Greedy: edge by edge, one bit fewer as long as that is no worse; fewer overflows come first.

    Yields:
        Every point that was tried, its SQNR and its overflows.
    """
    reference = run_float(nodes, values)[nodes[-1].name]
    limits, choices = thresholds(nodes, values), space(nodes)

    def score(bits: Bits) -> tuple[Bits, float, int]:
        output, overflows = simulate(nodes, resolve(nodes, bits, limits, set(values)), values)
        return bits, sqnr(reference, output), overflows

    best = score({edge: bits[0] for edge, bits in choices.items()})
    yield best
    for edge, widths in choices.items():
        for width in widths[1:]:
            trial = score({**best[0], edge: width})
            yield trial
            if (-trial[2], trial[1]) < (-best[2], best[1]):
                break
            best = trial


def best_of(trials: list[tuple[Bits, float, int]]) -> tuple[Bits, float, int]:
    return max(trials, key=lambda t: (-t[2], t[1], -sum(t[0].values())))


def main() -> None:
    torch.manual_seed(0)
    nodes = [
        Node("conv1", "conv", ("x", "w1")), Node("relu1", "relu", ("conv1",)),
        Node("conv2", "conv", ("relu1", "w2")), Node("add", "add", ("conv2", "relu1")),
        Node("relu2", "relu", ("add",)), Node("scores", "linear", ("relu2", "w3")),
    ]  # fmt: skip
    weights = {"w1": torch.randn(8, 1, 3, 3), "w2": torch.randn(8, 8, 3, 3) / 8, "w3": torch.randn(10, 512) / 16}
    values = {name: v.double() for name, v in {"x": torch.rand(32, 1, 8, 8), **weights}.items()}
    trials = list(search(nodes, values))
    for bits, value, overflows in trials:
        print(json.dumps({"bits": bits, "sqnr": value, "overflows": overflows}))
    bits, value, overflows = best_of(trials)
    plan = resolve(nodes, bits, thresholds(nodes, values), set(values))
    same = torch.equal(simulate(nodes, plan, values)[0], realize(nodes, plan, values)[0])
    print(f"widest bits: {trials[0][1]:.1f} dB, {trials[0][2]} overflows")
    print(f"best of {len(trials)} trials: {value:.1f} dB, {overflows} overflows; simulated == integer: {same}")


if __name__ == "__main__":
    main()
