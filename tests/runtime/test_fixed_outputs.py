"""Outputs whose scale and zero point the hardware fixes: nothing is chosen or calibrated for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hago
from hago.errors import HardwareError
from hago.export.onnx.engines import PRECISE
from hago.hardware.file import (
    check_hardware,
    hardware_from_document,
    hardware_hash,
    hardware_to_document,
    load_hardware,
)
from hago.hardware.hardware import FixedOut, Hardware, OpDesc
from hago.hardware.validation import check_hardware_document
from hago.ops import OPS
from hago.qat.prepare import from_qat, prepare_qat
from hago.runtime.exactness import compare_plan_exactly

#: Of the 8-bit quantization specification of TensorFlow Lite.
FIXED = {"sigmoid": (1 / 256, -128), "tanh": (1 / 128, 0), "softmax": (1 / 256, -128)}


class Gated(nn.Module):
    """Sigmoid, tanh and softmax between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        gated = torch.sigmoid(self.a(x)) * torch.tanh(2 * self.b(x))
        return torch.softmax(4 * self.fc(gated.mean((2, 3))), -1)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(5)
    return Gated().eval()


@pytest.fixture(scope="module")
def data() -> list[Tensor]:
    return [torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]


@pytest.mark.parametrize("name", ["tflite", "cmsis_nn", "ethos_u"])
def test_outputs_that_tensorflow_lite_fixes(name: str, model: nn.Module, data: list[Tensor], tmp_path: Path) -> None:
    quantizer = hago.quantize(model, name, data)
    plan = quantizer.plan
    for op, (scale, zero) in FIXED.items():
        (node,) = (n.name for n in plan.graph if n.op == op)
        out = plan.nodes[node].out
        assert (float(out.scale), int(out.zero_point), out.qmin, out.qmax) == (scale, zero, -128, 127)
        assert f"{node}:out" not in {**quantizer.strategy.bits, **quantizer.strategy.thresholds}
    assert compare_plan_exactly(plan, data[:1]).same
    assert hago.replay(model, name, quantizer.strategy, data).same
    integers = quantizer.realize()
    integers.save(tmp_path / "model.hago")
    assert hago.load_integer_model(tmp_path / "model.hago")(data[0]).equal(integers(data[0]))


def test_every_entry_of_a_table(model: nn.Module, data: list[Tensor]) -> None:
    """Real values to integers half away from zero, in exact arithmetic from float32 functions."""
    plan = hago.quantize(model, "tflite", data).plan
    for op, compute in (("sigmoid", torch.sigmoid), ("tanh", torch.tanh)):
        (node,) = (n.name for n in plan.graph if n.op == op)
        made, (scale, zero) = plan.nodes[node], FIXED[op]
        source = made.operands[0]
        assert source is not None and made.table is not None
        reals = (torch.arange(-128, 128) - source.zero_point).to(torch.float32) * source.scale.to(torch.float32)
        for real, entry in zip(compute(reals).tolist(), made.table.tolist(), strict=True):
            quanta = Fraction(real) / Fraction(scale)
            nearest = int(abs(quanta) + Fraction(1, 2)) * (1 if quanta >= 0 else -1)
            assert entry + zero == min(max(nearest + zero, -128), 127)


def test_training_keeps_them(model: nn.Module, data: list[Tensor]) -> None:
    trained = prepare_qat(copy.deepcopy(model), "tflite", dataset=data).train()
    step = torch.optim.SGD(trained.parameters(), lr=1e-2)
    for x in data:
        loss = trained(x)[:, 0].sum()
        step.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        step.step()
    quantizer, trained = from_qat(trained), trained.eval()
    assert quantizer.realize()(data[0]).equal(trained(data[0]))
    outs = {n.op: quantizer.plan.nodes[n.name].out for n in quantizer.plan.graph if n.op in FIXED}
    assert {op: (float(q.scale), int(q.zero_point)) for op, q in outs.items()} == FIXED


