"""Comparison of realizations of one Plan on the same data, node by node, in quanta.

A realization is one way of computing the Plan: the reference engine in int64, the fast kernels, the simulator, an
engine on the exported ONNX file, or the float model, whose values are divided by the Plan's scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from hago.data import Batches
from hago.errors import HagoError, as_strings, did_you_mean
from hago.export.onnx import (
    ENGINES,
    SATURATES,
    ObservedModel,
    PlaceCheck,
    count_differences,
    make_onnx,
    openvino_if_no_crash,
    saturates_pairs,
)
from hago.graph import CONST, INPUT, ModelLike, Node, run_real
from hago.importing import HardwareLike, StrategyLike
from hago.plan import NodePlan, Plan
from hago.runtime import IntegerModel, center
from hago.runtime.native import NativeIntegerModel
from hago.search import plan_and_batches
from hago.search.objective import OBJECTIVES, class_count, unfit_labels, warn_of_labels, why_labels_misfit
from hago.serialization.text_table import counted, table
from hago.simulation import Simulator

#: The values of nodes by name: centered integers of integer nodes, real values of float nodes.
Values = dict[str, Tensor]
#: A realization: a function from the inputs of one batch to the values of the visible nodes, and the outputs.
Realize = Callable[[Sequence[Tensor]], tuple[Values, list[Tensor]]]
#: A function that a run calls with every node and its value.
OnValue = Callable[[Node, Any], None]


# ---------------------------------------------------------------- realizations
def _observed(
    plan: Plan,
    run: Callable[[Sequence[Tensor], OnValue], list[Tensor]],
    convert: Callable[[Tensor, NodePlan | None], Tensor],
) -> Realize:
    """A realization that keeps the value of every node.

    Args:
        run: runs the model, and calls its second argument with every node and its value.
        convert: makes a value comparable; it is given the plan of an integer node, and None for a float node.
    """

    def realize(inputs: Sequence[Tensor]) -> tuple[Values, list[Tensor]]:
        values: Values = {}

        def on_value(node: Node, value: Any) -> None:
            if isinstance(value, Tensor):
                values[node.name] = convert(value, plan.nodes.get(node.name))

        return values, run(inputs, on_value)  # the run fills `values`

    return realize


def _reference(plan: Plan) -> Realize:
    def centered(value: Tensor, node_plan: NodePlan | None) -> Tensor:
        return value if node_plan is None else center(value, node_plan.out)

    return _observed(plan, IntegerModel(plan).run, centered)


def _simulated(plan: Plan) -> Realize:
    return _observed(plan, Simulator(plan).run, lambda value, node_plan: value.clone())


def _fast(plan: Plan) -> Realize:
    model = NativeIntegerModel(plan)
    return lambda inputs: ({}, model.run(inputs))  # its kernels fuse nodes, so that only the outputs are visible


def _float(plan: Plan) -> Realize:
    def in_quanta(value: Tensor, node_plan: NodePlan | None) -> Tensor:
        return value.clone() if node_plan is None else value / node_plan.out.scale

    return _observed(plan, lambda inputs, on_value: run_real(plan.graph, inputs, on_value, plan.ops), in_quanta)


def _onnx(engine: str, plan: Plan) -> Realize:
    """An engine on the exported file: in QDQ form if that can express the Plan, else in QOperator form."""
    try:
        exported = make_onnx(plan, "qdq")
    except HagoError:
        exported = make_onnx(plan, "qoperator")
    return ObservedModel(exported, plan, openvino_if_no_crash if engine == "openvino" else ENGINES[engine])


#: Functions that make the realization of a Plan, by name.
REALIZATIONS: Final[Mapping[str, Callable[[Plan], Realize]]] = {
    "reference": _reference,
    "fast": _fast,
    "simulated": _simulated,
    **{name: partial(_onnx, name) for name in ENGINES},
    "float": _float,
}


# ---------------------------------------------------------------- results
@dataclass(frozen=True, slots=True)
class RealizationDifference:
    """The differences of one realization from the base, summed over batches.

    Args:
        name: of the realization.
        places: one per visible node, in the order of the graph.
        outputs: one per output of the model.
        skipped: the reason why it did not run; empty if it ran.
        agreement: the part of samples of which the first output has the class that it has in the base; None where it
            has no classes.
        accuracy: the part of right classes; None without labels that are classes.
    """

    name: str
    places: tuple[PlaceCheck, ...] = ()
    outputs: tuple[PlaceCheck, ...] = ()
    skipped: str = ""
    agreement: float | None = None
    accuracy: float | None = None

    @property
    def integers(self) -> tuple[PlaceCheck, ...]:
        """The places that hold integers."""
        return tuple(p for p in self.places if p.integer)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        compared, differing, largest = _total(self.integers)
        return {
            "name": self.name,
            "skipped": self.skipped,
            "compared": compared,
            "differing": differing,
            "largest_quanta": largest,
            "agreement": self.agreement,
            "accuracy": self.accuracy,
            "places": [p.to_json() for p in self.places],
            "outputs": [p.to_json() for p in self.outputs],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of realizations from one of them; prints as a table of realizations, then of differing nodes.

    Args:
        base: the realization that the others are compared with.
        samples: number of samples of the data.
        against: the differences of each other realization.
        notes: known differences of engines on this machine.
        accuracy: of the base; None without labels that are classes.
    """

    base: str
    samples: int
    against: tuple[RealizationDifference, ...]
    notes: tuple[str, ...] = ()
    accuracy: float | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        against = [a.to_json() for a in self.against]
        return {
            "base": self.base,
            "samples": self.samples,
            "accuracy": self.accuracy,
            "against": against,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        titles = ("realization", "integers compared", "equal", "largest", "outputs equal", "agreement", "accuracy")
        own = "" if self.accuracy is None else f", with an accuracy of {_share(self.accuracy)}"
        lines = [f"against {self.base}{own}, {counted(self.samples, 'sample')}"]
        rows = [_row(a) for a in self.against]
        # without labels there is no accuracy
        kept = len(titles) - (self.accuracy is None)
        lines += table(titles[:kept], [row[:kept] for row in rows], titles[1:])
        lines += [f"{a.name} skipped: {' '.join(a.skipped.split())}" for a in self.against if a.skipped]
        if any(_differing(a) for a in self.against):
            lines += [
                "",
                "A node reads what the same realization computed before, so a difference goes on into the nodes",
                "behind it: what counts is the first node that differs, and how many outputs and classes do.",
            ]
        for a in self.against:
            differ = _differing(a)
            if differ:
                lines += ["", f"where {a.name} differs:"]
                rows = [(p.place, p.op, str(p.compared), str(p.differing), f"{p.largest:.0f}") for p in differ]
                lines += table(
                    ("node", "op", "compared", "differing", "quanta"), rows, ("compared", "differing", "quanta")
                )
        return "\n".join([*lines, *self.notes])


def _total(places: Sequence[PlaceCheck]) -> tuple[int, int, float]:
    """The number of compared values, that of differing ones, and the largest difference."""
    compared, differing = sum(p.compared for p in places), sum(p.differing for p in places)
    return compared, differing, max((p.largest for p in places), default=0.0)


def _differing(difference: RealizationDifference) -> list[PlaceCheck]:
    """The nodes to list: those whose integers differ. Values of the float model are no integers, so all of them do."""
    return [] if difference.name == "float" else [p for p in difference.integers if p.differing]


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def _row(difference: RealizationDifference) -> tuple[str, ...]:
    if difference.skipped:
        return (difference.name, "skipped", "", "", "", "", "")
    compared, differing, _ = _total(difference.outputs)
    ends = (f"{compared - differing} of {compared}", _share(difference.agreement), _share(difference.accuracy))
    if not difference.integers:
        return (difference.name, "outputs only", "", "", *ends)
    compared, differing, largest = _total(difference.integers)
    return (difference.name, str(compared), str(compared - differing), f"{largest:.3g} quanta", *ends)


# ---------------------------------------------------------------- the comparison
def compare_realizations(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    realizations: str | Sequence[str] = tuple(REALIZATIONS),
    base: str = "reference",
) -> Comparison:
    """Run realizations of a strategy on the same data and compare their values.

    Args:
        realizations: names in REALIZATIONS. One that cannot run here (the engine is not installed, or ONNX cannot
            express the strategy) is skipped with the reason.
        base: the realization that the others are compared with.

    Raises:
        HagoError: a name is unknown, the data is bad, or the base cannot run.
    """
    realizations = as_strings(realizations, "realizations")
    for name in (*realizations, base):
        if name not in REALIZATIONS:
            known = ", ".join(REALIZATIONS)
            raise HagoError(f"unknown realization {name!r}; expected one of {known}.{did_you_mean(name, REALIZATIONS)}")
    plan, batches = plan_and_batches(model, hardware, strategy, dataset)
    return compare_plan(plan, batches, realizations, base)


def compare_plan(plan: Plan, batches: Batches, realizations: Sequence[str], base: str = "reference") -> Comparison:
    """Compare realizations of a resolved Plan; see `compare_realizations`."""
    names = [name for name in dict.fromkeys(realizations) if name != base]
    running: dict[str, Realize] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            running[name] = REALIZATIONS[name](plan)
        except HagoError as error:
            skipped[name] = str(error)
    run_base = REALIZATIONS[base](plan)
    places: dict[str, dict[str, PlaceCheck]] = {name: {} for name in running}
    outputs: dict[str, dict[str, PlaceCheck]] = {name: {} for name in running}
    agreeing, right = dict.fromkeys(running, 0.0), dict.fromkeys((base, *running), 0.0)
    shapes: list[Tensor] = []  # of the first output, batch by batch, without values
    for batch in batches:
        expected = run_base(batch.inputs)
        first, labels = expected[1][0], batch.labels
        shapes.append(torch.empty_like(first, device="meta"))
        fit = labels is not None and not why_labels_misfit(labels, first)
        right[base] += _summed("accuracy", first, first, labels) if fit else 0.0
        for name, run in running.items():
            got = run(batch.inputs)
            agreeing[name] += _summed("agreement", first, got[1][0]) if class_count(first) > 1 else 0.0
            right[name] += _summed("accuracy", first, got[1][0], labels) if fit else 0.0
            _compare(plan, expected, got, places[name], outputs[name])
    why_not = unfit_labels(batches, shapes)
    warn_of_labels(why_not, f"only agreement with {base}")
    labelled, classes, samples = batches.labelled and not why_not, class_count(shapes[0]), batches.samples
    by_name = {
        n: RealizationDifference(
            n,
            tuple(places[n].values()),
            tuple(outputs[n].values()),
            agreement=agreeing[n] / samples if classes > 1 else None,
            accuracy=right[n] / samples if labelled else None,
        )
        for n in running
    }
    by_name |= {n: RealizationDifference(n, skipped=why) for n, why in skipped.items()}
    notes = (f"onnxruntime: {SATURATES}",) if "onnxruntime" in (base, *running) and saturates_pairs() else ()
    accuracy = right[base] / samples if labelled else None
    return Comparison(base, samples, tuple(by_name[n] for n in names), notes, accuracy)


def _summed(measure: str, expected: Tensor, got: Tensor, labels: Tensor | None = None) -> float:
    """A measure of the first output, added up over the samples of a batch."""
    return float(OBJECTIVES[measure].per_sample([expected], [got], labels).sum())


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
        scale = 1.0 if node.name in plan.nodes else None
        count_differences(places, node.name, node.op, ours.numpy(), theirs.numpy(), scale)
    for name, ours, theirs in zip(plan.graph.outputs, expected[1], got[1], strict=True):
        node_plan = plan.nodes.get(name)
        real_units = None if node_plan is None else node_plan.out.scale.to(torch.float32).numpy()
        count_differences(outputs, name, plan.graph[name].op, ours.numpy(), theirs.numpy(), real_units)
