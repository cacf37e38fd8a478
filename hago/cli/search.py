"""The commands that make a strategy: `hago search`, with training as an optional last stage, and `hago quantize`."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hago.analysis.answer import Answer, answer_for_one_shot, answer_for_search, one_shot_of_search
from hago.analysis.strategy_report import figures_in_words
from hago.cli.console import OK, Console, Outcome
from hago.cli.finetune import before_and_after
from hago.cli.options import (
    check_command,
    estimator_argument,
    inspect_line,
    load_batches,
    load_chip,
    load_held_out,
    named,
    resumable,
    search_as_quantized,
    search_line,
    searcher_argument,
    stamp,
    strategy_command,
    training_so_far,
    watched,
)
from hago.cli.output_files import (
    FRONT,
    HASH_IN_NAMES,
    REPORT,
    STRATEGY,
    check_output,
    default_stem,
    digest,
    folders_of,
)
from hago.cli.report import live_page, write_page
from hago.cost import METRICS, amount_text
from hago.errors import HagoError, did_you_mean
from hago.graph import ModelLike
from hago.graph.model_source import load_model
from hago.hardware import Hardware
from hago.importing import import_with_data
from hago.plan import Strategy
from hago.qat import FinetuneOptions, Tuned, finetune_after_search
from hago.search import (
    FRONT_SEARCHERS,
    Goal,
    GoalOptions,
    QuantizationOptions,
    RunOptions,
    SearchOptions,
    SearchOutcome,
    continued,
    correct,
    for_training,
    hashes_of,
    import_with_held_out,
    named_effort,
    parse_limits,
    prepare,
    quantize_and_measure,
    resolved_text,
    run_search,
    sqnr_evaluator,
    warn_of_narrow_biases,
)
from hago.search.objective import Objective, named_objective
from hago.serialization.json_text import check_distinct
from hago.serialization.summary import measure_text, names_text
from hago.serialization.text_table import counted, wrapped
from hago.study import Header, Trial, interruptible_job, read_log

#: The options of `--finetune`, with the function that reads each.
OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "steps": int,
    "budget": str,
    "lr": float,
    "range_lr": float,
    "batch_size": int,
    "objective": lambda text: named(text, "objective"),
    "scheme": str,
    "seed": int,
    "every": int,
}


def tuning_options(text: str) -> dict[str, Any]:
    """The options of `hago.finetune` that "NAME=VALUE,..." stands for.

    Raises:
        HagoError: an unknown name, or a value that is not of its kind.
    """
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (p.strip() for p in part.partition("="))
        if name not in OPTIONS or not value:
            near = did_you_mean(name, OPTIONS)
            raise HagoError(f"--finetune got {part!r}; expected NAME=VALUE,... with {', '.join(OPTIONS)}.{near}")
        try:
            options[name] = OPTIONS[name](value)
        except ValueError:
            raise HagoError(f"--finetune got {part!r}; expected a number, e.g. steps=400 or lr=0.002") from None
    return options


def tune(
    args: Namespace, console: Console, model: Any, hardware: Hardware, outcome: SearchOutcome, saved: Path
) -> Tuned:
    """Train the strategy that a search found. A killed run continues from the checkpoint of the same strategy."""
    stem = default_stem(args, hardware, "finetune", outcome.strategy.to_json(), args.finetune)
    checkpoint, log = Path("logs") / f"{stem}.safetensors", Path("logs") / f"{stem}.jsonl"
    console.continued.append(checkpoint)
    console.note(f"{'training on from' if checkpoint.exists() else 'training; checkpoints go to'} {checkpoint}")
    options = FinetuneOptions(log=log, checkpoint=checkpoint, **tuning_options(args.finetune))

    def so_far() -> str:
        return f"{training_so_far(checkpoint)}; the best of the search is {saved}".lstrip("; ")

    with folders_of(checkpoint), resumable(so_far):
        return finetune_after_search(
            model,
            hardware,
            outcome,
            options,
            save_weights=weights_of(saved),
            save=saved,
            measure=named(args.maximize or args.objective, "objective"),
        )


def weights_of(saved: Path) -> Path:
    """The path of a strategy's trained weights."""
    return saved.with_suffix(".safetensors")


