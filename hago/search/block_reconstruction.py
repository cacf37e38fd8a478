"""Block reconstruction: weights, biases and thresholds of some layers at a time, trained so that their block gives what
the float model's gives.

A network is cut into blocks at values through which everything passes (`blocks_of`): residual blocks stay whole, and
neighbouring ones are joined up to LAYERS_TOGETHER layers, but not to the whole network, since what one layer loses the
layers behind it make up for, and small blocks, each near its own aim, leave errors that add up at their ends. Blocks
are trained in the order in which they run, and then once more, with smaller steps, cut at other places. What a block
reads is, entry by entry and at random, what the simulation with the trained blocks before it gives or what the float
model gives, and inside the block activations are rounded or not, at random, too (QDrop). Its error is the squared
difference from the float model's output. Weighing channels by squared gradients of the network's outputs, as BRECQ
does, was tried and changed nothing that could be measured; training halves of a network behind these made samples that
were kept aside worse.

What is trained are real weights in units of their scales, which are rounded in every pass; their gradient passes the
rounding, and their steps shrink to nothing. So weights may move by more than one integer, and start near those of the
Plan, which rounding with error feedback may have found: weights that such a rounding moved far must not all fall back
with the first steps. Where inputs of layers have few bits, their thresholds are trained with the weights, by the
gradient of LSQ: both ends are multiplied by one factor, which is learned as a logarithm. Thresholds that are powers of
two stay, and so do all scales of weights.

The result are factors of thresholds and values of constants, for which `reconstructed` resolves a Plan: biases are
rounded anew, since the unit of a bias is the product of the scales of its layer's input and weight.

References:
    Y. Li et al., "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction", ICLR 2021;
    X. Wei et al., "QDrop: Randomly Dropping Quantization for Extremely Low-bit Post-Training Quantization", ICLR 2022,
    which trains scales of activations together with the rounding of weights, too;
    S. K. Esser et al., "Learned Step Size Quantization", ICLR 2020, section 2.1;
    Y. Ma et al., "Solving Oscillation Problem in Post-Training Quantization Through a Theoretical Perspective", CVPR
    2023, join neighbouring blocks;
    I. Hubara et al., "Accurate Post Training Quantization With Small Calibration Sets", ICML 2021, train weights of
    layers through the rounding (AdaQuant).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import quantize
from hago.arithmetic.straight_through import straight_through
from hago.arithmetic.types import Edge, QParams
from hago.correction import LAYERS, channel_axis
from hago.graph import Graph, Node, channels_last, compute_real
from hago.plan import Bits, Plan
from hago.search.block_journal import BlockJournal, TrainedBlock
from hago.search.preparation import Prepared
from hago.search.proposed_thresholds import with_scaled
from hago.simulation import DifferentiableNodes, Drop

#: The most trained layers of a block that is joined of several; no more than half of a network's layers, except that
#: as many as FEW_LAYERS may always be joined.
LAYERS_TOGETHER: Final = 9
FEW_LAYERS: Final = 3
#: Steps of training of every block.
STEPS: Final = 200
#: By how much the second time has fewer and smaller steps.
SECOND: Final = 0.5
#: Places of a step: as many samples as have these in the widest layer of a block, but no fewer and no more than these.
STEP_PLACES: Final = 1 << 14
LEAST_STEP_SAMPLES: Final = 4
MOST_STEP_SAMPLES: Final = 16
#: Samples that are run at once without gradients.
RUN_SAMPLES: Final = 32
#: The most samples that blocks are trained on, and the most bytes of what one block reads and gives.
MOST_SAMPLES: Final = 256
VALUE_BYTES: Final = 1 << 30
#: The first step of a weight of 4 bits, in integers; one of more bits takes a larger one, as its integers are smaller.
WEIGHT_RATE: Final = 0.012
#: The first step of a bias, relative to the root mean square of the channel's sums.
BIAS_RATE: Final = 0.0018
#: The first step of the logarithm of a threshold.
THRESHOLD_RATE: Final = 0.002
#: The most integers of a range whose threshold is trained: those of 7 bits.
MOST_TRAINED: Final = 128
#: How far from its integer a constant may be at the start: far enough from what is rounded to another.
NEAREST: Final = 0.25
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


def layers_together(layers: Collection[str]) -> int:
    """The most layers of a joined block, in a network of so many trained ones."""
    return max(FEW_LAYERS, min(LAYERS_TOGETHER, len(layers) // 2))


def blocks_of(graph: Graph, layers: Collection[str], together: int, first: int | None = None) -> list[Block]:
    """Cut a network into blocks, each with a trained layer; together they have all computed nodes.

    A cut is where the values that were computed before it, depend on a trained layer and are read behind it are one at
    most. It stands as far back as it can, before the next trained layer.

    Args:
        layers: names of the trained layers; at least one.
        together: the most layers of neighbouring parts that are joined.
        first: the same for the first block, by which the others are cut at other places; by default `together`.
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
        most = first if first is not None and len(joined) == 1 else together
        if both and sum(n.name in layers for n in both) <= most:
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


