"""The search loop: asks a searcher for points, has them scored, logs them, and keeps the best.

`search.session` calls `run_study` once per search. The loop does not simulate: a point is a mapping of bits, the
function `score_point` scores it, and `plan_key` tells which points have equal Plans. The loop does what all searchers
need: it scores equal Plans once (`TrialCache`), writes the log and resumes from it (`LogFile`), keeps to the budget,
shows progress, handles interrupts, and keeps the best trial.

Invariant: a searcher is told exactly what the log holds, so that replaying a log restores the searcher's state. A
searcher whose state depends on more implements `Recalls`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hago.errors import HagoError, InfeasibleBits, LogError
from hago.plan import Bits, Space
from hago.serialization.json_text import canonical, check_schema, parse_json
from hago.serialization.pictures import (
    BLUE,
    ORANGE,
    RED,
    axes_for,
    data_frame,
    matplotlib_module,
    picture,
    plain_text,
    style_axes,
)
from hago.serialization.summary import Summarized, Summary, bits_text, figures_text, measure_axis, number_values
from hago.serialization.text_table import counted
from hago.study.budget import Budget, BudgetKind
from hago.study.interrupts import Interrupts
from hago.study.log import Header, LogFile, Notice, Trial, best_trial, log_notice
from hago.study.progress import Progress, value_in_words
from hago.study.score import Score
from hago.study.searcher import Explains, Recalls, Searcher
from hago.study.trial_cache import ScorePoint, Submit, TrialCache

#: (trial, best trial so far, whether it was read from the log) -> further texts for the line of progress.
OnTrial: TypeAlias = Callable[[Trial, Trial | None, bool], Sequence[str]]
#: new trial -> whether the search ends with it.
OnNewTrial: TypeAlias = Callable[[Trial], bool]
Stop: TypeAlias = Literal["finished", "callback"] | BudgetKind


@dataclass(frozen=True, slots=True, repr=False)
class StudyResult(Summarized):
    """The result of `run_study`.

    Args:
        best: the best trial.
        trials: all trials in order, those of earlier sessions included.
        stopped_because: "finished" if the searcher ended, "callback" if a callback asked for it; otherwise the limit of
            the budget that was reached.
        measure: the name in `Trial.results` of what trials are ranked by; empty where that is no result of theirs, but
            `Score.value` alone.
    """

    best: Trial
    trials: tuple[Trial, ...]
    stopped_because: Stop
    measure: str = ""

    @property
    def bits(self) -> Mapping[str, int]:
        """The bits of the best trial."""
        return self.best.bits

    @property
    def score(self) -> Score:
        """The score of the best trial."""
        return self.best.score

    def summary(self) -> Summary:
        """The number of trials, and the best of them."""
        repeats = sum(t.same_as is not None for t in self.trials)
        ends = {"finished": "the searcher finished", "callback": "a callback stopped it"}
        ended = ends.get(self.stopped_because, f"budget: {self.stopped_because}")
        return Summary(
            f"StudyResult of {counted(len(self.trials), 'trial')} ({repeats} repeats)",
            {
                "best": f"trial {self.best.index}",
                "score": figures_text(self.score.results) or f"{self.score.value:.6g}",
                "bits": bits_text(self.bits.values(), "groups of edges"),
                "stopped": ended,
            },
        )

    def to_frame(self) -> Any:
        """The trials as a data frame of pandas, by index: value, results, costs, overflows, times, reasons and bits.

        Raises:
            HagoError: pandas is not installed.
        """
        return data_frame([_cells(trial) for trial in self.trials], "trial")

    def plot(self, ax: Any = None) -> Any:
        """Draw the value of every trial that has one, and the best so far, on axes of matplotlib.

        Crosses are trials that are not eligible: they overflow, violate a limit, or were dropped in a race.

        Args:
            ax: by default, those of a new figure.

        Returns:
            The axes.

        Raises:
            HagoError: matplotlib is not installed.
        """
        ax = axes_for(ax)
        label, factor = measure_axis(self.measure) if self.measure else ("objective", 1.0)
        shown = [(t.index, factor * self._value_of(t), t.score.accepted) for t in self.trials]
        shown = [each for each in shown if math.isfinite(each[1])]
        for accepted, words, marker, color in ((True, "trial", "o", BLUE), (False, "not eligible", "x", RED)):
            points = [(index, value) for index, value, is_accepted in shown if is_accepted is accepted]
            if points:
                ax.scatter(*zip(*points, strict=True), s=18.0, marker=marker, color=color, linewidths=1.0, label=words)
        best = [(t.index, factor * self._value_of(t)) for t in _improvements(self.trials)]
        if best:
            indexes, values = zip(*best, (self.trials[-1].index, best[-1][1]), strict=True)
            ax.step(indexes, values, where="post", color=ORANGE, linewidth=1.5, zorder=0, label="best so far")
        if math.isfinite(self.best.score.value):
            place = ([self.best.index], [factor * self._value_of(self.best)])
            ax.scatter(*place, s=80.0, facecolors="none", edgecolors=ORANGE, linewidths=1.5, label="best")
        ax.set_xlabel("trial")
        ax.set_ylabel(plain_text(label))
        ax.set_title(f"{counted(len(self.trials), 'trial')}, the best is {self.best.index}", fontsize="medium")
        ax.xaxis.set_major_locator(matplotlib_module("ticker").MaxNLocator(integer=True))
        ax.legend(loc="best", fontsize="small", frameon=False)
        style_axes(ax)
        return ax

    def _value_of(self, trial: Trial) -> float:
        return float(trial.results.get(self.measure, trial.score.value))

    def _picture(self) -> str:
        return picture(self.plot, "the trials") if len(self.trials) > 1 else ""


def _cells(trial: Trial) -> dict[str, Any]:
    """The row of a trial in a data frame."""
    score = trial.score
    cells: dict[str, Any] = {"trial": trial.index, "value": score.value, "accepted": score.accepted}
    cells |= {name: figure for name, figure in number_values(score.results).items() if name not in cells}
    cells |= {name: cost for name, cost in score.costs.items() if name not in cells}
    cells |= {"overflows": sum(score.overflows.values()), "shortfall": score.shortfall, "infeasible": score.infeasible}
    cells |= {"same_as": trial.same_as, "why": trial.why, "at": trial.at}
    cells |= {"seconds": trial.seconds, "elapsed": trial.elapsed, "total_bits": score.total_bits}
    return cells | {f"bits {group}": bits for group, bits in trial.bits.items()}


def _improvements(trials: Sequence[Trial]) -> Iterator[Trial]:
    """The accepted trials that rank above all before them. The best trial may be another: one within the tolerance of a
    searcher, one that overflows where every trial does, or the first, where no other is surely better."""
    best: Trial | None = None
    for trial in trials:
        if trial.score.accepted and (best is None or trial.score.rank > best.score.rank):
            best = trial
            yield trial


def run_study(
    space: Space,
    searcher: Searcher,
    score_point: ScorePoint,
    *,
    log: str | Path | None = None,
    header: Header | None = None,
    budget: Budget | str | int | None = None,
    resume: bool = True,
    progress: bool = False,
    value_text: Callable[[Trial], str] = value_in_words,
    on_best: Callable[[Trial], None] | None = None,
    on_trial: OnTrial | None = None,
    on_new_trial: OnNewTrial | None = None,
    plan_key: Callable[[Bits], str] | None = None,
    allow_overflow: bool = False,
    submit: Submit | None = None,
    race: bool = False,
    notice: Notice = log_notice,
    clock: Callable[[], float] = time.monotonic,
    before: tuple[float, float] = (0.0, 0.0),
    measure: str = "",
) -> StudyResult:
    """Search until the searcher ends or the budget is spent.

    Args:
        searcher: a new searcher; it serves this search only.
        score_point: scores a point; may raise InfeasibleBits where no signature holds its bits.
        log: path of the log; an existing log is continued.
        header: header of the log; required with `log`.
        budget: see Budget.parse. At least one trial is made.
        resume: whether an existing log may be continued.
        progress: whether to show progress: a line on a terminal, or a plain line now and then.
        value_text: the value of the best trial in words, for the progress; by default the number.
        on_best: called with the best trial after each improvement, and once after a resume.
        on_trial: called with every trial, the best so far, and whether the trial was read from the log; the texts that
            it returns are shown in the line of progress.
        on_new_trial: called with every trial that is not read from the log, when it is logged and the searcher was
            told; returns whether the search ends.
        plan_key: a cheap key of a point's Plan. Equal Plans are scored once; without it, equal bits are.
        allow_overflow: if every point overflows on the calibration data, return the best of them instead of raising.
        submit: starts the scoring of the points that the searcher asks together, e.g. on an executor; the log stays the
            same. None to score one after the other in this process.
        race: also pass `score_point` the bits of the best trial so far, or None where no trial is accepted; a point
            that is worse may then be dropped before all samples are measured. Ignored where the searcher has a
            tolerance.
        notice: called with messages for the user: a torn line that was dropped, a log of other versions.
        clock: seconds, for the budget.
        before: seconds and forward passes that this search has spent already; they count towards the budget.
        measure: of the result, see `StudyResult`; the search does not depend on it.

    Raises:
        HagoError: the budget cannot be parsed, or the searcher asked no point.
        InfeasibleBits: every point overflowed or fits no signature, or the searcher asked a point outside of the space.
        LogError: the log cannot be written, is damaged, was written by another search, or was removed, renamed or
            changed while it was open.
        StrategyMismatch: the log is of another model, hardware, data or space.
        KeyboardInterrupt: the user interrupted. Every trial that ended is in the log, and `on_best` was called with
            the best of them; the same call continues from there.
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
        bar = stack.enter_context(Progress(limit, progress, value_text))
        cache = stack.enter_context(TrialCache(score_point, plan_key, submit, race))
        run = _Run(
            space=space,
            searcher=searcher,
            cache=cache,
            file=file,
            model_hash=model_hash,
            logged=logged,
            budget=limit,
            bar=bar,
            interrupts=stack.enter_context(Interrupts()),
            on_best=on_best,
            on_trial=on_trial,
            on_new_trial=on_new_trial,
            allow_overflow=allow_overflow,
            clock=clock,
        )
        reason = run.go(*before)
        if file is not None:
            file.check()
    return StudyResult(run.best_or_raise(), tuple(run.trials), reason, measure)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


