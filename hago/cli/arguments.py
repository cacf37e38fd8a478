"""What the command line accepts: the parser of every command, and its help texts."""

from __future__ import annotations

import argparse
import math
import re
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NoReturn

from hago.calibration.estimators import ESTIMATORS
from hago.cli.export import compare_options, export_options
from hago.cli.finetune import add_options as finetune_options
from hago.cli.stored import run_options
from hago.cost.cost import METRICS
from hago.data.batches import BATCH_SIZE
from hago.data.sources import EXPECTED_DATA
from hago.demo import HARDWARE
from hago.emulation.dorefa import DOREFAS
from hago.errors import HagoError
from hago.hardware.file import available_hardware
from hago.plan.strategy import Strategy
from hago.search.objective import OBJECTIVES
from hago.searchers.registry import AUTO, SEARCHERS

_DEPENDING_ON_FLOAT: Final = [metric.name for metric in METRICS.values() if metric.depends_on_float]
_FLOAT_COSTS: Final = f"{', '.join(_DEPENDING_ON_FLOAT[:-1])} or {_DEPENDING_ON_FLOAT[-1]}"
NAMED: Final = """
A model is named package.module:callable; the callable takes no arguments and returns an nn.Module. Modules
in the current folder can be imported. Data is an .npz file (arrays called as the model's inputs, or one
array; labels as y or labels), a folder of images (a subfolder per class, or none), or
package.module:callable that returns an iterable of batches."""

EXIT: Final = """
exit codes: 0 done; 1 done, and the answer is no (the replay differs, the check fails, the integer model is
not the simulated one); 2 bad input; 70 a defect of hago; 130 interrupted"""

TOP: Final = f"""
start with:
  hago demo                                  all of it on handwritten digits, in less than a minute
  hago hardware list                         what can be searched for
  hago explain zoo:net --hardware vta --input-shape 3,32,32
  hago search zoo:net --hardware vta --data calibration.npz
{NAMED}
{EXIT}"""

EXAMPLES: Final = {
    "search": """
examples:
  hago search zoo:net --weights net.safetensors --hardware x86_vnni --data calibration.npz
  hago search zoo:net --hardware my_chip.json --data images/ --size 224 --budget 10m --held-out test.npz
  hago search zoo:net --hardware vta --data data:calibration --keep-float 'head.*' --fix-bits 'conv1:1=8'
  hago search zoo:net --hardware vta --data calibration.npz --minimize weight_bytes --keep 'agreement >= 99 %'
  hago search zoo:net --hardware vta --data calibration.npz --maximize sqnr --budget-cost 'weight_bytes <= 4 MB'
  hago search zoo:net --hardware x86_vnni --data calibration.npz --finetune budget=5m

Ctrl-C ends the search with what it has found; the same command continues it. So does the same command
with a larger --budget.""",
    "quantize": """
example:
  hago quantize zoo:net --hardware arm_dot --data calibration.npz --estimator percentile:99.9
  hago quantize zoo:net --hardware arm_dot --data calibration.npz --calibration-table net_cali_table""",
    "explain": """
examples:
  hago explain zoo:net --hardware int16_accumulator --input-shape 3,32,32
  hago explain zoo:net --hardware x86_vnni --input-shape 3,32,32 --cost
  hago explain zoo:encoder --hardware x86_vnni --input-shape 32:int64 --input-shape 32:int64""",
    "sensitivity": """
example:
  hago sensitivity zoo:net --hardware vta --data calibration.npz --save sensitivity.json

The most sensitive edges come first. A search can be guided by this: --searcher sensitivity""",
    "finetune": """
example:
  hago finetune zoo:net strategies/net-vta.json --data calibration.npz --budget 5m --held-out test.npz

The float model's outputs are what is trained for, so data needs no labels. Killed at any moment, the same
command continues from its checkpoint.""",
    "simulate": """
example:
  hago simulate zoo:net strategies/net-vta.json --data test.npz""",
    "realize": """
example:
  hago realize zoo:net strategies/net-vta.json --data test.npz --samples 256 --json
  hago realize zoo:net strategies/net-vta.json --data test.npz --save net.safetensors
  hago realize zoo:net strategies/net-x86_vnni.json --data test.npz --explain

Exit code 1 says that a value differs; that would be a defect of hago.""",
    "cost": """
example:
  hago cost zoo:net strategies/net-vta.json --batch 32

What a hardware file gives no figure for is left out and named; docs/cost.md says how the rest adds up.""",
    "run": """
example:
  hago run net.safetensors --data test.npz --save outputs.npz

Every output is compared with the simulation of the stored plan; exit code 1 says that one differs.""",
    "inspect": """
example:
  hago inspect zoo:net strategies/net-vta.json --data test.npz --samples 128 --csv layers.csv""",
    "replay": """
examples:
  hago replay zoo:net logs/net-vta.jsonl --data calibration.npz
  hago replay zoo:net strategies/net-vta.json --data calibration.npz

Exit code 1 says that a figure differs in its last bit or more.""",
    "compare": """
examples:
  hago compare zoo:net strategies/net-onnxruntime_cpu.json --data test.npz --samples 64
  hago compare zoo:net strategies/net-x86_vnni.json --data test.npz --realizations fast,onnxruntime --json

Exit code 1 says that the simulator or the fast engine differs from the reference; that would be a defect of hago.""",
    "export": """
examples:
  hago export zoo:net strategies/net-x86_vnni.json --format tpu-mlir --data calibration.npz
  hago export zoo:net strategies/net-onnxruntime_cpu.json --format onnx --check --data calibration.npz

With --check, exit code 1 says that the engine's integers are not ours: a difference of more than one quantum,
or of more than one value in 10,000 of a node.""",
    "hardware": """
examples:
  hago hardware list
  hago hardware show x86_vnni
  hago hardware check my_chip.json
  hago hardware measure x86_vnni --output this_machine.json

Exit code 1 says that a file is wrong; every mistake is listed with its place.""",
    "demo": """
The demo leaves its model, data, logs and strategies behind, to try the other commands on, e.g.
  hago inspect hago.demo:DigitNet strategies/demo-x86_vnni.json --weights demo/weights.pt --data demo/test.npz""",
}


