"""What the callbacks of a search get: the search while it runs, beside each new trial.

`Search.run_trials` makes a `RunningSearch`, adds every trial to it, and calls the callbacks with it, in the main
process and in the order of trials, when a trial is logged, the best strategy and the front are on disk, and the
searcher was told.

Invariant: a callback reads; all that it can change is when the search ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from hago.errors import HagoError
from hago.plan import Strategy
from hago.search.pareto_front import ParetoFront
from hago.serialization.summary import number_values
from hago.study import Trial


class RunningSearch:
    """A search while it runs, as its callbacks get it.

    Args:
        hardware: the name of the hardware.
        model_hash: the hash of the model.
        measure: the figure of trials that the search maximizes, e.g. `sqnr`.
        cost: the cost of the front, e.g. `weight_bytes`.
        choices: the bits that every group of edges may have.
        front_of: makes the front of the trials so far.
        strategy_of: makes the strategy of a trial.
        forwards: what was spent before the first trial, in passes of the float model over the data.
    """

    def __init__(
        self,
        *,
        hardware: str,
        model_hash: str,
        measure: str,
        cost: str,
        choices: Mapping[str, tuple[int, ...]],
        front_of: Callable[[], ParetoFront],
        strategy_of: Callable[[Trial], Strategy],
        forwards: float = 0.0,
    ) -> None:
        self._hardware, self._model_hash = hardware, model_hash
        self._measure, self._cost, self._choices = measure, cost, choices
        self._front_of, self._strategy_of = front_of, strategy_of
        self._forwards = forwards
        self._trials: list[Trial] = []
        self._best: Trial | None = None
        self._stops = False

    @property
    def hardware(self) -> str:
        """The name of the hardware."""
        return self._hardware

    @property
    def model_hash(self) -> str:
        """The hash of the model, as strategies and the log have it."""
        return self._model_hash

    @property
    def measure(self) -> str:
        """The figure of trials that the search maximizes, e.g. `sqnr`, a key of `Trial.results`."""
        return self._measure

    @property
    def cost(self) -> str:
        """The cost of the front, e.g. `weight_bytes`, a key of `Score.costs`."""
        return self._cost

    @property
    def choices(self) -> Mapping[str, tuple[int, ...]]:
        """The bits that every group of edges may have: the space of the search."""
        return self._choices

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials so far in order, those that were read from the log included."""
        return tuple(self._trials)

    @property
    def best(self) -> Trial | None:
        """The best trial so far that may be returned; None where there is none."""
        return self._best

    @property
    def front(self) -> ParetoFront:
        """The Pareto front of the trials so far."""
        return self._front_of()

    @property
    def forwards(self) -> float:
        """What the search has spent, in passes of the float model over the data."""
        return self._forwards

    def strategy_of(self, trial: Trial) -> Strategy:
        """The strategy of a trial, before layers are corrected.

        Raises:
            InfeasibleBits: the hardware has no signature for the trial's bits.
        """
        return self._strategy_of(trial)

    def stop(self) -> None:
        """End the search after this trial; what it returns is the best of the trials so far."""
        self._stops = True

    @property
    def stops(self) -> bool:
        """Whether a callback has called `stop`."""
        return self._stops

    def figures(self, trial: Trial) -> dict[str, float]:
        """The finite figures of a new trial and of the best so far, by names for charts: `trial/sqnr`, `cost/cycles`,
        `best/sqnr`, `search/forwards` and so on."""
        best = self._best
        figures = {
            **{f"trial/{name}": value for name, value in number_values(trial.results).items()},
            **{f"cost/{name}": value for name, value in trial.score.costs.items()},
            "trial/overflows": float(sum(trial.score.overflows.values())),
            "trial/seconds": trial.seconds,
            **({} if best is None else {f"best/{self._measure}": self._value_of(best)}),
            "search/forwards": self._forwards,
            "search/seconds": trial.elapsed,
        }
        return {name: float(value) for name, value in figures.items() if math.isfinite(value)}

    def add(self, trial: Trial, best: Trial | None) -> None:
        """Add a trial, with the best so far; called by the search."""
        self._trials.append(trial)
        self._best = best
        self._forwards += trial.score.forwards if trial.same_as is None else 0.0

    def _value_of(self, trial: Trial) -> float:
        return float(trial.results.get(self._measure, trial.score.value))


#: Called with the search and a new trial; what it returns is ignored.
SearchCallback: TypeAlias = Callable[[RunningSearch, Trial], Any]


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that cannot be called.

    Raises:
        HagoError: one cannot be called, or they are no sequence.
    """
    if not isinstance(callbacks, (list, tuple)):
        raise HagoError(f"callbacks is of type {type(callbacks).__name__}; expected a list of functions")
    for index, callback in enumerate(callbacks):
        if not callable(callback):
            raise HagoError(f"callbacks[{index}] is {callback!r}, which cannot be called; expected a function")
