"""Comparison of two strategies of one model on the same data: measures with paired intervals, bits and costs.

The strategies may be for different hardware; each is resolved for its own. Measures are compared sample by sample, so
the interval of a difference is much narrower than those of the two values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.cost import METRICS, amount_text, plan_cost
from hago.errors import StrategyMismatch
from hago.graph import ModelLike
from hago.importing import HardwareLike, StrategyLike, as_strategy
from hago.plan import Plan, Strategy
from hago.search import Evaluator, Measurement, paired_difference, plan_and_batches, share_difference
from hago.search.objective import OBJECTIVES, Objective, ObjectiveLike, named_objective
from hago.serialization.text_table import counted, table

#: The names of the two strategies in tables.
NAMES: Final = ("A", "B")
#: The most groups with other bits that the text lists.
LISTED: Final = 40


@dataclass(frozen=True, slots=True)
class MeasureDifference:
    """A measure of both strategies.

    Args:
        name: of the objective.
        unit: of the objective; see `hago.search.objective.Objective`.
        values: of A and of B; of a loss, the loss itself.
        difference: B's less A's; positive if B is better, unless the measure is a loss.
        interval: the 95 % confidence interval of the difference, paired by sample; infinite for a single sample.
        is_loss: whether less is better.
    """

    name: str
    unit: str
    values: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    is_loss: bool

    @property
    def better(self) -> str:
        """The strategy that is surely better, "A" or "B"; empty if the interval holds 0."""
        low, high = self.interval
        if not (low > 0.0 or high < 0.0):
            return ""
        return NAMES[(low > 0.0) != self.is_loss]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        values = dict(zip(NAMES, self.values, strict=True))
        return {**values, "difference": self.difference, "interval": list(self.interval), "better": self.better or None}


@dataclass(frozen=True, slots=True)
class StrategyComparison:
    """Two strategies of one model, measured on the same data. `compare_strategies` makes it; prints as tables.

    Args:
        hardware: the names of the hardware of A and of B.
        samples: number of samples of the data.
        measures: the objective, and SQNR, agreement and, with labels, accuracy.
        bits: by group, the bits of A and of B where they differ; None where a strategy has no such group.
        groups: number of groups of either strategy.
        thresholds: number of groups with equal bits whose thresholds differ.
        costs: by cost, that of A and of B; None where the hardware gives no figure.
        overflows: of A and of B, how many accumulators left their register on the data.
        joined: of A and of B, the keys of `bits` that are quantized without a group of their own, with the bits of
            their sources; without a group and not joined, values are float.
    """

    hardware: tuple[str, str]
    samples: int
    measures: tuple[MeasureDifference, ...]
    bits: Mapping[str, tuple[int | None, int | None]]
    groups: int
    thresholds: int
    costs: Mapping[str, tuple[float | None, float | None]]
    overflows: tuple[int, int]
    joined: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "hardware": list(self.hardware),
            "samples": self.samples,
            "measures": {m.name: m.to_json() for m in self.measures},
            "bits": {group: list(both) for group, both in self.bits.items()},
            "groups": self.groups,
            "other_thresholds": self.thresholds,
            "costs": {name: list(both) for name, both in self.costs.items()},
            "overflows": list(self.overflows),
        }

    def __str__(self) -> str:
        titles = ("measure", *NAMES, "B - A", "95 % interval", "surely better")
        chips = " and ".join(dict.fromkeys(self.hardware))
        lines = [f"on {chips}, {counted(self.samples, 'sample')}, compared sample by sample"]
        lines += table(titles, [_measure_row(m) for m in self.measures], titles[1:4])
        costs = {name: both for name, both in self.costs.items() if both != (None, None)}
        right = (*NAMES, "B / A")
        lines += ["", *table(("cost", *right), [_cost_row(*item) for item in costs.items()], right)]
        return "\n".join([*lines, "", *self.bits_text(), *self.overflow_text()])

    def bits_text(self) -> list[str]:
        """The groups whose bits differ, and how many have other thresholds alone."""
        of = "them" if not self.bits else "the others"
        other = f"; thresholds differ in {self.thresholds} of {of}" if self.thresholds else ""
        if not self.bits:
            return [f"bits are equal in all {self.groups} groups of edges{other}"]
        items = self.bits.items()
        rows = [(key, *(_bits(b, key in j) for b, j in zip(both, self.joined, strict=True))) for key, both in items]
        more = [f"and {len(rows) - LISTED} more, which --json lists"] if len(rows) > LISTED else []
        head = f"bits differ in {len(rows)} of {self.groups} groups of edges{other}:"
        return [head, *table(("group", *NAMES), rows[:LISTED], NAMES), *more]

    def overflow_text(self) -> list[str]:
        """A line if accumulators overflowed on the data."""
        seen = [f"{count} times in {name}" for name, count in zip(NAMES, self.overflows, strict=True) if count]
        return [f"accumulators OVERFLOWED {' and '.join(seen)}"] if seen else []


def compare_strategies(
    model: ModelLike,
    hardware: Sequence[HardwareLike],
    strategies: Sequence[StrategyLike],
    dataset: Iterable[Any],
    objective: ObjectiveLike | None = None,
) -> StrategyComparison:
    """Measure two strategies of one model on the same data and compare them.

    Args:
        hardware: the hardware of each.
        strategies: A and B.
        objective: compared beside SQNR, agreement and accuracy; by default those of hago's own that the strategies were
            searched for.

    Raises:
        StrategyMismatch: a strategy is for another model or hardware, as after training with other weights.
        HagoError: the data is bad.
    """
    both = [as_strategy(strategy) for strategy in strategies]
    objectives = _objectives(both, objective)
    held = list(dataset) if isinstance(dataset, Iterator) else dataset
    measured: list[tuple[Plan, Measurement, int]] = []
    for name, chip, strategy in zip(NAMES, hardware, both, strict=True):
        try:
            plan, batches = plan_and_batches(model, chip, strategy, held)
        except StrategyMismatch as error:
            raise StrategyMismatch(f"strategy {name}: {error}") from None
        # labels that are no classes are warned of once
        evaluator = Evaluator(plan.graph, batches, objectives[0], plan.ops, also=objectives[1:], quiet=bool(measured))
        measured.append((plan, evaluator.measure(plan), batches.samples))
    (plan_a, first, samples), (plan_b, second, _) = measured
    named = {o.name: o for o in (*objectives, *OBJECTIVES.values())}
    measures = [
        measure_difference(named[name], a, second.contributions[name]) for name, a in first.contributions.items()
    ]
    bits = [strategy.bits for strategy in both]
    ordered = list(dict.fromkeys([*bits[0], *bits[1]]))
    differ = {g: (bits[0].get(g), bits[1].get(g)) for g in ordered if bits[0].get(g) != bits[1].get(g)}
    costs = [plan_cost(plan).figures for plan in (plan_a, plan_b)]
    return StrategyComparison(
        hardware=(plan_a.hardware.name, plan_b.hardware.name),
        samples=samples,
        measures=tuple(measures),
        bits=differ,
        groups=len(ordered),
        thresholds=sum(_other_thresholds(plan_a, plan_b, group) for group in ordered if group not in differ),
        costs={name: (costs[0].get(name), costs[1].get(name)) for name in METRICS},
        overflows=(sum(first.extremes.overflows.values()), sum(second.extremes.overflows.values())),
        joined=(_joined(both[0], differ), _joined(both[1], differ)),
    )


def _objectives(strategies: Sequence[Strategy], given: ObjectiveLike | None) -> list[Objective]:
    """The objectives to compare, SQNR last."""
    if given is not None:
        chosen = [named_objective(given)]
    else:
        names = [str(strategy.made_by.get("objective", "sqnr")) for strategy in strategies]
        chosen = [OBJECTIVES[name] for name in dict.fromkeys(names) if name in OBJECTIVES]
    return [*(o for o in chosen if o.name != "sqnr"), OBJECTIVES["sqnr"]]


def measure_difference(objective: Objective, first: Tensor, second: Tensor) -> MeasureDifference:
    """The difference of an objective, paired by sample; of accuracy and agreement by `share_difference`.

    Args:
        first, second: (samples, k), the contributions of the samples.
    """
    sign = -1.0 if objective.is_loss else 1.0

    def value(mean: Tensor) -> float:
        return sign * objective.finish(mean)

    values = (value(first.mean(0)), value(second.mean(0)))
    # a sample of several positions may be right in part
    if objective.counts_classes and all(bool(((x == 0) | (x == 1)).all()) for x in (first, second)):
        difference, low, high = share_difference(first.flatten(), second.flatten())
    else:
        difference, low, high = paired_difference(first, second, value)
    return MeasureDifference(objective.name, objective.unit, values, difference, (low, high), objective.is_loss)


def _other_thresholds(first: Plan, second: Plan, group: str) -> bool:
    if group not in first.thresholds or group not in second.thresholds:
        return (group in first.thresholds) != (group in second.thresholds)
    return not all(map(torch.equal, first.thresholds[group], second.thresholds[group]))


# ---------------------------------------------------------------- as text
def _measure_row(measure: MeasureDifference) -> tuple[str, ...]:
    title = "SQNR" if measure.name == "sqnr" else measure.name
    low, high = (_amount(end, measure.unit, sign=True) for end in measure.interval)
    low = low.partition(" ")[0]
    values = [_amount(value, measure.unit) for value in measure.values]
    difference = _amount(measure.difference, measure.unit, sign=True)
    return (title, *values, difference, f"{low} to {high}", measure.better or "neither")


def _amount(value: float, unit: str, sign: bool = False) -> str:
    """A value with its unit; differences have a sign, and those of shares are in points."""
    plus = "+" if sign else ""
    if unit == "share":
        return f"{100 * value:{plus}.2f} {'points' if sign else '%'}"
    return f"{value:{plus}.2f} dB" if unit == "dB" else f"{value:{plus}.4g}"


def _cost_row(name: str, both: tuple[float | None, float | None]) -> tuple[str, ...]:
    first, second = both
    texts = ["-" if value is None else amount_text(name, value) for value in both]
    ratio = "-" if first is None or second is None or not first else f"{second / first:.3f}"
    return (name, *texts, ratio)


def _bits(bits: int | None, is_joined: bool) -> str:
    if bits is not None:
        return str(bits)
    return "as its source" if is_joined else "float"


def _joined(strategy: Strategy, keys: Iterable[str]) -> frozenset[str]:
    """The keys without bits of their own whose values the topology quantizes."""
    topology = strategy.topology

    def is_quantized(key: str) -> bool:
        node, _, slot = key.rpartition(":")
        return topology.node_conds.get(node, False) if slot == "out" else topology.edge_conds.get(key, False)

    return frozenset(key for key in keys if key not in strategy.bits and is_quantized(key))
