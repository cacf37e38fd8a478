"""The parser of the command line: the arguments, examples and help texts of every command."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from hago.cli.choices import (
    AUTO,
    BATCH_SIZE,
    BATCH_SIZES,
    CORRECTIONS,
    DEMO_HARDWARE,
    DOREFAS,
    EFFORTS,
    ENGINES,
    ESTIMATORS,
    EXPECTED_DATA,
    EXPORT_FORMATS,
    FLOAT_METRICS,
    LOSSES,
    METRICS,
    NO_MEAN,
    OBJECTIVES,
    POINTS,
    REALIZATIONS,
    ROUNDS,
    SEARCHERS,
    TRAINING_SCHEMES,
    UNIT_STD,
    TrainingDefaults,
)
from hago.cli.completion import SHELLS, PrintCompletion
from hago.errors import HagoError
from hago.shipped_hardware import shipped_hardware
from hago.version import VERSION

_FLOAT_COSTS: Final = f"{', '.join(FLOAT_METRICS[:-1])} or {FLOAT_METRICS[-1]}"
NAMED: Final = f"""
A model is given as package.module:callable; the callable takes no arguments and returns an nn.Module. Modules
in the current folder can be imported. Data is {EXPECTED_DATA};
the callable returns an iterable of batches. An .npz file holds arrays named like the model's inputs, or a single
array, and labels as y or labels; a folder of images has a subfolder per class, or none."""

EXIT: Final = """
exit codes: 0 success; 1 the command ran and its check failed (the replay differs, a file is invalid, the integer
model differs from its simulation); 2 bad input; 70 a defect of hago; 130 interrupted"""

TOP: Final = f"""
start with:
  hago demo                                  the whole workflow on handwritten digits, in less than a minute
  hago hardware list                         the hardware that ships with hago
  hago explain zoo:net --hardware vta --input-shape 3,32,32
  hago search zoo:net --hardware vta --data calibration.npz
{NAMED}
{EXIT}"""

_WHEN: Final = "\n  ".join(
    f"{name:11}  {when}"
    for name, when in (
        (AUTO, "unless you know better: limited if a cost is minimized or limited, else gradient"),
        *SEARCHERS.items(),
    )
)
EXAMPLES: Final = {
    "search": f"""
searchers, and when to take which:
  {_WHEN}

examples:
  hago search zoo:net --hardware x86_vnni --data calibration.npz --save strategies/net-x86_vnni.json
  hago search zoo:net --hardware my_chip.json --data images/ --size 224 --budget 10m --held-out test.npz
  hago search zoo:net --hardware vta --data data:calibration --keep-float 'head.*' --fix-bits 'conv1:1=8'
  hago search zoo:net --hardware vta --data calibration.npz --minimize size --keep 'accuracy >= float - 0.5 %'
  hago search zoo:net --weights net.pt --hardware vta --data calibration.npz --budget-cost 'size <= 60 %'
  hago search zoo:net --hardware x86_vnni --data calibration.npz --finetune budget=5m

