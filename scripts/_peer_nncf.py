"""NNCF's quantize_with_accuracy_control on one network, for several drops.

Its metric is the part of the calibration images on which the class is the float model's: labels are not needed, and
the float model has 1. Layers that it gives back to float cost 32 bits. What it finds runs in OpenVINO.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import nncf
import numpy as np
import openvino as ov
import torch
from _peer_points import Task
from torch import Tensor

DROPS = (0.01, 0.004, 0.0)
#: Ops with weights; the types of OpenVINO's nodes.
WEIGHTED = ("Convolution", "GroupConvolution", "MatMul")


def quantized_bits(model: Any, slot: int) -> dict[str, float]:
    """By op with weights, 8 where a FakeQuantize stands before that input, else 32."""
    found = {}
    for op in model.get_ordered_ops():
        if op.get_type_name() in WEIGHTED:
            found[op.get_friendly_name()] = 8.0 if _behind(op, slot) else 32.0
    return found


def _behind(op: Any, slot: int) -> bool:
    """Whether a FakeQuantize is met on the way up, past what only moves or scales a weight."""
    source = op.input_value(slot).get_node()
    while source.get_type_name() in ("Convert", "Multiply", "Subtract", "Reshape", "Transpose"):
        if source.get_type_name() == "Convert" and source.input_value(0).get_element_type() == ov.Type.i8:
            return True
        source = source.input_value(0).get_node()
    return bool(source.get_type_name() == "FakeQuantize")


def main() -> None:
    """Search for every drop, and hand over every model."""
    nncf.set_log_level(logging.ERROR)
    task = Task()
    network, whole = task.network(), len(task.calibration)
    images = [x[None].numpy() for x in task.calibration]
    with torch.no_grad():
        classes = torch.cat([network(x) for x in task.batches()]).argmax(1).numpy()

    def agreement(model: Any, rows: Iterable[int]) -> tuple[float, list[float]]:
        output = model.output(0)
        same = [float(model(images[i])[output].argmax() == classes[i]) for i in rows]
        return float(np.mean(same)), same

    task.start()
    real = ov.convert_model(network, example_input=task.calibration[:1], input=[1, *task.calibration.shape[1:]])
    for drop in DROPS:
        found = nncf.quantize_with_accuracy_control(
            real,
            nncf.Dataset(images),
            nncf.Dataset(list(range(whole))),
            validation_fn=agreement,
            max_drop=drop,
            subset_size=whole,
        )
        found.reshape([-1, *task.calibration.shape[1:]])
        compiled = ov.compile_model(found, "CPU", {"INFERENCE_NUM_THREADS": task.threads})

        def run(x: Tensor, compiled: Any = compiled) -> Tensor:
            return torch.from_numpy(compiled(x.numpy())[compiled.output(0)])

        task.add(run, quantized_bits(found, 1), quantized_bits(found, 0), f"drop of {drop:g}")
    task.end()


if __name__ == "__main__":
    main()
