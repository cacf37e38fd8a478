"""The functions that users call. Each hands its arguments to the packages below, and decides nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from hago.analysis.explain import Explanation, explain_topology
from hago.analysis.inspect import GraphStatistic, inspect_plan
from hago.calibration.given_ranges import ModesLike, ThresholdsLike
from hago.calibration.statistics import Estimator
from hago.cost.cost import Cost, plan_cost
from hago.cost.report import CostRange, cost_range
from hago.data.batches import Batches
from hago.graph.frontend import ModelLike
from hago.importing import HardwareLike, StrategyLike, as_hardware, as_strategy, import_for, import_on, input_names
from hago.ops import OPS, Ops
from hago.plan.placement import topology_of
from hago.plan.space import build_space
from hago.plan.strategy import Strategy
from hago.qat.finetune import FinetuneOptions, finetune_after_search, training_files
from hago.runtime.native.executor import named_engine
from hago.runtime.reference import IntegerModel
from hago.runtime.stored import load_plan
from hago.search.description import made_by
from hago.search.evaluate import Evaluator
from hago.search.goal import GoalOptions
from hago.search.objective import ObjectiveLike
from hago.search.objective import objective as named_objective
from hago.search.prepare import QuantizationOptions, make_strategy, plan_and_batches, plan_of, prepare
from hago.search.quantizer import Quantizer
from hago.search.racing import RaceOptions
from hago.search.replay import Replay, replay_log, replay_strategy
from hago.search.safe_bits import first_safe_bits
from hago.search.scoring import LogPath
from hago.search.sensitivity import Sensitivity, sensitivity_of
from hago.search.session import RunOptions, SearchOptions, SearchScore, run_search
from hago.serialization.json_text import check_distinct
from hago.study.searcher import Score, Searcher


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
    finetune: Mapping[str, Any] | None = None,
) -> tuple[Strategy, SearchScore]:
    """Search for the best strategy.

    Args:
        model: an nn.Module in eval mode, an ExportedProgram, or a Graph.
        hardware: a Hardware, a name in hardware_specs, or a path.
        dataset: an iterable of batches: tensors, tuples, (inputs, labels) or dicts.
        searcher: auto (limited where a cost is minimised or limited below that of the most bits, else
            gradient), gradient (thresholds refined by a few gradient passes, then few evaluations), limited
            (thresholds of all choices refined in one pass, then few evaluations where the limits are), greedy,
            annealing, random, exhaustive, default (the start alone), sensitivity (guided by one pass over the
            data) or pareto (guided too, thresholds refined as for limited; docs/design.md),
            each with options where wanted ("greedy:tolerance=0.1"), or an object with `ask` and `tell`; a
            function of (space, start, seed) makes one for this search.
        estimator: of thresholds, e.g. "mse" or "percentile:99.9", which no searcher then refines; "dorefa" and
            "dorefa_relative" also put weights on DoReFa-Net's levels, see docs/training.md.
        objective: what is maximised: sqnr, kl, mse, cosine, agreement, accuracy (with labels), or a
            function of (reference outputs, outputs, labels).
        budget: "200 trials", "10m", "50 forwards", a number of trials, or None for as long as the
            searcher goes.
        seed: of all randomness.
        log: a path for the JSON lines; a log that stands there is continued if `resume`.
        progress: show a bar on a terminal.
        keep_float: shell patterns over nodes that stay float, or edges whose values do (`fc:0`: the data of
            fc, whose weight may still be quantized), or a policy (`policy:dorefa`).
        fix_bits: bits by shell pattern over edges or nodes.
        thresholds: of nodes, instead of the estimator's: the (low, high) that their integers should stand for,
            by name, or the path of a TPU-MLIR calibration table. Nodes without one are estimated;
            `made_by["estimated"]` of the strategy names them.
        modes: of nodes: F32, F16 and BF16 keep one float, INT8, INT4 and W4INT8 fix the bits of what it
            reads; by name, or the path of a TPU-MLIR quantize table.
        held_out: further batches that the best strategy is reported on.
        save: a path that always holds the best strategy so far.
        allow_overflow: return a strategy that overflowed on the data if none did not.
        maximize: the same as `objective`.
        minimize: a cost to make least instead, e.g. "cycles" or "weight_bytes"; ties go to the objective.
        keep: limits on measures, e.g. "agreement >= 99 %" or ["accuracy >= 0.9", "sqnr >= 20 dB"].
        budget_cost: limits on costs, e.g. "weight_bytes <= 4 MB, cycles <= 2M"; docs/cost.md has them all.
        executor: where the points that a searcher asks together are scored: "processes:8", "threads:4",
            "dask://host:port", or any concurrent.futures.Executor. It changes no line of the log.
        cache_bytes: how much of earlier trials each process keeps, so that a trial computes only what its
            changed edges can reach; by default a quarter of the free memory, and never so much that the
            machine would swap.
        front: a path that always holds the points that none beats in both the objective and a cost: the first
            that the goal names, else weight_bytes.
        reuse: logs of other searches for this model, hardware and data, by any searcher and for any goal: an
            equal Plan that stands there is not evaluated again.
        search_topology: whether nodes that the hardware takes in integers and in float may be either; by
            default where a cost is in use that knows what float takes: bops, cycles, latency or energy.
        race: give a point up once its samples say that it is worse than the best so far. A number is the
            probability at most with which one that is not is given up, 0.01 for True; see `hago.search.racing`. The
            best is always measured on all samples.

        finetune: train the best strategy further: options of `hago.finetune`, and `save_weights`, a path for the
            trained weights, which the strategy is then for; see `hago.qat.finetune`.

    Returns:
        The best strategy and its score: accuracy on the data where it has labels, else the
        objective's value (of a trained one: the SQNR). `score.front` is what no other point of the search
        beats in both the objective and the cost of `front`, as a value; see `hago.load_front`.

    Raises:
        InfeasibleBits: no point keeps the limits; the nearest value that can be reached is said.
        HagoError: bad input, or no point that the hardware can run; what and where is said.
        KeyboardInterrupt: the user interrupted, and `log`, `save` and `front` hold all until there; the same call goes
            on from the log.
    """
    if finetune is not None:
        check_distinct({"log": log, "save": save, "front": front, **training_files(finetune)})
        # the data is read once more
        dataset = Batches(dataset, input_names(model))
        held_out = None if held_out is None else Batches(held_out, input_names(model))
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
        ),
    )
    found = run_search(model, hardware, dataset, options)
    if isinstance(dataset, Batches) and finetune is not None:
        best, measure = (found.strategy, found.score), objective if maximize is None else maximize
        training = dict(finetune)
        weights = training.pop("save_weights", None)
        tuned = finetune_after_search(
            model, hardware, dataset, best, FinetuneOptions(**training),
            save_weights=weights, save=save, held_out=held_out, measure=measure,
        )  # fmt: skip
        return tuned.strategy, SearchScore.of(replace(found, score=tuned.score))
    return found.strategy, SearchScore.of(found)


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
) -> Quantizer:
    """Post-training quantization without a search: the widest bits whose accumulators hold what the
    calibration data needs.

    Args:
        thresholds, modes: as in `search_quantize_strategy`.

    Raises:
        InfeasibleBits: accumulators overflow on the data at every width.
        HagoError: other bad input; what and where is said.
    """
    options = QuantizationOptions(
        estimator=estimator, keep_float=keep_float, fix_bits=fix_bits, thresholds=thresholds, modes=modes
    )
    prepared = prepare(model, hardware, dataset, options)
    evaluator = Evaluator(prepared.graph, prepared.batches, named_objective("sqnr"), prepared.hardware.known_ops)
    bits, score = first_safe_bits(evaluator, prepared.resolver, prepared.calibration.peaks)
    plan = prepared.resolver(bits)
    how = made_by(prepared, "sqnr", 0) | {"results": dict(score.results)}
    return Quantizer(plan, make_strategy(prepared, plan, bits, how))


def create_quantizer(
    model: ModelLike, hardware: HardwareLike, strategy: StrategyLike, example_inputs: Sequence[Any] = ()
) -> Quantizer:
    """A strategy applied to a model.

    Args:
        example_inputs: to export an nn.Module with; only needed where it takes arguments that are
            not tensors.

    Raises:
        StrategyMismatch: the strategy was made for another model or hardware.
    """
    chosen = as_strategy(strategy)
    chip = as_hardware(hardware)
    graph = import_for(model, chosen, example_inputs, chip)
    return Quantizer(plan_of(graph, chip, chosen), chosen)


def load_integer_model(path: str | PathLike[str], ops: Ops = OPS, engine: str = "auto") -> IntegerModel:
    """The integer model that `IntegerModel.save` or `hago realize --save` wrote, without the model it
    was made of: its outputs are equal bit for bit.

    Args:
        ops: only for a model with operators of your own: `{**OPS, "my_op": RULE}`.
        engine: as in `Quantizer.quantize`.

    Raises:
        ModelFileError: unreadable, cut, changed, not ours, or of operators that `ops` lacks.
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
    """Evaluate a strategy or a whole log again and compare every figure bit for bit.

    Args:
        record: a Strategy, or the path of a strategy (.json) or a log (.jsonl).
        objective: needed where the search had one of your own.
        estimator: of a log, needed where the search had one of your own.
        best_only: of a log, the best trial alone.

    Raises:
        StrategyMismatch: made for another model, hardware or data; both hashes are named.
        LogError: the file is damaged or not ours, or names an objective or an estimator that is none of hago's own, and
            none is given.
    """
    if isinstance(record, Strategy) or Path(record).suffix != ".jsonl":
        return replay_strategy(model, hardware, record, dataset, objective)
    return replay_log(model, hardware, Path(record), dataset, objective, estimator, best_only=best_only)


