"""What this machine has: its processor, the kernels that run on it, the compiler, versions and optional packages.

`examine_machine` looks, and `MachineReport` prints itself; `hago doctor` shows it.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from hago.errors import HagoWarning
from hago.runtime.native import cache_folder, exact_kernels, find_compiler, machine, processor_flags, processor_name
from hago.serialization.text_table import table, wrapped
from hago.version import VERSION

#: The packages that hago cannot do without.
REQUIRED: Final = ("torch", "numpy", "scipy", "optuna", "jsonschema", "tqdm")
#: The instruction sets that kernels use, by architecture as `platform.machine` names it in lower case.
_USED_SETS: Final[Mapping[str, tuple[str, ...]]] = {
    "x86_64": ("sse4_2", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512vbmi", "amx_tile", "amx_int8"),
    "aarch64": ("asimd", "asimddp", "i8mm"),
}
#: What each kernel of `hago.runtime.native.ExactKernels` computes.
_KERNELS_COMPUTE: Final[Mapping[str, str]] = {
    "native passes": "requantization, sums, clamps, tables and pooling",
    "native products": "products of two values, elementwise and of matrices",
    "native convolution": "convolutions and products with weights",
    "native convolution, AMX": "the same on matrix tiles",
    "native convolution, int16": "the same with 16-bit activations",
    "native softmax": "the softmax of attention, with the bits of torch's",
    "native layer norm": "layer norms with their quantization, with the bits of torch's",
    "oneDNN": "convolutions and products, where no native ones run",
    "oneDNN, fused": "the same with a requantization by a power of two",
}

#: What `hago doctor` advises where none of hago's kernels runs.
_HOW_TO_GET_KERNELS: Final = (
    "To get hago's kernels, install a C++ compiler with OpenMP (g++ or clang++), or a wheel that carries them, which",
    "scripts/build_wheel.py builds.",
)
#: What `hago doctor` says of a busy machine.
_BUSY: Final = (
    "the CPUs are busy, and threads of torch that wait for each other take the time of those that compute. The "
    "command hago has them sleep; for your own programs set GOMP_SPINCOUNT=4000 (or OMP_NUM_THREADS=1) before Python "
    "starts"
)


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra of hago, and the packages that it installs.

    Args:
        name: as in `pip install '.[name]'`.
        requirements: what pip is asked for, as setup.cfg has it.
        purpose: what it is for.
    """

    name: str
    requirements: tuple[str, ...]
    purpose: str

    @property
    def packages(self) -> tuple[str, ...]:
        """The names of the packages, without versions."""
        return tuple(text.partition(">=")[0].partition("[")[0] for text in self.requirements)

    @property
    def command(self) -> str:
        """The command that installs the packages into the environment of this Python."""
        return shlex.join(["pip", "install", *self.requirements])


#: The extras of setup.cfg but `all`, and those for working on hago: `docs` and `test`.
EXTRAS: Final = (
    Extra("completion", ("shtab>=1.6",), "words completed in the shell (hago --print-completion)"),
    Extra("dask", ("distributed>=2023.5",), "searches on several machines (--executor dask://host:port)"),
    Extra("demo", ("scikit-learn>=1.3",), "the data of hago demo"),
    Extra("images", ("pillow>=9",), "calibration data from a folder of images"),
    Extra("onnx", ("onnx>=1.17", "onnxruntime>=1.20"), "hago export --format onnx, and its check in ONNX Runtime"),
    Extra("openvino", ("openvino>=2024.4",), "OpenVINO in hago compare and in the check of an export"),
    Extra("pandas", ("pandas>=2.0",), "data frames of fronts, trials and inspections (to_frame)"),
    Extra("plot", ("matplotlib>=3.7",), "pictures of fronts, trials and inspections (plot), also in notebooks"),
    Extra("postgres", ("psycopg[binary]>=3.1",), "searches that share a study of Optuna in PostgreSQL"),
    Extra("report", ("grandalf>=0.8", "jinja2>=3.0"), "hago report, and hago search --report"),
    Extra("safetensors", ("safetensors>=0.4",), "--weights from a .safetensors file"),
    Extra("tensorboard", ("tensorboard>=2.14",), "searches and training watched in TensorBoard"),
    Extra("wandb", ("wandb>=0.16",), "searches and training watched in Weights & Biases"),
)


