"""hago as people install it: a wheel, built from the source distribution, in an environment outside the repository."""

from __future__ import annotations

import configparser
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from products import whole

from hago.runtime.native import library as native
from hago.runtime.native.instruction_sets import INSTRUCTION_SETS, InstructionSet, largest_set

ROOT = Path(__file__).parents[1]
#: What the source distribution is built from.
SOURCES = ("hago", "hardware_specs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
#: A search of a tiny network, on a chip that ships, with a check by the integer model.
ZOO = """
import torch

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3))

def batches():
    return [torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(1))]
"""
MODEL = ["zoo:net", "--hardware", "x86_vnni", "--data", "zoo:batches"]
WHERE = """
import json
from importlib.resources import files
import hago
native = files("hago.runtime.native") / "cpp"
print(json.dumps({"file": hago.__file__, "cpp": sorted(f.name for f in native.iterdir() if f.is_file())}))
"""


def run(command: Sequence[str], folder: Path) -> str:
    """The standard output of a command that succeeds, without this repository on the path of Python."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Build an sdist or a wheel of a folder, as `pip install` does, but with the setuptools that are installed here."""
    target.mkdir()
    run([sys.executable, "-c", BUILD.format(kind=kind), str(target)], source)
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(ROOT / name, source / name)
    return build("sdist", source, folder / "dist")


@pytest.fixture(scope="module")
def wheel(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from the source distribution alone."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(source_distribution) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.0 to 3.11.3 have none
        archive.extractall(folder)
    (source,) = folder.iterdir()
    return build("wheel", source, folder / "dist")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment"))


def install(wheel: Path, folder: Path) -> Path:
    """The folder of the commands of a new environment with the wheel, and the packages of this one but hago."""
    run([sys.executable, "-m", "venv", str(folder)], folder)
    python = folder / "bin" / "python"
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # a .pth file adds these folders alone, not what their own .pth files add, such as an editable hago
    here = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "reused.pth").write_text("\n".join(sorted(here)), "utf-8")
    return python.parent


def sources() -> set[str]:
    """The files that hago needs, by their paths in a wheel."""
    hago = {p.relative_to(ROOT).as_posix() for p in (ROOT / "hago").rglob("*") if p.is_file()}
    chips = {f"hago/hardware_specs/{p.name}" for p in (ROOT / "hardware_specs").glob("*.json")}
    return {p for p in hago if "__pycache__" not in p} | chips


def test_the_source_distribution_holds_what_a_build_needs(source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE"} <= names
    assert {f"hardware_specs/{p.name}" for p in (ROOT / "hardware_specs").glob("*.json")} <= names


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not re.match(r"hago-[^/]*\.dist-info/", name)}
    assert held == sources()
    assert len(held) > 300


def test_an_installed_hago_works_in_another_folder(installed: Path, tmp_path: Path) -> None:
    hago = str(installed / "hago")
    (tmp_path / "zoo.py").write_text(ZOO, "utf-8")
    found = json.loads(run([str(installed / "python"), "-c", WHERE], tmp_path))
    assert Path(found["file"]).is_relative_to(installed.parent) and "conv.cpp" in found["cpp"]
    assert run([hago, "--version"], tmp_path).startswith("hago ")
    chips = {row["name"] for row in json.loads(run([hago, "hardware", "list", "--json"], tmp_path))}
    assert chips == {p.stem for p in (ROOT / "hardware_specs").glob("*.json")}
    quantized = json.loads(run([hago, "quantize", *MODEL, "--json"], tmp_path))
    assert (tmp_path / quantized["strategy"]).exists()


RUNS_ON_KERNELS = """
import json
import hago, zoo
from hago.runtime.native import exact_kernels
quantized = hago.quantize(zoo.net().eval(), "x86_vnni", zoo.batches())
table = quantized.realize().explain()
print(json.dumps({"why": exact_kernels().why, "kernels": table.kernels}))
"""


def wheel_with_kernels(target: InstructionSet, compiler: str, option: str, folder: Path) -> Path:
    """A wheel with kernels for an instruction set, made by a compiler with one more option."""
    wrapper = folder / "compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {option}\n', "utf-8")
    wrapper.chmod(0o755)
    script = str(ROOT / "scripts" / "build_wheel.py")
    where = ["--out", str(folder / "dist"), "--machine", target.machine]
    command = [sys.executable, script, *where, "--compiler", str(wrapper), "--sets", target.name]
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, env=here, check=True, capture_output=True, text=True, timeout=300).stdout
    return Path(out.strip().splitlines()[-1])


