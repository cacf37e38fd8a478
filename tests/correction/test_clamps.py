"""On chips that list `channel_clamp`, equalization divides the limits of clamps, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from networks import Uneven, images

import hago
from hago.correction import Corrections
from hago.errors import HagoError, LogError
from hago.export.onnx.export import make_onnx
from hago.export.onnx.verification import check_onnx
from hago.hardware import Hardware, load_hardware
from hago.study import read_log

from .stored import check_stored

DATA = [images(16, 3, 8, 8, seed=n) for n in range(4)]
CHIPS = ("vta", "x86_vnni", "tflite", "cmsis_nn", "onnxruntime_cpu")


def with_channel_clamps(name: str) -> Hardware:
    """A shipped chip whose clamps can have a limit for each channel."""
    chip = load_hardware(name)
    return replace(chip, ops={**chip.ops, "channel_clamp": chip.ops["clamp"]}, name=f"{name} with channel clamps")


def sqnr(quantizer: Any) -> float:
    return float(quantizer.strategy.made_by["results"]["sqnr"])


@pytest.mark.parametrize("name", CHIPS)
def test_clamps_that_bind_keep_no_factor(name: str, tmp_path: Path) -> None:
    model, chip = Uneven(high=1.0).eval(), with_channel_clamps(name)
    one, each = (hago.quantize(model, of, DATA, corrections="equalization") for of in (load_hardware(name), chip))
    assert not one.strategy.corrections.clamps and len(each.strategy.corrections.clamps) == 2
    assert sqnr(each) > sqnr(one) + 1.0
    assert [each.plan.graph[n].op for n in each.strategy.corrections.clamps] == ["channel_clamp"] * 2
    assert set(each.strategy.corrections.clamps) <= each.plan.nodes.keys()  # in integers
    check_stored(each, model, chip, DATA, tmp_path)


@pytest.mark.parametrize(
    ("name", "form"), [("onnxruntime_cpu", "qdq"), ("x86_vnni", "qoperator"), ("vta", "qoperator")]
)
def test_onnx_files_have_the_limits(name: str, form: str) -> None:
    plan = hago.quantize(Uneven(high=1.0).eval(), with_channel_clamps(name), DATA, corrections="equalization").plan
    result = check_onnx(make_onnx(plan, form), plan, [[DATA[0]]])
    assert result.same and result.compared > 0, str(result)


def test_a_search_keeps_its_limits_in_its_log(tmp_path: Path) -> None:
    model, chip, log = Uneven(high=1.0).eval(), with_channel_clamps("vta"), tmp_path / "log.jsonl"
    options: dict[str, Any] = {"log": log, "progress": False}
    hago.search_quantize_strategy(model, chip, DATA, budget=2, **options)
    header = read_log(log).header
    assert header is not None and len(header.settings["corrections"]["clamps"]) == 2
    strategy, score = hago.search_quantize_strategy(model, chip, DATA, budget=4, **options)
    assert hago.replay(model, chip, log, DATA).same
    assert hago.evaluate_strategy(model, chip, strategy, DATA).value == score


def test_clamps_that_do_not_fit_are_refused() -> None:
    graph = hago.from_torch(Uneven(high=1.0).eval(), (DATA[0][:1],))
    for name in ("expand", "elsewhere"):
        with pytest.raises(LogError, match="edited"):
            Corrections({"expand": (16,) * 16}, clamps=(name,)).apply(graph)


def test_such_strategies_are_not_trained(tmp_path: Path) -> None:
    model, chip = Uneven(high=1.0).eval(), with_channel_clamps("x86_vnni")
    strategy = hago.quantize(model, chip, DATA, corrections="equalization").strategy
    with pytest.raises(HagoError, match="without equalization"):
        hago.prepare_qat(model, chip, strategy)
    without = hago.quantize(model, chip, DATA, corrections=["thresholds", "rounding", "bias"]).strategy
    hago.prepare_qat(model, chip, without)
    finetune = {"steps": 1, "batch_size": 16, "save_weights": tmp_path / "tuned.safetensors"}
    tuned, _ = hago.search_quantize_strategy(model, chip, DATA, budget=2, progress=False, finetune=finetune)
    assert not tuned.corrections.equalization
