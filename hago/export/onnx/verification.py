"""Comparison of an exported ONNX file with the integer model: of each node by itself, and of the whole file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hago.arithmetic.equality import differences, to_quanta
from hago.arithmetic.types import Edge
from hago.export.onnx.builder import OnnxFile, remove_padding
from hago.export.onnx.engines import ENGINES, SATURATES, Run, onnxruntime, saturates_pairs
from hago.export.onnx.values import Value, element_type_of, numpy_dtype
from hago.export.onnx.writer import GraphWriter, load_onnx
from hago.graph import Node
from hago.plan import Plan
from hago.runtime import IntegerModel


@dataclass(frozen=True, slots=True)
class Submodel:
    """A part of an ONNX model that can be run by itself, made by `SubmodelExtractor.extract`.

    Args:
        model: an onnx.ModelProto with one output.
        inputs: the names of its inputs.
    """

    model: Any
    inputs: tuple[str, ...]


class SubmodelExtractor:
    """Extracts parts of one ONNX model. `_Checker` makes it, and calls `extract` for every tensor that it compares.

    Args:
        model: an onnx.ModelProto.
        element_types: of the tensors that may be inputs or outputs of a part.
    """

    def __init__(self, model: Any, element_types: Mapping[str, int]) -> None:
        self._onnx = load_onnx()
        self._model, self._element_types = model, element_types
        self._producers = {out: node for node in model.graph.node for out in node.output}
        self._constants = {c.name: c for c in model.graph.initializer}

    def extract(self, tensor: str, known: Mapping[str, Sequence[int]]) -> Submodel:
        """Extract the part that computes `tensor` from tensors whose values are known.

        Args:
            known: the shapes of these tensors; the nodes that compute them are left out. Their first axis may have any
                size, as in the whole model; the others are fixed, because OpenVINO 2026.4 mistakes a constant
                with a value per channel for a scalar if it does not know the number of channels.
        """
        helper = self._onnx.helper
        nodes: dict[str, Any] = {}
        starts: dict[str, None] = {}
        constants: dict[str, Any] = {}
        pending = [tensor]
        while pending:
            name = pending.pop()
            if not name or name in nodes or name in starts:
                continue
            if name in self._constants:
                constants[name] = self._constants[name]
            elif name in known and name != tensor:
                starts[name] = None
            else:
                nodes[name] = self._producers[name]
                pending.extend(self._producers[name].input)
        ordered = [n for n in self._model.graph.node if any(out in nodes for out in n.output)]

        def value_info(name: str) -> Any:
            sizes = [f"{name}.0", *known[name][1:]]
            return helper.make_tensor_value_info(name, self._element_types[name], sizes[: len(known[name])])

        graph = helper.make_graph(
            ordered, "part", [value_info(n) for n in starts], [value_info(tensor)], list(constants.values())
        )
        imports = list(self._model.opset_import)
        model = helper.make_model(graph, opset_imports=imports, ir_version=self._model.ir_version)
        return Submodel(model, tuple(starts))


# ---------------------------------------------------------------- the comparison
# For every tensor of integers, the part of the file that computes it is extracted and run on values of the integer
# model, so that a difference is due to that node and not to its inputs.

Array = np.ndarray[Any, Any]
#: Ops that add products of bytes, which some CPUs add in saturating pairs.
_ADDS_PRODUCTS: Final = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "linear", "matmul")
#: Why the check finds differences although it keeps sums exact, and what helps.
_REFUSES_PRECISE: Final = (
    "this CPU has no VNNI, and ONNX Runtime refuses the option that keeps sums of products of bytes exact for some "
    "files with signed activations, so it adds them in pairs that saturate at 16 bits. Give weights 7 bits "
    "(fix_bits={'*.weight': 7}), with which no pair saturates, or run the file on a CPU with VNNI"
)
#: The fraction of values that may differ by one quantum, as they do in engines where scales are arbitrary floats.
TOLERATED: Final = 1e-4


@dataclass(frozen=True, slots=True)
class PlaceCheck:
    """The comparison of one tensor, of integers or of reals, summed over batches.

    Args:
        place: the node, or the edge on which a value is requantized.
        op: of the node.
        compared, differing: numbers of values.
        largest: the largest difference, in quanta for integers, in real units for reals.
        integer: whether the values are integers.
    """

    place: str
    op: str
    compared: int
    differing: int
    largest: float
    integer: bool

    @property
    def tolerable(self) -> bool:
        """Whether no more than a fraction TOLERATED of the integers differ, and these by one quantum."""
        return not self.integer or (self.largest <= 1 and self.differing <= max(1.0, TOLERATED * self.compared))

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def __add__(self, other: PlaceCheck) -> PlaceCheck:
        compared, differing = self.compared + other.compared, self.differing + other.differing
        return PlaceCheck(self.place, self.op, compared, differing, max(self.largest, other.largest), self.integer)


@dataclass(frozen=True, slots=True)
class OnnxCheck:
    """The result of comparing a file with the integer model, made by `check_onnx`.

    Args:
        places: the comparison of every tensor, in the order of the graph.
        outputs: the comparison of the outputs of the whole file, run from its inputs.
        by_default: the same with the default options of ONNX Runtime, if they saturate pairs of products on this CPU;
            else None.
    """

    engine: str
    places: tuple[PlaceCheck, ...]
    outputs: tuple[PlaceCheck, ...]
    by_default: tuple[PlaceCheck, ...] | None = None

    @property
    def differing(self) -> int:
        """Number of integers that differ, over all places."""
        return sum(p.differing for p in self.places if p.integer)

    @property
    def compared(self) -> int:
        return sum(p.compared for p in self.places if p.integer)

    @property
    def same(self) -> bool:
        return self.differing == 0

    @property
    def fused_otherwise(self) -> PlaceCheck | None:
        """The output of the whole file that is furthest off, though every node by itself gives the integers of hago's
        model and all of them compute integers: the engine then computes several nodes together in another way."""
        if not self.same or not all(p.integer for p in self.places):
            return None
        return max((p for p in self.outputs if p.integer and p.largest > 1), key=lambda p: p.largest, default=None)

    @property
    def tolerable(self) -> bool:
        return all(p.tolerable for p in self.places) and self.fused_otherwise is None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the check failed: what differs by more than is tolerated, the known reason, and what to do; empty where
        it passed."""
        failed = [p for p in self.places if not p.tolerable]
        if (off := self.fused_otherwise) is not None:
            return (
                "the check FAILED: every node by itself gives the integers of hago's model, but the whole file does "
                f"not: {off.differing} of {off.compared} of output {off.place} differ, by at most {off.largest:.6g} "
                "quanta",
                f"{self.engine} computes several of its nodes together in another way; run the file with graph "
                "optimizations off, or keep the nodes before this output float (keep_float)",
            )
        if not failed:
            return ()
        worst = max(failed, key=lambda p: (p.largest, p.differing / p.compared))
        count = sum(p.integer for p in self.places)
        found = (
            f"the check FAILED: {len(failed)} of {count} tensors of integers differ by more than one quantum, or in "
            f"more than {100 * TOLERATED:.2g} % of their values; the worst is {worst.place} ({worst.op}), where "
            f"{worst.differing} of {worst.compared} differ, by at most {worst.largest:.6g} quanta"
        )
        if self.by_default is not None and any(p.op in _ADDS_PRODUCTS for p in failed):
            return (found, f"the likely reason: {_REFUSES_PRECISE}")
        others = " or ".join(f"--engine {name}" for name in ENGINES if name != self.engine)
        return (
            found,
            "each node was fed the integers of hago's model, so the difference is made at these places. Check with "
            f"{others}: where that passes, the file is right, and {self.engine} computes these nodes in another way; "
            "keep them float (keep_float) for it",
        )

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "engine": self.engine,
            "same": self.same,
            "reasons": list(self.reasons),
            "tolerable": self.tolerable,
            "compared": self.compared,
            "differing": self.differing,
            "places": [p.to_json() for p in self.places],
            "outputs": [p.to_json() for p in self.outputs],
            "by_default": None if self.by_default is None else [p.to_json() for p in self.by_default],
        }

    def __str__(self) -> str:
        passed = "; the check passed" if self.tolerable else ""  # `reasons` say why it failed
        lines = [
            f"{self.engine}: {self.differing} of {self.compared} integers differ where every node gets the values of "
            f"the integer model{passed}"
        ]
        for p in (p for p in self.places if p.integer and p.differing):
            lines.append(f"  {p.place} ({p.op}): {p.differing} of {p.compared}, by at most {p.largest:.6g} quanta")
        real = [p for p in self.places if not p.integer]
        if real:
            worst = max(real, key=lambda p: p.largest)
            lines.append(f"  {len(real)} float nodes: the largest difference is {worst.largest:.3g}, at {worst.place}")
        for p in self.outputs:
            unit = "quanta" if p.integer else "in real units"
            lines.append(f"  output {p.place} of the whole file: {p.differing} of {p.compared}, {p.largest:.3g} {unit}")
        if self.by_default is not None:
            differ, all_outputs = (
                sum(n) for n in zip(*((p.differing, p.compared) for p in self.by_default), strict=True)
            )
            why = f": {SATURATES}" if differ else ""
            lines.append(f"  by default {differ} of {all_outputs} outputs of the whole file differ{why}")
        return "\n".join([*lines, *self.reasons])


