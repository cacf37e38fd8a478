"""Random search: every group's bits drawn uniformly, independently in each trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hago.errors import HagoError
from hago.plan import Bits, Space
from hago.study import Ask, Feeds, GeneratorSearcher, Searcher, Steps, point_key, random_generator

#: The most draws for one trial; if all were seen before, the trial is left out.
_MOST_DRAWS: Final = 100


@dataclass(frozen=True, slots=True)
class RandomOptions:
    """Options of random search.

    Args:
        trials: the number of trials, the start included.
        batch: points that are asked at once, for parallel evaluation.
    """

    trials: int = 1000
    batch: int = 1

    def __post_init__(self) -> None:
        if self.trials < 1 or self.batch < 1:
            raise HagoError(f"random search of {self.trials} trials, {self.batch} at once; expected 1 or more")


def random_search(space: Space, start: Bits, seed: int, options: RandomOptions, feeds: Feeds | None = None) -> Searcher:
    """A searcher that asks `start` first and then points drawn uniformly, none twice.

    References:
        Bergstra and Bengio, Random Search for Hyper-Parameter Optimization, JMLR 13, 2012.
    """
    return GeneratorSearcher("random", options, _steps(space, start, seed, options))


def _steps(space: Space, start: Bits, seed: int, options: RandomOptions) -> Steps[None]:
    seen = {point_key(start)}
    yield Ask((dict(start),), "start")
    for first in range(1, options.trials, options.batch):
        trials = range(first, min(first + options.batch, options.trials))
        drawn = [_draw(space, seed, trial, seen) for trial in trials]
        points = tuple(p for p in drawn if p is not None)
        if not points:
            return
        yield Ask(points, "drawn")


def _draw(space: Space, seed: int, trial: int, seen: set[str]) -> dict[str, int] | None:
    """Draw a point for a trial that is not in `seen`, and add it there; None where all draws were seen before."""
    rng = random_generator(seed, trial)
    for _ in range(_MOST_DRAWS):
        point = {key: int(rng.choice(g.choices)) for key, g in space.groups.items()}
        if point_key(point) not in seen:
            seen.add(point_key(point))
            return point
    return None
