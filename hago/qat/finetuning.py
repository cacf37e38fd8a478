"""Fine-tuning: train a strategy's weights and thresholds further, by default to give the float model's outputs.

`finetune` trains a given strategy. `search_and_finetune` is a search that was given `finetune=`; its last stage,
`finetune_after_search`, trains the best strategy and keeps the result only if it is no worse.

A run that was interrupted and resumed from its checkpoint ends with the same result as one that was not, given the
same model, strategy, data, options, versions and number of threads. A budget in seconds is the exception: how many
steps it allows depends on the machine.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from hago.data import HELD_OUT_DATA, Batches
from hago.errors import HagoError, LogError, did_you_mean
from hago.graph import ModelLike, check_batches
from hago.hardware import hardware_hash
from hago.importing import HardwareLike, StrategyLike, as_hardware, as_strategy, import_with_data
from hago.plan import Plan, Strategy
from hago.qat.losses import Loss, named_loss
from hago.qat.prepare import from_qat, make_trainable
from hago.qat.run import Samples, TrainingRun, TrainingSchedule, TrainingStep
from hago.qat.scheme import TrainingScheme, scheme_settings, training_scheme
from hago.qat.state_dict import check_holds, save_state, trained_state
from hago.runtime import compare_plan_exactly
from hago.search import (
    Evaluator,
    Quantizer,
    SearchOptions,
    SearchOutcome,
    check_callbacks,
    for_training,
    held_out_figures,
    run_search,
)
from hago.search.objective import ObjectiveLike, named_objective
from hago.serialization.json_text import canonical, check_distinct, json_values
from hago.serialization.summary import Summarized, Summary, bits_text, figures_text
from hago.serialization.text_table import counted
from hago.study import Budget

#: Number of steps of a run that has neither `steps` nor a budget.
STEPS: Final = 400
#: A function that measures a quantizer on the data; its results are JSON values.
Measure = Callable[[Quantizer], dict[str, Any]]


class RunningTraining:
    """A training run while it runs, as its callbacks get it. `finetune_with` makes it.

    A callback reads; all that it can change is when the run ends.

    Args:
        run: the run.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._stops = run, False

    @property
    def quantizer(self) -> Quantizer:
        """The model as trained so far; its strategy is for `quantizer.plan.graph`."""
        return from_qat(self._run.model)

    @property
    def strategy(self) -> Strategy:
        """The strategy so far, for the weights as trained so far."""
        return self.quantizer.strategy

    def stop(self) -> None:
        """End the run after this step; it is measured and kept, or not, as any other."""
        self._stops = True

    @property
    def stops(self) -> bool:
        """Whether a callback has called `stop`."""
        return self._stops

    def figures(self, step: TrainingStep) -> dict[str, float]:
        """The figures of a step, by names for charts."""
        return {"training/loss": step.loss, "training/rate": step.rate, "training/seconds": step.seconds}


#: Called with the training run and a step; what it returns is ignored.
TrainingCallback: TypeAlias = Callable[[RunningTraining, TrainingStep], Any]


