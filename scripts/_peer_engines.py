"""Int8 models of ONNX Runtime and OpenVINO, made by the quantizers of these projects, as calls that can be timed.

Both run with the default settings of these engines and the given number of threads. NNCF is told of models with
attention, as its documentation asks. The packages are used where they are installed: onnx, onnxscript and onnxruntime;
openvino and nncf.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _integer_shares import onnxruntime_share, openvino_share
from _peers import export_onnx, static_file
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Peer:
    """A model of another engine.

    Args:
        call: runs it.
        integer_share: the part of its multiply-adds that run in integers; None for a float model.
    """

    call: Callable[[], Any]
    integer_share: float | None = None


def peers(module: nn.Module, calibration: Inputs, inputs: Inputs, threads: int) -> Mapping[str, Peer]:
    """The float and the int8 model of each engine on `inputs`, by name, and torch's own traced model."""
    found = {"traced, channels_last": Peer(_traced(module, inputs))}
    with tempfile.TemporaryDirectory() as folder:
        if _has("onnx", "onnxscript", "onnxruntime"):
            found |= _onnxruntime(module, calibration, inputs, threads, Path(folder))
        if _has("openvino", "nncf"):
            found |= _openvino(module, calibration, inputs, threads)
    return found


def _traced(module: nn.Module, inputs: Inputs) -> Callable[[], Any]:
    laid_out = tuple(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs)
    with torch.no_grad():
        traced = torch.jit.trace(module.to(memory_format=torch.channels_last), laid_out)
        traced = torch.jit.optimize_for_inference(torch.jit.freeze(traced.eval()))

    def call() -> Any:
        with torch.no_grad():
            return traced(*laid_out)

    return call


def _has(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def _onnxruntime(module: nn.Module, calibration: Inputs, inputs: Inputs, threads: int, folder: Path) -> dict[str, Peer]:
    from onnxruntime import InferenceSession, SessionOptions

    real, names = folder / "float.onnx", [f"input_{i}" for i in range(len(inputs))]
    export_onnx(module, tuple(x[:2] for x in calibration), names, str(real))
    feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}

    def call(path: str) -> Callable[[], Any]:
        options = SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        made = InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda: made.run(None, feed)

    batches = list(zip(*(x.split(4) for x in calibration), strict=True))
    integer = static_file(real, names, batches)
    share = onnxruntime_share(integer, feed)
    return {"ONNX Runtime float": Peer(call(str(real))), "ONNX Runtime int8": Peer(call(integer), share)}


def _openvino(module: nn.Module, calibration: Inputs, inputs: Inputs, threads: int) -> dict[str, Peer]:
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    real = openvino.convert_model(module, example_input=tuple(x[:1] for x in calibration))
    samples = list(zip(*(x.split(1) for x in calibration), strict=True))
    data = nncf.Dataset(samples, lambda sample: [x.numpy() for x in sample])
    attends = any(isinstance(part, nn.LayerNorm) for part in module.modules())
    kind = nncf.ModelType.TRANSFORMER if attends else None
    integer = nncf.quantize(real, data, subset_size=len(samples), model_type=kind)
    how = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}

    def compiled(model: Any) -> tuple[Any, Callable[[], Any]]:
        model.reshape({i: list(x.shape) for i, x in enumerate(inputs)})
        made = openvino.compile_model(model, "CPU", how)
        request = made.create_infer_request()
        for i, x in enumerate(inputs):
            request.set_input_tensor(i, openvino.Tensor(x.numpy()))
        return made, request.infer

    with torch.no_grad():
        _, run = compiled(real)
        made, run_integer = compiled(integer)
    return {"OpenVINO float": Peer(run), "OpenVINO int8": Peer(run_integer, openvino_share(made))}
