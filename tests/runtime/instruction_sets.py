"""Libraries of kernels for the instruction sets of this machine, all in one process."""

from __future__ import annotations

import shutil
from typing import Final

import pytest

from hago.analysis.processor import instruction_sets
from hago.runtime.native import library as native

#: By what `HAGO_MAX_CPU_ISA` may say, what the system calls the newest instructions of the set; "" for all that the
#: processor has.
NEWEST: Final = {
    "": (),
    "SSE41": ("sse4_2",),
    "AVX2": ("avx2", "fma", "bmi2"),
    "AVX512_CORE": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "AVX512_CORE_VNNI": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
}
INSTRUCTION_SETS: Final = tuple(NEWEST)


def library_for(name: str) -> native.Library:
    """The library for an instruction set; the test is skipped where the machine cannot build or run it."""
    if shutil.which("c++") is None and native.find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    missing = [flag for flag in NEWEST[name] if flag not in instruction_sets()]
    if missing:
        pytest.skip(f"the processor has no {', '.join(missing)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HAGO_NATIVE", raising=False)
        found = native.library(name or None)
    assert found.calls is not None, found.why
    return found
