"""A whole search: from a model and a data set to the best strategy and all trials.

`run_search` lists the steps in their order. Those before the first trial import the model, calibrate it, and find the
thresholds and the guide; `Search` then owns the trials, and what becomes of the best of them.
"""

from __future__ import annotations

import html
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from hago.data import Batches, JobProgress
from hago.errors import HagoError, InfeasibleBits, LogError, warn
from hago.graph import ModelLike, takes_any_batch
from hago.hardware import Hardware
from hago.importing import HardwareLike, as_hardware
from hago.plan import Strategy
from hago.search.block_journal import journal_beside
from hago.search.confirmation import Confirmation, losses_of
from hago.search.continuation import (
    check_same_options,
    logged_channel_bins,
    logged_gains,
    logged_softmax_span,
    merges_groups,
    traces_feeds,
    with_later_options,
    with_limits_as_logged,
)
from hago.search.corrected_trials import CorrectedTrial, CorrectedTrials
from hago.search.correcting import (
    TRAINABLE,
    correct,
    logged_corrections,
    logged_passes,
)
from hago.search.description import description, header_of, passes_record
from hago.search.earlier_logs import LogPath, hashes_of, known_scores
from hago.search.effort import Effort, effort_with_costs, logged_effort, named_effort
from hago.search.evaluate import Evaluator, held_out_figures
from hago.search.expected_gains import corrects_within_limits, start_within_limits
from hago.search.goal import Goal, GoalOptions, make_goal
from hago.search.narrow_biases import warn_of_narrow_biases
from hago.search.output_thresholds import chooses_thresholds
from hago.search.pareto_front import FrontWriter, ParetoFront, front_point
from hago.search.preparation import (
    Prepared,
    QuantizationOptions,
    import_with_held_out,
    prepare,
    with_search_topology,
)
from hago.search.racing import RaceOptions, as_race
from hago.search.reachability import (
    FRONT_SEARCHERS,
    check_costs_reachable,
    check_measures_reachable,
    explain_missed_limits,
    warn_of_unlimited_loss,
)
from hago.search.redundancy import prune_redundant_choices
from hago.search.relative_limits import resolve_limits
from hago.search.running import RunningSearch, SearchCallback, check_callbacks
from hago.search.scoring import GoalScorer
from hago.search.searcher_choice import (
    build_searcher,
    choose_searcher,
    costs_in_use,
    find_starting_point,
)
from hago.search.stored_strategy import make_strategy, plan_and_batches
from hago.search.workers import check_executor, open_executor, remote_scoring
from hago.searchers import (
    AUTO,
    check_racing,
    check_seed,
    parse_searcher,
    searcher_text,
)
from hago.serialization.json_text import check_distinct
from hago.serialization.summary import Summarized, Summary, measure_name, measure_text, names_text, number_values
from hago.serialization.text_table import counted
from hago.study import (
    Budget,
    Header,
    Score,
    Searcher,
    StudyResult,
    Trial,
    TrialFront,
    interruptible_job,
    read_header,
    run_study,
)