@dataclass(frozen=True, slots=True)
class FinetuneOptions:
    """Options of a fine-tuning run, shared by `finetune`, `finetune=` of a search, and the command line.

    Args:
        steps: number of optimizer steps; 400 by default, or as many as the budget allows.
        budget: a time, e.g. "5m".
        lr: the largest relative step of weights; with 0 they are not changed.
        range_lr: the largest relative step of thresholds; with 0 they are not changed.
        batch_size: samples of a step.
        objective: "mse" (relative squared error of the outputs), "kl", "labels", or a function of
            (outputs, the float model's outputs, labels).
        scheme: how ranges change and gradients pass; see `hago.prepare_qat`.
        seed: of all randomness.
        log: a file to which a line is appended before the run and another after it.
        checkpoint: a file in which the state of the run is kept.
        every: steps between two writes of the checkpoint.
        resume: continue from the checkpoint if it exists.
        progress: show the progress: a line on a terminal, elsewhere a plain line now and then.
        held_out: further batches, on which the model is measured before and after instead of on the training data.
        callbacks: functions of (training, step), called after every step: a `RunningTraining`, which has the strategy
            so far and can be stopped, and a `TrainingStep`. `hago.callbacks` has ready-made ones. The result does not
            depend on them.

    Raises:
        HagoError: a rate is negative or infinite, a count is not a positive whole number, the budget is not a time, no
            objective or scheme has the name, or a callback cannot be called.
    """

    steps: int | None = None
    budget: str | None = None
    lr: float = 2e-3
    range_lr: float = 2e-3
    batch_size: int = 32
    objective: str | Loss = "mse"
    scheme: str | TrainingScheme = "lsq"
    seed: int = 0
    log: str | PathLike[str] | None = None
    checkpoint: str | PathLike[str] | None = None
    every: int = 50
    resume: bool = True
    progress: bool = True
    held_out: Iterable[Any] | None = None
    callbacks: Sequence[TrainingCallback] = ()

    def __post_init__(self) -> None:
        for name in ("lr", "range_lr"):
            rate = getattr(self, name)
            if not 0 <= rate < math.inf:
                raise HagoError(f"{name} is {rate}; expected a number from 0, e.g. 0.002: a step's relative size")
        for name in ("steps", "batch_size", "every"):
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise HagoError(f"{name} is {count!r}; expected a whole number above 0")
        if self.budget is not None and _seconds(self.budget) is None:
            raise HagoError(
                f"budget {self.budget!r}; expected a time, such as '90s', '5m' or '1h30m', and steps= for a number of "
                "steps"
            )
        named_loss(self.objective)
        training_scheme(self.scheme)
        check_callbacks(self.callbacks)

    @property
    def schedule(self) -> TrainingSchedule:
        """The length of the run and its learning rate."""
        seconds = None if self.budget is None else _seconds(self.budget)
        steps = STEPS if self.steps is None and seconds is None else self.steps
        return TrainingSchedule(steps, math.inf if seconds is None else seconds)


def _seconds(budget: str) -> float | None:
    """The seconds of a budget that is a time; None for any other."""
    try:
        parsed = Budget.parse(budget)
    except HagoError:
        return None
    return parsed.seconds if parsed == Budget(seconds=parsed.seconds) else None


@dataclass(frozen=True, slots=True, repr=False)
class Finetuned(Summarized):
    """The result of a fine-tuning run, returned by `finetune`.

    Args:
        quantizer: the trained model; its strategy is for `quantizer.plan.graph`, the trained float model.
        before, after: measures against the model that training started from: sqnr, agreement and, with
            labels, sim_acc with its interval; on the held-out data if there is any.
        kept: whether training lowered the loss on the samples kept aside; if not, `quantizer` is the one that
            training started from.
        steps, seconds: length of the whole run, over all its sessions.
    """

    quantizer: Quantizer
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    kept: bool
    steps: int
    seconds: float

    def summary(self) -> Summary:
        """The measures before and after training, and the length of the run."""
        kept = "the trained model" if self.kept else "the model that training started from, since it is no worse"
        hardware = self.quantizer.plan.hardware.name
        return Summary(
            f"Finetuned for {hardware}: {counted(self.steps, 'step')} in {self.seconds:.1f} s",
            {
                "before": figures_text(self.before),
                "after": figures_text(self.after),
                "quantizer": kept,
                "bits": bits_text(self.quantizer.strategy.bits.values(), "groups of edges"),
                "weights": self.quantizer.plan.weight_sizes.text(),
            },
        )


def finetune(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    **options: Any,
) -> Finetuned:
    """Train a strategy's weights and thresholds on data, by default to give the float model's outputs.

    Args:
        model: the model that the strategy is for; it is not changed.
        dataset: batches to train on; labels are not needed. A tenth of the samples is kept aside.
        options: the fields of `hago.qat.FinetuneOptions`: steps, budget, lr, range_lr, batch_size, objective,
            scheme, seed, log, checkpoint, every, resume, progress, held_out and callbacks.

    Raises:
        StrategyMismatch: the strategy is for another model or hardware, or the checkpoint of another run.
        HagoError: other bad input; the loss is not finite.
        Exception: what a callback raised; the checkpoint holds the steps so far.
    """
    return finetune_with(model, hardware, strategy, dataset, FinetuneOptions(**options))


