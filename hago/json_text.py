"""JSON text: the one way JSON is written, read strictly, and checked against a JSON Schema.

The text is canonical: sorted keys, ASCII, floats in the shortest form that reads back exactly. Errors
name the file, the JSON path, what was got and what was expected.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import numbers
import os
import secrets
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jsonschema

from hago.errors import LogError, did_you_mean

#: Integers of more digits than this would not fit a float.
_DIGITS: Final = 300
_LARGEST: Final = 10**_DIGITS


def canonical(value: Any) -> str:
    """The one text of JSON values: sorted keys, one line, ASCII, floats that read back exactly."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def json_values(value: Any, where: str) -> Any:
    """`value` with only what JSON has: numbers become Python's, tuples lists, and numbers that are
    not finite the texts "inf", "-inf" and "nan".

    Raises:
        LogError: something that is no JSON value, with its path.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral) and abs(int(value)) < _LARGEST:
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: json_values(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(v, f"{where}[{i}]") for i, v in enumerate(value)]
    raise LogError(f"at {where}: got {type(value).__name__} {_short(value)}, expected a JSON value")


def parse_json(text: str, where: str) -> Any:
    """The values of one JSON text, read strictly: no NaN, no number that overflows, no key twice.

    Raises:
        LogError: naming `where` and what is wrong.
    """

    def integer(digits: str) -> int:
        if len(digits) > _DIGITS:
            raise ValueError(f"an integer of {len(digits)} digits")
        return int(digits)

    def real(digits: str) -> float:
        if not math.isfinite(float(digits)):
            raise ValueError(f"{digits} is too large for a float")
        return float(digits)

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is not a JSON number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [k for k, _ in pairs]
            raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} stands twice")
        return found

    try:
        return json.loads(text, parse_int=integer, parse_float=real, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise LogError(f"{where}: not the JSON that hago writes: {error}") from None


def check_version(value: Any, newest: int, where: str) -> None:
    """Refuse JSON values of a form that this hago does not read.

    Raises:
        LogError: naming the version got and those it reads.
    """
    version = value.get("version") if isinstance(value, Mapping) else None
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= newest:
        known = "1" if newest == 1 else f"1 to {newest}"
        raise LogError(
            f"{where}: at $.version: got {_short(version)}, expected {known}; a larger one is written by a newer hago"
        )


@functools.cache
def _validator(name: str) -> Any:
    text = (files("hago") / "schemas" / f"{name}.schema.json").read_text("utf-8")
    return jsonschema.Draft202012Validator(json.loads(text))


def check_schema(value: Any, name: str, where: str) -> None:
    """Refuse JSON values that break `schemas/<name>.schema.json`.

    Raises:
        LogError: naming `where`, the JSON path, what was got and what was expected.
    """
    error = jsonschema.exceptions.best_match(_validator(name).iter_errors(value))
    if error is not None:
        got, expected = _short(error.instance), _expected(error)
        raise LogError(f"{where}: at {error.json_path}: got {got}, expected {expected}")


def _expected(error: Any) -> str:
    rule, wanted = error.validator, error.validator_value
    if rule == "required":
        missing = next(k for k in wanted if k not in error.instance)
        return f"the key {missing!r}.{did_you_mean(missing, error.instance)}"
    if rule == "additionalProperties":
        known = error.schema.get("properties", {})
        extra = next(k for k in error.instance if k not in known)
        return f"no key {extra!r}.{did_you_mean(extra, known)}"
    return f"{rule} {_short(wanted)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def replace_file(path: Path, content: str | bytes) -> None:
    """Put `content` (text in UTF-8) at `path` at once: written beside it, synced, then renamed over it.

    Raises:
        LogError: it could not be written; what stood at `path` is untouched.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(beside, "xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        raise LogError(f"cannot write {path}: {error}; what stood there is unchanged") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def check_distinct(paths: Mapping[str, str | os.PathLike[str] | None]) -> None:
    """Refuse files to write of which one would replace another.

    Args:
        paths: by the argument that gave them; None where there is none.

    Raises:
        LogError: two of them are one file, also by way of links; both arguments are named.
    """
    given = [(name, os.path.realpath(path)) for name, path in paths.items() if path is not None]
    for (first, a), (second, b) in itertools.combinations(given, 2):
        both = os.path.exists(a) and os.path.exists(b)
        if os.path.normcase(a) == os.path.normcase(b) or (both and os.path.samefile(a, b)):
            raise LogError(
                f"{first} and {second} are one file, {a}, and each would write over the other; give each a path of "
                "its own"
            )


def sync_folder(folder: Path) -> None:
    """Make a new name in `folder` survive a power failure, where the system can."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
