"""The ONNX graph under construction.

This is the one module that imports onnx. Names never collide: the output of a hago node keeps the node's name, every
other tensor is called `name:something`, and no node's name holds a colon.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hago.errors import HagoError
from hago.graph import Graph, infer_dtypes
from hago.ops import OPS, Ops

MICROSOFT: Final = "com.microsoft"
#: The lowest opset of a file, which has LayerNormalization.
BASE_OPSET: Final = 17
#: The first opset with QuantizeLinear and DequantizeLinear of 4 and 16 bits.
NARROW_AND_WIDE_OPSET: Final = 21
#: The IR version released with each opset; engines refuse files of a newer one than they support.
_IR_VERSIONS: Final = ((17, 8), (19, 9), (21, 10), (23, 11))


def load_onnx() -> Any:
    """The onnx package.

    Raises:
        HagoError: it is not installed.
    """
    try:
        return importlib.import_module("onnx")
    except ImportError:
        raise HagoError("ONNX export needs the package onnx: pip install 'hago[onnx]'") from None


class GraphWriter:
    """Collects the nodes and constants of an ONNX graph. Made by a ModelBuilder; `finish` returns the model.

    Args:
        graph: the graph of hago, for shapes, constants and dtypes.
        ops: its operators.
    """

    def __init__(self, graph: Graph, ops: Ops = OPS) -> None:
        self.graph = infer_dtypes(graph, ops)
        self.opset = BASE_OPSET
        self._onnx = load_onnx()
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}
        self._domains: set[str] = set()
        self._counts: dict[str, int] = {}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a node's real value. A size, which is no tensor in torch, is one of int64 in ONNX."""
        node = self.graph[name]
        return torch.int64 if node.shape is None else node.torch_dtype

    def need(self, opset: int) -> None:
        """Require at least this opset."""
        self.opset = max(self.opset, opset)

    def fresh(self, hint: str) -> str:
        """A name that no tensor has yet: `hint`, or `hint` with a number."""
        count = self._counts.get(hint, 0)
        self._counts[hint] = count + 1
        return hint if count == 0 else f"{hint}.{count}"

    def op(self, kind: str, inputs: Sequence[str], out: str, domain: str = "", **attrs: Any) -> str:
        """Append a node with one output called `out`; attributes that are None are left out.

        Returns:
            `out`.
        """
        given = {k: v for k, v in attrs.items() if v is not None}
        if domain:
            self._domains.add(domain)
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), [out], name=out, domain=domain, **given))
        return out

    def step(self, kind: str, inputs: Sequence[str], out: str, **attrs: Any) -> str:
        """The same for a value in between, whose name is made from `out`."""
        return self.op(kind, inputs, self.fresh(f"{out}:{kind.lower()}"), **attrs)

    def constant(self, name: str, value: Tensor | np.ndarray[Any, Any] | Sequence[Any] | float, kind: str = "") -> str:
        """Add a constant, unless there is one of this name, which then has the same values.

        Args:
            kind: an ONNX type that numpy lacks, e.g. "INT4".

        Returns:
            `name`.
        """
        if name not in self._constants:
            array = value.detach().cpu().contiguous().numpy() if isinstance(value, Tensor) else np.asarray(value)
            if kind:
                data_type = getattr(self._onnx.TensorProto, kind)
                tensor = self._onnx.helper.make_tensor(name, data_type, array.shape, array.flatten().tolist())
            else:
                tensor = self._onnx.numpy_helper.from_array(array, name)
            self._constants[name] = tensor
        return name

    def integers(self, values: Sequence[int], out: str) -> str:
        """A constant list of int64, e.g. axes or a shape."""
        return self.constant(self.fresh(f"{out}:integers"), np.asarray(values, dtype=np.int64))

    def number(self, value: float, out: str, like: str = "float32") -> str:
        """A constant scalar."""
        return self.constant(self.fresh(f"{out}:number"), np.asarray(value, dtype=like))

    def element_type(self, dtype: torch.dtype | str) -> int:
        """The ONNX element type of a torch dtype, or of one by name ("float32")."""
        name = str(dtype).removeprefix("torch.")
        if name == "bfloat16":  # numpy has none
            return int(self._onnx.TensorProto.BFLOAT16)
        return int(self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)))

    def finish(
        self,
        inputs: Mapping[str, tuple[int, Sequence[int | str]]],
        outputs: Mapping[str, tuple[int, Sequence[int | str] | None]],
        metadata: Mapping[str, str],
    ) -> Any:
        """The model.

        Args:
            inputs, outputs: element type and shape by name; a size that is a string is symbolic.
            metadata: the model's `metadata_props`.
        """
        helper = self._onnx.helper
        read = {name for node in self._nodes for name in node.input}
        graph = helper.make_graph(
            self._nodes,
            "hago",
            [helper.make_tensor_value_info(n, kind, shape) for n, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(n, kind, shape) for n, (kind, shape) in outputs.items()],
            [value for name, value in self._constants.items() if name in read or name in outputs],
        )
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in sorted(self._domains))]
        ir_version = next((ir for opset, ir in _IR_VERSIONS if opset >= self.opset), _IR_VERSIONS[-1][1])
        model = helper.make_model(graph, opset_imports=opsets, producer_name="hago", ir_version=ir_version)
        helper.set_model_props(model, dict(metadata))
        return model
