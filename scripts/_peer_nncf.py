"""NNCF on one network: `quantize` as it is by default, or `quantize_with_accuracy_control` for several drops.

By default `quantize` corrects biases (`fast_bias_correction`), with 8-bit weights per channel and symmetric 8-bit
activations per tensor. The metric of accuracy control is the part of the calibration images on which the class is the
float model's: labels are not needed, and the float model has 1. Layers that it gives back to float cost 32 bits. What
NNCF makes runs in OpenVINO, whose float parts compute in float32.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import nncf
import numpy as np
import openvino as ov
import torch
from _integer_shares import openvino_share
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
    """Quantize in the way that was named, and hand over every model."""
    nncf.set_log_level(logging.ERROR)
    task, ways = Task(), {"post_training": post_training, "accuracy_control": accuracy_control}
    ways[sys.argv[5]](task)
    task.end()


def post_training(task: Task) -> None:
    """Quantize once, with all defaults and all calibration images."""
    task.start()
    found = nncf.quantize(converted(task), nncf.Dataset(images(task)), subset_size=len(task.calibration))
    seconds = task.seconds()
    share = openvino_share(compiled(task, found))  # before the batch is made dynamic
    task.add(runner(task, found), quantized_bits(found, 1), quantized_bits(found, 0), "", seconds, share)


def accuracy_control(task: Task) -> None:
    """Quantize for every drop."""
    whole = len(task.calibration)
    with torch.no_grad():
        classes = torch.cat([task.network()(x) for x in task.batches()]).argmax(1).numpy()

    def agreement(model: Any, rows: Iterable[int]) -> tuple[float, list[float]]:
        output = model.output(0)
        same = [float(model(task.calibration[i : i + 1].numpy())[output].argmax() == classes[i]) for i in rows]
        return float(np.mean(same)), same

    task.start()
    real = converted(task)
    for drop in DROPS:
        found = nncf.quantize_with_accuracy_control(
            real,
            nncf.Dataset(images(task)),
            nncf.Dataset(list(range(whole))),
            validation_fn=agreement,
            max_drop=drop,
            subset_size=whole,
        )
        task.add(runner(task, found), quantized_bits(found, 1), quantized_bits(found, 0), f"drop of {drop:g}")


def images(task: Task) -> list[np.ndarray[Any, Any]]:
    """The calibration images, each a batch of one."""
    return [x[None].numpy() for x in task.calibration]


def converted(task: Task) -> Any:
    """The float network in OpenVINO, for batches of one."""
    shape = [1, *task.calibration.shape[1:]]
    return ov.convert_model(task.network(), example_input=task.calibration[:1], input=shape)


def compiled(task: Task, model: Any) -> Any:
    """A model that can run."""
    return ov.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": task.threads, "INFERENCE_PRECISION_HINT": "f32"})


def runner(task: Task, model: Any) -> Callable[[Tensor], Tensor]:
    """A call that runs a model on batches of any size."""
    model.reshape([-1, *task.calibration.shape[1:]])
    made = compiled(task, model)
    return lambda x: torch.from_numpy(made(x.numpy())[made.output(0)])


if __name__ == "__main__":
    main()