def tuned_lines(tuned: Tuned, saved: Path) -> list[str]:
    """The result of training, in words."""
    run = tuned.run
    end = f"for the weights in {weights_of(saved)}" if tuned.better else "no better, so the strategy is unchanged"
    return [
        f"trained {counted(run.steps, 'step')} in {run.seconds:.1f} s: {end}",
        *(f"  {line}" for line in before_and_after(run)),
    ]


def tuned_values(tuned: Tuned, saved: Path) -> dict[str, Any]:
    """The result of training, as JSON values."""
    run = tuned.run
    return {
        "before": dict(run.before),
        "after": dict(run.after),
        "better": tuned.better,
        "steps": run.steps,
        "weights": str(weights_of(saved)) if tuned.better else None,
    }


# ---------------------------------------------------------------- search and quantize
def quantization_arguments(args: Namespace) -> dict[str, Any]:
    """The arguments of `hago.quantize`, which are fields of QuantizationOptions, too."""
    return {
        "estimator": estimator_argument(args.estimator),
        "keep_float": args.keep_float,
        "fix_bits": dict(args.fix_bits),
        "thresholds": args.calibration_table,
        "modes": args.quantize_table,
        "corrections": args.corrections,
        "effort": args.effort,
    }


def search_command(args: Namespace, console: Console) -> Outcome:
    """Search, and report the best strategy, the files written, and the command that checks it."""
    hardware = load_chip(args, args.hardware)
    FinetuneOptions(**tuning_options(args.finetune or ""))  # refuses wrong ones before the search
    files = search_files(args, hardware)
    options, logged = _checked(args, files, hardware)
    model, data = load_model(args.model, args.weights), load_batches(args)
    imported: ModelLike = model
    if args.log is None and logged is not None:
        # a default log is named by the arguments, which are the same for a model that was trained again
        with interruptible_job("search") as steps:
            steps("importing the model to compare it with that of the log")
            made_for = [*hashes_of(args.reuse), logged.model_hash]
            imported, data = import_with_data(model, data, hardware, made_for=made_for)
        if imported.model_hash != logged.model_hash:
            console.note(f"log {files.log} is of other weights or another network, so this model has files of its own")
            files = search_files(args, hardware, imported.model_hash)
            options, _ = _checked(args, files, hardware)
    log, saved = files.log, files.strategy
    console.continued.append(log)
    earlier = len(read_log(log).trials) if log.exists() else 0
    options = replace(options, held_out=load_held_out(args))
    before = stamp(saved)

    def tell_log() -> None:
        console.note(f"{f'continuing after {earlier} trials; ' if earlier else ''}every trial becomes a line of {log}")

    def so_far() -> str:
        trials = len(read_log(log).trials) if log.exists() else 0
        if not trials:
            return "before the first trial"
        best = f"; the best so far is {saved}" if earlier or stamp(saved) != before else ""
        return f"after {counted(trials, 'trial')}, which {'is' if trials == 1 else 'are'} in {log}{best}"

    started = time.monotonic()
    pages = () if args.report is None else (Path(args.report),)
    with folders_of(log, saved, files.front, *pages), resumable(so_far), watched(args) as callbacks:
        with live_page(args, console, hardware, log) as page:
            options = options.changed(callbacks=[*callbacks, *page])
            outcome = run_search(imported, hardware, data, options, before_trials=tell_log)
        seconds = time.monotonic() - started
        with interruptible_job("search") as steps:
            goal = options.goal
            objective = named_objective(goal.objective if goal.maximize is None else goal.maximize)
            one_shot = one_shot_of_search(outcome, steps)
            answer = answer_for_search(outcome, steps, objective, one_shot)
    tuned = None if args.finetune is None else tune(args, console, model, hardware, outcome, saved)
    if args.report is not None:
        with interruptible_job("report") as steps:
            strategies = [] if tuned is not None and tuned.better else [saved]
            records = [log, files.front, *strategies]
            files = replace(files, report=write_page(args, console, outcome, one_shot, records, steps))
    return _outcome(args, outcome, answer, files, tuned, ThisRun(earlier, seconds), objective)


