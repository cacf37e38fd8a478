"""The README and the guides do what they show: their Python blocks run in order, and print what follows them."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from digits import few_digits

from hago.cli import main
from hago.demo import run_demo

ROOT = Path(__file__).resolve().parent.parent
GUIDES = (
    "README.md",
    "docs/adding-an-op.md",
    "docs/arithmetic.md",
    "docs/guide.md",
    "docs/hardware.md",
    "docs/quantizers.md",
    "docs/report.md",
    "docs/stored-model.md",
    "docs/watching.md",
)
PAGES = [str(path.relative_to(ROOT)) for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])]
_BLOCK = re.compile(r"(?:<!-- file: (?P<file>\S+) -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block, and whether it follows the one before it directly."""

    kind: str
    body: str
    file: str | None
    line: int
    follows: bool


def blocks(text: str) -> list[Block]:
    found, end = [], 0
    for match in _BLOCK.finditer(text):
        follows = not text[end : match.start()].strip()
        found.append(Block(match["kind"], match["body"], match["file"], text[: match.start()].count("\n") + 1, follows))
        end = match.end()
    return found


def alike(printed: str, shown: str) -> bool:
    """Equal but for numbers: machines train differently, so fractions may differ by 0.1 and counts by 2."""
    a, b = (" ".join(_NUMBER.sub("#", t).split()) for t in (printed, shown))
    pairs = zip(_NUMBER.findall(printed), _NUMBER.findall(shown), strict=a == b)
    return a == b and all(abs(float(x) - float(y)) <= (0.1 if "." in y else 2) for x, y in pairs)


@pytest.mark.parametrize("name", GUIDES)
def test_python_blocks_run_and_print_what_is_shown(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    ran = 0
    for block in blocks((ROOT / name).read_text("utf-8")):
        if block.file is not None:
            Path(block.file).write_text(block.body, "utf-8")
        elif block.kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * block.line + block.body, name, "exec"), space)
            printed, ran = out.getvalue(), ran + 1
        elif block.kind == "text" and block.follows:
            assert alike(printed, block.body), f"{name}, line {block.line}: it prints\n{printed}"
    assert ran >= 1


@pytest.mark.parametrize("name", ["README.md", "docs/guide.md"])
def test_commands_work_after_the_demo(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / name).read_text("utf-8")
    lines = [line for b in blocks(text) if b.kind == "bash" for line in b.body.splitlines() if line.startswith("hago ")]
    assert len(lines) >= 6
    monkeypatch.chdir(tmp_path)
    few_digits(monkeypatch, 5)
    run_demo(tmp_path, lambda line: None, hardware=["sample"], budget="1 trials", epochs=1)
    for line in lines:
        code = main(shlex.split(line)[1:])
        assert code == 0, f"{line}\n{capsys.readouterr().err}"


def test_the_scripts_of_the_readme_are_there() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    named = {w for b in blocks(text) if b.kind == "bash" for w in b.body.split() if w.startswith("scripts/")}
    assert {"scripts/demo", "scripts/test"} <= named
    for script in named:
        assert os.access(ROOT / script, os.X_OK), f"{script} cannot be run"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text("utf-8")):
        if "://" not in target:
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"


def mentioned(text: str) -> set[str]:
    """Dotted names of hago and paths of the repository, in backquotes."""
    words = {w for quoted in re.findall(r"`([^`\n]+)`", text) for w in re.split(r"[\s,()]+", quoted)}
    return {w for w in words if re.fullmatch(r"hago(\.\w+)+|(hago|tests|scripts|docs|hardware_specs)/[\w./]*", w)}


def is_there(name: str) -> bool:
    """Whether a path exists, or a dotted name can be imported."""
    if "/" in name:
        return (ROOT / name).exists()
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("name", [p for p in PAGES if p != "CHANGELOG.md"])
def test_what_pages_name_exists(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    if name == "docs/migrating.md":
        text = re.sub(r"^\| `hago\.[\w.]+` \|", "|", text, flags=re.M)  # the old paths
    assert {m for m in mentioned(text) if not is_there(m)} == set()


def test_new_names_of_the_migration_page_exist() -> None:
    text = (ROOT / "docs/migrating.md").read_text("utf-8")
    rows = re.findall(r"^\| `(hago[\w.]+)` \| `(hago[\w.]+)` \|(.*)\|$", text, re.M)
    assert len(rows) >= 200
    assert len({old for old, _, _ in rows}) == len(rows)
    for _, module, names in rows:
        for _, new in re.findall(r"`(\w+)` is `(\w+)`", names):
            assert hasattr(importlib.import_module(module), new), f"{module} has no {new}"


def test_a_place_is_kept_for_the_results() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("<!-- results:begin -->") == text.count("<!-- results:end -->") == 1


def test_alike_bites() -> None:
    assert alike("a 10 b 0.991", "a 11 b 0.994")
    assert not alike("a 10", "a 10 b")
    assert not alike("a 10", "a 20")
    assert not alike("b 0.991", "b 0.791")
