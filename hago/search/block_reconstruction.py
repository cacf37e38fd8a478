"""Block reconstruction: the weights and biases of a few layers at a time, trained so that their block gives what the
float model's gives.

A network is cut into blocks at values through which everything passes (`blocks_of`): residual blocks stay whole, and
chains are cut every few layers. Blocks are trained in the order in which they run. What a block reads is, entry by
entry and at random, what the simulation with the trained blocks before it gives or what the float model gives, and
inside the block activations are rounded or not, at random, too (QDrop). Its error is the squared difference from the
float model's output. Weighing channels by squared gradients of the network's outputs, as BRECQ does, was tried and
changed nothing that could be measured.

What is trained are real weights in units of their scales, which are rounded in every pass; their gradient passes the
rounding, and their steps shrink to nothing. So weights may move by more than one integer, and start at those of the
Plan, which rounding with error feedback may have found. Scales and thresholds stay. The result are offsets of integers.

References:
    Y. Li et al., "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction", ICLR 2021;
    X. Wei et al., "QDrop: Randomly Dropping Quantization for Extremely Low-bit Post-Training Quantization", ICLR 2022;
    I. Hubara et al., "Accurate Post Training Quantization With Small Calibration Sets", ICML 2021, train weights of
    layers through the rounding (AdaQuant).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.straight_through import straight_through
from hago.arithmetic.types import Edge, QParams
from hago.correction import LAYERS
from hago.graph import Graph, Node, channels_last, compute_real
from hago.plan import Plan
from hago.simulation import DifferentiableNodes, Drop

#: The most trained layers of a block that is put together from a chain.
LAYERS_TOGETHER: Final = 3
#: Steps of training of every block.
STEPS: Final = 400
#: Places of a step: as many samples as have these in the widest layer of a block, but no fewer and no more than these.
STEP_PLACES: Final = 4096
LEAST_STEP_SAMPLES: Final = 4
MOST_STEP_SAMPLES: Final = 32
#: Samples that are run at once without gradients.
RUN_SAMPLES: Final = 32
#: The most samples that blocks are trained on, and the most bytes of what one block reads and gives.
MOST_SAMPLES: Final = 256
VALUE_BYTES: Final = 1 << 30
#: The first step of a weight of 4 bits, in integers; one of more bits takes a larger one, as its integers are smaller.
WEIGHT_RATE: Final = 0.02
#: The first step of a bias, relative to the root mean square of the channel's sums.
BIAS_RATE: Final = 0.003
#: How far from its start a constant may be at the start: less than what is rounded to another integer.
NEAREST: Final = 0.49
#: The part of the samples, one in so many, that says whether a trained block is taken.
CHECKED_PART: Final = 8
#: A mean square in place of 0.
TINY: Final = 1e-30


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring nodes of a network; made by `blocks_of`.

    Args:
        nodes: in the order in which they run.
        reads: the values of other nodes, and inputs of the network, that they read.
        ends: of their values, those that other blocks read or the network gives, and that depend on a trained layer.
        layers: the trained layers among them.
    """

    nodes: tuple[Node, ...]
    reads: tuple[str, ...]
    ends: tuple[str, ...]
    layers: tuple[str, ...]


def blocks_of(graph: Graph, layers: Collection[str], together: int = LAYERS_TOGETHER) -> list[Block]:
    """Cut a network into blocks, each with a trained layer; together they have all computed nodes.

    A cut is where the values that were computed before it, depend on a trained layer and are read behind it are one at
    most. It stands as far back as it can, before the next trained layer.

    Args:
        layers: names of the trained layers; at least one.
        together: the most layers of neighbouring parts that are joined.
    """
    nodes, last = graph.computed, dict[str, int]()
    for index, node in enumerate(nodes):
        last.update(dict.fromkeys(node.inputs, index))
    depends = set[str]()
    live, cuts, before = set[str](graph.inputs), [0], 0  # a cut at i stands before node i
    trained = 0
    for index, node in enumerate(nodes):
        live = {name for name in live if last.get(name, -1) >= index}
        if len(live & depends) <= 1 and all((graph[n].shape or (0,))[0] == 1 for n in live):
            before = index
        if node.name in layers:
            if trained and before > cuts[-1] and any(n.name in layers for n in nodes[cuts[-1] : before]):
                cuts.append(before)
            trained += 1
        if node.name in layers or depends.intersection(node.inputs):
            depends.add(node.name)
        live.add(node.name)
    parts = [nodes[a:b] for a, b in zip(cuts, [*cuts[1:], len(nodes)], strict=True)]
    joined: list[tuple[Node, ...]] = []
    for part in parts:
        both = (*joined[-1], *part) if joined else ()
        if both and sum(n.name in layers for n in both) <= together:
            joined[-1] = both
        else:
            joined.append(tuple(part))
    return [_block(graph, part, layers, depends) for part in joined]


