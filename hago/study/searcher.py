"""Searcher and Score: the two sides of a search."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from hago.errors import HagoError
from hago.plan.space import Bits, Space


@dataclass(frozen=True, slots=True)
class Score:
    """What one evaluation of a Plan said.

    Args:
        value: the objective; larger is better. The driver turns NaN into -inf.
        results: what the log keeps, JSON values only (e.g. {"sqnr": 31.2, "sim_acc": 0.91}).
        overflows: how many accumulators overflowed, by node; absent where none did.
        excess_bits: by node, how many bits too few the accumulator has for what was seen
            (log2(peak / max), rounded up; only positive entries).
        unproved: how many integer nodes have no proof that they cannot overflow.
        total_bits: the sum of bits over all groups: breaks ties, fewer is better.
        plan_key: equal for equal Plans.
        infeasible: why no signature holds these bits; empty where one does.
        forwards: what the evaluation cost, in forward passes over the calibration data.
        thresholds_sha256: of the thresholds that were used; empty where not given.
        costs: what the Plan takes, by name; empty where nobody counted.
        shortfall: by how much it misses limits that were set, each as a part of the limit, summed.
        tie: compared where values and proofs are equal; larger is better.
        dropped: of a point that was given up after some of the samples, as it was worse than the best so far:
            {"samples", "of", "because", "rival"}. Its value is an estimate below the rival's, what overflowed
            is what was seen by then, and it is never taken for the best. Empty where all samples were measured.
        interval: the objective's 95 % confidence interval over the samples; empty where nobody worked it out.
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
        """Whether the hardware can run it: a signature holds the bits and nothing overflowed."""
        return not self.infeasible and not self.overflows

    @property
    def rank(self) -> tuple[Any, ...]:
        """Compare by this, larger is better: feasible first, then no overflow, then limits kept, then
        the value, then proofs, then the tie, then fewer bits. Among points that overflow, fewer excess
        bits are better; among those that miss a limit, a smaller shortfall."""
        return (*self._fitness, self.value, -self.unproved, self.tie, -self.total_bits)

    @property
    def accepted(self) -> bool:
        """Whether the hardware can run it, it keeps every limit, and it was measured on all samples."""
        return self.runs and not self.shortfall and not self.dropped

    def standing(self, floor: float) -> tuple[Any, ...]:
        """Like `rank`, but all values of at least `floor` count as equal until proofs and bits are
        compared. With the highest value as floor it orders as `rank` does."""
        within = self.value >= floor
        merit = 0.0 if within else self.value
        return (*self._fitness, within, merit, -self.unproved, self.tie, -self.total_bits, self.value)

    @property
    def _fitness(self) -> tuple[bool, bool, int, float]:
        excess = sum(self.excess_bits.values()) if self.overflows else 0
        return (not self.infeasible, not self.overflows, -excess, -self.shortfall)


def point_key(bits: Bits) -> str:
    """Equal for equal bits, whatever their order: sha256 of their canonical JSON, 32 digits of it."""
    text = json.dumps(dict(bits), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Searcher(Protocol):
    """Proposes points. One searcher serves one search: the driver calls `ask`, evaluates, and calls
    `tell` with every point that was asked, in the order asked. All randomness comes from a
    generator made of (seed, trial number), so that replaying a log reproduces the searcher's state.

    An option called `tolerance` is read by the driver too: values that lie within it of the best
    count as equal when the best point is chosen.
    """

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]:
        """JSON values that, with the name, make the same searcher again."""
        ...

    def ask(self) -> Sequence[Bits]:
        """Points to evaluate next, at least one; an empty sequence ends the search."""
        ...

    def tell(self, bits: Bits, score: Score) -> None:
        """The score of a point that was asked."""
        ...


@runtime_checkable
class Explains(Protocol):
    """A searcher that also says why; what it says stands in the log."""

    @property
    def why(self) -> str:
        """Why the points of the last `ask` were asked."""
        ...


@runtime_checkable
class Recalls(Protocol):
    """A searcher whose points depend on more than their scores, e.g. on what others write to a storage: it cannot be
    brought to where it was by asking it again."""

    def recall(self, points: Sequence[Bits]) -> None:
        """Before the first `ask`: the points that an earlier session was scored, which it asks first, in this order."""
        ...


# ---------------------------------------------------------------- walk
# Walk: a searcher written as a generator that yields points and receives their scores.
# The generator is the searcher's whole state, so an algorithm reads as the loop it is, and replaying the same scores
# brings it to the same place.

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Ask:
    """Points to be scored together, and why."""

    points: tuple[Bits, ...]
    why: str = ""


#: A generator that asks for scores and returns an R in the end.
Steps: TypeAlias = Generator[Ask, Sequence[Score], R]
#: Scores by point: what a walk has seen.
ScoresByPoint: TypeAlias = dict[str, Score]
#: By node, the groups whose bits decide how large its accumulator gets.
Feeds: TypeAlias = Mapping[str, Sequence[str]]


class GeneratorSearcher:
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


def measure(bits: Bits, why: str, seen: ScoresByPoint) -> Steps[Score]:
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