# ---------------------------------------------------------------- options
@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where a search runs, and the files that it reads and writes. `hago.search_quantize_strategy` explains each."""

    log: str | PathLike[str] | None = None
    resume: bool = True
    reuse: LogPath | Sequence[LogPath] | None = None
    save: str | PathLike[str] | None = None
    front: str | PathLike[str] | None = None
    progress: bool = True
    executor: Executor | str | None = None
    cache_bytes: int | None = None
    callbacks: Sequence[SearchCallback] = ()


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of a search. `hago.search_quantize_strategy` explains each.

    Args:
        searcher, seed, budget, race: which points are tried, and how many.
        held_out: further batches that the best strategy is reported on.
        quantization: which values are quantized, and how their thresholds are found.
        goal: what is optimized, and within which limits.
        run: where it runs, and the files that it reads and writes.
    """

    searcher: str | Searcher | Any = AUTO
    seed: int = 0
    budget: str | int | None = None
    race: bool | float | RaceOptions = False
    held_out: Iterable[Any] | None = None
    quantization: QuantizationOptions = field(default_factory=QuantizationOptions)
    goal: GoalOptions = field(default_factory=GoalOptions)
    run: RunOptions = field(default_factory=RunOptions)

    @staticmethod
    def of(searcher: str | Searcher | Any = AUTO, **keywords: Any) -> SearchOptions:
        """The options that these keyword arguments of `hago.search_quantize_strategy` stand for."""
        return SearchOptions(searcher).changed(**keywords)

    def changed(self, **keywords: Any) -> SearchOptions:
        """The same options with these keyword arguments of `hago.search_quantize_strategy` in place of their own.

        Raises:
            TypeError: no option has this name.
        """
        groups: dict[str, Any] = {"quantization": self.quantization, "goal": self.goal, "run": self.run}
        changed: dict[str, Any] = {}
        for name, group in groups.items():
            named = {f.name: keywords.pop(f.name) for f in fields(group) if f.name in keywords}
            changed[name] = replace(group, **named)
        return replace(self, **changed, **keywords)


def for_training(options: SearchOptions, hardware: HardwareLike) -> SearchOptions:
    """The options of a search whose strategy is trained: without the corrections of its effort that trained weights
    cannot hold, unless the user named corrections, or a log says which were made. Where clamps can have limits for each
    channel, equalization is one of these."""
    log = options.run.log
    begun = log is not None and Path(log).exists() and Path(log).stat().st_size > 0
    if begun or options.quantization.corrections is not None:
        return options
    goal = make_goal(options.goal)
    names = _effort_of(options, goal, costs_in_use(options.searcher, goal)).corrections
    held = set(TRAINABLE) - ({"equalization"} if "channel_clamp" in as_hardware(hardware).ops else set())
    return options.changed(corrections=tuple(name for name in names if name in held))


# ---------------------------------------------------------------- results
@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """The trial with the best score of a search, where it is not surely better than the start on other samples, so that
    the start is taken.

    Args:
        score: its objective in words.
        samples: number of samples kept aside that it was compared on.
    """

    trial: Trial
    score: str
    samples: int

    def __str__(self) -> str:
        return (
            f"trial {self.trial.index} has {self.score}, but is not surely better on {self.samples} samples kept "
            "aside; more calibration samples make this surer"
        )


@dataclass(frozen=True, slots=True, repr=False)
class SearchOutcome(Summarized):
    """The result of a search. `run_search` returns it.

    Args:
        strategy: the best.
        score: its accuracy on the data where that has labels, else the objective's value.
        result: every trial, the best of them, and why the search stopped.
        front: the points that no other beats in both the objective and a cost.
        forwards: the cost of the algorithm in passes of the float model over the data: simulations in this process by
            the steps that ran, and passes for gradients. Calibration is not in it.
        before: seconds before the first trial: import, calibration, gradients, refinement.
        prepared: the calibrated graph with estimated thresholds, as one-shot quantization takes it.
        held_out: the further batches that the best strategy was reported on, if there are any.
        unconfirmed: the trial with a better score than the best one, if there is one.
    """

    strategy: Strategy
    score: float
    result: StudyResult
    front: ParetoFront
    forwards: float
    before: float
    prepared: Prepared
    held_out: Batches | None = None
    unconfirmed: Unconfirmed | None = None

    @property
    def measure(self) -> str:
        """What the score is: "sim_acc" for the accuracy, else the name of the objective, or "sqnr" after training."""
        results = number_values(self.strategy.made_by.get("results"))
        names = ("sim_acc", self.front.measure, *results)
        return next((name for name in names if results.get(name) == self.score), self.front.measure)

    def to_frame(self) -> Any:
        """The trials as a data frame of pandas; see `StudyResult.to_frame`."""
        return self.result.to_frame()

    def plot(self, ax: Any = None) -> Any:
        """Draw the trials on axes of matplotlib; see `StudyResult.plot`. `front.plot` draws the front."""
        return self.result.plot(ax)

    def _picture(self) -> str:
        return self.result._picture()

    def summary(self) -> Summary:
        """The best strategy, and what the search took."""
        trials = self.result.trials
        seconds = f" in {trials[-1].elapsed:.1f} s" if trials else ""
        return Summary(
            f"SearchOutcome for {self.strategy.hardware.name}: {measure_name(self.measure)} "
            f"{measure_text(self.measure, self.score)}, best of "
            f"{counted(len(trials), 'trial')}",
            {
                **self.strategy.summary().facts,
                "search": f"{counted(len(trials), 'trial')} and {self.forwards:.1f} forwards{seconds}; the best is "
                f"trial {self.result.best.index}",
                "front": f"{counted(len(self.front), 'point')} of {self.front.cost} and "
                f"{measure_name(self.front.measure)}",
            },
        )


