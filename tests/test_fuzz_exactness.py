"""A small run of scripts/fuzz_exactness.py, and that it would notice."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fuzz_exactness
import pytest
from building import Builder, seeded
from products import whole
from random_hardware import random_hardware

from hago.graph import Graph
from hago.hardware import Hardware
from hago.hardware.file import check_hardware, load_hardware, save_hardware
from hago.plan import Plan, Strategy
from hago.runtime.exactness import Exactness, compare_plan_exactly
from hago.search.preparation import prepare
from hago.search.stored_strategy import plan_of


@pytest.mark.parametrize("check", [fuzz_exactness.check, fuzz_exactness.check_wide, fuzz_exactness.check_corrected])
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_random_networks(check: Callable[[int, fuzz_exactness.Counts], None], first: int) -> None:
    """Three of every ten of fifty; all of them with --whole."""
    counts, number = fuzz_exactness.Counts(), 10 if whole() else 3
    for seed in range(first, first + number):
        check(seed, counts)
    assert counts.wrong == []
    assert counts.graphs == number and counts.values > 100 * number
    corrected = check is fuzz_exactness.check_corrected
    assert counts.plans == (2 * (counts.graphs - counts.refused) if corrected else 2 * number)


@pytest.mark.parametrize("limits", [((-1.0, 1.0), (0.0, 6.0)), ((None, 0.75), (-0.3, None)), ((0.0, 6.0), (-1.0, 1.0))])
def test_clamps_in_a_row(limits: tuple[tuple[float | None, float | None], ...]) -> None:
    """What networks 577, 1029 and 1365 of the script showed: the last clamp in a row is not the only one."""
    b = Builder()
    x = b.conv2d(b.input(3, 6, 6, name="x"), seeded(4, 3, 3, 3), name="conv")
    x = b.call("mul", x, x)
    for low, high in limits:
        x = b.call("clamp", x, min=low, max=high)
    for name in ("x86_vnni", "vta"):
        prepared = prepare(b.graph(x), name, [(seeded(2, 3, 6, 6) * 3,)])
        assert compare_plan_exactly(prepared.resolver(prepared.space.widest()), [seeded(2, 3, 6, 6) * 3]).same


def test_sums_that_float32_rounds_are_shifted_at_the_output_as_they_are() -> None:
    """Sums past 2**24 next to a tie, on a chip that shifts when it stores an output of 16 bits."""
    counts = fuzz_exactness.Counts()
    fuzz_exactness.check(990089, counts)
    assert counts.wrong == [] and counts.values > 0


def test_a_sum_of_types_that_kernels_do_not_store() -> None:
    """Network 3103 of the script: a real operand quantized to a type that the pass over rows cannot read."""
    counts = fuzz_exactness.Counts()
    fuzz_exactness.check(3103, counts)
    assert counts.graphs == 1 and counts.wrong == []


@pytest.mark.parametrize("seed", [2029, 2197])
def test_corrections_that_move_no_integer_are_stored(seed: int) -> None:
    """Thresholds are trained, and every integer stays the nearest."""
    counts = fuzz_exactness.Counts()
    fuzz_exactness.check_corrected(seed, counts)
    assert counts.graphs == 1 and counts.wrong == []


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fuzz_exactness, "compare_plan_exactly", lambda plan, inputs: Exactness(7, {"conv": 3}))
    monkeypatch.setattr(sys, "argv", ["fuzz_exactness.py", "--graphs", "1", "--seed", "5"])
    assert fuzz_exactness.main() == 1
    said = capsys.readouterr().out
    assert "--seed 5 --graphs 1: on " in said and "conv: 3" in said


def test_what_is_not_stored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_offsets(graph: Graph, hardware: Hardware, strategy: Strategy) -> Plan:
        return plan_of(graph, hardware, replace(strategy, corrections=replace(strategy.corrections, offsets={})))

    monkeypatch.setattr(fuzz_exactness, "plan_of", without_offsets)
    counts = fuzz_exactness.Counts()
    for seed in range(10):
        fuzz_exactness.check_corrected(seed, counts)
        if counts.wrong:
            break
    assert any("the stored strategy gives another Plan" in line for line in counts.wrong)


def test_random_hardware_is_sound(tmp_path: Path) -> None:
    seen = set()
    for seed in random.Random(0).sample(range(1000), 60):
        chip = random_hardware(seed)
        check_hardware(chip)
        seen |= {d.form for descs in chip.ops.values() for d in descs}
        seen |= {d.register.overflow for descs in chip.ops.values() for d in descs}
        seen |= {chip.requantize.form, chip.requantize.search}
        seen |= {"weight only" for descs in chip.ops.values() if descs[0].is_weight_only}
        groups = [d.groups for descs in chip.ops.values() for d in descs if d.groups]
        seen |= {"groups" if g.multiplier_bits is None else "groups with multipliers" for g in groups}
        seen |= {"partial sums" for g in groups if g.partial}
        outs = [{d.out_dtype for d in descs if d.requantize_at == "output"} for descs in chip.ops.values()]
        seen |= {"outputs of two widths" for dtypes in outs if len(dtypes) > 1}
    assert seen >= {
        "tflite",
        "tpu_mlir",
        "dequantize",
        "qlinear",
        "saturate_pairs",
        "saturate_each",
        "onnxruntime",
        "least_error",
        "weight only",
        "outputs of two widths",
        "groups",
        "groups with multipliers",
        "partial sums",
    }
    save_hardware(chip, tmp_path / "chip.json")
    assert load_hardware(tmp_path / "chip.json") == chip == random_hardware(seed)