def _block(graph: Graph, nodes: Sequence[Node], layers: Collection[str], depends: Collection[str]) -> Block:
    inside = {node.name for node in nodes}
    reads = {name for node in nodes for name in node.inputs if name not in inside and name not in graph.consts}
    ends = [
        n.name for n in nodes if n.name in depends and any(edge.dst not in inside for edge in graph.out_edges[n.name])
    ]
    return Block(tuple(nodes), tuple(sorted(reads)), tuple(ends), tuple(n.name for n in nodes if n.name in layers))


# ---------------------------------------------------------------- what is trained
def trained_layers(plan: Plan) -> dict[str, tuple[Edge, ...]]:
    """By layer, the edges of its weight and bias that are trained: constants that nothing else reads, and that the
    Plan holds as integers. Weights whose groups have multipliers are not."""
    layers = {}
    for node in plan.graph.computed:
        node_plan = plan.nodes.get(node.name)
        if node.op not in LAYERS:
            continue
        if node_plan is None:
            edges = [e for e in node.edges[1:2] if e in plan.weights]
        elif node_plan.groups is not None:
            continue
        else:
            edges = [
                e for e in node.edges[1:3] if e.slot in node_plan.consts and node_plan.operands[e.slot] is not None
            ]
        edges = [e for e in edges if len(plan.graph.out_edges[plan.graph.source(e)]) == 1]
        if any(e.slot == 1 for e in edges):
            layers[node.name] = tuple(edges)
    return layers


class _Variable:
    """A constant that is trained, in units of its scale.

    Args:
        target: how it is stored.
        start: the centered integers that it starts at.
        real: the float constant in units of the scale.
        unit: the first step, in integers; broadcasts against the constant.
    """

    def __init__(self, target: QParams, start: Tensor, real: Tensor, unit: Tensor | float) -> None:
        self.unit = unit
        whole = start.to(torch.float64)
        # float32 would not hold the integers of large biases and their fractions
        dtype = torch.float32 if float(whole.abs().max()) < 1 << 16 else torch.float64
        zero = target.spread_over(start.shape).zero_point
        self.low, self.high = ((end - zero).to(dtype) for end in (target.qmin, target.qmax))
        # as near to the float constant as what is rounded to the start can be
        near = torch.maximum(torch.minimum(real, whole + NEAREST), whole - NEAREST)
        self.origin = channels_last(near.to(dtype))
        self.moved = torch.zeros_like(self.origin, dtype=torch.float32).requires_grad_()

    def integers(self) -> Tensor:
        """The integers on a float carrier, with the gradient of the real values that are rounded."""
        value = self.origin + (self.moved * self.unit).to(self.origin.dtype)
        return straight_through(value, torch.maximum(torch.minimum(value.detach().round(), self.high), self.low))


