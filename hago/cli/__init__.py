"""The command line: commands that search, quantize, explain, measure and check; `hago --help` lists them.

This is the only module that prints. Standard output holds the result and nothing else, so that it can be piped: text
that models and data sets print while they are loaded goes to standard error, as do progress and notes. Exit codes: 0
for success; 1 if the command ran and its check failed; 2 for bad input, code of the user that fails included; 70 for a
defect of hago; 130 if interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TextIO

from hago.cli.arguments import build_parser
from hago.cli.console import INTERRUPTED, Console, Outcome, command_line
from hago.errors import HagoError, HagoWarning
from hago.garbage_collection import garbage_collection_paused

__all__ = ["main"]

BAD_INPUT: Final = 2
DEFECT: Final = 70
CLOSED_PIPE: Final = 1
#: What hago itself calls, wherever it is installed: an exception of these is that of who called them.
LIBRARIES: Final = sys.stdlib_module_names | {
    "PIL", "dask", "distributed", "grandalf", "jinja2", "jsonschema", "matplotlib", "numpy", "onnx", "onnxruntime",
    "openvino", "optuna", "pandas", "psycopg", "safetensors", "scipy", "sqlalchemy", "tensorboard", "torch", "tqdm",
    "wandb",
}  # fmt: skip


def main(argv: Sequence[str] | None = None, before_command: Callable[[], None] = lambda: None) -> int:
    """Run one command.

    Args:
        argv: the words after `hago`; by default the arguments of the process.
        before_command: called when everything is imported and the command begins.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    stdout, stderr = sys.stdout, sys.stderr
    try:
        outcome = _run(words, stdout, before_command)
    except HagoError as error:
        print(f"hago: error: {error}", file=stderr)
        return BAD_INPUT
    except KeyboardInterrupt as error:
        again = f"; continue with:\n  {command_line(*words)}" if words[:1] in (["search"], ["finetune"]) else ""
        # without a text, the command has not begun, or a further Ctrl-C came while the text was made
        state = str(error) or ("" if again else "; nothing was written")
        print(f"\nhago: interrupted{state}{again}", file=stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return CLOSED_PIPE
    except Exception as error:
        traceback.print_exc(file=stderr)
        place = _in_code_of_the_user(error)
        if place:
            print(f"hago: error: the code that you named failed at {place}; the lines above say how", file=stderr)
            return BAD_INPUT
        print("hago: this is a defect of hago; please report it with the lines above", file=stderr)
        return DEFECT
    return outcome.code


def _in_code_of_the_user(error: Exception) -> str:
    """Where code that the user named (a searcher, a callback, a rule) raised an exception, or called what did; empty
    where hago did."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == "hago":
            return ""
        if package not in LIBRARIES:
            return f"{frame.f_code.co_filename}, line {line}"
    return ""


def _run(words: Sequence[str], stdout: TextIO, before_command: Callable[[], None]) -> Outcome:
    args = build_parser().parse_args(words)
    # after the arguments have been read, and before the folder of the user can hide modules: this imports torch
    with garbage_collection_paused():
        from hago.cli.commands import COMMANDS
        from hago.cli.output_files import check_given_paths

    def tell(line: str) -> None:
        if not args.json:
            _put(line, stdout)

    def note(line: str) -> None:
        print(f"hago: {line}", file=sys.stderr, flush=True)

    with _importable(os.getcwd()), warnings_as_lines(note), contextlib.redirect_stdout(sys.stderr):
        console = Console(tell, note, tuple(words))
        try:
            before_command()
            check_given_paths(args)
            outcome = COMMANDS[args.command](args, console)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(f" {error}" if str(error) else console.written_text()) from None
    _put(_json(outcome.json) if args.json else outcome.text, stdout)
    return outcome


def _put(text: str, stdout: TextIO) -> None:
    try:
        print(text, file=stdout, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_stdout()
        raise HagoError(f"cannot write to standard output: {error.strerror}; all files were written") from None


def _json(value: Any) -> str:
    from hago.serialization.json_text import json_values

    return json.dumps(json_values(value, "result"), indent=2, sort_keys=True, allow_nan=False)


@contextlib.contextmanager
def warnings_as_lines(note: Callable[[str], None]) -> Iterator[None]:
    """Print every warning of hago once, in one line, while the context is open; other warnings are shown as usual.

    Args:
        note: prints a line.
    """
    shown: set[str] = set()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def line(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, HagoWarning):
                show(message, category, *where, **more)
            elif str(message) not in shown:
                shown.add(str(message))
                note(f"warning: {message}")

        warnings.simplefilter("always", HagoWarning)
        warnings.showwarning = line
        yield


@contextlib.contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Make the modules in `folder` importable while the context is open, as `python -m` does."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _drop_stdout() -> None:
    # Python flushes standard output again at exit, which would fail on a closed pipe or a full disk.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