def check_onnx(
    file: OnnxFile, plan: Plan, batches: Iterable[Sequence[Tensor]], run: Any = onnxruntime, engine: str = "onnxruntime"
) -> OnnxCheck:
    """Compare a file with the integer model of its plan.

    Args:
        batches: inputs of the model; the values of one batch at a time are in memory.
        run: an engine, that is, a function that makes a Run of a model (see `hago.export.onnx.engines`).
        engine: its name, for the report.

    Raises:
        HagoError: the engine is not installed or refuses the file.
    """
    checker = _Checker(file, plan, run)
    for inputs in batches:
        checker.add(inputs)
    by_default = None if checker.plain is None else tuple(checker.plain_outputs.values())
    return OnnxCheck(engine, tuple(checker.places.values()), tuple(checker.outputs.values()), by_default)


class _Checker:
    """Compares one file over batches, and keeps the engine's session of every part. Made by `check_onnx`."""

    def __init__(self, file: OnnxFile, plan: Plan, run: Any) -> None:
        self.file, self.plan, self.run = file, plan, run
        self.model = IntegerModel(plan)
        self.run_file: Run = run(file.model)
        self.places: dict[str, PlaceCheck] = {}
        self.outputs: dict[str, PlaceCheck] = {}
        self.plain: Run | None = None
        if run is onnxruntime and saturates_pairs():
            self.plain = onnxruntime(file.model, precise=False)
        self.plain_outputs: dict[str, PlaceCheck] = {}
        self.named = self._tensors()
        writer = GraphWriter(plan.graph, plan.ops)
        kinds = {name: element_type_of(writer, place, value) for name, (place, value) in self.named.items()}
        kinds |= {i.name: i.type.tensor_type.elem_type for i in file.model.graph.input}
        self.parts = SubmodelExtractor(file.model, kinds)
        self.sessions: dict[tuple[Any, ...], tuple[Submodel, Run]] = {}

    def _tensors(self) -> dict[str, tuple[str, Value]]:
        """The place and the value of every tensor whose values the integer model knows, by tensor name."""
        tensors: dict[str, tuple[str, Value]] = {}
        for node in self.plan.graph:
            value = self.file.values.get(node.name)
            if value is not None and not (value.representation == "real" and node.name in self.plan.nodes):
                tensors.setdefault(value.name, (node.name, value))
        for edge, value in self.file.operands.items():
            if value.representation != "real":
                tensors.setdefault(value.name, (str(edge), value))
        return tensors

    def add(self, inputs: Sequence[Tensor]) -> None:
        """Compare one batch."""
        known: dict[str, Array] = {}

        def keep(value: Value | None, array: Tensor) -> None:
            if value is not None and value.name in self.named:
                known.setdefault(value.name, array.numpy())

        def on_value(node: Node, value: Any) -> None:
            if not isinstance(value, Tensor):
                return
            node_plan = self.plan.nodes.get(node.name)
            stored = self.file.values.get(node.name)
            if node_plan is None:
                keep(stored, value)
            elif stored is not None and stored.representation != "real":
                keep(stored, _to_file_integers(value.to(torch.int64) - node_plan.out.zero_point, stored))

        def on_edge(edge: Edge, value: Any) -> None:
            operand = self.file.operands.get(edge)
            if operand is not None and operand.representation != "real":
                keep(operand, _to_file_integers(self._as_read(edge, value), operand))

        results = self.model.run(inputs, on_value, on_edge)
        feed = dict(zip(self.plan.graph.inputs, (t.numpy() for t in inputs), strict=True))
        for name in known:
            if name not in feed:
                self._compare(name, {**known, **feed})
        self._compare_outputs(self.outputs, results, self.run_file(feed))
        if self.plain is not None:
            self._compare_outputs(self.plain_outputs, results, self.plain(feed))

    def _as_read(self, edge: Edge, value: Tensor) -> Tensor:
        """The value that the node reads on an edge in the file; a pad that is merged into the node is removed."""
        source = self.plan.graph[self.plan.graph.source(edge)]
        return remove_padding(value, source) if source.name in self.file.unpadded else value

    def _compare(self, tensor: str, known: Mapping[str, Array]) -> None:
        """Run the part of the file that computes a tensor on known values, and compare the result."""
        place, value = self.named[tensor]
        # if the batch is on another axis than the first, a batch of another size needs its own sessions
        key = tensor, tuple(array.shape[1:] for array in known.values())
        if key not in self.sessions:
            part = self.parts.extract(tensor, {name: array.shape for name, array in known.items()})
            self.sessions[key] = (part, self.run(part.model))
        part, run = self.sessions[key]
        theirs = run({name: known[name] for name in part.inputs})[tensor]
        node = self.plan.graph[place.partition(":")[0]]
        grid = None if value.representation == "real" else 1.0
        count_differences(self.places, place, node.op, known[tensor], theirs, grid)

    def _compare_outputs(self, places: dict[str, PlaceCheck], ours: Sequence[Any], theirs: Mapping[str, Array]) -> None:
        for name, our_output, their_output in zip(self.plan.graph.outputs, ours, theirs.values(), strict=True):
            node_plan = self.plan.nodes.get(name)
            scale = None if node_plan is None else node_plan.out.scale.to(torch.float32).numpy()
            count_differences(places, name, self.plan.graph[name].op, our_output.numpy(), their_output, scale)