ON_STRATEGY: Final = "MODEL STRATEGY --data DATA"
USAGE: Final = {
    "search": "MODEL --hardware NAME|FILE --data DATA",
    "quantize": "MODEL --hardware NAME|FILE --data DATA",
    "explain": "MODEL --hardware NAME|FILE (--data DATA | --input-shape SHAPE)",
    "cost": "MODEL STRATEGY",
    "sensitivity": "MODEL --hardware NAME|FILE --data DATA",
    "simulate": ON_STRATEGY,
    "realize": ON_STRATEGY,
    "run": "FILE --data DATA",
    "inspect": ON_STRATEGY,
    "compare": ON_STRATEGY,
    "finetune": ON_STRATEGY,
    "export": "(MODEL STRATEGY | FILE) --format NAME",
    "replay": "MODEL LOG|STRATEGY --data DATA",
}


# ---------------------------------------------------------------- values of options


def fail(text: str) -> NoReturn:
    """Refuse a value."""
    raise argparse.ArgumentTypeError(text)


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        fail(f"got {text!r}, expected numbers with commas between, e.g. 0.485,0.456,0.406")
    return values if all(map(math.isfinite, values)) else fail(f"got {text!r}, expected finite numbers")


def size(text: str) -> tuple[int, int]:
    """Height and width."""
    parts: Sequence[str] = text.lower().split("x")
    if len(parts) > 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        fail(f"got {text!r}, expected a size such as 224 or 96x128 (height x width)")
    return int(parts[0]), int(parts[-1])


def byte_count(text: str) -> int:
    """A size of memory."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|k|M|G)i?B?", text.strip(), re.ASCII | re.IGNORECASE)
    if not match:
        fail(f"got {text!r}, expected a size such as 500MB or 2GB")
    return int(float(match[1]) * 1024 ** " kmg".index(match[2].lower() or " "))


def share(text: str) -> float:
    """A number between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        fail(f"got {text!r}, expected a number between 0 and 1")
    return value if 0.0 < value < 1.0 else fail(f"got {text!r}, expected a number between 0 and 1")


def shape(text: str) -> tuple[tuple[int, ...], str]:
    """The shape of one sample, and its dtype."""
    sizes, _, dtype = text.partition(":")
    parts = [p for p in sizes.split(",") if p]
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        fail(f"got {text!r}, expected the shape of one sample, e.g. 3,32,32 or 32:int64")
    return tuple(map(int, parts)), dtype or "float32"


def fixed(text: str) -> tuple[str, int]:
    """A pattern and its bits."""
    pattern, _, bits = text.rpartition("=")
    if not pattern or not bits.isdecimal():
        fail(f"got {text!r}, expected PATTERN=BITS, e.g. 'conv1:1=8'")
    return pattern, int(bits)


# ---------------------------------------------------------------- tables of TPU-MLIR

#: Nodes that a line lists before it says "and n more".
_LISTED: Final = 5