def needed_libraries(library: Path) -> str:
    """What the header of a library says that it needs."""
    return subprocess.run(["readelf", "-d", str(library)], check=True, capture_output=True, text=True).stdout


def test_a_wheel_with_kernels_needs_no_compiler(tmp_path: Path) -> None:
    target = largest_set()
    if target is None or shutil.which("g++") is None or shutil.which("readelf") is None:
        pytest.skip("no g++ or readelf, or the system does not say what the processor has")
    # optimized kernels take twice as long to compile, and are the same but for their speed
    wheel = wheel_with_kernels(target, "g++", "-O3" if whole() else "-O1", tmp_path)
    assert re.fullmatch(rf"hago-[\d.]+-py3-none-manylinux_2_\d+_{target.machine}\.whl", wheel.name)
    environment, work = tmp_path / "environment", tmp_path / "work"
    environment.mkdir()
    work.mkdir()
    commands = install(wheel, environment)
    (work / "zoo.py").write_text(ZOO, "utf-8")
    # neither a compiler nor a folder for what it would build
    variables = {"PATH": str(commands), "HAGO_CACHE": str(tmp_path / "none"), "HOME": str(tmp_path)}
    variables |= {n: v for n, v in os.environ.items() if n.endswith("CPU_ISA")}  # the wheel is of no larger set
    command = [str(commands / "python"), "-W", "error::UserWarning", "-c", RUNS_ON_KERNELS]
    done = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["why"].startswith(f"shipped with hago, for {target.name}")
    libraries = [*environment.rglob(target.file_name)]
    assert len(libraries) == 1
    needed = needed_libraries(libraries[0])
    assert "NEEDED" in needed and "gomp" not in needed  # torch brings it
    # on tiles where the processor has them
    assert sum(n for name, n in found["kernels"].items() if name.startswith("native conv")) == 2
    assert not (tmp_path / "none").exists()


def test_a_wheel_for_another_architecture(tmp_path: Path) -> None:
    """`scripts/aarch64` runs what it carries."""
    compiler = "aarch64-linux-gnu-g++"
    if shutil.which(compiler) is None or shutil.which("readelf") is None:
        pytest.skip(f"no {compiler}, or no readelf")
    target = next(each for each in INSTRUCTION_SETS if each.name == "NEON")
    wheel = wheel_with_kernels(target, compiler, "-O0", tmp_path)
    assert re.fullmatch(r"hago-[\d.]+-py3-none-manylinux_2_\d+_aarch64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith(target.file_name))
        kernels = Path(archive.extract(library, tmp_path))
    needed = needed_libraries(kernels)
    assert "NEEDED" in needed and "gomp" not in needed
    header = subprocess.run(["readelf", "-h", str(kernels)], check=True, capture_output=True, text=True).stdout
    assert "AArch64" in header


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what a process has loaded")
def test_kernels_of_a_wheel_call_the_openmp_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = INSTRUCTION_SETS[0]
    (tmp_path / target.file_name).touch()
    opened: list[tuple[str, int]] = []
    monkeypatch.setattr(native, "SHIPPED", tmp_path)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path, mode=0: opened.append((path, mode)))
    native._shipped(target)
    *shared, kernels = opened
    assert kernels == (str(tmp_path / target.file_name), 0)
    # torch's wheels for aarch64 load their OpenMP for themselves alone
    assert [(Path(path).name.startswith("libgomp"), mode) for path, mode in shared] == [(True, ctypes.RTLD_GLOBAL)]


# ---------------------------------------------------------------- extras
def extras() -> dict[str, list[str]]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    return {name: lines.split() for name, lines in config["options.extras_require"].items()}


def test_the_extra_all_names_every_optional_one() -> None:
    (own,) = extras()["all"]
    match = re.fullmatch(r"hago\[(.*)\]", own)
    assert match and match[1].split(",") == sorted(extras().keys() - {"all", "docs", "test"})


def test_the_guide_names_the_oldest_versions() -> None:
    page = (ROOT / "docs" / "installing.md").read_text("utf-8")
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    oldest = config["options"]["install_requires"].split()
    assert f"Python {config['options']['python_requires'].removeprefix('>=')}" in page
    assert [line.replace(">=", " ") for line in oldest if line.replace(">=", " ") not in page] == []
