"""The command that sets realizations of a strategy side by side: `hago compare`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hago import api
from hago.analysis.comparison import REALIZATIONS, compare_realizations
from hago.cli.options import NO, OK, Outcome, Voices, default_path, hardware_of, load_batches, make_folder_of
from hago.cli.stored import stored_quantizer
from hago.data.batches import Batches
from hago.emulation.tpu_mlir.tables import format_calibration_table, format_quantize_table
from hago.errors import HagoError
from hago.export.onnx.check import check_onnx
from hago.export.onnx.engines import ENGINES, openvino_that_lasts
from hago.export.onnx.export import FORMS
from hago.export.tpu_mlir import Tables, make_tables, observed_ranges
from hago.graph.model_source import load_model
from hago.plan.strategy import Strategy
from hago.runtime.stored import is_stored
from hago.search.prepare import as_graph
from hago.search.quantizer import Quantizer
from hago.serialization.json_text import replace_file

#: What must equal the reference engine to the last bit.
_OURS = ("fast", "simulated")


def compare_options(parser: Any) -> None:
    """The command's own options."""
    known = ",".join(REALIZATIONS)
    parser.add_argument(
        "--realizations", default=known, metavar="NAME,...", help=f"some of {known}; what cannot run here is skipped"
    )
    parser.add_argument("--base", default="reference", metavar="NAME", help="compare with this; default: %(default)s")


def compare_command(args: Namespace, voices: Voices) -> Outcome:
    """Realizations on the same data, node by node; exit code 1 where one of hago's own differs from another."""
    strategy = Strategy.load(args.record)
    hardware, model = hardware_of(args, strategy), load_model(args.model, args.weights)
    names = [n.strip() for n in args.realizations.split(",") if n.strip()]
    if not names:
        raise HagoError("--realizations names none")
    found = compare_realizations(model, hardware, strategy, load_batches(args), names, args.base)
    ours = [a for a in found.against if a.name in _OURS and found.base in ("reference", *_OURS)]
    wrong = any(p.differing for a in ours for p in (*a.integers, *a.outputs))
    return Outcome(str(found), found.to_json(), NO if wrong else OK)


# ---------------------------------------------------------------- export
# The command that writes what other tools read: `hago export --format NAME`, one Format for each.
# A Format is a value: its name, what it writes, its own options, and the function that writes. A format that needs an
# optional package imports it when it runs.


@dataclass(frozen=True, slots=True)
class Export:
    """What a Format is handed.

    Args:
        args: every option of the command line.
        voices: how it speaks.
        quantizer: the Plan and the strategy.
        batches: the data, where `--data` was given.
        path: where to write; a format adds its own endings.
    """

    args: Namespace
    voices: Voices
    quantizer: Quantizer
    batches: Any | None
    path: Path


@dataclass(frozen=True, slots=True)
class Format:
    """A form that `hago export` writes.

    Args:
        text: what it writes, for `--help`.
        write: writes the files and says what it wrote.
        options: adds the format's own options to a group of the parser.
    """

    text: str
    write: Callable[[Export], Outcome]
    options: Callable[[Any], None] = lambda group: None


def export(args: Namespace, voices: Voices) -> Outcome:
    """Write a strategy in another tool's form."""
    if args.record is None:
        return _export_stored(args, voices)
    strategy = Strategy.load(args.record)
    hardware, model = hardware_of(args, strategy), load_model(args.model, args.weights)
    path = Path(args.save or default_path(args, hardware, "exports", ""))
    if args.data is None:
        batches, quantizer = None, api.create_quantizer(model, hardware, strategy)
    else:
        graph, batches = as_graph(model, load_batches(args), hardware, made_for=[strategy.model_hash])
        quantizer = api.create_quantizer(graph, hardware, strategy)
    return FORMATS[args.format].write(Export(args, voices, quantizer, batches, make_folder_of(path)))


