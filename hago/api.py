"""The functions that users call: each reads its arguments and calls the packages below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from hago.analysis import Explanation, GraphStatistic, explain_topology, find_remedies, inspect_plan
from hago.calibration import Estimator, ModesLike, ThresholdsLike
from hago.cost import Cost, CostRange, cost_range, plan_cost
from hago.graph import ExampleInputs, Graph, ModelLike
from hago.hardware import Hardware
from hago.importing import HardwareLike, StrategyLike, as_hardware, as_strategy, import_for_chip, import_for_strategy
from hago.ops import OPS, Ops
from hago.plan import Space, Strategy, Topology, analyze, build_space, expand_policies
from hago.qat import search_and_finetune
from hago.report import (
    POINTS,
    RecordLike,
    Report,
    ReportOptions,
    gather_report,
    python_commands,
    read_records,
    save_page,
)
from hago.runtime import IntegerModel, load_plan
from hago.runtime.native import named_engine
from hago.search import (
    Evaluator,
    GoalOptions,
    LogPath,
    ParetoFront,
    QuantizationOptions,
    Quantizer,
    RaceOptions,
    Replay,
    RunOptions,
    SearchCallback,
    SearchOptions,
    SearchScore,
    Sensitivity,
    correct,
    named_effort,
    passes_of,
    plan_and_batches,
    plan_of,
    prepare,
    quantize_in_one_shot,
    replay_log,
    replay_strategy,
    run_search,
    sensitivity_of,
    sqnr_evaluator,
    warn_of_narrow_biases,
)
from hago.search.objective import ObjectiveLike, named_objective
from hago.study import Score, Searcher, interruptible_job, is_log


def search_quantize_strategy(
    model: ModelLike,
    hardware: HardwareLike,
    dataset: Iterable[Any],
    *,
    searcher: str | Searcher | Any = "auto",
    estimator: str | Estimator | None = None,
    objective: ObjectiveLike = "sqnr",
    budget: str | int | None = None,
    seed: int = 0,
    log: str | PathLike[str] | None = None,
    resume: bool = True,
    progress: bool = True,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
    thresholds: ThresholdsLike | None = None,
    modes: ModesLike | None = None,
    held_out: Iterable[Any] | None = None,
    save: str | PathLike[str] | None = None,
    allow_overflow: bool = False,
    maximize: ObjectiveLike | None = None,
    minimize: str | None = None,
    keep: str | Sequence[str] | None = None,
    budget_cost: str | Sequence[str] | None = None,
    executor: Executor | str | None = None,
    cache_bytes: int | None = None,
    front: str | PathLike[str] | None = None,
    race: bool | float | RaceOptions = False,
    reuse: LogPath | Sequence[LogPath] | None = None,
    search_topology: bool | None = None,
    corrections: str | Sequence[str] | None = None,
    effort: str | None = None,
    finetune: Mapping[str, Any] | None = None,
    callbacks: Sequence[SearchCallback] = (),
) -> tuple[Strategy, SearchScore]:
    """Search for the bits and thresholds that quantize a model best on a piece of hardware.

    Args:
        model: an nn.Module in eval mode, an ExportedProgram, or a Graph.
        hardware: a Hardware, a name in `available_hardware()`, or the path of a hardware file.
        dataset: an iterable of batches: tensors, tuples, (inputs, labels) or dicts.
        searcher: the name of a searcher, which may have options ("greedy:tolerance=0.1"); an object with `ask` and
            `tell`; or a function of (space, start, seed) that makes such an object. The names are:

            - auto: limited if a cost is minimized or limited below the cost of the most bits, else gradient;
            - gradient: refines thresholds in a few gradient passes, then evaluates few points;
            - limited: refines the thresholds of all choices in one pass, then evaluates few points near the limits;
            - sensitivity: is guided by one pass over the data;
            - pareto: is guided as well, with thresholds refined as for limited (docs/design.md);
            - greedy, annealing, random, exhaustive: are not guided;
            - tpe, nsga2 and gp: try a few points of the expected front, then those that Optuna's samplers propose;
            - rfc_greedy: is the greedy search of the HAGO RFC;
            - default: evaluates the start alone.
        estimator: estimates thresholds, e.g. "mse" or "percentile:99.9"; if it is given, no searcher refines them.
            "dorefa" and "dorefa_relative" also put weights on DoReFa-Net's levels, see docs/training.md.
        objective: the measure to maximize: a name in `hago.search.objective.OBJECTIVES`, e.g. "kl", an Objective, or a
            function of (reference outputs, outputs, labels).
        budget: "200 trials", "10m", "50 forwards", a number of trials, or None to stop when the searcher is done.
        seed: the seed of all randomness.
        log: the path of the log, in JSON lines. If the file exists and `resume` is true, the search continues from it.
        progress: whether to show the progress on standard error: one line on a terminal, elsewhere a plain line at most
            every 30 seconds.
        keep_float: shell patterns of nodes that stay float, or of edges whose values do (`fc:0`: the data of
            fc, whose weight may still be quantized), or `policy:<name>` for the nodes that a placement policy keeps
            float (`policy:dorefa`: see docs/quantizers.md).
        fix_bits: bits by shell pattern of edges or nodes; of several that match, the most specific counts.
        thresholds: ranges (low, high) of nodes by name, which their integers should represent, or the path of a
            TPU-MLIR calibration table. They replace those of the estimator. The other nodes are estimated;
            `made_by["estimated"]` of the strategy names them.
        modes: modes of nodes by name, or the path of a TPU-MLIR quantize table: F32, F16 and BF16 keep a node float,
            INT8, INT4 and W4INT8 fix the bits of its operands.
        held_out: further batches, on which the best strategy is reported.
        save: a path that always holds the best strategy so far.
        allow_overflow: whether to return a strategy that overflowed on the data if all did.
        maximize: the same as `objective`.
        minimize: a cost to minimize instead, e.g. "cycles" or "weight_bytes" (also called "size"); the objective breaks
            ties.
        keep: limits on measures, e.g. "agreement >= 99 %" or ["accuracy >= 0.9", "sqnr >= 20 dB"]. A share may be
            limited relative to the float model's on the same data: "accuracy >= float - 0.5 %".
        budget_cost: limits on costs, e.g. "weight_bytes <= 4 MB, cycles <= 2M"; docs/cost.md lists all costs. They may
            be relative to the cost of the widest bits: "size <= 60 %", "latency <= 0.8x".
        executor: where the points that a searcher asks for together are scored: "processes:8", "threads:4",
            "dask://host:port", or any concurrent.futures.Executor. The log is the same on all of them.
        cache_bytes: the bytes of values of earlier trials that each process keeps, so that a trial computes only
            what its changed edges can reach; by default a quarter of the free memory, and never so much that the
            machine would swap.
        front: a path that always holds the Pareto front so far, of the objective and a cost: the first cost that the
            goal names, else weight_bytes.
        reuse: logs of other searches for this model, hardware and data, by any searcher and for any goal. A Plan that
            such a log holds is not evaluated again.
        search_topology: whether nodes that the hardware can run in integers and in float may be either; by
            default, if the goal uses a cost that counts float nodes: bops, cycles, latency or energy.
        corrections: what may be changed in the model before it is quantized, where the outputs are closer to the float
            model's for it: names in `hago.search.correcting.CORRECTIONS`, or "none"; by default those of the
            effort. They keep what the float model computes, and the strategy holds them; see docs/corrections.md.
        effort: how much is done where you say no more; what you give of `searcher`, `corrections` and `budget` counts
            in any case. By default good, or that of the log that is continued:

            - fast: one shot with the corrections of about ten forwards; with a cost that is limited, minimized or has a
              front, a search that looks at 64 samples at most and refines no thresholds;
            - good: the default searcher with the corrections of docs/corrections.md, a few dozen forwards;
            - best: all corrections, reconstruction included, which takes minutes; rounding on more samples and moves
              until these stop to help.
        race: stop evaluating a point once its samples show that it is worse than the best so far. A number is the
            largest probability of stopping a point that is not worse, 0.01 for True; see `hago.search.racing`. The
            best point is always measured on all samples.
        finetune: train the best strategy further: options of `hago.finetune`, and `save_weights`, a path for the
            trained weights, to which the strategy then belongs; see `hago.qat.finetune`.
        callbacks: functions of (search, trial), called in this process after every new trial, in the order of trials: a
            `RunningSearch`, which has the best trial, the front and the strategies so far and can be stopped, and the
            trial. `hago.callbacks` has ready-made ones. The trials, the log and the result do not depend on them.

    Returns:
        The best strategy and its score: the accuracy if the data has labels, else the objective's value, or the SQNR if
        training replaced the strategy. `score.front` is the Pareto front of the search, as `hago.load_front` gives it.

    Raises:
        InfeasibleBits: no point meets the limits; the message says the nearest value that can be reached.
        HagoError: bad input, or no point that the hardware can run; the message says what is wrong and where.
        KeyboardInterrupt: the user interrupted the search. `log`, `save` and `front` hold the results so far, and the
            same call continues from the log. So they do after an exception of a callback, which is raised as it is.
    """
    options = SearchOptions(
        searcher=searcher,
        seed=seed,
        budget=budget,
        race=race,
        held_out=held_out,
        quantization=QuantizationOptions(
            estimator=estimator,
            keep_float=keep_float,
            fix_bits=fix_bits,
            thresholds=thresholds,
            modes=modes,
            search_topology=search_topology,
            corrections=corrections,
            effort=effort,
        ),
        goal=GoalOptions(
            objective=objective,
            maximize=maximize,
            minimize=minimize,
            keep=keep,
            budget_cost=budget_cost,
            allow_overflow=allow_overflow,
        ),
        run=RunOptions(
            log=log,
            resume=resume,
            reuse=reuse,
            save=save,
            front=front,
            progress=progress,
            executor=executor,
            cache_bytes=cache_bytes,
            callbacks=callbacks,
        ),
    )
    if finetune is None:
        outcome = run_search(model, hardware, dataset, options)
    else:
        outcome = search_and_finetune(model, hardware, dataset, options, finetune)
    return outcome.strategy, SearchScore.of(outcome)


def quantize(
    model: ModelLike,
    hardware: HardwareLike,
    dataset: Iterable[Any],
    *,
    estimator: str | Estimator | None = None,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
    thresholds: ThresholdsLike | None = None,
    modes: ModesLike | None = None,
    corrections: str | Sequence[str] | None = None,
    effort: str | None = None,
) -> Quantizer:
    """Quantize a model without a search, to the widest bits whose accumulators do not overflow on the data.

    All arguments are as in `search_quantize_strategy`. An effort stands for corrections here: good, the default, for
    those that take seconds; fast for the cheap ones of them; best for all, which takes minutes. Named `corrections`
    take the place of the effort's.

    Raises:
        InfeasibleBits: accumulators overflow on the data at every width.
        HagoError: other bad input; the message says what is wrong and where.
    """
    options = QuantizationOptions(
        estimator=estimator,
        keep_float=keep_float,
        fix_bits=fix_bits,
        thresholds=thresholds,
        modes=modes,
        corrections=corrections,
        effort=effort,
    )
    chosen = named_effort(effort)
    prepared = prepare(model, hardware, dataset, options)
    evaluator = sqnr_evaluator(prepared)
    corrected = correct(prepared, chosen.corrections_of(corrections), evaluator=evaluator, keeps_bits=True)
    quantizer = quantize_in_one_shot(corrected, evaluator, chosen)
    warn_of_narrow_biases(quantizer.plan)
    return quantizer


def create_quantizer(
    model: ModelLike, hardware: HardwareLike, strategy: StrategyLike, example_inputs: ExampleInputs = ()
) -> Quantizer:
    """Apply a strategy to a model.

    Args:
        example_inputs: arguments with which an nn.Module is exported, or the only one, a tensor or an array; only
            needed if the model takes arguments that are not tensors.

    Raises:
        StrategyMismatch: the strategy was made for another model or hardware.
    """
    chosen = as_strategy(strategy)
    chip = as_hardware(hardware)
    graph = import_for_strategy(model, chosen, example_inputs, chip)
    return Quantizer(plan_of(graph, chip, chosen), chosen)


def load_integer_model(path: str | PathLike[str], ops: Ops = OPS, engine: str = "auto") -> IntegerModel:
    """Load an integer model that `IntegerModel.save` or `hago realize --save` wrote.

    The model that it was made from is not needed. The outputs are equal bit for bit to those of the saved model.

    Args:
        ops: only for a model with operators of your own: `{**OPS, "my_op": RULE}`.
        engine: as in `Quantizer.realize`.

    Raises:
        ModelFileError: the file is unreadable, truncated, edited or not written by hago, or has operators that `ops`
            lacks.
    """
    return named_engine(engine)(*load_plan(path, ops))


def replay(
    model: ModelLike,
    hardware: HardwareLike,
    record: StrategyLike,
    dataset: Iterable[Any],
    *,
    objective: ObjectiveLike | None = None,
    estimator: str | Estimator | None = None,
    best_only: bool = False,
) -> Replay:
    """Evaluate a strategy or a whole log again, and compare every figure bit for bit.

    Args:
        record: a Strategy, or the path of a strategy or a log.
        objective: needed if the search used an objective of your own.
        estimator: needed for a log whose search used an estimator of your own.
        best_only: whether to evaluate only the best trial of a log.

    Raises:
        StrategyMismatch: the record was made for another model, hardware or data; the message names both hashes.
        LogError: the file is damaged or not written by hago, or it names an objective or an estimator of your own that
            is not given.
    """
    if isinstance(record, Strategy) or not is_log(Path(record)):
        return replay_strategy(model, hardware, record, dataset, objective)
    return replay_log(model, hardware, Path(record), dataset, objective, estimator, best_only=best_only)


# ---------------------------------------------------------------- reports
def evaluate_strategy(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    objective: ObjectiveLike = "sqnr",
) -> Score:
    """Measure a strategy on a data set."""
    chosen = as_strategy(strategy)
    plan, batches = plan_and_batches(model, hardware, chosen, dataset)
    return Evaluator(plan.graph, batches, named_objective(objective), plan.ops).score(plan, chosen.bits)


def explain(
    model: ModelLike,
    hardware: HardwareLike,
    example_inputs: ExampleInputs = (),
    *,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
) -> Explanation:
    """Explain which nodes run in integers and which stay float, and why, before any search.

    Args:
        example_inputs: one batch, with which an nn.Module is exported: its arguments, or the only one.
    """
    graph, chip, topology, space = _analyze(model, hardware, example_inputs, keep_float, fix_bits)
    return explain_topology(graph, chip, topology, space)


def _analyze(
    model: ModelLike,
    hardware: HardwareLike,
    example_inputs: ExampleInputs,
    keep_float: str | Sequence[str],
    fix_bits: Mapping[str, int] | None,
) -> tuple[Graph, Hardware, Topology, Space]:
    """Import a model, and build its topology and its space of choices, without data."""
    chip = as_hardware(hardware)
    graph = import_for_chip(model, chip, example_inputs)
    topology = analyze(graph, chip, expand_policies(keep_float, graph, chip, chip.known_ops), chip.known_ops)
    return graph, chip, topology, build_space(graph, chip, topology, fix_bits, chip.known_ops)


def estimate_cost(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    example_inputs: ExampleInputs = (),
    *,
    batch: int = 1,
) -> Cost:
    """Estimate the cost of a strategy on the hardware: bytes, operations, cycles and energy.

    Cycles and energy are counted as far as the hardware file gives figures for them; `.missing` lists the figures that
    it does not give.

    Args:
        example_inputs: see `create_quantizer`.
        batch: the number of samples in one run.

    Raises:
        StrategyMismatch: the strategy was made for another model or hardware.
    """
    return plan_cost(create_quantizer(model, hardware, strategy, example_inputs).plan, batch)


def measure_sensitivity(
    model: ModelLike,
    hardware: HardwareLike,
    dataset: Iterable[Any],
    *,
    objective: ObjectiveLike = "sqnr",
    estimator: str | Estimator | None = None,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
    corrections: str | Sequence[str] | None = None,
    effort: str | None = None,
    seed: int = 0,
) -> Sensitivity:
    """Estimate the loss of every choice of bits on every edge, from one forward and one backward pass over the data.

    The model is equalized before if that helps it, as `quantize` does.

    The searchers sensitivity, limited and pareto are guided by these estimates, and so are the first trials of tpe,
    nsga2 and gp.

    Args:
        objective: the objective whose loss is estimated: accuracy reads labels, kl and agreement compare class
            probabilities, and all others compare the outputs themselves.
        corrections, effort: see `quantize`; of the corrections, those of the graph are made before
            sensitivities are measured.
        seed: of the random signs with which outputs are weighted in the backward pass.

    Returns:
        A table, which prints itself and has `.losses`, `.save(path)` and `.to_json()`.
    """
    options = QuantizationOptions(estimator=estimator, keep_float=keep_float, fix_bits=fix_bits)
    names = named_effort(effort).corrections_of(corrections)
    prepared = correct(prepare(model, hardware, dataset, options), names)
    return sensitivity_of(prepared, named_objective(objective), seed)


def explain_cost(
    model: ModelLike,
    hardware: HardwareLike,
    example_inputs: ExampleInputs = (),
    *,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
) -> CostRange:
    """Estimate the cost of a model with the most bits, with the fewest bits, and in float, before any search."""
    graph, chip, topology, space = _analyze(model, hardware, example_inputs, keep_float, fix_bits)
    return cost_range(graph, chip, topology, space)


def inspect_graph_statistic(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    *,
    remedies: bool = True,
) -> GraphStatistic:
    """Compare the float model, the simulation and the integer model node by node, and name the cause of every error.

    Args:
        remedies: whether changes of the strategy are tried for the nodes with the largest errors, on the first 32
            samples: nodes kept float, other bits, other estimators; and one that rules overflow out.

    Returns:
        A table, which prints itself and has `.to_json()`, `.to_csv()`, `.first_wrong`, `.remedies` and `.passes`, what
        each pass of corrections gained when the strategy was made.
    """
    chosen = as_strategy(strategy)
    plan, batches = plan_and_batches(model, hardware, chosen, dataset)
    statistic = replace(inspect_plan(plan, batches), passes=passes_of(chosen))
    if not remedies:
        return statistic
    found = find_remedies(plan, chosen, batches, statistic.suspects, statistic.overflowing)
    return replace(statistic, remedies=found)


def make_report(
    model: ModelLike,
    hardware: HardwareLike,
    records: RecordLike | Sequence[RecordLike],
    dataset: Iterable[Any] | None = None,
    *,
    held_out: Iterable[Any] | None = None,
    save: str | PathLike[str] | None = None,
    points: int = POINTS,
    remedies: bool = True,
    title: str = "",
    objective: ObjectiveLike | None = None,
    estimator: str | Estimator | None = None,
    progress: bool = True,
) -> Report:
    """Gather all that can be said of a log, of strategies or of a front, and write it as a page for the browser.

    Args:
        records: a log (.jsonl), strategies and a front, as paths or values, and the file of a Sensitivity.
        dataset: the data to measure on, best that of the search; without it, the page has what is known without running
            the network.
        held_out: further data to measure on.
        save: where the page is written; by default it is not. It is one file that needs no network.
        points: the most points that are shown in full: the strategies, and then points of the front.
        remedies: whether changes are tried for the nodes with the largest errors, as `inspect_graph_statistic` does.
        title: of the page; by default the names of the model and the hardware.
        objective, estimator: needed for a log whose search used one of your own.
        progress: whether progress is shown.

    Returns:
        The report; `.to_json()` gives all that the page shows.

    Raises:
        StrategyMismatch: records are for another model or hardware, or for different ones.
        LogError: a record cannot be read, or the page cannot be written.
        HagoError: other bad input; the message says what is wrong and where.
    """
    listed = [records] if isinstance(records, (str, PathLike, Strategy, ParetoFront)) else list(records)
    chip, read = as_hardware(hardware), read_records(listed)
    options = ReportOptions(points, remedies, title, type(model).__name__, objective, estimator)
    commands = python_commands(chip.name, read.log_path)
    with interruptible_job("report", progress) as steps:
        report = gather_report(model, chip, read, dataset, held_out, options, commands, steps)
    if save is not None:
        save_page(report, Path(save))
    return report
