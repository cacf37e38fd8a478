"""The answer that a command ends with: the float model, one-shot quantization and the strategy that was found, side by
side on the calibration data and on held-out data, and in words what stays float and where accumulators may overflow.

One-shot quantization is what `hago.quantize` gives. A search has the calibration to make it from; for a stored strategy
it is made again, if the data is that of the strategy's calibration. Every model runs on the same samples, so their
differences have paired intervals. Of a pass over the data, the outputs of the float model and a few numbers per sample
are kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from torch import Tensor

from hago.analysis.remedies import overflow_changes, with_given_options
from hago.analysis.strategy_report import StrategyReport, figure_cells, report_on
from hago.calibration import named_estimator
from hago.cost import Cost, amount_text, float_cost, plan_cost
from hago.data import Batches, JobProgress
from hago.errors import HagoError, InfeasibleBits
from hago.graph import Graph, ModelLike
from hago.hardware import Hardware
from hago.importing import HardwareLike, as_hardware
from hago.plan import Plan, Resolver, Strategy, Topology
from hago.search import (
    Evaluator,
    Measurement,
    OneShot,
    Prepared,
    QuantizationOptions,
    Quantizer,
    SearchOutcome,
    correct,
    import_with_held_out,
    is_one_shot,
    of_seconds,
    paired_difference,
    paired_interval,
    prepare,
    quantize_and_measure,
    quantize_in_one_shot,
    stored_resolver,
)
from hago.search.objective import OBJECTIVES, Objective, named_objective
from hago.serialization.summary import names_text
from hago.serialization.text_table import counted, table, wrapped, wrapped_words

Row = Literal["float", "one shot", "found"]

#: What the data is called that a strategy was made with.
CALIBRATION: Final = "calibration data"

#: The most options of a command that rules out overflow which was not seen.
MOST_OPTIONS: Final = 8

#: The most reasons for staying float that are listed.
LISTED: Final = 5


# ---------------------------------------------------------------- values
@dataclass(frozen=True, slots=True)
class PairedDifference:
    """By how much a strategy is better than another model on the same samples.

    Args:
        of: the strategy: the one that was found, or one-shot quantization where that is all there is.
        minus: the other model.
        measure: `accuracy` where the data has labels, else `agreement`.
        points: its mean difference and the ends of the 95 % interval, as shares of the samples.
        decibels: the same of the SQNR; None where the other model is the float model.
    """

    of: Row
    minus: Row
    measure: str
    points: tuple[float, float, float]
    decibels: tuple[float, float, float] | None

    def to_json(self) -> dict[str, Any]:
        """JSON values; the ends of intervals that a single sample leaves open are None."""
        document: dict[str, Any] = {
            "of": self.of,
            "minus": self.minus,
            "measure": self.measure,
            "points": _finite(self.points),
        }
        return document if self.decibels is None else {**document, "decibels": _finite(self.decibels)}

    def __str__(self) -> str:
        text = f"{self.of} minus {self.minus}: {self.measure} {_span(self.points, 100.0, 'points')}"
        return text if self.decibels is None else f"{text}; SQNR {_span(self.decibels, 1.0, 'dB')}"


@dataclass(frozen=True, slots=True)
class DataAnswer:
    """The models side by side on one data set.

    Args:
        data: which data it is, in words.
        samples: number of samples.
        figures: the measures of every model, as `Evaluator.summary` gives them.
        differences: of the last strategy and each model before it.
        overflows: by node, the number of accumulators of the last model that left their register.
    """

    data: str
    samples: int
    figures: Mapping[Row, Mapping[str, Any]]
    differences: tuple[PairedDifference, ...]
    overflows: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "data": self.data,
            "samples": self.samples,
            "models": {row: dict(figures) for row, figures in self.figures.items()},
            "differences": [d.to_json() for d in self.differences],
            "overflows": dict(self.overflows),
        }


@dataclass(frozen=True, slots=True)
class FloatNodes:
    """Nodes that stay float for one reason."""

    op: str
    reason: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        if len(self.names) == 1:
            return f"{self.names[0]} ({self.op}): {self.reason}"
        return f"{len(self.names)} x {self.op} ({names_text(self.names)}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found, made by `answer_for` and `answer_for_stored`; prints as tables and a few sentences.

    Args:
        weight_bytes: bytes of the constants of every model, packed to their bits.
        parts: one per data set.
        nodes: number of computed nodes.
        floats: the nodes that stay float, by reason.
        possible: the nodes whose accumulators are not proved to hold every input.
        remedy: how to rule the overflow out, in words; empty where there is none, or nothing helps.
        note: why the one-shot quantization is missing, or equals what was found; else empty.
        stored: the bytes of the last strategy's constants as the chip reads them, in words; empty where these are as
            many as packed to their bits.
        stored_bytes: the same bytes.
    """

    weight_bytes: Mapping[Row, float]
    parts: tuple[DataAnswer, ...]
    nodes: int
    floats: tuple[FloatNodes, ...]
    possible: tuple[str, ...]
    remedy: str = ""
    note: str = ""
    stored: str = ""
    stored_bytes: float | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "weight_bytes": dict(self.weight_bytes),
            "data": [part.to_json() for part in self.parts],
            "stays_float": [{"op": f.op, "reason": f.reason, "nodes": list(f.names)} for f in self.floats],
            "may_overflow": list(self.possible),
            "remedy": self.remedy,
            "note": self.note,
            "stored": self.stored,
            "stored_bytes": self.stored_bytes,
        }

    def __str__(self) -> str:
        return "\n".join([*self.table_lines(), "", *self.float_lines(), *self.overflow_lines()])

    def table_lines(self) -> list[str]:
        """The tables, and the differences of the last strategy."""
        lines: list[str] = []
        for part in self.parts:
            lines += [*([""] if lines else []), f"{part.data}, {counted(part.samples, 'sample')}", *self._table(part)]
            if part.differences:
                lines.append("  sample by sample, with 95 % intervals:")
                lines += [line for d in part.differences for line in wrapped(f"    {d}", " " * 6)]
        return [*lines, *([self.stored] if self.stored else []), *([self.note] if self.note else [])]

    def _table(self, part: DataAnswer) -> list[str]:
        own = {n: None for figures in part.figures.values() for n, v in figures.items() if _is_own(n, v)}
        rows = []
        for row, figures in part.figures.items():
            size = amount_text("weight_bytes", self.weight_bytes[row])
            others = (f"{figures[name]:.6g}" for name in own)
            rows.append((f"  {row}", *figure_cells(figures), *others, size))
        titles = ("  model", "accuracy", "95 % interval", "agreement", "SQNR dB", *own, "weights")
        if all(row[1] == "-" for row in rows):  # without labels
            titles, rows = (titles[0], *titles[3:]), [(row[0], *row[3:]) for row in rows]
        return table(titles, rows, right=("accuracy", "agreement", "SQNR dB", *own, "weights"))

    def float_lines(self) -> list[str]:
        """What stays float, and why."""
        count = sum(len(f.names) for f in self.floats)
        if not count:
            return ["no node stays float"]
        lines = [f"{count} of {self.nodes} nodes stay{'s' if count == 1 else ''} float:"]
        for nodes in self.floats[:LISTED]:
            lines += wrapped(f"  {nodes}", indent=" " * 6)
        more = sum(len(f.names) for f in self.floats[LISTED:])
        return [*lines, *([f"  and {more} more, see hago explain"] if more else [])]

    def overflow_lines(self) -> list[str]:
        """Where accumulators may overflow, or did, and what to do about it."""
        integers = self.nodes - sum(len(f.names) for f in self.floats)
        seen = {part.data: part.overflows for part in self.parts if part.overflows}
        lines = [
            f"OVERFLOWS on the {data}: " + names_text([f"{node} {n} times" for node, n in overflows.items()])
            for data, overflows in seen.items()
        ]
        if not self.possible:
            return [f"no accumulator can overflow: proved at all {integers} integer nodes"] if integers else lines
        silent = "" if seen else f", though none did on {_samples(self.parts)}"
        lines.append(
            f"{len(self.possible)} of {integers} integer nodes may overflow on other inputs{silent}: "
            f"{names_text(self.possible)}"
        )
        return [line for text in lines for line in wrapped(text)] + (wrapped_words(self.remedy) if self.remedy else [])


