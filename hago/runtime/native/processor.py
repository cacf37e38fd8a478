"""The processor of this machine, as far as the system tells."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_lines() -> list[str]:
    """The lines of /proc/cpuinfo; none on systems that have no such file."""
    try:
        return Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return []


def processor_name() -> str:
    """The name of the processor, if the system gives it, and its architecture."""
    names = [line.partition(":")[2].strip() for line in cpu_lines() if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()


def processor_flags() -> frozenset[str]:
    """The instruction sets as the system names them, e.g. "avx512_vnni"; empty if it does not list them."""
    flags = [line.partition(":")[2].split() for line in cpu_lines() if line.startswith(("flags", "Features"))]
    return frozenset(flags[0] if flags else ())
