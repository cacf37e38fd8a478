"""Comparisons of realizations: equal ones compare equal, and differences are found and located."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence

import pytest
import torch
from building import seeded
from networks import Small, images, randomized
from torch import Tensor, nn

import hago
from hago.analysis import comparison
from hago.analysis.comparison import REALIZATIONS, Realize, compare_plan, compare_realizations
from hago.data.batches import Batches
from hago.errors import HagoError, HagoWarning
from hago.export.onnx import engines as onnx_engines
from hago.plan.plan import Plan
from hago.serialization.json_text import json_values

DATA = [images(6, 1, 8, 8), images(3, 1, 8, 8, seed=1)]


def quantized(chip: str) -> hago.Quantizer:
    return hago.quantize(randomized(Small()), chip, DATA)


@pytest.mark.parametrize("chip", ["onnxruntime_cpu", "x86_vnni"])
def test_realizations_of_hago_and_onnxruntime_are_equal(chip: str) -> None:
    pytest.importorskip("onnxruntime")
    quantizer = quantized(chip)
    names = ("fast", "simulated", "onnxruntime", "float")
    result = compare_realizations(randomized(Small()), chip, quantizer.strategy, DATA, names)
    assert [a.name for a in result.against] == list(names) and result.samples == 9
    fast, simulated, engine, real = result.against
    assert not fast.places and fast.outputs[0].compared == 27 and fast.outputs[0].differing == 0
    for same in (simulated, engine):
        assert {p.place for p in same.integers} == set(quantizer.plan.nodes)
        assert sum(p.compared for p in same.integers) > 1000
        assert all(p.differing == 0 for p in (*same.places, *same.outputs))
    assert sum(p.differing for p in real.integers) > 0
    assert "0 quanta" in str(result) and json.dumps(json_values(result.to_json(), "comparison"))


def test_a_difference_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    """A realization that adds three quanta in one node."""

    def wrong(plan: Plan) -> Realize:
        run = REALIZATIONS["reference"](plan)

        def off(inputs: object) -> object:
            values, outputs = run(inputs)  # type: ignore[arg-type]
            values["body"] = values["body"].clone()
            values["body"][0, 0, 0, 0] += 3
            return values, outputs

        return off  # type: ignore[return-value]

    monkeypatch.setattr(comparison, "REALIZATIONS", {**REALIZATIONS, "wrong": wrong})
    plan = quantized("x86_vnni").plan
    whole = compare_plan(plan, Batches(DATA, plan.graph.inputs), ["wrong", "fast"])
    result, _ = whole.against
    assert str(whole).count("a difference goes on into the nodes") == 1
    assert "goes on" not in str(compare_plan(plan, Batches(DATA, plan.graph.inputs), ["fast"]))
    assert {p.place: (p.differing, p.largest) for p in result.places if p.differing} == {"body": (2, 3.0)}


def test_accuracy_and_agreement_are_shown_where_there_are_labels_and_classes() -> None:
    plan = quantized("x86_vnni").plan
    labelled = [(x, torch.arange(len(x)) % 3) for x in DATA]
    with_labels = compare_plan(plan, Batches(labelled, plan.graph.inputs), ["fast", "float"])
    without = compare_plan(plan, Batches(DATA, plan.graph.inputs), ["fast", "float"])
    fast, real = with_labels.against
    outputs = torch.cat([quantized("x86_vnni").realize()(x) for x in DATA])
    right = float((outputs.argmax(1) == torch.cat([y for _, y in labelled])).double().mean())
    assert with_labels.accuracy == fast.accuracy == pytest.approx(right)
    assert fast.agreement == 1.0 and real.agreement is not None and without.against[0].agreement == 1.0
    assert f"with an accuracy of {100 * right:.2f} %" in str(with_labels) and "accuracy" not in str(without)
    assert without.accuracy is None and without.against[0].accuracy is None
    assert max(map(len, str(with_labels).splitlines())) <= 100 and "outputs only" in str(with_labels)


def test_labels_that_are_no_classes_are_warned_of_and_give_no_accuracy() -> None:
    plan = quantized("x86_vnni").plan
    labelled = [(x, torch.full((len(x),), 3 * (len(x) == 3))) for x in DATA]  # the last batch has a fourth class
    with pytest.warns(HagoWarning, match=r"sample 6 is the first outside.*only agreement with reference"):
        result = compare_plan(plan, Batches(labelled, plan.graph.inputs), ["fast"])
    assert result.accuracy is None and result.against[0].accuracy is None and result.against[0].agreement == 1.0


def test_an_output_without_classes_has_no_agreement() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).mean(1)

    model = nn.Sequential(nn.Conv2d(1, 2, 3), Sum()).eval()
    strategy = hago.quantize(model, "x86_vnni", DATA).strategy
    (result,) = compare_realizations(model, "x86_vnni", strategy, DATA, ["fast"]).against
    assert result.agreement is None and result.accuracy is None and result.outputs[0].compared == 9


def test_no_outputs_are_kept_from_batch_to_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first outputs of any batch that are alive while another is run are as many as in the second batch."""
    alive: list[int] = []

    def counting(plan: Plan) -> Realize:
        run = REALIZATIONS["simulated"](plan)

        def count(inputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
            tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.device.type == "cpu"]
            alive.append(sum(o.shape == (5, 3) for o in tensors))
            return run(inputs)

        return count

    monkeypatch.setattr(comparison, "REALIZATIONS", {**REALIZATIONS, "counting": counting})
    plan = quantized("x86_vnni").plan
    labelled = [(images(5, 1, 8, 8, seed=i), torch.arange(5) % 3) for i in range(6)]
    result = compare_plan(plan, Batches(labelled, plan.graph.inputs), ["counting"])
    assert result.accuracy is not None and len(set(alive[1:])) == 1


