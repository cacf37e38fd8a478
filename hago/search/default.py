"""Default: one trial, at the start."""

from __future__ import annotations

from dataclasses import dataclass

from hago.search.searcher import Searcher
from hago.search.walk import Ask, Feeds, Steps, Walk
from hago.space import Bits, Space


@dataclass(frozen=True, slots=True)
class DefaultOptions:
    """There is nothing to choose."""


def default(space: Space, start: Bits, seed: int, options: DefaultOptions, feeds: Feeds | None = None) -> Searcher:
    """A searcher that asks `start` and ends."""
    return Walk("default", options, _steps(start))


def _steps(start: Bits) -> Steps[None]:
    yield Ask((dict(start),), "start")