def _by_count(parts: Sequence[DataAnswer]) -> list[str]:
    """The nodes that overflowed on any data, the most frequent first."""
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part.overflows)
    return [name for name, count in counts.most_common() if count]


def _samples(parts: Sequence[DataAnswer]) -> str:
    return f"these {sum(part.samples for part in parts)} samples"


def _is_own(name: str, value: Any) -> bool:
    """Whether a figure is of an objective that has no column of its own."""
    return name not in ("samples", "sqnr", "agreement", "sim_acc") and not isinstance(value, list)


def _finite(span: tuple[float, float, float]) -> list[float | None]:
    return [x if math.isfinite(x) else None for x in span]


def _span(span: tuple[float, float, float], factor: float, unit: str) -> str:
    mean, low, high = (factor * x for x in span)
    if low == mean == high:
        return "is the same on every sample" if mean == 0.0 else f"{mean:+.2f} {unit} on every sample"
    if math.isinf(low):
        return f"{mean:+.2f} {unit} on a single sample"
    return f"{mean:+.2f} {unit} ({low:+.2f} to {high:+.2f}{', which may be chance' if low <= 0.0 <= high else ''})"


# ---------------------------------------------------------------- measuring
@dataclass(frozen=True, slots=True)
class Known:
    """What was measured on a data set before.

    Args:
        evaluator: of the data set, with the objective that is to be shown.
        measured: by the key of the Plan.
    """

    evaluator: Evaluator
    measured: Mapping[str, Measurement] = field(default_factory=dict)