def test_a_realization_that_cannot_run_is_skipped_with_the_reason() -> None:
    pytest.importorskip("onnx")
    result = compare_realizations(randomized(Small()), "arm_dot", quantized("arm_dot").strategy, DATA, ["onnxruntime"])
    assert "by an integer and a shift" in result.against[0].skipped
    assert "onnxruntime skipped: " in str(result)


class Token(nn.Module):
    """A model that reads the size of the batch, as transformers do for their class token."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.token = nn.Conv2d(1, 4, 4, 4), nn.Parameter(seeded(1, 1, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.conv(x).flatten(2).transpose(1, 2)
        return self.head(torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1))


def test_a_model_that_reads_the_batch_size_is_exported() -> None:
    pytest.importorskip("onnxruntime")
    strategy = hago.quantize(randomized(Token()), "onnxruntime_cpu", DATA).strategy
    result = compare_realizations(randomized(Token()), "onnxruntime_cpu", strategy, DATA, ["onnxruntime"]).against[0]
    assert not result.skipped and result.outputs[0].compared == 9 * 5 * 3 and result.outputs[0].differing == 0


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_an_engine_that_ends_its_process_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr(onnx_engines, "_COMPILE_SCRIPT", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    names = ["openvino", "fast"]
    result = compare_realizations(randomized(Small()), "x86_vnni", quantized("x86_vnni").strategy, DATA, names)
    assert [a.skipped for a in result.against] == ["OpenVINO ends its process on the model, with SIGSEGV", ""]


def test_unknown_names() -> None:
    strategy = quantized("x86_vnni").strategy
    with pytest.raises(HagoError, match=r"unknown realization 'onnxrt'.*Did you mean 'onnxruntime'"):
        compare_realizations(randomized(Small()), "x86_vnni", strategy, DATA, ["onnxrt"])
    with pytest.raises(HagoError, match="unknown realization 'best'"):
        compare_realizations(randomized(Small()), "x86_vnni", strategy, DATA, ["fast"], base="best")


def test_values_of_a_batch_are_those_of_the_plan() -> None:
    plan = quantized("x86_vnni").plan
    values, outputs = REALIZATIONS["simulated"](plan)([DATA[0]])
    assert set(plan.nodes) <= set(values) and outputs[0].shape == (6, 3)
    assert all(torch.equal(values[n], values[n].round()) for n in plan.nodes)
