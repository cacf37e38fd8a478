"""Driver: the loop that asks a searcher, evaluates, logs, and keeps the best point.

Everything that every searcher needs stands here once: memory of equal Plans, the log and resuming
from it, the budget, progress, and the best so far. What a searcher is told is what the log says, so
replaying a log brings a search to where it was; one that depends on more is told what the log holds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, TypeAlias

from hago.errors import HagoError, InfeasibleBits, LogError
from hago.plan.space import Bits, Space
from hago.serialization.json_text import canonical, check_schema, parse_json
from hago.study.budget import Budget, BudgetKind
from hago.study.interrupts import Interrupts
from hago.study.log import Header, LogFile, Notice, Trial, best_trial, log_notice
from hago.study.progress import Progress
from hago.study.searcher import Explains, Recalls, Score, Searcher
from hago.study.trial_cache import Evaluate, Submit, TrialCache

#: (trial, best so far, whether it was read from the log) -> what the bar shows beside.
OnTrial: TypeAlias = Callable[[Trial, Trial | None, bool], Sequence[str]]
Stop: TypeAlias = Literal["finished"] | BudgetKind


@dataclass(frozen=True, slots=True)
class StudyResult:
    """What a search ends with.

    Args:
        best: the best trial.
        trials: all of them, earlier sessions included.
        stopped_because: the searcher "finished", or a budget ran out ("trials", "seconds", "forwards").
    """

    best: Trial
    trials: tuple[Trial, ...]
    stopped_because: Stop

    @property
    def bits(self) -> Mapping[str, int]:
        """Of the best trial."""
        return self.best.bits

    @property
    def score(self) -> Score:
        """Of the best trial."""
        return self.best.score


def run_study(
    space: Space,
    searcher: Searcher,
    evaluate: Evaluate,
    *,
    log: str | Path | None = None,
    header: Header | None = None,
    budget: Budget | str | int | None = None,
    resume: bool = True,
    progress: bool = False,
    on_best: Callable[[Trial], None] | None = None,
    on_trial: OnTrial | None = None,
    plan_key: Callable[[Bits], str] | None = None,
    allow_overflow: bool = False,
    executor: Executor | None = None,
    submit: Submit | None = None,
    race: bool = False,
    notice: Notice = log_notice,
    clock: Callable[[], float] = time.monotonic,
    before: tuple[float, float] = (0.0, 0.0),
) -> StudyResult:
    """Search until the searcher ends or the budget is spent.

    Args:
        searcher: a fresh one; it serves this search only.
        evaluate: scores a point; may raise InfeasibleBits where no signature holds it.
        log: a path; a log that stands there is continued.
        header: of the log; needed where `log` is given.
        budget: see Budget.parse. At least one trial is made.
        resume: whether a log that stands at the path may be continued.
        progress: show a bar on a terminal.
        on_best: called with the best trial after each improvement, and once after a resume.
        on_trial: called with every trial, the best so far, and whether the trial was read from the log; what
            it returns is shown in the bar.
        plan_key: cheap and equal for equal Plans, which are then evaluated once; without it equal
            bits are.
        allow_overflow: return a point that overflowed on the calibration data if none did not.
        executor: evaluates the points that the searcher asks together; the log stays the same.
        submit: does the same in its own way, and is taken instead where it is given.
        race: hand `evaluate` the bits of the best trial so far, too, or None where none runs; a point that is
            worse may then be given up early. Not where the searcher has a tolerance.
        notice: is told what the user should know: a torn line that was dropped, other versions.
        clock: seconds, for the budget.
        before: seconds and forwards that were spent on this search already; they count.

    Raises:
        InfeasibleBits: every point overflowed or fits no signature, or the searcher left the space.
        LogError: the log cannot be written, is damaged, was written by another search, or was removed, renamed or
            changed while it was open.
        StrategyMismatch: the log is of another model, hardware, data or space.
        KeyboardInterrupt: the user interrupted. Every trial that ended is in the log, and `on_best` was called with
            the best of them; the same call goes on from there.
    """
    if log is not None and header is None:
        raise LogError(f"log {log} needs a header; make one with make_header")
    limit = Budget.parse(budget)
    with contextlib.ExitStack() as stack:
        file: LogFile | None = None
        logged: tuple[Trial, ...] = ()
        model_hash = "-"
        if log is not None and header is not None:
            file = stack.enter_context(LogFile(log))
            logged, model_hash = file.start(header, _now(), resume, notice), header.model_hash
        bar = stack.enter_context(Progress(limit, len(logged), progress))
        scorer = stack.enter_context(TrialCache(evaluate, plan_key, submit or _submit_to(executor, evaluate), race))
        interrupts = stack.enter_context(Interrupts())
        told = (on_best, on_trial)
        run = _Run(
            space, searcher, scorer, file, model_hash, logged, limit, bar, interrupts, *told, allow_overflow, clock
        )
        reason = run.go(*before)
        if file is not None:
            file.check()
    return StudyResult(run.accepted(), tuple(run.trials), reason)


def _submit_to(executor: Executor | None, evaluate: Evaluate) -> Submit | None:
    return None if executor is None else lambda *asked: executor.submit(evaluate, *asked)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


@dataclass(slots=True)
class _Run:
    """The state of one call of `search`."""

    space: Space
    searcher: Searcher
    scorer: TrialCache
    file: LogFile | None
    model_hash: str
    logged: tuple[Trial, ...]
    budget: Budget
    bar: Progress
    interrupts: Interrupts
    on_best: Callable[[Trial], None] | None
    on_trial: OnTrial | None
    allow_overflow: bool
    clock: Callable[[], float]
    started: float = 0.0
    forwards: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    announced: Trial | None = None

    def go(self, seconds: float, forwards: float) -> Stop:
        """The search; `search` says what it raises."""
        self.started, self.forwards = self.clock() - seconds, forwards
        try:
            return self._loop()
        finally:
            # Whatever ended the search, the best so far is where the caller keeps it. Of a part of the log it may be
            # worse than what an earlier session kept there.
            if len(self.trials) >= len(self.logged):
                self._announce()

    def _loop(self) -> Stop:
        if self.logged and isinstance(self.searcher, Recalls):
            self.searcher.recall([trial.bits for trial in self.logged])
        while points := [_plain(bits) for bits in self.searcher.ask()]:
            why = self.searcher.why if isinstance(self.searcher, Explains) else ""
            for bits in points:
                self.space.check(bits)
            # Of all points asked now, so that it does not matter which of them is scored first.
            self.scorer.rival = self._rival()
            self._prefetch(points)
            for bits in points:
                replaying = len(self.trials) < len(self.logged)
                if not replaying:
                    self._announce()
                    spent = self._spent()
                    if spent is not None:
                        return spent
                trial = self._replayed(bits) if replaying else self._measured(bits, why)
                self._take(trial, replaying)
                self.searcher.tell(bits, trial.score)
                self.interrupts.check()
        if len(self.trials) < len(self.logged):
            raise self._stranger(f"it holds {len(self.logged)} trials, this search asks {len(self.trials)}")
        return "finished"

    def _rival(self) -> Bits | None:
        strict = not self.searcher.options.get("tolerance", 0.0)
        return self.best.bits if strict and self.best is not None and self.best.score.accepted else None

    def _elapsed(self) -> float:
        earlier = self.logged[-1].elapsed if self.logged else 0.0
        return earlier + self.clock() - self.started

    def _spent(self) -> BudgetKind | None:
        # At least one trial, so that a budget never leaves the caller without an answer.
        if not self.trials:
            return None
        return self.budget.spent(len(self.trials), self._elapsed(), self.forwards)

    def _prefetch(self, points: Sequence[Bits]) -> None:
        ahead = points[max(0, len(self.logged) - len(self.trials)) :]
        if self.budget.trials is not None:
            ahead = ahead[: max(0, self.budget.trials - len(self.trials))]
        self.scorer.prefetch(ahead)

    def _replayed(self, bits: Mapping[str, int]) -> Trial:
        trial = self.logged[len(self.trials)]
        for key in sorted({*bits, *trial.bits}):
            logged, asked = trial.bits.get(key), bits.get(key)
            if logged != asked:
                raise self._stranger(f"trial {trial.index} has {logged} bits at {key!r}, this search asks {asked}")
        same_as = self.scorer.remember(bits, trial)
        if same_as != trial.same_as:
            raise self._stranger(f"trial {trial.index} has same_as {trial.same_as}, this search has {same_as}")
        return trial

    def _stranger(self, what: str) -> LogError:
        path = self.file.path if self.file else "log"
        return LogError(
            f"{path} was written by a different searcher or seed: {what}; give what it was made with, or another log"
        )

    def _measured(self, bits: Mapping[str, int], why: str) -> Trial:
        index, begun = len(self.trials), self.clock()
        score, same_as = self.scorer.score(bits)
        seconds = self.clock() - begun if same_as is None else 0.0
        trial = Trial(index, bits, score, same_as, why, _now(), seconds, self._elapsed())
        trial = _as_logged(trial, self.model_hash)
        if self.file is not None:
            self.file.append(trial, self.model_hash)
        self.scorer.remember(bits, trial)
        return trial

    def _take(self, trial: Trial, replayed: bool) -> None:
        self.trials.append(trial)
        self.forwards += trial.score.forwards if trial.same_as is None else 0.0
        tolerance = float(self.searcher.options.get("tolerance", 0.0))
        # With a tolerance a new highest value can depose the best for another trial than itself.
        rivals = self.trials if tolerance else [t for t in (self.best, trial) if t is not None]
        self.best = best_trial(rivals, tolerance, self.allow_overflow)
        if not replayed:
            self._announce()
        also = () if self.on_trial is None else self.on_trial(trial, self.best, replayed)
        self.bar.show(trial, self.best, self._elapsed(), self.forwards, replayed, also)

    def _announce(self) -> None:
        if self.on_best is not None and self.best is not None and self.best is not self.announced:
            best = self.best
            self.on_best(best)
            self.announced = best  # not before, so that an interrupt in between is made up for

    def accepted(self) -> Trial:
        if self.best is not None:
            return self.best
        if not self.trials:
            raise HagoError(f"searcher {self.searcher.name!r} asked no point")
        raise InfeasibleBits(_why_none(self.trials))


def _plain(bits: Bits) -> dict[str, int]:
    return {key: int(bits[key]) for key in sorted(bits)}


def _as_logged(trial: Trial, model_hash: str) -> Trial:
    """The trial that a reader of the log would see, so that a searcher is told no more than that."""
    record = trial.to_json(model_hash)
    check_schema(record, "trial", f"score of trial {trial.index}")
    return Trial.from_json(parse_json(canonical(record), f"trial {trial.index}"))


def _why_none(trials: Sequence[Trial]) -> str:
    closest = max(trials, key=lambda t: t.score.rank).score
    if closest.infeasible:
        return f"none of the {len(trials)} points tried fits the hardware; e.g. {closest.infeasible}"
    nodes = ", ".join(
        f"{node!r} {count} times" + (f" ({excess} bits too few)" if excess else "")
        for node, count in closest.overflows.items()
        for excess in [closest.excess_bits.get(node, 0)]
    )
    return (
        f"every one of the {len(trials)} points tried overflows on the calibration data; the closest at "
        f"{nodes}. Allow fewer bits on the edges that feed these nodes, keep the nodes float, give the "
        "search more trials, choose hardware with a wider accumulator, or take it as it is with "
        "allow_overflow=True"
    )
