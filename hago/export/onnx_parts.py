"""Parts of an ONNX model: the nodes between tensors whose values are known and a tensor that is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hago.export.onnx_writer import load_onnx


@dataclass(frozen=True, slots=True)
class Part:
    """A model of its own, cut out of another.

    Args:
        model: an onnx.ModelProto with one output.
        inputs: the tensors it is fed.
    """

    model: Any
    inputs: tuple[str, ...]


class Parts:
    """Cuts parts out of one model.

    Args:
        kinds: ONNX element types of the tensors that parts may start from or end with.
    """

    def __init__(self, model: Any, kinds: Mapping[str, int]) -> None:
        self._onnx = load_onnx()
        self._model, self._kinds = model, kinds
        self._makers = {out: node for node in model.graph.node for out in node.output}
        self._constants = {c.name: c for c in model.graph.initializer}

    def ending_in(self, tensor: str, known: Mapping[str, Sequence[int]]) -> Part:
        """The part that computes `tensor` from tensors that are known.

        Args:
            known: where to start, with shapes; whatever feeds them is left out. Their first axis may have any size,
                as in the whole; the others stay as they are, since OpenVINO 2026.4 takes a constant of a value for
                each channel for one of a single value where it does not know how many channels there are.
        """
        helper = self._onnx.helper
        nodes: dict[str, Any] = {}
        starts: dict[str, None] = {}
        constants: dict[str, Any] = {}
        left = [tensor]
        while left:
            name = left.pop()
            if not name or name in nodes or name in starts:
                continue
            if name in self._constants:
                constants[name] = self._constants[name]
            elif name in known and name != tensor:
                starts[name] = None
            else:
                nodes[name] = self._makers[name]
                left.extend(self._makers[name].input)
        ordered = [n for n in self._model.graph.node if any(out in nodes for out in n.output)]

        def described(name: str) -> Any:
            sizes = [f"{name}.0", *known[name][1:]]
            return helper.make_tensor_value_info(name, self._kinds[name], sizes[: len(known[name])])

        graph = helper.make_graph(
            ordered, "part", [described(n) for n in starts], [described(tensor)], list(constants.values())
        )
        imports = list(self._model.opset_import)
        made = helper.make_model(graph, opset_imports=imports, ir_version=self._model.ir_version)
        return Part(made, tuple(starts))
