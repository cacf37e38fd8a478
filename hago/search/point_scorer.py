"""The score of a point as measured: bits are resolved to a Plan, which an `Evaluator` measures.

`search.scoring.GoalScorer` makes a `PointScorer` for the process that searches, and every worker makes one for itself.
No goal is applied here: a worker sends back what it measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hago.data import Batches
from hago.plan import Bits, Resolver
from hago.search.evaluate import Evaluator
from hago.search.objective import Objective
from hago.search.racing import Pruner, RaceOptions, shuffled
from hago.study import Score


@dataclass(frozen=True, slots=True)
class PointScorer:
    """Scores points in one process, for one thread at a time. `make_point_scorer` makes one.

    Args:
        pruner: in a race, scores points against the best point so far; None without a race.
    """

    resolver: Resolver
    evaluator: Evaluator
    pruner: Pruner | None = None

    def score(self, bits: Bits, rival: Bits | None = None) -> Score:
        """The Score of a point.

        Args:
            rival: in a race, the best point so far.

        Raises:
            InfeasibleBits: no signature holds the bits.
        """
        plan = self.resolver(bits)
        if self.pruner is None:
            return self.evaluator.score(plan, bits)
        return self.pruner.score(plan, bits, None if rival is None else self.resolver(rival))


def make_point_scorer(
    resolver: Resolver,
    batches: Batches,
    objective: Objective,
    *,
    also: Sequence[Objective] = (),
    cache_bytes: int | None = None,
    race: RaceOptions | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> PointScorer:
    """Make a PointScorer; for the other arguments see Evaluator.

    Args:
        race: options of the race; None for none.
        seed: of the order of samples in a race.
        quiet: see Evaluator; true in workers, since the process that searches has issued the warnings.
    """
    graph = resolver.graph
    if race is not None:
        batches = shuffled(batches, seed, race.first, graph.inputs)
    evaluator = Evaluator(graph, batches, objective, resolver.ops, also=also, cache_bytes=cache_bytes, quiet=quiet)
    return PointScorer(resolver, evaluator, None if race is None else Pruner(evaluator, race))
