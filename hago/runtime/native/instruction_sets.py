"""The instruction sets that kernels are built for, and which of them this processor has."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hago.errors import HagoError, did_you_mean
from hago.runtime.native.processor import processor_flags

#: Names of architectures that mean the same.
_ALIASES: Final = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set that the library of kernels is built for.

    Args:
        name: as `HAGO_MAX_CPU_ISA` has it; on x86, as oneDNN's `ONEDNN_MAX_CPU_ISA` has it.
        machine: the architecture.
        options: of the compiler.
        flags: what the system says of a processor that has it.
    """

    name: str
    machine: str
    options: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """The name of its library in a wheel."""
        return f"kernels-{self.machine}-{self.name.lower()}.so"


# options one by one, since compilers do not know names of levels (x86-64-v3) before GCC 11 and clang 12
_AVX2: Final = ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c", "-mmovbe", "-mpopcnt")
# prefetches for writing, which all of these processors have
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprfchw")
_VNNI: Final = (*_AVX512, "-mavx512vnni")
_AMX: Final = (*_VNNI, "-mavx512vbmi", "-mamx-tile", "-mamx-int8")
_AVX512_FLAGS: Final = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_AMX_FLAGS: Final = (*_AVX512_FLAGS, "avx512_vnni", "avx512vbmi", "amx_tile", "amx_int8")
#: By architecture, from the smallest to the largest.
INSTRUCTION_SETS: Final = (
    InstructionSet("SSE41", "x86_64", ("-msse4.2", "-mpopcnt"), ("sse4_1", "sse4_2", "ssse3", "popcnt")),
    InstructionSet("AVX2", "x86_64", _AVX2, ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe")),
    InstructionSet("AVX2_VNNI", "x86_64", (*_AVX2, "-mavxvnni"), ("avx2", "fma", "bmi2", "avx_vnni")),
    InstructionSet("AVX512_CORE", "x86_64", _AVX512, _AVX512_FLAGS),
    InstructionSet("AVX512_CORE_VNNI", "x86_64", _VNNI, (*_AVX512_FLAGS, "avx512_vnni")),
    InstructionSet("AVX512_CORE_AMX", "x86_64", _AMX, _AMX_FLAGS),
    InstructionSet("NEON", "aarch64", ("-march=armv8-a",), ("asimd",)),
    InstructionSet("DOTPROD", "aarch64", ("-march=armv8.2-a+dotprod",), ("asimd", "asimddp")),
    InstructionSet("I8MM", "aarch64", ("-march=armv8.2-a+dotprod+i8mm",), ("asimd", "asimddp", "i8mm")),
)


def machine() -> str:
    """The architecture of this processor, as `InstructionSet.machine` has it."""
    name = platform.machine().lower()
    return _ALIASES.get(name, name)


def largest_set(limit: str | None = None) -> InstructionSet | None:
    """The largest instruction set that this processor has and that may be used; None where there is none of them, or
    the system does not say what the processor has.

    Args:
        limit: the name of the largest set that may be used; by default what `HAGO_MAX_CPU_ISA` says.

    Raises:
        HagoError: this architecture has no set of that name.
    """
    limit = (limit or os.environ.get("HAGO_MAX_CPU_ISA") or "").upper()
    here = _sets_of(machine())
    names = [each.name for each in here]
    if limit and limit not in names:
        expected = f"expected one of {', '.join(names)}" if names else f"hago knows no instruction sets of {machine()}"
        raise HagoError(f"HAGO_MAX_CPU_ISA is {limit[:40]!r}; {expected}." + did_you_mean(limit, names))
    return _largest(here[: names.index(limit) + 1] if limit else here)


def smaller_sets(target: InstructionSet) -> list[InstructionSet]:
    """The smaller instruction sets that this processor has, from the largest to the smallest."""
    here = _sets_of(target.machine)
    below = here[: next((i for i, each in enumerate(here) if each.name == target.name), 0)]
    flags = processor_flags()
    return [each for each in reversed(below) if flags.issuperset(each.flags)]


def limited_text(used: InstructionSet) -> str:
    """That the processor has a larger instruction set than the one that is used; empty where it has none."""
    largest = _largest(_sets_of(used.machine))
    if largest is None or largest == used:
        return ""
    return f" (the processor has {largest.name}; unset HAGO_MAX_CPU_ISA to use it)"


def _sets_of(architecture: str) -> list[InstructionSet]:
    return [each for each in INSTRUCTION_SETS if each.machine == architecture]


def _largest(sets: Sequence[InstructionSet]) -> InstructionSet | None:
    flags = processor_flags()
    return next((each for each in reversed(sets) if flags.issuperset(each.flags)), None)
