"""The budget of a search: limits on trials, time and forward passes. `run_study` stops when one is reached."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from hago.errors import HagoError

BudgetKind = Literal["trials", "seconds", "forwards"]

_UNITS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?\s*(?:min|[smhd])\s*)+", re.ASCII)
#: The texts of limits, in words.
_FORMS: Final = (
    f"'200 trials', '50 forwards' or a time in {', '.join(_UNITS)}, as in '90s', '10 min' or '1h30m'; several limits "
    "are separated by commas"
)
_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(trials?|forwards?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a search over all its sessions: what earlier sessions of a resumed search spent counts.

    Args:
        trials: number of trials in the log, repeats included.
        seconds: wall time from the import of the model.
        forwards: forward passes of gradients and refinement, plus the sum of `Score.forwards` over evaluations; a
            repeat costs none. Passes before the first trial are made whatever the limit, and count.

    Raises:
        HagoError: a limit is not positive.
    """

    trials: int | None = None
    seconds: float | None = None
    forwards: float | None = None

    def __post_init__(self) -> None:
        for name in ("trials", "seconds", "forwards"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < float("inf"):
                raise HagoError(f"budget of {limit} {name}; expected a positive number")

    @staticmethod
    def parse(value: Budget | str | int | None) -> Budget:
        """Parse a budget.

        Args:
            value: "200 trials", "10m" or "10 min", "1h30m", "50 forwards", several of them separated by commas, a
                number of trials, or None for no limit.

        Raises:
            HagoError: any other value.

        >>> Budget.parse("200 trials, 1h30m")
        Budget(trials=200, seconds=5400.0, forwards=None)
        """
        if isinstance(value, Budget):
            return value
        if value is None:
            return Budget()
        if isinstance(value, int) and not isinstance(value, bool):
            return Budget(trials=value)
        if not isinstance(value, str):
            raise HagoError(f"budget {value!r}; expected an int, of trials, or a text: {_FORMS}")
        limits: dict[str, float] = {}
        for part in value.split(","):
            name, limit = _parse_limit(part.strip(), value)
            if name in limits:
                raise HagoError(f"budget {value!r} limits {name} twice")
            limits[name] = limit
        trials = limits.get("trials")
        return Budget(None if trials is None else int(trials), limits.get("seconds"), limits.get("forwards"))

    def spent(self, trials: int, seconds: float, forwards: float) -> BudgetKind | None:
        """The first limit that is reached by what a search has spent; None where none is."""
        if self.trials is not None and trials >= self.trials:
            return "trials"
        if self.seconds is not None and seconds >= self.seconds:
            return "seconds"
        if self.forwards is not None and forwards >= self.forwards:
            return "forwards"
        return None


def _parse_limit(text: str, budget: str) -> tuple[str, float]:
    if _DURATION.fullmatch(text):
        pieces = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd])", text)
        return "seconds", sum(float(number) * _UNITS[unit] for number, unit in pieces)
    count = _COUNT.fullmatch(text)
    if not count:
        raise HagoError(f"budget {budget!r}; expected {_FORMS}")
    if (count[2] or "trials").startswith("forward"):
        return "forwards", float(count[1])
    if "." in count[1]:
        raise HagoError(f"budget {budget!r}; trials are counted in whole numbers")
    return "trials", int(count[1])