After Ctrl-C, the log and the best strategy so far are kept. The same command continues the search, also with a
larger --budget.""",
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

The most sensitive edges are listed first. 'hago search --searcher sensitivity' is guided by this table.""",
    "finetune": """
example:
  hago finetune zoo:net strategies/net-vta.json --data calibration.npz --budget 5m --held-out test.npz

The model is trained to reproduce the outputs of the float model, so the data needs no labels. After an interruption,
the same command continues from the checkpoint.""",
    "evaluate": """
example:
  hago evaluate zoo:net strategies/net-vta.json --data calibration.npz --held-out test.npz

The float model, one-shot quantization and the strategy are measured on the same samples. One-shot quantization needs
the data on which the strategy was calibrated, as --data. 'hago simulate' is the older name of this command.""",
    "simulate": """
example:
  hago simulate zoo:net strategies/net-vta.json --data test.npz

This is the older name of 'hago evaluate'.""",
    "realize": """
example:
  hago realize zoo:net strategies/net-vta.json --data test.npz --samples 256 --json
  hago realize zoo:net strategies/net-vta.json --data test.npz --save net.safetensors
  hago realize zoo:net strategies/net-vta.front.json --trial 27 --data test.npz
  hago realize zoo:net strategies/net-x86_vnni.json --data test.npz --explain

Exit code 1 means that a value differs, which would be a defect of hago.""",
    "cost": """
example:
  hago cost zoo:net strategies/net-vta.json --batch 32

Costs for which the hardware file gives no figures are left out and listed; see docs/cost.md.""",
    "bench": """
examples:
  hago bench zoo:net strategies/net-x86_vnni.json --data test.npz
  hago bench zoo:net strategies/net-x86_vnni.json --data test.npz --batches 1,8,64 --rounds 21

The float model is the imported network in eager torch, in float32. Both run with the threads that OMP_NUM_THREADS
sets, in interleaved rounds; 'hago realize --explain' says which kernel runs each node, and why. The integer model
takes the largest instruction set that the processor has. On a processor with AVX-512, HAGO_MAX_CPU_ISA=AVX2 times it
as one without runs it.""",
    "run": """
example:
  hago run net.safetensors --data test.npz --save outputs.npz

Every output is compared with the simulation of the stored plan; exit code 1 means that one differs.""",
    "inspect": """
example:
  hago inspect zoo:net strategies/net-vta.json --data test.npz --samples 128 --csv layers.csv""",
    "replay": """
examples:
  hago replay zoo:net logs/net-vta.jsonl --data calibration.npz
  hago replay zoo:net strategies/net-vta.json --data calibration.npz

Exit code 1 means that a figure differs, if only in its last bit.""",
    "report": """
examples:
  hago report zoo:net logs/net-vta.jsonl strategies/net-vta.json --data calibration.npz --held-out test.npz
  hago report zoo:net strategies/net-vta.front.json --data calibration.npz --save net.html
  hago report zoo:net strategies/8_bits.json strategies/mixed.json --data test.npz

The page is one file that needs no network: verdict, front, network, search, and the commands that make it again.
Without --data, it has what is known without running the network. Points that are shown in full are the strategies that
are given, and then points of the front.""",
    "compare": """
examples:
  hago compare zoo:net strategies/8_bits.json strategies/mixed.json --data test.npz
  hago compare zoo:net strategies/net-my_dsp.json strategies/net-vta.json --data test.npz --hardware my_dsp.json
  hago compare zoo:net strategies/net-onnxruntime_cpu.json --data test.npz --samples 64
  hago compare zoo:net strategies/net-x86_vnni.json --data test.npz --realizations fast,onnxruntime --json

Two strategies are measured sample by sample, with paired intervals; their bits and costs are listed side by side. Of
one strategy, realizations are compared: exit code 1 means that the simulator or the fast engine differs from the
reference, which would be a defect of hago. --hardware is that of the strategies whose hardware it is; the others have
the hardware that their files name.""",
    "export": """
examples:
  hago export zoo:net strategies/net-x86_vnni.json --format tpu-mlir --data calibration.npz
  hago export zoo:net strategies/net-onnxruntime_cpu.json --format onnx --check --data calibration.npz
  hago export zoo:net strategies/net-vta.json --format model_explorer --data test.npz --save exports/net

No .tflite file is written: the hardware tflite stands for the arithmetic of its kernels. An ONNX file holds the
integers of a strategy for onnxruntime_cpu, openvino_cpu or another chip whose arithmetic ONNX can express.

With --check, exit code 1 means that the integers of the engine differ from hago's: by more than one quantum, or in
more than one of 10,000 values of a node.""",
    "hardware": """
examples:
  hago hardware list
  hago hardware show x86_vnni
  hago hardware new my_chip --from cmsis_nn
  hago hardware check my_chip.json
  hago hardware measure x86_vnni --output this_machine.json

Exit code 1 means that a file has mistakes; each is listed with its JSON path.""",
    "doctor": """
example:
  hago doctor --json

The kernels are built if they have not been, and tested. What is missing is no error: the exit code is 0.""",
    "demo": """
The demo keeps its model, data, logs and strategies, on which the other commands can be tried, e.g.
  hago inspect hago.demo:DigitNet strategies/demo-x86_vnni.json --weights demo/weights.pt --data demo/test.npz""",
}


