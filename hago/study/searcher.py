"""The interface between the search loop and the algorithms: `Score`, the protocol `Searcher`, and searchers written as
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
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from hago.errors import HagoError
from hago.plan import Bits, Space


@dataclass(frozen=True, slots=True)
class Score:
    """The result of evaluating one Plan: objective, costs, overflow counts. Made by the evaluator; `run_study` writes
    it to the log and tells it to the searcher.

    Args:
        value: the objective; larger is better. The study turns NaN into -inf.
        results: measurements for the log, JSON values only (e.g. {"sqnr": 31.2, "sim_acc": 0.91}).
        overflows: how many accumulators overflowed, by node; nodes without overflow are absent.
        excess_bits: by node, the bits that the accumulator lacked for the largest value seen (log2(peak / max), rounded
            up); positive entries only.
        unproved: how many integer nodes are not proved to be free of overflow.
        total_bits: the sum of bits over all groups; breaks ties, fewer is better.
        plan_key: equal for equal Plans.
        infeasible: why a node has no signature for these bits; empty where the point is feasible.
        forwards: the cost of the evaluation, in forward passes over the calibration data.
        thresholds_sha256: hash of the thresholds that were used; empty if not given.
        costs: costs of the Plan on its hardware, by metric; empty if not counted.
        shortfall: by how much limits are violated, each relative to the limit, summed.
        tie: breaks ties where values and proofs are equal; larger is better.
        dropped: for a point whose evaluation was stopped early in a race, as it was worse than the best point so far
            (the rival): {"samples", "of", "because", "rival"}. Its value is then an estimate below the rival's, its
            overflows are those of the evaluated samples, and it is never the best trial. Empty where all samples were
            evaluated.
        interval: the 95 % confidence interval of the objective over the samples; empty if not computed.
    """

    value: float
    results: Mapping[str, Any] = field(default_factory=dict)
    overflows: Mapping[str, int] = field(default_factory=dict)
    excess_bits: Mapping[str, int] = field(default_factory=dict)
    unproved: int = 0
    total_bits: int = 0
    plan_key: str = ""
    infeasible: str = ""
    forwards: float = 1.0
    thresholds_sha256: str = ""
    costs: Mapping[str, float] = field(default_factory=dict)
    shortfall: float = 0.0
    tie: float = 0.0
    dropped: Mapping[str, Any] = field(default_factory=dict)
    interval: tuple[float, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether the hardware can run the point: it is feasible, and no accumulator overflowed."""
        return not self.infeasible and not self.overflows

    @property
    def rank(self) -> tuple[Any, ...]:
        """The key by which scores are compared, larger is better: feasible first, then no overflow, then no limit
        violated, then the value, then proofs, then the tie, then fewer bits. Among points that overflow, fewer excess
        bits are better; among those that violate a limit, a smaller shortfall."""
        return (*self._fitness, self.value, -self.unproved, self.tie, -self.total_bits)

    @property
    def accepted(self) -> bool:
        """Whether the hardware can run the point, it keeps every limit, and it was evaluated on all samples."""
        return self.runs and not self.shortfall and not self.dropped

    def standing(self, floor: float) -> tuple[Any, ...]:
        """A key like `rank` in which all values of at least `floor` are equal, and are compared after proofs and bits.
        With the highest value as the floor, the order is that of `rank`."""
        within = self.value >= floor
        merit = 0.0 if within else self.value
        return (*self._fitness, within, merit, -self.unproved, self.tie, -self.total_bits, self.value)

    @property
    def _fitness(self) -> tuple[bool, bool, int, float]:
        excess = sum(self.excess_bits.values()) if self.overflows else 0
        return (not self.infeasible, not self.overflows, -excess, -self.shortfall)


def point_key(bits: Bits) -> str:
    """A key of a point, equal for equal bits in any order: 32 digits of the sha256 of their canonical JSON."""
    text = json.dumps(dict(bits), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Searcher(Protocol):
    """An algorithm that proposes points. One object serves one search: `run_study` calls `ask`, evaluates the points,
    and calls `tell` for each of them, in the order asked, until `ask` returns no points. All randomness comes from
    `generator(seed, trial number)`, so that replaying a log reproduces the searcher's state.

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


def measure(bits: Bits, why: str, known_scores: ScoresByPoint) -> Steps[Score]:
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


def generator(seed: int, trial: int) -> np.random.Generator:
    """The random generator of one trial."""
    return np.random.default_rng(np.random.SeedSequence((seed, trial)))
