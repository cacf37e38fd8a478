"""From records, a model and data to a Report.

Three kinds of facts come together, as far as what is given allows:

- of every trial of a log: its bits, its costs and its scores;
- of a point that is shown in full, of which there is a strategy: its Plan, that is the bits and scales of every edge,
  the bound of every accumulator, and all costs;
- of the same, where there is data: measures of the float model, the simulation and the integer model, and what an
  inspection says of every node.

Points in full are the strategies that were given, and then points of the front, spread over it, up to
`ReportOptions.points`. A point of a log without a file of the front is made again as `hago.replay` makes it, which
needs the data of its search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Final

import torch
from torch import Tensor

from hago.analysis import GraphStatistic, find_remedies, inspect_plan
from hago.analysis.answer import one_shot_again, one_shot_plan
from hago.analysis.strategy_comparison import measure_difference
from hago.arithmetic.equality import count_differing
from hago.caching import LRU
from hago.calibration import Estimator
from hago.cost import METRICS, Cost, float_cost, plan_cost
from hago.data import Batch, Batches, JobProgress
from hago.errors import HASH_DIGITS, HagoError, LogError, StrategyMismatch, as_strings
from hago.graph import Graph, ModelLike
from hago.hardware import Hardware, hardware_hash
from hago.importing import import_for_strategy
from hago.plan import Plan, Resolver, Strategy
from hago.report.amounts import STORED, cost_figure
from hago.report.document import (
    AskedGoal,
    Command,
    DataSet,
    Drawing,
    Histogram,
    Identity,
    Model,
    Pair,
    PairedFigure,
    Point,
    PointKind,
    Report,
    SearchStory,
    Trials,
    Verdict,
    rounded,
)
from hago.report.goals import asked_goal, limited_measures
from hago.report.layout import draw_network
from hago.report.nodes import Tables, describe_nodes, histograms_of, ram_bytes, widest_edges
from hago.report.records import Records
from hago.report.short import ASKED_BITS, BEFORE, Told, answers, named_trials
from hago.report.trials import (
    bits_text,
    columns_of,
    measure_figure,
    story_of,
    with_stored_bytes,
)
from hago.runtime import IntegerModel
from hago.runtime.native import named_engine
from hago.search import (
    FRONT_COST,
    Evaluator,
    Measurement,
    import_with_held_out,
    is_one_shot,
    logged_scorer,
    make_strategy,
    passes_of,
    stored_resolver,
    thresholds_sha256,
    wilson_interval,
)
from hago.search.objective import OBJECTIVES, Objective, ObjectiveLike, named_objective
from hago.serialization.json_text import canonical
from hago.serialization.summary import number_values
from hago.study import Header, versions

#: The values of all nodes and samples on which the nodes of the point that is shown first are inspected, and those of
#: the other points; and the limits on the number of samples. Outputs are measured on all samples.
INSPECTED_VALUES: Final = 32_000_000
INSPECTED_OF_OTHERS: Final = 8_000_000
MOST_SAMPLES, LEAST_SAMPLES = 64, 2
#: The points that are shown in full unless more are asked for.
POINTS: Final = 5
#: The most trials whose bytes as stored are computed.
STORED_TRIALS: Final = 100
#: The most Resolvers that are kept, each with the network that its strategy corrects.
RESOLVERS: Final = 2
#: What reading a value of another type than hago writes raises.
_MISREAD: Final = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
#: What a strategy says of its making that one shot with the same options shares.
_ONE_SHOT_OPTIONS: Final = (
    *("estimator", "refined", "estimated", "topology", "keep_float", "fix_bits", "data_hash", "corrections"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a point comes from, for the commands that make it again.

    Args:
        path: of the strategy or the front; empty for a value, and for a trial of a log.
        number: of the point in its front.
        trial: index of its trial; None where there is none.
    """

    kind: PointKind
    path: str = ""
    number: int | None = None
    trial: int | None = None


#: The commands that make a point again; of None, those of the whole report.
CommandsOf = Callable[[Source | None], Sequence[Command]]


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What a report holds.

    Args:
        points: the most points that are shown in full.
        remedies: whether changes are tried for the nodes with the largest errors of the point that is shown first.
        title: of the report; by default the names of the model and the hardware.
        model_name: of the model, in words.
        objective, estimator: needed for the log of a search with one of the user's own.
    """

    points: int = POINTS
    remedies: bool = True
    title: str = ""
    model_name: str = "model"
    objective: ObjectiveLike | None = None
    estimator: str | Estimator | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A point that can be shown in full."""

    title: str
    strategy: Strategy
    source: Source


