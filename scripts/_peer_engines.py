"""Int8 models of ONNX Runtime and OpenVINO, made by the quantizers of these projects, as calls that can be timed.

Both run with the default settings of these engines and the given number of threads. NNCF is told of models with
attention, as its documentation asks. The packages are used where they are installed: onnx, onnxscript and onnxruntime;
openvino and nncf.

Integer shares are read from what the engines run: from the types of the operands in a profile of ONNX Runtime, and from
the precisions of OpenVINO's execution graph.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from _peers import export_onnx, static_file
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]
#: The engines' operators that multiply and add.
_CONVOLUTIONS: Final = ("Conv", "FusedConv", "NhwcFusedConv", "QLinearConv", "Convolution")
_MATRICES: Final = (
    *("MatMul", "FusedMatMul", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "Gemm", "FusedGemm", "QGemm"),
    "FullyConnected",
)
#: OpenVINO's name of nodes that it joined: two products with a softmax between them, or none.
_JOINED: Final = "Subgraph"


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


def _share(products: Iterable[tuple[int, bool]]) -> float:
    """The part of the multiply-adds that run in integers, from those of every product."""
    counted = list(products)
    return sum(macs for macs, integer in counted if integer) / sum(macs for macs, _ in counted)


def _macs(operator: str, shapes: Sequence[Sequence[int]], out: Sequence[int]) -> int:
    """The multiply-adds of an operator; 0 of one that has none."""
    if operator in _CONVOLUTIONS:
        image, weight = shapes[:2]
        return math.prod(out) * math.prod(weight[1 + len(weight) - len(image) :])  # groups may have an axis
    if operator in _MATRICES:
        return math.prod(out) * shapes[0][-1]
    attends = operator == _JOINED and len(shapes) > 2 and len(shapes[0]) == 4 and shapes[0][-1] == shapes[1][-2]
    return 2 * math.prod(out) * shapes[1][-1] if attends else 0


def _onnxruntime(module: nn.Module, calibration: Inputs, inputs: Inputs, threads: int, folder: Path) -> dict[str, Peer]:
    from onnxruntime import InferenceSession, SessionOptions

    real, names = folder / "float.onnx", [f"input_{i}" for i in range(len(inputs))]
    export_onnx(module, tuple(x[:2] for x in calibration), names, str(real))
    feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}

    def session(path: str, profile: Path | None = None) -> Any:
        options = SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
            options.add_session_config_entry("session.disable_prepacking", "1")  # packed weights have no shape there
        return InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def call(path: str) -> Callable[[], Any]:
        made = session(path)
        return lambda: made.run(None, feed)

    batches = list(zip(*(x.split(4) for x in calibration), strict=True))
    integer = static_file(real, names, batches)
    profiled = session(integer, folder / "profile")
    profiled.run(None, feed)
    events = json.loads(Path(profiled.end_profiling()).read_text("utf-8"))
    share = _share(_profiled_products(events))
    return {"ONNX Runtime float": Peer(call(str(real))), "ONNX Runtime int8": Peer(call(integer), share)}


def _profiled_products(events: Sequence[Mapping[str, Any]]) -> Iterable[tuple[int, bool]]:
    """The multiply-adds of every product in a profile, and whether they run in integers."""
    for event in events:
        arguments = event.get("args", {})
        operator = arguments.get("op_name", "")
        if event.get("name", "").endswith("_kernel_time") and operator in (*_CONVOLUTIONS, *_MATRICES):
            read = [pair for typed in arguments["input_type_shape"] for pair in typed.items() if len(pair[1]) > 1]
            out = next(iter(arguments["output_type_shape"][0].values()))
            yield _macs(operator, [shape for _, shape in read], out), read[0][0] in ("uint8", "int8")


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
    share = _share(_executed_products(made.get_runtime_model()))
    return {"OpenVINO float": Peer(run), "OpenVINO int8": Peer(run_integer, share)}


def _executed_products(graph: Any) -> Iterable[tuple[int, bool]]:
    """The multiply-adds of every product of an execution graph, and whether they run in integers."""
    for node in graph.get_ops():
        about = {name: node.get_rt_info()[name].astype(str) for name in ("layerType", "runtimePrecision")}
        shapes = [list(node.input(i).get_shape()) for i in range(node.get_input_size())]
        macs = _macs(about["layerType"], shapes, list(node.output(0).get_shape())) if shapes else 0
        yield macs, about["runtimePrecision"] in ("u8", "i8")
