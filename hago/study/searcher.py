"""The interface between the search loop and the algorithms: the protocol `Searcher`, and searchers written as
generators.

`study.run_study` asks a Searcher for points and tells it their Scores, which `search.evaluate` computes. Most
algorithms in `hago.searchers` are generators that yield an `Ask` and receive scores; a `GeneratorSearcher` makes a
Searcher of one. The generator holds the whole state of the search, so the algorithm reads as a loop, and the same
scores restore the state when a log is replayed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from hago.errors import HagoError
from hago.plan import Bits, Space
from hago.study.score import Score


def point_key(bits: Bits) -> str:
    """A key of a point, equal for equal bits in any order: 32 digits of the sha256 of their canonical JSON."""
    text = json.dumps(dict(bits), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Searcher(Protocol):
    """An algorithm that proposes points. One object serves one search: `run_study` calls `ask`, evaluates the points,
    and calls `tell` for each of them, in the order asked, until `ask` returns no points. All randomness comes from
    `random_generator(seed, trial number)`, so that replaying a log reproduces the searcher's state.

    If `options` has a `tolerance`, values that are at most so much below the highest count as equal to it when
    `run_study` chooses the best trial.
    """

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that, with the name, make the same searcher again; JSON values, written to the log's header."""
        ...

    def ask(self) -> Sequence[Bits]:
        """The points to evaluate next; an empty sequence ends the search."""
        ...

    def tell(self, bits: Bits, score: Score) -> None:
        """Receive the score of a point that was asked."""
        ...


@runtime_checkable
class Explains(Protocol):
    """A searcher that gives a reason for the points it asks, which is written to the log."""

    @property
    def why(self) -> str:
        """The reason for the points of the last `ask`."""
        ...


@runtime_checkable
class Recalls(Protocol):
    """A searcher whose points depend on more than the scores that it was told, e.g. on a storage that other processes
    write to, so that telling it the same scores again would not restore its state."""

    def recall(self, points: Sequence[Bits]) -> None:
        """Receive the points of the log. `run_study` calls it before the first `ask`; the searcher must then ask these
        points first, in this order."""
        ...


# ---------------------------------------------------------------- searchers as generators
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Ask:
    """Points to be scored together, and the reason why they are asked, which is written to the log."""

    points: tuple[Bits, ...]
    why: str = ""


#: A generator that yields points, receives their scores, and returns an R in the end.
Steps: TypeAlias = Generator[Ask, Sequence[Score], R]
#: The scores that a searcher has received, by `point_key`.
ScoresByPoint: TypeAlias = dict[str, Score]
#: By node, the groups whose bits determine how large its accumulator gets.
Feeds: TypeAlias = Mapping[str, Sequence[str]]


class GeneratorSearcher:
    """A Searcher around a generator, which the first `ask` starts.

    Args:
        name: the searcher's key in `registry.SEARCHERS`.
        options: a dataclass of JSON values.
        steps: yields points, receives their scores in the same order, and ends the search by returning.
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
        """The points whose scores are outstanding, or else the next points of the generator; empty at its end."""
        if not self._ended and (self._ask is None or len(self._scores) == len(self._ask.points)):
            self._advance()
        return () if self._ended or self._ask is None else self._ask.points[len(self._scores) :]

    def tell(self, bits: Bits, score: Score) -> None:
        """Receive the score of the first outstanding point.

        Raises:
            HagoError: `bits` is not that point.
        """
        points = self._ask.points if self._ask else ()
        index = len(self._scores)
        if index >= len(points) or dict(points[index]) != dict(bits):
            raise HagoError(f"searcher {self._name!r} was told a point it did not ask next: {dict(bits)}")
        self._scores.append(score)

    def _advance(self) -> None:
        try:
            # a generator that has not started takes no value
            self._ask = next(self._steps) if self._ask is None else self._steps.send(self._scores)
        except StopIteration:
            self._ended = True
        self._scores = []


def ask_score(bits: Bits, why: str, known_scores: ScoresByPoint) -> Steps[Score]:
    """The score of a point: from `known_scores`, or else asked for and added there. For use with `yield from`."""
    key = point_key(bits)
    if key not in known_scores:
        (known_scores[key],) = yield Ask((dict(bits),), why)
    return known_scores[key]


def shifted(space: Space, bits: Bits, key: str, step: int) -> dict[str, int]:
    """`bits` with group `key` moved by `step` choices towards fewer bits (towards more where negative), clamped to the
    group's first and last choice."""
    choices = space.groups[key].choices
    index = choices.index(bits[key]) + step
    return {**bits, key: choices[min(max(index, 0), len(choices) - 1)]}


def random_generator(seed: int, trial: int) -> np.random.Generator:
    """The random generator of one trial."""
    return np.random.default_rng(np.random.SeedSequence((seed, trial)))