@dataclass(frozen=True, slots=True)
class KernelState:
    """Whether a kind of kernels runs on this machine, and why (not)."""

    name: str
    runs: bool
    why: str


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What a machine has. Made by `examine_machine`; prints itself in tables.

    Args:
        platform: the system and its version.
        processor: its name and architecture.
        instructions: whether the processor has each instruction set that kernels use; empty if the system does not say.
        cpus, threads: how many CPUs this process may use, and how many threads torch uses.
        load: how many processes computed or waited for a CPU in the last minute; None if the system does not say.
        versions: of Python, hago and the packages that it requires; None for one that is missing.
        compiler: the path and the version of the C++ compiler; None if there is none.
        cache: the folder of built kernels.
        library: where the library of native kernels comes from and its instruction set, or why there is none.
        switched_off: whether there is none because the user wants none.
        kernels: one per kind of kernels, all of which were tested against exact integers.
        extras: the versions of the packages of each extra, by name; None for a package that is missing.
    """

    platform: str
    processor: str
    instructions: Mapping[str, bool]
    cpus: int
    threads: int
    load: float | None
    versions: Mapping[str, str | None]
    compiler: tuple[str, str] | None
    cache: str
    library: str
    switched_off: bool
    kernels: tuple[KernelState, ...]
    extras: Mapping[str, Mapping[str, str | None]]

    @property
    def is_busy(self) -> bool:
        """Whether other work takes CPUs that the threads of torch would use."""
        return self.load is not None and self.threads > 1 and self.load > self.cpus

    def missing(self) -> tuple[Extra, ...]:
        """The extras of which a package is missing."""
        return tuple(extra for extra in EXTRAS if None in self.extras[extra.name].values())

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        missing = self.missing()
        return {
            "platform": self.platform,
            "processor": self.processor,
            "instructions": dict(self.instructions),
            "cpus": self.cpus,
            "threads": self.threads,
            "load": self.load,
            "versions": dict(self.versions),
            "compiler": None if self.compiler is None else {"path": self.compiler[0], "version": self.compiler[1]},
            "cache": self.cache,
            "library": self.library,
            "kernels": [{"name": k.name, "runs": k.runs, "why": k.why} for k in self.kernels],
            "extras": [
                {
                    "name": extra.name,
                    "installed": extra not in missing,
                    "packages": dict(self.extras[extra.name]),
                    "purpose": extra.purpose,
                    "install": extra.command,
                }
                for extra in EXTRAS
            ],
        }

    def __str__(self) -> str:
        return "\n".join([*self._machine_lines(), "", *self._kernel_lines(), "", *self._extra_lines()])

    def _machine_lines(self) -> list[str]:
        had, lacked = ([n for n, has in self.instructions.items() if has == here] for here in (True, False))
        sets = f"{', '.join(had) or 'none'}{'; not ' if lacked else ''}{', '.join(lacked)}"
        path, compiler_version = self.compiler or ("none", "install one, e.g. g++ or clang++, to build the kernels")
        python, *packages = (f"{name} {found or 'is missing'}" for name, found in self.versions.items())
        return [
            f"platform      {self.platform}, {python}",
            f"processor     {self.processor}: {self.cpus} CPUs, {self.threads} of them used by torch",
            *(
                wrapped(f"load          {self.load:.1f}: {_BUSY}", " " * 14)
                if self.load is not None and self.is_busy
                else ()
            ),
            f"instructions  {sets if self.instructions else 'the system does not list them'}",
            *wrapped(f"versions      {', '.join(packages)}", " " * 14),
            f"compiler      {path} ({compiler_version})",
            *wrapped(f"native code   {self.library}; the folder of what is built is {self.cache}", " " * 14),
        ]

    def _kernel_lines(self) -> list[str]:
        has_kernels = any(k.runs for k in self.kernels if k.name.startswith("native"))
        rows = [
            (k.name, "yes" if k.runs else "no", _KERNELS_COMPUTE[k.name] + ("" if said else f" ({k.why})"))
            for k in self.kernels
            for said in [k.runs or k.why == self.library]
        ]
        return [
            *table(("kernels", "run", "for"), rows),
            "Those that run were tested just now against exact integers. Without the others, integer models give the",
            "same outputs, more slowly.",
            *([] if has_kernels or self.switched_off else _HOW_TO_GET_KERNELS),
        ]

    def _extra_lines(self) -> list[str]:
        rows = [(extra.name, _state(self.extras[extra.name]), extra.purpose) for extra in EXTRAS]
        lines = table(("extra", "packages", "for"), rows)
        if self.missing():
            lines += ["to install what is missing:", *(f"  {extra.command}" for extra in self.missing())]
        return lines


def _state(packages: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {found}" if found else f"{name} is missing" for name, found in packages.items())


def examine_machine() -> MachineReport:
    """Look at this machine. The native kernels are built if they have not been, which may take half a minute, and the
    kernels are tested.

    Nothing that is missing is an error; the report says it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HagoWarning)  # that kernels cannot be built, which the report says
        kernels = exact_kernels()
    sets, used = processor_flags(), _USED_SETS.get(machine(), ())
    compiler = find_compiler()
    return MachineReport(
        platform=platform.platform(terse=True),
        processor=processor_name(),
        instructions={name: name in sets for name in used} if sets else {},
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        versions={"Python": platform.python_version(), "hago": VERSION, **{name: _version(name) for name in REQUIRED}},
        compiler=None if compiler is None else (compiler, _compiler_version(compiler)),
        cache=str(cache_folder()),
        library=kernels.why,
        switched_off=kernels.switched_off,
        kernels=tuple(KernelState(name, v.exact, v.why) for name, v in kernels.verdicts.items()),
        extras={extra.name: {name: _version(name) for name in extra.packages} for extra in EXTRAS},
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        module = sys.modules.get(package)
        return getattr(module, "__version__", None)


def _compiler_version(compiler: str) -> str:
    """The first line of what the compiler says of its version."""
    try:
        said = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"which does not say its version: {error}"
    return (said.splitlines() or ["which says no version"])[0]
