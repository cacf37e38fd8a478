"""What the passes of corrections gained, as a strategy and a log hold it.

`hago.search.correcting` makes a CorrectionPass of every pass that it tries, kept or not; an inspection shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hago.errors import LogError

#: Why a pass was not kept: the outputs are no closer to the float model's; they are, but that may be chance; other
#: corrections gain more; accumulators overflow; it found nothing to change; the outputs are as close as they need be
#: without it.
WhyNot = Literal["no gain", "not sure", "another gains more", "overflow", "nothing to change", "close already"]


@dataclass(frozen=True, slots=True)
class CorrectionPass:
    """One pass of corrections that were tried together.

    Args:
        names: of the corrections.
        before, after: the SQNR of the outputs without and with the pass, in dB, on the samples that judged it; None
            where nothing was measured.
        samples: number of these samples.
        why_not: why it was not kept; empty if it was.
    """

    names: tuple[str, ...]
    before: float | None = None
    after: float | None = None
    samples: int = 0
    why_not: WhyNot | Literal[""] = ""

    @property
    def kept(self) -> bool:
        return not self.why_not

    @property
    def gain(self) -> float | None:
        """dB that the outputs gain on the samples that judged it; None where nothing was measured."""
        return None if self.before is None or self.after is None else self.after - self.before

    def to_json(self) -> dict[str, Any]:
        """JSON values; `passes_from_json` gives the same pass back."""
        measured = {"before": self.before, "after": self.after, "samples": self.samples}
        return {"names": list(self.names), **measured, "kept": self.kept, "why_not": self.why_not}


def passes_from_json(values: Iterable[Mapping[str, Any]], where: str) -> tuple[CorrectionPass, ...]:
    """The passes that JSON values describe.

    Args:
        where: what they were read from, for the message.

    Raises:
        LogError: a value that hago does not write.
    """
    try:
        return tuple(
            CorrectionPass(
                tuple(str(name) for name in value["names"]),
                _number(value.get("before")),
                _number(value.get("after")),
                int(value.get("samples", 0)),
                value.get("why_not", ""),
            )
            for value in values
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise LogError(f"{where}: its passes of corrections cannot be read ({error!r}); it was edited") from None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
