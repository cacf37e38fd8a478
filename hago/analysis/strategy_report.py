"""Report on a strategy: the float, the simulated and the integer model measured side by side on data.

The outputs of the integer model are compared with the simulation bit for bit on every sample. Inner nodes and edges are
compared on the first few samples only, because that keeps all values of a batch in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor

from hago.arithmetic.equality import count_differing
from hago.data import Batches
from hago.graph import ModelLike, flatten_inputs
from hago.importing import HardwareLike, StrategyLike
from hago.plan import Plan, WeightSizes
from hago.runtime import IntegerModel, compare_plan_exactly
from hago.search import Evaluator, Measurement, plan_and_batches
from hago.search.objective import named_objective
from hago.serialization.summary import measure_text
from hago.serialization.text_table import counted, table
from hago.simulation import Simulator

Model = Literal["float", "simulated", "integer"]

#: Number of samples on which all nodes and edges are compared.
INSIDE_SAMPLES: Final = 32


@dataclass(frozen=True, slots=True)
class StrategyReport:
    """The measures of one strategy on data, made by `report_plan`; prints as a table.

    Args:
        hardware: name of the hardware.
        samples: number of samples of the data.
        figures: the measures of each model: sqnr, agreement, and with labels sim_acc with its interval.
        verdicts: by integer node, whether overflow is proved absent or possible.
        overflows: by node, the number of accumulators that left their register on the data.
        weights: bytes of constants.
        compared: number of values that were compared between the simulator and the integer model; 0 if the integer
            model was not run.
        differences: number of them that differ, by place; None if the integer model was not run.
    """

    hardware: str
    samples: int
    figures: Mapping[Model, Mapping[str, Any]]
    verdicts: Mapping[str, str]
    overflows: Mapping[str, int]
    weights: WeightSizes
    compared: int = 0
    differences: Mapping[str, int] | None = None

    @property
    def same(self) -> bool:
        """Whether no compared value of the integer model differs from the simulator."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        document: dict[str, Any] = {
            "hardware": self.hardware,
            "samples": self.samples,
            "models": {m: dict(f) for m, f in self.figures.items()},
            "overflow": {
                "proved": sum(v == "proved" for v in self.verdicts.values()),
                "possible": [n for n, v in self.verdicts.items() if v != "proved"],
                "seen": dict(self.overflows),
            },
            "weight_bytes": self.weights.to_json(),
        }
        if self.differences is not None:
            document |= {"compared": self.compared, "same": self.same, "differences": dict(self.differences)}
        return document

    def __str__(self) -> str:
        rows = [(model, *figure_cells(f)) for model, f in self.figures.items()]
        titles = ("model", "accuracy", "95 % interval", "agreement", "SQNR dB")
        lines = [
            f"on {self.hardware}, {counted(self.samples, 'sample')}",
            *table(titles, rows, right=("accuracy", "SQNR dB")),
        ]
        return "\n".join([*lines, self.overflow_text(), str(self.weights), *self.exactness_text()])

    def overflow_text(self) -> str:
        """A line on the nodes at which overflow is proved absent, possible, or was observed."""
        possible = [n for n, v in self.verdicts.items() if v != "proved"]
        text = f"overflow: proved absent at {len(self.verdicts) - len(possible)} of {len(self.verdicts)} integer nodes"
        if self.overflows:
            places = ", ".join(f"{n} {c} times" for n, c in self.overflows.items())
            return f"{text}; SEEN at {places}"
        return f"{text}; none seen at the others" if possible else text

    def exactness_text(self) -> list[str]:
        """A line on whether the integer model equals the simulator; none if it was not run."""
        if self.differences is None:
            return []
        if self.same:
            return [f"simulated == integer: all {counted(self.compared, 'value')} compared are equal"]
        places = "; ".join(f"{place}: {n}" for place, n in list(self.differences.items())[:5])
        of_all = f"{sum(self.differences.values())} of {counted(self.compared, 'value')}"
        return [f"simulated != integer: {of_all} differ ({places})"]


