"""The report of a machine: its extras are those of setup.cfg, and it says what is missing instead of failing."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from hago.analysis import examine_machine, machine
from hago.analysis.machine import EXTRAS, REQUIRED, MachineReport
from hago.runtime.native.instruction_sets import INSTRUCTION_SETS, largest_set, limited_text
from hago.runtime.native.instruction_sets import machine as machine_name
from hago.runtime.native.library import EXACTLY, IF_PAIRS_FIT, NEVER, products_text
from hago.runtime.native.self_test import NOTHING, exact_kernels

ROOT = Path(__file__).parents[2]
WITHOUT_COMPILER = """
import os, sys, tempfile
os.environ["PATH"], os.environ["HAGO_CACHE"] = "", tempfile.mkdtemp()
from hago.cli import main
sys.exit(main(["doctor", "--json"]))
"""


@pytest.fixture(scope="module")
def report() -> MachineReport:
    return examine_machine()


def test_extras_and_required_packages_are_those_of_the_installation() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    extras = {name: tuple(lines.split()) for name, lines in config["options.extras_require"].items()}
    assert {e.name: e.requirements for e in EXTRAS} == {
        n: r for n, r in extras.items() if n not in ("all", "docs", "test")
    }
    required = {line.partition(">=")[0] for line in config["options"]["install_requires"].split()}
    assert set(REQUIRED) == required


def test_the_guide_and_the_report_say_the_same_extras() -> None:
    page = (ROOT / "docs" / "installing.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.M))
    assert rows == {extra.name: ", ".join(f"`{name}`" for name in extra.packages) for extra in EXTRAS}


def test_what_is_there_is_reported(report: MachineReport) -> None:
    assert report.versions["torch"] == version("torch")
    assert {k.name: k.runs for k in report.kernels} == {n: v.exact for n, v in exact_kernels().verdicts.items()}
    assert all(k.why for k in report.kernels)
    assert set(report.extras["images"]) == {"pillow"}


@pytest.mark.parametrize("load, threads, says", [(9.0, 2, True), (1.0, 2, False), (9.0, 1, False), (None, 2, False)])
def test_a_busy_machine_is_told(report: MachineReport, load: float | None, threads: int, says: bool) -> None:
    text = " ".join(str(replace(report, cpus=2, threads=threads, load=load)).split())
    assert ("9.0: the CPUs are busy" in text and "GOMP_SPINCOUNT=4000" in text) == says


def test_the_text_names_everything(report: MachineReport) -> None:
    text = str(report)
    for name in (*report.versions, *report.instructions, *(e.name for e in EXTRAS), *(k.name for k in report.kernels)):
        assert name in text
    assert max(map(len, text.splitlines())) <= 160


def test_every_kernel_is_explained() -> None:
    assert set(machine._KERNELS_COMPUTE) == set(NOTHING.verdicts)


def test_a_missing_package_comes_with_its_command(report: MachineReport) -> None:
    extras = {name: dict.fromkeys(packages, "1.0") for name, packages in report.extras.items()}
    whole = replace(report, extras=extras)
    assert "missing" not in str(whole) and all(e["installed"] for e in whole.to_json()["extras"])
    lacking = replace(report, extras=extras | {"onnx": {"onnx": "1.17", "onnxruntime": None}})
    assert "onnxruntime is missing" in str(lacking)
    assert "  pip install 'onnx>=1.17' 'onnxruntime>=1.20'" in str(lacking).splitlines()
    assert [e["name"] for e in lacking.to_json()["extras"] if not e["installed"]] == ["onnx"]


def test_an_unknown_processor_and_no_compiler_are_said(report: MachineReport) -> None:
    bare = replace(report, instructions={}, compiler=None, library="no native kernels: no C++ compiler")
    assert "the system does not list them" in str(bare) and "install one" in str(bare) and "no C++" in str(bare)


def test_how_to_get_kernels_is_said_where_there_are_none(report: MachineReport) -> None:
    none = replace(report, kernels=tuple(replace(k, runs=False) for k in report.kernels))
    some = replace(report, kernels=tuple(replace(k, runs=True) for k in report.kernels))
    assert "install a C++ compiler with OpenMP" in str(none) and "scripts/build_wheel.py" in str(none)
    assert "install a C++ compiler with OpenMP" not in str(some)


@pytest.mark.skipif(largest_set() is None, reason="the system does not say what the processor has")
def test_how_bytes_are_multiplied_is_said_and_what_limits_it(report: MachineReport) -> None:
    every = [each for each in INSTRUCTION_SETS if each.machine == machine_name()]
    largest = largest_set()
    assert largest is not None and limited_text(largest) == ""
    if exact_kernels().calls is not None and "HAGO_MAX_CPU_ISA" not in os.environ:
        assert f"for {largest.name}: " in report.library and report.library in " ".join(str(report).split())
    for smaller in every[: every.index(largest)]:
        assert f"the processor has {largest.name}; unset HAGO_MAX_CPU_ISA" in limited_text(smaller)
    # whoever has the slower products is told what is faster
    assert "in pairs" in products_text(IF_PAIRS_FIT) and "in pairs" not in products_text(NEVER)
    assert [("a processor with" in products_text(dots)) for dots in (NEVER, IF_PAIRS_FIT, EXACTLY)] == [
        True,
        True,
        False,
    ]


def test_a_machine_without_a_compiler_is_no_error() -> None:
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    environment = {name: value for name, value in os.environ.items() if name != "HAGO_NATIVE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    values = json.loads(done.stdout)
    assert values["compiler"] is None and "no C++ compiler" in values["library"]
    assert not any(k["runs"] for k in values["kernels"] if k["name"].startswith("native"))
