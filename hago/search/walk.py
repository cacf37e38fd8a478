"""Walk: a searcher written as a generator that yields points and receives their scores.

The generator is the searcher's whole state, so an algorithm reads as the loop it is, and replaying
the same scores brings it to the same place.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from hago.errors import HagoError
from hago.search.searcher import Score, point_key
from hago.space import Bits, Space

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Ask:
    """Points to be scored together, and why."""

    points: tuple[Bits, ...]
    why: str = ""


#: A generator that asks for scores and returns an R in the end.
Steps: TypeAlias = Generator[Ask, Sequence[Score], R]
#: Scores by point: what a walk has seen.
Seen: TypeAlias = dict[str, Score]
#: By node, the groups whose bits decide how large its accumulator gets.
Feeds: TypeAlias = Mapping[str, Sequence[str]]


class Walk:
    """A Searcher around `steps`, which is started by the first `ask`.

    Args:
        name: under which `make_searcher` makes it.
        options: a dataclass of JSON values.
        steps: yields what to ask, receives the scores in the same order, ends the search by ending.
    """

    def __init__(self, name: str, options: Any, steps: Steps[None]) -> None:
        self._name = name
        self._options: dict[str, Any] = asdict(options)
        self._steps = steps
        self._ask: Ask | None = None
        self._scores: list[Score] = []
        self._ended = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options

    @property
    def why(self) -> str:
        return self._ask.why if self._ask else ""

    def ask(self) -> Sequence[Bits]:
        """The next points; those not yet told where some are outstanding; empty at the end."""
        if not self._ended and (self._ask is None or len(self._scores) == len(self._ask.points)):
            self._advance()
        return () if self._ended or self._ask is None else self._ask.points[len(self._scores) :]

    def tell(self, bits: Bits, score: Score) -> None:
        """The score of the first outstanding point.

        Raises:
            HagoError: `bits` is not that point.
        """
        points = self._ask.points if self._ask else ()
        told = len(self._scores)
        if told >= len(points) or dict(points[told]) != dict(bits):
            raise HagoError(f"searcher {self._name!r} was told a point it did not ask next: {dict(bits)}")
        self._scores.append(score)

    def _advance(self) -> None:
        try:
            # A generator takes None, and nothing else, to start.
            self._ask = next(self._steps) if self._ask is None else self._steps.send(self._scores)
        except StopIteration:
            self._ended = True
        self._scores = []


def measure(bits: Bits, why: str, seen: Seen) -> Steps[Score]:
    """The score of `bits`, asked only where `seen` does not have it."""
    key = point_key(bits)
    if key not in seen:
        (seen[key],) = yield Ask((dict(bits),), why)
    return seen[key]


def shifted(space: Space, bits: Bits, key: str, step: int) -> dict[str, int]:
    """`bits` with group `key` moved `step` choices towards fewer bits (more where negative), and
    stopped at the first and the last choice."""
    choices = space.groups[key].choices
    index = choices.index(bits[key]) + step
    return {**bits, key: choices[min(max(index, 0), len(choices) - 1)]}


def generator(seed: int, trial: int) -> np.random.Generator:
    """The randomness of one trial."""
    return np.random.default_rng(np.random.SeedSequence((seed, trial)))