def answer_for(
    resolver: Resolver,
    strategy: Strategy,
    one_shot: Plan | str,
    data: Mapping[str, Batches],
    steps: JobProgress,
    objective: Objective | None = None,
    known: Mapping[str, Known] | None = None,
) -> Answer:
    """Measure the models on every data set.

    Args:
        resolver: of the strategy, as `stored_resolver` makes it.
        one_shot: its Plan; or why there is none, in words.
        data: the data sets by what they are, in words.
        steps: shows the progress.
        objective: a further measure to show.
        known: by data set, what a caller has measured already.
    """
    plan, plans, note = resolver(strategy.bits), dict[Row, Plan](), ""
    if is_one_shot(strategy):
        plans["one shot"] = plan
    elif isinstance(one_shot, str):
        plans["found"], note = plan, one_shot
    else:
        plans["one shot"] = one_shot
        if one_shot.key == plan.key:
            note = "what was found is what one shot gives"
        else:
            plans["found"] = plan
    weights: dict[Row, float] = {"float": float_cost(plan).figures["weight_bytes"]}
    costs = {row: plan_cost(p) for row, p in plans.items()}
    weights |= {row: cost.figures["weight_bytes"] for row, cost in costs.items()}
    last = costs[list(plans)[-1]]
    parts = tuple(
        _answer_on(name, batches, plans, objective or named_objective("sqnr"), (known or {}).get(name), steps)
        for name, batches in data.items()
    )
    possible = tuple(name for name, verdict in plan.verdicts.items() if verdict != "proved")
    graph = plan.graph
    return Answer(
        weights,
        parts,
        nodes=len(graph.computed),
        floats=_float_nodes(graph, resolver.topology, plan),
        possible=possible,
        remedy=_overflow_remedy(resolver, strategy, _by_count(parts), possible) if possible else "",
        note=note,
        stored=_stored_text(last),
        stored_bytes=last.stored_bytes,
    )


def _stored_text(cost: Cost) -> str:
    """What constants take on the chip, in words; empty where it is what they take packed to their bits."""
    if cost.stored_bytes == cost["weight_bytes"]:
        return ""
    widths = " or ".join(map(str, cost.padded_widths))
    size = amount_text("weight_bytes", cost.stored_bytes)
    return f"weights as stored on {cost.hardware}: {size}, since those of fewer bits are stored in {widths}"


def _answer_on(
    name: str,
    batches: Batches,
    plans: Mapping[Row, Plan],
    objective: Objective,
    known: Known | None,
    steps: JobProgress,
) -> DataAnswer:
    last = list(plans)[-1]
    steps(f"measuring on the {name}")
    if known is None:
        plan = plans[last]
        known = Known(Evaluator(plan.graph, batches.observed(steps.on_batch), objective, plan.ops, cache_bytes=0))
    evaluator = known.evaluator
    measured = {row: known.measured.get(plan.key) or evaluator.measure(plan) for row, plan in plans.items()}
    contributions: dict[Row, Mapping[str, Tensor]] = {"float": evaluator.float_contributions()}
    contributions |= {row: m.contributions for row, m in measured.items()}
    differences = tuple(_differences(contributions, last))
    figures = {row: evaluator.summary(c) for row, c in contributions.items()}
    return DataAnswer(name, batches.samples, figures, differences, measured[last].extremes.overflows)


def _differences(contributions: dict[Row, Mapping[str, Tensor]], of: Row) -> Iterable[PairedDifference]:
    found = contributions[of]
    measure = "accuracy" if "accuracy" in found else "agreement"
    for row, other in reversed(contributions.items()):
        if row == of:
            continue
        points = paired_interval(found[measure].mean(1) - other[measure].mean(1))
        decibels = (
            None if row == "float" else paired_difference(other["sqnr"], found["sqnr"], OBJECTIVES["sqnr"].finish)
        )
        yield PairedDifference(of, row, measure, points, decibels)


