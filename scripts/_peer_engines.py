"""Int8 models of ONNX Runtime and OpenVINO, made by the quantizers of these projects, as calls that can be timed.

Both run with the default settings of these engines and the given number of threads. The packages are used where they
are installed: onnx, onnxscript and onnxruntime; openvino and nncf.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from _peers import export_onnx, static_file
from torch import Tensor, nn


def peer_calls(module: nn.Module, calibration: Tensor, images: Tensor, threads: int) -> Mapping[str, Callable[[], Any]]:
    """Calls that run the float and the int8 model of each engine on `images`, by name, and torch's own traced model."""
    calls: dict[str, Callable[[], Any]] = {"traced, channels_last": _traced(module, images)}
    with tempfile.TemporaryDirectory() as folder:
        if _has("onnx", "onnxscript", "onnxruntime"):
            calls |= _onnxruntime(module, calibration, images, threads, Path(folder))
        if _has("openvino", "nncf"):
            calls |= _openvino(module, calibration, images, threads)
    return calls


def _traced(module: nn.Module, images: Tensor) -> Callable[[], Any]:
    laid_out = images.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        traced = torch.jit.trace(module.to(memory_format=torch.channels_last), laid_out)
        traced = torch.jit.optimize_for_inference(torch.jit.freeze(traced.eval()))

    def call() -> Any:
        with torch.no_grad():
            return traced(laid_out)

    return call


def _has(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def _onnxruntime(
    module: nn.Module, calibration: Tensor, images: Tensor, threads: int, folder: Path
) -> dict[str, Callable[[], Any]]:
    from onnxruntime import InferenceSession, SessionOptions

    real = folder / "float.onnx"
    export_onnx(module, (calibration[:2],), ["input_0"], str(real))
    options = SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    feed = {"input_0": images.numpy()}

    def call(path: str) -> Callable[[], Any]:
        session = InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, feed)

    integer = static_file(real, ["input_0"], [(batch,) for batch in calibration.split(4)])
    return {"ONNX Runtime float": call(str(real)), "ONNX Runtime int8": call(integer)}


def _openvino(module: nn.Module, calibration: Tensor, images: Tensor, threads: int) -> dict[str, Callable[[], Any]]:
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    real = openvino.convert_model(module, example_input=calibration[:1])
    data = nncf.Dataset(list(calibration.split(1)), lambda image: image.numpy())
    integer = nncf.quantize(real, data, subset_size=len(calibration))
    how = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}

    def call(model: Any) -> Callable[[], Any]:
        model.reshape({0: list(images.shape)})
        request = openvino.compile_model(model, "CPU", how).create_infer_request()
        request.set_input_tensor(openvino.Tensor(images.numpy()))
        return request.infer

    with torch.no_grad():
        return {"OpenVINO float": call(real), "OpenVINO int8": call(integer)}
