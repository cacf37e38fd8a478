"""Export formats: the kinds of files that hago writes for other tools, in one table.

A format is an `ExportFormat` object. Those of hago are in `FORMATS` and selected by name; a user passes one of their
own to `Quantizer.export`, or names it as `package.module:name` on the command line. `Quantizer.export` and the command
line call `request_export`, `write_files` and, if the user asks for a check, `check_files`. A format that needs an
optional package imports it when it writes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from torch import Tensor

from hago.data import Batches
from hago.data.named_objects import one_line
from hago.emulation.tpu_mlir import format_calibration_table, format_quantize_table
from hago.errors import HagoError, did_you_mean
from hago.export.model_explorer import graph_collection, node_data, plan_figures
from hago.export.onnx.engines import ENGINES, openvino_if_no_crash
from hago.export.onnx.export import FORMS, make_onnx, write_onnx
from hago.export.onnx.verification import check_onnx
from hago.export.tpu_mlir import Tables, make_tables, observed_ranges
from hago.plan import Plan, Strategy
from hago.serialization.json_text import canonical, replace_file
from hago.serialization.summary import Summarized, Summary
from hago.serialization.text_table import counted

_Result = TypeVar("_Result")
#: Figures of nodes: by the figure's name, a number or a word for every node that has it.
NodeFigures: TypeAlias = Mapping[str, Mapping[str, float | str]]


@dataclass(frozen=True, slots=True)
class ExportOption:
    """An option of a format: a keyword argument of `Quantizer.export`, and `--NAME` on the command line.

    Args:
        choices: the values it may have; the first is the default.
        text: its meaning, for `--help`.
    """

    name: str
    choices: tuple[str, ...]
    text: str = "default: %(default)s"

    @property
    def default(self) -> str:
        return self.choices[0]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The arguments of one export, made by `request_export` and passed to the functions of a format.

    Args:
        plan: the Plan to write.
        strategy: the strategy that the Plan was resolved from.
        path: the path of the files; a format adds its own suffixes.
        batches: data of the model, or None; it can be iterated any number of times.
        options: a value for each of the format's options.
        figures: further figures of nodes by the figure's name and the node, for formats that show them.
    """

    plan: Plan
    strategy: Strategy
    path: Path
    batches: Batches | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    figures: NodeFigures = field(default_factory=dict)

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """The flat inputs of each batch."""
        return (batch.inputs for batch in self.batches or ())


