"""Simulated annealing: random moves, where a move to a worse point is accepted often at first and rarely at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from hago.errors import HagoError
from hago.plan import Bits, Space
from hago.searchers.repair import feeds_of, first_point_that_runs
from hago.study import (
    Feeds,
    GeneratorSearcher,
    Score,
    ScoresByPoint,
    Searcher,
    Steps,
    ask_score,
    random_generator,
    shifted,
)


@dataclass(frozen=True, slots=True)
class AnnealingOptions:
    """Options of simulated annealing.

    Args:
        temperature: at the start, in units of the typical loss: at 1 a typical loss is accepted with probability 1/e.
        stop: the temperature at which the search ends.
        cooling: the factor of the temperature after each move; with the defaults there are 688 moves.
        portion: the part of the groups with more than one choice that a move changes; at least one group.
        step: the most choices by which a move changes a group.
    """

    temperature: float = 0.5
    stop: float = 0.0005
    cooling: float = 0.99
    portion: float = 0.1
    step: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.stop < self.temperature < math.inf:
            raise HagoError(
                f"annealing from temperature {self.temperature} to {self.stop}; expected it to fall, above 0"
            )
        if not (0 < self.cooling < 1 and 0 < self.portion <= 1 and self.step >= 1):
            raise HagoError(
                f"annealing with cooling {self.cooling}, portion {self.portion}, step {self.step}; expected "
                "0 < cooling < 1, 0 < portion <= 1, step >= 1"
            )


def annealing_search(
    space: Space, start: Bits, seed: int, options: AnnealingOptions, feeds: Feeds | None = None
) -> Searcher:
    """A searcher that makes random moves from `start` and accepts a loss with probability
    exp(-loss / (temperature * typical loss)). A start that overflows is repaired first. From a point that runs and
    keeps all limits it never moves to one that does not.

    The typical loss is the mean change of the value over the moves so far, so that the temperature has no unit and
    suits any objective.

    Args:
        feeds: by node, the groups that decide how large its accumulator gets; by default the groups of its in-edges.

    References:
        Kirkpatrick, Gelatt and Vecchi, Optimization by Simulated Annealing, Science 220, 1983. The
        defaults are those of the first HAGO's prototype of January 2020.
    """
    return GeneratorSearcher(
        "annealing", options, _steps(space, start, seed, options, feeds_of(space) if feeds is None else feeds)
    )


@dataclass(slots=True)
class _TypicalChange:
    """The running mean of the magnitudes of changes of the value; finite, nonzero changes count."""

    changes: list[float] = field(default_factory=list)

    def update(self, change: float) -> float:
        """Add a change, and return the mean; 1 before the first change that counts."""
        if change and math.isfinite(change):
            self.changes.append(abs(change))
        return math.fsum(self.changes) / len(self.changes) if self.changes else 1.0


def _steps(space: Space, start: Bits, seed: int, options: AnnealingOptions, feeds: Feeds) -> Steps[None]:
    known_scores: ScoresByPoint = {}
    bits, score = yield from first_point_that_runs(space, start, feeds, known_scores)
    movable = [key for key, group in space.groups.items() if len(group.choices) > 1]
    if not movable:
        return
    typical_change = _TypicalChange()
    temperature, move = options.temperature, 1
    while temperature > options.stop:
        rng = random_generator(seed, move)
        neighbour = _random_move(space, bits, movable, options, rng)
        neighbour_score = yield from ask_score(neighbour, f"move {move}", known_scores)
        if _accepts(score, neighbour_score, temperature, typical_change, rng):
            bits, score = neighbour, neighbour_score
        temperature *= options.cooling
        move += 1


def _random_move(
    space: Space, bits: Bits, movable: list[str], options: AnnealingOptions, rng: np.random.Generator
) -> dict[str, int]:
    """A neighbour of a point: a random portion of the groups, each moved by a random number of choices."""
    count = max(1, round(options.portion * len(movable)))
    neighbour = dict(bits)
    for index in rng.choice(len(movable), size=count, replace=False):
        size = int(rng.integers(1, options.step + 1))
        neighbour = shifted(space, neighbour, movable[int(index)], size if rng.random() < 0.5 else -size)
    return neighbour


def _accepts(
    current: Score, neighbour: Score, temperature: float, typical_change: _TypicalChange, rng: np.random.Generator
) -> bool:
    """Whether the search moves from a point to its neighbour."""
    loss = 0.0 if current.value == neighbour.value else current.value - neighbour.value
    typical = typical_change.update(loss)
    if neighbour.rank >= current.rank:
        return True
    if not (current.accepted and neighbour.accepted):
        return False
    # a move to a point of equal value that ranks lower counts as a typical loss
    return bool(rng.random() < math.exp(-(loss / typical if loss else 1.0) / temperature))