#: The arguments of commands that measure a strategy on data.
ON_STRATEGY: Final = "MODEL STRATEGY --data DATA"
USAGE: Final = {
    "search": "MODEL --hardware NAME|FILE --data DATA",
    "quantize": "MODEL --hardware NAME|FILE --data DATA",
    "explain": "MODEL --hardware NAME|FILE (--data DATA | --input-shape SHAPE)",
    "cost": "MODEL STRATEGY",
    "sensitivity": "MODEL --hardware NAME|FILE --data DATA",
    "evaluate": ON_STRATEGY,
    "simulate": ON_STRATEGY,
    "realize": ON_STRATEGY,
    "bench": ON_STRATEGY,
    "run": "FILE --data DATA",
    "inspect": ON_STRATEGY,
    "compare": "MODEL STRATEGY [STRATEGY] --data DATA",
    "finetune": ON_STRATEGY,
    "export": "(MODEL STRATEGY | FILE) --format NAME",
    "replay": "MODEL LOG|STRATEGY --data DATA",
    "report": "MODEL LOG|STRATEGY|FRONT...",
}


# ---------------------------------------------------------------- values of options


def fail(text: str) -> NoReturn:
    """Refuse the value of an option; argparse adds the name of the option to the message."""
    raise argparse.ArgumentTypeError(text)


def correction(text: str) -> str:
    """The name of a correction, or "reconstruction:STEPS"."""
    name, colon, steps = text.partition(":")
    is_count = name == "reconstruction" and steps.isascii() and steps.isdigit() and int(steps) > 0
    if name not in ("none", *CORRECTIONS) or (colon and not is_count):
        fail(
            f"got {text!r}, expected none, {', '.join(CORRECTIONS)}, or reconstruction:STEPS with a whole number of "
            "steps of training of every block"
        )
    return text


def numbers(text: str) -> tuple[float, ...]:
    """Parse numbers that are separated by commas."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        fail(f"got {text!r}, expected numbers separated by commas, e.g. 0.485,0.456,0.406")
    return values if all(map(math.isfinite, values)) else fail(f"got {text!r}, expected finite numbers")


def counts(text: str) -> tuple[int, ...]:
    """Parse positive integers that are separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        fail(f"got {text!r}, expected positive integers separated by commas, e.g. 1,32")
    return tuple(map(int, parts))


def positive(text: str) -> int:
    """Parse a positive integer."""
    return int(text) if text.isdecimal() and int(text) > 0 else fail(f"got {text!r}, expected a positive integer")


def size(text: str) -> tuple[int, int]:
    """Parse a height and a width."""
    parts: Sequence[str] = text.lower().split("x")
    if len(parts) > 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        fail(f"got {text!r}, expected a size such as 224 or 96x128 (height x width)")
    return int(parts[0]), int(parts[-1])


def byte_count(text: str) -> int:
    """Parse a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|k|M|G)i?B?", text.strip(), re.ASCII | re.IGNORECASE)
    if not match:
        fail(f"got {text!r}, expected a size such as 500MB or 2GB")
    return int(float(match[1]) * 1024 ** " kmg".index(match[2].lower() or " "))


def share(text: str) -> float:
    """Parse a number between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        fail(f"got {text!r}, expected a number between 0 and 1")
    return value if 0.0 < value < 1.0 else fail(f"got {text!r}, expected a number between 0 and 1")


def shape(text: str) -> tuple[tuple[int, ...], str]:
    """Parse the shape of one sample, and its dtype."""
    sizes, _, dtype = text.partition(":")
    parts = [p for p in sizes.split(",") if p]
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        fail(f"got {text!r}, expected the shape of one sample, e.g. 3,32,32 or 32:int64")
    return tuple(map(int, parts)), dtype or "float32"


def fixed(text: str) -> tuple[str, int]:
    """Parse a pattern and its bits."""
    pattern, _, bits = text.rpartition("=")
    if not pattern or not bits.isdecimal():
        fail(f"got {text!r}, expected PATTERN=BITS, e.g. 'conv1:1=8'")
    return pattern, int(bits)


# ---------------------------------------------------------------- options of `hago search` and `hago quantize`