@dataclass(frozen=True, slots=True)
class _OneShot:
    """What points are compared with: the Plan of one shot, and its costs."""

    plan: Plan
    costs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Given:
    """What the points are measured on: the network and the data.

    Args:
        evaluators: by name of the data set; none without data.
    """

    graph: Graph
    hardware: Hardware
    batches: Batches | None
    evaluators: Mapping[str, Evaluator]
    _resolvers: LRU[int, Resolver] = field(default_factory=lambda: LRU(RESOLVERS))

    def resolver(self, strategy: Strategy) -> Resolver:
        """The Resolver of a strategy that lives as long as the report is gathered."""
        return self._resolvers.get_or_make(id(strategy), lambda: stored_resolver(self.graph, self.hardware, strategy))

    def inspected(self, values: int) -> list[Batch]:
        """The first samples of the data, on which nodes are inspected: as many as have so many values in all nodes;
        none without data.

        Args:
            values: of all nodes and samples.
        """
        if self.batches is None:
            return []
        each = sum(math.prod(node.shape or ()) for node in self.graph.computed)
        return list(self.batches.first(min(MOST_SAMPLES, max(LEAST_SAMPLES, values // max(1, each)))))


# ---------------------------------------------------------------- the report
def gather_report(
    model: ModelLike,
    hardware: Hardware,
    records: Records,
    dataset: Iterable[Any] | None,
    held_out: Iterable[Any] | None,
    options: ReportOptions,
    commands: CommandsOf,
    steps: JobProgress,
    one_shot: Plan | str | None = None,
) -> Report:
    """Gather all that a report shows.

    Args:
        dataset: None to leave out what needs data.
        steps: shows the progress.
        one_shot: one shot with the options of the first point, or why there is none, where the caller knows.

    Raises:
        StrategyMismatch: records are for different models or hardware, or for others than these.
        HagoError: the model cannot be imported, or the data does not fit it.
    """
    _check_same_task(records, hardware)
    base = _of_records(records, hardware, options, commands, running=False)
    notes: list[str] = []
    graph, batches, further = _imported(model, hardware, records, dataset, held_out, steps, notes)
    if graph is None:
        return replace(base, notes=tuple(notes))
    data = _data_sets(records, batches, further)
    objective = _objective_for(records, options, data)
    evaluators = {
        name: Evaluator(
            graph,
            each.observed(steps.on_batch),
            objective,
            hardware.known_ops,
            [measure for measure in limited_measures(base.goal) if each.classed or not measure.needs_labels],
            cache_bytes=0,
            engine="float",
        )
        for name, each in data.items()
    }
    given = _Given(graph, hardware, batches, evaluators)
    candidates = _candidates(records, given, base, options, steps, notes)
    candidates = _with_few_bits(candidates, given, options, steps)
    shown = sum(candidate.source.trial is not None for candidate in candidates)
    if base.trials is not None and base.trials.front and shown < len(base.trials.value):
        notes.append(
            f"{len(candidates)} points are shown in full (at most {options.points}, see --points); of the other "
            "trials, bits and costs"
        )
    base = _with_stored(base, records, given, candidates, steps)
    made = _Points(given, base, options, commands, steps, one_shot)
    points = [made.point(candidate, is_first=i == 0) for i, candidate in enumerate(candidates)]
    story = None if base.search is None else _with_measures(base.search, records, given, points, steps)
    pairs = tuple(made.pairs())
    front = 0 if base.trials is None else len(base.trials.value)
    few = points[-1] if points and points[-1].kind == "few bits" else None
    to_few = None if few is None else [p for p in pairs if (p.first, p.second) == (0, len(points) - 1)][-1]
    told = Told(story, base.measure, made.cost, hardware.name, front, base.goal, points[0] if points else None, few)
    points = [replace(point, short=answers(point, told, to_few)) for point in points]
    notes += [*made.notes, *_notes_on_points(records, points, is_measured=bool(evaluators))]
    names = [cost.name for cost in base.costs]
    names += [name for name in (*METRICS, STORED) if name not in names and any(name in p.costs for p in points)]
    names.sort(key=lambda name: name != made.cost)
    return replace(
        base,
        model=Identity(options.model_name, graph.model_hash),
        data=tuple(DataSet(name, each.samples, each.sha256, each.classed) for name, each in data.items()),
        notes=tuple(notes),
        search=story,
        costs=tuple(cost_figure(name) for name in names),
        points=tuple(points),
        shown=0 if points else None,
        pairs=pairs,
        drawings=tuple(made.drawings),
        histograms=tuple(made.tables.histograms),
        channels=tuple(made.tables.channels),
    )


def report_of_log(
    records: Records, hardware: Hardware, options: ReportOptions, commands: CommandsOf, *, running: bool
) -> Report:
    """The report of a log alone.

    Args:
        running: whether its search is running.
    """
    note = "this page is of the log alone, without what needs the network and the data"
    return replace(_of_records(records, hardware, options, commands, running=running), notes=(note,))


def _of_records(
    records: Records, hardware: Hardware, options: ReportOptions, commands: CommandsOf, *, running: bool
) -> Report:
    """What the records say without the network."""
    trials, story = _trials_of(records, options, running=running)
    return Report(
        title=options.title or f"{options.model_name} on {hardware.name}",
        at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model=Identity(options.model_name, next(iter(records.model_hashes.values()), "")),
        hardware=Identity(hardware.name, hardware_hash(hardware)),
        made_with=versions(torch.get_num_threads()),
        commands=tuple(commands(None)),
        measure=measure_figure(_objective_name(records), _own(options)),
        costs=() if trials is None else tuple(cost_figure(name) for name in trials.costs),
        front_cost=trials.front_cost if trials else records.front.cost if records.front else FRONT_COST,
        search=story,
        trials=trials,
        goal=_goal_of(records, options),
        sensitivities=records.sensitivities,
    )


def _notes_on_points(records: Records, points: Sequence[Point], *, is_measured: bool) -> Iterator[str]:
    """What is missing of the points, and what their nodes were inspected on."""
    if not is_measured:
        yield "no data was given, so nothing is measured: errors, histograms and intervals are missing"
    elif points:
        samples = [str(points[0].inside_samples), *(str(point.inside_samples) for point in points[1:2])]
        yield (
            f"nodes are inspected on the first {' or, of points after the first, '.join(samples)} samples of the data; "
            "outputs are measured on all samples"
        )
    if records.sensitivities is None and records.log is not None:
        yield "a log has no sensitivities; give the FILE of 'hago sensitivity --save FILE', too, and nodes show them"


def _goal_of(records: Records, options: ReportOptions) -> AskedGoal | None:
    """What was asked of the search of the log, the first strategy or the front; None where nothing is limited or
    minimized.

    Raises:
        LogError: a value of the record is of another type than hago writes.
    """
    if records.header is not None:
        settings: Any = records.header.settings
    elif records.strategies:
        settings = records.strategies[0][1].made_by.get("goal", {})
    else:
        settings = {} if records.front is None else records.front.made_by.get("goal", {})
    try:
        return asked_goal(settings, _objective_name(records), _own(options))
    except _MISREAD as error:
        raise LogError(f"the goal of the search cannot be read ({error!r}); its record was edited") from None


def _own(options: ReportOptions) -> Objective | None:
    """The objective that the user gave, if any."""
    return None if options.objective is None else named_objective(options.objective)


def _trials_of(records: Records, options: ReportOptions, *, running: bool) -> tuple[Trials | None, SearchStory | None]:
    """The trials of the log, and the course of the search; None without a log, or where it is empty.

    Raises:
        LogError: a value of the log is of another type than hago writes.
    """
    log = records.log
    if log is None or log.header is None or not log.trials:
        return None, None
    passes = [] if not records.strategies else [each.to_json() for each in passes_of(records.strategies[0][1])]
    try:
        given = next((s for _, s in records.strategies if _is_of_search(s, log.header)), None)
        taken, results = (None, None) if given is None else (given.bits, number_values(given.made_by.get("results")))
        columns = columns_of(log.header, log.trials, taken, results, _own(options))
        return columns, story_of(log.header, log.trials, columns, passes, _own(options), running=running)
    except _MISREAD as error:
        raise LogError(f"log {records.log_path} cannot be read ({error!r}); it was edited") from None


def _is_of_search(strategy: Strategy, header: Header) -> bool:
    """Whether a strategy is what the search of a log gave, as far as its record says."""
    made_by, settings = strategy.made_by, header.settings
    same_limits = list(made_by.get("goal", {}).get("limits", ())) == list(settings.get("limits", ()))
    return "searcher" in made_by and made_by.get("data_hash") == header.data_hash and same_limits


def _check_same_task(records: Records, hardware: Hardware) -> None:
    """Refuse records of different models, or of other hardware."""
    hashes = records.model_hashes
    if len(set(hashes.values())) > 1:
        texts = ", ".join(f"{name} for {each[:HASH_DIGITS]}" for name, each in hashes.items())
        raise StrategyMismatch(f"the records are for different models: {texts}; give those of one model")
    own = hardware_hash(hardware)
    for name, wanted in records.hardware.items():
        if wanted.hash != own:
            raise StrategyMismatch(
                f"{name} was made for {wanted.unlike(hardware.name, own)}; use that description, or search again"
            )


def _objective_name(records: Records) -> str:
    """The objective that points are judged by: that of the log, the front or the first strategy."""
    if records.header is not None:
        return str(records.header.objective)
    if records.front is not None:
        by_figure = {o.figure: o.name for o in OBJECTIVES.values()}
        return by_figure.get(records.front.measure, records.front.measure)
    made_by = records.strategies[0][1].made_by if records.strategies else {}
    return str(made_by.get("objective", "sqnr"))


def _objective_for(records: Records, options: ReportOptions, data: Mapping[str, Batches]) -> Objective:
    """The objective that is measured: the one that the user gave, else that of the records, where it is one of hago's
    own and the data has the labels that it needs."""
    if options.objective is not None:
        return named_objective(options.objective)
    found = OBJECTIVES.get(_objective_name(records), OBJECTIVES["sqnr"])
    is_labelled = all(each.classed for each in data.values())
    return found if is_labelled or not found.needs_labels else OBJECTIVES["sqnr"]


def _imported(
    model: ModelLike,
    hardware: Hardware,
    records: Records,
    dataset: Iterable[Any] | None,
    held_out: Iterable[Any] | None,
    steps: JobProgress,
    notes: list[str],
) -> tuple[Graph | None, Batches | None, Batches | None]:
    """The network and the data. Without data, the network of a strategy, which remembers the inputs."""
    hashes = [*dict.fromkeys(records.model_hashes.values())]
    strategies = [strategy for _, strategy in records.strategies]
    strategies += [] if records.front is None else [point.strategy for point in records.front.points[:1]]
    if dataset is not None:
        graph, batches, further = import_with_held_out(model, hardware, dataset, held_out, made_for=hashes, steps=steps)
    elif strategies:
        steps("importing the model")
        graph, batches, further = import_for_strategy(model, strategies[0], (), hardware), None, None
    elif isinstance(model, Graph):
        graph, batches, further = model, None, None
    else:
        notes.append("a log does not say what the inputs of the network are, so without data the network is not shown")
        return None, None, None
    for name, model_hash in records.model_hashes.items():
        if model_hash != graph.model_hash:
            raise StrategyMismatch(
                f"{name} is for the model with hash {model_hash[:HASH_DIGITS]}, this one has "
                f"{graph.model_hash[:HASH_DIGITS]}; load the model and weights that it was made for"
            )
    return graph, batches, further


def _data_sets(records: Records, batches: Batches | None, held_out: Batches | None) -> dict[str, Batches]:
    """The data sets by what they are, in words."""
    if batches is None:
        return {}
    strategies = [strategy for _, strategy in records.strategies]
    strategies += [] if records.front is None else [point.strategy for point in records.front.points[:1]]
    made_with = {str(strategy.made_by.get("data_hash")) for strategy in strategies}
    if records.header is not None:
        made_with.add(records.header.data_hash)
    name = "calibration data" if batches.sha256 in made_with else "data"
    return {name: batches, **({} if held_out is None else {"held-out data": held_out})}


# ---------------------------------------------------------------- which points
def _candidates(
    records: Records,
    given: _Given,
    base: Report,
    options: ReportOptions,
    steps: JobProgress,
    notes: list[str],
) -> list[_Candidate]:
    """The points that are shown in full: strategies that were given, then the trials that the answers name, then points
    of the front."""
    found, trials = [], base.trials
    named = named_trials(base.search)
    for path, strategy in records.strategies:
        trial = _trial_of(strategy, trials)
        name = path.rpartition("/")[2]
        corrected = ", corrected" if strategy.corrections.offsets else ""
        title = name if trial is None else f"trial {trial}{corrected} ({name})"
        found.append(_Candidate(title, strategy, Source("strategy", path, trial=trial)))
    left = max(0, options.points - len(found))
    if records.front is not None:
        points = records.front.points
        order = spread(len(points), left, first=len(points) - 1)
        wanted = [number for number, point in enumerate(points) if point.trial in named]
        for number in _first_of(order, wanted, left):
            point = points[number]
            source = Source("front", records.front_path, number, point.trial)
            found.append(_Candidate(f"trial {point.trial} of the front", point.strategy, source))
    elif trials is not None and left:
        found += _replayed(records, given, trials, named, left, options, steps, notes)
    return found


def _with_few_bits(
    candidates: Sequence[_Candidate], given: _Given, options: ReportOptions, steps: JobProgress
) -> list[_Candidate]:
    """The points, and last one shot with at most ASKED_BITS bits, which tells what fewer bits cost: where the first
    point has more and the hardware takes as few, there is room for it, and one shot can be made again."""
    kept = list(candidates)
    if len(kept) >= options.points and kept[-1].source.kind != "strategy":
        kept.pop()
    if given.batches is None or not kept or len(kept) >= options.points:
        return list(candidates)
    strategy = kept[0].strategy
    groups = given.resolver(strategy).space.groups
    if not any(strategy.bits[key] > ASKED_BITS >= group.choices[-1] for key, group in groups.items()):
        return list(candidates)
    steps(f"quantizing to {ASKED_BITS} bits in one shot")
    made = one_shot_again(given.graph, given.hardware, strategy, given.batches, steps, ASKED_BITS)
    if isinstance(made, str):
        return list(candidates)
    return [*kept, _Candidate(f"one shot at {ASKED_BITS} bits", made.strategy, Source("few bits"))]


def _first_of(order: Sequence[int], wanted: Sequence[int], most: int) -> list[int]:
    """At most so many numbers: the first of an order, those that are wanted, and then the others of the order."""
    return list(dict.fromkeys([*order[:1], *wanted, *order]))[:most]


def spread(count: int, most: int, first: int) -> list[int]:
    """At most so many of the numbers below `count`, evenly spread with both ends; `first` comes first, and is the only
    one where one is wanted."""
    if count == 0 or most <= 0:
        return []
    if most == 1:
        return [first]
    chosen = sorted({round(i * (count - 1) / (most - 1)) for i in range(most)}) if most < count else list(range(count))
    return [first, *(number for number in reversed(chosen) if number != first)][:most]


def _replayed(
    records: Records,
    given: _Given,
    trials: Trials,
    named: Sequence[int],
    most: int,
    options: ReportOptions,
    steps: JobProgress,
    notes: list[str],
) -> list[_Candidate]:
    """Points of a log whose front has no file, made again as a replay makes them."""
    log, batches = records.log, given.batches
    assert log is not None and log.header is not None
    chosen = [trials.front[i] for i in spread(len(trials.front), most, first=len(trials.front) - 1)]
    if trials.best is not None and trials.best not in chosen:
        chosen = [trials.best, *chosen][:most]
    chosen = _first_of(chosen, named, most)
    if batches is None or not chosen:
        notes.append("trials are shown with bits and costs alone: thresholds need the data of the search, or its front")
        return []
    if batches.sha256 != log.header.data_hash:
        notes.append(
            "trials are shown with bits and costs alone: this data is not that of the search; give that as --data, or "
            "the front's file, which has thresholds"
        )
        return []
    steps("estimating and refining the thresholds of the log again")
    own, where = (options.objective, options.estimator), f"log {records.log_path}"
    try:
        scorer = logged_scorer(given.graph, given.hardware, log, batches, *own, where=where)
    except HagoError as error:
        notes.append(f"trials are shown with bits and costs alone: {error}")
        return []
    prepared = scorer.prepared
    made_by = {
        "objective": str(log.header.objective),
        "searcher": dict(log.header.searcher),
        "estimator": prepared.estimator.name,
        "keep_float": list(prepared.keep_float),
        "fix_bits": dict(prepared.fix_bits),
        "data_hash": batches.sha256,
        **({"refined": True} if log.header.settings.get("refined") else {}),
        **({"corrections": list(prepared.correction_names)} if prepared.correction_names else {}),
    }
    kinds: dict[int | None, str] = {**dict.fromkeys(trials.front, " of the front"), trials.best: ", the best"}
    return [
        _Candidate(
            f"trial {index}{kinds.get(index, '')}",
            make_strategy(prepared, prepared.resolver(log.trials[index].bits), log.trials[index].bits, made_by),
            Source("trial", records.log_path, trial=index),
        )
        for index in chosen
    ]


def _trial_of(strategy: Strategy, trials: Trials | None) -> int | None:
    """The trial with the bits of a strategy; None where there is none."""
    if trials is None:
        return None
    if set(trials.groups) != strategy.bits.keys():
        return None
    wanted = bits_text(strategy.bits, trials.groups)
    return next((i for i, bits in enumerate(trials.bits) if bits == wanted), None)


# ---------------------------------------------------------------- what is added to trials
def _with_stored(
    base: Report, records: Records, given: _Given, candidates: Sequence[_Candidate], steps: JobProgress
) -> Report:
    """The report with the bytes that trials take as the chip stores them, which their Plans say.

    Thresholds do not change them, so the Plan of a trial is made with those of any strategy of the same search; a Plan
    whose packed size is not that of the log is of another network, and left out. Of many trials, those that the report
    names, those of the front and the first are taken.
    """
    if base.trials is None or base.search is None or records.log is None:
        return base
    strategies = [c.strategy for c in candidates] + [
        p.strategy for p in (records.front.points if records.front else ())
    ]
    if strategies:
        steps("computing what trials take as the hardware stores them")
    by_groups = {frozenset(strategy.bits): strategy for strategy in reversed(strategies)}
    named = [each.trial for each in base.search.fewer]
    stored: dict[int, float] = {}
    for index in list(dict.fromkeys([*named, *base.trials.front, *range(len(records.log.trials))]))[:STORED_TRIALS]:
        trial = records.log.trials[index]
        groups, packed = frozenset(trial.bits), trial.score.costs.get("weight_bytes")
        if groups not in by_groups or packed is None:
            continue
        try:
            cost = plan_cost(given.resolver(by_groups[groups])(trial.bits))
        except HagoError:
            continue
        if cost["weight_bytes"] == packed:
            stored[index] = cost.stored_bytes
    trials = with_stored_bytes(base.trials, stored)
    fewer = tuple(
        replace(each, costs={name: column[each.trial] for name, column in trials.costs.items()})
        for each in base.search.fewer
    )
    costs = tuple(cost_figure(name) for name in trials.costs)
    return replace(base, trials=trials, search=replace(base.search, fewer=fewer), costs=costs)


def _with_measures(
    story: SearchStory, records: Records, given: _Given, points: Sequence[Point], steps: JobProgress
) -> SearchStory:
    """The course of a search with measures of what fewer bits cost: on held-out data where there is some."""
    if not given.evaluators:
        return story
    name, evaluator = list(given.evaluators.items())[-1]
    strategies = {point.trial: point.strategy for point in (records.front.points if records.front else ())}
    fewer = []
    for each in story.fewer:
        numbers = [i for i, p in enumerate(points) if p.trial == each.trial and p.kind != "strategy"]
        point = numbers[0] if numbers else None
        figures: Mapping[str, Any] = {}
        to_float: PairedFigure | None = None
        is_corrected = False
        if point is not None:
            verdict = points[point].verdicts[-1]
            figures, is_corrected = verdict.model("simulated").figures, not points[point].uncorrected
            to_float = next((d for d in verdict.differences if d.first == "float"), None)
        elif each.trial in strategies:
            steps(f"measuring trial {each.trial} on the {name}")
            strategy = strategies[each.trial]
            plan = given.resolver(strategy)(strategy.bits)
            measured, whole = evaluator.measure(plan).contributions, evaluator.float_contributions()
            figures, is_corrected = _figures(evaluator, measured), bool(strategy.corrections.offsets)
            if "accuracy" in measured:
                objective = _objective(evaluator, "accuracy")
                to_float = _paired(objective, "float", "simulated", whole["accuracy"], measured["accuracy"])
        before = story.uncorrected and not is_corrected
        on = name if figures else ""
        fewer.append(replace(each, point=point, data=on, figures=figures, to_float=to_float, uncorrected=before))
    return replace(story, fewer=tuple(fewer))


# ---------------------------------------------------------------- points in full
class _Points:
    """Makes the points of one report, and keeps what they share. `gather_report` makes it and calls `point` for each.

    Args:
        base: the report without points.
        one_shot: of `gather_report`.

    Attributes:
        cost: the cost of the front.
        search: the course of the search.
        tables: the histograms and channels that the points share.
        drawings: the networks that were drawn, by index.
        notes: why one shot is missing, where it is.
    """

    def __init__(
        self,
        given: _Given,
        base: Report,
        options: ReportOptions,
        commands: CommandsOf,
        steps: JobProgress,
        one_shot: Plan | str | None,
    ) -> None:
        self.given, self.options, self.commands, self.steps = given, options, commands, steps
        self._known_one_shot = one_shot
        self.cost, self.search = base.front_cost, base.search
        self.tables, self.drawings = Tables(), list[Drawing]()
        self._drawn: dict[Any, int] = {}
        self._plans: list[Plan] = []
        self._histograms: dict[str, Mapping[str, Histogram]] = {}
        self.notes: list[str] = []
        self._one_shot_of: tuple[str, _OneShot | None] = ("", None)
        self._contributions: dict[tuple[str, str], Mapping[str, Tensor]] = {}

    def point(self, candidate: _Candidate, *, is_first: bool) -> Point:
        """A point in full.

        Args:
            is_first: whether it is the one that is shown first, for which one shot and remedies are made, too.
        """
        given, strategy = self.given, candidate.strategy
        self.steps(f"describing {candidate.title}")
        resolver = given.resolver(strategy)
        plan = resolver(strategy.bits)
        cost, whole = plan_cost(plan), float_cost(plan)
        one_shot = self._one_shot(strategy, is_first=is_first)
        verdicts, peaks = self._verdicts(candidate, plan, one_shot)
        statistic, histograms, remedies = None, None, None
        if given.batches is not None:
            self.steps(f"comparing float, simulated and integer values of every node of {candidate.title}")
            inspected = given.inspected(INSPECTED_VALUES if is_first else INSPECTED_OF_OTHERS)
            statistic = replace(inspect_plan(plan, inspected), passes=passes_of(strategy))
            histograms = self._histograms_of(plan, strategy)
        if is_first and statistic is not None and self.options.remedies and given.batches is not None:
            self.steps("trying remedies for the nodes with the largest errors")
            found = find_remedies(plan, strategy, given.batches, statistic.suspects, statistic.overflowing)
            remedies = found.to_json()
        full = widest_edges(resolver.space, strategy.bits)
        tried = as_strings(strategy.made_by.get("corrections"), "corrections")
        nodes = describe_nodes(plan, resolver.topology, cost, self.tables, statistic, peaks, histograms, full, tried)
        figures, floats = _costs(cost), _costs(whole)
        is_uncorrected = _is_uncorrected(self.search, candidate)
        return Point(
            title=candidate.title + (BEFORE if is_uncorrected else ""),
            kind=candidate.source.kind,
            trial=candidate.source.trial,
            bits=strategy.bits,
            costs=figures,
            float_costs=floats,
            one_shot_costs={} if one_shot is None else one_shot.costs,
            stored_bytes=cost.stored_bytes,
            ram_bytes=ram_bytes(plan.graph, cost),
            plan_key=plan.key,
            thresholds_sha256=thresholds_sha256(plan),
            drawing=self._drawing_of(plan.graph),
            nodes=nodes,
            verdicts=verdicts,
            inside=_inside(statistic),
            inside_samples=0 if statistic is None else statistic.samples,
            remedies=remedies,
            corrected=str(strategy.corrections),
            uncorrected=is_uncorrected,
            commands=tuple(self.commands(candidate.source)),
        )

    def pairs(self) -> list[Pair]:
        """All pairs of the points so far, on every data set."""
        made = []
        for (i, first), (j, second) in itertools.combinations(enumerate(self._plans), 2):
            for name, evaluator in self.given.evaluators.items():
                ours, theirs = (self._contributions[plan.key, name] for plan in (first, second))
                figures = tuple(
                    _paired(_objective(evaluator, key), str(i), str(j), ours[key], theirs[key]) for key in ours
                )
                made.append(Pair(i, j, name, figures))
        return made

    def _one_shot(self, strategy: Strategy, *, is_first: bool) -> _OneShot | None:
        """One shot with the options of a strategy; None where the strategy is one, or none can be made.

        Args:
            is_first: whether it is of the first point. Of others, one shot is that of the first, or None where their
                options are others.
        """
        given = self.given
        if given.batches is None or is_one_shot(strategy):
            return None
        options = {key: strategy.made_by.get(key) for key in _ONE_SHOT_OPTIONS}
        key = canonical({**options, "corrected": replace(strategy.corrections, offsets={}).to_json()})
        if is_first:
            made = self._known_one_shot
            if made is None:
                self.steps("quantizing in one shot")
                made = one_shot_plan(given.graph, given.hardware, strategy, given.batches, self.steps)
            if isinstance(made, str):
                self.notes.append(made)
            else:
                self._one_shot_of = key, _OneShot(made, _costs(plan_cost(made)))
        own, one_shot = self._one_shot_of
        return one_shot if own == key else None

    def _verdicts(
        self, candidate: _Candidate, plan: Plan, one_shot: _OneShot | None
    ) -> tuple[tuple[Verdict, ...], dict[str, float]]:
        """The models side by side on every data set, and the largest accumulators seen."""
        verdicts, peaks = [], dict[str, float]()
        for name, evaluator in self.given.evaluators.items():
            self.steps(f"running float model, simulation and integer model of {candidate.title} on the {name}")
            once = None if one_shot is None else self._measured_once(name, evaluator, one_shot.plan)
            verdict, measured = _verdict(name, evaluator, plan, once)
            self._contributions[plan.key, name] = measured.contributions
            for node, peak in measured.extremes.peaks.items():
                peaks[node] = max(peak, peaks.get(node, 0.0))
            verdicts.append(verdict)
        self._plans.append(plan)
        return tuple(verdicts), peaks

    def _measured_once(self, name: str, evaluator: Evaluator, plan: Plan) -> Mapping[str, Tensor]:
        """What samples contribute to the measures of a Plan that several points are compared with.

        Args:
            name: of the data set.
        """
        if (plan.key, name) not in self._contributions:
            self._contributions[plan.key, name] = evaluator.measure(plan).contributions
        return self._contributions[plan.key, name]

    def _drawing_of(self, graph: Graph) -> int:
        """The index of the drawing of a network, which is laid out once for all points with the same nodes."""
        key = tuple((node.name, node.op, tuple(node.inputs), tuple(node.shape or ())) for node in graph)
        if key not in self._drawn:
            self._drawn[key] = len(self.drawings)
            self.drawings.append(draw_network(graph))
        return self._drawn[key]

    def _histograms_of(self, plan: Plan, strategy: Strategy) -> Mapping[str, Histogram]:
        """Histograms of the float values, made once for points with the same corrections of the network."""
        key = canonical(replace(strategy.corrections, offsets={}).to_json())
        if key not in self._histograms:
            self.steps("collecting histograms")
            self._histograms[key] = histograms_of(plan.graph, self.given.inspected(INSPECTED_VALUES), plan.ops)
        return self._histograms[key]


def _is_uncorrected(search: SearchStory | None, candidate: _Candidate) -> bool:
    """Whether layers of a point were not corrected as those of the strategy were that the search gave."""
    is_trial = candidate.source.kind in ("front", "trial")
    return is_trial and search is not None and search.uncorrected and not candidate.strategy.corrections.offsets


def _costs(cost: Cost) -> dict[str, float]:
    """All costs of a Plan by name, with the bytes of constants as stored."""
    return {name: rounded(value) or 0.0 for name, value in {**cost.figures, STORED: cost.stored_bytes}.items()}


def _verdict(
    name: str, evaluator: Evaluator, plan: Plan, one_shot: Mapping[str, Tensor] | None
) -> tuple[Verdict, Measurement]:
    """The models side by side on one data set, and what was measured of the simulation.

    Args:
        one_shot: what samples contribute to the measures of one shot.
    """
    beside = _Beside(evaluator, named_engine("auto")(plan))
    measured = evaluator.measure(plan, see=beside)
    contributions: dict[str, Mapping[str, Tensor]] = {"float": evaluator.float_contributions()}
    if one_shot is not None:
        contributions["one shot"] = one_shot
    contributions |= {"simulated": measured.contributions, "integer": beside.contributions}
    judged = [key for key in ("accuracy", "agreement", "sqnr") if key in measured.contributions]
    differences = [
        _paired(_objective(evaluator, key), other, "simulated", contributions[other][key], measured.contributions[key])
        for other in ("float", "one shot")
        for key in judged
        # no model is closer to the float model than itself, so it is compared by what labels say alone
        if other in contributions and (key == "accuracy" or other != "float")
    ]
    models = tuple(Model(each, _figures(evaluator, of_each)) for each, of_each in contributions.items())
    overflows = dict(measured.extremes.overflows)
    return Verdict(name, models, tuple(differences), beside.compared, beside.differing, overflows), measured


class _Beside:
    """The integer model beside the simulation: run on the same batches, and compared batch by batch, so that no outputs
    are kept. `_verdict` makes it, and `Evaluator.measure` calls it with every batch and what was simulated.

    Attributes:
        compared, differing: outputs that were compared so far, and that differ.
    """

    def __init__(self, evaluator: Evaluator, model: IntegerModel) -> None:
        self.compared = self.differing = 0
        self._evaluator, self._model = evaluator, model
        self._parts: list[dict[str, Tensor]] = []

    def __call__(self, batch: Batch, simulated: Sequence[Any]) -> None:
        outputs = self._model.run(batch.inputs)
        for ours, theirs in zip(simulated, outputs, strict=True):
            self.compared += theirs.numel()
            self.differing += count_differing(ours, theirs)
        self._parts.append(self._evaluator.contributions_of(len(self._parts), batch, outputs))

    @property
    def contributions(self) -> dict[str, Tensor]:
        """What samples contribute to the measures of the integer model."""
        return {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}


def _figures(evaluator: Evaluator, contributions: Mapping[str, Tensor]) -> dict[str, Any]:
    """The measures of a model, that of agreement with its interval where every sample agrees or does not."""
    figures = {name: _figure(value) for name, value in evaluator.summary(contributions).items()}
    agreed = contributions.get("agreement")
    if agreed is not None and bool(((agreed == 0) | (agreed == 1)).all()):
        figures["agreement_interval"] = [rounded(end) for end in wilson_interval(float(agreed.sum()), len(agreed))]
    return figures


def _figure(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return rounded(value) if isinstance(value, float) else value


def _objective(evaluator: Evaluator, key: str) -> Objective:
    return evaluator.objective if key == evaluator.objective.name else OBJECTIVES[key]


def _paired(objective: Objective, first: str, second: str, ours: Tensor, theirs: Tensor) -> PairedFigure:
    """The difference of a measure of two models, paired by sample."""
    made = measure_difference(objective, ours, theirs)
    better = {"A": first, "B": second}.get(made.better, "")
    low, high = (rounded(end) for end in made.interval)
    return PairedFigure(objective.figure, first, second, rounded(made.difference), low, high, better)


def _inside(statistic: GraphStatistic | None) -> tuple[int, int]:
    """How many values of nodes the simulator and the integer model were compared on, and how many differ."""
    if statistic is None:
        return 0, 0
    return sum(row.count + row.left_out for row in statistic.rows), statistic.total_differences
