"""Efforts: how much a quantization or a search does, by a name.

An effort is a row of `EFFORTS`: values of other options, which the user may still give one by one. What it stood for is
recorded (`Effort.to_json` in the header of a log, the names of corrections and the options of the searcher beside it),
so that a log is continued and replayed by what it says, whatever the name means by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from hago.data import duration
from hago.errors import check_choice, shortened
from hago.plan import Strategy
from hago.search.correcting import CORRECTIONS, DEFAULT_CORRECTIONS, MORE_A_TURN, wanted_corrections
from hago.searchers import parse_searcher
from hago.study import Header

#: What corrections take, in passes of the float model over 256 samples; measured by `scripts/benchmark_effort.py`, and
#: rotation, absorption and affine, on MobileNetV2, by `scripts/benchmark_few_bits.py`.
CORRECTION_FORWARDS: Final[Mapping[str, float]] = MappingProxyType(
    {"rotation": 12.0, "splitting": 2.0, "equalization": 6.0, "absorption": 6.0, "thresholds": 6.0}
    | {"rounding": 5.0, "bias": 1.0, "affine": 4.0}
)
#: What a correction takes that trains layers: 110 to 250 on three networks.
LONG_FORWARDS: Final = 170.0
#: What a search takes besides corrections.
SEARCH_FORWARDS: Final = 25.0

#: The effort where the user names none.
DEFAULT_EFFORT: Final = "good"


@dataclass(frozen=True, slots=True)
class Effort:
    """What an effort stands for.

    Args:
        name: a key of `EFFORTS`.
        corrections: the names of those that may be made.
        searcher, limited_searcher: what the searcher `auto` stands for: where the most bits are allowed, and where the
            goal asks for fewer.
        turns: how often layers are corrected at most, see `correct_in_turns`.
        samples: the most samples that a search looks at, see `Batches.thinned`; None for all.
        refines: whether a search refines thresholds before its first trial.
        tries_apart: whether rounding and biases are also tried apart, where both may be corrected.
    """

    name: str
    corrections: tuple[str, ...]
    searcher: str
    limited_searcher: str
    turns: int = 1
    samples: int | None = None
    refines: bool = True
    tries_apart: bool = True

    def corrections_of(self, given: str | Sequence[str] | None) -> tuple[str, ...]:
        """The names of the corrections that may be made: those that the user names, or else the effort's.

        Raises:
            HagoError: there is no such correction.
        """
        return self.corrections if given is None else wanted_corrections(given)

    def searcher_for(self, limited: bool) -> str:
        """What the searcher `auto` stands for, with its options.

        Args:
            limited: whether the goal asks for fewer bits than the most.
        """
        return self.limited_searcher if limited else self.searcher

    @property
    def searchers(self) -> tuple[str, ...]:
        """The names of the searchers that `auto` may stand for."""
        return tuple(parse_searcher(text)[0] for text in (self.searcher, self.limited_searcher))

    def expected_forwards(self, names: Sequence[str], *, searches: bool) -> float:
        """About how much this takes, in passes of the float model over the data, calibration excluded, with one turn
        that sees more samples, since it ends with the first that does not help.

        Args:
            names: of the corrections that may be made.
            searches: whether points are tried, too.
        """
        once = sum(CORRECTION_FORWARDS.get(name, LONG_FORWARDS) for name in names)
        again = sum(CORRECTION_FORWARDS[name] for name in ("rounding", "bias") if name in names)
        more = (self.turns > 1) * MORE_A_TURN * again
        return once + more + searches * SEARCH_FORWARDS

    def announced(self, names: Sequence[str], forward_seconds: float, *, searches: bool) -> str:
        """What an effort without an end takes, in words for the line of progress; empty for the others.

        Args:
            forward_seconds: of one pass of the float model.
            names, searches: of `expected_forwards`.
        """
        if self.turns == 1:
            return ""
        forwards = self.expected_forwards(names, searches=searches)
        return f" (effort {self.name}: about {forwards:.0f} forwards, {duration(forwards * forward_seconds)})"

    def to_json(self) -> dict[str, Any]:
        """What the header of a log records, beside the corrections and the searcher."""
        record: dict[str, Any] = {"name": self.name, "turns": self.turns}
        if self.samples is not None:
            record["samples"] = self.samples
        # logs of before do not say what was always so
        return record | {key: False for key in ("refines", "tries_apart") if not getattr(self, key)}


#: The efforts by name, from the least.
EFFORTS: Final[Mapping[str, Effort]] = MappingProxyType(
    {
        effort.name: effort
        for effort in (
            Effort("fast", ("splitting", "equalization", "bias"), "default", "sensitivity:rounds=1,moves=0"),
            Effort("good", DEFAULT_CORRECTIONS, "gradient", "limited"),
            Effort("best", CORRECTIONS, "gradient:moves=400", "limited:rounds=12,points=12,moves=400", turns=4),
        )
    }
)

#: What an effort stands for instead where a cost is limited, minimized or has a front, so that points have few bits:
#: there, rounding gains most, and what few samples say of many points is enough for a first look.
WITH_COSTS: Final[Mapping[str, Effort]] = MappingProxyType(
    {
        "fast": replace(
            EFFORTS["fast"],
            corrections=("splitting", "equalization", "rounding", "bias"),
            samples=64,
            refines=False,
            tries_apart=False,
        )
    }
)


def named_effort(name: str | None) -> Effort:
    """The effort of a name, by default `DEFAULT_EFFORT`.

    Raises:
        HagoError: there is no such effort.
    """
    chosen = DEFAULT_EFFORT if name is None else name
    check_choice("effort", chosen, tuple(EFFORTS))
    return EFFORTS[chosen]


def effort_with_costs(name: str | None) -> Effort:
    """The effort of a name for a search in which costs are in use.

    Raises:
        HagoError: there is no such effort.
    """
    effort = named_effort(name)
    return WITH_COSTS.get(effort.name, effort)


def logged_effort(header: Header) -> Effort:
    """The effort of the search that a log is of; of logs without a record, the default."""
    record = header.settings.get("effort")
    if record is None:
        return EFFORTS[DEFAULT_EFFORT]
    known = EFFORTS.get(str(record["name"]), EFFORTS[DEFAULT_EFFORT])
    if "refines" in record:
        known = WITH_COSTS.get(known.name, known)
    return replace(
        known,
        name=str(record["name"]),
        turns=int(record["turns"]),
        samples=samples_of(record),
        refines=bool(record.get("refines", True)),
        tries_apart=bool(record.get("tries_apart", True)),
    )


def samples_of(record: Any) -> int | None:
    """The most samples that a search looked at, by the record of its effort; None for all.

    Raises:
        ValueError: it is no whole number above 0.
    """
    samples = record.get("samples") if isinstance(record, Mapping) else None
    if samples is None:
        return None
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"{shortened(samples)} samples; expected a whole number above 0")
    return samples


def effort_of(strategy: Strategy) -> Effort:
    """The effort that a strategy names; the default where it names none that there is."""
    record = strategy.made_by.get("effort")
    return EFFORTS.get(str(record.get("name")) if isinstance(record, Mapping) else "", EFFORTS[DEFAULT_EFFORT])
