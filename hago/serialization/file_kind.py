"""The kinds of JSON files that hago reads, so that an error says which one was given in place of another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Final, NamedTuple

from hago.errors import HagoError


class FileKind(NamedTuple):
    """A kind of file.

    Args:
        keys: that such a file, or its first line, has, and no other kind.
        used_by: what it is for.
        option: the option of the command line that names it.
    """

    name: str
    keys: frozenset[str]
    used_by: str
    option: str


STRATEGY: Final = FileKind(
    "a strategy",
    frozenset({"version", "model_hash", "hardware", "bits", "made_by"}),
    "hago realize and hago evaluate",
    "--save",
)
FRONT: Final = FileKind(
    "a front of a search",
    frozenset({"version", "measure", "cost", "points"}),
    "hago.load_front, and for hago realize and hago inspect with --trial",
    "--front",
)
LOG: Final = FileKind("a search log", frozenset({"searcher", "space", "seed"}), "hago replay", "--log")
HARDWARE: Final = FileKind(
    "a hardware file", frozenset({"version", "name", "signatures", "ops"}), "--hardware", "--hardware"
)
KINDS: Final = (STRATEGY, FRONT, LOG, HARDWARE)


def kind_of(data: bytes) -> FileKind | None:
    """The kind of a file, given its content; None where it is none of these."""
    for text in (data, data.partition(b"\n")[0]):  # a log has a value in each line
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        return next((kind for kind in KINDS if isinstance(value, dict) and kind.keys <= value.keys()), None)
    return None


@contextlib.contextmanager
def told_from_other_kinds(data: bytes, where: str, wanted: FileKind) -> Iterator[None]:
    """Read a file; where that fails because it is of another kind, the error says of which.

    Args:
        data: its content.
        where: the name of the file.

    Raises:
        HagoError: the error of the block, of its class.
    """
    try:
        yield
    except HagoError as error:
        found = kind_of(data)
        if found is None or found is wanted:
            raise
        raise type(error)(
            f"{where} is {found.name}, for {found.used_by}; expected {wanted.name}, the file of {wanted.option}"
        ) from None
