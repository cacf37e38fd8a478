"""The ONNX graph under construction, and the torch dtypes of the values that it stands for.

This is the one module that imports onnx. Names never collide: the output of a hago node keeps the node's name, every
other tensor is called `name:something`, and no node's name holds a colon.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hago.errors import HagoError
from hago.graph.graph import CONST, INPUT, Graph, Node
from hago.ops import OPS

_CONDITIONS: Final = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "isnan", "isinf"}
)
#: ATen calls that sum, and return int64 for integers.
_SUMS: Final = frozenset({"cumsum", "sum"})
#: ATen calls that make a tensor, with the dtype of their result if no argument decides it.
_FILL: Final = {"zeros": torch.float32, "ones": torch.float32, "full": torch.float32, "arange": torch.int64}
_INDICES: Final = frozenset({"argmax", "argmin", "sym_size"})
#: Ops whose result has the dtype of their inputs.
_MOVES: Final = frozenset(name for name, rule in OPS.items() if rule.moves_values)
#: ATen calls that also read indices or conditions, with the number of inputs that come before these.
_VALUE_INPUTS: Final = {"gather": 1, "index": 1, "masked_fill": 1, "index_select": 1}


class Dtypes:
    """The dtypes of a graph's values in float, by node name; inferred on first use."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._dtypes: dict[str, torch.dtype] = {}

    def __getitem__(self, name: str) -> torch.dtype:
        # in order: a graph may be deeper than Python recurses
        if name not in self._dtypes:
            for node in self.graph:
                if node.name not in self._dtypes:
                    self._dtypes[node.name] = self._of(node)
                if node.name == name:
                    break
        return self._dtypes[name]

    def _of(self, node: Node) -> torch.dtype:
        if node.op == CONST:
            return self.graph.consts[node.name].dtype
        if node.op in (INPUT, "to"):
            return _named(node.attrs.get("dtype", "float32"))
        # sizes have no shape
        read = [self._dtypes[s] for s in node.inputs if self.graph[s].shape is not None]
        if node.op == "opaque":
            return _of_call(node, read)
        if node.op == "index":
            return read[0]
        return reduce(torch.promote_types, read) if node.op in _MOVES and read else torch.float32


def _of_call(node: Node, read: list[torch.dtype]) -> torch.dtype:
    space, _, rest = str(node.attrs["target"]).partition(".")
    name = rest.partition(".")[0]
    keyword: Any = node.attrs["kwargs"].get("dtype")
    if keyword is not None:
        return _named(keyword["torch"])
    if name in _CONDITIONS:
        return torch.bool
    if space in ("operator", "torch") or name in _INDICES:
        return torch.int64
    if name in _FILL:
        numbers = [a for a in node.attrs["args"] if isinstance(a, float)]
        return torch.float32 if numbers else _FILL[name]
    if name in ("where", "type_as"):
        read = read[1:]
    numbers = [a for a in node.attrs["args"] if isinstance(a, float)]
    read = read[: _VALUE_INPUTS.get(name)]
    promoted = reduce(torch.promote_types, read) if read else torch.float32
    if name in _SUMS and not promoted.is_floating_point:
        return torch.int64
    if numbers and not promoted.is_floating_point:
        return torch.float32
    has_integer = any(isinstance(a, int) and not isinstance(a, bool) for a in node.attrs["args"])
    return torch.int64 if has_integer and promoted == torch.bool and name in ("add", "sub", "mul") else promoted


def _named(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    assert isinstance(dtype, torch.dtype)
    return dtype


# ---------------------------------------------------------------- the graph
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
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.dtypes = graph, Dtypes(graph)
        self.opset = BASE_OPSET
        self._onnx = load_onnx()
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}
        self._domains: set[str] = set()
        self._counts: dict[str, int] = {}

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
        """The same for a value in between, whose name is node_plan from `out`."""
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
            self._constants[name] = self._packed(name, array, kind) if kind else self._plain(name, array)
        return name

    def integers(self, values: Sequence[int], out: str) -> str:
        """A constant list of int64, e.g. axes or a shape."""
        return self.constant(self.fresh(f"{out}:integers"), np.asarray(values, dtype=np.int64))

    def number(self, value: float, out: str, like: str = "float32") -> str:
        """A constant scalar."""
        return self.constant(self.fresh(f"{out}:number"), np.asarray(value, dtype=like))

    def _plain(self, name: str, array: np.ndarray[Any, Any]) -> Any:
        return self._onnx.numpy_helper.from_array(array, name)

    def _packed(self, name: str, array: np.ndarray[Any, Any], kind: str) -> Any:
        data_type = getattr(self._onnx.TensorProto, kind)
        return self._onnx.helper.make_tensor(name, data_type, array.shape, array.flatten().tolist())

    def element_type(self, dtype: torch.dtype | str) -> int:
        """The ONNX element type of a torch dtype, or of one by name ("float32")."""
        name = str(dtype).removeprefix("torch.")
        names = {"bool": "bool", "bfloat16": None}
        if name == "bfloat16":
            return int(self._onnx.TensorProto.BFLOAT16)
        return int(self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(names.get(name) or name)))

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
