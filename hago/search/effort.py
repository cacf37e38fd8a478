"""Efforts: how much a quantization or a search does, by a name.

An effort is a row of `EFFORTS`: values of other options, which the user may still give one by one. What it stood for is
recorded (`Effort.to_json` in the header of a log, the names of corrections and the options of the searcher beside it),
so that a log is continued and replayed by what it says, whatever the name means by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from hago.errors import check_choice
from hago.search.correcting import CORRECTIONS, wanted_corrections
from hago.searchers import parse_searcher
from hago.study import Header

EffortName = Literal["fast", "good", "best"]

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
    """

    name: str
    corrections: tuple[str, ...]
    searcher: str
    limited_searcher: str
    turns: int = 1

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

    def to_json(self) -> dict[str, Any]:
        """What the header of a log records, beside the corrections and the searcher."""
        return {"name": self.name, "turns": self.turns}


#: The efforts by name, from the least.
EFFORTS: Final[Mapping[str, Effort]] = MappingProxyType(
    {
        effort.name: effort
        for effort in (
            Effort("fast", ("splitting", "equalization", "bias"), "default", "sensitivity:rounds=1,moves=0"),
            Effort("good", ("splitting", "equalization", "thresholds", "rounding", "bias"), "gradient", "limited"),
            Effort("best", CORRECTIONS, "gradient:moves=400", "limited:rounds=12,points=12,moves=400", turns=4),
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


def logged_effort(header: Header) -> Effort:
    """The effort of the search that a log is of; of logs without a record, the default."""
    record = header.settings.get("effort")
    if record is None:
        return EFFORTS[DEFAULT_EFFORT]
    known = EFFORTS.get(str(record["name"]), EFFORTS[DEFAULT_EFFORT])
    return replace(known, name=str(record["name"]), turns=int(record["turns"]))