def table_options(parser: Any) -> None:
    """The options that give a search the tables of another tool."""
    group = parser.add_argument_group("tables of TPU-MLIR")
    group.add_argument("--calibration-table", metavar="FILE", help="ranges by node; those it lacks are estimated")
    group.add_argument("--quantize-table", metavar="FILE", help="modes by node: which stay float, or have 8 or 4 bits")


def tables_of(args: Namespace) -> dict[str, Any]:
    """The tables, as the public calls take them."""
    return {"thresholds": args.calibration_table, "modes": args.quantize_table}


def table_lines(strategy: Strategy) -> list[str]:
    """A line that names the nodes without a row, where a table lacks any."""
    missing = strategy.made_by.get("estimated")
    if not missing:
        return []
    more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
    return [f"  no row in the calibration table, so estimated: {', '.join(missing[:_LISTED])}{more}"]


# ---------------------------------------------------------------- options of `hago search`


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """The searcher, its goal and budget, and what it writes and runs on."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--searcher",
        default=AUTO,
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"{AUTO} (limited where costs are, else gradient), "
        f"{', '.join(SEARCHERS)}, or package.module:callable; default: %(default)s",
    )
    group.add_argument(
        "--objective",
        default="sqnr",
        metavar="NAME",
        help=f"{', '.join(OBJECTIVES)}, or package.module:callable; default: %(default)s",
    )
    _goal(parser)
    table_options(parser)
    _course(group)
    _outcome(group)
    _machine(group)


def _course(group: argparse._ArgumentGroup) -> None:
    """How long a search goes on, and where."""
    group.add_argument("--budget", metavar="LIMIT", help="'200 trials', '10m', '50 forwards'; default: none")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all randomness; default: %(default)s")
    group.add_argument("--log", metavar="FILE", help="default: logs/MODEL-HARDWARE.jsonl; continued if it is there")
    group.add_argument("--reuse", action="append", metavar="LOG", help="equal plans in this log are not tried again")
    group.add_argument(
        "--search-topology",
        action=argparse.BooleanOptionalAction,
        help=f"let nodes be float where the hardware takes both; default: if {_FLOAT_COSTS} is in use",
    )
    group.add_argument("--no-resume", action="store_true", help="refuse a log that is there already")
    group.add_argument(
        "--race",
        type=share,
        nargs="?",
        const=0.01,
        metavar="ALPHA",
        help="give a point up once its samples say that it is worse than the best so far; a point that is not is "
        "given up with probability ALPHA at most (%(const)s where only --race is given)",
    )


def _outcome(group: argparse._ArgumentGroup) -> None:
    """What becomes of the points that were found."""
    group.add_argument("--held-out", metavar="DATA", help="more data, to report the best strategy on")
    group.add_argument("--allow-overflow", action="store_true", help="take a strategy that overflowed if none did not")
    group.add_argument(
        "--front", metavar="FILE", help="the points that none beats in both objective and cost; default: beside --save"
    )
    group.add_argument(
        "--finetune",
        nargs="?",
        const="",
        metavar="NAME=VALUE,...",
        help="train what was found as the last stage, and keep it where it is better, e.g. 'budget=5m' or "
        "'scheme=dorefa_relative,steps=400'; the trained weights go beside --save",
    )


def _machine(group: argparse._ArgumentGroup) -> None:
    """What points are scored on."""
    group.add_argument(
        "--executor", metavar="WHERE", help="processes:N, threads:N or dask://host:port; default: this process alone"
    )
    group.add_argument(
        "--cache",
        type=byte_count,
        metavar="SIZE",
        help="of what each process keeps of earlier trials, e.g. 2GB; default: a quarter of the free memory",
    )


def _goal(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("goal")
    group.add_argument("--maximize", metavar="NAME", help="the same as --objective")
    group.add_argument("--minimize", metavar="COST", help=f"make a cost least instead: {', '.join(METRICS)}")
    for option, figure, example in (
        ("--keep", "measure", "'agreement >= 99 %%'"),
        ("--budget-cost", "cost", "'weight_bytes <= 4 MB'"),
    ):
        text = f"a limit on a {figure}, e.g. {example}; may be repeated"
        group.add_argument(option, action="append", metavar="LIMIT", help=text)


# ---------------------------------------------------------------- the parser


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
    group.add_argument("--data", metavar="DATA", required=required, help=EXPECTED_DATA)
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
        help=f"of thresholds: {', '.join(ESTIMATORS)}, or package.module:name; default: mse, or power2_range where the "
        "hardware only shifts; "
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
        parser.add_argument(
            "--objective", metavar="NAME", help="package.module:name, needed where the search had its own"
        )
        parser.add_argument(
            "--estimator", metavar="NAME", help="package.module:name, needed where the search had its own"
        )
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
    export_options(parser)
    _data(parser, required=False)


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
