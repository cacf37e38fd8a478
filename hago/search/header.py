"""Header: line 1 of a search log, all that makes the search again."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from hago.errors import LONGEST_QUOTE, LogError, StrategyMismatch, as_strings, shortened_to
from hago.json_text import canonical, check_schema, json_values
from hago.search.searcher import Searcher
from hago.space import Space
from hago.strategy import HardwareId
from hago.version import VERSION as HAGO_VERSION

VERSION: Final = 2

#: What a log is made for; a log that differs here belongs to another task altogether.
_MADE_FOR: Final = ("model_hash", "hardware", "data_hash", "space")
#: How it was searched; a log that differs here would not be continued but mixed.
_MADE_HOW: Final = ("seed", "searcher", "estimator", "objective", "keep_float", "fix_bits", "settings")


@dataclass(frozen=True, slots=True)
class Header:
    """What a search was run on, how, and by what.

    Args:
        model_hash: of the Graph.
        hardware: name and hash of the description.
        data_hash: of the calibration data.
        seed: of all randomness.
        searcher: {"name", "options"}.
        estimator, objective: a name, or a name and options; any JSON value.
        keep_float: patterns of nodes kept float.
        fix_bits: bits that the user fixed.
        space: {"groups", "choices", "hash"}.
        settings: whatever else changes the scores.
        made_by: versions, machine and threads; a difference is worth a notice, not a refusal.
        confirmed: what refined thresholds gain on samples that were kept aside.
    """

    model_hash: str
    hardware: HardwareId
    data_hash: str
    seed: int
    searcher: Mapping[str, Any]
    estimator: Any
    objective: Any
    keep_float: Sequence[str]
    fix_bits: Mapping[str, Any]
    space: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    made_by: Mapping[str, Any] = field(default_factory=dict)
    confirmed: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, at: str = "") -> dict[str, Any]:
        """The JSON values of the line, `at` being the time that stands in it.

        Raises:
            LogError: a value that JSON does not have.
        """
        parts = {name: getattr(self, name) for name in (*_MADE_FOR, *_MADE_HOW, "made_by")}
        parts["hardware"] = {"name": self.hardware.name, "hash": self.hardware.hash}
        if self.confirmed:
            parts["confirmed"] = self.confirmed
        record: dict[str, Any] = json_values(parts, "log header")
        return {**record, "version": VERSION, "time": {"at": at}}

    @staticmethod
    def from_json(record: Any, where: str) -> Header:
        """The header of JSON values.

        Raises:
            LogError: what breaks the header schema, with its JSON path.
        """
        check_schema(record, "log_header", where)
        parts = {k: v for k, v in record.items() if k not in ("version", "time")}
        return Header(**{**parts, "hardware": HardwareId(**record["hardware"])})

    def check_same(self, logged: Header, where: str) -> None:
        """Refuse to continue a log that another search wrote.

        Raises:
            StrategyMismatch: it was for another model, hardware, data or space.
            LogError: it was searched otherwise.
        """
        mine, theirs = self.to_json(), logged.to_json()
        for part in (*_MADE_FOR, *_MADE_HOW):
            for path, ours, old in _differences(part, mine[part], theirs[part]):
                kind = StrategyMismatch if part in _MADE_FOR else LogError
                raise kind(
                    f"{where} cannot be continued: its {path} is {old}, this search has {ours}; "
                    "give what it was made with, or another log"
                )

    def notices(self, logged: Header, where: str) -> Iterator[str]:
        """What differs without being refused: versions, machine, threads."""
        mine, theirs = self.to_json()["made_by"], logged.to_json()["made_by"]
        for path, ours, old in _differences("made_by", mine, theirs):
            what, was, now = (shortened_to(text, LONGEST_QUOTE) for text in (path, old, ours))
            yield f"{where} was written with {what} {was}, this is {now}; scores may differ"


def make_header(
    space: Space,
    searcher: Searcher,
    *,
    seed: int,
    model_hash: str,
    hardware: HardwareId,
    data_hash: str,
    estimator: Any,
    objective: Any,
    keep_float: Sequence[str] = (),
    fix_bits: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    threads: int | None = None,
    confirmed: Mapping[str, Any] | None = None,
) -> Header:
    """The header of a search in `space` by `searcher`.

    Args:
        threads: that each worker computes with; others: see Header.
    """
    return Header(
        model_hash=model_hash,
        hardware=hardware,
        data_hash=data_hash,
        seed=seed,
        searcher={"name": searcher.name, "options": dict(searcher.options)},
        estimator=estimator,
        objective=objective,
        keep_float=as_strings(keep_float, "keep_float"),
        fix_bits=dict(fix_bits or {}),
        space={"groups": len(space.groups), "choices": space.size, "hash": space_hash(space)},
        settings=dict(settings or {}),
        made_by=versions(threads),
        confirmed=dict(confirmed or {}),
    )


def space_hash(space: Space) -> str:
    """sha256 over every group's key, source, edges and choices, in order."""
    parts = [[g.key, g.source, [str(e) for e in g.edges], list(g.choices)] for g in space.groups.values()]
    return hashlib.sha256(canonical(parts).encode()).hexdigest()


def versions(threads: int | None = None) -> dict[str, Any]:
    """Versions of what computes the scores, the machine's architecture, and `threads`."""
    return {
        "hago": HAGO_VERSION,
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{package: version(package) for package in ("torch", "numpy")},
        "threads": threads,
    }


def _differences(path: str, ours: Any, theirs: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}):
            yield from _differences(f"{path}.{key}", ours.get(key), theirs.get(key))
    elif canonical(ours) != canonical(theirs):
        yield path, canonical(ours), canonical(theirs)
