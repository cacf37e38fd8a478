"""Checkpoint: a training run on disk: JSON and tensors in one file that is replaced at once.

A run that is killed leaves the last checkpoint whole. Nothing is unpickled; the layout is that of
safetensors, with a checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from hago.errors import LONGEST_QUOTE, LogError, ModelFileError, StrategyMismatch, shortened, shortened_to
from hago.json_text import check_version, read_file, replace_file
from hago.tensor_file import from_bytes, to_bytes

VERSION: Final = 1
_KIND: Final = "hago checkpoint"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Where a run is.

    Args:
        settings: JSON values; all that makes the run again. A run with others is refused.
        step: how many steps were made.
        seconds: of wall time, all sessions together.
        tensors: by name: the model's state and the optimizer's.
    """

    settings: Mapping[str, Any]
    step: int
    seconds: float
    tensors: Mapping[str, Tensor]

    def save(self, path: Path) -> None:
        """Write the checkpoint beside its place, sync it, and rename it over what stood there.

        Raises:
            LogError: it could not be written; what stood there is untouched.
        """
        document = {"version": VERSION, "settings": dict(self.settings), "step": self.step, "seconds": self.seconds}
        replace_file(path, to_bytes(_KIND, document, self.tensors))

    @staticmethod
    def load(path: Path, settings: Mapping[str, Any]) -> Checkpoint | None:
        """The checkpoint at `path`; None where there is none.

        Raises:
            LogError: it cannot be read.
            ModelFileError: it is no checkpoint of hago, or was cut or changed.
            StrategyMismatch: it is of a run with other settings; both values of the first are named.
        """
        try:
            content = read_file(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise LogError(f"cannot read checkpoint {path}: {error}") from None
        document, tensors = from_bytes(content, _KIND, f"checkpoint {path}")
        check_version(document, VERSION, str(path))
        _check_same(document.get("settings"), settings, path)
        step, seconds = document.get("step"), document.get("seconds")
        if type(step) is not int or step < 0 or type(seconds) not in (int, float) or seconds < 0:
            raise ModelFileError(
                f"checkpoint {path}: got step {shortened(step)} and seconds {shortened(seconds)}, expected a count and "
                "a time; remove it to train from the start"
            )
        return Checkpoint(settings, step, float(seconds), tensors)


def _check_same(found: Any, settings: Mapping[str, Any], path: Path) -> None:
    found = found if isinstance(found, Mapping) else {}
    for name in sorted({*found, *settings}):
        if found.get(name) != settings.get(name):
            raise StrategyMismatch(
                f"checkpoint {path} is of a run with {shortened_to(name, LONGEST_QUOTE)} {shortened(found.get(name))}, "
                f"this one has {shortened(settings.get(name))}; "
                "give this run its own checkpoint, or remove that one"
            )
