"""Findings: one mistake of a hardware document each, and what several checks say of names and figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hago.errors import did_you_mean

Path = tuple[str | int, ...]
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake: where it is, and what was got and expected."""

    path: Path
    text: str

    def __str__(self) -> str:
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path)
        return f"${where}: {self.text}"


def show(value: Any) -> str:
    """A value as its JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def any_of(names: Iterable[Any]) -> str:
    """What may stand there, in words."""
    return ", ".join(map(str, names))


def known_name(path: Path, got: str, known: Iterable[str], what: str) -> Iterator[Finding]:
    """That a name is none of those that are known."""
    known = list(known)
    if got not in known:
        text = f"unknown {what} {show(got)}; expected one of {any_of(known)}.{did_you_mean(got, known)}"
        yield Finding(path, text)


def figures(path: Path, given: Mapping[str, Any]) -> Iterator[Finding]:
    """Those that are no numbers."""
    for key, value in given.items():
        if isinstance(value, float) and value != value:
            yield Finding((*path, key), "got NaN; expected a number")
