"""The Quantizer: a strategy applied to a model, from which the simulated and the integer model are made."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from hago.data import Batches
from hago.export import ExportFormat, ExportResult, NodeFigures, find_format, request_export, write_files
from hago.export.onnx import OnnxFile, make_onnx, write_onnx
from hago.plan import Plan, Strategy
from hago.runtime import IntegerModel, Provenance
from hago.runtime.native import named_engine
from hago.serialization.summary import Summarized, Summary
from hago.simulation import Simulator


@dataclass(frozen=True, slots=True, repr=False)
class Quantizer(Summarized):
    """A Plan with the strategy that it came from. `hago.create_quantizer`, `hago.quantize` and training make it;
    `simulate()` and `realize()` return the two models.

    Both are nn.Modules that take and return real values as the float model does; their outputs
    are equal bit for bit.
    """

    plan: Plan
    strategy: Strategy

    def summary(self) -> Summary:
        """The network, the chip, the bits, the size of the weights, the score, and what stays float."""
        of_plan, of_strategy = self.plan.summary().facts, self.strategy.summary().facts
        facts = {
            "nodes": of_plan["nodes"],
            "bits": of_strategy["bits"],
            "weights": of_plan["weights"],
            "score": of_strategy["score"],
            "held out": of_strategy["held out"],
            "float": of_plan["float"],
            "overflow": of_plan["overflow"],
            "made by": of_strategy["made by"],
            "next": "realize() for the integer model, simulate(), export_onnx(path), strategy.save(path)",
        }
        nodes = len(self.plan.graph.computed)
        return Summary(f"Quantizer of a network of {nodes} nodes for {self.plan.hardware.name}", facts)

    def simulate(self) -> Simulator:
        """The simulated model: its integers are carried in floats, and it runs nearly as fast as the float model."""
        return Simulator(self.plan)

    def export_onnx(self, path: str | PathLike[str], form: str = "qdq") -> OnnxFile:
        """Write the integer model as an ONNX file.

        Args:
            form: `qdq`, operators between DequantizeLinear and QuantizeLinear, which engines fuse; or
                `qoperator`, operators on integers.

        Returns:
            The ONNX model, with the names of the tensors that stand for each value.

        Raises:
            HagoError: ONNX cannot express the strategy: each node and edge in the way is named, and nothing is
                written. Or the package onnx is not installed.
        """
        made = make_onnx(self.plan, form)
        write_onnx(made, path)
        return made

    def export(
        self,
        path: str | PathLike[str],
        format: str | ExportFormat,
        data: Any | None = None,
        *,
        figures: NodeFigures | None = None,
        **options: str,
    ) -> ExportResult:
        """Write the integer model in the format of another tool.

        Args:
            path: where to write; the format adds its own endings.
            format: the name of a format in `hago.export.formats.FORMATS`, e.g. `onnx`, or an ExportFormat of your own.
            data: batches of the model, for formats that read data.
            figures: figures of nodes for formats that show them, such as `figures()` of what
                `hago.inspect_graph_statistic` returned.
            options: those of the format, e.g. `form="qoperator"` of `onnx`.

        Raises:
            HagoError: there is no such format or option, or the format cannot express the strategy.
        """
        found = find_format(format)
        batches = None if data is None else Batches(data, self.plan.graph.inputs)
        request = request_export(found, self.plan, self.strategy, Path(path), batches, options, figures or {})
        return write_files(found, request)

    def realize(self, engine: str = "auto") -> IntegerModel:
        """The integer model: weights and activations stored as integers.

        Args:
            engine: `auto` runs every node on the fastest kernel that is exact on this machine (its
                `explain()` says which); `reference` runs all of them in int64.

        Raises:
            HagoError: no such engine.
        """
        return named_engine(engine)(self.plan, Provenance.of(self.strategy))

    def quantize(self, engine: str = "auto") -> IntegerModel:
        """The old name of `realize`."""
        return self.realize(engine)
