"""What the command line accepts, and its help texts."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from hago.calibrate.estimators import ESTIMATORS
from hago.cli.compare import compare_options
from hago.cli.export import FORMATS
from hago.cli.finetune import add_options as finetune_options
from hago.cli.search_options import add_search_options
from hago.cli.stored import run_options
from hago.cli.tables import table_options
from hago.cli.texts import EXAMPLES, TOP, USAGE
from hago.cli.values import fixed, numbers, shape, size
from hago.data_source import BATCH_SIZE
from hago.demo import HARDWARE
from hago.errors import HagoError
from hago.hardware_file import available_hardware
from hago.qat.dorefa import DOREFAS


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line, and an error like any other."""

    def error(self, message: str) -> NoReturn:
        raise HagoError(f"{message} ({self.prog} --help says more)")


def build_parser() -> argparse.ArgumentParser:
    """The parser; what it returns has `command`, `json` and the command's own attributes."""
    top = _Parser(
        prog="hago",
        description="Find, by search, how to run a neural network in low-precision integers on given hardware.",
        epilog=TOP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.set_defaults(json=False)
    top.add_argument("--version", action="version", version=f"hago {_version()}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command", title="commands")
    _search(commands)
    _quantize(commands)
    _explain(commands)
    _cost(commands)
    _sensitivity(commands)
    for name, text in (
        ("simulate", "judge a strategy on data: float against simulated"),
        ("realize", "build the integer model and check that it equals its simulation bit for bit"),
        ("inspect", "what happens in every layer: float against simulated against integer, and whose fault it is"),
        ("compare", "realizations of a strategy on the same data, node by node: our engines, ONNX engines, float"),
        ("finetune", "train a strategy further on data, without labels; continued where it was killed"),
        ("replay", "do a search or a strategy again and compare every figure"),
    ):
        _on_record(commands, name, text)
    _run(commands)
    _export(commands)
    _hardware(commands)
    _demo(commands)
    return top


def _version() -> str:
    try:
        return version("hago")
    except PackageNotFoundError:
        return "(not installed)"


def _add(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        usage=f"%(prog)s [options] {USAGE[name]}" if name in USAGE else None,
        epilog=EXAMPLES.get(name, ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Suppressed, so that a nested parser does not undo what the outer one was given.
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print the result as JSON, and nothing else"
    )
    return parser


# ---------------------------------------------------------------- groups of options
def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="package.module:callable that returns an nn.Module")
    parser.add_argument("--weights", metavar="FILE", help="its weights: .safetensors, or a state dict (.pt)")


def _data(parser: argparse.ArgumentParser, required: bool = True) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data", metavar="DATA", required=required, help="an .npz file, a folder of images, or package.module:callable"
    )
    group.add_argument("--samples", type=int, metavar="N", help="at most so many, evenly spread over the data")
    group.add_argument("--batch-size", type=int, default=BATCH_SIZE, metavar="N", help="default: %(default)s")
    group.add_argument("--size", type=size, metavar="N|HxW", help="of images: scale to cover, cut the centre")
    group.add_argument("--mean", type=numbers, default=(0.0,), metavar="M[,M,M]", help="of images, values in [0, 1]")
    group.add_argument("--std", type=numbers, default=(1.0,), metavar="S[,S,S]", help="of images")
    group.add_argument("--gray", action="store_true", help="read images with one channel")


def _quantization(
    parser: argparse.ArgumentParser, saves: str = "the strategy; default: strategies/MODEL-HARDWARE.json"
) -> None:
    _model(parser)
    _chip(parser, required=True)
    _data(parser)
    group = parser.add_argument_group("quantization")
    group.add_argument(
        "--estimator",
        metavar="NAME[:OPTIONS]",
        help=f"of thresholds: {', '.join(ESTIMATORS)}; default: mse, or power2_range where the hardware only shifts; "
        f"{' and '.join(DOREFAS)} also put weights on DoReFa-Net's levels",
    )
    _patterns(group)
    group.add_argument("--save", metavar="FILE", help=saves)


def _patterns(group: Any) -> None:
    group.add_argument(
        "--keep-float",
        action="append",
        default=[],
        metavar="PATTERN",
        help="nodes or edges that stay float, e.g. 'head.*', fc:0 or policy:dorefa; may be repeated",
    )
    group.add_argument(
        "--fix-bits",
        action="append",
        default=[],
        type=fixed,
        metavar="PATTERN=BITS",
        help="bits of edges or nodes, e.g. 'conv1:1=8'; may be repeated",
    )


def _ops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ops", metavar="NAME", help="ops of your own: package.module:name of an OpRule, or of a mapping of them"
    )


def _chip(parser: argparse.ArgumentParser, required: bool, default: str = "") -> None:
    _ops(parser)
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        required=required,
        help=f"{', '.join(available_hardware())}, or a .json file" + default,
    )


