"""The document of a report: all that its page shows, as frozen values that become one JSON object.

`hago.report.gather` makes a Report, `hago.report.page` makes the page of its JSON values and of nothing else, and
`hago report --json` prints the same values. docs/report.md describes every field.

Invariants: numbers are finite, and None where a figure is missing; what several points share (drawings of the network,
histograms, channels of weights) is stored once and referred to by its index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final, Literal

from hago.serialization.summary import Summarized, Summary
from hago.serialization.text_table import counted

REPORT_VERSION: Final = 1
#: Significant digits of figures, far more than any text shows: a figure that is rounded to few digits, and again to
#: fewer where it is shown, differs from the same figure in another text.
DIGITS: Final = 12

Runs = Literal["integer", "float", "input"]
EdgeKind = Literal["data", "weight", "bias", "constant", "output"]
PointKind = Literal["strategy", "front", "trial", "few bits"]


def rounded(value: float | None, digits: int = DIGITS) -> float | None:
    """A number with so many significant digits; None where it is missing or not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


# ---------------------------------------------------------------- what the report is of
@dataclass(frozen=True, slots=True)
class Identity:
    """The model or the hardware: its name in words, and its hash."""

    name: str
    hash: str


@dataclass(frozen=True, slots=True)
class DataSet:
    """Data that was measured on.

    Args:
        name: what it is, in words.
        samples: number of samples.
        hash: of all inputs and labels.
        labelled: whether it has labels that are classes.
    """

    name: str
    samples: int
    hash: str
    labelled: bool


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do with what the report shows.

    Args:
        what: what it does, in words.
        line: the command line, or the line of Python.
    """

    what: str
    line: str


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured, or what it costs: its name in results or costs, in words, and its unit.

    Args:
        unit: "dB", "share", "B", "s", "J", "bits", "cycles" or "" for a plain number.
    """

    name: str
    title: str
    unit: str


# ---------------------------------------------------------------- the log
@dataclass(frozen=True, slots=True)
class Trials:
    """The trials of a log, by column: entry i of every tuple is of trial i.

    Args:
        groups: the keys of the edge groups, in the order of `bits`.
        value: of the objective; None where it was not measured.
        low, high: the ends of the 95 % interval of the value.
        costs: by name; `stored_bytes`, of the constants as the chip stores them, of the trials that have a Plan.
        bits: the bits of every group, a digit of base 36 each; empty for trials left out of a long log.
        same_as: the earlier trial with the same Plan.
        why: the searcher's reasons, each once; `reason` has the index of that of a trial.
        seconds, elapsed: of the evaluation, and of the search until then.
        gain: by how much the trial raised the best value so far; None where it did not.
        rejected: why a trial cannot be taken as it is (overflow, the limits that it misses, no signature); empty for
            the others, and for the best.
        front: the trials that no other beats in both the objective and `front_cost`.
        best: the trial that the search gives, which with a tolerance may have a lower value than others; None where no
            trial can be taken.
        best_note: why the best is taken although it misses limits as it is.
    """

    groups: tuple[str, ...]
    value: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    costs: Mapping[str, tuple[float | None, ...]]
    bits: tuple[str, ...]
    same_as: tuple[int | None, ...]
    why: tuple[str, ...]
    reason: tuple[int, ...]
    seconds: tuple[float, ...]
    elapsed: tuple[float, ...]
    gain: tuple[float | None, ...]
    rejected: tuple[str, ...]
    front: tuple[int, ...]
    front_cost: str
    best: int | None
    best_note: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """What a searcher gained by trials that it asked for one reason.

    Args:
        why: the reason.
        trials, repeats: number of trials, and of those that repeat an earlier Plan.
        gain: by how much they raised the best value.
        front: how many of them are on the front in the end.
        seconds: that their evaluation took.
    """

    why: str
    trials: int
    repeats: int
    gain: float
    front: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PairedFigure:
    """A measure of two models on the same samples.

    Args:
        measure: name of the figure.
        first, second: which models, or which points.
        difference: the second less the first.
        low, high: the ends of its 95 % interval, paired by sample; None where a single sample leaves them open.
        better: the model that is surely better; empty where the interval holds 0.
    """

    measure: str
    first: str
    second: str
    difference: float | None
    low: float | None
    high: float | None
    better: str