@dataclass(slots=True)
class _Run:
    """The state of one call of `run_study`."""

    space: Space
    searcher: Searcher
    cache: TrialCache
    file: LogFile | None
    model_hash: str
    logged: tuple[Trial, ...]
    budget: Budget
    bar: Progress
    interrupts: Interrupts
    on_best: Callable[[Trial], None] | None
    on_trial: OnTrial | None
    on_new_trial: OnNewTrial | None
    allow_overflow: bool
    clock: Callable[[], float]
    started: float = 0.0
    forwards: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    announced: Trial | None = None

    def go(self, seconds: float, forwards: float) -> Stop:
        """Run the search; raises as `run_study`.

        Args:
            seconds, forwards: spent on this search before this call.
        """
        self.started, self.forwards = self.clock() - seconds, forwards
        try:
            return self._loop()
        finally:
            # However the search ended, `on_best` has been called with the best trial. While the log is still being
            # replayed, that may be worse than the best trial of an earlier session, so `on_best` is not called.
            if len(self.trials) >= len(self.logged):
                self._announce()

    def _loop(self) -> Stop:
        if self.logged and isinstance(self.searcher, Recalls):
            self.searcher.recall([trial.bits for trial in self.logged])
        while points := self._asked():
            why = self.searcher.why if isinstance(self.searcher, Explains) else ""
            for bits in points:
                self.space.check(bits)
            # one rival for all points asked together, so that the order in which they are scored does not matter
            self.cache.rival = self._rival()
            self._prefetch(points)
            for bits in points:
                replaying = len(self.trials) < len(self.logged)
                if not replaying:
                    self._announce()
                    spent = self._spent()
                    if spent is not None:
                        return spent
                trial = self._replay_next(bits) if replaying else self._score_next(bits, why)
                self._add(trial, replaying)
                self.searcher.tell(bits, trial.score)
                self.interrupts.check()
                if not replaying and self._stops_after(trial):
                    return "callback"
        if len(self.trials) < len(self.logged):
            raise self._different_search_error(
                f"it holds {counted(len(self.logged), 'trial')}, this search asks {len(self.trials)}"
            )
        return "finished"

    def _asked(self) -> list[dict[str, int]]:
        """The points that the searcher asks.

        Raises:
            HagoError: what it returned are no points.
        """
        asked: Any = self.searcher.ask()
        if isinstance(asked, (Mapping, str)) or not isinstance(asked, Iterable):
            got = f"a {type(asked).__name__}"
        else:
            points = list(asked)
            others = [point for point in points if not isinstance(point, Mapping)]
            if not others:
                return [_sorted_ints(bits) for bits in points]
            got = f"a {type(others[0]).__name__} among its points"
        raise HagoError(
            f"ask of searcher {self.searcher.name!r} returned {got}; expected a list of points, each of them a dict of "
            "the bits by group, and an empty list to end the search"
        )

    def _stops_after(self, trial: Trial) -> bool:
        """Whether the caller's function, which may print, ends the search after a new trial."""
        if self.on_new_trial is None:
            return False
        with self.bar.cleared():
            return self.on_new_trial(trial)

    def _rival(self) -> Bits | None:
        """The bits of the best accepted trial; None with a tolerance, under which a worse trial may replace it."""
        strict = not self.searcher.options.get("tolerance", 0.0)
        return self.best.bits if strict and self.best is not None and self.best.score.accepted else None

    def _elapsed(self) -> float:
        earlier = self.logged[-1].elapsed if self.logged else 0.0
        return earlier + self.clock() - self.started

    def _spent(self) -> BudgetKind | None:
        # at least one trial, so that there is a result whatever the budget
        if not self.trials:
            return None
        return self.budget.spent(len(self.trials), self._elapsed(), self.forwards)

    def _prefetch(self, points: Sequence[Bits]) -> None:
        """Start the scoring of the points that are not in the log, as many as the budget on trials allows."""
        new = points[max(0, len(self.logged) - len(self.trials)) :]
        if self.budget.trials is not None:
            new = new[: max(0, self.budget.trials - len(self.trials))]
        self.cache.prefetch(new)

    def _replay_next(self, bits: Mapping[str, int]) -> Trial:
        """The next trial of the log, which must be of the point that the searcher asks."""
        trial = self.logged[len(self.trials)]
        for key in sorted({*bits, *trial.bits}):
            logged, asked = trial.bits.get(key), bits.get(key)
            if logged != asked:
                raise self._different_search_error(
                    f"trial {trial.index} has {logged} bits at {key!r}, this search asks {asked}"
                )
        same_as = self.cache.remember(bits, trial)
        if same_as != trial.same_as:
            raise self._different_search_error(
                f"trial {trial.index} has same_as {trial.same_as}, this search has {same_as}"
            )
        return trial

    def _different_search_error(self, difference: str) -> LogError:
        """The error to raise for a log that another searcher or seed wrote."""
        path = self.file.path if self.file else "log"
        return LogError(
            f"{path} was written by a different searcher or seed: {difference}; search with the same "
            "searcher and seed, or give another log"
        )

    def _score_next(self, bits: Mapping[str, int], why: str) -> Trial:
        """Score the next point; its trial is in the log when this returns."""
        index, start = len(self.trials), self.clock()
        self.bar.begin(index, why)
        score, same_as = self.cache.score_once(bits)
        seconds = self.clock() - start if same_as is None else 0.0
        trial = Trial(index, bits, score, same_as=same_as, why=why, at=_now(), seconds=seconds, elapsed=self._elapsed())
        trial = _as_logged(trial, self.model_hash)
        if self.file is not None:
            self.file.append(trial, self.model_hash)
        self.cache.remember(bits, trial)
        return trial

    def _add(self, trial: Trial, replayed: bool) -> None:
        """Add a trial: update the best, call the caller's functions, and show it."""
        self.trials.append(trial)
        self.forwards += trial.score.forwards if trial.same_as is None else 0.0
        tolerance = float(self.searcher.options.get("tolerance", 0.0))
        # with a tolerance, a trial of a new highest value may make another trial the best
        candidates = self.trials if tolerance else [t for t in (self.best, trial) if t is not None]
        self.best = best_trial(candidates, tolerance, self.allow_overflow)
        if not replayed:
            self._announce()
        texts = () if self.on_trial is None else self.on_trial(trial, self.best, replayed)
        self.bar.show(trial, self.best, self._elapsed(), self.forwards, replayed, texts)

    def _announce(self) -> None:
        """Call `on_best` where the best trial is a new one."""
        if self.on_best is not None and self.best is not None and self.best is not self.announced:
            best = self.best
            self.on_best(best)
            self.announced = best  # only now, so that `on_best` is called again where it was interrupted

    def best_or_raise(self) -> Trial:
        """The best trial.

        Raises:
            HagoError: the searcher asked no point.
            InfeasibleBits: there is none; the message gives the reason for the closest point.
        """
        if self.best is not None:
            return self.best
        if not self.trials:
            raise HagoError(f"searcher {self.searcher.name!r} asked no point")
        raise InfeasibleBits(_explain_no_best(self.trials))


