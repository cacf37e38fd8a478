"""Trial: one scored point of a search, which is one line of its log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hago.json_text import json_values
from hago.search.searcher import Score

VERSION: Final = 1

#: Fields of Score that stand under "score" as they are.
_PLAIN: Final = ("unproved", "total_bits", "plan_key", "infeasible", "forwards")
#: The same, left out where they say nothing.
_OPTIONAL: Final = ("costs", "shortfall", "tie", "dropped", "interval")


@dataclass(frozen=True, slots=True)
class Trial:
    """A point and its score.

    Args:
        index: from 0, in the order asked.
        bits: of every group.
        score: what its evaluation said, or that of the trial it repeats.
        same_as: the earlier trial that had the same Plan; None where this one was evaluated.
        why: the searcher's reason to ask.
        at: when it was logged, UTC, ISO 8601.
        seconds: that its evaluation took; 0 for a repeat.
        elapsed: seconds that the search had taken by then, all its sessions together, what came before trials included.
    """

    index: int
    bits: Mapping[str, int]
    score: Score
    same_as: int | None = None
    why: str = ""
    at: str = ""
    seconds: float = 0.0
    elapsed: float = 0.0

    @property
    def results(self) -> Mapping[str, Any]:
        """What the objective measured."""
        return self.score.results

    @property
    def thresholds_sha256(self) -> str:
        """Of the thresholds that were used."""
        return self.score.thresholds_sha256

    def to_json(self, model_hash: str) -> dict[str, Any]:
        """The JSON values of its line.

        Raises:
            LogError: a result that is no JSON value.
        """
        score = self.score
        where = f"trial {self.index}: $.score"
        return {
            "version": VERSION,
            "index": self.index,
            "strategy": {
                "model_hash": model_hash,
                "bits": {k: int(b) for k, b in self.bits.items()},
                "thresholds_sha256": score.thresholds_sha256,
            },
            "score": {
                "value": json_values(score.value, where),
                "overflows": json_values(score.overflows, where),
                "excess_bits": json_values(score.excess_bits, where),
                **{name: json_values(getattr(score, name), where) for name in _PLAIN},
                **{name: json_values(value, where) for name in _OPTIONAL if (value := getattr(score, name))},
            },
            "results": json_values(score.results, f"trial {self.index}: $.results"),
            "same_as": self.same_as,
            "why": self.why,
            "time": {"at": self.at, "seconds": self.seconds, "elapsed": self.elapsed},
        }

    @staticmethod
    def from_json(record: Any) -> Trial:
        """The trial of JSON values that obey the trial schema."""
        score, time = record["score"], record["time"]
        return Trial(
            index=int(record["index"]),
            bits={k: int(b) for k, b in record["strategy"]["bits"].items()},
            score=Score(
                value=float(score["value"]),
                results=record["results"],
                overflows={k: int(n) for k, n in score["overflows"].items()},
                excess_bits={k: int(n) for k, n in score["excess_bits"].items()},
                unproved=int(score["unproved"]),
                total_bits=int(score["total_bits"]),
                plan_key=score["plan_key"],
                infeasible=score["infeasible"],
                forwards=float(score["forwards"]),
                thresholds_sha256=record["strategy"]["thresholds_sha256"],
                costs={k: float(v) for k, v in score.get("costs", {}).items()},
                shortfall=float(score.get("shortfall", 0.0)),
                tie=float(score.get("tie", 0.0)),
                dropped=score.get("dropped", {}),
                interval=tuple(map(float, score.get("interval", ()))),
            ),
            same_as=None if record["same_as"] is None else int(record["same_as"]),
            why=record["why"],
            at=time["at"],
            seconds=float(time["seconds"]),
            elapsed=float(time["elapsed"]),
        )


def best_trial(trials: Iterable[Trial], tolerance: float = 0.0, allow_overflow: bool = False) -> Trial | None:
    """The best of `trials`: highest rank, the first of equals.

    Args:
        tolerance: values that lie within it of the highest count as equal, so that fewer bits win.
        allow_overflow: take a point that overflowed on the calibration data where none did not.

    Returns:
        The trial, or None where no trial can be taken.
    """
    whole = [t for t in trials if not t.score.dropped]
    taken = [t for t in whole if t.score.runs or (allow_overflow and not t.score.infeasible)]
    floor = max((t.score.value for t in taken if t.score.accepted), default=math.inf) - tolerance
    return max(taken, key=lambda t: t.score.standing(floor), default=None)