def _checked(args: Namespace, files: SearchFiles, hardware: Hardware) -> tuple[SearchOptions, Header | None]:
    """The options of a search, and the header of the log that it continues; None if it begins one.

    Raises:
        HagoError: the log may not be continued, or not with these options.
    """
    if args.no_resume and files.log.exists() and files.log.stat().st_size:
        raise HagoError(
            f"--no-resume: log {files.log} exists; leave --no-resume out to continue it, or give another --log"
        )
    options = search_options(args, files)
    _, logged = continued(options, hardware, option_of)
    return options, logged


@dataclass(frozen=True, slots=True)
class SearchFiles:
    """The files that a search writes."""

    log: Path
    strategy: Path
    front: Path
    report: str | None = None


def search_files(args: Namespace, hardware: Hardware, model_hash: str = "") -> SearchFiles:
    """The files that the user named, and default ones for those without a name. With a log of the user's own, the
    strategy and the front stand beside it and have its name, so that files of different logs are different.

    Args:
        model_hash: the model's, if it belongs to default names, since the log without it is of another model.

    Raises:
        HagoError: one cannot be written, two are the same, or a new log would overwrite the strategy of another one.
    """
    # the trained strategy takes the place of the one that was searched
    tuned = "" if args.finetune is None else f"-finetuned-{digest(args.finetune)}"
    if args.log is None:
        stem = default_stem(args, hardware, args.searcher.partition(":")[0])
        stem = f"{stem}-{model_hash[:HASH_IN_NAMES]}" if model_hash else stem
        log, default = Path("logs") / f"{stem}.jsonl", Path("strategies") / f"{stem}{tuned}.json"
    else:
        log = Path(args.log)
        stem = log.stem if log.suffix == ".jsonl" else log.name
        default = log.with_name(f"{stem}{tuned}.json")
    saved = Path(args.save or default)
    front = Path(args.front or saved.with_suffix(".front.json"))
    weights = None if args.finetune is None else weights_of(saved)
    given = {"--log": log, "--save": saved, "--front": front, "--report": args.report}
    check_distinct({**given, "the trained weights beside --save": weights})
    check_output(log)
    if args.report is not None:
        check_output(args.report, REPORT, "--report")
    for kind, path, given in ((STRATEGY, saved, args.save), (FRONT, front, args.front)):
        check_output(path, kind)
        if args.log is not None and given is None and args.save is None and path.exists() and not log.exists():
            raise HagoError(
                f"--log {log} begins a new log, but {path} exists already, where {kind.name} of it is written; give "
                "another --log, or --save another file"
            )
    return SearchFiles(log, saved, front)


def search_options(args: Namespace, files: SearchFiles) -> SearchOptions:
    """The options of the search, without the held-out data, which is not read yet."""
    options = SearchOptions(
        searcher=searcher_argument(args.searcher),
        seed=args.seed,
        budget=args.budget,
        race=args.race if args.race is not None else False,
        quantization=QuantizationOptions(**quantization_arguments(args), search_topology=args.search_topology),
        goal=goal_options(args),
        run=RunOptions(
            log=files.log,
            resume=not args.no_resume,
            reuse=args.reuse,
            save=files.strategy,
            front=files.front,
            executor=args.executor,
            cache_bytes=args.cache,
        ),
    )
    return options if args.finetune is None else for_training(options, args.hardware)


