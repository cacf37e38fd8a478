"""The part of the multiply-adds that an engine runs in integers, read from what it runs.

Of ONNX Runtime it is read from the types of the operands in a profile, and of OpenVINO from the precisions in its
execution graph. hago is not needed here, so that the processes of peers can use it.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

#: The engines' operators that multiply and add.
_CONVOLUTIONS: Final = ("Conv", "FusedConv", "NhwcFusedConv", "QLinearConv", "Convolution")
_MATRICES: Final = (
    *("MatMul", "FusedMatMul", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "Gemm", "FusedGemm", "QGemm"),
    "FullyConnected",
)
#: OpenVINO's name of nodes that it joined: two products with a softmax between them, or none.
_JOINED: Final = "Subgraph"


def onnxruntime_share(path: str, feed: Mapping[str, Any]) -> float:
    """The integer share of a file in ONNX Runtime.

    Args:
        feed: its inputs by name.
    """
    from onnxruntime import InferenceSession, SessionOptions

    with tempfile.TemporaryDirectory() as folder:
        options = SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, str(Path(folder) / "profile")
        # packed weights have no shape in a profile
        options.add_session_config_entry("session.disable_prepacking", "1")
        session = InferenceSession(path, options, providers=["CPUExecutionProvider"])
        session.run(None, feed)
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    return _share(_profiled_products(events))


def openvino_share(compiled: Any) -> float:
    """The integer share of a compiled model of OpenVINO with fixed shapes."""
    return _share(_executed_products(compiled.get_runtime_model()))


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


def _profiled_products(events: Sequence[Mapping[str, Any]]) -> Iterable[tuple[int, bool]]:
    """The multiply-adds of every product in a profile, and whether they run in integers."""
    for event in events:
        arguments = event.get("args", {})
        operator = arguments.get("op_name", "")
        if event.get("name", "").endswith("_kernel_time") and operator in (*_CONVOLUTIONS, *_MATRICES):
            read = [pair for typed in arguments["input_type_shape"] for pair in typed.items() if len(pair[1]) > 1]
            out = next(iter(arguments["output_type_shape"][0].values()))
            yield _macs(operator, [shape for _, shape in read], out), read[0][0] in ("uint8", "int8")


def _executed_products(graph: Any) -> Iterable[tuple[int, bool]]:
    """The multiply-adds of every product of an execution graph, and whether they run in integers."""
    for node in graph.get_ops():
        about = {name: node.get_rt_info()[name].astype(str) for name in ("layerType", "runtimePrecision")}
        shapes = [list(node.input(i).get_shape()) for i in range(node.get_input_size())]
        macs = _macs(about["layerType"], shapes, list(node.output(0).get_shape())) if shapes else 0
        yield macs, about["runtimePrecision"] in ("u8", "i8")
