"""What hago is measured against: a plain fake quantization, and ONNX Runtime's static quantization.

Neither uses hago's arithmetic: the first is written here anew, the second is a package that is used
where it is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _assets import Asset, Samples
from _integer_shares import onnxruntime_share
from torch import Tensor, nn

from hago import Graph
from hago.export.onnx.engines import PRECISE, saturates_pairs
from hago.graph import CONST, Node, compute_real, run_graph, run_real

_QUANTIZED = ("conv1d", "conv2d", "linear")


def plain_outputs(graph: Graph, calibration: Sequence[Samples], test: Sequence[Samples]) -> Tensor:
    """The outputs of fake quantization to 8 bits: one power-of-two scale per tensor, from the largest
    magnitude, on the input and the weight of every convolution and linear layer; the rest is float.

    Args:
        graph: the float model, batch norms folded.
    """
    sources = {s for n in graph if n.op in _QUANTIZED for s in n.inputs[:2]}
    largest = {s: float(graph.consts[s].abs().max()) for s in sources if graph[s].op == CONST}

    def see(node: Node, value: Any) -> None:
        if node.name in sources:
            largest[node.name] = max(largest.get(node.name, 0.0), float(value.abs().max()))

    for batch in calibration:
        run_real(graph, batch, see)

    def step(node: Node, values: Sequence[Any]) -> Any:
        if node.op in _QUANTIZED:
            rounded = [_fake_quantized(v, largest[s]) for s, v in zip(node.inputs[:2], values[:2], strict=True)]
            values = [*rounded, *values[2:]]
        return compute_real(node, values)

    with torch.no_grad():
        return torch.cat([run_graph(graph, batch, step)[0] for batch in test])


def _fake_quantized(x: Tensor, largest: float) -> Tensor:
    scale = 2.0 ** (math.ceil(math.log2(largest)) - 7) if largest > 0 else 1.0
    return torch.fake_quantize_per_tensor_affine(x, scale, 0, -127, 127)


def onnxruntime_missing() -> str:
    """Why ONNX Runtime cannot be measured; empty where it can."""
    missing = [n for n in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(n) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def onnxruntime_outputs(asset: Asset) -> tuple[Tensor, float]:
    """The test outputs of `quantize_static`, see `static_file`, of the network as torch exports it, and the part of its
    multiply-adds that run in integers.
    """
    from onnxruntime import InferenceSession, SessionOptions

    names = [f"input_{i}" for i in range(len(asset.calibration[0]))]
    with tempfile.TemporaryDirectory() as folder:
        real = Path(folder) / "float.onnx"
        export_onnx(asset.module, tuple(t[:2] for t in asset.calibration[0]), names, str(real))
        path = static_file(real, names, asset.calibration)
        options = SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        if saturates_pairs():  # the integers that it has on CPUs with VNNI
            options.add_session_config_entry(*PRECISE)
        session = InferenceSession(path, options, providers=["CPUExecutionProvider"])
        feeds = [{n: t.numpy() for n, t in zip(names, batch, strict=True)} for batch in asset.test]
        out = torch.cat([torch.from_numpy(session.run(None, feed)[0]) for feed in feeds])
        return out, onnxruntime_share(path, feeds[0])


def static_file(real: Path, names: Sequence[str], calibration: Sequence[Samples]) -> str:
    """What ONNX Runtime's `quantize_static` makes of a float file: QDQ, MinMax, uint8 activations, int8 weights
    per channel; the file stands beside it.

    Of a language model the matrix products alone are quantized: with all ops, the mask's -10,000 is
    in the range of what goes into the softmax, and nothing is left of the scores.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    whole = calibration[0][0].is_floating_point()

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """The calibration batches, once."""

        def __init__(self) -> None:
            self._left: Iterator[Samples] = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            """The next batch by input name."""
            batch = next(self._left, None)
            return None if batch is None else {n: t.numpy() for n, t in zip(names, batch, strict=True)}

    prepared, integer = (str(real.with_name(f"{part}.onnx")) for part in ("prepared", "integer"))
    quant_pre_process(str(real), prepared, skip_symbolic_shape=True)
    quantize_static(
        prepared,
        integer,
        Reader(),
        op_types_to_quantize=None if whole else ["MatMul", "Gemm"],
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return integer


def export_onnx(module: nn.Module, example: Samples, names: list[str], path: str) -> None:
    """Write an ONNX file with a dynamic batch."""
    shapes = tuple({0: torch.export.Dim("batch")} for _ in example)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # torchvision is not needed
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            example,
            path,
            input_names=names,
            dynamic_shapes=shapes,
            dynamo=True,
            opset_version=18,
            external_data=False,
            verbose=False,
        )
