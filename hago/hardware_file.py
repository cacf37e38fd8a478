"""Hardware as a file: find it, read it, check it, write it.

Invariants: what `load_hardware` returns was checked whole, and every mistake is reported at once;
`load_hardware(save_hardware(h)) == h`; a file is replaced whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from hago.errors import HardwareError, LogError, did_you_mean
from hago.hardware import Hardware
from hago.hardware_check import check_document
from hago.hardware_document import from_document, to_document
from hago.hardware_finding import Finding
from hago.json_text import read_file, replace_file
from hago.ops import OPS, Ops


# ---------------------------------------------------------------- finding
def _specs() -> Mapping[str, Callable[[], bytes]]:
    """How to read each shipped file, by name.

    They lie inside the package where it is installed, and beside it in a checkout.
    """
    installed = resources.files("hago") / "hardware_specs"
    checkout = Path(__file__).resolve().parent.parent / "hardware_specs"
    for folder in (installed, checkout):
        if folder.is_dir():
            found = sorted((f.name, f) for f in folder.iterdir() if f.name.endswith(".json"))
            return {name.removesuffix(".json"): f.read_bytes for name, f in found}
    return {}


#: Mistakes that one error says.
MOST_SHOWN: Final = 20


def available_hardware() -> tuple[str, ...]:
    """The names of the hardware that ships with hago."""
    return tuple(_specs())


def _read(name_or_path: str | os.PathLike[str]) -> tuple[str, bytes]:
    """Where a description is, in words, and its bytes."""
    text = os.fspath(name_or_path)
    is_path = not isinstance(name_or_path, str) or text.endswith(".json") or Path(text).name != text
    specs = {} if is_path else _specs()
    if not is_path and text not in specs:
        raise HardwareError(
            f"no hardware is called {text!r}; expected one of {', '.join(specs)}, or a path of a .json file."
            + did_you_mean(text, specs)
        )
    try:
        if is_path:
            return text, read_file(text)
        return f"hardware_specs/{text}.json", specs[text]()
    except (OSError, ValueError) as error:
        raise HardwareError(f"hardware file {text!r} cannot be read: {error}") from error


# ---------------------------------------------------------------- reading
def load_hardware(name_or_path: str | os.PathLike[str], known_ops: Ops = OPS) -> Hardware:
    """The hardware that a file describes.

    Args:
        name_or_path: a name in `available_hardware()`, or the path of a JSON file (a str that ends
            in `.json` or has a folder, or any path object).
        known_ops: the ops that the file may list, e.g. `{**OPS, "my_op": RULE}`.

    Raises:
        HardwareError: there is no such file, or it is no JSON (with line and column), or it is
            wrong: every mistake with its JSON path, what was got and what is expected.
    """
    origin, data = _read(name_or_path)
    try:
        document = _parse(data, origin)
        _refuse(origin, check_document(document, known_ops))
    except RecursionError as error:
        raise HardwareError(f"hardware file {origin!r} is nested too deeply") from error
    return from_document(document, origin, known_ops)


def check_hardware(hardware: Hardware) -> None:
    """Hold a Hardware that was built in Python to what a file is held to.

    Raises:
        HardwareError: every contradiction, by its path in the file that `save_hardware` would write.
    """
    _refuse(hardware.name, check_document(to_document(hardware), hardware.known_ops))


def _refuse(origin: str, findings: Sequence[Finding]) -> None:
    if findings:
        count = "1 mistake" if len(findings) == 1 else f"{len(findings)} mistakes"
        shown = list(map(str, findings[:MOST_SHOWN]))
        if len(findings) > MOST_SHOWN:
            shown.append(f"and {len(findings) - MOST_SHOWN} more, which are said once these are mended")
        raise HardwareError("\n  ".join([f"hardware {origin!r} has {count}:", *shown]))


def _parse(data: bytes, origin: str) -> Any:
    """JSON without repeated keys."""
    repeated: list[tuple[dict[str, Any], str, int]] = []

    def take(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        repeated.extend((found, k, n) for k, n in Counter(k for k, _ in pairs).items() if n > 1)
        return found

    try:
        document = json.loads(data.decode("utf-8-sig"), object_pairs_hook=take)
    except json.JSONDecodeError as error:
        early = "; the file ends too early" if error.pos >= len(error.doc.rstrip()) else ""
        place = f"line {error.lineno}, column {error.colno}"
        raise HardwareError(f"hardware file {origin!r} is no JSON at {place}: {error.msg}{early}") from error
    except ValueError as error:
        raise HardwareError(f"hardware file {origin!r} is no JSON: {error}") from error
    places = {id(found): path for path, found in _objects(document)}
    _refuse(
        origin,
        [
            Finding((*places.get(id(found), ()), key), f"the key stands {count} times; expected once")
            for found, key, count in repeated
        ],
    )
    return document


def _objects(document: Any) -> Iterable[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Every JSON object with its path."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            yield path, value
            waiting += [((*path, k), v) for k, v in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, i), v) for i, v in enumerate(value)]


# ---------------------------------------------------------------- writing
def save_hardware(hardware: Hardware, path: str | os.PathLike[str]) -> None:
    """Write the hardware as a file that `load_hardware` reads back as an equal value.

    The file appears whole: it is written under another name first and then renamed.

    Raises:
        HardwareError: the hardware contradicts itself, or the file cannot be written.
    """
    check_hardware(hardware)
    try:
        replace_file(Path(path), _layout(to_document(hardware)))
    except (LogError, ValueError) as error:
        raise HardwareError(f"hardware {hardware.name!r} cannot be written: {error}") from error


def _layout(document: Mapping[str, Any]) -> str:
    """JSON with one line per signature, op, source and note."""
    lines = []
    for key, value in document.items():
        name, text = json.dumps(key), json.dumps(value, ensure_ascii=False)
        if key in ("signatures", "ops"):
            entries = [f"    {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items()]
            text = "{\n" + ",\n".join(entries) + "\n  }"
        elif key in ("sources", "notes"):
            text = "[\n" + ",\n".join(f"    {json.dumps(v, ensure_ascii=False)}" for v in value) + "\n  ]"
        lines.append(f"  {name}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
