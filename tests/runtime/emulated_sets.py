"""Libraries of kernels for instruction sets of x86 that this processor lacks: on AVX2, with the other intrinsics in
plain C++ (emulated_x86.h)."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from hago.runtime.native import build
from hago.runtime.native import library as native
from hago.runtime.native.instruction_sets import INSTRUCTION_SETS
from hago.runtime.native.processor import processor_flags

HEADER: Final = Path(__file__).with_name("emulated_x86.h")
AVX2: Final = next(each for each in INSTRUCTION_SETS if each.name == "AVX2")
#: By instruction set, the instructions that the header emulates.
EMULATES: Final = {
    "AVX2_VNNI": ("AVXVNNI",),
    "AVX512_CORE": ("AVX512",),
    "AVX512_CORE_VNNI": ("AVX512", "AVX512VNNI"),
    "AVX512_CORE_AMX": ("AVX512", "AVX512VNNI", "AVX512VBMI", "AMX"),
}
#: The intrinsics that the header has, and the call that asks the system for matrix tiles.
_EMULATED: Final = re.compile(r"\b(?:_(?=mm512_|mm(256)?_maskz?_|mm256_dp|tile_)|(?=syscall\())")


def can_emulate(name: str) -> bool:
    """Whether this processor runs the library that emulates an instruction set."""
    return name in EMULATES and processor_flags().issuperset(AVX2.flags)


def emulating_options(name: str) -> tuple[str, ...]:
    """The options of the compiler for the files of `write_emulating`."""
    return ("-Wno-psabi", "-Wno-ignored-attributes", *(f"-DEMULATES_{each}" for each in EMULATES[name]))


def write_emulating(folder: Path) -> None:
    """Write copies of the kernels whose intrinsics are those of the header, which lies beside them."""
    (folder / HEADER.name).write_bytes(HEADER.read_bytes())
    for source in (*build.SOURCES.glob("*.cpp"), *build.SOURCES.glob("*.h")):
        text = _EMULATED.sub("emulated_", source.read_text())
        # what tells compilers to keep a register, which may be none here
        text = re.sub(r'__asm__\(""[^;]*;', "", text)
        (folder / source.name).write_text(f'#include "{HEADER.name}"\n#line 1\n{text}')


@functools.cache
def emulated_library(name: str) -> native.Library:
    """The library that emulates an instruction set: built once into the folder of built libraries, by one process at a
    time, and loaded once per process."""
    target = replace(AVX2, name=name, options=(*AVX2.options, *emulating_options(name)))
    build.cache_folder().mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        (build.cache_folder() / "emulated.lock").open("w") as lock,
        pytest.MonkeyPatch.context() as patch,
    ):
        write_emulating(Path(folder))
        patch.setattr(build, "SOURCES", Path(folder))
        # optimized, they take twice as long to compile, which is more than their tests take
        patch.setattr(build, "OPTIONS", ("-O0", *build.OPTIONS[1:]))
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = build.build(target)
    assert built.target == target
    calls = native.typed(ctypes.CDLL(str(built.path)))
    return native.Library(calls, f"emulated, for {name}: {native.products_text(calls.hago_adds_bytes(0))}")
