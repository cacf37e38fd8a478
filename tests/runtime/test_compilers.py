"""Compilers that lack something build for a smaller instruction set, or for one thread, and the kernels say so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import pytest
import torch

from hago.runtime.native import build, instruction_sets
from hago.runtime.native import library as native
from hago.runtime.native.instruction_sets import INSTRUCTION_SETS, largest_set, machine
from hago.runtime.native.processor import processor_flags
from hago.runtime.native.self_test import ExactKernels, exact_kernels, examine

HERE: Final = [each for each in INSTRUCTION_SETS if each.machine == machine()]

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


def without(options: list[str], then: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first compiler that is found refuse options, and else do what a command says."""
    found = "|".join(f'*" {option} "*' for option in options)
    refusal = f'case " $* " in {found}) echo "error: unrecognized option" >&2; exit 1;; esac\n' if found else ""
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\n{refusal}if [ "$1" = --version ]; then echo old 1.0; exit; fi\n{then}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HAGO_CACHE", str(folder / "cache"))
    monkeypatch.delenv("HAGO_NATIVE", raising=False)
    monkeypatch.delenv("HAGO_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(native, "SHIPPED", folder)  # no wheel with kernels


#: Makes empty objects, and a copy of the library of this machine where they are linked.
COPIES: Final = 'for last; do :; done\ncase " $* " in *" -c "*) : > "$last"; exit;; esac\ncp "{}" "$last"'


def copying() -> str:
    return COPIES.format(build.build(largest_set()).path)


@pytest.mark.parametrize("name", [each.name for each in HERE[1:]])
def test_a_compiler_that_knows_no_instruction_set_builds_for_a_smaller_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = [each.name for each in HERE].index(name)
    target = HERE[place]
    lacking = [option for option in target.options if option not in HERE[place - 1].options]
    without(lacking, copying(), tmp_path, monkeypatch)
    has = processor_flags().union(target.flags)
    monkeypatch.setattr(instruction_sets, "processor_flags", lambda: has)
    smaller = next(each for each in instruction_sets.smaller_sets(target) if not {*lacking} & {*each.options})
    for _ in range(2):  # built, and found again
        built = build.build(target)
        assert built.target == smaller and built.threads
        assert built.path.parent == tmp_path / "cache"
    monkeypatch.setattr(native, "largest_set", lambda limit: target)
    why = native.library.__wrapped__().why
    assert f"built from source on this machine, for {smaller.name} (the compiler knows no {name}, which" in why


def test_a_compiler_that_knows_none_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(["-fPIC"], "exit 0", tmp_path, monkeypatch)
    with pytest.warns(match="cannot be built .error: unrecognized option"):
        assert native.library.__wrapped__().calls is None


@pytest.mark.parametrize("lacks", ["-march=native", "-mcpu=native"])
def test_a_compiler_that_finds_no_processor_builds_for_its_own(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(["-march=native", lacks], copying(), tmp_path, monkeypatch)
    assert build.build(None).threads
    assert len(list((tmp_path / "cache").glob("kernels-*.so"))) == 1


def test_openmp_of_torch_is_linked_by_compilers_that_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Apple's clang has none: it takes the option behind -Xclang."""
    (tmp_path / "lib").mkdir()
    carried = tmp_path / "lib" / "libomp.dylib"
    carried.touch()
    linked = tmp_path / "linked"
    then = 'case " $* " in *" -fopenmp "*) case " $* " in *" -Xclang -fopenmp "*) ;; *) exit 1;; esac;; esac\n'
    then += f'case " $* " in *" {carried} "*) echo "$@" >> "{linked}";; esac\n{copying()}'
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    without([], then, tmp_path, monkeypatch)
    assert build.build(largest_set()).threads
    probe, library = linked.read_text().splitlines()
    assert "probe.so" in probe and library.endswith("kernels.so") and "-c" not in library.split()


def test_what_a_compiler_has_got_since_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = copying()
    without(["-fopenmp"], whole, tmp_path, monkeypatch)
    assert [build.build(largest_set()).threads for _ in range(2)] == [False, False]
    assert len(list((tmp_path / "cache").glob("kernels-*.so"))) == 1
    script = tmp_path / "c++"
    script.write_text("\n".join(line for line in script.read_text().splitlines() if "unrecognized" not in line))
    assert build.build(largest_set()).threads


def test_openmp_that_is_linked_but_not_found_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = copying()
    monkeypatch.setattr(build, "_is_loaded", lambda library: False)
    without([], whole, tmp_path, monkeypatch)
    assert not build.build(largest_set()).threads
    monkeypatch.undo()
    (tmp_path / "empty.so").touch()
    assert not build._is_loaded(tmp_path / "empty.so")


def test_a_compiler_that_is_killed_is_no_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without([], "kill -9 $$", tmp_path, monkeypatch)
    with pytest.warns(match="cannot be built .*Command"):
        assert native.library.__wrapped__().calls is None


@pytest.fixture(scope="module")
def exact() -> set[str]:
    """The names of the kernels that are exact in this process."""
    if native.library().calls is None or "HAGO_MAX_CPU_ISA" in os.environ:
        pytest.skip("this process has no kernels, or not all of them")
    return exact_names(exact_kernels())


def exact_names(kernels: ExactKernels) -> set[str]:
    return {name for name, verdict in kernels.verdicts.items() if verdict.exact}


def unoptimized(monkeypatch: pytest.MonkeyPatch) -> native.Library:
    """The library that the first compiler makes, in less time."""
    monkeypatch.setattr(build, "OPTIONS", ("-O0", *build.OPTIONS[1:]))
    found = native.library.__wrapped__()
    assert found.calls is not None, found.why
    return found


def test_kernels_are_exact_without_openmp(exact: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(["-fopenmp"], f'exec {shutil.which("c++")} "$@"', tmp_path, monkeypatch)
    found = unoptimized(monkeypatch)
    assert ", on one thread (the compiler has no OpenMP; g++ has, and clang++ with libomp): " in found.why
    assert exact_names(examine(found)) == exact


@pytest.mark.skipif(shutil.which("clang++") is None, reason="there is no clang++")
def test_kernels_of_clang_are_exact(exact: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without([], f'exec {shutil.which("clang++")} "$@"', tmp_path, monkeypatch)
    assert exact_names(examine(unoptimized(monkeypatch))) == exact