def table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for tables of TPU-MLIR."""
    group = parser.add_argument_group("tables of TPU-MLIR")
    group.add_argument("--calibration-table", metavar="FILE", help="ranges of nodes; other nodes are estimated")
    group.add_argument(
        "--quantize-table", metavar="FILE", help="modes of nodes, which keep them float or give them 8 or 4 bits"
    )


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the searcher, the goal, the budget, the files to write, and where the search runs."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--searcher",
        default=AUTO,
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"{AUTO} (limited if a cost is minimized or limited, else gradient), "
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
    """Add the options of the length of a search, its log, and the choices that it makes."""
    group.add_argument(
        "--budget",
        metavar="LIMIT",
        help="'200 trials', '10m' (minutes), '50 forwards'; a number alone, as in 10, is of trials; default: none",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all randomness; default: %(default)s")
    group.add_argument(
        "--log",
        metavar="FILE",
        help="an existing log is continued; default: logs/MODEL-HARDWARE-SEARCHER-HASH.jsonl, where HASH is of all "
        "options on which the trials depend, so that the same command continues and another begins its own; a model "
        "with other weights begins one with its hash in the name",
    )
    group.add_argument(
        "--reuse", action="append", metavar="LOG", help="take the scores of equal plans from this log; may be repeated"
    )
    group.add_argument(
        "--search-topology",
        action=argparse.BooleanOptionalAction,
        help="choose between integers and float for nodes that the hardware runs in both; default: if the goal uses "
        f"{_FLOAT_COSTS}",
    )
    group.add_argument("--no-resume", action="store_true", help="fail if the log exists already")
    group.add_argument(
        "--race",
        type=share,
        nargs="?",
        const=0.01,
        metavar="ALPHA",
        help="stop evaluating a point once its samples show that it is worse than the best so far; ALPHA is the "
        "largest probability of stopping a point that is not worse (%(const)s if --race has no value)",
    )


def _outcome(group: argparse._ArgumentGroup) -> None:
    """Add the options of the results."""
    _held_out(group)
    group.add_argument("--allow-overflow", action="store_true", help="accept a strategy that overflowed if all did")
    group.add_argument(
        "--front", metavar="FILE", help="the Pareto front of objective and cost; default: next to the strategy"
    )
    page = "a page for the browser, kept current while the search runs; see 'hago report'"
    group.add_argument("--report", metavar="FILE", help=page)
    group.add_argument(
        "--finetune",
        nargs="?",
        const="",
        metavar="NAME=VALUE,...",
        help="train the best strategy at the end, and keep the result if it is better, e.g. 'budget=5m' or "
        "'scheme=dorefa_relative,steps=400'; the trained weights are written next to the strategy",
    )
    _watched(group)
    group.add_argument(
        "--optuna",
        metavar="URL",
        help="keep the trials in a study of Optuna for its dashboard, e.g. sqlite:///study.db",
    )
    group.add_argument(
        "--optuna-artifacts", metavar="FOLDER", help="where the front and its strategies are kept as artifacts of it"
    )


def _watched(group: argparse._ArgumentGroup) -> None:
    """Add the options of programs in which a run can be watched."""
    group.add_argument("--tensorboard", metavar="FOLDER", help="write the figures of the run for TensorBoard")
    group.add_argument("--wandb", metavar="PROJECT", help="log the figures of the run to Weights & Biases")


def _held_out(
    group: argparse.ArgumentParser | argparse._ArgumentGroup,
    text: str = "further data, read as --data is, on which the answer is reported, too",
) -> None:
    """Add the options of further data."""
    group.add_argument("--held-out", metavar="DATA", help=text)
    group.add_argument(
        "--held-out-samples", type=int, metavar="N", help="use at most N samples of --held-out; default: all of them"
    )


def _machine(group: argparse._ArgumentGroup) -> None:
    """Add the options of where points are scored."""
    group.add_argument(
        "--executor", metavar="WHERE", help="processes:N, threads:N or dask://host:port; default: this process"
    )
    group.add_argument(
        "--cache",
        type=byte_count,
        metavar="SIZE",
        help="memory for values of earlier trials in each process, e.g. 2GB; default: a quarter of the free memory",
    )


def _goal(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("goal")
    group.add_argument("--maximize", metavar="NAME", help="the same as --objective")
    group.add_argument("--minimize", metavar="COST", help=f"minimize a cost instead: size or {', '.join(METRICS)}")
    for option, figure, example in (
        ("--keep", "measure", "'agreement >= 99 %%' or 'accuracy >= float - 0.5 %%'"),
        ("--budget-cost", "cost", "'size <= 4 MB', or 'size <= 60 %%' or 'latency <= 0.8x' of the widest bits"),
    ):
        text = f"a limit on a {figure}, e.g. {example}; may be repeated"
        group.add_argument(option, action="append", metavar="LIMIT", help=text)


# ---------------------------------------------------------------- the parser


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors as HagoErrors of one line, which `main` prints."""

    def error(self, message: str) -> NoReturn:
        raise HagoError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser. The namespace that it returns has `command`, `json` and the arguments of the command."""
    top = _Parser(
        prog="hago",
        description="Find, by search, how to run a neural network in low-precision integers on given hardware.",
        epilog=TOP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.set_defaults(json=False)
    top.add_argument("--version", action="version", version=f"hago {VERSION}")
    top.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        default=argparse.SUPPRESS,
        metavar="SHELL",
        help=f"print the script that completes words in a shell: {', '.join(SHELLS)}",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="command", title="commands")
    _search(commands)
    _quantize(commands)
    _explain(commands)
    _cost(commands)
    _sensitivity(commands)
    measured = "measure a strategy on data: the float model, one-shot quantization and the strategy side by side"
    _held_out(_on_record(commands, "evaluate", measured))
    _held_out(_on_record(commands, "simulate", "the older name of 'evaluate'"))
    _realize(commands)
    _bench(commands)
    _inspect(commands)
    compared = "compare two strategies on data, or realizations of one: hago's engines, ONNX engines, float"
    _comparison(_on_record(commands, "compare", compared, several_chips=True))
    trained = "train a strategy further on data without labels; continues after an interruption"
    _training(_on_record(commands, "finetune", trained))
    _replay(commands)
    _report(commands)
    _run(commands)
    _export(commands)
    _hardware(commands)
    _demo(commands)
    _add(commands, "doctor", "show what this machine has: processor, kernels, compiler, versions, optional packages")
    return top


def _add(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        usage=f"%(prog)s [options] {USAGE[name]}" if name in USAGE else None,
        epilog=EXAMPLES.get(name, ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # no default: that of a nested parser would overwrite the value that the outer parser read
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
    group.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="use at most N samples of --data, evenly spread over it, or the first N of a callable",
    )
    group.add_argument("--batch-size", type=int, default=BATCH_SIZE, metavar="N", help="default: %(default)s")
    group.add_argument("--size", type=size, metavar="N|HxW", help="scale images to this size and crop them")
    group.add_argument(
        "--mean", type=numbers, default=NO_MEAN, metavar="M[,M,M]", help="mean of images, whose values are in [0, 1]"
    )
    group.add_argument("--std", type=numbers, default=UNIT_STD, metavar="S[,S,S]", help="standard deviation of images")
    group.add_argument("--gray", action="store_true", help="read images with one channel")


def _quantization(
    parser: argparse.ArgumentParser,
    saves: str = "the strategy; default: strategies/MODEL-HARDWARE-SEARCHER-HASH.json, or beside --log with its name",
) -> None:
    _model(parser)
    _chip(parser, required=True)
    _data(parser)
    group = parser.add_argument_group("quantization")
    group.add_argument(
        "--estimator",
        metavar="NAME[:OPTIONS]",
        help=f"estimator of thresholds: {', '.join(ESTIMATORS)}, or package.module:name; default: mse, or "
        "power2_range if the hardware only shifts; "
        f"{' and '.join(DOREFAS)} also put weights on DoReFa-Net's levels",
    )
    _patterns(group)
    group.add_argument(
        "--corrections",
        action="append",
        type=correction,
        metavar="NAME",
        help="what may be changed in the model before it is quantized, where that brings the outputs closer to the "
        f"float model's: none, {', '.join(CORRECTIONS)}, or reconstruction:STEPS; by default those of the effort; may "
        "be repeated",
    )
    group.add_argument(
        "--effort",
        choices=EFFORTS,
        help="how much is done where other options do not say: fast, corrections of about ten forward passes, or with "
        "costs a search on 64 samples at most; good, the default; best, until nothing improves",
    )
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
        help="bits of edges or nodes, e.g. 'conv1:1=8', or '*.weight=4' for all weights; may be repeated; of several "
        "that match, the most specific counts",
    )


def _ops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ops", metavar="NAME", help="ops of your own: package.module:name of an OpRule, or of a mapping of them"
    )


def _chip(parser: argparse.ArgumentParser, required: bool, several: bool = False) -> None:
    """Add the hardware.

    Args:
        several: whether it may be given more than once, for records of different hardware.
    """
    _ops(parser)
    default = "" if required else "; default: what the record names"
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        required=required,
        action="append" if several else "store",
        help=f"{', '.join(shipped_hardware())}, or a hardware file (.json){default}"
        + ("; once per strategy that needs it" if several else ""),
    )


# ---------------------------------------------------------------- options of one command
def _comparison(parser: argparse.ArgumentParser) -> None:
    """Add the second strategy, and the options that only `hago compare` takes."""
    names = ",".join(REALIZATIONS)
    parser.add_argument(
        "other", metavar="STRATEGY", nargs="?", help="compare the first strategy with this one, not its realizations"
    )
    group = parser.add_argument_group("of one strategy")
    group.add_argument(
        "--realizations", metavar="NAME,...", help=f"some of {names}, which is the default; what cannot run is skipped"
    )
    group.add_argument("--base", metavar="NAME", help="compare with this; default: reference")
    group = parser.add_argument_group("of two strategies")
    group.add_argument(
        "--objective", metavar="NAME", help="compare it, too; default: what the strategies were searched for"
    )


def _exporting(parser: argparse.ArgumentParser) -> None:
    """Add the options that only `hago export` takes, and of every format that ships with hago in a group of its own."""
    texts = "; ".join(f"{name}: {form.text}" for name, form in EXPORT_FORMATS.items())
    parser.add_argument(
        "--format", required=True, metavar="NAME|MODULE:NAME", help=f"{texts}; or an ExportFormat of your own"
    )
    parser.add_argument(
        "--save", metavar="PATH", help="the format adds its endings; default: exports/MODEL-HARDWARE-FORMAT-HASH"
    )
    parser.add_argument(
        "--check", action="store_true", help="run the files on --data and compare with the integer model"
    )
    for name, form in EXPORT_FORMATS.items():
        group = parser.add_argument_group(f"of --format {name}") if form.options else parser
        for option, choices in form.options.items():
            group.add_argument(f"--{option}", choices=choices, default=choices[0], help="default: %(default)s")


def _training(parser: argparse.ArgumentParser) -> None:
    """Add the options that only `hago finetune` takes."""
    default = TrainingDefaults()
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=int, metavar="N", help="default: 400, or what the budget allows")
    group.add_argument("--budget", metavar="TIME", help="e.g. 5m")
    group.add_argument(
        "--lr", type=float, default=default.lr, help="of weights, relative to their size; default: %(default)s"
    )
    group.add_argument(
        "--range-lr", type=float, default=default.range_lr, metavar="LR", help="of thresholds; default: %(default)s"
    )
    group.add_argument(
        "--step-samples", type=int, default=default.batch_size, metavar="N", help="of one step; default: %(default)s"
    )
    group.add_argument(
        "--objective",
        default=default.objective,
        metavar="NAME",
        help=f"{', '.join(LOSSES)}, or package.module:callable; default: %(default)s, which needs no labels",
    )
    group.add_argument(
        "--scheme",
        default=default.scheme,
        metavar="NAME",
        help=f"{', '.join(TRAINING_SCHEMES)}; default: %(default)s",
    )
    group.add_argument(
        "--seed", type=int, default=default.seed, metavar="N", help="of all randomness; default: %(default)s"
    )
    _held_out(group, "further data, read as --data is, to measure on before and after")
    group.add_argument(
        "--save", metavar="FILE", help="the strategy; default: strategies/MODEL-HARDWARE-finetuned-HASH.json"
    )
    group.add_argument("--save-weights", metavar="FILE", help="the trained weights; default: next to the strategy")
    group.add_argument("--checkpoint", metavar="FILE", help="default: logs/MODEL-HARDWARE-finetuned-HASH.safetensors")
    group.add_argument("--log", metavar="FILE", help="default: logs/MODEL-HARDWARE-finetuned-HASH.jsonl")
    group.add_argument("--no-resume", action="store_true", help="start anew even if a checkpoint exists")
    _watched(group)


def _running(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hago run` other than those of data."""
    parser.add_argument("stored", metavar="FILE", help="a stored integer model, from 'hago realize --save'")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="auto", help="default: %(default)s")
    parser.add_argument("--save", metavar="FILE", help="the outputs, as an .npz file")