@dataclass(frozen=True, slots=True, repr=False)
class ExportResult(Summarized):
    """The files that a format wrote.

    Args:
        text: a summary for the user.
        json: the same as JSON values.
        content: the written object, which the check of the format reads, e.g. an OnnxFile.
    """

    text: str
    json: Mapping[str, Any]
    content: Any = None

    def summary(self) -> Summary:
        """What was written."""
        return Summary("ExportResult", {"wrote": "; ".join(self.text.splitlines())})

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """The result of running exported files and comparing them with the integer model.

    Args:
        passed: whether the outputs agree within the format's tolerance.
        text, json: as in `ExportResult`.
    """

    passed: bool
    text: str
    json: Any = None


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A kind of file that hago can write for another tool.

    Args:
        name: of the format.
        text: the files that it writes, for `--help`.
        write: writes the files of a request. Called once per export.
        check: runs written files on the request's batches and compares them with the integer model; None if
            hago cannot run them. Called after `write`, if the user asks for a check.
        extra: the extra of hago that installs the packages it needs (`pip install 'hago[extra]'`); empty if it needs
            none.
        options: the options that `write` and `check` read from the request.
        shows_figures: whether it shows the figures of the request; the command line inspects the model for them where
            it is given data.
    """

    name: str
    text: str
    write: Callable[[ExportRequest], ExportResult]
    check: Callable[[ExportRequest, ExportResult], ExportCheck] | None = None
    extra: str = ""
    options: tuple[ExportOption, ...] = ()
    shows_figures: bool = False


def find_format(name: str | ExportFormat) -> ExportFormat:
    """The format of this name, or an ExportFormat itself.

    Raises:
        HagoError: no format has the name, or the object is not an ExportFormat.
    """
    if isinstance(name, ExportFormat):
        return name
    if not isinstance(name, str):
        raise HagoError(f"export format is of type {type(name).__name__}; expected a name or an ExportFormat")
    if name not in FORMATS:
        expected = f"expected one of {', '.join(FORMATS)}, or the package.module:name of an ExportFormat"
        raise HagoError(f"unknown export format {name!r}; {expected}.{did_you_mean(name, FORMATS)}")
    return FORMATS[name]


def request_export(
    form: ExportFormat,
    plan: Plan,
    strategy: Strategy,
    path: Path,
    batches: Batches | None,
    options: Mapping[str, str],
    figures: NodeFigures = MappingProxyType({}),
) -> ExportRequest:
    """Make the request of an export: check the options, and set those not given to their defaults.

    Raises:
        HagoError: the format has no such option, or the option cannot have this value; or there are figures, which the
            format does not show.
    """
    if figures and not form.shows_figures:
        raise HagoError(f"export format {form.name!r} shows no figures of nodes; leave figures out")
    by_name = {option.name: option for option in form.options}
    for name, value in options.items():
        if name not in by_name:
            expected = f"it has {', '.join(by_name)}" if by_name else "it has none"
            raise HagoError(f"export format {form.name!r} has no option {name!r}; {expected}")
        if value not in by_name[name].choices:
            expected = f"expected one of {', '.join(by_name[name].choices)}"
            raise HagoError(f"option {name!r} of export format {form.name!r} is {value!r}; {expected}")
    values = {option.name: options.get(option.name, option.default) for option in form.options}
    return ExportRequest(plan, strategy, path, batches, values, figures)


def write_files(form: ExportFormat, request: ExportRequest) -> ExportResult:
    """Write the files of a request.

    Raises:
        HagoError: the format refuses the Plan; or a format of the user raised, or did not return an ExportResult.
    """
    return _call(form, "write", lambda: form.write(request), ExportResult)


def check_files(form: ExportFormat, request: ExportRequest, written: ExportResult) -> ExportCheck:
    """Run the files that `write_files` wrote, and compare them with the integer model.

    Raises:
        HagoError: the format has no check, or the engine that runs its files is not installed or refuses them; or as
            in `write_files`.
    """
    check = form.check
    if check is None:
        raise HagoError(f"export format {form.name!r} has no check: nothing here runs its files")
    return _call(form, "check", lambda: check(request, written), ExportCheck)


def _call(form: ExportFormat, function: str, call: Callable[[], Any], expected: type[_Result]) -> _Result:
    """Call a function of a format. Any error of a format that is not hago's becomes a HagoError with its cause."""
    try:
        result = call()
    except Exception as error:
        if isinstance(error, HagoError) or form in FORMATS.values():
            raise
        raise HagoError(f"{function} of export format {form.name!r} raised {one_line(error)}") from error
    if not isinstance(result, expected):
        returned = f"returned an object of type {type(result).__name__}"
        raise HagoError(f"{function} of export format {form.name!r} {returned}; expected an {expected.__name__}")
    return result


# ---------------------------------------------------------------- onnx
def _write_onnx(request: ExportRequest) -> ExportResult:
    path, form = request.path.with_name(f"{request.path.name.removesuffix('.onnx')}.onnx"), request.options["form"]
    file = make_onnx(request.plan, form)
    write_onnx(file, path)
    opsets = {o.domain or "onnx": o.version for o in file.model.opset_import}
    listed = ", ".join(f"{domain} {opset}" for domain, opset in opsets.items())
    text = f"onnx  {path}  ({form} form, opset {listed}, {counted(len(file.model.graph.node), 'node')})"
    return ExportResult(text, {"path": str(path), "form": form, "opsets": opsets}, file)


