"""The arithmetic of hardware_specs/tflite.json and tflite_int16.json, one operator at a time.

The expected integers in tests/golden/litert.json were recorded from TensorFlow Lite's reference kernels; the file names
the version.
"""

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


def qparams(recorded: Mapping[str, Any], axis: int = 0) -> QParams:
    """The qparams of a recorded tensor; a list of scales has one entry per index of `axis`."""
    storage, scale = dtype(recorded["dtype"]), torch.tensor(recorded["scale"], dtype=torch.float64)
    if scale.ndim:
        scale = scale.reshape([-1 if i == axis else 1 for i in range(len(recorded["shape"]))])
    return QParams(scale, torch.tensor(recorded["zero_point"]), storage.min, storage.max, storage)


def integers(recorded: Mapping[str, Any]) -> Tensor:
    return torch.tensor(recorded["q"], dtype=torch.int64).reshape(recorded["shape"])


def ours(
    chip: Hardware, op: str, attrs: Mapping[str, Any], centered: Sequence[Tensor], operands: list[QParams], out: QParams
) -> Tensor:
    """The output of the op's first signature for centered integers."""
    desc = chip.integer_descs(op)[0]
    rule, site = chip.rules(OPS)[op], Site(tuple(operands), out, chip.requantize)
    form = rule.integer
    assert form is not None
    if form.table:
        return quantize(rule.compute(attrs, dequantize(centered[0].double(), operands[0])), out, "half_away").long()
    integers_out = rule.compute_int(form.integer_attrs(attrs, site), *centered)
    storage = desc.register.dtype
    scale = out.scale if form.requantizes_output else form.scale(attrs, [q.scale for q in operands])
    source = out if form.requantizes_output else QParams(scale, ZERO, storage.min, storage.max, storage)
    return requantize(integers_out, source, out, chip.requantize)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['chip']}-{c['op']}-{c['attrs'].get('groups', '')}")
def test_a_reference_kernel(case: Mapping[str, Any]) -> None:
    chip, op = load_hardware(case["chip"]), case["op"]
    operands = [qparams(recorded, CHANNEL_AXIS.get((op, i), 0)) for i, recorded in enumerate(case["in"])]
    centered = [integers(recorded) - q.zero_point for recorded, q in zip(case["in"], operands, strict=True)]
    out = qparams(case["out"])
    integers_out = ours(chip, op, case["attrs"], centered, operands, out) + out.zero_point
    assert integers_out.equal(integers(case["out"]))
    assert len(integers_out.unique()) > 4
