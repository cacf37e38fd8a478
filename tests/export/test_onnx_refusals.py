"""Plans that ONNX cannot express: one line for every reason, and advice that is true; and checks that fail."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import Small, images, randomized
from torch import Tensor, nn
from torch.nn import functional as F

import hago
from hago.errors import HagoError
from hago.export.onnx.engines import onnxruntime
from hago.export.onnx.export import make_onnx
from hago.export.onnx.refusals import Refusal, expressible_hardware, grouped
from hago.export.onnx.verification import OnnxCheck, PlaceCheck, check_onnx
from hago.hardware import available_hardware
from hago.plan import Plan
from hago.runtime import load_plan, save_plan

pytest.importorskip("onnx")
DATA = [images(8, 1, 6, 6)]
FORMS = ("qdq", "qoperator")


class Deep(nn.Module):
    """Many layers, so that many nodes are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(1 if i == 0 else 2, 2, 3, padding=1) for i in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def refusal(plan: Plan, form: str) -> str | None:
    try:
        make_onnx(plan, form)
    except HagoError as error:
        return str(error)
    return None


@pytest.mark.parametrize("chip", available_hardware())
def test_a_refusal_has_few_lines_and_true_advice(chip: str) -> None:
    plan = hago.quantize(randomized(Deep()), chip, DATA).plan
    for form in FORMS:
        said = refusal(plan, form)
        if said is None:
            continue
        head, *reasons, advice = said.splitlines()
        assert head == f"ONNX in {form} form cannot express this strategy for {chip}:"
        assert 1 <= len(reasons) <= 5 and all(line.startswith("  ") for line in reasons)
        assert len({line.partition(": ")[2] for line in reasons}) == len(reasons)
        assert advice.startswith("What helps: ") and "onnxruntime_cpu" in advice
        other = "qoperator" if form == "qdq" else "qdq"
        assert (f"take the form {other}" in advice) == (refusal(plan, other) is None)
        assert chip not in re.split(r"[ ,]+", advice)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chip", ["vta", "arm_dot", "x86_vnni"])
def test_a_stored_model_is_refused_in_the_same_words(chip: str, form: str, tmp_path: Path) -> None:
    for number, model in enumerate((Deep(), Small())):
        plan = hago.quantize(randomized(model), chip, DATA).plan
        save_plan(tmp_path / f"{number}", plan)
        assert refusal(load_plan(tmp_path / f"{number}")[0], form) == refusal(plan, form)


@pytest.mark.parametrize("form", FORMS)
def test_hardware_that_is_advised_can_be_written(form: str) -> None:
    for model in (randomized(Deep()), randomized(Small())):
        names = expressible_hardware(hago.from_torch(model, (DATA[0],)), form)
        assert "onnxruntime_cpu" in names and "arm_dot" not in names
        for name in names:
            assert refusal(hago.quantize(model, name, DATA).plan, form) is None, name


def test_the_engines_own_hardware_comes_first(tmp_path: Path) -> None:
    with pytest.raises(HagoError, match="for this network: onnxruntime_cpu, openvino_cpu, [cst]"):
        hago.quantize(randomized(Small()), "arm_dot", DATA).export_onnx(tmp_path / "x.onnx")


class Repeated(nn.Module):
    """A call that ONNX export does not know, on every chip and in every form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.repeat_interleave(self.layer(x), 2, dim=-1)


@pytest.mark.parametrize("form", FORMS)
def test_no_other_chip_is_advised_where_none_helps(form: str) -> None:
    for chip in ("x86_vnni", "onnxruntime_cpu"):
        said = refusal(hago.quantize(Repeated().eval(), chip, [images(8, 6)]).plan, form)
        assert said is not None and "does not know the call aten.repeat_interleave" in said
        assert "What helps" not in said and "$" not in said


class Averaged(nn.Module):
    """An average that ONNX's operator cannot express; sums of windows can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.avg_pool2d(self.first(x), 3, 2, ceil_mode=True, divisor_override=2))


def test_integer_nodes_have_operators_of_their_own_in_the_form_qoperator() -> None:
    plan = hago.quantize(Averaged().eval(), "x86_vnni", DATA, corrections="none").plan
    assert refusal(plan, "qoperator") is None
    said = refusal(plan, "qdq")
    assert said is not None and "a divisor of its own" in said and "take the form qoperator" in said


def test_reasons_are_grouped() -> None:
    found = [Refusal(f"n{i}", "sums reach {amount}", 10.0 * i) for i in range(5)]
    found += [
        Refusal("n0", "rounds up"),
        Refusal("n0:0", "rounds up", on_edge=True),
        Refusal("m", "has {1}, { and {amount}"),
    ]
    assert list(grouped(found + found)) == [
        "5 nodes ('n0', 'n1', 'n2', ...): sums reach 40",
        "node 'n0' and edge 'n0:0': rounds up",
        "node 'm': has {1}, { and {amount}",
    ]


# ---------------------------------------------------------------- checks that fail
def _whole(array: np.ndarray) -> bool:  # type: ignore[type-arg]
    return array.dtype.kind in "iu" or bool((array == array.round()).all())


def test_a_check_that_fails_says_what_and_what_helps() -> None:
    pytest.importorskip("onnxruntime")
    plan = hago.quantize(randomized(Small()), "onnxruntime_cpu", DATA).plan
    file = make_onnx(plan)
    assert check_onnx(file, plan, [DATA]).reasons == ()
    # an engine that changes every integer by 3

    def wrong(model: object) -> object:
        run = onnxruntime(model)

        def shifted(feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
            changed = run(feed)
            return {k: np.where(v < 99, v + 3, v - 3).astype(v.dtype) if _whole(v) else v for k, v in changed.items()}

        return shifted

    result = check_onnx(file, plan, [DATA], wrong, "onnxruntime")
    assert not result.tolerable
    said = str(result)
    assert re.search(r"the check FAILED: \d+ of \d+ tensors of integers .* the worst is .* by at most 3 quanta", said)
    assert "Check with --engine openvino" in said
    assert result.to_json()["reasons"] == list(result.reasons)
    kept = hago.quantize(randomized(Small()), "onnxruntime_cpu", DATA, keep_float="*").plan
    assert check_onnx(make_onnx(kept), kept, [DATA], wrong, "onnxruntime").reasons == ()


def test_saturating_pairs_are_named_where_the_check_fails() -> None:
    place = PlaceCheck("conv", "conv2d", 100, 7, 5.0, True)
    result = OnnxCheck("onnxruntime", (place,), (place,), (place,))
    assert "this CPU has no VNNI" in result.reasons[1] and "(fix_bits={'*.weight': 7})" in result.reasons[1]
    assert "VNNI" not in replace(result, by_default=None).reasons[1]
    other = replace(place, op="add")
    assert "VNNI" not in replace(result, places=(other,)).reasons[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chip", ["tflite", "vta"])
def test_norms_that_stay_are_refused_in_words(chip: str, form: str) -> None:
    """A batch norm behind a linear layer on (batch, channels, values), which is no norm of that layer's outputs."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(8, 4)).eval()
    plan = hago.quantize(model, chip, [torch.randn(8, 5, 8)], corrections="none").plan
    try:
        make_onnx(plan, form)
    except HagoError as error:
        assert f"ONNX in {form} form cannot express this strategy for {chip}" in str(error)
