"""Libraries of kernels for the instruction sets of this architecture, all in one process."""

from __future__ import annotations

import functools
from typing import Final

import pytest
from products import named, whole

from hago.runtime.native import build
from hago.runtime.native import library as native
from hago.runtime.native.instruction_sets import INSTRUCTION_SETS as ALL
from hago.runtime.native.instruction_sets import largest_set, machine
from hago.runtime.native.processor import processor_flags
from hago.runtime.native.self_test import ExactKernels, examine

from .emulated_sets import can_emulate, emulated_library

#: The names of the instruction sets of this architecture; "" for the largest that the processor has.
INSTRUCTION_SETS = ("", *(each.name for each in ALL if each.machine == machine()))
#: The set that every run emulates where the processor lacks it: each takes half a minute to compile.
ALWAYS_EMULATED: Final = "AVX512_CORE_VNNI"


def library_for(name: str, *, asked: bool = False) -> native.Library:
    """The library for an instruction set, which is emulated where the processor lacks it; the test is skipped where the
    machine can neither run nor emulate it.

    Args:
        asked: whether every set is emulated, as with `--whole` or where the test is named.
    """
    if build.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    found = largest_set(name)
    if name and (found is None or found.name != name):
        return _emulated(name, asked or whole() or named())
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HAGO_NATIVE", raising=False)
        if name and found != largest_set() and not whole():  # a third to a half of the time to compile
            patch.setattr(build, "OPTIONS", ("-O1", *build.OPTIONS[1:]))
        library = native.library(name or None)
    assert library.calls is not None, library.why
    if name and library.instruction_set != name:
        pytest.skip(f"the compiler knows no {name}")
    return library


def _emulated(name: str, every_set: bool) -> native.Library:
    flags = next(each.flags for each in ALL if each.name == name)
    missing = f"the processor has no {', '.join(flag for flag in flags if flag not in processor_flags())}"
    if not can_emulate(name):
        pytest.skip(missing)
    if name != ALWAYS_EMULATED and not every_set:
        pytest.skip(f"{missing}; emulated with --whole, or where the test is named")
    return emulated_library(name)


def kernels_for(name: str) -> ExactKernels:
    """The kernels of the library for an instruction set that are exact in this process; see `library_for`."""
    return _examined(library_for(name))


@functools.cache
def _examined(library: native.Library) -> ExactKernels:
    return examine(library)