@dataclass(frozen=True, slots=True)
class FewerBits:
    """The best trial with at most so many bits on average.

    Args:
        bits: the limit.
        trial: the trial, which has `mean` bits on average.
        value, low, high: of the objective.
        costs: of the trial.
        point: the point in full that is this trial; None where there is none.
        data: the data that `figures` and `to_float` were measured on; empty where nothing was.
        figures: of the simulated model.
        to_float: the accuracy, less that of the float model; None without labels.
        uncorrected: whether `figures` and `to_float` are of before layers were corrected, as `value` always is.
    """

    bits: int
    trial: int
    mean: float
    value: float | None
    low: float | None
    high: float | None
    costs: Mapping[str, float | None]
    point: int | None = None
    data: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    to_float: PairedFigure | None = None
    uncorrected: bool = False


@dataclass(frozen=True, slots=True)
class SearchStory:
    """The course of a search, read from its log.

    Args:
        settings: searcher, objective, seed and the like, as the header has them, in words.
        moves: by reason, in the order in which they began.
        time: seconds by what they were spent on.
        passes: what every pass of corrections gained, as a strategy records it.
        fewer: what fewer bits cost, from many bits to few.
        fewer_of: what the mean of bits is over: "weights", each counted, or "edges": the groups of edges whose bits the
            search varied, where weights that stay float leave the mean of all weights above 8.
        uncorrected: whether layers of the strategy were corrected after its trial, so that figures of trials are of
            before.
        running: whether the search was running when the report was made.
    """

    settings: Mapping[str, str]
    moves: tuple[Move, ...]
    time: Mapping[str, float]
    passes: tuple[Mapping[str, Any], ...]
    fewer: tuple[FewerBits, ...]
    fewer_of: Literal["weights", "edges"]
    uncorrected: bool = False
    running: bool = False


@dataclass(frozen=True, slots=True)
class AskedLimit:
    """A limit of a goal.

    Args:
        text: the limit as the user wrote it.
        figure, name: of the measure or the cost in results, and in limits; the figure is empty where the limit is on a
            measure of the user's own that is not at hand.
        least, most: the values that keep it; those of losses are negated.
        before: the least value that was asked of trials, before their layers are corrected.
        below_float: how far values may be below that of the float model on the same data; None for other limits.
        is_relative: whether the user gave it relative to another model.
        is_cost, is_loss: whether it is on a cost, or on a loss.
    """

    text: str
    figure: str
    name: str
    least: float | None = None
    most: float | None = None
    before: float | None = None
    below_float: float | None = None
    is_relative: bool = False
    is_cost: bool = False
    is_loss: bool = False


@dataclass(frozen=True, slots=True)
class AskedGoal:
    """What was asked of a search.

    Args:
        minimize: the cost that is minimized; empty where the objective is maximized.
        objective: its name.
        is_loss: whether it is a loss.
    """

    minimize: str
    objective: str
    limits: tuple[AskedLimit, ...]
    is_loss: bool = False


