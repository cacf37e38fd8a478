"""Budget: when a search stops of its own accord."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from hago.errors import HagoError

BudgetKind = Literal["trials", "seconds", "forwards"]

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?\s*[smhd]\s*)+", re.ASCII)
_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(trials?|forwards?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a search over its whole life, earlier sessions of a resumed one included.

    Args:
        trials: lines of the log, repeats included.
        seconds: of wall time, from the import of the model.
        forwards: those of gradients and refinement, and the sum of `Score.forwards` over evaluations; a repeat costs
            nothing. What comes before the first trial is spent in any case.

    Raises:
        HagoError: a limit that is not positive.
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
        """The budget that `value` says.

        Args:
            value: "200 trials", "10m", "1h30m", "50 forwards", several of them with commas between,
                a number of trials, or None for no limit.

        Raises:
            HagoError: anything else, naming what was got.

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
            raise HagoError(f"budget {value!r}; expected a text such as '200 trials' or '10m', or an int")
        limits: dict[str, float] = {}
        for part in value.split(","):
            name, limit = _part(part.strip(), value)
            if name in limits:
                raise HagoError(f"budget {value!r} limits {name} twice")
            limits[name] = limit
        trials = limits.get("trials")
        return Budget(None if trials is None else int(trials), limits.get("seconds"), limits.get("forwards"))

    def spent(self, trials: int, seconds: float, forwards: float) -> BudgetKind | None:
        """Which limit is reached, or None."""
        if self.trials is not None and trials >= self.trials:
            return "trials"
        if self.seconds is not None and seconds >= self.seconds:
            return "seconds"
        if self.forwards is not None and forwards >= self.forwards:
            return "forwards"
        return None


def _part(part: str, whole: str) -> tuple[str, float]:
    if _DURATION.fullmatch(part):
        pieces = re.findall(r"(\d+(?:\.\d+)?)\s*([smhd])", part)
        return "seconds", sum(float(count) * _UNITS[unit] for count, unit in pieces)
    found = _COUNT.fullmatch(part)
    if not found:
        raise HagoError(f"budget {whole!r}; expected e.g. '200 trials', '10m' or '50 forwards'")
    if (found[2] or "trials").startswith("forward"):
        return "forwards", float(found[1])
    if "." in found[1]:
        raise HagoError(f"budget {whole!r}; trials are counted in whole numbers")
    return "trials", int(found[1])
