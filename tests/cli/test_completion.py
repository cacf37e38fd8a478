"""The script that completes words in a shell: every command, every option, and the names that values may have."""

from __future__ import annotations

import argparse
import functools
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hago.cli import main
from hago.cli.arguments import build_parser
from hago.cli.completion import SHELLS, completion_script
from hago.shipped_hardware import shipped_hardware

pytest.importorskip("shtab")


@functools.cache
def script(shell: str) -> str:
    return completion_script(build_parser(), shell)


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(dict(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def completed(words: list[str], folder: Path) -> set[str]:
    """What bash completes the last of some words to."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    (folder / "script").write_text(script("bash"), "utf-8")
    line = f"source ./script; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_hago"
    line += '; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_a_script_for_every_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == script(shell).strip()


def test_every_command_is_completed(tmp_path: Path) -> None:
    expected = set(commands(build_parser()))
    assert completed(["hago", ""], tmp_path) >= expected and len(expected) > 15
    assert completed(["hago", "exp"], tmp_path) == {"explain", "export"}


@pytest.mark.parametrize("command", sorted(commands(build_parser())))
def test_every_option_is_completed(command: str, tmp_path: Path) -> None:
    if command == "hardware":
        pytest.skip("its own commands have the options")
    options = {
        word for a in commands(build_parser())[command]._actions for word in a.option_strings if word[:2] == "--"
    }
    assert completed(["hago", command, "--"], tmp_path) == options


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["search", "zoo:net", "--hardware", "x86"], {name for name in shipped_hardware() if name.startswith("x86")}),
        (["search", "zoo:net", "--searcher", "li"], {"limited"}),
        (["quantize", "zoo:net", "--estimator", "perc"], {"percentile"}),
        (["search", "zoo:net", "--effort", ""], {"fast", "good", "best"}),
        (["export", "zoo:net", "net.json", "--format", "model"], {"model_explorer"}),
        (["search", "zoo:net", "--log", "some"], {"some.jsonl", "some_folder/"}),
        (["search", "zoo:net", "--tensorboard", "some"], {"some_folder"}),
        (["evaluate", "zoo:net", "some.j"], {"some.jsonl"}),
    ],
)
def test_values_are_completed(words: list[str], expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").touch()
    (tmp_path / "some_folder").mkdir()
    found = {word.rstrip("/") for word in completed(["hago", *words], tmp_path)}
    assert found == {word.rstrip("/") for word in expected}


def test_without_shtab_it_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and "pip install 'hago[completion]'" in errors[0]
