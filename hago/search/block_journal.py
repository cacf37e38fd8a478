"""The blocks that reconstruction has trained so far, in a file, so that a search that was stopped goes on from there.

The file lies beside the log of the search, is replaced atomically after every block, and is removed when reconstruction
ends. What is of another reconstruction, or cannot be read, is not used: the blocks are trained again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hago.errors import HagoError
from hago.serialization.json_text import read_file, replace_file
from hago.serialization.tensor_file import from_bytes, to_bytes

#: What is added to the name of a log.
SUFFIX: Final = ".blocks"
_KIND: Final = "hago reconstruction"
_VERSION: Final = 1


def journal_beside(log: str | PathLike[str] | None) -> Path | None:
    """The file of the journal of a search with that log; None without a log."""
    return None if log is None else Path(f"{fspath(log)}{SUFFIX}")


@dataclass(frozen=True, slots=True)
class TrainedBlock:
    """A block as it was left.

    Args:
        kept: whether it became better.
        generator: the state of the random numbers behind it.
        tensors: what was trained.
    """

    kept: bool
    generator: Tensor
    tensors: tuple[Tensor, ...]


@dataclass(slots=True)
class BlockJournal:
    """The trained blocks of one reconstruction, in the order in which they are trained.

    Args:
        path: of the file; None to keep none.
        key: what determines the reconstruction.
    """

    path: Path | None
    key: str
    blocks: list[TrainedBlock] = field(default_factory=list)

    @staticmethod
    def read(path: Path | None, *determined_by: Any) -> BlockJournal:
        """The journal of a file, empty where there is none of this reconstruction.

        Args:
            determined_by: whatever the result depends on: tensors, and values that are written as text.
        """
        journal = BlockJournal(path, _key(determined_by))
        if path is None:
            return journal
        try:
            document, tensors = from_bytes(read_file(path), _KIND, f"reconstruction {path}")
            if document.get("version") == _VERSION and document.get("key") == journal.key:
                counts = enumerate(zip(document["kept"], document["tensors"], strict=True))
                for number, (kept, count) in counts:
                    trained = tuple(tensors[f"{number}.{i}"] for i in range(count))
                    journal.blocks.append(TrainedBlock(bool(kept), tensors[f"{number}.generator"], trained))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, HagoError):
            journal.blocks.clear()
        return journal

    def add(self, kept: bool, generator: torch.Generator, tensors: Sequence[Tensor]) -> None:
        """Append a block, and write the file."""
        if self.path is None:
            return
        self.blocks.append(TrainedBlock(kept, generator.get_state(), tuple(t.detach().clone() for t in tensors)))
        stored = {f"{n}.{i}": t for n, block in enumerate(self.blocks) for i, t in enumerate(block.tensors)}
        stored |= {f"{n}.generator": block.generator for n, block in enumerate(self.blocks)}
        document = {
            "version": _VERSION,
            "key": self.key,
            "kept": [block.kept for block in self.blocks],
            "tensors": [len(block.tensors) for block in self.blocks],
        }
        replace_file(self.path, to_bytes(_KIND, document, stored))

    def remove(self) -> None:
        """Remove the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _key(values: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        content = value.detach().contiguous().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
        digest.update(content)
    return digest.hexdigest()