def _float_nodes(graph: Graph, topology: Topology, plan: Plan) -> tuple[FloatNodes, ...]:
    names: dict[tuple[str, str], list[str]] = {}
    for node in graph.computed:
        if node.name not in plan.nodes:
            op = str(node.attrs["target"]) if node.op == "opaque" else node.op
            names.setdefault((op, topology.reasons[node.name]), []).append(node.name)
    groups = [FloatNodes(op, reason, tuple(each)) for (op, reason), each in names.items()]
    return tuple(sorted(groups, key=lambda g: -len(g.names)))


# ---------------------------------------------------------------- overflow
def _overflow_remedy(
    resolver: Resolver, strategy: Strategy, overflowing: Sequence[str], possible: Sequence[str]
) -> str:
    """How to rule the overflow out, in one command, with the options of which the strategy was made: at all nodes that
    overflowed or may; where that takes many options, at those that overflowed, or at the first. Empty where the
    hardware allows nothing."""
    others = [name for name in possible if name not in overflowing]
    changes = overflow_changes(resolver, strategy, [*overflowing, *others])
    if changes and len(changes[0][1].options) > MOST_OPTIONS:
        changes = overflow_changes(resolver, strategy, overflowing or possible[:1])
    if not changes:
        return ""
    nodes = names_text(changes[0][0])
    words = ", or with ".join(str(with_given_options(change, strategy, resolver)) for _, change in changes)
    return f"to rule that out at {nodes}, quantize or search again with {words}"


# ---------------------------------------------------------------- stored strategies
def one_shot_options(strategy: Strategy) -> QuantizationOptions:
    """The options with which `hago.quantize` gives the one shot that a strategy is compared with: the patterns of the
    strategy, and the estimator that its user chose. Only where the user chose none are thresholds refined, whose record
    names the estimator that refinement began with; one shot then has the default of the hardware.

    Raises:
        HagoError: no estimator of hago has the name.
        KeyError: the strategy names none.
    """
    made_by = strategy.made_by
    return QuantizationOptions(
        None if made_by.get("refined") else named_estimator(str(made_by["estimator"])),
        keep_float=[str(pattern) for pattern in made_by.get("keep_float", ())],
        fix_bits={str(k): int(v) for k, v in made_by.get("fix_bits", {}).items()},
    )


def one_shot_again(
    graph: Graph,
    hardware: Hardware,
    strategy: Strategy,
    batches: Batches,
    steps: JobProgress,
    most_bits: int | None = None,
) -> Quantizer | str:
    """One-shot quantization with the options of a strategy; or why there is none.

    Args:
        batches: the data that the strategy was calibrated on.
        steps: shows the progress.
        most_bits: that edges have; by default as many as the hardware takes.
    """
    made_by = strategy.made_by
    if made_by.get("data_hash") != batches.sha256:
        return (
            "one shot is not shown, since it needs the calibration data: give that as --data, and other data as "
            "--held-out"
        )
    if "estimated" in made_by:
        return "one shot is not shown, since the thresholds were given by a table"
    if made_by.get("topology") == "searched" and made_by.get("keep_float"):
        return "one shot is not shown, since the search chose which nodes are float"
    try:
        prepared = prepare(graph, hardware, batches, one_shot_options(strategy), steps=steps)
        names = of_seconds([str(name) for name in made_by.get("corrections", ())])
        prepared = correct(prepared, names, strategy.corrections)
        return quantize_in_one_shot(prepared if most_bits is None else prepared.with_most_bits(most_bits))
    except (HagoError, KeyError) as error:
        return f"one shot is not shown, since it cannot be made again: {error}"


def one_shot_plan(
    graph: Graph, hardware: Hardware, strategy: Strategy, batches: Batches, steps: JobProgress
) -> Plan | str:
    """The Plan of `one_shot_again`; or why there is none."""
    made = one_shot_again(graph, hardware, strategy, batches, steps)
    return made if isinstance(made, str) else made.plan


def one_shot_of_search(outcome: SearchOutcome, steps: JobProgress) -> OneShot | str:
    """One-shot quantization with the calibration of a search; or why there is none.

    Args:
        steps: shows the progress.
    """
    steps("quantizing in one shot")
    try:
        return quantize_and_measure(
            replace(
                outcome.prepared,
                batches=outcome.prepared.batches.observed(steps.on_batch),
                correction_names=of_seconds(outcome.prepared.correction_names),
            )
        )
    except InfeasibleBits as error:
        return f"one shot finds no strategy: {error}"


