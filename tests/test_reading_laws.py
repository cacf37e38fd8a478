"""No reader of a file reaches what runs code, starts programs, or opens what the file names.

Two laws. The first reads the sources: from every function that reads a file, what it can reach holds no import by
name, no unpickling, no `eval`, no program, no library and no second file, but those in `ALLOWED`, each with its reason.
The second watches: while good, mutated and hostile files of every kind are loaded, Python's audit events are recorded,
and there is none but for the file itself and what a good file of the kind needs, too.

Files that a user names as code (`package.module:callable` on the command line) and the databases of Optuna's storages
are not files in this sense: the one is run because it is asked for, the other is read by Optuna.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from calls import Calls, calls, sources
from products import whole

import hago

#: Every function that reads a kind of file, and those that go on from what was read.
READERS: Final = (
    "hago.hardware.file.load_hardware",
    "hago.plan.strategy.Strategy.load",
    "hago.search.pareto_front.load_front",
    "hago.report.records.read_records",
    "hago.study.log.read_log",
    "hago.study.log.read_header",
    "hago.study.log.LogFile.start",
    "hago.study.rfc_log.read_rfc_log",
    "hago.runtime.stored_model.load_plan",
    "hago.runtime.stored_model.is_stored",
    "hago.qat.run.Checkpoint.load",
    "hago.graph.model_source.read_weights",
    "hago.data.sources._arrays",
    "hago.data.sources._image_folder",
    "hago.data.sources.read_image",
    "hago.calibration.given_ranges.make_given_ranges",
    "hago.runtime.native.build._kept",
    # from strategies and logs
    "hago.search.stored_strategy.stored_resolver",
    "hago.importing.import_for_strategy",
    "hago.search.earlier_logs.known_scores",
    "hago.search.replay.replay_log",
    "hago.search.replay.replay_strategy",
)
#: What runs what it is given, and serves nothing in hago.
_RUNS: Final = (
    r"(builtins\.)?(eval|exec|compile|__import__|breakpoint)$"
    r"|(pickle|marshal|shelve|runpy|code|pty|dill|cloudpickle|joblib|yaml)\."
)
#: What no reader may reach. Attributes begin with a point.
FORBIDDEN: Final = re.compile(
    _RUNS + r"|(builtins\.)?(open|globals)$"
    r"|(subprocess|socket|urllib|http|sqlite3|multiprocessing)\."
    r"|ctypes\.(\w*DLL|\w*dll|util|pythonapi|LibraryLoader)"
    r"|importlib\.(import_module|util|machinery|reload)|pkgutil\.(resolve_name|get_data)"
    r"|os\.(system|popen|exec\w*|spawn\w*|posix_spawn\w*|fork|startfile|open|listdir|scandir|walk|remove|unlink|rename)$"
    r"|(shutil|tempfile|glob)\.(?!escape)\w+|io\.(open|FileIO)|pathlib\.Path\.(open|home|cwd)"
    r"|torch\.(load|hub|package|jit|classes|ops\.load|utils\._pytree\.treespec_loads|utils\.cpp_extension|export\.load)"
    r"|numpy\.(load|loadtxt|genfromtxt|fromfile|memmap)|safetensors|PIL\.Image\.open|zipfile\.ZipFile$"
    r"|getattr of |operator\.(attrgetter|methodcaller)|vars$|sys\.(modules|path)"
    r"|\.(open|read_text|read_bytes|write_text|write_bytes|unlink|iterdir|glob|rglob|rename|symlink_to|import_module"
    r"|find_class|system|popen|load_library|treespec_loads|extractall)$"
)
OWN: Final = "the file that it was given"
SHIPPED: Final = "files that are part of hago"
FIELDS: Final = "fields of hago's own dataclasses, by their names in the sources"
CHECKED: Final = "with the argument that NEEDED asks for"
BYTES: Final = "a count of bytes that is called so"
SYSTEM: Final = "a file of the operating system"
#: What readers reach all the same, and why it is nothing that a file says.
ALLOWED: Final[Mapping[tuple[str, str], str]] = {
    ("hago.cost.cost.METRICS", ".read_bytes"): BYTES,
    ("hago.cost.cost.METRICS", ".write_bytes"): BYTES,
    ("hago.cost.cost._row", ".read_bytes"): BYTES,
    ("hago.cost.cost._row", ".write_bytes"): BYTES,
    ("hago.data.progress.StatusLine.show", "shutil.get_terminal_size"): SYSTEM,
    ("hago.data.sources._arrays", "numpy.load"): CHECKED,
    ("hago.data.sources._arrays", "open"): OWN,
    ("hago.data.sources._check_sizes", ".open"): "a member of the archive",
    ("hago.data.sources._check_sizes", "zipfile.ZipFile"): OWN,
    ("hago.data.sources._image_files", ".glob"): "the folder that it was given",
    ("hago.data.sources._image_folder", ".iterdir"): "the folder that it was given",
    ("hago.data.sources.read_image", "PIL.Image.open"): CHECKED,
    ("hago.ops.masked_softmax._lets_something_through", "torch.jit"): "asks whether a trace is being made",
    ("hago.runtime.native.build._kept", ".read_text"): OWN,
    ("hago.runtime.native.build._sha256", ".read_bytes"): "a file beside the manifest, of a name without a folder",
    ("hago.graph.graph.Graph.__post_init__", "getattr of self"): FIELDS,
    ("hago.hardware.hardware.Hardware.__post_init__", "getattr of self"): FIELDS,
    ("hago.hardware.validation._validator", ".read_text"): SHIPPED,
    ("hago.hardware.file._multiplier", "getattr of plain"): FIELDS,
    ("hago.hardware.file._signature", "getattr of desc"): FIELDS,
    ("hago.hardware.file._signature", "getattr of plain"): FIELDS,
    ("hago.hardware.file._unusual", "getattr of Requantize()"): FIELDS,
    ("hago.hardware.file._unusual", "getattr of how"): FIELDS,
    ("hago.shipped_hardware.shipped_hardware", ".iterdir"): SHIPPED,
    ("hago.shipped_hardware.shipped_hardware", ".read_bytes"): SHIPPED,
    ("hago.serialization.json_text._validator", ".read_text"): SHIPPED,
    ("hago.serialization.json_text._without_waiting", "os.open"): OWN,
    ("hago.serialization.json_text.read_file", "open"): OWN,
    ("hago.simulation.free_memory._group", ".read_text"): SYSTEM,
    ("hago.graph.model_source._read_safetensors", "safetensors.SafetensorError"): "an error",
    ("hago.graph.model_source._read_safetensors", "safetensors.torch.load_file"): OWN,
    ("hago.graph.model_source._read_torch", "pickle.UnpicklingError"): "an error",
    ("hago.graph.model_source._read_torch", "torch.load"): CHECKED,
    ("hago.ops._discover", "importlib.import_module"): "the modules of hago/ops, when it is imported",
    ("hago.ops._opaque.resolve_target", "getattr of found"): "operators that `why_not_portable` lets through",
    ("hago.ops._opaque.unpack", "vars"): "what it finds in torch must be a dtype, a layout or a memory format",
    ("hago.study.log.Header.to_json", "getattr of self"): FIELDS,
    ("hago.study.log.read_header", "open"): OWN,
    ("hago.study.log.Trial.to_json", "getattr of score"): FIELDS,
    ("hago.searchers.knapsack._flush", "ctypes.CDLL"): "this process itself",
    ("hago.searchers.knapsack.quiet_stdout", "os.open"): SYSTEM,
    ("hago.arithmetic.types.TORCH_DTYPES", "vars"): "it keeps the dtypes alone",
}
#: Where a walk ends, and why.
STOP: Final[Mapping[str, str]] = {
    "hago.runtime.native.library.library": "kernels are built from hago's own sources, whatever was read",
    "hago.searchers.registry.SEARCHERS": "a replay asks its entries how thresholds were refined, and makes no searcher",
}
#: Arguments without which a call would run what a file holds.
NEEDED: Final = {
    "torch.load": "weights_only=True",
    "numpy.load": "allow_pickle=False",
    "PIL.Image.open": "formats=_FORMATS",
}
#: Others that open files, and which.
OTHERS: Final[Mapping[str, str]] = {
    "hago.cli._drop_stdout": SYSTEM,
    "hago.report.page._file": SHIPPED,
    "hago.runtime.native.build._manifest": SHIPPED,
    "hago.runtime.native.build._made": "the library that it built",
    "hago.serialization.json_text._remove_stale": "temporary files of its own",
    "hago.serialization.json_text.replace_file": "the file that it writes",
    "hago.serialization.json_text.sync_folder": "the folder of a file that it wrote",
    "hago.runtime.native.library._share_openmp": SYSTEM,
    "hago.runtime.native.processor.cpu_lines": SYSTEM,
    "hago.study.log.LogFile.__init__": "the log that it is given; `start` parses it",
    "hago.study.log.LogFile._read": "the same",
    "hago.searchers.optuna._steps": "not a file: it opens a storage that the user named",
    "hago.qat.finetuning._append": "the file that it writes",
}
_OPENS: Final = re.compile(
    r"(open|os\.open|numpy\.load|torch\.load|safetensors\..*load\w*|.*Image\.open)$|\.(read_text|read_bytes|open)$"
)


def names_of(units: Calls, unit: str) -> set[str]:
    said = units.units[unit]
    return {n for n in said.names if not units.unit(n)} | {f".{a}" for a in said.attributes}


def violations(units: Calls, entries: Iterable[str] = READERS) -> dict[tuple[str, str], str]:
    """(unit, what is forbidden) of all that readers reach, and the reader."""
    found: dict[tuple[str, str], str] = {}
    for entry in entries:
        for unit in units.reached([entry], STOP):
            if unit in units.units and unit not in STOP:
                found |= {(unit, n): entry for n in names_of(units, unit) if FORBIDDEN.match(n)}
    return found


def test_no_reader_reaches_what_runs_code_or_opens_another_file() -> None:
    assert not set(READERS) - set(calls().units)
    found = violations(calls())
    unexplained = {f"{unit} takes {what}, reached from {found[unit, what]}" for unit, what in found.keys() - ALLOWED}
    assert not unexplained
    assert not ALLOWED.keys() - found.keys()  # what is gone needs no reason


def running(units: Calls) -> set[tuple[str, str]]:
    """(unit, what runs code) of all of hago, whether readers reach it or not."""
    return {(unit, n) for unit in units.units for n in names_of(units, unit) if re.match(_RUNS, n)}


def test_nothing_in_hago_unpickles_or_evaluates() -> None:
    assert running(calls()) == {("hago.graph.model_source._read_torch", "pickle.UnpicklingError")}
    assert running(calls()) <= ALLOWED.keys()


@pytest.mark.parametrize(
    "call", ["eval(text)", "exec(text)", "pickle.load(f)", "pickle.Unpickler(f)", "joblib.load(f)"]
)
def test_a_call_that_runs_code_is_noticed_anywhere(call: str) -> None:
    module = "hago.export.formats"
    text = sources()[module] + f"\n\nimport joblib, pickle\n\n\ndef broken(f, text):\n    return {call}\n"
    (found,) = running(Calls.of({**sources(), module: text})) - running(calls())
    assert found == (f"{module}.broken", call.partition("(")[0])


def test_every_function_that_opens_a_file_is_a_reader_or_explained() -> None:
    reached = {unit for entry in READERS for unit in calls().reached([entry], STOP)}
    opens = {u for u in calls().units.keys() - reached if any(map(_OPENS.match, names_of(calls(), u)))}
    assert opens == OTHERS.keys()


def test_calls_that_need_an_argument_to_be_safe_have_it() -> None:
    seen = set()
    for module, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            last = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            for name, argument in NEEDED.items():
                if isinstance(node, ast.Call) and last == name.rpartition(".")[2] and _is(node.func, name):
                    seen.add(name)
                    assert argument in {ast.unparse(k) for k in node.keywords}, f"{module}, line {node.lineno}"
    assert seen == NEEDED.keys()


def _is(called: ast.expr, name: str) -> bool:
    """Whether an expression such as `np.load` or `Image.open` is that function; modules go by these names in hago."""
    return ast.unparse(called) in {name, name.replace("numpy", "np"), name.removeprefix("PIL.")}


#: Of a broken reader: itself, its module, what stands in it, and the line that breaks it there.
BROKEN: Final = {
    "an import": (
        "plan.strategy.Strategy.load",
        "plan.strategy",
        'topology = value["',
        "importlib.import_module(value['x'])",
    ),
    "an import by Python": (
        "plan.strategy.Strategy.load",
        "plan.strategy",
        'topology = value["',
        "__import__(value['x'])",
    ),
    "an evaluation": (
        "runtime.stored_model.load_plan",
        "graph.nesting",
        "known = json.loads(context)",
        "eval(context)",
    ),
    "a pickle": (
        "runtime.stored_model.load_plan",
        "serialization.tensor_file",
        "metadata = header.pop(RESERVED, None)",
        "pickle.loads(data)",
    ),
    "torch's own reader": (
        "runtime.stored_model.load_plan",
        "graph.nesting",
        "document = json.loads(text)",
        "pytree.treespec_loads(text)",
    ),
    "another file": (
        "study.log.read_log",
        "study.log",
        'check_schema(record, "log_header", where)',
        "open(record['data_hash'])",
    ),
    "another path": (
        "search.pareto_front.load_front",
        "search.pareto_front",
        'strategy = value["',
        "Path('x').read_text()",
    ),
    "a program": (
        "hardware.file.load_hardware",
        "hardware.file",
        'fields = {**document["requantize"]',
        "subprocess.run(document)",
    ),
    "torch's names": (
        "runtime.stored_model.load_plan",
        "ops.to",
        "return x.to(TORCH_DTYPES",
        "getattr(torch, attrs['dtype'])",
    ),
    "a library": (
        "runtime.native.build._kept",
        "runtime.native.build",
        "name, size, digest = (record[",
        "ctypes.CDLL('x')",
    ),
    "a method": (
        "runtime.stored_model.load_plan",
        "plan.document",
        "read_scales = [self(s) for s in scales]",
        "os.system(scales[0])",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_reader_that_is_broken_is_found(how: str) -> None:
    reader, module, before, line = (f"hago.{x}" if i < 2 else x for i, x in enumerate(BROKEN[how]))
    text = sources()[module]
    assert text.count(before) == 1
    text = text.replace(before, f"{line}; {before}")
    head = "from __future__ import annotations\n" if "from __future__" in text else '"""\n'
    text = text.replace(head, head + "import ctypes, importlib, os, pickle, subprocess\nfrom pathlib import Path\n", 1)
    found = violations(Calls.of({**sources(), module: text}), [reader]).keys() - ALLOWED
    assert len(found) == 1 and next(iter(found))[0].startswith(module)


# ---------------------------------------------------------------- what happens when files are read
@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What `reading_audit.py` saw."""
    folder = tmp_path_factory.mktemp("audit")
    script = Path(__file__).with_name("reading_audit.py")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (hago.__path__[0] + "/..", script.parents[1] / "scripts"))),
    }
    command = [sys.executable, script, folder, *(["--whole"] if whole() else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_nothing_but_the_file_is_touched_while_it_is_read(watched: Mapping[str, Any]) -> None:
    assert watched["cases"] > 300 and watched["kinds"] >= 17
    assert watched["seen"] == []


def test_what_a_broken_reader_does_is_seen(watched: Mapping[str, Any]) -> None:
    assert {how: bool(seen) for how, seen in watched["broken"].items()} == dict.fromkeys(watched["broken"], True)
    assert len(watched["broken"]) >= 8
