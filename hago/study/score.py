"""The score of a point: what a searcher is told, and what the log holds of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hago.serialization.summary import Summarized, Summary, figures_text, measure_name, names_text, number_values
from hago.serialization.text_table import bytes_text


@dataclass(frozen=True, slots=True, repr=False)
class Score(Summarized):
    """The result of evaluating one Plan: objective, costs, overflow counts. Made by the evaluator; `run_study` writes
    it to the log and tells it to the searcher.

    Args:
        value: the objective; larger is better. The study turns NaN into -inf.
        results: measurements for the log, JSON values only (e.g. {"sqnr": 31.2, "sim_acc": 0.91}).
        overflows: how many accumulators overflowed, by node; nodes without overflow are absent.
        excess_bits: by node, the bits that the accumulator lacked for the largest value seen (log2(peak / max), rounded
            up); positive entries only.
        unproved: how many integer nodes are not proved to be free of overflow.
        total_bits: the sum of bits over all groups; breaks ties, fewer is better.
        plan_key: equal for equal Plans.
        infeasible: why a node has no signature for these bits; empty where the point is feasible.
        forwards: the cost of the evaluation, in forward passes over the calibration data.
        thresholds_sha256: hash of the thresholds that were used; empty if not given.
        costs: costs of the Plan on its hardware, by metric; empty if not counted.
        shortfall: by how much limits are violated, each relative to the limit, summed.
        tie: breaks ties where values and proofs are equal; larger is better.
        dropped: for a point whose evaluation was stopped early in a race, as it was worse than the best point so far
            (the rival): {"samples", "of", "because", "rival"}. Its value is then an estimate below the rival's, its
            overflows are those of the evaluated samples, and it is never the best trial. Empty where all samples were
            evaluated.
        interval: the 95 % confidence interval of the objective over the samples; empty if not computed.
    """

    value: float
    results: Mapping[str, Any] = field(default_factory=dict)
    overflows: Mapping[str, int] = field(default_factory=dict)
    excess_bits: Mapping[str, int] = field(default_factory=dict)
    unproved: int = 0
    total_bits: int = 0
    plan_key: str = ""
    infeasible: str = ""
    forwards: float = 1.0
    thresholds_sha256: str = ""
    costs: Mapping[str, float] = field(default_factory=dict)
    shortfall: float = 0.0
    tie: float = 0.0
    dropped: Mapping[str, Any] = field(default_factory=dict)
    interval: tuple[float, ...] = ()

    def summary(self) -> Summary:
        """Objective, measures, overflow, limits and size."""
        seen = [f"{name} {times} times" for name, times in self.overflows.items()]
        unproved = f"none seen, not proved absent at {self.unproved} nodes" if self.unproved else "proved absent"
        interval = f" (95 % interval {self.interval[0]:.6g} to {self.interval[1]:.6g})" if self.interval else ""
        size = self.costs.get("weight_bytes")
        return Summary(
            f"Score {self.value:.6g}{self._unit}{interval}",
            {
                "measures": figures_text(self.results),
                "others": _others_text(self.results),
                "overflow": f"SEEN at {names_text(seen)}" if seen else unproved,
                "infeasible": self.infeasible,
                "limits": f"violated, by {self.shortfall:.3g} in all" if self.shortfall else "",
                "dropped": str(self.dropped.get("because", "in a race")) if self.dropped else "",
                "weights": "" if size is None else f"{bytes_text(size)} at their bits",
            },
        )

    @property
    def _unit(self) -> str:
        """The measure that the value is, in words; empty where that is not clear from the results."""
        same = [key for key, figure in number_values(self.results).items() if abs(figure) == abs(self.value)]
        if len(same) != 1:
            return ""
        negated = "-" if self.results[same[0]] != self.value else ""
        unit = " in dB" if same[0] == "sqnr" else ""
        return f": {negated}{measure_name(same[0])}{unit}"

    @property
    def runs(self) -> bool:
        """Whether the hardware can run the point: it is feasible, and no accumulator overflowed."""
        return not self.infeasible and not self.overflows

    @property
    def rank(self) -> tuple[Any, ...]:
        """The key by which scores are compared, larger is better: feasible first, then no overflow, then no limit
        violated, then the value, then proofs, then the tie, then fewer bits. Among points that overflow, fewer excess
        bits are better; among those that violate a limit, a smaller shortfall."""
        return (*self._fitness, self.value, -self.unproved, self.tie, -self.total_bits)

    @property
    def accepted(self) -> bool:
        """Whether the hardware can run the point, it keeps every limit, and it was evaluated on all samples."""
        return self.runs and not self.shortfall and not self.dropped

    def standing(self, floor: float) -> tuple[Any, ...]:
        """A key like `rank` in which all values of at least `floor` are equal, and are compared after proofs and bits.
        With the highest value as the floor, the order is that of `rank`."""
        within = self.value >= floor
        merit = 0.0 if within else self.value
        return (*self._fitness, within, merit, -self.unproved, self.tie, -self.total_bits, self.value)

    @property
    def _fitness(self) -> tuple[bool, bool, int, float]:
        excess = sum(self.excess_bits.values()) if self.overflows else 0
        return (not self.infeasible, not self.overflows, -excess, -self.shortfall)


def _others_text(results: Mapping[str, Any]) -> str:
    """The measures that `figures_text` does not name."""
    named = {"sim_acc", "agreement", "sqnr", "samples"}
    return ", ".join(f"{k} {v:.6g}" for k, v in number_values(results).items() if k not in named)