class SearchScore(float):
    """The score of the best strategy, a number like any other, that also knows the front and the trials of its search.

    Attributes:
        measure: what the number is: "sim_acc" for the accuracy, or the name of the objective.
        front: the Pareto front of the search.
        result: its trials, and why it stopped.
    """

    measure: str
    front: ParetoFront
    result: StudyResult

    def __repr__(self) -> str:
        known = self.__dict__
        if "front" not in known:
            return float.__repr__(self)
        return (
            f"SearchScore({float.__repr__(self)}): {measure_name(self.measure)} {measure_text(self.measure, self)}, "
            f"with a front of {counted(len(self.front), 'point')}"
        )

    def __str__(self) -> str:
        return float.__repr__(self)

    def _repr_html_(self) -> str:
        """The score and the front in a notebook."""
        known = self.__dict__
        return f"<p>{html.escape(repr(self))}</p>" + (known["front"]._repr_html_() if "front" in known else "")

    @staticmethod
    def of(outcome: SearchOutcome) -> SearchScore:
        """The score of a search."""
        result = SearchScore(outcome.score)
        result.front, result.measure, result.result = outcome.front, outcome.measure, outcome.result
        return result


# ---------------------------------------------------------------- the search
def run_search(
    model: ModelLike,
    hardware: HardwareLike,
    dataset: Iterable[Any],
    options: SearchOptions,
    before_trials: Callable[[], None] = lambda: None,
) -> SearchOutcome:
    """Search for the best strategy.

    Before any Plan is simulated, the float model runs for calibration, for the outputs that Plans are compared with
    (`Evaluator`) and, if the searcher is guided, for gradients. The first simulated batch has the estimated thresholds:
    refinement measures them to compare with. Without refinement it is one on which a limit on a measure is checked,
    else one of the first trial. All go through `Evaluator.measure`, which runs a Plan on the simulator or on native
    kernels.

    Args:
        before_trials: called when everything is prepared and checked, just before the log is opened.

    Raises:
        HagoError: as `hago.search_quantize_strategy` does.
    """
    started = time.monotonic()
    chip = as_hardware(hardware)
    options, logged = continued(options, chip)
    goal = make_goal(options.goal)
    costs = costs_in_use(options.searcher, goal)
    effort = _effort_of(options, goal, costs) if logged is None else logged_effort(logged)
    quantization = with_search_topology(options.quantization, costs, chip)
    with interruptible_job("search", options.run.progress) as steps:
        made_for = [*hashes_of(options.run.reuse), *([] if logged is None else [logged.model_hash])]
        graph, batches, held_out = import_with_held_out(
            model,
            chip,
            dataset,
            options.held_out,
            labels=goal.objective.needs_labels,
            made_for=made_for,
            steps=steps,
        )
        if not takes_any_batch(graph, chip.known_ops):
            effort = replace(effort, samples=None)
        prepared = prepare(graph, chip, batches, quantization, steps=steps, samples=effort.samples)
        prepared = replace(prepared, traces_feeds=traces_feeds(logged))
        steps("running the float model")
        scorer = GoalScorer(
            goal,
            prepared,
            cache_bytes=options.run.cache_bytes,
            race=as_race(options.race),
            seed=options.seed,
            known=known_scores(options.run.reuse, prepared, goal),
        )
        calibrated = _corrected(prepared, quantization, scorer.evaluator, effort, logged, steps, keeps_bits=not costs)
        choices = calibrated.space.size
        prepared = prune_redundant_choices(calibrated, costs, logged)
        prepared = replace(prepared, merges_groups=merges_groups(logged))
        goal = resolve_limits(goal, calibrated, scorer.evaluator)
        scorer = scorer.with_prepared(prepared).with_goal(goal)
        searcher, refines = choose_searcher(options.searcher, scorer, options.quantization, effort)
        steps("refining thresholds" if refines else "measuring sensitivities")
        check_costs_reachable(goal, prepared)
        warn_of_unlimited_loss(goal, options.searcher)
        # weights that are rounded with error feedback, at the most bits, gain nothing by refinement
        rounds = not costs and chooses_thresholds(prepared) and "rounding" in prepared.correction_names
        aside = Confirmation.of(scorer.evaluator.batches, logged, takes_one_shot=rounds) if refines else None
        start = find_starting_point(
            searcher,
            refines,
            scorer,
            costs=costs,
            choices=choices,
            seed=options.seed,
            confirmation=aside,
        )
        if logged is not None:  # what was measured then, in the digits of that machine
            start = replace(start, prepared=replace(start.prepared, passes=logged_passes(logged)))
        scorer = scorer.with_prepared(start.prepared)
        if corrects_within_limits(scorer) and (logged is None or "expected_gains" in logged.settings):
            steps("correcting the layers of a point at the limits")
            known = None if logged is None else logged_gains(logged.settings)
            start, gains = start_within_limits(start, scorer, known)
            goal = replace(goal, expected_gains=gains)
        scorer = scorer.with_goal(goal)
        check_measures_reachable(goal, start.prepared, start.most_bits, scorer)
        searcher = build_searcher(searcher, start, options.seed)
    calibrated, scorer = calibrated.unobserved(), scorer.unobserved()
    record = effort.to_json() if logged is None or "effort" in logged.settings else {}
    search = Search(
        options=options,
        held_out=held_out,
        calibrated=calibrated,
        costs=costs,
        scorer=scorer,
        searcher=searcher,
        description=description(scorer, searcher, options.seed, bool(quantization.search_topology), record),
        effort=effort,
        confirmation=aside,
        gradient_forwards=start.gradient_forwards,
        simulations=start.simulations,
        before=time.monotonic() - started,
    )
    before_trials()
    return search.run()


