"""The commands that hand a strategy to other engines: `hago compare` and `hago export`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from hago import api
from hago.analysis import inspect_plan
from hago.analysis.comparison import REALIZATIONS, compare_realizations
from hago.analysis.strategy_comparison import NAMES, compare_strategies
from hago.cli.console import NO, OK, Console, Outcome
from hago.cli.options import hardware_of_each, load_batches, load_strategy, make_folder_of, named, resumable
from hago.cli.output_files import default_stem
from hago.cli.stored_model import stored_quantizer
from hago.data import Batches
from hago.errors import HagoError
from hago.export import check_files, find_format, request_export, write_files
from hago.graph.model_source import load_model
from hago.importing import import_with_data
from hago.plan import Strategy
from hago.runtime import is_stored
from hago.search import Quantizer

#: The realizations that must equal the reference engine bit for bit.
_EXACT = ("fast", "simulated")


def compare_command(args: Namespace, console: Console) -> Outcome:
    """Compare two strategies, or realizations of one node by node; exit code 1 if those of hago itself differ."""
    if args.other is not None:
        return _compare_strategies(args)
    if args.objective is not None:
        raise HagoError("--objective compares two strategies; give a second STRATEGY")
    strategy = Strategy.load(args.record)
    (hardware,) = hardware_of_each(args, [(args.record, strategy)])
    model = load_model(args.model, args.weights)
    given = ",".join(REALIZATIONS) if args.realizations is None else args.realizations
    names = [n.strip() for n in given.split(",") if n.strip()]
    if not names:
        raise HagoError("--realizations is empty; expected names such as reference,fast")
    comparison = compare_realizations(model, hardware, strategy, load_batches(args), names, args.base or "reference")
    ours = [a for a in comparison.against if a.name in _EXACT and comparison.base in ("reference", *_EXACT)]
    wrong = any(p.differing for a in ours for p in (*a.integers, *a.outputs))
    return Outcome(str(comparison), comparison.to_json(), NO if wrong else OK)


def _compare_strategies(args: Namespace) -> Outcome:
    """Compare two strategies of one model, each on its own hardware."""
    if args.realizations is not None or args.base is not None:
        raise HagoError("--realizations and --base compare realizations of one strategy; give one STRATEGY with them")
    strategies = [Strategy.load(args.record), Strategy.load(args.other)]
    chips = hardware_of_each(args, list(zip((args.record, args.other), strategies, strict=True)))
    model = load_model(args.model, args.weights)
    objective = None if args.objective is None else named(args.objective, "objective")
    comparison = compare_strategies(model, chips, strategies, load_batches(args), objective)
    paths = dict(zip(NAMES, (args.record, args.other), strict=True))
    head = "\n".join(f"{name}  {path}" for name, path in paths.items())
    return Outcome(f"{head}\n{comparison}", {"strategies": paths, **comparison.to_json()})


# ---------------------------------------------------------------- export
def export_command(args: Namespace, console: Console) -> Outcome:
    """Write a strategy or a stored integer model in a format of another tool; exit code 1 where its check fails."""
    form = find_format(named(args.format, "export format"))
    if args.check and form.check is None:
        raise HagoError(f"--check: export format {form.name!r} has no check, since hago cannot run its files")
    if args.check and args.data is None:
        raise HagoError("--check runs the file on data; give --data")
    if args.record is None and args.data is not None and form.shows_figures:
        raise HagoError(
            "--data: figures compare with the float model, which a stored integer model does not hold; give MODEL and "
            "STRATEGY"
        )
    quantizer, batches, path = _quantizer_of_strategy(args) if args.record is not None else _quantizer_of_stored(args)
    options = {option.name: getattr(args, option.name, option.default) for option in form.options}
    inspected = None if batches is None or not form.shows_figures else inspect_plan(quantizer.plan, batches)
    figures = {} if inspected is None else inspected.figures()
    where = make_folder_of(path)
    request = request_export(form, quantizer.plan, quantizer.strategy, where, batches, options, figures)
    with resumable(lambda: f"while it wrote {path}"):
        written = write_files(form, request)
    console.written.append(str(path))
    if not args.check:
        return Outcome(written.text, written.json)
    checked = check_files(form, request, written)
    values = {**written.json, "check": checked.json}
    return Outcome(f"{written.text}\n{checked.text}", values, OK if checked.passed else NO)


def _quantizer_of_strategy(args: Namespace) -> tuple[Quantizer, Batches | None, Path]:
    """The quantizer of MODEL and STRATEGY, the batches of `--data`, and the path to write to."""
    strategy, hardware, model = load_strategy(args)
    stem = default_stem(args, hardware, args.format, strategy.to_json())
    path = Path(args.save or Path("exports") / stem)
    if args.data is None:
        return api.create_quantizer(model, hardware, strategy), None, path
    graph, batches = import_with_data(model, load_batches(args), hardware, made_for=[strategy.model_hash])
    return api.create_quantizer(graph, hardware, strategy), batches, path


def _quantizer_of_stored(args: Namespace) -> tuple[Quantizer, Batches | None, Path]:
    """The same for a stored integer model, which the user gave as MODEL."""
    if not is_stored(args.model):
        raise HagoError(
            f"{args.model!r} is not a stored integer model; give MODEL and STRATEGY, or the file of a stored model"
        )
    quantizer = stored_quantizer(args)
    path = Path(args.save or Path("exports") / Path(args.model).stem)
    batches = None if args.data is None else Batches(load_batches(args), quantizer.plan.graph.inputs)
    return quantizer, batches, path
