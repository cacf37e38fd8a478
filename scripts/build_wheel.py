"""Build a wheel of hago that carries its kernels, so that who installs it needs no compiler.

There is one library for each instruction set, and the machine picks the largest that it has. The libraries call the
OpenMP that torch has loaded, so they need none of the system. A wheel for another architecture is built by a cross
compiler (`--machine aarch64 --compiler aarch64-linux-gnu-g++`). The oldest system on which it runs is the one whose
libraries this machine links with; build it in a container of manylinux to support older ones.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hago.errors import HagoError
from hago.runtime.native.build import OPTIONS, SOURCES
from hago.runtime.native.instruction_sets import INSTRUCTION_SETS, InstructionSet, machine

ROOT = Path(__file__).parents[1]
PARTS = ("hago", "hardware_specs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
#: The manylinux tag that allows a version of libstdc++'s symbols; see the policies of auditwheel.
LIBSTDCXX = ((19, 17), (22, 24), (25, 28), (28, 31), (29, 34), (30, 35), (32, 38), (33, 39))


def main() -> None:
    """Build and print the path of the wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the wheel")
    parser.add_argument("--machine", default=machine(), help="the architecture, x86_64 or aarch64")
    parser.add_argument("--compiler", default="g++", help="a g++ for that architecture")
    parser.add_argument("--sets", nargs="+", help="the instruction sets; all of the architecture by default")
    options = parser.parse_args()
    sets = [each for each in INSTRUCTION_SETS if each.machine == options.machine]
    unknown = set(options.sets or ()) - {each.name for each in sets}
    if unknown or not sets:
        known = ", ".join(f"{each.name} ({each.machine})" for each in INSTRUCTION_SETS)
        raise HagoError(f"no instruction sets {sorted(unknown)} of {options.machine}; there are {known}")
    if options.sets:
        sets = [each for each in sets if each.name in options.sets]
    print(build_wheel(sets, options.compiler, options.out.absolute()))


def build_wheel(sets: list[InstructionSet], compiler: str, out: Path) -> Path:
    """The path of the wheel with kernels for these instruction sets, which all have the same architecture."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "hago"
        source.mkdir()
        for part in PARTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__", "built"))
            else:
                shutil.copy(ROOT / part, source / part)
        built = source / SOURCES.relative_to(ROOT).parent / "built"
        built.mkdir()
        libraries = [build_library(each, compiler, built) for each in sets]
        name = run([sys.executable, "-c", BUILD, str(out)], source).splitlines()[-1]
        tag = f"manylinux_2_{max(map(oldest_system, libraries))}_{sets[0].machine}"
        tags = ["--python-tag", "py3", "--abi-tag", "none", "--platform-tag", tag]
        return out / run([sys.executable, "-m", "wheel", "tags", "--remove", *tags, name], out).splitlines()[-1]


def build_library(each: InstructionSet, compiler: str, folder: Path) -> Path:
    """Compile the kernels for an instruction set."""
    print(f"kernels for {each.name} of {each.machine}", file=sys.stderr)
    options = [option for option in OPTIONS if option != "-shared"]
    with tempfile.TemporaryDirectory() as objects:
        for source in sorted(SOURCES.glob("*.cpp")):
            command = [compiler, "-c", *options, *each.options, "-fopenmp", "-mtune=generic", str(source)]
            run([*command, "-o", str(Path(objects) / f"{source.stem}.o")], folder)
        library = folder / each.file_name
        # linked without OpenMP, whose calls are found in the library that torch has loaded
        run([compiler, "-shared", "-s", *map(str, sorted(Path(objects).glob("*.o"))), "-o", str(library)], folder)
    return library


def oldest_system(library: Path) -> int:
    """The minor version of the oldest glibc 2 whose systems have all symbols that a library needs."""
    needed = run(["readelf", "--version-info", str(library)], library.parent)
    glibc = max(int(minor) for minor in re.findall(r"\bGLIBC_2\.(\d+)", needed))
    newest = max((int(patch) for patch in re.findall(r"\bGLIBCXX_3\.4\.(\d+)", needed)), default=0)
    return max(glibc, 17, next(system for version, system in LIBSTDCXX if newest <= version))


def run(command: list[str], folder: Path) -> str:
    """The standard output of a command that succeeds."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HagoError(f"{command[0]} failed in {folder}: {done.stderr.strip()[-1000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
