"""Bench: what scores points in one process, made from what can be sent to another.

A Work is all that a worker needs, once: model, hardware as a document, data, thresholds. A Bench is
what it builds from that: a Resolver and an Evaluator with their memories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hago.calibrate.collect import Calibration
from hago.calibrate.statistics import Estimator
from hago.errors import HagoError
from hago.frontend.data import Batches
from hago.graph import Graph
from hago.hardware import Hardware
from hago.hardware_document import from_document, to_document
from hago.objective import OBJECTIVES, Objective
from hago.ops import OPS
from hago.ops._rule import OpRule
from hago.prepare import Prepared
from hago.resolve import Resolver
from hago.search.searcher import Score
from hago.space import Bits, Space
from hago.threshold_sources import estimated_resolver
from hago.topology import Topology
from hago.trials.evaluate import Evaluator
from hago.trials.racer import Racer
from hago.trials.racing import Race, shuffled

#: An objective by its name, where hago knows it, or itself.
Named = str | Objective


@dataclass(frozen=True, slots=True)
class Work:
    """All that makes a Bench, in values that another process can be sent.

    Nothing may change it: an executor reads it in a thread of its own when it sends it.

    Args:
        hardware: its document.
        added: rules of ops that hago does not have.
        data: what makes the same Batches again.
        objective, also, cache_bytes: see Evaluator.
        race, seed: see make_bench.
    """

    graph: Graph
    model_hash: str
    hardware: Mapping[str, Any]
    added: Mapping[str, OpRule]
    data: Iterable[Any]
    data_hash: str
    topology: Topology
    space: Space
    calibration: Calibration
    estimator: Estimator
    objective: Named
    race: Race | None
    also: tuple[Named, ...]
    cache_bytes: int | None
    seed: int

    def bench(self) -> Bench:
        """A new Bench.

        Raises:
            HagoError: the model or the data is not what it was.
        """
        graph = replace(self.graph)  # without what the other remembers, which several threads would write
        if graph.model_hash != self.model_hash:
            raise HagoError(
                f"the model of this search has hash {self.model_hash[:12]}, what arrived here has "
                f"{graph.model_hash[:12]}; start the workers anew"
            )
        ops = {**OPS, **self.added}
        hardware = from_document(self.hardware, "the hardware of this search", ops)
        batches = Batches(self.data, graph.inputs)
        if batches.sha256 != self.data_hash:
            raise HagoError(
                f"the data of this search has hash {self.data_hash[:12]}, here it is {batches.sha256[:12]}; "
                "a data set that is read again must give the same values everywhere"
            )
        how = (self.calibration, self.estimator)
        resolver = estimated_resolver(graph, hardware, self.topology, self.space, *how, ops)
        also = [_objective(o) for o in self.also]
        objective = _objective(self.objective)
        return make_bench(resolver, batches, objective, also, self.cache_bytes, self.race, self.seed, quiet=True)


@dataclass(frozen=True, slots=True)
class Bench:
    """Scores points; for one thread at a time."""

    resolver: Resolver
    evaluator: Evaluator
    racer: Racer | None = None

    def score(self, bits: Bits, rival: Bits | None = None) -> Score:
        """The Score of a point.

        Args:
            rival: in a race, the best point so far.

        Raises:
            InfeasibleBits: no signature holds the bits.
        """
        plan = self.resolver(bits)
        if self.racer is None:
            return self.evaluator.score(plan, bits)
        return self.racer.score(plan, bits, None if rival is None else self.resolver(rival))


def make_bench(
    resolver: Resolver,
    batches: Batches,
    objective: Objective,
    also: Sequence[Objective] = (),
    cache_bytes: int | None = None,
    race: Race | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Bench:
    """A new Bench; see Evaluator.

    Args:
        race: how points are raced, or None.
        seed: of the order of samples in a race.
        quiet: see Evaluator; the process that searches has warned.
    """
    graph = resolver.graph
    if race is not None:
        batches = shuffled(batches, seed, race.first, graph.inputs)
    evaluator = Evaluator(graph, batches, objective, resolver.ops, also, cache_bytes, quiet=quiet)
    return Bench(resolver, evaluator, None if race is None else Racer(evaluator, race))


def work_of(
    prepared: Prepared,
    objective: Objective,
    also: Iterable[Objective] = (),
    cache_bytes: int | None = None,
    race: Race | None = None,
    seed: int = 0,
) -> Work:
    """The Work of a search."""
    hardware: Hardware = prepared.hardware
    return Work(
        graph=replace(prepared.graph),
        model_hash=prepared.graph.model_hash,
        hardware=to_document(hardware),
        added={name: rule for name, rule in hardware.known_ops.items() if OPS.get(name) is not rule},
        data=prepared.batches.source,
        data_hash=prepared.batches.sha256,
        topology=prepared.topology,
        space=prepared.space,
        calibration=prepared.calibration,
        estimator=prepared.estimator,
        objective=_named(objective),
        also=tuple(_named(o) for o in also),
        cache_bytes=cache_bytes,
        race=race,
        seed=seed,
    )


def _named(objective: Objective) -> Named:
    return objective.name if OBJECTIVES.get(objective.name) is objective else objective


def _objective(named: Named) -> Objective:
    return OBJECTIVES[named] if isinstance(named, str) else named