def finetune_with(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    options: FinetuneOptions,
    *,
    holder: nn.Module | None = None,
) -> Finetuned:
    """Train as `finetune` does, with options that are already one object.

    Args:
        holder: a module that must be able to hold the trained weights; else it is refused before any step.
    """
    check_distinct({"log": options.log, "checkpoint": options.checkpoint})
    chip, initial = as_hardware(hardware), as_strategy(strategy)
    name, loss = named_loss(options.objective)
    graph, batches = import_with_data(model, dataset, chip, made_for=[initial.model_hash])
    trained = make_trainable(graph, chip, initial, training_scheme(options.scheme))
    if holder is not None:
        check_holds(holder, trained)
    plan = trained.training_plan.plan
    measure = _make_measure(plan, batches, options.held_out)
    run = TrainingRun(
        trained,
        Samples.of(graph, batches, plan.ops),
        loss,
        options.schedule,
        rates=(options.lr, options.range_lr),
        batch_size=options.batch_size,
        seed=options.seed,
        settings=_settings(plan, initial, batches, options, name),
        checkpoint=None if options.checkpoint is None else Path(options.checkpoint),
        every=options.every,
    )
    start = Quantizer(plan, initial)
    before = measure(start)
    log = None if options.log is None else Path(options.log)
    if not (options.resume and run.resume()):
        _append(log, {"what": "before", "results": before, **run.settings})
    running = RunningTraining(run)

    def on_step(step: TrainingStep) -> bool:
        for callback in options.callbacks:
            callback(running, step)
        return running.stops

    run.train(progress=options.progress, on_step=on_step if options.callbacks else None)
    return _conclude(run, start, before, measure, log)


def _conclude(
    run: TrainingRun, start: Quantizer, before: Mapping[str, Any], measure: Measure, log: Path | None
) -> Finetuned:
    """Measure and log a run at its end; its result is the trained quantizer, or `start` if training did not help."""
    trained = from_qat(run.model)
    kept = run.validation_loss(trained.plan) <= run.validation_loss(start.plan)
    quantizer = trained if kept else start
    after = measure(quantizer)
    summary = {"kept": kept, "steps": run.step, "seconds": run.seconds, "before": before, "settings": run.settings}
    strategy = quantizer.strategy
    made_by = {**strategy.made_by, "results": after, "finetuned": json_values(summary, "$.made_by.finetuned")}
    quantizer = replace(quantizer, strategy=replace(strategy, made_by=made_by))
    line = {"what": "after", "results": after, "kept": kept, "steps": run.step, "seconds": run.seconds}
    _append(log, {**line, "trained_model_hash": strategy.model_hash, **run.settings})
    return Finetuned(quantizer, before, after, kept, run.step, run.seconds)


def _make_measure(start: Plan, batches: Batches, held_out: Iterable[Any] | None) -> Measure:
    """A function that compares a quantizer with the float model that training started from."""
    data = batches if held_out is None else Batches(held_out, start.graph.inputs, role=HELD_OUT_DATA)
    check_batches(start.graph, data)
    evaluator = Evaluator(start.graph, data, named_objective("sqnr"), start.ops)

    def measure(quantizer: Quantizer) -> dict[str, Any]:
        return dict(evaluator.score(quantizer.plan, quantizer.strategy.bits).results)

    return measure


def _settings(
    start: Plan, strategy: Strategy, batches: Batches, options: FinetuneOptions, objective_name: str
) -> dict[str, Any]:
    """Everything that determines the run, as JSON values. A checkpoint with other settings is refused."""
    schedule = options.schedule
    settings = {
        "model_hash": start.graph.model_hash,
        "hardware": start.hardware.name,
        "hardware_hash": hardware_hash(start.hardware),
        "strategy_sha256": hashlib.sha256(canonical(strategy.to_json()).encode()).hexdigest(),
        "data_hash": batches.sha256,
        "samples": batches.samples,
        "objective": objective_name,
        "scheme": scheme_settings(training_scheme(options.scheme)),
        "seed": options.seed,
        "steps": schedule.steps,
        "seconds_allowed": None if schedule.seconds == math.inf else schedule.seconds,
        "lr": options.lr,
        "range_lr": options.range_lr,
        "batch_size": options.batch_size,
        "threads": torch.get_num_threads(),
    }
    return dict(json_values(settings, "settings"))