def _effort_of(options: SearchOptions, goal: Goal, costs: Sequence[str]) -> Effort:
    """What an effort stands for in a new search.

    Args:
        goal, costs: what the options stand for, and the costs in use.
    """
    name = options.quantization.effort
    effort = effort_with_costs(name) if costs else named_effort(name)
    if any(not limit.is_cost for limit in goal.limits):  # few samples do not tell whether one on a measure holds
        return replace(effort, samples=None)
    return effort


def _corrected(
    prepared: Prepared,
    quantization: QuantizationOptions,
    evaluator: Evaluator,
    effort: Effort,
    logged: Header | None,
    steps: JobProgress,
    *,
    keeps_bits: bool,
) -> Prepared:
    """The model with the corrections of its graph: those that help, or those of the log that is continued."""
    if logged is None:
        names, found = effort.corrections_of(quantization.corrections), None
    else:
        names, found = logged_corrections(logged)
    steps(f"correcting the model{effort.announced(names, evaluator.forward_seconds, searches=True)}")
    corrected = correct(prepared, names, found, evaluator, keeps_bits=keeps_bits)
    return corrected if logged is None else replace(corrected, passes=logged_passes(logged))


def check_options(options: SearchOptions) -> None:
    """Refuse options that do not go together, before anything is read.

    Raises:
        HagoError: which option, and what is expected.
    """
    make_goal(options.goal)
    check_seed(options.seed)
    named_effort(options.quantization.effort)
    Budget.parse(options.budget)
    check_executor(options.run.executor)
    if options.run.cache_bytes is not None and options.run.cache_bytes < 0:
        raise HagoError(f"cache_bytes {options.run.cache_bytes}; expected a number of bytes, 0 or more")
    check_callbacks(options.run.callbacks)
    check_distinct({"log": options.run.log, "save": options.run.save, "front": options.run.front})
    if as_race(options.race) is not None and isinstance(options.searcher, str):
        check_racing(parse_searcher(options.searcher)[0])