def _to_file_integers(centered: Tensor, value: Value) -> Tensor:
    """Convert centered integers to those that the file has, stored or centered."""
    assert value.qparams is not None
    if value.representation == "centered":
        return centered.to(torch.float32)
    stored = centered.to(torch.int64) + value.qparams.zero_point
    return torch.from_numpy(stored.numpy().astype(numpy_dtype(value.qparams.dtype)))


def count_differences(
    into: dict[str, PlaceCheck], place: str, op: str, ours: Array, theirs: Array, scale: Array | float | None
) -> None:
    """Compare two arrays, and add the result to the comparison of a place.

    Args:
        into: the comparisons so far, by place.
        scale: real units per quantum of the values, 1 if they are quanta; both are rounded to quanta before they are
            compared. None for real values, which are compared as they are.
    """
    a, b = _tensor(ours), _tensor(theirs)
    if scale is not None:
        real_units = torch.as_tensor(scale, dtype=torch.float64)
        a, b = to_quanta(a, real_units), to_quanta(b, real_units)
    count, largest = differences(a, b)
    check = PlaceCheck(place, op, a.numel(), count, largest, scale is not None)
    into[place] = into[place] + check if place in into else check


def _tensor(array: Array) -> Tensor:
    """A tensor with a copy of the array, because arrays of engines may be read-only."""
    return torch.from_numpy(np.array(array))
