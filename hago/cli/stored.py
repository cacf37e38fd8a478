"""The commands that write and run stored integer models: `hago realize --save` and `hago run`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from hago import api
from hago.analysis.stored_run import run_model, save_outputs
from hago.cli.options import NO, OK, Outcome, Voices, load_batches, load_ops, make_folder_of
from hago.hardware.file import hardware_hash
from hago.plan.plan import Plan
from hago.plan.strategy import Conditions, HardwareId, Strategy
from hago.plan.thresholds import store_thresholds
from hago.runtime.native.executor import ENGINES
from hago.runtime.stored import Provenance, StoredSize, float_bytes, load_plan, save_plan
from hago.search.quantizer import Quantizer


def run_options(parser: Any) -> None:
    """What `hago run` takes besides data."""
    parser.add_argument("stored", metavar="FILE", help="what 'hago realize --save' wrote")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="auto", help="default: %(default)s")
    parser.add_argument("--save", metavar="FILE", help="the outputs, as an .npz file")


def run_command(args: Namespace, voices: Voices) -> Outcome:
    """Run a stored model, and its simulation beside it."""
    model = api.load_integer_model(args.stored, load_ops(args), args.engine)
    found = run_model(model, load_batches(args))
    if args.save is not None:
        save_outputs(make_folder_of(Path(args.save)), model.plan.graph.outputs, found.outputs)
        voices.note(f"wrote {args.save}")
    size = StoredSize(float_bytes(model.plan), Path(args.stored).stat().st_size)
    values = {"stored": args.stored, **found.to_json(), "float_bytes": size.float_model, "file_bytes": size.file}
    return Outcome(f"{found}\n{args.stored}: {size}", values, OK if found.same else NO)


def with_stored(outcome: Outcome, path: str, plan: Plan, strategy: Strategy) -> Outcome:
    """The outcome of a realization, and its model written to a file."""
    size = save_plan(make_folder_of(Path(path)), plan, Provenance.of(strategy))
    values = {**outcome.json, "stored": path, "float_bytes": size.float_model, "file_bytes": size.file}
    return Outcome(f"{outcome.text}\nstored  {path}: {size}", values, outcome.code)


def stored_quantizer(args: Namespace) -> Quantizer:
    """The Plan of the stored model that stands where a command expects a model, and its strategy: the
    thresholds of weights, which are not stored, are missing there."""
    plan, provenance = load_plan(args.model, load_ops(args))
    known = provenance or Provenance("", {}, {})
    nodes = {n.name: n.name in plan.nodes for n in plan.graph}
    edges = {str(e): plan.target(e) is not None for n in plan.graph for e in n.edges}
    hardware = HardwareId(plan.hardware.name, hardware_hash(plan.hardware))
    conditions = Conditions(nodes, edges)
    return Quantizer(
        plan,
        Strategy(known.model_hash, hardware, conditions, known.bits, store_thresholds(plan), known.made_by),
    )