def continued(
    options: SearchOptions, hardware: Hardware, spell: Callable[[str], str] = str
) -> tuple[SearchOptions, Header | None]:
    """The options for going on with a log, and its header; the same options and None where there is no log yet.

    A default search keeps the searcher that its effort stood for when it began, with its options.

    Args:
        spell: how the user writes an option, given the keyword of `hago.search_quantize_strategy`.

    Raises:
        HagoError: of `check_options`.
        LogError: the log was begun with other options, or exists and may not be continued.
        StrategyMismatch: it is of other hardware.
    """
    check_options(options)
    path = None if options.run.log is None else Path(options.run.log)
    logged = None if path is None else read_header(path)
    if logged is None:
        return options, None
    if not options.run.resume:
        raise LogError(f"log {path} exists; resume it, or give another path")
    if options.searcher == AUTO and logged.searcher["name"] in logged_effort(logged).searchers:
        options = replace(options, searcher=searcher_text(logged.searcher["name"], logged.searcher["options"]))
    options = replace(options, searcher=with_later_options(options.searcher, logged))
    check_same_options(options, hardware, logged, str(path), spell)
    quantization = replace(
        options.quantization, channel_bins=logged_channel_bins(logged), softmax_span=logged_softmax_span(logged)
    )
    return replace(options, quantization=quantization, goal=with_limits_as_logged(options.goal, logged)), logged


# ---------------------------------------------------------------- the trials
def _figures(score: Score) -> dict[str, Any]:
    """The entries of `made_by` for a score."""
    return {"results": dict(score.results), "costs": dict(score.costs)}