def answer_for_search(
    outcome: SearchOutcome,
    steps: JobProgress,
    objective: Objective | None = None,
    one_shot: OneShot | str | None = None,
) -> Answer:
    """Measure what a search found, and the models that it is compared with, on its own data, also on samples that it
    did not look at.

    Args:
        steps: shows the progress.
        objective: of the search.
        one_shot: of `one_shot_of_search`, which is called where it is None.
    """
    made = one_shot_of_search(outcome, steps) if one_shot is None else one_shot
    prepared = outcome.prepared
    resolver, batches = stored_resolver(prepared.graph, prepared.hardware, outcome.strategy), prepared.batches.whole
    known: dict[str, Known] = {}
    if not isinstance(made, str):
        is_of_objective = objective is None or objective.name == made.evaluator.objective.name
        if is_of_objective and batches is prepared.batches:  # one shot was measured on all samples
            known[CALIBRATION] = _known(made)
    plan = made if isinstance(made, str) else made.quantizer.plan
    data = data_sets(batches.observed(steps.on_batch), outcome.held_out)
    return answer_for(resolver, outcome.strategy, plan, data, steps, objective, known)


def answer_for_one_shot(made: OneShot, prepared: Prepared, held_out: Batches | None, steps: JobProgress) -> Answer:
    """The measures of one-shot quantization on its calibration data, and on held-out data."""
    strategy = made.quantizer.strategy
    resolver, data = stored_resolver(prepared.graph, prepared.hardware, strategy), data_sets(prepared.batches, held_out)
    return answer_for(resolver, strategy, "", data, steps, known={CALIBRATION: _known(made)})


def _known(made: OneShot) -> Known:
    return Known(made.evaluator, {made.quantizer.plan.key: made.measured})


def data_sets(calibration: Batches, held_out: Batches | None) -> dict[str, Batches]:
    """The data sets by what they are, in words."""
    return {CALIBRATION: calibration, **({} if held_out is None else {"held-out data": held_out})}


@dataclass(frozen=True, slots=True)
class LoadedStrategy:
    """A stored strategy with its model and the data to measure it on; made by `load_stored`.

    Args:
        batches: calibration data or other data.
        held_out: further data.
    """

    strategy: Strategy
    resolver: Resolver
    batches: Batches
    held_out: Batches | None

    @property
    def plan(self) -> Plan:
        return self.resolver(self.strategy.bits)


def load_stored(
    model: ModelLike,
    hardware: HardwareLike,
    strategy: Strategy,
    dataset: Iterable[Any],
    held_out: Iterable[Any] | None,
    steps: JobProgress,
) -> LoadedStrategy:
    """A stored strategy with its model and the data to measure it on.

    Args:
        steps: shows the progress, also that of later passes over the data.

    Raises:
        HagoError: the strategy is for another model or hardware, or the data does not fit the model.
    """
    chip = as_hardware(hardware)
    graph, batches, further = import_with_held_out(
        model, chip, dataset, held_out, made_for=[strategy.model_hash], steps=steps
    )
    return LoadedStrategy(strategy, stored_resolver(graph, chip, strategy), batches, further)


def answer_for_stored(
    loaded: LoadedStrategy, steps: JobProgress, *, integer: bool = False
) -> tuple[StrategyReport, Answer]:
    """Measure a stored strategy, and the models that it is compared with.

    Args:
        steps: shows the progress.
        integer: run the integer model on the batches, too, and compare it with the simulator.

    Returns:
        The report on the batches, and the answer on these and on the held-out data.
    """
    strategy, resolver, batches, plan = loaded.strategy, loaded.resolver, loaded.batches, loaded.plan
    steps(f"running the float model, the simulation{' and the integer model' if integer else ''}")
    # the simulator itself, not the integer engine that replaces it in searches
    evaluator = Evaluator(plan.graph, batches, named_objective("sqnr"), plan.ops, engine="float")
    report, measured = report_on(evaluator, plan, integer=integer)
    data = data_sets(batches, loaded.held_out)
    one_shot: Plan | str = ""
    if not is_one_shot(strategy):
        steps("quantizing in one shot")
        one_shot = one_shot_plan(resolver.graph, resolver.hardware, strategy, batches, steps)
    if strategy.made_by.get("data_hash") != batches.sha256:
        data = {"data": batches, **{name: each for name, each in data.items() if each is not batches}}
    known = {next(iter(data)): Known(evaluator, {plan.key: measured})}
    return report, answer_for(resolver, strategy, one_shot, data, steps, known=known)
