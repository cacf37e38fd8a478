"""The arithmetic of hardware_specs/tflite.json and tflite_int16.json, against integers recorded from TensorFlow
Lite's reference kernels, one operator at a time (tests/golden/litert.json says of which version)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hago.arithmetic.numerics import dequantize, quantize, requantize
from hago.arithmetic.types import ZERO, QParams, dtype
from hago.hardware.file import load_hardware
from hago.hardware.hardware import Hardware
from hago.ops import OPS
from hago.ops._rule import Site

CASES = json.loads((Path(__file__).parents[1] / "golden" / "litert.json").read_text())["cases"]
#: Operands of a convolution that have a scale per entry of another axis than the first.
CHANNEL_AXIS = {("conv_transpose2d", 1): 1}


def qparams(said: Mapping[str, Any], axis: int = 0) -> QParams:
    """Of a recorded tensor; a list of scales runs along an axis."""
    held, scale = dtype(said["dtype"]), torch.tensor(said["scale"], dtype=torch.float64)
    if scale.ndim:
        scale = scale.reshape([-1 if i == axis else 1 for i in range(len(said["shape"]))])
    return QParams(scale, torch.tensor(said["zero_point"]), held.min, held.max, held)


def integers(said: Mapping[str, Any]) -> Tensor:
    return torch.tensor(said["q"], dtype=torch.int64).reshape(said["shape"])


def ours(
    chip: Hardware, op: str, attrs: Mapping[str, Any], centered: Sequence[Tensor], operands: list[QParams], out: QParams
) -> Tensor:
    """What the op's first signature makes of centered integers, at the output's scale."""
    desc = chip.integer_descs(op)[0]
    rule, site = chip.computes(OPS)[op], Site(tuple(operands), out, chip.requantize)
    form = rule.integer
    assert form is not None
    if form.table:
        return quantize(rule.compute(attrs, dequantize(centered[0].double(), operands[0])), out, "half_away").long()
    made = rule.compute_int(form.integer_attrs(attrs, site), *centered)
    held = desc.register.dtype
    scale = out.scale if form.requantizes_output else form.scale(attrs, [q.scale for q in operands])
    source = out if form.requantizes_output else QParams(scale, ZERO, held.min, held.max, held)
    return requantize(made, source, out, chip.requantize)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['chip']}-{c['op']}-{c['attrs'].get('groups', '')}")
def test_a_reference_kernel(case: Mapping[str, Any]) -> None:
    chip, op = load_hardware(case["chip"]), case["op"]
    operands = [qparams(said, CHANNEL_AXIS.get((op, i), 0)) for i, said in enumerate(case["in"])]
    centered = [integers(said) - q.zero_point for said, q in zip(case["in"], operands, strict=True)]
    out = qparams(case["out"])
    made = ours(chip, op, case["attrs"], centered, operands, out) + out.zero_point
    assert made.equal(integers(case["out"]))
    assert len(made.unique()) > 4
