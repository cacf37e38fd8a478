"""Libraries of kernels for the instruction sets of this machine, all in one process."""

from __future__ import annotations

import pytest
from products import whole

from hago.runtime.native import library as native
from hago.runtime.native.instruction_sets import INSTRUCTION_SETS as ALL
from hago.runtime.native.instruction_sets import largest_set, machine
from hago.runtime.native.processor import processor_flags

#: The names of the instruction sets of this architecture; "" for the largest that the processor has.
INSTRUCTION_SETS = ("", *(each.name for each in ALL if each.machine == machine()))


def library_for(name: str) -> native.Library:
    """The library for an instruction set; the test is skipped where the machine cannot build or run it."""
    if native.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    found = largest_set(name)
    if name and (found is None or found.name != name):
        flags = next(each.flags for each in ALL if each.name == name)
        pytest.skip(f"the processor has no {', '.join(flag for flag in flags if flag not in processor_flags())}")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HAGO_NATIVE", raising=False)
        if name and found != largest_set() and not whole():  # a third to a half of the time to compile
            patch.setattr(native, "OPTIONS", ("-O1", *native.OPTIONS[1:]))
        library = native.library(name or None)
    assert library.calls is not None, library.why
    return library
