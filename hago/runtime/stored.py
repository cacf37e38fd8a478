"""Stored models: a Plan as one file that any process can run, without the model it came from.

Invariants: what is loaded computes the same, bit for bit; a file that was cut, changed or is not ours is
refused; nothing is imported or unpickled; a file appears whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from hago.errors import LogError, ModelFileError
from hago.ops import OPS, Ops
from hago.plan.document import plan_from_document, plan_to_document
from hago.plan.plan import Plan
from hago.plan.strategy import Strategy
from hago.serialization.json_text import check_schema, check_version, json_values, read_file, replace_file
from hago.serialization.tensor_file import begins, from_bytes, to_bytes
from hago.version import VERSION as HAGO_VERSION

STORED_VERSION: Final = 1
KIND: Final = "hago integer model"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a Plan comes from.

    Args:
        model_hash: of the Graph that it was made of.
        bits: by group, as the strategy chose them.
        made_by: how the strategy was found.
    """

    model_hash: str
    bits: Mapping[str, int]
    made_by: Mapping[str, Any]

    @staticmethod
    def of(strategy: Strategy) -> Provenance:
        """That of a strategy."""
        return Provenance(strategy.model_hash, dict(strategy.bits), dict(strategy.made_by))


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Bytes of the constants of the float model, and of the file that stands for it."""

    float_model: int
    file: int

    def __str__(self) -> str:
        fewer = self.float_model >= self.file
        times = self.float_model / self.file if fewer else self.file / max(1, self.float_model)
        return f"{self.file:,} bytes, {times:.2f} times {'fewer' if fewer else 'more'} than the weights in float"


def to_file_bytes(plan: Plan, provenance: Provenance | None = None) -> bytes:
    """The bytes of a stored model; equal Plans give equal bytes.

    Raises:
        GraphError: a node that cannot be stored, by name, and why.
    """
    document, tensors = plan_to_document(plan)
    origin = None
    if provenance is not None:
        origin = {
            "model_hash": provenance.model_hash,
            "bits": dict(provenance.bits),
            "made_by": json_values(provenance.made_by, "$.provenance.made_by"),
        }
    made_with = {"hago": HAGO_VERSION, "torch": torch.__version__.partition("+")[0]}
    return to_bytes(KIND, document | {"version": STORED_VERSION, "made_with": made_with, "provenance": origin}, tensors)


def from_file_bytes(data: bytes, where: str, ops: Ops = OPS) -> tuple[Plan, Provenance | None]:
    """The Plan of a stored model, and where it comes from.

    Raises:
        ModelFileError: cut, changed, not ours, of a newer version, or of operators that `ops` lacks.
    """
    document, tensors = from_bytes(data, KIND, where)
    try:
        check_version(document, STORED_VERSION, where)
        check_schema(document, "integer_model", where)
    except (LogError, RecursionError) as error:
        raise ModelFileError(str(error)) from None
    origin = document["provenance"]
    return plan_from_document(document, tensors, where, ops), None if origin is None else Provenance(**origin)


def save_plan(path: str | PathLike[str], plan: Plan, provenance: Provenance | None = None) -> StoredSize:
    """Write a stored model; a reader sees the old file or the new one, never a part.

    Returns:
        How large it is, beside the float model's constants.

    Raises:
        GraphError: a node that cannot be stored; nothing is written.
        ModelFileError: the file could not be written; what stood there is untouched.
    """
    data = to_file_bytes(plan, provenance)
    try:
        replace_file(Path(path), data)
    except LogError as error:
        raise ModelFileError(str(error)) from None
    return StoredSize(float_bytes(plan), len(data))


def load_plan(path: str | PathLike[str], ops: Ops = OPS) -> tuple[Plan, Provenance | None]:
    """Read a stored model.

    Args:
        ops: the operators it may use; only to be given for a model with operators of your own.

    Raises:
        ModelFileError: unreadable, cut, changed, not ours, or of operators that `ops` lacks.
    """
    try:
        data = read_file(path)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read stored model {str(path)!r}: {error}") from None
    return from_file_bytes(data, str(path), ops)


def float_bytes(plan: Plan) -> int:
    """What the constants of the float model take."""
    return sum(t.numel() * t.element_size() for t in plan.graph.consts.values())


def is_stored(path: str | PathLike[str]) -> bool:
    """Whether a file begins as a stored model, whole or not."""
    try:
        return begins(read_file(path, 256), KIND)
    except (OSError, ValueError):
        return False