@dataclass(frozen=True, slots=True)
class ThisRun:
    """What this process did of a search that may have been continued.

    Args:
        earlier: number of trials that the log held before.
        seconds: time of this process, without what was measured for the answer.
    """

    earlier: int
    seconds: float

    def to_json(self, outcome: SearchOutcome) -> dict[str, Any]:
        """JSON values."""
        return {"trials": len(outcome.result.trials) - self.earlier, "seconds": self.seconds}

    def lines(self, args: Namespace, outcome: SearchOutcome) -> list[str]:
        """What was searched, in words: of all runs, then of this one, and why it stopped."""
        trials, best = outcome.result.trials, outcome.result.best
        repeats, added = sum(t.same_as is not None for t in trials), len(trials) - self.earlier
        took = f"{trials[-1].elapsed:.1f} s"
        if not self.earlier:
            forwards = "" if args.executor else f" and {outcome.forwards:.1f} forwards"
            took = f"{took} ({outcome.before:.1f} s before the first){forwards}"
        lines = [
            f"searched {counted(len(trials), 'trial')} ({counted(repeats, 'repeat')}) in {took}"
            f"{' in all runs' if self.earlier else ''}; the best is trial {best.index}"
        ]
        if self.earlier:
            what = f"added {counted(added, 'trial')}" if added else "added no trial"
            lines.append(f"  this run {what} in {self.seconds:.1f} s; the log held {self.earlier}")
        looked_at = outcome.prepared.batches
        if looked_at.whole is not looked_at:
            lines.append(f"  it looked at {looked_at.samples} of {counted(looked_at.whole.samples, 'sample')}")
        why = outcome.result.stopped_because
        ends = {"finished": "the searcher proposes no further point", "callback": "a callback stopped it"}
        ended = ends.get(why, f"the budget ({args.budget}) is spent")
        return [*lines, f"  it stopped since {ended}"]


def option_of(keyword: str) -> str:
    """The option of the command line that stands for a keyword of `hago.search_quantize_strategy`."""
    return f"--{keyword.replace('_', '-')}"


def goal_options(args: Namespace) -> GoalOptions:
    """The options of the goal, with objectives of the user imported."""
    return GoalOptions(
        objective=named(args.objective, "objective"),
        maximize=None if args.maximize is None else named(args.maximize, "objective"),
        minimize=args.minimize,
        keep=args.keep,
        budget_cost=args.budget_cost,
        allow_overflow=args.allow_overflow,
    )


def _outcome(
    args: Namespace,
    outcome: SearchOutcome,
    answer: Answer,
    files: SearchFiles,
    tuned: Tuned | None,
    run: ThisRun,
    objective: Objective,
) -> Outcome:
    log, saved = files.log, files.strategy
    strategy = outcome.strategy if tuned is None else tuned.strategy
    trials, best = outcome.result.trials, outcome.result.best
    held_out = strategy.made_by.get("held_out")
    weights = weights_of(saved) if tuned and tuned.better else args.weights
    further = check_command(args, saved, weights)
    lines = [
        *run.lines(args, outcome),
        *([] if outcome.unconfirmed is None else wrapped(f"  {outcome.unconfirmed}", " " * 4)),
        *_strategy_lines(outcome.strategy),
        _costs(best),
        *_limit_lines(strategy, objective),
        *_confirmed_lines(outcome.strategy),
        *([] if tuned is None else tuned_lines(tuned, saved)),
        *([] if tuned is None or held_out is None else [f"  held out: {_figures(held_out)}"]),
        "",
        str(answer),
        "",
        *_front_lines(outcome),
        f"log       {log}",
        f"strategy  {saved}",
        f"front     {files.front}",
        *([] if files.report is None else [f"report    {files.report}"]),
        f"next      {further}",
    ]
    values = {
        "model": args.model,
        "hardware": strategy.hardware.name,
        "score": outcome.score if tuned is None else tuned.score,
        "finetuned": None if tuned is None else tuned_values(tuned, saved),
        "results": dict(strategy.made_by["results"]),
        "held_out": held_out,
        "confirmed": strategy.made_by.get("confirmed"),
        "goal": strategy.made_by.get("goal", {}),
        "bits": dict(strategy.bits),
        "trials": len(trials),
        "best_trial": best.index,
        "unconfirmed_trial": None if outcome.unconfirmed is None else outcome.unconfirmed.trial.index,
        "costs": dict(best.score.costs),
        "overflows": dict(best.score.overflows),
        "unproved": best.score.unproved,
        "seconds": trials[-1].elapsed,
        "stopped_because": outcome.result.stopped_because,
        "this_run": run.to_json(outcome),
        "answer": answer.to_json(),
        "log": str(log),
        "strategy": str(saved),
        "front": str(files.front),
        "report": files.report,
        "next": further,
    }
    return Outcome("\n".join(lines), values, OK)