# ---------------------------------------------------------------- hardware that says so
def unsigned() -> Hardware:
    """A chip of other dtypes, with a fixed output of unsigned bytes."""
    chip = load_hardware("onnxruntime_cpu")
    curve, real = chip.ops["sigmoid"][0], chip.ops["sub"][0]
    ops = {
        "sigmoid": (replace(curve, name="curve", fixed_out=FixedOut(1 / 256)),),
        "softmax": (replace(real, name="shares", fixed_out=FixedOut(1 / 256)),),
    }
    return replace(chip, ops={**chip.ops, **ops}, name="unsigned")


def test_hardware_of_the_user(model: nn.Module, data: list[Tensor]) -> None:
    chip = unsigned()
    check_hardware(chip)
    again = hardware_from_document(hardware_to_document(chip), "", OPS)
    assert again == chip and hardware_hash(again) == hardware_hash(chip)
    other = replace(chip.ops["sigmoid"][0], fixed_out=FixedOut(1 / 128))
    assert hardware_hash(replace(chip, ops={**chip.ops, "sigmoid": (other,)})) != hardware_hash(chip)
    said = " ".join(line[60:76].strip() for line in str(chip).splitlines())  # the column is wrapped
    assert "fixed to 0.00390625 +0" in " ".join(said.split())
    plan = hago.quantize(model, chip, data).plan
    assert compare_plan_exactly(plan, data[:1]).same
    (node,) = (n.name for n in plan.graph if n.op == "sigmoid")
    assert (float(plan.nodes[node].out.scale), int(plan.nodes[node].out.zero_point)) == (1 / 256, 0)


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_onnx_files_hold_them(form: str, model: nn.Module, data: list[Tensor], tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    quantizer = hago.quantize(model, unsigned(), data)
    quantizer.export_onnx(tmp_path / "model.onnx", form=form)
    options = runtime.SessionOptions()
    options.add_session_config_entry(*PRECISE)
    session = runtime.InferenceSession(tmp_path / "model.onnx", options)
    (out,) = session.run(None, {session.get_inputs()[0].name: data[0].numpy()})
    assert torch.from_numpy(out).equal(quantizer.realize()(data[0]))


Document = dict[str, Any]
MISTAKES: dict[str, tuple[Callable[[Document], Any], str]] = {
    "a scale that float32 rounds": (lambda s: s["fixed_out"].update(scale=0.1), "fixed_out.scale: got 0.1; expected a"),
    "a scale of nothing": (lambda s: s["fixed_out"].update(scale=0), "fixed_out.scale"),
    "a tiny scale": (lambda s: s["fixed_out"].update(scale=2.0**-120), "fixed_out.scale"),
    "a zero point outside": (lambda s: s["fixed_out"].update(zero_point=128), "fixed_out.zero_point: got 128"),
    "no zero point": (lambda s: s["fixed_out"].pop("zero_point"), "fixed_out.zero_point: the key is missing"),
    "another key": (lambda s: s["fixed_out"].update(bits=8), "fixed_out.bits: unknown key"),
    "no mapping": (lambda s: s.update(fixed_out=0.5), "fixed_out: got 0.5; expected a JSON object"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str) -> None:
    document = hardware_to_document(load_hardware("tflite"))
    change, says = MISTAKES[case]
    change(document["signatures"]["s8_sigmoid"])
    found = [str(f) for f in check_hardware_document(document, OPS)]
    assert any(f.startswith(f"$.signatures.s8_sigmoid.{says}") for f in found), found


def test_only_integers_requantized_at_the_output_are_fixed() -> None:
    document = hardware_to_document(load_hardware("tflite"))
    for name in ("s8", "f32"):
        document["signatures"][name]["fixed_out"] = {"scale": 0.5, "zero_point": 0}
    found = " ".join(str(f) for f in check_hardware_document(document, OPS))
    assert "expected requantize_at: output" in found and "a float signature has none" in found
    with pytest.raises(HardwareError, match="requantized at the output"):
        OpDesc("int8", "int8", fixed_out=FixedOut(0.5))
