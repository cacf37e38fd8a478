"""An exported file run with its inner values to be seen: a copy whose tensors are outputs too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hago.export.onnx_engines import Run
from hago.export.onnx_file import OnnxFile
from hago.export.onnx_values import Value, kind_of_value
from hago.export.onnx_writer import Writer, load_onnx
from hago.plan import Plan


class Seen:
    """Runs an OnnxFile and gives the values of its nodes on the plan's grid, and the outputs.

    Args:
        run: makes a function of named arrays from a model (see `onnx_engines`).
    """

    def __init__(self, made: OnnxFile, plan: Plan, run: Callable[[Any], Run]) -> None:
        helper = load_onnx().helper
        self.plan, self.made = plan, made
        model = type(made.model)()
        model.CopyFrom(made.model)
        self.outputs = [o.name for o in model.graph.output]
        known = {*self.outputs, *plan.graph.inputs}
        writer = Writer(plan.graph)
        for node, value in made.values.items():
            if value.name not in known:
                known.add(value.name)
                kind = kind_of_value(writer, node, value)
                model.graph.output.append(helper.make_tensor_value_info(value.name, kind, None))
        self._run = run(model)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The values of every node by name, and the outputs."""
        feed = dict(zip(self.plan.graph.inputs, (t.numpy() for t in inputs), strict=True))
        found = self._run(feed)
        values = {
            name: self._on_grid(name, value, torch.from_numpy(found[value.name].copy()))
            for name, value in self.made.values.items()
            if value.name in found
        }
        return values, [torch.from_numpy(found[name].copy()) for name in self.outputs]

    def _on_grid(self, name: str, value: Value, held: Tensor) -> Tensor:
        made = self.plan.nodes.get(name)
        if made is None:
            return held
        if value.held == "real":
            return held / made.out.scale
        return held.to(torch.int64) - made.out.zero_point if value.held == "stored" else held
