"""The intrinsics of emulated_x86.h, by which kernels for other processors are tested, give what instructions give."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hago.runtime.native.build import find_compiler

from .emulated_sets import AVX2, HEADER, can_emulate, emulating_options

ALL = "AVX512_CORE_AMX"


def run_cases(header: str, folder: Path) -> str:
    """Compare the intrinsics of a header with instructions, and return what differs."""
    (folder / HEADER.name).write_text(header)
    compiler, program = find_compiler(), folder / "program"
    if compiler is None or not can_emulate(ALL):
        pytest.skip("there is no C++ compiler, or the processor has no AVX2")
    cases = HEADER.with_name("emulated_cases.cpp")
    command = [compiler, "-O0", "-std=c++17", *AVX2.options, *emulating_options(ALL), f"-I{folder}"]
    # a copy, for files beside the included one are found first
    (folder / cases.name).write_text(cases.read_text())
    command += [str(folder / cases.name), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=60).stdout


def test_emulated_intrinsics_equal_instructions(tmp_path: Path) -> None:
    assert run_cases(HEADER.read_text(), tmp_path) == "0 lanes differ\n"


def test_another_rounding_is_noticed(tmp_path: Path) -> None:
    header = HEADER.read_text().replace("std::nearbyint(", "std::round(")
    assert run_cases(header, tmp_path).startswith("cvtps_epi32 differs")
