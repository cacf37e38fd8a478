"""Comparison: realizations of one plan on the same data, node by node, in quanta.

A realization is the plan computed by somebody: the reference engine in int64, the fast kernels, the simulator, an
engine on the exported ONNX file, or the float model, whose values are measured on the plan's grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hago.data.batches import Batches
from hago.errors import HagoError, as_strings, did_you_mean
from hago.export.onnx.check import PlaceCheck, count_differences
from hago.export.onnx.engines import ENGINES, SATURATES, ObservedModel, openvino_that_lasts, saturates_pairs
from hago.export.onnx.export import make_onnx
from hago.graph.execute import run_real
from hago.graph.frontend import ModelLike
from hago.graph.graph import CONST, INPUT, Node
from hago.plan.plan import Plan
from hago.runtime.native.executor import FastModel
from hago.runtime.reference import IntegerModel
from hago.search.prepare import HardwareLike, StrategyLike, plan_and_batches
from hago.serialization.text_table import table
from hago.simulation.simulator import Simulator

#: A node's values on its own grid, centered (integer nodes) or as they are (float nodes), by node name.
Values = dict[str, Tensor]
#: From the inputs of one batch to the values of every node that can be seen, and the outputs.
Realize = Callable[[Sequence[Tensor]], tuple[Values, list[Tensor]]]


# ---------------------------------------------------------------- realizations
def _reference(plan: Plan) -> Realize:
    model = IntegerModel(plan)

    def run(inputs: Sequence[Tensor]) -> tuple[Values, list[Tensor]]:
        seen: Values = {}

        def on_value(node: Node, value: Any) -> None:
            if isinstance(value, Tensor):
                made = plan.nodes.get(node.name)
                seen[node.name] = value if made is None else value.to(torch.int64) - made.out.zero_point

        return seen, model.run(inputs, on_value)  # evaluated in this order: seen is filled by the run

    return run


def _simulated(plan: Plan) -> Realize:
    model = Simulator(plan)

    def run(inputs: Sequence[Tensor]) -> tuple[Values, list[Tensor]]:
        seen: Values = {}

        def on_value(node: Node, value: Any) -> None:
            if isinstance(value, Tensor):
                seen[node.name] = value.clone()

        return seen, model.run(inputs, on_value)

    return run


def _fast(plan: Plan) -> Realize:
    model = FastModel(plan)
    return lambda inputs: ({}, model.run(inputs))  # its kernels fuse nodes, so only the outputs are to be seen


def _float(plan: Plan) -> Realize:
    def run(inputs: Sequence[Tensor]) -> tuple[Values, list[Tensor]]:
        seen: Values = {}

        def on_value(node: Node, value: Any) -> None:
            if isinstance(value, Tensor):
                made = plan.nodes.get(node.name)
                seen[node.name] = value.clone() if made is None else value / made.out.scale

        return seen, run_real(plan.graph, inputs, on_value, plan.ops)

    return run


def _onnx(engine: str, plan: Plan) -> Realize:
    """QDQ form where ONNX can say the plan so, else QOperator form."""
    try:
        made = make_onnx(plan, "qdq")
    except HagoError:
        made = make_onnx(plan, "qoperator")
    return ObservedModel(made, plan, openvino_that_lasts if engine == "openvino" else ENGINES[engine])


REALIZATIONS: Final[Mapping[str, Callable[[Plan], Realize]]] = {
    "reference": _reference,
    "fast": _fast,
    "simulated": _simulated,
    **{name: partial(_onnx, name) for name in ENGINES},
    "float": _float,
}


# ---------------------------------------------------------------- what was found
@dataclass(frozen=True, slots=True)
class RealizationDifference:
    """One realization against the base.

    Args:
        name: of the realization.
        places: every node that can be seen, in the order of the graph.
        outputs: of the whole model.
        skipped: why it did not run; empty where it did.
    """

    name: str
    places: tuple[PlaceCheck, ...] = ()
    outputs: tuple[PlaceCheck, ...] = ()
    skipped: str = ""

    @property
    def integers(self) -> tuple[PlaceCheck, ...]:
        """The places that hold integers."""
        return tuple(p for p in self.places if p.integer)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "name": self.name,
            "skipped": self.skipped,
            "compared": sum(p.compared for p in self.integers),
            "differing": sum(p.differing for p in self.integers),
            "largest_quanta": max((p.largest for p in self.integers), default=0.0),
            "places": [p.to_json() for p in self.places],
            "outputs": [p.to_json() for p in self.outputs],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every realization against one; prints as a table of realizations, then of the nodes that differ.

    Args:
        base: what the others are compared with.
        samples: of the data.
        notes: of what users should know of this machine.
    """

    base: str
    samples: int
    against: tuple[RealizationDifference, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        against = [a.to_json() for a in self.against]
        return {"base": self.base, "samples": self.samples, "against": against, "notes": list(self.notes)}

    def __str__(self) -> str:
        titles = ("realization", "integers compared", "equal", "largest difference", "outputs equal")
        lines = [f"against {self.base}, {self.samples} samples"]
        lines += table(titles, [_row(a) for a in self.against], titles[1:])
        lines += [f"{a.name} skipped: {' '.join(a.skipped.split())}" for a in self.against if a.skipped]
        for a in self.against:
            differ = [p for p in a.places if p.integer and p.differing] if a.name != "float" else []
            if differ:
                lines += ["", f"where {a.name} differs:"]
                rows = [(p.place, p.op, str(p.compared), str(p.differing), f"{p.largest:.0f}") for p in differ]
                lines += table(
                    ("node", "op", "compared", "differing", "quanta"), rows, ("compared", "differing", "quanta")
                )
        return "\n".join([*lines, *self.notes])


def _row(found: RealizationDifference) -> tuple[str, ...]:
    if found.skipped:
        return (found.name, "skipped", "", "", "")
    compared, out = (sum(p.compared for p in places) for places in (found.integers, found.outputs))
    equal, same = (sum(p.compared - p.differing for p in places) for places in (found.integers, found.outputs))
    largest = max((p.largest for p in found.integers), default=0.0)
    seen = bool(found.integers)
    return (
        found.name,
        str(compared) if seen else "not to be seen",
        str(equal) if seen else "",
        f"{largest:.3g} quanta" if seen else "",
        f"{same} of {out}",
    )


# ---------------------------------------------------------------- the comparison
def compare_realizations(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    realizations: str | Sequence[str] = tuple(REALIZATIONS),
    base: str = "reference",
) -> Comparison:
    """Run realizations of a strategy on the same data.

    Args:
        realizations: names in REALIZATIONS; one that cannot run here (an engine that is not installed, a
            strategy that ONNX cannot express) is skipped with the reason.
        base: what the others are compared with.

    Raises:
        HagoError: an unknown name, bad data, or a base that cannot run.
    """
    realizations = as_strings(realizations, "realizations")
    for name in (*realizations, base):
        if name not in REALIZATIONS:
            known = ", ".join(REALIZATIONS)
            raise HagoError(f"unknown realization {name!r}; expected one of {known}.{did_you_mean(name, REALIZATIONS)}")
    plan, batches = plan_and_batches(model, hardware, strategy, dataset)
    return compare_plan(plan, batches, realizations, base)


def compare_plan(plan: Plan, batches: Batches, realizations: Sequence[str], base: str = "reference") -> Comparison:
    """The same for a Plan that is made already."""
    running: dict[str, Realize] = {}
    skipped: dict[str, str] = {}
    for name in dict.fromkeys(n for n in as_strings(realizations, "realizations") if n != base):
        try:
            running[name] = REALIZATIONS[name](plan)
        except HagoError as error:
            skipped[name] = str(error)
    ours = REALIZATIONS[base](plan)
    places: dict[str, dict[str, PlaceCheck]] = {name: {} for name in running}
    outputs: dict[str, dict[str, PlaceCheck]] = {name: {} for name in running}
    for batch in batches:
        expected = ours(batch.inputs)
        for name, run in running.items():
            _compare(plan, expected, run(batch.inputs), places[name], outputs[name])
    found = {n: RealizationDifference(n, tuple(places[n].values()), tuple(outputs[n].values())) for n in running}
    found |= {n: RealizationDifference(n, skipped=why) for n, why in skipped.items()}
    notes = (f"onnxruntime: {SATURATES}",) if "onnxruntime" in (base, *running) and saturates_pairs() else ()
    return Comparison(base, batches.samples, tuple(found[n] for n in dict.fromkeys(realizations) if n != base), notes)


def _compare(
    plan: Plan,
    expected: tuple[Values, list[Tensor]],
    got: tuple[Values, list[Tensor]],
    places: dict[str, PlaceCheck],
    outputs: dict[str, PlaceCheck],
) -> None:
    for node in plan.graph:
        if node.op in (INPUT, CONST) or node.name not in expected[0] or node.name not in got[0]:
            continue
        theirs = got[0][node.name]
        ours = expected[0][node.name]
        if theirs.dtype == torch.float32:
            ours = ours.to(torch.float32)  # of a sum beyond 2**24 that is what an ONNX file carries  (N3)
        count_differences(places, node.name, node.op, ours.numpy(), theirs.numpy(), node.name in plan.nodes)
    for name, ours, theirs in zip(plan.graph.outputs, expected[1], got[1], strict=True):
        made = plan.nodes.get(name)
        scale = torch.ones(()) if made is None else made.out.scale.to(torch.float32)
        first, second = (ours / scale).numpy(), (theirs / scale).numpy()
        count_differences(outputs, name, plan.graph[name].op, first, second, made is not None)
