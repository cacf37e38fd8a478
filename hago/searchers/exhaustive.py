"""Exhaustive search, which asks every point of a small space, and the default search, which asks its start alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from hago.errors import HagoError
from hago.plan import Bits, Space
from hago.study import Ask, Feeds, GeneratorSearcher, Searcher, Steps


@dataclass(frozen=True, slots=True)
class ExhaustiveOptions:
    """Options of exhaustive search.

    Args:
        limit: the most points that the space may have.
        batch: points that are asked at once, for parallel evaluation.
    """

    limit: int = 100_000
    batch: int = 1

    def __post_init__(self) -> None:
        if self.limit < 1 or self.batch < 1:
            raise HagoError(f"exhaustive search of {self.limit} points, {self.batch} at once; expected 1 or more")


def exhaustive_search(
    space: Space, start: Bits, seed: int, options: ExhaustiveOptions, feeds: Feeds | None = None
) -> Searcher:
    """A searcher that asks `start` and then every other point, most bits first.

    Raises:
        HagoError: the space has more points than `options.limit`.
    """
    points = math.prod(len(g.choices) for g in space.groups.values())
    if points > options.limit:
        raise HagoError(
            f"the space has {points:.3g} points, exhaustive search takes at most {options.limit}; fix "
            "more bits, raise its limit, or use another searcher"
        )
    return GeneratorSearcher("exhaustive", options, _steps(space, start, options))


def _steps(space: Space, start: Bits, options: ExhaustiveOptions) -> Steps[None]:
    yield Ask((dict(start),), "start")
    others = (p for p in _points(space) if p != dict(start))
    while batch := tuple(itertools.islice(others, options.batch)):
        yield Ask(batch, "in turn")


def _points(space: Space) -> Iterator[dict[str, int]]:
    for choice in itertools.product(*(g.choices for g in space.groups.values())):
        yield dict(zip(space.groups, choice, strict=True))


# ---------------------------------------------------------------- the start alone
@dataclass(frozen=True, slots=True)
class StartOnlyOptions:
    """Options of the search of one trial, which has none."""


def start_only_search(
    space: Space, start: Bits, seed: int, options: StartOnlyOptions, feeds: Feeds | None = None
) -> Searcher:
    """A searcher that asks `start` and ends."""
    return GeneratorSearcher("default", options, _start_steps(start))


def _start_steps(start: Bits) -> Steps[None]:
    yield Ask((dict(start),), "start")