def _front_lines(outcome: SearchOutcome) -> list[str]:
    """The points of the front, where it is what was searched for, and an empty line."""
    if outcome.strategy.made_by["searcher"]["name"] not in FRONT_SEARCHERS:
        return []
    looked_at = counted(outcome.prepared.batches.samples, "sample")
    return [f"the front, measured on {looked_at}", *(f"  {line}" for line in str(outcome.front).splitlines()), ""]


def _strategy_lines(strategy: Strategy) -> list[str]:
    counts = Counter(strategy.bits.values())
    bits = ", ".join(f"{count} x {bits}" for bits, count in sorted(counts.items(), reverse=True))
    groups = f"  bits of {len(strategy.bits)} edge groups: {bits}" if bits else "  no edge has bits: all of it is float"
    corrected = [f"  corrected: {strategy.corrections}"] if strategy.corrections else []
    return [groups, *corrected, *_estimated_lines(strategy)]


def _estimated_lines(strategy: Strategy) -> list[str]:
    """A line that names the nodes that the calibration table lacks; no line if there are none."""
    missing = strategy.made_by.get("estimated")
    if not missing:
        return []
    return [f"  no row in the calibration table, so estimated: {names_text(missing)}"]


def _confirmed_lines(strategy: Strategy) -> list[str]:
    """A line on the gain of refined thresholds on samples that were kept aside, if it was measured."""
    kept, confirmed = strategy.made_by.get("refined"), strategy.made_by.get("confirmed")
    if not isinstance(kept, Mapping) or not isinstance(confirmed, Mapping):
        return []
    aside, in_turn = confirmed.get("samples", kept["kept_aside"]), kept["turns"] > 1 and "samples" not in confirmed
    samples = f"{aside} samples that were kept aside{', each in turn' if in_turn else ''}"
    if not kept["kept_aside"]:
        return ["  thresholds are as estimated: of a single sample, none can be kept aside to confirm refined ones"]
    if kept.get("one_shot") and "gain" not in confirmed:
        return []  # the thresholds are those of one shot
    accepted = {"refined", "weighted", "mse", "refined once"}.intersection(map(str, confirmed.values()))
    if not kept.get("one_shot") and ("gain" not in confirmed or not accepted):
        estimated = (
            f"  thresholds are as estimated: refined ones were not surely better on {samples}; more calibration "
            "samples make this surer"
        )
        return wrapped(estimated, " " * 4)
    clipped = (
        f"{100 * confirmed['clipped']:.2g} % of activations clipped, {100 * confirmed['clipped_before']:.2g} % without"
    )
    gain = (
        f"{100 * confirmed['gain']:.3g} % less error on {samples} ({confirmed['standard_errors']:.3g} standard errors)"
    )
    kind = "thresholds chosen for the outputs" if kept.get("one_shot") else "refined thresholds"
    return wrapped(f"  {kind}: {gain}; {clipped}", " " * 4)


def _figures(results: Mapping[str, Any]) -> str:
    known = {"samples", "sqnr", "agreement", "sim_acc", "sim_acc_interval"}
    others = {n: v for n, v in results.items() if n not in known and not isinstance(v, list)}
    return ", ".join([*(f"{name} {value:.6g}" for name, value in others.items()), figures_in_words(results)])


def _costs(best: Trial) -> str:
    parts = (
        f"{name} {amount_text(name, value).removesuffix(f' {name}')}"
        for name, value in best.score.costs.items()
        if name in METRICS
    )
    return "\n".join(wrapped("  costs: " + ", ".join(parts), " " * 4))