# ---------------------------------------------------------------- commands
def _search(commands: Any) -> None:
    parser = _add(commands, "search", "search for the best strategy of a model on hardware")
    _quantization(parser)
    add_search_options(parser)


def _quantize(commands: Any) -> None:
    parser = _add(commands, "quantize", "quantize without a search: the widest bits that do not overflow")
    _quantization(parser, "the strategy; default: strategies/MODEL-HARDWARE-one_shot-HASH.json")
    _held_out(parser)
    table_options(parser)


def _explain(commands: Any) -> None:
    parser = _add(commands, "explain", "explain which nodes run in integers or float, and why, before any search")
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
    parser.add_argument(
        "--cost", action="store_true", help="also show the costs at most bits, at fewest bits, and in float"
    )


def _cost(commands: Any) -> None:
    parser = _add(commands, "cost", "count bytes, operations, cycles and energy of a strategy, node by node")
    _model(parser)
    parser.add_argument("record", metavar="STRATEGY", help="a strategy (.json)")
    _chip(parser, required=False)
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="samples in one run; default: %(default)s")


def _sensitivity(commands: Any) -> None:
    text = "estimate the loss of every choice of bits, from one forward and one backward pass"
    parser = _add(commands, "sensitivity", text)
    _quantization(parser, "the table as JSON; default: no file")
    parser.add_argument(
        "--objective", default="sqnr", metavar="NAME", help="whose loss is estimated; default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the random signs; default: %(default)s"
    )


