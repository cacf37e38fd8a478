"""What is imported before anything is computed: nothing heavy by the package, and no torch by help and usage errors."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hago

#: Modules that take long to import, or that are optional.
HEAVY = (
    "scipy",
    "jsonschema",
    "torch.export",
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "onnx",
    "onnxruntime",
    "openvino",
    "optuna",
    "sqlalchemy",
    "sklearn",
    "matplotlib",
    "safetensors",
    "PIL",
    "distributed",
)
IMPORT = "import hago"
EVERY_NAME = "import hago; [getattr(hago, name) for name in hago.__all__]"
#: The command `hago`, whose entry setup.cfg names, and `python -m hago`.
COMMAND = "import sys; from hago.__main__ import run; sys.argv[1:] = {words!r}; sys.exit(run())"
AS_MODULE = "import runpy, sys; sys.argv[1:] = {words!r}; runpy.run_module('hago', run_name='__main__')"
WORDS = (
    ["--help"],
    ["--version"],
    ["--print-completion", "bash"],
    ["search", "--help"],
    ["export", "--help"],
    ["finetune", "--help"],
    ["hardware", "--help"],
    [],
    ["serach"],
    ["search", "zoo:net"],
    ["hardware", "show"],
    ["quantize", "zoo:net", "--hardware", "vta", "--data", "x.npz", "--size", "none"],
)


def modules_after(code: str) -> set[str]:
    """The modules that are imported once Python has run some code in a process of its own."""
    report = "import atexit, json, sys; atexit.register(lambda: print('\\n' + json.dumps(sorted(sys.modules))))\n"
    done = subprocess.run(
        [sys.executable, "-c", report + code], capture_output=True, text=True, timeout=300, check=False
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def heavy_among(modules: set[str], heavy: tuple[str, ...] = HEAVY) -> set[str]:
    return {m for m in modules if any(m == h or m.startswith(f"{h}.") for h in heavy)}


def test_importing_hago_imports_nothing_heavy() -> None:
    assert not heavy_among(modules_after(IMPORT), ("torch", "numpy", *HEAVY))


@pytest.mark.parametrize(
    "given, wanted",
    [({}, "4000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_the_command_has_idle_threads_sleep_unless_the_user_says_otherwise(given: dict[str, str], wanted: str) -> None:
    """On two threads and a busy processor, a search of a minute took ten."""
    code = "import atexit, os; atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT')))\n"
    code += COMMAND.format(words=["--version"])
    own = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, env={**own, **given}
    )
    assert done.stdout.splitlines()[-1] == wanted


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["hardware", "list"], False),
        (["doctor", "--help"], False),
        (["bench", "nothing:net", "nothing.json", "--data", "nothing.npz"], False),
        (["run", "nothing.hago", "--data", "nothing.npz"], True),
        (["doctor"], True),
    ],
)
def test_the_command_keeps_freed_memory_unless_it_times(words: list[str], kept: bool) -> None:
    code = "kept = lambda *, unless_set: print('memory is kept' * unless_set)\n"
    code += "from hago.runtime import native; native.keep_freed_memory = kept\n"
    code += COMMAND.format(words=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ("memory is kept" in done.stdout + done.stderr) == kept


def test_using_a_public_name_imports_nothing_heavy_beside_torch() -> None:
    # some versions of torch import torch.export themselves
    of_torch = modules_after("import torch")
    assert not heavy_among(modules_after(EVERY_NAME) - of_torch)


@pytest.mark.parametrize(
    ("call", "words"),
    [*((COMMAND, words) for words in WORDS), (AS_MODULE, ["--help"]), (AS_MODULE, ["--version"]), (AS_MODULE, [])],
)
def test_help_and_usage_errors_import_no_torch(call: str, words: list[str]) -> None:
    modules = modules_after(call.format(words=words))
    assert "hago.cli.arguments" in modules
    assert not heavy_among(modules, ("torch", "numpy", *HEAVY))


def test_heavy_modules_are_seen() -> None:
    assert "torch" in heavy_among(modules_after(COMMAND.format(words=["hardware", "list"])), ("torch",))


# ---------------------------------------------------------------- what the package shows
def test_only_public_names_are_listed() -> None:
    assert dir(hago) == sorted([*hago.__all__, "__version__"])


def test_modules_are_attributes_without_an_import_of_their_own() -> None:
    code = "import hago; assert hago.ops.OPS and hago.errors.HagoError and hago.demo.MODEL; print('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize("name", ["quantise", "__wrapped__", "_private"])
def test_other_names_are_no_attributes(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'hago' has no attribute '{name}'"):
        getattr(hago, name)


def test_type_checkers_and_python_import_the_same_names() -> None:
    tree = ast.parse(Path(hago.__file__).read_text("utf-8"))
    imports = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    shown = {a.name: n.module for n in imports.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert shown == hago._MODULE_OF
    assert set(shown) == set(hago.__all__)


# ---------------------------------------------------------------- interrupts
ENTRIES = (COMMAND, AS_MODULE)
SIGNAL = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
#: A module whose import the user interrupts, and one that drops the interrupt.
INTERRUPTED = (SIGNAL, f"try:\n    exec({SIGNAL!r})\nexcept BaseException:\n    pass\nraise ImportError('no torch')\n")


def interrupted_run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python runs what interrupts itself, with the modules of a folder before all others."""
    root = str(Path(hago.__file__).parents[1])
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), root])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("torch", INTERRUPTED)
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_interrupt_while_torch_is_imported_is_one_line(entry: str, torch: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(torch, "utf-8")
    done = interrupted_run(tmp_path, "-c", entry.format(words=["hardware", "list"]))
    assert done.returncode == 130 and done.stdout == ""
    assert done.stderr.count("hago: interrupted") == 1 and len(done.stderr.split("\n")) == 3, done.stderr


def test_an_interrupt_while_the_command_line_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text(SIGNAL, "utf-8")
    done = interrupted_run(tmp_path, "-c", COMMAND.format(words=["--help"]))
    assert done.returncode == 130 and "hago: interrupted before the command began" in done.stderr


@pytest.mark.parametrize(("command", "code"), [("search", SIGNAL), ("quantize", f"exec({SIGNAL!r})\n")])
def test_an_interrupt_while_the_model_is_imported_says_how_to_go_on(command: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "zoo.py").write_text(code + "def net(): ...\n", "utf-8")
    words = [command, "zoo:net", "--hardware", "vta", "--data", "none.npz"]
    done = interrupted_run(tmp_path, "-m", "hago", *words)
    assert done.returncode == 130 and done.stdout == "" and "Traceback" not in done.stderr
    assert "hago: interrupted; nothing was written" in done.stderr
    assert ("; continue with:" in done.stderr) == (command == "search")


def test_the_command_is_installed_with_the_entry_that_handles_interrupts() -> None:
    root = Path(hago.__file__).parents[1]
    assert "hago = hago.__main__:run\n" in (root / "setup.cfg").read_text("utf-8")


def test_the_benchmark_of_the_startup_does_not_time_calls_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    import benchmark_startup

    monkeypatch.setitem(benchmark_startup.CALLS, "a call", ["-c", "raise ValueError('for a reason')"])
    with pytest.raises(SystemExit, match="a call ended with code 1; expected 0:\n(.*\n)*ValueError: for a reason"):
        benchmark_startup.seconds_of("a call")
    monkeypatch.setitem(benchmark_startup.EXIT_CODES, "a call", 1)
    assert benchmark_startup.seconds_of("a call") > 0
