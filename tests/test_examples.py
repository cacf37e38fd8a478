"""The examples run as they stand, each in a folder of its own, compute exactly, show what they print, and are short."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from test_readme import alike

FOLDER = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: The scripts that say whether the simulation and the integer model are equal.
EQUAL = {"five_lines", "my_chip"}


def test_there_are_examples() -> None:
    assert len(SCRIPTS) >= 5 and NOTEBOOKS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs_and_tells_what_came_out(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    verdicts = [line for line in lines if "== integer" in line]
    assert len(verdicts) == (script.stem in EQUAL)
    assert all(line.endswith(": True") and "False" not in line for line in verdicts), verdicts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short(script: Path) -> None:
    assert len(script.read_text("utf-8").splitlines()) <= 60


def outputs_of(source: str, name: str, space: dict[str, Any]) -> tuple[str, str]:
    """What a cell prints, and the repr of its last expression, as a notebook shows them."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(tree, name, "exec"), space)
        value = eval(compile(ast.Expression(last.value), name, "eval"), space) if isinstance(last, ast.Expr) else None
    return out.getvalue(), "" if value is None else repr(value)


def stored_outputs(cell: dict[str, Any]) -> tuple[str, str]:
    """The same as it is stored in a notebook."""
    printed = "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")
    values = ("".join(o["data"]["text/plain"]) for o in cell["outputs"] if o["output_type"] == "execute_result")
    return printed, "".join(values)


def title(text: str) -> str:
    """The first line of what an object prints, without numbers and hashes, on which the width of columns depends: those
    of a trained network depend on the processor, as the facts below it do."""
    text = "\n".join(" ".join(line.split()) for line in text.splitlines())
    return re.sub(r"-?\d[\d.,]*", "#", re.sub(r"\bhash [0-9a-f]{12}\b", "hash", text.partition("\n")[0]))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_give_the_outputs_that_it_stores(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "__main__"}
    cells = [c for c in json.loads(notebook.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    assert len(cells) >= 5
    for number, cell in enumerate(cells, 1):
        assert any(stored_outputs(cell)), f"code cell {number} stores no output"
        printed, value = outputs_of("".join(cell["source"]), f"{notebook.name}, code cell {number}", space)
        stored_printed, stored_value = stored_outputs(cell)
        assert alike(printed, stored_printed), f"code cell {number} prints\n{printed}"
        assert title(value) == title(stored_value), f"code cell {number} gives\n{value}"
        assert len(value.splitlines()) > 1 or len(stored_value.splitlines()) < 2


def test_the_outputs_of_a_cell_are_seen() -> None:
    assert outputs_of("x = 2\nprint(x)\nx + 1", "cell", {}) == ("2\n", "3")
    assert outputs_of("print('a')", "cell", {}) == ("a\n", "")
    assert outputs_of("x = 2", "cell", {}) == ("", "")