@dataclass(frozen=True, slots=True)
class Search:
    """A search that is ready for its first trial. `run_search` makes it and calls `run` once.

    Args:
        held_out: the further batches that the best strategy is reported on.
        calibrated: with the estimated thresholds and the whole space.
        costs: the costs in use.
        scorer: scores points with the thresholds of the starting point.
        description: the parts of `made_by` that all strategies of the search share; see `hago.search.description`.
        effort: how much is done.
        confirmation: the samples that confirm the best trial; None where only bits are chosen.
        gradient_forwards, simulations: the cost of the steps before the first trial, in forwards.
        before: seconds that these steps took.
    """

    options: SearchOptions
    held_out: Batches | None
    calibrated: Prepared
    costs: Sequence[str]
    scorer: GoalScorer
    searcher: Searcher
    description: Mapping[str, Any]
    effort: Effort
    confirmation: Confirmation | None
    gradient_forwards: float
    simulations: float
    before: float

    @property
    def prepared(self) -> Prepared:
        return self.scorer.prepared

    def run(self) -> SearchOutcome:
        """Run the trials and confirm the best of them.

        Raises:
            InfeasibleBits: no point keeps the limits.
        """
        if self.scorer.race is not None:
            check_racing(self.searcher.name)
        searched, writer = self.run_trials()
        confirmed, trials = self.confirm_best(searched), searched.trials
        if confirmed.score.shortfall:
            raise InfeasibleBits(explain_missed_limits(self.scorer.goal, trials, confirmed.best, confirmed.score))
        with interruptible_job("search", self.options.run.progress) as steps:
            corrected = CorrectedTrials(self.scorer, self.effort, steps, journal_beside(self.options.run.log))
            best = corrected.best(confirmed.best, trials)
            if best.score.shortfall:
                raise InfeasibleBits(explain_missed_limits(self.scorer.goal.asked, trials, best.trial, best.score))
            self.warn_of_overflows_elsewhere(best, steps)
            warn_of_narrow_biases(best.prepared.resolver(best.trial.bits))
            strategy = self.measure_held_out(self.strategy_of_corrected(best), steps)
            self.correct_front(corrected, writer, trials, best)
        return SearchOutcome(
            strategy,
            self.figure_of(best.score),
            replace(searched, best=best.trial),
            writer.front,
            forwards=self.gradient_forwards + self.scorer.evaluator.reuse.spent.passes,
            before=self.before,
            prepared=self.calibrated,
            held_out=self.held_out,
            unconfirmed=None
            if confirmed.best is searched.best or self.confirmation is None
            else Unconfirmed(searched.best, self.value_text(searched.best), self.confirmation.count),
        )

    def run_trials(self) -> tuple[StudyResult, FrontWriter]:
        """Ask, score and log, trial by trial. After each, the best strategy and the front are on disk, and callbacks
        are called."""
        options, run, resolver, how = self.options, self.options.run, self.prepared.resolver, self.description
        with open_executor(run.executor) as pool:
            writer = FrontWriter(
                self.scorer,
                None if run.front is None else Path(run.front),
                how,
                is_local=pool is None,
                costs=self.costs,
                strategy_of=self.strategy_of,
            )
            before = (self.before, self.gradient_forwards + self.simulations)
            goal = self.scorer.goal
            figure = goal.objective.figure
            choices = {key: tuple(group.choices) for key, group in self.prepared.space.groups.items()}
            running = RunningSearch(
                hardware=self.prepared.hardware.name,
                model_hash=self.prepared.graph.model_hash,
                measure=figure,
                cost=writer.cost,
                choices=choices,
                front_of=lambda: writer.front,
                strategy_of=self.strategy_of,
                forwards=before[1],
            )

            is_lowered = any(goal.expected_gains.values())
            kept: Trial | None = None

            def save_if_kept(trial: Trial, replayed: bool) -> None:
                """Save the best trial that keeps the limits as the user gave them."""
                nonlocal kept
                if goal.keeps_asked(trial.score) and (kept is None or trial.score.rank > kept.score.rank):
                    kept = trial
                    if not replayed:
                        self.save(self.strategy_of(trial))

            def on_trial(trial: Trial, best: Trial | None, replayed: bool) -> Sequence[str]:
                if is_lowered:
                    save_if_kept(trial, replayed)
                texts = writer(trial, best, replayed)
                running.add(trial, best)
                return texts

            def on_new_trial(trial: Trial) -> bool:
                for callback in run.callbacks:
                    callback(running, trial)
                return running.stops

            try:
                result = run_study(
                    self.prepared.space,
                    self.searcher,
                    self.scorer,
                    log=None if run.log is None else Path(run.log),
                    header=header_of(self.prepared, self.searcher, how),
                    budget=options.budget,
                    resume=run.resume,
                    progress=run.progress,
                    value_text=self.value_text,
                    on_best=(lambda trial: None) if is_lowered else (lambda trial: self.save(self.strategy_of(trial))),
                    on_trial=on_trial,
                    on_new_trial=on_new_trial if run.callbacks else None,
                    plan_key=lambda bits: resolver(bits).key,
                    allow_overflow=options.goal.allow_overflow,
                    submit=remote_scoring(self.scorer, pool),
                    race=self.scorer.race is not None,
                    before=before,
                    measure=figure if goal.minimize is None else "",
                )
            except BaseException:
                writer.stop()
                raise
        writer.finish()
        return result, writer

    def confirm_best(self, result: StudyResult) -> StudyResult:
        """Replace the best trial by the first, the start, unless it is surely better on samples that were kept aside.
        Where costs are limited or minimized the start is not an answer, so the best trial stands."""
        confirmation, first = self.confirmation, result.trials[0]
        if confirmation is None or self.costs or result.best.bits == first.bits or not first.score.accepted:
            return result
        objective, measure = self.scorer.goal.objective, self.scorer.evaluator.measure
        measured = [measure(self.prepared.resolver(trial.bits)) for trial in (first, result.best)]
        before, after = ([losses_of(objective, m)] * len(confirmation.folds) for m in measured)
        others = sum(trial.same_as is None for trial in result.trials[1:])
        if confirmation.gain(before, after).is_significant(candidates=max(1, others)):
            return result
        return replace(result, best=first)

    def warn_of_overflows_elsewhere(self, best: CorrectedTrial, steps: JobProgress) -> None:
        """Warn if accumulators of the best trial that are not proved to be free of overflow overflow on samples of the
        data that the search did not look at."""
        looked_at = self.prepared.batches
        if looked_at.whole is looked_at or not best.score.unproved or self.options.goal.allow_overflow:
            return
        steps("looking for overflows on the other samples")
        plan, batches = best.prepared.resolver(best.trial.bits), looked_at.whole.observed(steps.on_batch)
        evaluator = Evaluator(plan.graph, batches, self.scorer.goal.objective, plan.ops, cache_bytes=0)
        if nodes := evaluator.measure(plan).extremes.overflows:
            warn(
                f"accumulators of {names_text([*nodes])} overflow on samples that this search did not look at: it "
                f"looked at {looked_at.samples} of {batches.samples}; search with more effort (effort='good', --effort "
                "good), which looks at all"
            )

    def measure_held_out(self, strategy: Strategy, steps: JobProgress) -> Strategy:
        """Save the best strategy, with its figures on held-out data where there is some."""
        self.save(strategy)
        if self.held_out is None:
            return strategy
        graph, hardware = self.prepared.graph, self.prepared.hardware
        plan, batches = plan_and_batches(graph, hardware, strategy, self.held_out)
        steps("measuring the best on the held-out data")
        held_out = held_out_figures(plan, batches.observed(steps.on_batch), self.scorer.goal.objective)
        strategy = replace(strategy, made_by={**strategy.made_by, "held_out": held_out})
        self.save(strategy)
        return strategy

    def figure_of(self, score: Score) -> float:
        """The accuracy where the data has labels, else the objective's value."""
        figures = score.results
        return float(figures.get("sim_acc", figures.get(self.scorer.goal.objective.name, score.value)))

    def correct_front(
        self, corrected: CorrectedTrials, writer: FrontWriter, trials: Sequence[Trial], best: CorrectedTrial
    ) -> None:
        """Put the best trial as it is corrected into the front, and where the front is what is searched for, other
        trials as they are corrected. The file of the front has each as soon as it is corrected."""
        if not self.prepared.correction_names:
            return
        front = writer.front
        chosen = TrialFront(front.measure, front.cost)
        for trial in trials if self.searcher.name in FRONT_SEARCHERS else ():
            if trial is not best.trial:
                chosen.add(trial)
        for made in itertools.chain([best], corrected.spread(chosen.trials)):
            if made.score.accepted:
                strategy = self.strategy_of_corrected(made)
                front = front.with_point(front_point(front.measure, made.trial.index, strategy, made.score))
                writer.replace(front)

    def strategy_of_corrected(self, made: CorrectedTrial) -> Strategy:
        """The strategy of a trial whose layers are corrected."""
        prepared, bits = made.prepared, made.trial.bits
        how = {**self.description, **passes_record(prepared), **_figures(made.score)}
        return make_strategy(prepared, prepared.resolver(bits), bits, how)

    def value_text(self, trial: Trial) -> str:
        """The objective of a trial, in words."""
        objective = self.scorer.goal.objective
        return objective.text(float(trial.score.results.get(objective.figure, trial.score.value)))

    def strategy_of(self, trial: Trial) -> Strategy:
        """The strategy of a trial, its layers not corrected."""
        plan = self.prepared.resolver(trial.bits)
        return make_strategy(self.prepared, plan, trial.bits, {**self.description, **_figures(trial.score)})

    def save(self, strategy: Strategy) -> None:
        """Write the best strategy to the path that the user gave."""
        if self.options.run.save is not None:
            strategy.save(Path(self.options.run.save))