def _on_record(
    commands: Any,
    name: str,
    text: str,
    metavar: str = "STRATEGY",
    record: str = "a strategy (.json)",
    several_chips: bool = False,
) -> argparse.ArgumentParser:
    """Add a command that takes a model, a strategy or what `metavar` says instead, and data."""
    parser = _add(commands, name, text)
    _model(parser)
    parser.add_argument("record", metavar=metavar, help=record)
    _chip(parser, required=False, several=several_chips)
    _data(parser)
    return parser


def _trial(parser: argparse.ArgumentParser) -> None:
    """Add the option that takes a strategy from the file of a front."""
    text = "this trial of a front, whose file ('hago search --front') is given as STRATEGY"
    parser.add_argument("--trial", type=int, metavar="N", help=text)


def _realize(commands: Any) -> None:
    text = "build the integer model and check that it equals its simulation bit for bit"
    parser = _on_record(commands, "realize", text)
    _held_out(parser)
    _trial(parser)
    parser.add_argument("--save", metavar="FILE", help="the integer model, for 'hago run' and other processes")
    parser.add_argument("--explain", action="store_true", help="show which kernel runs each node here, and why")


def _bench(commands: Any) -> None:
    parser = _on_record(commands, "bench", "time the integer model against the float model on this machine")
    sizes = ",".join(map(str, BATCH_SIZES))
    parser.add_argument(
        "--batches", type=counts, default=BATCH_SIZES, metavar="N,...", help=f"batch sizes; default: {sizes}"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help="default: %(default)s, or what 20 s allow"
    )


