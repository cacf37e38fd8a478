"""Engines that run ONNX models, ONNX Runtime and OpenVINO: functions that make a `Run` of a model.

`hago.export.formats`, `hago.export.onnx.verification` and `hago.analysis.comparison` use them.
"""

from __future__ import annotations

import functools
import importlib
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hago.errors import HagoError, did_you_mean
from hago.export.onnx.builder import OnnxFile
from hago.export.onnx.values import Value, element_type_of
from hago.export.onnx.writer import GraphWriter, load_onnx
from hago.plan import Plan

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
#: A model that can be run: a function from the arrays of its inputs to those of its outputs, by name.
Run = Callable[[Arrays], Arrays]


def _import_optional(name: str, extra: str) -> Any:
    """Import an optional package, or refuse with the extra of hago that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise HagoError(f"this needs the package {name}: pip install 'hago[{extra}]'") from None


#: The session option that keeps ONNX Runtime from adding products of bytes in pairs that saturate at 16 bits, on CPUs
#: with AVX2 or AVX512 and without VNNI: it selects the kernels of unsigned weights. It has no effect on other CPUs.
PRECISE: Final = ("session.x64quantprecision", "1")


def onnxruntime(model: Any, threads: int | None = None, precise: bool = True) -> Run:
    """Load a model into ONNX Runtime for the CPU.

    Args:
        model: an onnx.ModelProto.
        threads: of one operator; as many as the machine has cores if None.
        precise: keep sums of products exact on CPUs without VNNI (`PRECISE`), unless ONNX Runtime refuses the file
            with this option, as it does some with signed activations.

    Raises:
        HagoError: onnxruntime is not installed, or refuses the model.

    References:
        ONNX Runtime, qdq_selector_action_transformer.cc: DequantizeLinear and MatMul become MatMulNBits, at
        accuracy level 4 (int8 data) unless the session says otherwise.
    """
    ort = _import_optional("onnxruntime", "onnx")

    def make_session(precise: bool) -> Any:
        options = ort.SessionOptions()
        # fatal or error: a refusal of the precise option is caught below
        options.log_severity_level = 4 if precise else 3
        # compute products with narrow weights in float32, as the file states; the default rounds the data to 8 bits
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        if precise:
            options.add_session_config_entry(*PRECISE)
        if threads is not None:
            options.intra_op_num_threads = threads
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    precise = precise and saturates_pairs()
    try:
        try:
            session = make_session(precise)
        except Exception:
            if not precise:
                raise
            session = make_session(False)
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise HagoError(f"ONNX Runtime {ort.__version__} refuses the model: {error}") from None
    names = [o.name for o in session.get_outputs()]
    return lambda feed: dict(zip(names, session.run(names, dict(feed)), strict=True))


#: The explanation of differences that the default options of ONNX Runtime cause; reports print it.
SATURATES: Final = (
    "this CPU has no VNNI, and ONNX Runtime by default adds products of bytes in pairs that saturate at 16 bits here. "
    f"hago runs it with {'='.join(PRECISE)}, which keeps sums exact: set that where the file is used, too "
    "(SessionOptions.add_session_config_entry), or give weights 7 bits (fix_bits={'*.weight': 7}), with which no pair "
    "saturates"
)


@functools.cache
def saturates_pairs() -> bool:
    """Whether ONNX Runtime on this CPU saturates sums of two products of unsigned and signed bytes; measured once."""
    onnx = load_onnx()
    depth = 64
    make, types = onnx.helper, onnx.TensorProto
    graph = make.make_graph(
        [make.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "pairs",
        [make.make_tensor_value_info("x", types.UINT8, [4, depth])],
        [make.make_tensor_value_info("y", types.INT32, [4, 4])],
        [onnx.numpy_helper.from_array(np.full((depth, 4), 127, np.int8), "w")],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 13)], ir_version=8)
    sums = onnxruntime(model, precise=False)({"x": np.full((4, depth), 255, np.uint8)})["y"]
    return bool((sums != 255 * 127 * depth).any())


_OPENVINO: Final = {"INFERENCE_PRECISION_HINT": "f32"}


def openvino(model: Any, threads: int | None = None) -> Run:
    """Compile a model with OpenVINO for the CPU; arguments as for `onnxruntime`."""
    ov = _import_optional("openvino", "openvino")
    options = _OPENVINO | ({} if threads is None else {"INFERENCE_NUM_THREADS": threads})
    try:
        core = ov.Core()
        compiled = core.compile_model(core.read_model(model.SerializeToString(), b""), "CPU", options)
    except Exception as error:
        raise HagoError(f"OpenVINO {ov.__version__} refuses the model: {error}") from None
    names = [o.name for o in model.graph.output]

    def run(feed: Arrays) -> Arrays:
        outputs = compiled(dict(feed))
        return {name: np.asarray(outputs[i]) for i, name in enumerate(names)}

    return run


_COMPILE_SCRIPT: Final = f"""
import sys, openvino
core = openvino.Core()
core.compile_model(core.read_model(sys.stdin.buffer.read(), b""), "CPU", {_OPENVINO})
"""


def openvino_if_no_crash(model: Any, threads: int | None = None) -> Run:
    """Compile a model as `openvino` does, but first in another process, to find out whether OpenVINO crashes on it.

    It starts a process, so `check_onnx`, which compiles every part of a file, is given `openvino`.

    OpenVINO 2026.4 crashes on some models (SIGSEGV in `compile_model`, e.g. of a transposed convolution that is
    concatenated and quantized twice).

    Raises:
        HagoError: OpenVINO is not installed, crashes, or refuses the model.
    """
    _import_optional("openvino", "openvino")
    process = subprocess.run(
        [sys.executable, "-c", _COMPILE_SCRIPT], input=model.SerializeToString(), capture_output=True
    )
    if process.returncode < 0:
        raise HagoError(f"OpenVINO ends its process on the model, with {signal.Signals(-process.returncode).name}")
    return openvino(model, threads)


ENGINES: Final[Mapping[str, Callable[..., Run]]] = {"onnxruntime": onnxruntime, "openvino": openvino}


def engine(name: str) -> Callable[..., Run]:
    """The engine called `name`.

    Raises:
        HagoError: there is none.
    """
    if name not in ENGINES:
        known = ", ".join(ENGINES)
        raise HagoError(f"unknown engine {name!r}; expected one of {known}.{did_you_mean(name, ENGINES)}")
    return ENGINES[name]


# ---------------------------------------------------------------- values of nodes
class ObservedModel:
    """A copy of an OnnxFile whose inner tensors are outputs too; calling it returns the value of every node.

    `hago.analysis.comparison` makes it and calls it once per batch.

    Args:
        file: the file.
        plan: the Plan from which the file was made.
        run: an engine of `ENGINES`.
    """

    def __init__(self, file: OnnxFile, plan: Plan, run: Callable[[Any], Run]) -> None:
        helper = load_onnx().helper
        self.plan, self.file = plan, file
        model = type(file.model)()
        model.CopyFrom(file.model)
        self.outputs = [o.name for o in model.graph.output]
        known = {*self.outputs, *plan.graph.inputs}
        writer = GraphWriter(plan.graph, plan.ops)
        for node, value in file.values.items():
            if value.name not in known:
                known.add(value.name)
                kind = element_type_of(writer, node, value)
                model.graph.output.append(helper.make_tensor_value_info(value.name, kind, None))
        self._run = run(model)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The value of every node by name, centered and in units of its scale for integer nodes, and the outputs of the
        model."""
        feed = dict(zip(self.plan.graph.inputs, (t.numpy() for t in inputs), strict=True))
        arrays = self._run(feed)
        values = {
            name: self._to_quanta(name, value, torch.from_numpy(arrays[value.name].copy()))
            for name, value in self.file.values.items()
            if value.name in arrays
        }
        return values, [torch.from_numpy(arrays[name].copy()) for name in self.outputs]

    def _to_quanta(self, name: str, value: Value, tensor: Tensor) -> Tensor:
        """The value of an integer node, centered and in units of its scale; that of a float node, unchanged."""
        node_plan = self.plan.nodes.get(name)
        if node_plan is None:
            return tensor
        if value.representation == "real":
            return tensor / node_plan.out.scale
        if value.representation == "stored":
            return tensor.to(torch.int64) - node_plan.out.zero_point
        return tensor  # "centered" needs no change
