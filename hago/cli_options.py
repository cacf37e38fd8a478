"""What the options that commands share mean, and how a command answers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hago.data_source import ImageShape, load_data
from hago.errors import HagoError
from hago.hardware import Hardware
from hago.model_source import import_object
from hago.search.searchers import SEARCHERS, make_searcher

OK: Final = 0
NO: Final = 1
INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command ends with: text for people, JSON values for programs, and the exit code."""

    text: str
    json: Any
    code: int = OK


@dataclass(frozen=True, slots=True)
class Voices:
    """How a command speaks while it runs.

    Args:
        tell: a line of the result, where it is text.
        note: a line beside the result.
        words: the command line, to be shown where it continues something.
    """

    tell: Callable[[str], None]
    note: Callable[[str], None]
    words: tuple[str, ...] = ()


# ---------------------------------------------------------------- what options mean
def load_batches(args: Namespace, spec: str | None = None) -> Any:
    images = ImageShape(args.size, args.mean, args.std, args.gray)
    return load_data(spec or args.data, batch_size=args.batch_size, samples=args.samples, images=images)


def fixed_bits(args: Namespace) -> dict[str, int]:
    return dict(args.fix_bits)


def named(spec: str, what: str) -> Any:
    """A name as it is, or the object that `package.module:name` means."""
    return import_object(spec, what) if ":" in spec else spec


def named_searcher(spec: str) -> Any:
    """What `NAME`, `NAME:OPTION=VALUE,...` or `package.module:callable` means."""
    name, colon, rest = spec.partition(":")
    if name not in SEARCHERS or not colon:
        return named(spec, "searcher")
    options: dict[str, float] = {}
    for part in rest.split(","):
        key, _, value = part.partition("=")
        try:
            options[key.strip()] = float(value)
        except ValueError:
            raise HagoError(f"searcher {spec!r}: got {part!r}, expected OPTION=VALUE with a number") from None
    return lambda space, start, seed: make_searcher(name, space, start, seed, options=options)


def default_path(args: Namespace, hardware: Hardware, folder: str, suffix: str) -> Path:
    model = args.model.rpartition(":")[2].replace(".", "-")
    return Path(folder) / f"{model}-{hardware.name}{suffix}"


def make_folder_of(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HagoError(f"cannot make the folder of {path}: {error}") from None
    return path