def _limit_lines(strategy: Strategy, objective: Objective) -> list[str]:
    """Lines that say of every limit what it came to, where it is relative, and what the strategy has."""
    made_by = strategy.made_by
    goal, held_out = made_by.get("goal", {}), made_by.get("held_out") or {}
    reached = {**made_by.get("results", {}), **made_by.get("costs", {})}
    lines = []
    limits = parse_limits(goal.get("limits"), objective)
    for limit, given in zip(limits, goal.get("limits_given", goal.get("limits", ())), strict=False):
        if given != limit.text:
            lines += wrapped(f"  {given!r} came to {resolved_text(given, limit.text)}", " " * 4)
        if limit.figure not in reached:
            continue
        if limit.is_cost:
            lines.append(f"  limit {given!r}: {limit.amount(reached[limit.figure])}")
            continue
        sign, others = -1.0 if Goal(objective).measure_of(limit.figure).is_loss else 1.0, ""
        if limit.figure in held_out:
            # what is relative to the float model is so on the same data, whose float model has another value
            is_missed = given == limit.text and limit.shortfall(held_out[limit.figure])
            missed = ", where it is missed" if is_missed else ""
            others = f", {measure_text(limit.figure, sign * held_out[limit.figure])} on the held-out data{missed}"
        text = measure_text(limit.figure, sign * reached[limit.figure])
        lines += wrapped(f"  limit {given!r}: {text} on the calibration data{others}", " " * 4)
    return lines


def quantize_command(args: Namespace, console: Console) -> Outcome:
    """Quantize without a search, and save the strategy."""
    hardware = load_chip(args, args.hardware)
    stem = default_stem(args, hardware, "one_shot")
    saved = check_output(Path(args.save or Path("strategies") / f"{stem}.json"), STRATEGY)
    model, data = load_model(args.model, args.weights), load_batches(args)
    with interruptible_job("quantize") as steps:
        options = QuantizationOptions(**quantization_arguments(args))
        graph, batches, held_out = import_with_held_out(model, hardware, data, load_held_out(args), steps=steps)
        if args.save is None and saved.exists() and Strategy.load(saved).model_hash != graph.model_hash:
            console.note(f"strategy {saved} is of other weights or another network, so it is not overwritten")
            stem = f"{stem}-{graph.model_hash[:HASH_IN_NAMES]}"
            saved = check_output(saved.with_name(f"{stem}.json"), STRATEGY)
        prepared = prepare(graph, hardware, batches, options, steps=steps)
        steps("running the float model")
        evaluator = sqnr_evaluator(prepared)
        effort = named_effort(args.effort)
        names = effort.corrections_of(options.corrections)
        steps(f"correcting the model{effort.announced(names, evaluator.forward_seconds, searches=False)}")
        prepared = correct(prepared, names, evaluator=evaluator, keeps_bits=True)
        steps("choosing the widest bits that do not overflow")
        made = quantize_and_measure(prepared, evaluator, effort, steps)
        warn_of_narrow_biases(made.quantizer.plan)
        strategy = made.quantizer.strategy
        with folders_of(saved):
            strategy.save(saved)
        console.written.append(str(saved))
        answer = answer_for_one_shot(made, prepared, held_out, steps)
    further = check_command(args, saved, args.weights)
    search = search_as_quantized(args) if strategy.bits else None
    inspect = strategy_command("inspect", args, saved, args.weights) if strategy.bits else None
    lines = [
        "the widest bits that do not overflow on the data:",
        *_strategy_lines(strategy),
        "",
        str(answer),
        "",
        f"strategy  {saved}",
        *([] if inspect is None else [inspect_line(inspect)]),
        *([] if search is None else [search_line(search)]),
        f"next      {further}",
    ]
    values = {
        "model": args.model,
        "hardware": strategy.hardware.name,
        "results": dict(strategy.made_by["results"]),
        "bits": dict(strategy.bits),
        "answer": answer.to_json(),
        "strategy": str(saved),
        "next": further,
        "inspect": inspect,
        "search": search,
    }
    return Outcome("\n".join(lines), values)