def _append(log: Path | None, record: Mapping[str, Any]) -> None:
    """Append one line to the log and sync the file.

    Raises:
        LogError: it could not be written.
    """
    if log is None:
        return
    at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    line = canonical(json_values({"version": 1, "at": at, **record}, "log line")) + "\n"
    try:
        with open(log, "ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise LogError(f"cannot write log {log}: {error}") from None


# ---------------------------------------------------------------- the last stage of a search
@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a search that ends with training, returned by `finetune_after_search`.

    Args:
        strategy, score: the trained ones if they are no worse, else those that the search found. The score is
            accuracy on the data if it has labels, else the SQNR in dB.
        run: the result of the fine-tuning run.
        better: whether `strategy` is the trained one; it is then for the weights that were written.
    """

    strategy: Strategy
    score: float
    run: Finetuned
    better: bool


def finetune_after_search(
    model: ModelLike,
    hardware: HardwareLike,
    outcome: SearchOutcome,
    options: FinetuneOptions,
    *,
    save_weights: str | PathLike[str] | None,
    save: str | PathLike[str] | None,
    measure: ObjectiveLike,
) -> Tuned:
    """Train the best strategy of a search on its data, and keep the result only if it is no worse.

    `search_and_finetune` and the command line call it once, at the end of a search.

    Args:
        outcome: of the search. The trained strategy is reported on its held-out data, which is not that of the options,
            on which the run itself is measured.
        save_weights: a path to which the trained weights are written, as a state dict of `model`. The returned strategy
            is for them. It must be given.
        save: a path to which the trained strategy is written too, or None.
        measure: the objective of the report.

    Raises:
        HagoError: `save_weights` is missing, or the model is not an nn.Module; the integer model differs from its
            simulation.
    """
    module, weights = _module_and_destination(model, save_weights)
    batches, held_out = outcome.prepared.batches.whole, outcome.held_out
    run = finetune_with(model, hardware, outcome.strategy, batches, options, holder=module)
    metric = "sim_acc" if "sim_acc" in run.after else "sqnr"
    if not run.kept or run.after[metric] < run.before[metric]:
        return Tuned(outcome.strategy, outcome.score, run, better=False)
    plan, strategy = run.quantizer.plan, run.quantizer.strategy
    _check_exact(plan, batches)
    if held_out is not None:
        graph, _ = import_with_data(model, batches, plan.hardware, made_for=[outcome.strategy.model_hash])
        reported = held_out_figures(plan, held_out, named_objective(measure), graph)
        strategy = replace(strategy, made_by={**strategy.made_by, "held_out": reported})
    save_state(trained_state(module, plan.graph, plan.ops), weights)
    if save is not None:
        strategy.save(Path(save))
    return Tuned(strategy, float(run.after[metric]), run, better=True)


def _module_and_destination(model: ModelLike, save_weights: str | PathLike[str] | None) -> tuple[nn.Module, Path]:
    """The module that is trained after a search, and the path of its weights.

    Raises:
        HagoError: there is none.
    """
    if save_weights is None or not isinstance(model, nn.Module):
        raise HagoError(
            "a search with finetune= changes weights: the model must be an nn.Module, and finetune must say where they "
            "go, e.g. finetune={'budget': '5m', 'save_weights': 'tuned.safetensors'}"
        )
    return model, Path(save_weights)


def search_and_finetune(
    model: ModelLike,
    hardware: HardwareLike,
    dataset: Iterable[Any],
    options: SearchOptions,
    finetune: Mapping[str, Any],
) -> SearchOutcome:
    """Search for the best strategy, and train it further.

    Args:
        finetune: options of the training, and `save_weights`; see `hago.search_quantize_strategy`.

    Raises:
        HagoError, TypeError: before the search, if an option of the training is unknown, or wrong; else as `run_search`
            and `finetune_after_search` do.
    """
    run, goal = options.run, options.goal
    files = {f"finetune[{name!r}]": finetune.get(name) for name in ("log", "checkpoint", "save_weights")}
    check_distinct({"log": run.log, "save": run.save, "front": run.front, **files})
    training = dict(finetune)
    weights = training.pop("save_weights", None)
    known = [each.name for each in fields(FinetuneOptions)]
    for name in training.keys() - known:
        text = f"finetune has the unknown option {name!r}; known: {', '.join([*known, 'save_weights'])}."
        raise HagoError(text + did_you_mean(str(name), [*known, "save_weights"]))
    training_options = FinetuneOptions(**training)
    _module_and_destination(model, weights)
    outcome = run_search(model, hardware, dataset, for_training(options, hardware))
    tuned = finetune_after_search(
        model,
        hardware,
        outcome,
        training_options,
        save_weights=weights,
        save=run.save,
        measure=goal.objective if goal.maximize is None else goal.maximize,
    )
    return replace(outcome, strategy=tuned.strategy, score=tuned.score)


def _check_exact(plan: Plan, batches: Batches) -> None:
    """Check that the integer model equals its simulation on the first batch.

    Raises:
        HagoError: a value differs.
    """
    differences = compare_plan_exactly(plan, next(iter(batches)).inputs)
    if not differences.same:
        raise HagoError(f"the trained integer model differs from its simulation: {dict(differences.differences)}")
