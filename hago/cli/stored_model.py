"""Stored integer models on the command line: `hago realize --save` writes one, `hago run` runs one."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from hago import api
from hago.analysis.stored_run import run_model, save_outputs
from hago.cli.console import NO, OK, Console, Outcome
from hago.cli.options import check_command, load_batches, load_ops, make_folder_of
from hago.hardware import hardware_hash
from hago.plan import Conditions, HardwareId, Plan, Strategy, store_thresholds
from hago.runtime import Provenance, StoredSize, float_bytes, load_plan, save_plan
from hago.search import Quantizer


def run_command(args: Namespace, console: Console) -> Outcome:
    """Run a stored model and compare its outputs with its simulation; exit code 1 if they differ."""
    model = api.load_integer_model(args.stored, load_ops(args), args.engine)
    result = run_model(model, load_batches(args))
    if args.save is not None:
        save_outputs(make_folder_of(Path(args.save)), model.plan.graph.outputs, result.outputs)
        console.written.append(args.save)
        console.note(f"wrote {args.save}")
    size = StoredSize(float_bytes(model.plan), Path(args.stored).stat().st_size)
    values = {"stored": args.stored, **result.to_json(), "float_bytes": size.float_model, "file_bytes": size.file}
    return Outcome(f"{result}\n{args.stored}: {size}", values, OK if result.same else NO)


def store_model(outcome: Outcome, path: str, plan: Plan, strategy: Strategy) -> Outcome:
    """Write the model of a realization to a file, and add the file to the outcome."""
    size = save_plan(make_folder_of(Path(path)), plan, Provenance.of(strategy))
    values = {**outcome.json, "stored": path, "float_bytes": size.float_model, "file_bytes": size.file}
    return Outcome(f"{outcome.text}\nstored  {path}: {size}", values, outcome.code)


def store_command(args: Namespace) -> str:
    """The command that stores the integer model of the strategy that a command was given."""
    strategy = Path(args.record)
    stored = strategy.with_name(f"{strategy.stem}-integers.safetensors")
    trial = getattr(args, "trial", None)
    more = [] if trial is None else ["--trial", str(trial)]
    return check_command(args, strategy, args.weights, *more, "--save", str(stored))


def stored_quantizer(args: Namespace) -> Quantizer:
    """Load the stored model that the user gave instead of MODEL, with the strategy from which it was made.

    The strategy lacks the thresholds of weights, which are not stored.
    """
    plan, provenance = load_plan(args.model, load_ops(args))
    provenance = provenance or Provenance("", {}, {})
    nodes = {n.name: n.name in plan.nodes for n in plan.graph}
    edges = {str(e): plan.target(e) is not None for n in plan.graph for e in n.edges}
    hardware = HardwareId(plan.hardware.name, hardware_hash(plan.hardware))
    conditions = Conditions(nodes, edges)
    return Quantizer(
        plan,
        Strategy(
            provenance.model_hash, hardware, conditions, provenance.bits, store_thresholds(plan), provenance.made_by
        ),
    )