def _sorted_ints(bits: Bits) -> dict[str, int]:
    return {key: int(bits[key]) for key in sorted(bits)}


def _as_logged(trial: Trial, model_hash: str) -> Trial:
    """The trial as it is read from its line of the log, so that the searcher is told the same now and in a replay."""
    record = trial.to_json(model_hash)
    check_schema(record, "trial", f"score of trial {trial.index}")
    return Trial.from_json(parse_json(canonical(record), f"trial {trial.index}"))


def _explain_no_best(trials: Sequence[Trial]) -> str:
    closest = max(trials, key=lambda t: t.score.rank).score
    if closest.infeasible:
        return f"of {counted(len(trials), 'point')} tried, none fits the hardware; e.g. {closest.infeasible}"
    nodes = ", ".join(
        f"{node!r} {count} times" + (f" ({excess} bits too few)" if excess else "")
        for node, count in closest.overflows.items()
        for excess in [closest.excess_bits.get(node, 0)]
    )
    return (
        f"of {counted(len(trials), 'point')} tried, every one overflows on the calibration data; the closest at "
        f"{nodes}. Allow fewer bits on the edges that feed these nodes, keep the nodes float, give the "
        "search more trials, choose hardware with a wider accumulator, or take it as it is with "
        "allow_overflow=True"
    )
