"""Stored models: files that hold a Plan, which can be run without the model that it was made from.

`IntegerModel` is saved, pickled and copied in this form; `hago.load_integer_model` and the command line read files.

Invariants: a loaded Plan computes the same, bit for bit; a file that was truncated, edited or not written by hago is
refused; reading a file imports and unpickles nothing; files are replaced atomically.
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
from hago.plan import Plan, Strategy, plan_from_document, plan_to_document
from hago.serialization.json_text import check_schema, check_version, json_values, read_file, replace_file
from hago.serialization.tensor_file import begins, from_bytes, to_bytes
from hago.serialization.text_table import bytes_text
from hago.version import VERSION as HAGO_VERSION

STORED_VERSION: Final = 1
KIND: Final = "hago integer model"


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a Plan.

    Args:
        model_hash: the hash of the Graph from which it was made.
        bits: the bits of each group in the strategy.
        made_by: how the strategy was made; see `Strategy`.
    """

    model_hash: str
    bits: Mapping[str, int]
    made_by: Mapping[str, Any]

    @staticmethod
    def of(strategy: Strategy) -> Provenance:
        """The origin of a Plan that was made from a strategy."""
        equalized = {"equalized": True} if strategy.corrections.of_graph else {}
        return Provenance(strategy.model_hash, dict(strategy.bits), {**strategy.made_by, **equalized})


@dataclass(frozen=True, slots=True)
class StoredSize:
    """The bytes of the float model's constants, and of the file of the integer model."""

    float_model: int
    file: int

    def __str__(self) -> str:
        less = self.float_model >= self.file
        times = self.float_model / self.file if less else self.file / max(1, self.float_model)
        compared = f"{times:.2f} times {'less' if less else 'more'} than the weights in float"
        return f"a file of {bytes_text(self.file)}, {compared}"


def to_file_bytes(plan: Plan, provenance: Provenance | None = None) -> bytes:
    """The content of the file of a Plan; equal Plans give equal bytes.

    Raises:
        GraphError: a node cannot be stored; the message names it and says why.
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
    """Read a Plan and its origin from the content of a file.

    Raises:
        ModelFileError: the file was truncated, edited, not written by hago or written by a newer hago, or has operators
            that `ops` lacks.
    """
    document, tensors = from_bytes(data, KIND, where)
    try:
        check_version(document, STORED_VERSION, where)
        check_schema(document, "integer_model", where)
    # `json_text` raises a LogError for any file; a document may be nested too deeply
    except (LogError, RecursionError) as error:
        raise ModelFileError(str(error)) from None
    origin = document["provenance"]
    return plan_from_document(document, tensors, where, ops), None if origin is None else Provenance(**origin)


def save_plan(path: str | PathLike[str], plan: Plan, provenance: Provenance | None = None) -> StoredSize:
    """Write a Plan to a file, which is replaced atomically.

    Args:
        provenance: None if no strategy is known.

    Returns:
        The sizes of the file and of the float model's constants.

    Raises:
        GraphError: a node cannot be stored; nothing is written.
        ModelFileError: the file could not be written; a file that was there is unchanged.
    """
    data = to_file_bytes(plan, provenance)
    try:
        replace_file(Path(path), data)
    except LogError as error:
        raise ModelFileError(str(error)) from None
    return StoredSize(float_bytes(plan), len(data))


def load_plan(path: str | PathLike[str], ops: Ops = OPS) -> tuple[Plan, Provenance | None]:
    """Read a Plan and its origin from a file.

    Args:
        ops: the operators that the Plan may have; only needed for a model with operators of your own.

    Raises:
        ModelFileError: the file is unreadable, truncated, edited or not written by hago, or has operators that `ops`
            lacks.
    """
    try:
        data = read_file(path)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read stored model {str(path)!r}: {error}") from None
    return from_file_bytes(data, str(path), ops)


def float_bytes(plan: Plan) -> int:
    """The bytes of the float model's constants."""
    return sum(t.numel() * t.element_size() for t in plan.graph.consts.values())


def is_stored(path: str | PathLike[str]) -> bool:
    """Whether a file begins like a stored model; it may be incomplete."""
    try:
        return begins(read_file(path, 256), KIND)
    except (OSError, ValueError):
        return False
