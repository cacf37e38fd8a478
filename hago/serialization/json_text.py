"""JSON text: written in a canonical form, read strictly, and checked against JSON Schemas; and safe reading and writing
of files.

Canonical text has sorted keys, ASCII characters, and floats in the shortest form that reads back exactly. Errors name
the file, the JSON path, what was got and what was expected.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import json
import math
import numbers
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from hago.errors import LogError, did_you_mean, shortened

#: The most digits of an integer; a float holds all of them.
_DIGITS: Final = 300
_LARGEST: Final = 10**_DIGITS
#: The most levels of nested lists and objects.
_DEEPEST: Final = 100
#: Seconds after which a temporary file that no process has locked counts as left by a killed process.
_STALE_SECONDS: Final = 60.0


def canonical(value: Any) -> str:
    """The canonical text of JSON values: sorted keys, one line, ASCII, floats that read back exactly."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def json_values(value: Any, where: str) -> Any:
    """Convert a value to JSON values: numbers become Python numbers, tuples become lists, and numbers that are not
    finite become the strings "inf", "-inf" and "nan".

    Args:
        where: the JSON path of the value, for errors.

    Raises:
        LogError: a part of the value has no JSON form; the message says its path.
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
    """Parse a JSON text strictly: NaN, numbers that overflow and repeated keys are errors.

    Raises:
        LogError: the text is not such JSON; the message names `where` and what is wrong.
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
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [k for k, _ in pairs]
            raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice")
        return values

    try:
        value = json.loads(text, parse_int=integer, parse_float=real, parse_constant=refuse, object_pairs_hook=unique)
        _check_depth(value)
    except (ValueError, RecursionError) as error:
        raise LogError(f"{where}: not the JSON that hago writes: {error}") from None
    return value


def _check_depth(value: Any) -> None:
    """Refuse values that are nested deeper than any that hago writes, since the code that reads them is recursive."""
    layer, depth = [value], 0
    while layer:
        layer = [v for x in layer if isinstance(x, (dict, list)) for v in (x.values() if isinstance(x, dict) else x)]
        depth += 1
        if depth > _DEEPEST:
            raise ValueError(f"values nested more than {_DEEPEST} deep")


def check_version(value: Any, newest: int, where: str) -> None:
    """Refuse JSON values whose version this hago does not read.

    Raises:
        LogError: the message names the version and those that hago reads.
    """
    version = value.get("version") if isinstance(value, Mapping) else None
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= newest:
        known = "1" if newest == 1 else f"1 to {newest}"
        raise LogError(
            f"{where}: at $.version: got {_short(version)}, expected {known}; a larger one is written by a newer hago"
        )


@functools.cache
def _validator(name: str) -> Any:
    import jsonschema

    text = (files("hago.serialization") / "schemas" / f"{name}.schema.json").read_text("utf-8")
    # JSON Schema accepts 4.0 as an integer; Python's range and shifts do not
    base = jsonschema.Draft202012Validator
    type_checker = base.TYPE_CHECKER.redefine("integer", lambda _, v: isinstance(v, int) and not isinstance(v, bool))
    every_item = base.VALIDATORS["items"]

    def items(validator: Any, schema: Any, values: Any, parent: Any) -> Iterator[Any]:
        """The check of the items of a list, which is short for the many numbers of thresholds."""
        if schema != {"type": "number"} or not isinstance(values, list) or {*map(type, values)} - {int, float}:
            yield from every_item(validator, schema, values, parent)

    return jsonschema.validators.extend(base, {"items": items}, type_checker=type_checker)(json.loads(text))


def check_schema(value: Any, name: str, where: str) -> None:
    """Refuse JSON values that do not match `schemas/<name>.schema.json`.

    Raises:
        LogError: the message names `where`, the JSON path, what was got and what was expected.
    """
    from jsonschema.exceptions import best_match

    error = best_match(_validator(name).iter_errors(value))
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


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a regular file; False also for invalid paths, such as one that is too long."""
    try:
        return os.path.isfile(path)
    except (OSError, ValueError):
        return False


def read_file(path: str | os.PathLike[str], most: int = -1) -> bytes:
    """Read a regular file, or its first `most` bytes.

    Pipes and devices are refused, since reading them may never end.

    Raises:
        OSError: there is no such file, it is not a regular file, or it cannot be read.
        ValueError: the path is invalid.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{os.fspath(path)} is a pipe or a device; expected a regular file")
        return file.read(most)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking, even if it is a pipe that no process writes to."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def replace_file(path: Path, content: str | bytes, *, whatever_is_there: bool = False) -> None:
    """Replace a file atomically: write a temporary file next to it, sync it, and rename it.

    Args:
        content: bytes, or text that is written in UTF-8.
        whatever_is_there: whether links and what is no file are replaced, too, as in a folder of hago's own; by
            default a link stays, and its target is replaced.

    Raises:
        LogError: the file could not be written, or there is something else than a file, such as a device; it is
            unchanged.
    """
    path = path if whatever_is_there else _followed(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        _remove_stale(path)
        with open(temporary, "xb") as file:
            _lock(file.fileno())
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except (OSError, ValueError) as error:
        raise LogError(f"cannot write {path}: {error}; a file that was there is unchanged") from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink()


def _followed(path: Path) -> Path:
    """The path of the file that a path, or the link there, names.

    Raises:
        LogError: it names something else than a file, or nothing that can be a file.
    """
    try:
        real = Path(os.path.realpath(path))
        is_other = real.exists() and not real.is_file()
    except (OSError, ValueError) as error:
        raise LogError(f"cannot write {path}: {error}; a file that was there is unchanged") from None
    if is_other:
        raise LogError(f"cannot write {path}: it is no regular file; give a path of its own")
    return real


def _lock(fd: int) -> bool:
    """Try to lock an open file until this process closes it or ends.

    Returns:
        Whether it is locked now; False on systems without such locks.
    """
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):  # Windows has none
        return False
    return True


def _remove_stale(path: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote `path`."""
    with contextlib.suppress(OSError):
        for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            with open(temporary, "rb") as file:
                if time.time() - os.fstat(file.fileno()).st_mtime > _STALE_SECONDS and _lock(file.fileno()):
                    temporary.unlink()


def check_distinct(paths: Mapping[str, str | os.PathLike[str] | None]) -> None:
    """Refuse output files of which one would overwrite another.

    Args:
        paths: the path of each argument, by the name of the argument; None for no file.

    Raises:
        LogError: two paths are those of one file, possibly through links; the message names both arguments.
    """
    given = [(name, _real(name, path)) for name, path in paths.items() if path is not None]
    for (first, a), (second, b) in itertools.combinations(given, 2):
        both = os.path.exists(a) and os.path.exists(b)
        if os.path.normcase(a) == os.path.normcase(b) or (both and os.path.samefile(a, b)):
            raise LogError(
                f"{first} and {second} name the same file, {a}, and would overwrite each other; give each a path of "
                "its own"
            )


def _real(name: str, path: str | os.PathLike[str]) -> str:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError) as error:
        raise LogError(f"{name} is {shortened(os.fspath(path))}, which is not a valid path: {error}") from None


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a new name in it survives a power failure, if the system supports it."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