# ---------------------------------------------------------------- the network
@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A node of the drawn network; positions are of its centre, in pixels."""

    name: str
    op: str
    shape: tuple[int, ...]
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """An edge of the drawn network, which may stand for several slots that read the same value.

    Args:
        source, target: the nodes.
        slots: the slots of `target`.
        path: the corners of the line, in pixels.
    """

    source: str
    target: str
    slots: tuple[int, ...]
    path: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A network as it is drawn, in pixels; all nodes have one size."""

    width: float
    height: float
    node_width: int
    node_height: int
    nodes: tuple[DrawnNode, ...]
    edges: tuple[DrawnEdge, ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """The values of a node in the float model: counts of equally wide bins from `low` to `high`."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Channels:
    """The range of each output channel of a weight; where there are many, of so many neighbours together.

    Args:
        weight: name of the constant.
        channels: number of output channels.
        together: how many of them an entry of `low` and `high` stands for.
    """

    weight: str
    channels: int
    together: int
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EdgeDetail:
    """An edge that carries integers.

    Args:
        edge: its key, or `node:out` for a requantized output.
        source: the node whose value it carries.
        scale: real units per quantum, the largest of all channels.
        scales: number of scales.
        low, high: the real values that its integers reach, the outermost of all channels.
        converted: whether values are quantized on the edge; otherwise they pass as the producer emits them.
        clipped: share of the values that were cut off; None where nothing was measured, and where a relu cuts them.
        effect: mean square of the error that rounding and clipping on this edge add to the node; None likewise.
    """

    edge: str
    source: str
    kind: EdgeKind
    bits: int
    dtype: str
    scale: float | None
    scales: int
    low: float | None
    high: float | None
    converted: bool
    clipped: float | None = None
    effect: float | None = None


@dataclass(frozen=True, slots=True)
class NodeDetail:
    """A node of one point. Figures of errors are None where no data was given.

    Args:
        runs: in integers or in float; `input` for the network's inputs.
        reason: why it runs so.
        bits: the fewest bits of its operands, biases aside; None for float.
        signature: of the hardware file.
        verdict: on overflow: proved, possible, overflows (seen), or float.
        register, on_overflow: its accumulator, and what happens past its range.
        share: the largest accumulator that any input can cause, over the maximum of the register; None without one.
        seen: the largest accumulator on the data over that maximum; None where overflow is proved absent.
        overflows, accumulators: how many left the register on the data, and of how many.
        sqnr, own_sqnr: dB of its value over its error, and over the error that it added itself.
        blame: its part in the error of the outputs, estimated.
        cause: the main cause of the error that it added; `causes` has the share of each.
        words, helps: the cause and what may help, in words.
        compared, differing: values that the simulator and the integer model were compared on, and that differ.
        costs: of the node and its edges, by name.
        histogram, weights: indices in the report's tables.
    """

    name: str
    op: str
    runs: Runs
    reason: str
    bits: int | None
    signature: str
    verdict: str
    register: str | None
    on_overflow: str | None
    share: float | None
    edges: tuple[EdgeDetail, ...]
    costs: Mapping[str, float]
    seen: float | None = None
    overflows: int = 0
    accumulators: int = 0
    sqnr: float | None = None
    own_sqnr: float | None = None
    blame: float | None = None
    cause: str | None = None
    causes: Mapping[str, float] = field(default_factory=dict)
    words: str = ""
    helps: str = ""
    compared: int = 0
    differing: int = 0
    histogram: int | None = None
    weights: int | None = None


# ---------------------------------------------------------------- points
@dataclass(frozen=True, slots=True)
class Model:
    """The figures of one model on one data set: float, one shot, simulated or integer."""

    name: str
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The models side by side on one data set.

    Args:
        data: name of the data set.
        models: float, one shot where it was made again, simulated, and integer.
        differences: of the simulated model and the others.
        compared, differing: outputs of the integer model that were compared with the simulation, and that differ.
        overflows: by node, the accumulators that left their register.
    """

    data: str
    models: tuple[Model, ...]
    differences: tuple[PairedFigure, ...]
    compared: int
    differing: int
    overflows: Mapping[str, int]

    def model(self, name: str) -> Model:
        """One of the models, by its name."""
        return next(model for model in self.models if model.name == name)


@dataclass(frozen=True, slots=True)
class InShort:
    """A question of a reader and its answer.

    Args:
        alarm: whether it is one that a reader must not miss.
        leads: whether it stands before all else.
    """

    question: str
    answer: str
    alarm: bool = False
    leads: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """A strategy that is shown in full.

    Args:
        title: in words.
        kind: where it comes from; "few bits" is one shot with few bits, which the report made for comparison.
        trial: its trial in the log; None where there is none, or where it is not known.
        bits: by edge group.
        costs: all that the hardware file has figures for; `float_costs` those of the float model, `one_shot_costs`
            those of one shot, empty where it was not made again.
        stored_bytes: bytes of the constants as the chip stores them.
        ram_bytes: bytes of values that are alive at the same time, at most, for one sample.
        thresholds_sha256: of its thresholds.
        drawing: index in the report's drawings.
        nodes: in the order of the drawing.
        verdicts: one per data set.
        inside: values of all nodes that the simulator and the integer model were compared on, and how many differ.
        inside_samples: number of samples that the nodes were compared on.
        short: the answers to what readers ask first.
        remedies: changes that were tried, as `hago inspect` gives them; None where none were.
        corrected: what is changed in the network before it is quantized, in words.
        uncorrected: whether its layers were not corrected as those of the strategy were that the search gave.
        commands: how it is realized and replayed.
    """

    title: str
    kind: PointKind
    trial: int | None
    bits: Mapping[str, int]
    costs: Mapping[str, float]
    float_costs: Mapping[str, float]
    stored_bytes: float
    ram_bytes: float
    plan_key: str
    thresholds_sha256: str
    drawing: int
    nodes: tuple[NodeDetail, ...]
    one_shot_costs: Mapping[str, float] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    inside: tuple[int, int] = (0, 0)
    inside_samples: int = 0
    short: tuple[InShort, ...] = ()
    remedies: Mapping[str, Any] | None = None
    corrected: str = ""
    uncorrected: bool = False
    commands: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two points on the same data, with paired intervals; `first` and `second` are indices of points."""

    first: int
    second: int
    data: str
    figures: tuple[PairedFigure, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Report(Summarized):
    """All that a page shows. `hago.report.gather` makes it.

    Args:
        at: when it was made, UTC, ISO 8601.
        made_with: versions of the packages, and the machine.
        measure: what the points are judged by.
        costs: the costs that figures are given for, that of the front first.
        front_cost: the cost of the front.
        goal: what was asked of the search; None where nothing is limited or minimized.
        notes: what is missing, and why.
        shown: the point that is shown first; None where none is shown in full.
        sensitivities: by group and bits, the expected loss, from a table that was given.
    """

    title: str
    at: str
    model: Identity
    hardware: Identity
    made_with: Mapping[str, Any]
    commands: tuple[Command, ...]
    measure: Figure
    costs: tuple[Figure, ...]
    front_cost: str
    search: SearchStory | None
    trials: Trials | None
    goal: AskedGoal | None = None
    notes: tuple[str, ...] = ()
    data: tuple[DataSet, ...] = ()
    points: tuple[Point, ...] = ()
    shown: int | None = None
    pairs: tuple[Pair, ...] = ()
    drawings: tuple[Drawing, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    channels: tuple[Channels, ...] = ()
    sensitivities: Mapping[str, Mapping[str, float]] | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"version": REPORT_VERSION, **_values(self)}

    def summary(self) -> Summary:
        """What it is about, and the answers to what readers ask first."""
        answers = () if self.shown is None else self.points[self.shown].short
        trials = "" if self.trials is None else f", {counted(len(self.trials.value), 'trial')}"
        return Summary(
            f"Report {self.title!r}: {self.model.name} on {self.hardware.name}{trials}, "
            f"{counted(len(self.points), 'point')} in full",
            {each.question: each.answer for each in answers} or {"missing": "; ".join(self.notes[:1])},
        )


def _values(value: Any) -> Any:
    """JSON values of dataclasses, mappings and sequences; numbers that are not finite become None."""
    if is_dataclass(value):
        return {f.name: _values(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _values(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_values(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