def trained_thresholds(plan: Plan, layers: Mapping[str, Collection[Edge]]) -> dict[Edge, tuple[str, QParams]]:
    """The edges on which trained layers read activations whose thresholds are trained, each with its source and its
    qparams; edges that share both share a threshold.

    Args:
        layers: of `trained_layers`.
    """
    found: dict[Edge, tuple[str, QParams]] = {}
    if plan.hardware.requantize.power_of_two:
        return found
    for name, edges in layers.items():
        node, node_plan = plan.graph[name], plan.nodes.get(name)
        # a bias that stays would have another unit
        if node_plan is None or any(s > 1 and Edge(name, s) not in edges for s in node_plan.consts):
            continue
        edge, simq = node.edges[0], node_plan.simqs[0]
        target = None if simq is None or str(edge) not in node_plan.thresholds else simq.target
        if target is not None and target.qmax - target.qmin < MOST_TRAINED:
            found[edge] = (node.inputs[0], target)
    return found


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
@dataclass(frozen=True, slots=True)
class Reconstructed:
    """What block reconstruction found; `reconstructed` applies it.

    Args:
        values: by name, the real values of constants, float64: integers times the scales of the Plan that was trained.
        factors: by edge, what both ends of its threshold are multiplied by.
    """

    values: Mapping[str, Tensor]
    factors: Mapping[str, float]

    def __bool__(self) -> bool:
        return bool(self.values or self.factors)


def reconstructed(prepared: Prepared, bits: Bits, found: Reconstructed) -> Prepared:
    """The same with the thresholds and the constants that were found at a point.

    Args:
        bits: the point.
    """
    if found.factors:
        prepared = with_scaled(prepared, bits, found.factors)
    graph, offsets = prepared.graph, dict(prepared.offsets)
    plan = prepared.resolver.with_constants(None)(bits)
    for name, value in found.values.items():
        target, nearest = stored_integers(plan, graph.out_edges[name][0])
        whole = quantize(value, target, prepared.hardware.requantize.rounding).to(torch.int64)
        offsets[name] = (whole - nearest.to(torch.int64)).contiguous()
    return prepared.with_offsets({name: offset for name, offset in offsets.items() if bool(offset.any())})