def _export_stored(args: Namespace, voices: Voices) -> Outcome:
    if not is_stored(args.model):
        raise HagoError(f"{args.model!r} is no stored integer model; give MODEL and STRATEGY, or such a file")
    quantizer = stored_quantizer(args)
    path = Path(args.save or Path("exports") / Path(args.model).stem)
    batches = None if args.data is None else Batches(load_batches(args), quantizer.plan.graph.inputs)
    return FORMATS[args.format].write(Export(args, voices, quantizer, batches, make_folder_of(path)))


# ---------------------------------------------------------------- tpu-mlir
def _tpu_mlir(asked: Export) -> Outcome:
    plan, strategy, batches = asked.quantizer.plan, asked.quantizer.strategy, asked.batches
    observed = None if batches is None else observed_ranges(plan, (b.inputs for b in batches))
    tables = make_tables(plan, strategy.bits, observed)
    paths = [asked.path.with_name(f"{asked.path.name}_{kind}") for kind in ("cali_table", "qtable")]
    replace_file(paths[0], format_calibration_table(tables.calibration))
    replace_file(paths[1], format_quantize_table(tables.quantize))
    values = {
        "calibration_table": str(paths[0]),
        "quantize_table": str(paths[1]),
        "rows": len(tables.calibration.rows),
        "modes": dict(tables.quantize.modes),
        "without_range": list(tables.without_range),
        "widened": list(tables.widened),
        "other_bits": dict(tables.other_bits),
    }
    lines = [
        f"calibration table  {paths[0]}  ({len(tables.calibration.rows)} rows)",
        f"quantize table     {paths[1]}  ({len(tables.quantize.modes)} operators not in INT8)",
        *_cautions(tables),
    ]
    return Outcome("\n".join(lines), values)


def _cautions(tables: Tables) -> list[str]:
    found = []
    if tables.without_range:
        names = ", ".join(tables.without_range)
        found.append(f"no edge quantizes these, so they have no row; give --data to fill them: {names}")
    if tables.widened:
        found.append(f"read with several ranges here, the widest stands in the table: {', '.join(tables.widened)}")
    if tables.other_bits:
        bits = ", ".join(f"{k} ({b})" for k, b in tables.other_bits.items())
        found.append(f"neither 4 nor 8 bits here, run in INT8 there: {bits}")
    return found


# ---------------------------------------------------------------- onnx
def _onnx_options(group: Any) -> None:
    group.add_argument("--form", choices=tuple(FORMS), default="qdq", help="default: %(default)s")
    group.add_argument("--check", action="store_true", help="run the file on --data and compare every node")
    group.add_argument("--engine", choices=tuple(ENGINES), default="onnxruntime", help="default: %(default)s")


def _onnx(asked: Export) -> Outcome:
    """Write the file; with `--check`, run it and compare with the integer model."""
    args, path = asked.args, asked.path.with_name(f"{asked.path.name.removesuffix('.onnx')}.onnx")
    if args.check and asked.batches is None:
        raise HagoError("--check runs the file on data; give --data")
    made = asked.quantizer.export_onnx(path, args.form)
    opsets = {o.domain or "onnx": o.version for o in made.model.opset_import}
    values: dict[str, Any] = {"path": str(path), "form": args.form, "opsets": opsets}
    said = ", ".join(f"{domain} {opset}" for domain, opset in opsets.items())
    text = f"onnx  {path}  ({args.form} form, opset {said}, {len(made.model.graph.node)} nodes)"
    if not args.check:
        return Outcome(text, values)
    batches = (b.inputs for b in asked.batches or ())
    if args.engine == "openvino":
        openvino_that_lasts(made.model)
    found = check_onnx(made, asked.quantizer.plan, batches, ENGINES[args.engine], args.engine)
    return Outcome(f"{text}\n{found}", values | {"check": found.to_json()}, OK if found.tolerable else NO)


FORMATS: Final[Mapping[str, Format]] = {
    "onnx": Format("a model for ONNX Runtime and others", _onnx, _onnx_options),
    "tpu-mlir": Format("a calibration table and a quantize table", _tpu_mlir),
}
