"""Builds the library of native kernels with the machine's compiler, and keeps it.

A library is built on first use into a folder of the user's (`HAGO_CACHE`, else `XDG_CACHE_HOME`, else ~/.cache), under
a name that holds a hash of the sources, the compiler, the processor and the user. It is synced and renamed, so
processes that build it at the same time do not disturb each other. A manifest beside it records its size and SHA-256,
so a file that a full disk, a crash or another user left there is built again instead of loaded.

A compiler that is older than an instruction set builds for a smaller one, and one without OpenMP builds kernels that
run on one thread; each process asks it again, in some tenths of a second, so that what it has since got is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tqdm import tqdm

from hago.errors import LogError
from hago.runtime.native.instruction_sets import InstructionSet, smaller_sets
from hago.runtime.native.processor import cpu_lines
from hago.serialization.json_text import canonical, parse_json, replace_file

SOURCES: Final = Path(__file__).parent / "cpp"
#: -ffp-contract=off: no fused multiply-add, since product and sum round separately (N3 in docs/numerics.md).
OPTIONS: Final = (
    *("-O3", "-std=c++17", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
#: In seconds.
COMPILE_TIMEOUT: Final = 300
#: A loop over threads, which a compiler must translate, link and have loaded, and instructions that its assembler must
#: know.
_PROBE: Final = """
#if defined(__SSE4_2__)
#include <immintrin.h>
#endif
#if defined(__AVXVNNI__)
__m256i bytes(__m256i a) { return _mm256_dpbusd_avx_epi32(a, a, a); }
#endif
#if defined(__AVX512VNNI__)
__m512i bytes(__m512i a) { return _mm512_dpbusd_epi32(a, a, a); }
#endif
#if defined(__AMX_INT8__)
void tiles() { _tile_dpbusd(0, 1, 2); }
#endif
void loop(int* a) {
#pragma omp parallel for
  for (int i = 0; i < 2; ++i) a[i] = i;
}
"""


@dataclass(frozen=True, slots=True)
class Built:
    """A library that was built here.

    Args:
        path: the file.
        target: the instruction set that it is for; None for what the compiler found.
        threads: whether its kernels run on several threads.
    """

    path: Path
    target: InstructionSet | None
    threads: bool


def find_compiler() -> str | None:
    """The path of the C++ compiler that builds the library; None if there is none."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def build(target: InstructionSet | None) -> Built:
    """The library that is built here, for an instruction set or the largest of the smaller ones that the compiler
    knows.

    Args:
        target: the instruction set; None for what the compiler finds.

    Raises:
        OSError: there is no compiler, or the folder cannot be written, or cannot be trusted.
        subprocess.SubprocessError: the compiler fails.
        LogError: the manifest cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C++ compiler on this machine (c++, g++ or clang++)")
    targets = (None,) if target is None else (target, *smaller_sets(target))
    # what a compiler that lacks nothing made is found without asking it
    kept = _kept(_manifest(compiler, next(options_for(target)), _OPENMP))
    if kept is not None:
        return Built(kept, target, _OPENMP.threads)
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_world_writable(folder)
    for old in folder.glob("build-*"):  # of processes that were killed
        if old.stat().st_mtime < time.time() - 2 * COMPILE_TIMEOUT:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as place:
        used, options = _known_options(compiler, targets, Path(place))
        openmp = _known_openmp(compiler, Path(place))
        manifest = _manifest(compiler, options, openmp)
        path = _kept(manifest) or _made(compiler, options, openmp, manifest, Path(place))
    return Built(path, used, openmp.threads)


def _made(compiler: str, options: Sequence[str], openmp: _OpenMP, manifest: Path, place: Path) -> Path:
    """The library that a compiler makes now, beside its manifest.

    Args:
        place: a folder for what is made on the way.
    """
    library = place / "kernels.so"
    objects = _compiled([compiler, *OPTIONS, *options, *openmp.compiling], place)
    _run([compiler, *OPTIONS, *options, *objects, *openmp.linking, "-o", str(library)])
    library.chmod(0o755)
    digest, size = _sha256(library), library.stat().st_size
    path = manifest.with_name(f"{manifest.stem}-{digest[:16]}.so")
    with open(library, "rb+") as file:
        os.fsync(file.fileno())
    library.replace(path)
    record = {"library": path.name, "bytes": size, "sha256": digest}
    replace_file(manifest, canonical(record), whatever_is_there=True)
    return path


# ---------------------------------------------------------------- what the compiler takes
def options_for(target: InstructionSet | None) -> Iterator[tuple[str, ...]]:
    """The options of compilers for an instruction set, the best first.

    Args:
        target: None for what the compiler finds.
    """
    if target is not None:
        yield (*target.options, "-mtune=native")
        yield target.options
    else:
        yield ("-march=native",)
        yield ("-mcpu=native",)  # compilers for ARM
        yield ()


def _known_options(
    compiler: str, targets: Sequence[InstructionSet | None], folder: Path
) -> tuple[InstructionSet | None, tuple[str, ...]]:
    """The first instruction set that a compiler knows, and its options; the first of all where it knows none, so that
    it says why."""
    tried = [(target, options) for target in targets for options in options_for(target)]
    return next((each for each in tried if _probe(compiler, each[1], (), folder)), tried[0])


@dataclass(frozen=True, slots=True)
class _OpenMP:
    """The options by which a compiler translates and links loops over threads; none where it does not."""

    compiling: tuple[str, ...] = ()
    linking: tuple[str, ...] = ()

    @property
    def threads(self) -> bool:
        return bool(self.compiling)


_OPENMP: Final = _OpenMP(("-fopenmp",), ("-fopenmp",))


def _known_openmp(compiler: str, folder: Path) -> _OpenMP:
    """The options of a compiler for OpenMP whose libraries are found where they are loaded, too."""
    # Apple's clang takes the option behind another one, and has no library; torch has brought and loaded one
    carried = sorted((Path(torch.__file__).parent / "lib").glob("libomp.*"))
    for each in (_OPENMP, *(_OpenMP(("-Xclang", "-fopenmp"), (str(path),)) for path in carried)):
        library = _probe(compiler, each.compiling, each.linking, folder)
        if library is not None and _is_loaded(library):
            return each
    return _OpenMP()


def _probe(compiler: str, compiling: Sequence[str], linking: Sequence[str], folder: Path) -> Path | None:
    """The library that a compiler makes of `_PROBE` with these options; None where it refuses.

    Raises:
        subprocess.SubprocessError: it was killed, or takes too long.
    """
    place = Path(tempfile.mkdtemp(dir=folder))  # a file that is loaded is not written again
    source, made = place / "probe.cpp", [place / name for name in ("probe.o", "probe.so")]
    source.write_text(_PROBE)
    try:
        _run([compiler, "-fPIC", *compiling, "-c", str(source), "-o", str(made[0])])
        _run([compiler, "-shared", str(made[0]), *linking, "-o", str(made[1])])
    except subprocess.CalledProcessError as error:
        if error.returncode < 0:
            raise
        return None
    return made[1]


def _is_loaded(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _compiled(command: Sequence[str], folder: Path) -> list[str]:
    """The object files of all sources, compiled side by side."""

    def compiled(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        _run([*(word for word in command if word != "-shared"), "-c", str(source), "-o", made])
        return made

    # those that take longest first
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: (-path.stat().st_size, path.name))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # quiet where standard error is no terminal
        return list(
            tqdm(pool.map(compiled, sources), "building kernels, once", len(sources), leave=False, disable=None)
        )


def _run(command: Sequence[str]) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT).stdout


# ---------------------------------------------------------------- what is kept
def _kept(manifest: Path) -> Path | None:
    """The library that a manifest names, if it is complete and unchanged and only root and this user can have written
    it; else None."""
    try:
        _refuse_world_writable(manifest.parent)
        written = manifest.lstat()
        if not stat.S_ISREG(written.st_mode) or written.st_size > 1024 or not _is_own(written):
            return None
        record = parse_json(manifest.read_text("utf-8"), str(manifest))
        name, size, digest = (record[key] for key in ("library", "bytes", "sha256"))
        if Path(name).name != name:
            return None
        target = manifest.with_name(name)
        status = target.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != size or not _is_own(status):
            return None
        return target if _sha256(target) == digest else None
    except (OSError, LogError, LookupError, TypeError, ValueError):
        return None


def _refuse_world_writable(folder: Path) -> None:
    """Refuse a folder in which every user can replace the files of others.

    Raises:
        OSError: the folder is world-writable without the sticky bit.
    """
    mode = folder.stat().st_mode
    if hasattr(os, "getuid") and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise OSError(f"every user can write to {folder}, so its files cannot be trusted; run chmod o-w on it")


def _is_own(status: os.stat_result) -> bool:
    """Whether a file belongs to this user or to root, and no other user can write it."""
    if not hasattr(os, "getuid"):
        return True  # not a POSIX system
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def cache_folder() -> Path:
    """The folder of built libraries."""
    named = os.environ.get("HAGO_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hago"


def _manifest(compiler: str, options: Sequence[str], openmp: _OpenMP) -> Path:
    """The path of the manifest of a library, with a hash of the sources, the options, the compiler, the processor and
    the user in its name."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    user = os.getuid() if hasattr(os, "getuid") else 0
    version, used = _run([compiler, "--version"]), (OPTIONS, options, openmp.compiling, openmp.linking)
    digest.update(repr((used, compiler, version, platform.machine(), _processor(), user)).encode())
    return cache_folder() / f"kernels-{digest.hexdigest()[:16]}.json"


def _processor() -> str:
    """The processor's instruction sets, as far as the system lists them. Several machines may share a cache."""
    lines = cpu_lines()
    if not lines:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
