"""Load files of every kind and print what Python's audit events say that it touched besides; see test_reading_laws.py.

    PYTHONPATH=scripts python tests/reading_audit.py FOLDER [--whole]

Hooks cannot be removed, so this runs in a process of its own. Files of every kind are good, mutated
(`scripts/fuzz_files.py`), or good ones in which a text is replaced by a name that a careless reader would import, open
or run. An event is fine where a good or a plainly damaged file of the kind led to it as well, or where every path in
it lies in the folder of the case. Without `--whole` there are fewer cases of the kinds that take most of the time.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import pickle
import random
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz_files
import torch

from hago.serialization.tensor_file import from_bytes, to_bytes

#: What is watched: events of these names, and of names that begin so.
EVENTS = ("import", "exec", "compile", "open", "marshal.", "pickle.", "subprocess.", "socket.", "ctypes.dlopen",
          "code.", "glob.", "pathlib.Path.glob", "pathlib.Path.rglob", "shutil.", "tempfile.", "urllib.", "sqlite3.",
          "os.", "http.", "webbrowser.", "pty.")  # fmt: skip
#: Events that may name files, which are fine in the folder of the case.
PATHS = ("open", "os.", "glob.", "pathlib.", "shutil.", "tempfile.")
#: Code that is compiled and, of these, run: a literal that numpy parses, which no `exec` follows, and what torch.fx
#: writes of the user's own model where that is exported.
COMPILED = ("<unknown>", "<eval_with_key>")
#: Names that lead somewhere, which nothing else here opens or imports.
NAMES = (
    "trap_module:x", "trap_module.x", "trap_module", "./trap_file", "../trap_file", "TRAP/trap_file", "TRAP",
    "file://TRAP/trap_file", "sqlite:///TRAP/trap.db", "journal:TRAP/trap.log", "dask://localhost:1",
    "policy:trap_module",
    "__import__('trap_module')", "import trap_module", "!!python/name:trap_module.x", "os.system", "posix:system",
    "\\u005f_enum__", "__reduce__", "aten.from_file.default", "torch.ops.load_library", "onnx", "_inductor",
    "set_vital",
    "cuda:0", "xla", "meta", "privateuseone", "antigravity", "this:s", "$(touch trap_file)", "`touch trap_file`",
)  # fmt: skip
#: Files of each kind that are mutated, and texts that are replaced in each part of a good one; fewer of the kinds that
#: are not only loaded but used.
CASES = (12, 20)
CASES_OF_SLOW = (4, 6)
SLOW = ("quantizer", "replay", "page", "training", "model", "groups")


class Watch:
    """What is seen while it is on."""

    def __init__(self) -> None:
        self.on, self.seen = False, set[tuple[str, str]]()
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event.startswith(EVENTS):
            said = [_said(a) for a in arguments[:3]]
            if event == "compile":
                said = said[1:2]
            if not (event in ("compile", "exec") and said[0].startswith(COMPILED[event == "exec" :])):
                self.seen.add((event, "; ".join(said)))

    @contextlib.contextmanager
    def during(self) -> Iterator[set[tuple[str, str]]]:
        self.seen, self.on = set(), True
        try:
            yield self.seen
        finally:
            self.on = False


def _lies_in(folder: Path, said: str) -> bool:
    """Whether every path in what was said of an event lies in a folder."""
    paths = [part for part in said.split("; ") if "/" in part]
    return bool(paths) and all(Path(os.path.abspath(p)).is_relative_to(folder) for p in paths)


def _said(argument: Any) -> str:
    if isinstance(argument, (str, bytes, os.PathLike)):
        return os.fsdecode(argument)[:200]
    return str(getattr(argument, "co_filename", ""))


def hostile(kind: str, content: bytes, folder: str, most: int) -> Iterator[bytes]:
    """Good files with one text replaced, at most so many in each part."""
    rng = random.Random(kind)
    names = [n.replace("TRAP", folder) for n in NAMES]
    if kind in fuzz_files.SEALED:
        document, tensors = from_bytes(content, fuzz_files.SEALED[kind], "a good file")
        # texts of JSON within JSON are replaced as well
        for value in _replaced(document, names, rng, 2 * most):
            yield to_bytes(fuzz_files.SEALED[kind], value, tensors)
        return
    try:
        lines = [json.loads(line) for line in content.decode("utf-8").splitlines()]
    except ValueError:
        try:
            yield from (json.dumps(v).encode() for v in _replaced(json.loads(content), names, rng, most))
        except ValueError:
            return
        return
    for number, line in enumerate(lines[:2]):
        for value in _replaced(line, names, rng, most):
            yield b"\n".join(json.dumps(v).encode() for v in [*lines[:number], value, *lines[number + 1 :]]) + b"\n"


def _replaced(value: Any, names: list[str], rng: random.Random, most: int) -> Iterator[Any]:
    places = [p for p in fuzz_files.places(value) if p and isinstance(_at(value, p), str)]
    for place in rng.sample(places, min(most, len(places))):
        made = copy.deepcopy(value)
        _at(made, place[:-1])[place[-1]] = rng.choice(names)
        yield made


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def broken(trap: str) -> dict[str, Callable[[Path], object]]:
    """Readers that do what none may."""
    return {
        "imports": lambda path: importlib.import_module("trap_module"),
        "opens": lambda path: open(trap).close(),
        "lists": lambda path: os.listdir(Path(trap).parent),
        "evaluates": lambda path: eval("1 + 1"),
        "executes": lambda path: exec("x = 1"),
        "unpickles": lambda path: pickle.loads(pickle.dumps(Path)),
        "starts a program": lambda path: subprocess.run(["true"], check=True),
        "starts a shell": lambda path: os.system("true"),
        "runs a file": lambda path: runpy.run_path(trap),
        "connects": lambda path: socket.socket().close(),
        "loads a library": lambda path: torch.ops.load_library(trap),
    }


def main(folder: Path, *, whole: bool) -> None:
    trap = folder / "trap"
    trap.mkdir()
    (trap / "trap_file").write_text("x = 1\n")
    (trap / "trap_module.py").write_text("x = 1\n")
    (folder / "trap_file").write_text("x = 1\n")
    sys.path.insert(0, str(trap))
    cases = folder / "cases"
    cases.mkdir()
    (folder / "good").mkdir()
    good = fuzz_files.originals(folder / "good")
    watch, found, count = Watch(), [], 0

    def run(kind: str, content: bytes) -> set[tuple[str, str]]:
        with watch.during() as seen:
            said = fuzz_files.outcome(kind, content, cases)
        assert said in ("loaded", "refused"), (kind, said, content[:2000])
        return {e for e in seen if not (e[0].startswith(PATHS) and _lies_in(cases, e[1]))}

    for kind, content in good.items():
        usual = set[tuple[str, str]]()
        for plain in (content, content[:-20], content, b"{}", b""):
            usual |= run(kind, plain)
        rng = random.Random(kind)
        mutated, replaced = CASES_OF_SLOW if kind in SLOW and not whole else CASES
        for made in (
            *(fuzz_files.mutated(kind, content, rng) for _ in range(mutated)),
            *hostile(kind, content, str(trap), replaced),
        ):
            count += 1
            found += [(kind, *event) for event in sorted(run(kind, made) - usual)]
    seen_of = {}
    for how, reader in broken(str(trap / "trap_file")).items():
        with watch.during() as seen, contextlib.suppress(Exception):
            reader(cases)
        seen_of[how] = sorted(map(str, seen))[:3]
    print(json.dumps({"cases": count, "kinds": len(good), "seen": found, "broken": seen_of}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), whole="--whole" in sys.argv)