def figure_cells(figures: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Accuracy, its interval, agreement and SQNR as text; `-` for accuracy that was not measured."""
    low, high = figures.get("sim_acc_interval", (None, None))
    accuracy = figures.get("sim_acc")
    return (
        "-" if accuracy is None else f"{100 * accuracy:.2f} %",
        "-" if low is None else f"{100 * low:.2f} to {100 * high:.2f} %",
        f"{100 * figures['agreement']:.2f} %",
        measure_text("sqnr", figures["sqnr"]).removesuffix(" dB"),
    )


def figures_in_words(figures: Mapping[str, Any]) -> str:
    """A phrase with accuracy (if it was measured), agreement, SQNR and the number of samples."""
    accuracy, interval, agreement, sqnr = figure_cells(figures)
    right = f"accuracy {accuracy} ({interval} with 95 % confidence), " if "sim_acc" in figures else ""
    unit = "" if sqnr == "exact" else " dB"
    return f"{right}agreement {agreement}, SQNR {sqnr}{unit}, {figures['samples']} samples"


def report_strategy(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: StrategyLike,
    dataset: Iterable[Any],
    *,
    integer: bool = True,
) -> StrategyReport:
    """Measure a strategy on data.

    Args:
        integer: run the integer model too and compare it with the simulator.

    Raises:
        HagoError: the strategy is for another model or hardware, or the data does not fit the model.
    """
    return report_plan(*plan_and_batches(model, hardware, strategy, dataset), integer=integer)


def report_plan(plan: Plan, batches: Batches, *, integer: bool) -> StrategyReport:
    """Measure a Plan on data; see `report_strategy`."""
    # the simulator itself, not the integer engine that replaces it in searches
    evaluator = Evaluator(plan.graph, batches, named_objective("sqnr"), plan.ops, engine="float")
    return report_on(evaluator, plan, integer=integer)[0]


def report_on(evaluator: Evaluator, plan: Plan, *, integer: bool) -> tuple[StrategyReport, Measurement]:
    """The report of a Plan on the data of an Evaluator, and what was measured of it; see `report_strategy`."""
    graph, batches = plan.graph, evaluator.batches
    measured = evaluator.measure(plan)
    figures: dict[Model, Mapping[str, Any]] = {
        "float": evaluator.summary(evaluator.float_contributions()),
        "simulated": evaluator.summary(measured.contributions),
    }
    compared, differences = 0, None
    if integer:
        first = flatten_inputs(graph, batches.example, {})
        inside = compare_plan_exactly(plan, [x[:INSIDE_SAMPLES] for x in first])
        pair = ModelPair(IntegerModel(plan))
        figures["integer"] = evaluator.summary(evaluator.contributions(pair.run(b.inputs) for b in batches))
        compared, differences = inside.compared + pair.compared, {**inside.differences, **pair.differences}
    report = StrategyReport(
        plan.hardware.name,
        batches.samples,
        figures,
        plan.verdicts,
        measured.extremes.overflows,
        plan.weight_sizes,
        compared,
        differences,
    )
    return report, measured


class ModelPair:
    """An integer model and the simulator of its Plan, which run the same batches and whose outputs are compared.

    `report_plan` and `run_model` make it and call `run` once per batch.

    Attributes:
        compared: number of output values compared so far.
        differences: number of differing values, by place.
    """

    def __init__(self, model: IntegerModel) -> None:
        self.model, self.simulator = model, Simulator(model.plan)
        self.compared = 0
        self.differences: dict[str, int] = {}
        self._batches = 0

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of the integer model for one batch, which are compared with those of the simulator."""
        outputs = self.model.run(inputs)
        for slot, (simulated, integer) in enumerate(zip(self.simulator.run(inputs), outputs, strict=True)):
            self.compared += integer.numel()
            if wrong := count_differing(simulated, integer):
                self.differences[f"output {slot} of batch {self._batches}"] = wrong
        self._batches += 1
        return outputs