def _inspect(commands: Any) -> None:
    text = "compare float, simulated and integer values of every layer, and name the causes of errors"
    parser = _on_record(commands, "inspect", text)
    _held_out(parser)
    _trial(parser)
    parser.add_argument("--csv", metavar="FILE", help="also write the table to this file")
    parser.add_argument("--values", action="store_true", help="also show ranges, means and deviations")
    tried = "try no changes (nodes kept float, other bits, estimators and corrections) on the first samples"
    parser.add_argument("--no-remedies", dest="remedies", action="store_false", help=tried)


def _replay(commands: Any) -> None:
    text, record = "evaluate a log or a strategy again and compare every figure", "a strategy (.json) or a log (.jsonl)"
    parser = _on_record(commands, "replay", text, "LOG|STRATEGY", record)
    for option in ("objective", "estimator"):
        needed = f"package.module:name, needed if the search used your own {option}"
        parser.add_argument(f"--{option}", metavar="NAME", help=needed)
    parser.add_argument("--best-only", action="store_true", help="evaluate only the best trial of a log")


def _report(commands: Any) -> None:
    text = "write a page for the browser on a log, strategies or a front: verdict, front, network, search"
    parser = _add(commands, "report", text)
    _model(parser)
    records = "a log (.jsonl), strategies (.json), a front (.front.json), or a table of 'hago sensitivity --save'"
    parser.add_argument("records", nargs="+", metavar="RECORD", help=records)
    _chip(parser, required=False)
    _data(parser, required=False)
    _held_out(parser, "further data, read as --data is, to measure on, too")
    for option in ("objective", "estimator"):
        needed = f"package.module:name, needed for a log whose search used your own {option}"
        parser.add_argument(f"--{option}", metavar="NAME", help=needed)
    shown = "show at most N points in full, with errors and histograms; default: %(default)s"
    parser.add_argument("--points", type=positive, default=POINTS, metavar="N", help=shown)
    parser.add_argument("--title", metavar="TEXT", help="of the page; default: the names of the model and the hardware")
    tried = "try no changes that may help the layers with the largest errors"
    parser.add_argument("--no-remedies", dest="remedies", action="store_false", help=tried)
    parser.add_argument("--save", metavar="FILE", help="the page; default: reports/MODEL-HARDWARE-report-HASH.html")