# ---------------------------------------------------------------- reports
# What will be integer, what it costs, how good it is, and why.


def evaluate_strategy(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    objective: ObjectiveLike = "sqnr",
) -> Score:
    """How a strategy does on a data set."""
    chosen = as_strategy(strategy)
    plan, batches = plan_and_batches(model, hardware, chosen, dataset)
    return Evaluator(plan.graph, batches, named_objective(objective), plan.ops).score(plan, chosen.bits)


def explain(
    model: ModelLike,
    hardware: HardwareLike,
    example_inputs: Sequence[Any] = (),
    *,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
) -> Explanation:
    """What will be integer, what stays float and why, before any search.

    Args:
        example_inputs: one batch, to export an nn.Module with.
    """
    chip = as_hardware(hardware)
    ops = chip.known_ops
    graph = import_on(chip, model, example_inputs)
    topology = topology_of(graph, chip, keep_float, ops)
    return explain_topology(graph, chip, topology, build_space(graph, chip, topology, fix_bits, ops), ops)


def estimate_cost(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    example_inputs: Sequence[Any] = (),
    *,
    batch: int = 1,
) -> Cost:
    """What a strategy takes on the hardware: bytes, operations, and cycles and energy as far as the
    hardware's description gives figures for them; `.missing` says what it does not give.

    Args:
        example_inputs: see create_quantizer.
        batch: samples in one run.

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
    seed: int = 0,
) -> Sensitivity:
    """The expected loss of every choice of bits on every edge, from one forward and one backward pass
    over the data: what a search of bits is guided by.

    Args:
        objective: what is lost: accuracy reads labels, kl and agreement compare class probabilities,
            everything else the outputs themselves.
        seed: of the random signs.

    Returns:
        A table: print it, or take `.losses`, `.save(path)`, `.to_json()`.
    """
    options = QuantizationOptions(estimator=estimator, keep_float=keep_float, fix_bits=fix_bits)
    prepared = prepare(model, hardware, dataset, options)
    return sensitivity_of(prepared, named_objective(objective), seed)


def explain_cost(
    model: ModelLike,
    hardware: HardwareLike,
    example_inputs: Sequence[Any] = (),
    *,
    keep_float: str | Sequence[str] = (),
    fix_bits: Mapping[str, int] | None = None,
) -> CostRange:
    """What the model takes at its most bits, at its fewest, and in float, before any search."""
    chip = as_hardware(hardware)
    ops = chip.known_ops
    graph = import_on(chip, model, example_inputs)
    topology = topology_of(graph, chip, keep_float, ops)
    return cost_range(graph, chip, topology, build_space(graph, chip, topology, fix_bits, ops), ops)


def inspect_graph_statistic(
    model: ModelLike, hardware: HardwareLike, strategy: StrategyLike, dataset: Iterable[Any]
) -> GraphStatistic:
    """Node by node, float against simulated against integer, and the cause of every error.

    Returns:
        A table: print it, or take `.to_json()`, `.to_csv()`, `.first_wrong`.
    """
    return inspect_plan(*plan_and_batches(model, hardware, strategy, dataset))