# ---------------------------------------------------------------- reconstruction
def most_samples_of_blocks(plan: Plan) -> int:
    """The number of samples that the blocks of a network are trained on."""
    graph, layers = plan.graph, trained_layers(plan)
    blocks = blocks_of(graph, layers) if layers else []
    largest = max((sum(math.prod(graph[n].shape or ()) for n in (*b.reads, *b.ends)) for b in blocks), default=1)
    # in both models, as float32
    return max(1, min(MOST_SAMPLES, VALUE_BYTES // (2 * 4 * max(1, largest))))


def reconstruct_blocks(
    plan: Plan,
    inputs: Sequence[Tensor],
    steps: int = STEPS,
    seed: int = 0,
    report: Callable[[str], None] = lambda step: None,
) -> dict[str, Tensor]:
    """By how much the integers of constants, by name, should differ from those of the Plan.

    Args:
        inputs: of the graph, the samples to train on; see `most_samples_of_blocks`.
        steps: of training of every block.
        seed: of the order of samples, and of what is rounded.
        report: called with a text when a block begins.
    """
    return _Reconstruction(plan, inputs, steps, seed).run(report)


class _Reconstruction:
    """The blocks of one network, trained one after the other."""

    def __init__(self, plan: Plan, inputs: Sequence[Tensor], steps: int, seed: int) -> None:
        self.plan, self.graph, self.steps, self.samples = plan, plan.graph, steps, len(inputs[0])
        self.trained = max(1, self.samples - -(-self.samples // CHECKED_PART))  # the others check blocks
        self.drop = Drop(torch.Generator().manual_seed(seed))
        self.layers = trained_layers(plan)
        self.blocks = blocks_of(self.graph, self.layers) if self.layers else []
        kept = (*self.graph.outputs, *(name for block in self.blocks for name in block.reads))
        self.nodes = DifferentiableNodes(plan, kept)
        self.inputs = {n: channels_last(x) for n, x in zip(self.graph.inputs, inputs, strict=True)}

    def run(self, report: Callable[[str], None]) -> dict[str, Tensor]:
        """The offsets of all blocks."""
        simulated, real, offsets = dict(self.inputs), dict(self.inputs), dict[str, Tensor]()
        for number, block in enumerate(self.blocks):
            report(f"reconstructing block {number + 1} of {len(self.blocks)}")
            later = {name for other in self.blocks[number + 1 :] for name in other.reads}
            of_float = self._for_all_samples(block, partial(self._run_float, block), real, later)
            variables = self._train(block, simulated, real, of_float)
            live = self._better(block, variables, simulated, of_float)
            given = self._for_all_samples(block, partial(self.nodes.run, block.nodes, live=live), simulated, later)
            for edge, integers in live.items():
                offset = integers.to(torch.int64) - stored_integers(self.plan, edge)[1].to(torch.int64)
                if bool(offset.any()):
                    offsets[self.graph.source(edge)] = offset.contiguous()
            simulated = {name: value for name, value in (simulated | given).items() if name in later}
            real = {name: value for name, value in (real | of_float).items() if name in later}
        return offsets

    def _run_float(self, block: Block, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the float model computes in a block."""
        computed = dict(values)
        for node in block.nodes:
            read = [computed[n] if n in computed else self.graph.consts[n] for n in node.inputs]
            computed[node.name] = compute_real(node, read, self.plan.ops)
        return computed

    @torch.no_grad()
    def _for_all_samples(
        self,
        block: Block,
        compute: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        values: Mapping[str, Any],
        later: Collection[str],
    ) -> dict[str, Any]:
        """What a block gives at its ends and for later blocks, for all samples, which are run a few at a time."""
        parts: dict[str, list[Any]] = {}
        for rows in torch.split(torch.arange(self.samples), RUN_SAMPLES):
            given = compute(self._rows(block, values, rows))
            for name in (n.name for n in block.nodes if n.name in later or n.name in block.ends):
                parts.setdefault(name, []).append(given[name])
        return {n: of[0] if len(of[0]) == 1 < self.samples else torch.cat(of) for n, of in parts.items()}

    def _rows(self, block: Block, values: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
        """What a block reads, of some samples; what is the same for all samples as it is."""
        return {n: values[n][rows] if len(values[n]) == self.samples else values[n] for n in block.reads}

    def _train(
        self, block: Block, simulated: Mapping[str, Any], real: Mapping[str, Any], targets: Mapping[str, Any]
    ) -> dict[Edge, _Variable]:
        """The constants of a block, trained.

        Args:
            simulated, real: what it reads in the simulation and in the float model.
            targets: what it gives in the float model.
        """
        variables = self._variables(block, simulated)
        moved, order = [v.moved for v in variables.values()], self._orders(block)
        optimizer = torch.optim.Adam(moved, lr=1.0)
        for step in range(self.steps):
            optimizer.param_groups[0]["lr"] = 0.5 * (1.0 + math.cos(math.pi * step / self.steps))
            rows = next(order)
            read = self._mixed(block, simulated, real, rows)
            with torch.enable_grad():
                live = {edge: v.integers() for edge, v in variables.items()}
                given = self.nodes.run(block.nodes, read, live, self.drop)
                loss = self._error(block, given, targets, rows)
            if not loss.requires_grad:
                break  # no gradient passes an operator behind the layers
            gradients = torch.autograd.grad(loss, moved, allow_unused=True)
            for parameter, gradient in zip(moved, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()
        return variables

    @torch.no_grad()
    def _better(
        self,
        block: Block,
        variables: Mapping[Edge, _Variable],
        simulated: Mapping[str, Any],
        targets: Mapping[str, Any],
    ) -> dict[Edge, Tensor]:
        """The integers of a block as they were trained, or none if those of the Plan are better on samples that did not
        train them."""
        rows = torch.arange(self.trained, self.samples)
        live = {edge: variable.integers() for edge, variable in variables.items()}
        read, errors = self._rows(block, simulated, rows), []
        for tried in (live, {}):
            given = self.nodes.run(block.nodes, read, tried)
            errors.append(float(self._error(block, given, targets, rows)) if len(rows) else 0.0)
        return live if errors[0] <= errors[1] else {}

    def _error(self, block: Block, given: Mapping[str, Any], targets: Mapping[str, Any], rows: Tensor) -> Tensor:
        """The squared error of what a block gives for some samples, relative to what the float model gives; of several
        values the sum."""
        error = torch.zeros(())
        for name in (n for n in block.ends if targets[n].is_floating_point()):
            target = targets[name][rows]
            difference = self.nodes.real(name, given[name]) - target
            error = error + difference.square().mean() / target.square().mean().clamp_min(TINY)
        return error

    def _mixed(
        self, block: Block, simulated: Mapping[str, Any], real: Mapping[str, Any], rows: Tensor
    ) -> dict[str, Any]:
        """What a block reads of some samples, entry by entry of the simulation or of the float model."""
        read, of_float = (self._rows(block, values, rows) for values in (simulated, real))
        for name in (n for n in block.reads if simulated[n] is not real[n] and read[n].is_floating_point()):
            node_plan, x = self.plan.nodes.get(name), read[name]
            y = of_float[name] if node_plan is None else of_float[name] / node_plan.out.scale.to(x.dtype)
            read[name] = torch.lerp(x, y.to(x.dtype), self.drop.like(x))
        return read

    def _orders(self, block: Block) -> Iterator[Tensor]:
        """The samples of every step, each sample as often as any other."""
        shapes = [(self.graph[name].op, self.graph[name].shape or ()) for name in block.layers]
        places = max(math.prod(shape[1:-1] if op == "linear" else shape[2:]) for op, shape in shapes)
        count = min(self.trained, max(LEAST_STEP_SAMPLES, min(MOST_STEP_SAMPLES, STEP_PLACES // max(1, places))))
        left = torch.empty(0, dtype=torch.int64)
        while True:
            if len(left) < count:
                left = torch.cat([left, torch.randperm(self.trained, generator=self.drop.generator)])
            yield left[:count]
            left = left[count:]

    def _variables(self, block: Block, simulated: Mapping[str, Any]) -> dict[Edge, _Variable]:
        """The trained constants of a block at their start."""
        with torch.no_grad():
            some = torch.arange(min(RUN_SAMPLES, self.samples))
            sums = self.nodes.run(block.nodes, self._rows(block, simulated, some))
        variables = {}
        for edge in (e for name in block.layers for e in self.layers[name]):
            constant = self.graph.consts[self.graph.source(edge)].to(torch.float64)
            target, start = stored_integers(self.plan, edge)
            scale = target.spread_over(constant.shape).scale
            unit: Tensor | float = WEIGHT_RATE * max(1.0, (target.qmax - target.qmin) / 16)
            if edge.slot == 2:
                scale = scale.flatten()
                value = self.nodes.real(edge.dst, sums[edge.dst]).movedim(
                    -1 if self.graph[edge.dst].op == "linear" else 1, 0
                )
                unit = BIAS_RATE * (value.flatten(1).square().mean(1).sqrt() / scale).to(torch.float32).clamp_min(1.0)
            variables[edge] = _Variable(target, start, constant / scale, unit)
        return variables


def stored_integers(plan: Plan, edge: Edge) -> tuple[QParams, Tensor]:
    """How a constant is stored, and its centered integers."""
    if edge in plan.weights:
        return plan.weights[edge].qparams, plan.weights[edge].integers
    target = plan.nodes[edge.dst].operands[edge.slot]
    assert target is not None
    return target, plan.nodes[edge.dst].consts[edge.slot]