def _run(commands: Any) -> None:
    parser = _add(commands, "run", "run a stored integer model on data, without the model it was made from")
    _running(parser)
    _ops(parser)
    _data(parser)


def _export(commands: Any) -> None:
    parser = _add(commands, "export", "write a strategy in the form that another tool reads")
    _model(parser)
    parser.add_argument("record", metavar="STRATEGY", nargs="?", help="omitted if MODEL is a stored integer model")
    _chip(parser, required=False)
    _exporting(parser)
    _data(parser, required=False)


def _hardware(commands: Any) -> None:
    text = "list, show, check or measure hardware, or begin a file for a new chip"
    actions = _add(commands, "hardware", text).add_subparsers(dest="action", required=True, metavar="action")
    _add(actions, "list", "list the hardware that ships with hago")
    for name, what in (
        ("show", "show every op with its dtypes, register and overflow"),
        ("check", "check a hardware file: every mistake, and which common ops it does not run in integers"),
    ):
        parser = _add(actions, name, what)
        parser.add_argument("hardware", metavar="NAME|FILE")
        _ops(parser)
    parser = _add(actions, "new", "write the start of a hardware file for a new chip, with notes on what to change")
    parser.add_argument("name", metavar="NAME", help="of the new chip")
    parser.add_argument(
        "--from",
        dest="base",
        default="cmsis_nn",
        metavar="NAME|FILE",
        help=f"the most similar hardware; default: %(default)s; {', '.join(shipped_hardware())}",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="default: NAME.json in the current folder")
    _ops(parser)
    parser = _add(actions, "measure", "write a copy of a CPU's hardware file with the costs of this machine")
    parser.add_argument("hardware", metavar="NAME|FILE")
    parser.add_argument("--output", required=True, metavar="FILE", help="the measured copy (.json)")
    _ops(parser)


def _demo(commands: Any) -> None:
    parser = _add(commands, "demo", "run the whole workflow on handwritten digits, from training to integers")
    parser.add_argument(
        "--out", default=".", metavar="DIR", help="the folder of demo/, logs/ and strategies/; default: this one"
    )
    parser.add_argument(
        "--hardware",
        action="append",
        metavar="NAME|FILE",
        help=f"may be repeated; default: {' and '.join(DEMO_HARDWARE)}",
    )
    parser.add_argument("--budget", metavar="LIMIT", help="of each search, e.g. '20 trials'; default: none")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