# ---------------------------------------------------------------- commands
def _search(commands: Any) -> None:
    parser = _add(commands, "search", "search for the best strategy of a model on hardware")
    _quantization(parser)
    add_search_options(parser)


def _quantize(commands: Any) -> None:
    parser = _add(commands, "quantize", "quantize without a search: the widest bits that do not overflow")
    _quantization(parser)
    table_options(parser)


def _explain(commands: Any) -> None:
    parser = _add(commands, "explain", "what will be integer, what stays float and why, before any search")
    _model(parser)
    _chip(parser, required=True)
    _data(parser, required=False)
    parser.add_argument(
        "--input-shape",
        action="append",
        type=shape,
        metavar="N,N,...[:DTYPE]",
        help="of one sample, instead of data; once for every input",
    )
    _patterns(parser)
    parser.add_argument("--cost", action="store_true", help="also what it takes at most bits, at fewest, and in float")


def _cost(commands: Any) -> None:
    parser = _add(commands, "cost", "what a strategy takes: bytes, operations, cycles and energy, node by node")
    _model(parser)
    parser.add_argument("record", metavar="STRATEGY", help="a strategy (.json)")
    _chip(parser, required=False, default="; default: what the record names")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="samples in one run; default: %(default)s")


def _sensitivity(commands: Any) -> None:
    text = "the expected loss of every choice of bits, from one forward and one backward pass"
    parser = _add(commands, "sensitivity", text)
    _quantization(parser, "the table as JSON; default: only shown")
    parser.add_argument("--objective", default="sqnr", metavar="NAME", help="what is lost; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random signs; default: %(default)s")


def _on_record(commands: Any, name: str, text: str) -> None:
    parser = _add(commands, name, text)
    _model(parser)
    record = "a strategy (.json) or a log (.jsonl)" if name == "replay" else "a strategy (.json)"
    parser.add_argument("record", metavar="LOG|STRATEGY" if name == "replay" else "STRATEGY", help=record)
    _chip(parser, required=False, default="; default: what the record names")
    _data(parser)
    if name == "realize":
        parser.add_argument("--save", metavar="FILE", help="the integer model, for 'hago run' and other processes")
        parser.add_argument("--explain", action="store_true", help="show which kernel runs each node here, and why")
    if name == "compare":
        compare_options(parser)
    if name == "finetune":
        finetune_options(parser)
    if name == "inspect":
        parser.add_argument("--csv", metavar="FILE", help="write the table there too")
        parser.add_argument("--values", action="store_true", help="show ranges, means and deviations as well")
    if name == "replay":
        parser.add_argument("--objective", metavar="NAME", help="needed where the search had a function of its own")
        parser.add_argument("--best-only", action="store_true", help="of a log, the best trial alone")


def _run(commands: Any) -> None:
    parser = _add(commands, "run", "run a stored integer model on data, without the model it was made of")
    run_options(parser)
    _ops(parser)
    _data(parser)


def _export(commands: Any) -> None:
    parser = _add(commands, "export", "write a strategy in the form that another tool reads")
    _model(parser)
    parser.add_argument("record", metavar="STRATEGY", nargs="?", help="left out where MODEL is a stored integer model")
    _chip(parser, required=False, default="; default: what the record names")
    texts = "; ".join(f"{name}: {form.text}" for name, form in FORMATS.items())
    parser.add_argument("--format", required=True, choices=tuple(FORMATS), metavar="NAME", help=texts)
    parser.add_argument("--save", metavar="PATH", help="the format adds its endings; default: exports/MODEL-HARDWARE")
    _data(parser, required=False)
    for name, form in FORMATS.items():
        form.options(parser.add_argument_group(f"of --format {name}"))


def _hardware(commands: Any) -> None:
    text = "what hardware there is, what it can run, and whether a file is right"
    actions = _add(commands, "hardware", text).add_subparsers(dest="action", required=True, metavar="action")
    _add(actions, "list", "the hardware that ships with hago")
    for name, what in (
        ("show", "every op with its dtypes, register and overflow"),
        ("check", "whether a hardware file is right; every mistake at once"),
    ):
        parser = _add(actions, name, what)
        parser.add_argument("hardware", metavar="NAME|FILE")
        _ops(parser)
    parser = _add(actions, "measure", "a copy of a CPU's hardware file with the costs of this machine")
    parser.add_argument("hardware", metavar="NAME|FILE")
    parser.add_argument("--output", required=True, metavar="FILE", help="the measured copy (.json)")
    _ops(parser)


def _demo(commands: Any) -> None:
    parser = _add(commands, "demo", "handwritten digits, from training to a checked integer model")
    parser.add_argument(
        "--out", default=".", metavar="DIR", help="where demo/, logs/ and strategies/ go; default: here"
    )
    parser.add_argument(
        "--hardware", action="append", metavar="NAME|FILE", help=f"may be repeated; default: {' and '.join(HARDWARE)}"
    )
    parser.add_argument("--budget", metavar="LIMIT", help="of each search, e.g. '20 trials'; default: none")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