def _check_onnx(request: ExportRequest, written: ExportResult) -> ExportCheck:
    engine = request.options["engine"]
    if engine == "openvino":
        openvino_if_no_crash(written.content.model)
    result = check_onnx(written.content, request.plan, request.inputs(), ENGINES[engine], engine)
    return ExportCheck(result.tolerable, str(result), result.to_json())


# ---------------------------------------------------------------- tpu-mlir
def _write_tpu_mlir(request: ExportRequest) -> ExportResult:
    if request.strategy.corrections.of_graph or request.strategy.made_by.get("equalized"):
        raise HagoError(
            "the strategy's ranges are those of a rotated, split or equalized model, and TPU-MLIR quantizes the model "
            "as it is; make the strategy without: corrections=['rounding', 'bias'] (--corrections rounding)"
        )
    observed = None if request.batches is None else observed_ranges(request.plan, request.inputs())
    tables = make_tables(request.plan, request.strategy.bits, observed)
    paths = [request.path.with_name(f"{request.path.name}_{kind}") for kind in ("cali_table", "qtable")]
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
        *_tpu_mlir_warnings(tables),
    ]
    return ExportResult("\n".join(lines), values, tables)


def _tpu_mlir_warnings(tables: Tables) -> list[str]:
    """Lines on tensors whose row differs from the Plan or is missing, and on bits that the tables cannot express."""
    warnings = []
    if tables.without_range:
        names = ", ".join(tables.without_range)
        warnings.append(f"no edge quantizes these, so they have no row; give --data to fill them: {names}")
    if tables.widened:
        warnings.append(f"read with several ranges here, the widest stands in the table: {', '.join(tables.widened)}")
    if tables.other_bits:
        bits = ", ".join(f"{k} ({b})" for k, b in tables.other_bits.items())
        warnings.append(f"neither 4 nor 8 bits here, run in INT8 there: {bits}")
    return warnings


# ---------------------------------------------------------------- model_explorer
def _write_model_explorer(request: ExportRequest) -> ExportResult:
    stem = request.path.name.removesuffix(".json").removesuffix(".graph")
    label = f"{stem} on {request.plan.hardware.name}"
    documents, names = {"graph": graph_collection(request.plan, label, request.strategy.model_hash)}, {"graph": "graph"}
    for name, values in {**plan_figures(request.plan), **request.figures}.items():
        kind = re.sub(r"\W+", "_", name.partition(" (")[0].lower())  # without its unit
        if kind in documents:
            raise HagoError(
                f"figure {name!r} would be written to {stem}.{kind}.json, the file of {names[kind]!r}; give it another "
                "name"
            )
        documents[kind], names[kind] = node_data(name, values), name
    paths = {kind: request.path.with_name(f"{stem}.{kind}.json") for kind in documents}
    for kind, document in documents.items():
        replace_file(paths[kind], canonical(document) + "\n")
    shown = ",".join(str(path) for kind, path in paths.items() if kind != "graph")
    command = shlex.join(["model-explorer", str(paths["graph"]), f"--node_data_paths={shown}"])
    lines = [f"{kind:11}  {path}" for kind, path in paths.items()]
    lines.append(f"show them with  {command}")
    return ExportResult("\n".join(lines), {kind: str(path) for kind, path in paths.items()}, documents)


# ---------------------------------------------------------------- the table
FORMATS: Final[Mapping[str, ExportFormat]] = {
    form.name: form
    for form in (
        ExportFormat(
            "onnx",
            "a model for ONNX Runtime and others",
            _write_onnx,
            _check_onnx,
            extra="onnx",
            options=(ExportOption("form", tuple(FORMS)), ExportOption("engine", tuple(ENGINES))),
        ),
        ExportFormat("tpu-mlir", "a calibration table and a quantize table", _write_tpu_mlir),
        ExportFormat(
            "model_explorer", "the graph and its figures for Model Explorer", _write_model_explorer, shows_figures=True
        ),
    )
}
