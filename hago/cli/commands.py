"""The commands: each calls hago's public functions and returns an Outcome, which `main` prints."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch

from hago import api
from hago.analysis import Remedies, examine_machine, find_remedies, given_options, inspect_plan, measure_hardware
from hago.analysis.answer import LoadedStrategy, answer_for_stored, load_stored
from hago.analysis.speed import time_against_float
from hago.arithmetic.types import TORCH_DTYPES
from hago.cli.console import NO, OK, Console, Outcome, command_line
from hago.cli.export import compare_command, export_command
from hago.cli.finetune import finetune_command
from hago.cli.options import (
    check_command,
    data_words,
    estimator_argument,
    hardware_of,
    improve_line,
    load_batches,
    load_chip,
    load_held_out,
    load_strategy,
    make_folder_of,
    named,
    quantization_command,
    resumable,
    search_line,
    with_next,
)
from hago.cli.report import report_command
from hago.cli.search import quantize_command, search_command
from hago.cli.stored_model import run_command, store_command, store_model
from hago.data import Batches
from hago.demo import BATCH_SIZE, HARDWARE, MODEL, run_demo
from hago.errors import HagoError, HardwareError
from hago.graph.model_source import load_model
from hago.hardware import available_hardware, load_hardware, missing_common_ops, save_hardware, start_hardware
from hago.importing import input_names
from hago.plan import Strategy
from hago.runtime.native import NativeIntegerModel
from hago.search import is_one_shot, passes_of, plan_and_batches
from hago.serialization.json_text import is_file
from hago.serialization.text_table import counted, table
from hago.study import interruptible_job, is_log, read_log


# ---------------------------------------------------------------- explain
def explain_command(args: Namespace, console: Console) -> Outcome:
    """Explain which nodes run in integers, and why."""
    if (args.data is None) == (args.input_shape is None):
        raise HagoError("explain needs the model's inputs: give either --data or --input-shape")
    model = load_model(args.model, args.weights)
    if args.data is None:
        inputs: tuple[Any, ...] = tuple(_zeros(shape, dtype) for shape, dtype in args.input_shape)
    else:
        first = next(iter(load_batches(args)), None)
        inputs = Batches([] if first is None else [first], input_names(model), role=f"data {args.data!r}").example
    chip, bits = load_chip(args, args.hardware), dict(args.fix_bits)
    explanation = api.explain(model, chip, inputs, keep_float=args.keep_float, fix_bits=bits)
    if not args.cost:
        return Outcome(str(explanation), explanation.to_json())
    costs = api.explain_cost(model, chip, inputs, keep_float=args.keep_float, fix_bits=bits)
    return Outcome(f"{explanation}\n\n{costs}", {**explanation.to_json(), "cost": costs.to_json()})


def _zeros(shape: tuple[int, ...], dtype_name: str) -> torch.Tensor:
    dtype = TORCH_DTYPES.get(dtype_name)
    if dtype is None:
        raise HagoError(f"input shape: {dtype_name!r} is not a dtype; expected e.g. float32 or int64")
    # torch.export takes axes of size 0 and 1 as fixed
    return torch.zeros((2, *shape), dtype=dtype)


# ---------------------------------------------------------------- commands on a strategy or a log
def evaluate_command(args: Namespace, console: Console) -> Outcome:
    """Compare the simulation with the float model and one-shot quantization."""
    strategy, hardware, model = load_strategy(args)
    with interruptible_job("evaluate") as steps:
        loaded = load_stored(model, hardware, strategy, load_batches(args), load_held_out(args), steps)
        report, answer = answer_for_stored(loaded, steps)
    outcome = Outcome(f"on {report.hardware}\n{answer}", {**report.to_json(), "answer": answer.to_json()})
    return with_next(outcome, check_command(args, Path(args.record), args.weights))


def realize_command(args: Namespace, console: Console) -> Outcome:
    """Compare the integer model with its simulation and the float model, and store it if it equals its simulation."""
    strategy, hardware, model = load_strategy(args)
    with interruptible_job("realize") as steps:
        loaded = load_stored(model, hardware, strategy, load_batches(args), load_held_out(args), steps)
        report, answer = answer_for_stored(loaded, steps, integer=True)
    plan = loaded.plan
    outcome = Outcome(
        "\n".join([f"on {report.hardware}", str(answer), str(report.weights), *report.exactness_text()]),
        {**report.to_json(), "answer": answer.to_json()},
        OK if report.same else NO,
    )
    if args.explain:
        kernels = NativeIntegerModel(plan).explain()
        outcome = Outcome(f"{outcome.text}\n\n{kernels}", {**outcome.json, "kernels": kernels.to_json()}, outcome.code)
    if outcome.code != OK:
        return outcome
    if args.save is None:
        return with_next(outcome, store_command(args))
    stored = store_model(outcome, args.save, plan, strategy)
    console.written.append(args.save)
    return with_next(stored, command_line("run", args.save, "--data", args.data, *data_words(args, chip=False)))


def bench_command(args: Namespace, console: Console) -> Outcome:
    """Time the integer model against the float model."""
    strategy, hardware, model = load_strategy(args)
    plan, batches = plan_and_batches(model, hardware, strategy, load_batches(args))
    threads = counted(torch.get_num_threads(), "thread")
    console.note(f"timing batches of {', '.join(map(str, args.batches))} on {threads}")
    report = time_against_float(plan, batches, args.batches, args.rounds)
    return Outcome(str(report), report.to_json())


def cost_command(args: Namespace, console: Console) -> Outcome:
    """Estimate the cost of a strategy, node by node."""
    strategy, hardware, model = load_strategy(args)
    plan_cost = api.estimate_cost(model, hardware, strategy, batch=args.batch)
    return Outcome(str(plan_cost), plan_cost.to_json())


def sensitivity_command(args: Namespace, console: Console) -> Outcome:
    """Estimate the loss of every choice of bits."""
    losses = api.measure_sensitivity(
        load_model(args.model, args.weights),
        load_chip(args, args.hardware),
        load_batches(args),
        objective=named(args.objective, "objective"),
        estimator=estimator_argument(args.estimator),
        keep_float=args.keep_float,
        fix_bits=dict(args.fix_bits),
        corrections=args.corrections,
        effort=args.effort,
        seed=args.seed,
    )
    if args.save is not None:
        losses.save(make_folder_of(Path(args.save)))
        console.written.append(args.save)
        console.note(f"wrote {args.save}")
    return Outcome(str(losses), losses.to_json())


def inspect_command(args: Namespace, console: Console) -> Outcome:
    """Compare float, simulated and integer values of every layer."""
    strategy, hardware, model = load_strategy(args)
    with interruptible_job("inspect") as steps:
        loaded = load_stored(model, hardware, strategy, load_batches(args), load_held_out(args), steps)
        steps("comparing float, simulated and integer values of every node")
        statistic = replace(inspect_plan(loaded.plan, loaded.batches), passes=passes_of(strategy))
        if args.remedies:
            steps("trying remedies for the nodes with the largest errors")
            found = find_remedies(loaded.plan, strategy, loaded.batches, statistic.suspects, statistic.overflowing)
            statistic = replace(statistic, remedies=found)
        _, answer = answer_for_stored(loaded, steps)
    if args.csv is not None:
        try:
            make_folder_of(Path(args.csv)).write_text(statistic.to_csv(), "utf-8")
        except OSError as error:
            raise HagoError(f"cannot write {args.csv}: {error}") from None
        console.written.append(args.csv)
        console.note(f"wrote {args.csv}")
    text = f"{statistic}\n\n{statistic.values()}" if args.values else str(statistic)
    code = NO if statistic.total_differences else OK
    outcome = Outcome(f"{text}\n\n{answer}", {**statistic.to_json(), "answer": answer.to_json()}, code)
    if code != OK:
        return outcome
    further = _after_one_shot(args, loaded, statistic.remedies)
    lines = [line for line, _ in further.values()]
    values = {name: command for name, (_, command) in further.items()}
    text = "\n".join([outcome.text, "", *lines, f"next      {store_command(args)}"])
    return Outcome(text, {**outcome.json, **values, "next": store_command(args)}, outcome.code)


def _after_one_shot(args: Namespace, loaded: LoadedStrategy, remedies: Remedies | None) -> dict[str, tuple[str, str]]:
    """By name, the line and the command of what may be better than one shot: the remedies that were found, and a
    search. Empty for a strategy that is more than one shot."""
    strategy, chip = loaded.strategy, loaded.plan.hardware
    if not is_one_shot(strategy) or not strategy.bits:
        return {}
    hardware = args.hardware or strategy.hardware.name
    data = args.data if strategy.made_by.get("data_hash") == loaded.batches.sha256 else "CALIBRATION_DATA"
    tables = {"calibration-table": "CALIBRATION_TABLE" if "estimated" in strategy.made_by else None}
    further = {}
    if remedies is not None and (best := remedies.together) is not None:
        command = quantization_command("quantize", args, hardware, data, best.change, tables)
        further["improve"] = (improve_line(command, best.gain, remedies.samples), command)
    command = quantization_command("search", args, hardware, data, given_options(strategy, chip), tables)
    return {**further, "search": (search_line(command), command)}


def replay_command(args: Namespace, console: Console) -> Outcome:
    """Evaluate a strategy or a log again, and compare every figure."""
    record = read_log(args.record) if is_log(args.record) else Strategy.load(args.record)
    hardware, model = hardware_of(args, record), load_model(args.model, args.weights)
    objective = None if args.objective is None else named(args.objective, "objective")
    comparison = api.replay(
        model,
        hardware,
        args.record,
        load_batches(args),
        objective=objective,
        estimator=estimator_argument(args.estimator),
        best_only=args.best_only,
    )
    return Outcome(str(comparison), comparison.to_json(), OK if comparison.same else NO)


# ---------------------------------------------------------------- hardware and demo
def hardware_command(args: Namespace, console: Console) -> Outcome:
    """List, show, check, measure or begin hardware."""
    if args.action == "new":
        return _new_hardware(args)
    if args.action == "list":
        return _list_hardware()
    if args.action == "show":
        shown = load_chip(args, args.hardware).table()
        return Outcome(str(shown), shown.to_json())
    if args.action == "measure":
        return _measure_hardware(args, console)
    if args.hardware not in available_hardware() and not is_file(args.hardware):
        raise HardwareError(f"there is no hardware file {args.hardware!r}")
    try:
        chip = load_chip(args, args.hardware)
    except HardwareError as error:
        first, *mistakes = [line.strip() for line in str(error).splitlines()]
        return Outcome(str(error), {"ok": False, "mistakes": mistakes or [first]}, NO)
    missing = missing_common_ops(chip)
    values = {"ok": True, "mistakes": [], "ops": len(chip.ops), **asdict(missing)}
    return Outcome(f"{args.hardware} is valid: {counted(len(chip.ops), 'op')}\n{missing}", values)


def _new_hardware(args: Namespace) -> Outcome:
    """Write the start of a hardware file."""
    chip = start_hardware(args.name, load_chip(args, args.base))
    saved = Path(args.output or f"{args.name}.json")
    if saved.suffix != ".json":
        raise HagoError(f"--output {args.output}: expected a path that ends in .json")
    if saved.exists():
        raise HagoError(f"{saved} exists; give another file with --output")
    save_hardware(chip, make_folder_of(saved))
    lines = [
        f"wrote {saved}: the arithmetic and the {counted(len(chip.ops), 'op')} of {args.base}, with notes on what to "
        "change",
        f"edit it, then  {command_line('hardware', 'check', str(saved))}",
    ]
    return Outcome("\n".join(lines), {"hardware": str(saved), "name": chip.name, "ops": len(chip.ops)})


def _list_hardware() -> Outcome:
    titles = ("name", "activations", "weights", "requantize", "rounding", "other_ops", "ops")
    rows = [
        (
            h.name,
            f"{h.activation.scheme} {h.activation.granularity}",
            f"{h.weight.scheme} {h.weight.granularity}",
            h.requantize.form,
            h.requantize.rounding,
            h.other_ops,
            str(len(h.ops)),
        )
        for h in map(load_hardware, available_hardware())
    ]
    return Outcome("\n".join(table(titles, rows)), [dict(zip(titles, row, strict=True)) for row in rows])


def _measure_hardware(args: Namespace, console: Console) -> Outcome:
    """Measure the costs of signatures on this machine, and write them into a copy of the hardware file."""
    chip, saved = load_chip(args, args.hardware), Path(args.output)
    if saved.suffix != ".json":
        raise HagoError(f"--output {args.output}: expected a path that ends in .json")
    if Path(args.hardware).exists() and saved.exists() and saved.samefile(args.hardware):
        raise HagoError(f"--output {args.output} is the file that is measured; the copy needs another name")
    console.note(f"timing the signatures of {chip.name} on {counted(torch.get_num_threads(), 'thread')}")
    measured = measure_hardware(chip)
    save_hardware(measured.hardware, make_folder_of(saved))
    console.written.append(str(saved))
    return Outcome(f"{measured}\nhardware  {saved}", {**measured.to_json(), "hardware": str(saved)})


def demo_command(args: Namespace, console: Console) -> Outcome:
    """Run the demo: train, search, realize and check."""
    out = Path(args.out)
    with resumable(lambda: f"in the demo; what it made so far is in {out}, and the same command makes it anew"):
        results = run_demo(out, console.tell, hardware=args.hardware or HARDWARE, budget=args.budget, seed=args.seed)
    last = results.results[-1]
    weights, calibration = str(out / "demo" / "weights.pt"), str(out / "demo" / "calibration.npz")
    again = command_line(
        "replay", MODEL, str(last.log), "--weights", weights, "--batch-size", str(BATCH_SIZE), "--data", calibration
    )
    text = (
        f"\n{results}\n\nthe best strategy of the last search is {last.strategy}; to reproduce all its figures:\n"
        f"  {again}"
    )
    return Outcome(text, results.to_json(), OK if results.same else NO)


def doctor_command(args: Namespace, console: Console) -> Outcome:
    """Show what this machine has, and how what is missing is installed."""
    report = examine_machine()
    return Outcome(str(report), report.to_json())


COMMANDS: Final[Mapping[str, Callable[[Namespace, Console], Outcome]]] = {
    "search": search_command,
    "quantize": quantize_command,
    "explain": explain_command,
    "evaluate": evaluate_command,
    "simulate": evaluate_command,
    "realize": realize_command,
    "run": run_command,
    "bench": bench_command,
    "cost": cost_command,
    "sensitivity": sensitivity_command,
    "compare": compare_command,
    "inspect": inspect_command,
    "replay": replay_command,
    "report": report_command,
    "finetune": finetune_command,
    "export": export_command,
    "hardware": hardware_command,
    "demo": demo_command,
    "doctor": doctor_command,
}