def _passes(graph: Graph, layers: Collection[str]) -> list[list[Block]]:
    """The blocks of both times that a network is trained; of one where nothing can be cut at another place."""
    if not layers:
        return []
    together = layers_together(layers)
    passes = [blocks_of(graph, layers, together, first) for first in (together, max(1, together // 2))]
    return passes[:1] if passes[0] == passes[1] else passes


def most_samples_of_blocks(plan: Plan) -> int:
    """The number of samples that the blocks of a network are trained on."""
    graph, passes = plan.graph, _passes(plan.graph, trained_layers(plan))
    sizes = [sum(math.prod(graph[n].shape or ()) for n in (*b.reads, *b.ends)) for blocks in passes for b in blocks]
    # in both models, as float32
    return max(1, min(MOST_SAMPLES, VALUE_BYTES // (2 * 4 * max(1, *sizes, 1))))


def reconstruct_blocks(
    plan: Plan,
    inputs: Sequence[Tensor],
    steps: int = STEPS,
    seed: int = 0,
    report: Callable[[str], None] = lambda step: None,
    journal: Path | None = None,
) -> Reconstructed:
    """Train the blocks of a Plan; what is found holds for the constants of blocks that are better for it.

    Args:
        inputs: of the graph, the samples to train on; see `most_samples_of_blocks`.
        steps: of training of every block, the first time.
        seed: of the order of samples, and of what is rounded.
        report: called with a text when a block begins.
        journal: a file that has the trained blocks, from which an interrupted reconstruction goes on; None for none.
    """
    known = BlockJournal.read(journal, plan.key, plan.graph.correction_hash, steps, seed, *inputs)
    return _Reconstruction(plan, inputs, steps, seed, known).run(report)


class _Reconstruction:
    """The blocks of one network, trained one after the other.

    Attributes:
        variables: the constants that were trained so far, by edge.
        logs: the logarithms of the factors of thresholds, by edge; edges with one threshold share one.
    """

    def __init__(
        self, plan: Plan, inputs: Sequence[Tensor], steps: int, seed: int, journal: BlockJournal | None = None
    ) -> None:
        self.journal = BlockJournal(None, "") if journal is None else journal
        self.known = list(self.journal.blocks)
        self.plan, self.graph, self.steps, self.samples = plan, plan.graph, steps, len(inputs[0])
        self.trained = max(1, self.samples - -(-self.samples // CHECKED_PART))  # the others check blocks
        self.drop = Drop(torch.Generator().manual_seed(seed))
        self.layers = trained_layers(plan)
        self.passes = _passes(plan.graph, self.layers)
        shared: dict[tuple[str, int], Tensor] = {}
        self.logs = {
            edge: shared.setdefault((source, id(target)), torch.zeros(()).requires_grad_())
            for edge, (source, target) in trained_thresholds(plan, self.layers).items()
        }
        self.variables: dict[Edge, _Variable] = {}
        self.nodes = DifferentiableNodes(plan, [*self.graph.outputs, *self._read(), *self._clamped_above()])
        self.inputs = {n: channels_last(x) for n, x in zip(self.graph.inputs, inputs, strict=True)}

    def _read(self) -> list[str]:
        """The values that blocks read."""
        return [name for blocks in self.passes for block in blocks for name in block.reads]

    def _clamped_above(self) -> list[str]:
        """The clamps to an upper limit, as relu6, before trained thresholds, with which the integer of the limit
        changes."""

        def is_bounded(name: str) -> bool:
            node_plan, rule = self.plan.nodes.get(name), self.plan.ops.get(self.graph[name].op)
            if node_plan is None or rule is None or rule.integer is None or rule.integer.limits is None:
                return False
            return rule.integer.limits(node_plan.attrs)[1] is not None

        return sorted({name for edge in self.logs if is_bounded(name := self.graph.source(edge))})

    def run(self, report: Callable[[str], None]) -> Reconstructed:
        """Train all blocks."""
        kept = set[str]()
        for number, blocks in enumerate(self.passes):
            self._train_all(blocks, SECOND**number, kept, report)
        self.journal.remove()
        with torch.no_grad():
            exact = {edge: float(factor) for edge, factor in self._factors(self.logs).items()}
        factors = {edge: factor for edge, factor in exact.items() if factor != 1.0}
        values = dict[str, Tensor]()
        for name, edges in self.layers.items():
            for edge in edges if name in kept or Edge(name, 0) in factors else ():
                target, start = stored_integers(self.plan, edge)
                whole = self.variables[edge].integers().detach()
                if Edge(name, 0) in factors or not torch.equal(whole.to(torch.int64), start.to(torch.int64)):
                    scale = target.spread_over(whole.shape).scale
                    scale = scale.flatten() if edge.slot == 2 else scale
                    values[self.graph.source(edge)] = whole.to(torch.float64) * scale
        return Reconstructed(values, {str(edge): factor for edge, factor in factors.items()})

    def _train_all(self, blocks: Sequence[Block], part: float, kept: set[str], report: Callable[[str], None]) -> None:
        """Train blocks, one after the other.

        Args:
            part: what steps and their number are multiplied by.
            kept: gets the layers of those that are better for it.
        """
        simulated, real = dict(self.inputs), dict(self.inputs)
        for number, block in enumerate(blocks):
            again = "" if part == 1.0 else " again"
            report(f"reconstructing block {number + 1} of {len(blocks)}{again}")
            later = {name for other in blocks[number + 1 :] for name in other.reads}
            of_float = self._for_all_samples(block, partial(self._run_float, block), real, later)
            for edge, variable in self._variables(block, simulated).items():
                self.variables.setdefault(edge, variable)
            tensors = self._tensors(block)
            if self.known:
                is_better = self._restore(self.known.pop(0), tensors)
            else:
                is_better = self._train_if_better(block, tensors, simulated, real, of_float, part)
                self.journal.add(is_better, self.drop.generator, tensors)
            if is_better:
                kept.update(block.layers)
            given = self._for_all_samples(block, partial(self._simulate, block), simulated, later)
            simulated = {name: value for name, value in (simulated | given).items() if name in later}
            real = {name: value for name, value in (real | of_float).items() if name in later}

    def _restore(self, trained: TrainedBlock, tensors: Sequence[Tensor]) -> bool:
        """Leave a block as it was left before; whether it had become better."""
        with torch.no_grad():
            for tensor, value in zip(tensors, trained.tensors, strict=True):
                tensor.copy_(value)
        self.drop.generator.set_state(trained.generator)
        return trained.kept

    def _train_if_better(
        self,
        block: Block,
        tensors: Sequence[Tensor],
        simulated: Mapping[str, Any],
        real: Mapping[str, Any],
        of_float: Mapping[str, Any],
        part: float,
    ) -> bool:
        """Train a block; whether it becomes better. It stays as it is if it does not."""
        before = [tensor.detach().clone() for tensor in tensors]
        error = self._error_aside(block, simulated, of_float)
        self._train(block, simulated, real, of_float, part)
        if self._error_aside(block, simulated, of_float) <= error:
            return True
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        return False

    def _edges(self, block: Block) -> list[Edge]:
        """The constants of a block that are trained."""
        return [edge for name in block.layers for edge in self.layers[name]]

    def _tensors(self, block: Block) -> list[Tensor]:
        """What is trained of a block, thresholds last."""
        logs = {id(log): log for edge, log in self.logs.items() if edge.dst in block.layers}
        return [*(self.variables[edge].moved for edge in self._edges(block)), *logs.values()]

    def _factors(self, edges: Collection[Edge]) -> dict[Edge, Tensor]:
        """The factors of the thresholds among some edges, float64."""
        exact = {id(self.logs[e]): torch.exp(self.logs[e].to(torch.float64)) for e in edges if e in self.logs}
        return {e: exact[id(self.logs[e])] for e in edges if e in self.logs}

    def _simulate(self, block: Block, values: Mapping[str, Any], drop: Drop | None = None) -> dict[str, Any]:
        """What a block gives as it is trained so far."""
        live = {edge: self.variables[edge].integers() for edge in self._edges(block)}
        factors = self._factors([Edge(name, 0) for name in block.layers])
        return self.nodes.run(block.nodes, values, live, drop, factors)

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
        self,
        block: Block,
        simulated: Mapping[str, Any],
        real: Mapping[str, Any],
        targets: Mapping[str, Any],
        part: float,
    ) -> None:
        """Train the constants and thresholds of a block.

        Args:
            simulated, real: what it reads in the simulation and in the float model.
            targets: what it gives in the float model.
            part: what steps and their number are multiplied by.
        """
        trained, order, steps = self._tensors(block), self._orders(block), math.ceil(self.steps * part)
        constants = len(self._edges(block))
        rates = [part] * constants + [THRESHOLD_RATE * part] * (len(trained) - constants)
        optimizer = torch.optim.Adam([{"params": [t], "lr": rate} for t, rate in zip(trained, rates, strict=True)])
        for step in range(steps):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = 0.5 * rate * (1.0 + math.cos(math.pi * step / steps))
            rows = next(order)
            read = self._mixed(block, simulated, real, rows)
            with torch.enable_grad():
                loss = self._error(block, self._simulate(block, read, self.drop), targets, rows)
            if not loss.requires_grad:
                break  # no gradient passes an operator behind the layers
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()

    @torch.no_grad()
    def _error_aside(self, block: Block, simulated: Mapping[str, Any], targets: Mapping[str, Any]) -> float:
        """The error of a block on the samples that do not train it; 0 where there are none."""
        rows = torch.arange(self.trained, self.samples)
        if not len(rows):
            return 0.0
        return float(self._error(block, self._simulate(block, self._rows(block, simulated, rows)), targets, rows))

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
        """The constants of a block that were not trained before, at their start."""
        new = [edge for edge in self._edges(block) if edge not in self.variables]
        if not new:
            return {}
        with torch.no_grad():
            some = torch.arange(min(RUN_SAMPLES, self.samples))
            sums = self.nodes.run(block.nodes, self._rows(block, simulated, some))
        variables = {}
        for edge in new:
            constant = self.graph.consts[self.graph.source(edge)].to(torch.float64)
            target, start = stored_integers(self.plan, edge)
            scale = target.spread_over(constant.shape).scale
            unit: Tensor | float = WEIGHT_RATE * max(1.0, (target.qmax - target.qmin) / 16)
            if edge.slot == 2:
                scale = scale.flatten()
                axis = channel_axis(self.graph[edge.dst])
                value = self.nodes.real(edge.dst, sums[edge.dst]).movedim(axis, 0)
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
