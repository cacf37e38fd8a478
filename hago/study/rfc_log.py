"""Logs of the RFC's prototype, which have no header and list bits by position.

They can be read and ranked, but not continued, since they do not name the model and hardware that they are of. Lines
were written from 2019 to 2021 in several forms: with `result` or `results`, which have some of accuracy, kl_distance,
kl_divergence, sim_acc, quant_acc and validation_acc, and with a strategy with or without topology.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hago.errors import LogError, did_you_mean
from hago.plan import Space
from hago.serialization.json_text import canonical, parse_json, read_file


@dataclass(frozen=True, slots=True)
class RfcTrial:
    """One line of a log of the RFC's prototype.

    Args:
        version: e.g. 0.1.
        model_hash: a structural hash, which may be negative.
        bits: one per quantized edge, in the order of the prototype's traversal.
        thresholds: one per node, in that order.
        topology: node_conds and edge_conds where the line has them.
        results: what was measured, by name.
    """

    version: float
    model_hash: int
    bits: tuple[int, ...]
    thresholds: tuple[float, ...]
    topology: Mapping[str, Any] | None
    results: Mapping[str, Any]

    def to_line(self) -> str:
        """The line, with keys sorted and without a line end."""
        strategy: dict[str, Any] = {
            "bits": self.bits,
            "model_hash": self.model_hash,
            "thresholds": self.thresholds,
        }
        if self.topology is not None:
            strategy["topology"] = self.topology
        return canonical({"result": self.results, "strategy": strategy, "version": self.version})

    def bits_by_group(self, space: Space) -> dict[str, int]:
        """The bits by group, for a space whose groups have the prototype's order.

        Raises:
            LogError: the space has another number of groups.
            InfeasibleBits: a group does not have that choice.
        """
        if len(self.bits) != len(space.groups):
            raise LogError(f"the line has {len(self.bits)} bits, the space {len(space.groups)} groups")
        bits = dict(zip(space.groups, self.bits, strict=True))
        space.check(bits)
        return bits


def parse_rfc_line(line: str, where: str = "line") -> RfcTrial:
    """Parse one line.

    Raises:
        LogError: the line is not one of the prototype's.
    """
    record = parse_json(line, where)
    try:
        strategy = record["strategy"]
        results = record["result"] if "result" in record else record["results"]
        trial = RfcTrial(
            version=float(record["version"]),
            model_hash=_integer(strategy["model_hash"]),
            bits=tuple(_integer(b) for b in strategy["bits"]),
            thresholds=tuple(float(t) for t in strategy["thresholds"]),
            topology=strategy.get("topology"),
            results=dict(results),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LogError(
            f"{where}: got no line of the RFC's prototype ({type(error).__name__}: {error}); expected "
            "version, strategy with bits, model_hash and thresholds, and result"
        ) from None
    return trial


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not an integer")
    return value


def read_rfc_log(path: str | Path) -> tuple[RfcTrial, ...]:
    """Read a log of the RFC's prototype.

    Raises:
        LogError: the file cannot be read, or a line, given by its number, is not one of the prototype's.
    """
    try:
        lines = read_file(path).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise LogError(f"cannot read log {path}: {error}") from None
    return tuple(parse_rfc_line(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1))


def best_rfc_trial(trials: Iterable[RfcTrial], measure: str = "accuracy") -> RfcTrial:
    """The trial with the highest result called `measure`, then the fewest bits, then the first.

    Raises:
        LogError: there is no trial, or one lacks that result.
    """
    all_trials = list(trials)
    for index, trial in enumerate(all_trials):
        if not isinstance(trial.results.get(measure), (int, float)):
            raise LogError(
                f"trial {index} has no number called {measure!r}; it has {', '.join(trial.results)}."
                + did_you_mean(measure, trial.results)
            )
    if not all_trials:
        raise LogError("a log without trials has no best one")
    return max(all_trials, key=lambda t: (t.results[measure], -sum(t.bits)))
