"""Hardware files: finding, reading, checking and writing them; and the hash of hardware in logs and strategies.

Invariants: `hardware_from_document(hardware_to_document(h)) == h` for every hardware that `check_hardware_document`
accepts; `load_hardware` returns only hardware without mistakes, and reports all mistakes together; files are replaced
atomically.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hago.arithmetic.numerics import Requantize
from hago.arithmetic.types import dtype
from hago.errors import HardwareError, LogError, did_you_mean
from hago.hardware.hardware import Accumulator, FixedOut, Groups, Hardware, OpDesc, TensorScheme
from hago.hardware.validation import Finding, check_hardware_document
from hago.ops import OPS, Ops
from hago.serialization.file_kind import HARDWARE, told_from_other_kinds
from hago.serialization.json_text import read_file, replace_file
from hago.shipped_hardware import shipped_hardware

HARDWARE_VERSION: Final = 1
_SCHEMA: Final = "../hago/serialization/schemas/hardware.schema.json"
#: The keys of a signature that are not cost figures.
_SIGNATURE_KEYS: Final = (
    "in", "out", "granularity", "accumulator", "requantize_at", "min_bits", "max_bits", "form", "fixed_out"
)  # fmt: skip


def hardware_to_document(hardware: Hardware) -> dict[str, Any]:
    """Convert hardware to the JSON document of its file; signatures without names get names."""
    signatures: dict[str, dict[str, Any]] = {}
    ops = {op: [_name(signatures, desc) for desc in descs] for op, descs in hardware.ops.items()}
    how = hardware.requantize
    document: dict[str, Any] = {
        "$schema": _SCHEMA,
        "version": HARDWARE_VERSION,
        "name": hardware.name,
        "processor": hardware.processor,
        "sources": list(hardware.sources),
        "notes": list(hardware.notes),
        "activation": _scheme(hardware.activation),
        "weight": _scheme(hardware.weight),
        "requantize": {"form": how.form} | _multiplier(how),
        "rounding": how.rounding,
        "signatures": signatures,
        "ops": ops,
        "other_ops": hardware.other_ops,
        "cost": dict(hardware.cost),
    }
    return {k: v for k, v in document.items() if v or k in ("signatures", "ops")}


def _multiplier(how: Requantize) -> dict[str, Any]:
    """The keys of the multiplier. Of forms without one, only values other than the default, which the check refuses."""
    fields: dict[str, Any] = {"multiplier_bits": how.multiplier_bits, "two_stage": how.two_stage, "search": how.search}
    fields |= {"shift_rounding": how.shift_rounding, "wide": how.wide}
    plain = Requantize()
    always = ("multiplier_bits", "two_stage") if how.form == "multiplier_shift" else ()
    return {k: v for k, v in fields.items() if k in always or v != getattr(plain, k)}


def _scheme(scheme: TensorScheme) -> dict[str, str]:
    return {"scheme": scheme.scheme, "granularity": scheme.granularity}


def _signature(desc: OpDesc) -> dict[str, Any]:
    plain = OpDesc(desc.in_dtypes, desc.out_dtype)
    body: dict[str, Any] = {"in": [d.name for d in desc.in_dtypes], "out": desc.out_dtype.name}
    if desc.groups is not None:
        of_sums = {"multiplier_bits": desc.groups.multiplier_bits, "partial": desc.groups.partial}
        body["granularity"] = {"group": desc.groups.size}
        body["granularity"] |= {k: v if isinstance(v, int) else v.name for k, v in of_sums.items() if v is not None}
    if desc.register != plain.register:
        order = {"order": desc.register.order, "bias": desc.register.bias}
        body["accumulator"] = {"dtype": desc.register.dtype.name, "overflow": desc.register.overflow}
        body["accumulator"] |= {key: value for key, value in order.items() if value is not None}
    for key in ("requantize_at", "min_bits", "max_bits", "form"):
        if getattr(desc, key) != getattr(plain, key):
            body[key] = getattr(desc, key)
    if desc.fixed_out is not None:
        body["fixed_out"] = {"scale": desc.fixed_out.scale, "zero_point": desc.fixed_out.zero_point}
    return body | dict(desc.cost)


def _name(signatures: dict[str, dict[str, Any]], desc: OpDesc) -> str:
    """The name of a signature in `signatures`, to which the signature is added if it is new."""
    body = _signature(desc)
    size = [] if desc.groups is None else [f"g{desc.groups.size}"]
    wanted = desc.name or "_".join([*body["in"], *size, "to", body["out"]])
    number, name = 1, wanted
    while signatures.setdefault(name, body) != body:
        number += 1
        name = f"{wanted}_{number}"
    return name


def hardware_hash(hardware: Hardware) -> str:
    """The SHA-256 (hex) of the facts that affect results and costs.

    The order of keys, the spelling of op names, the names of signatures, sources, notes, processor and origin do not
    count; the order of signatures does.
    """
    how = hardware.requantize
    content = {
        "version": HARDWARE_VERSION,
        "name": hardware.name,
        "activation": _scheme(hardware.activation),
        "weight": _scheme(hardware.weight),
        "requantize": [how.form, how.rounding, how.multiplier_bits, how.two_stage, *_unusual(how)],
        "other_ops": hardware.other_ops,
        "cost": {k: float(v) for k, v in hardware.cost.items()},
        "ops": {op: [_content(d) for d in descs] for op, descs in hardware.ops.items()},
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _unusual(how: Requantize) -> list[str]:
    """The fields that few hardware files have. Default values are left out, so that older hashes remain valid."""
    fields = {k: getattr(how, k) for k in ("search", "shift_rounding", "wide")}
    return [f"{k}={v}" for k, v in fields.items() if v != getattr(Requantize(), k)]


def _content(desc: OpDesc) -> list[Any]:
    fixed, register = desc.fixed_out, desc.register
    order = [] if register.order is None else [register.order, register.bias]
    return [
        [d.name for d in desc.in_dtypes],
        [desc.out_dtype.name, register.dtype.name, register.overflow, desc.requantize_at, *order],
        [desc.min_bits, desc.max_bits, desc.form, *([] if fixed is None else [float(fixed.scale), fixed.zero_point])],
        {k: float(v) for k, v in desc.cost.items()},
        *([] if desc.groups is None else [_signature(desc)["granularity"]]),
    ]


def hardware_from_document(document: Mapping[str, Any], origin: str, known_ops: Ops) -> Hardware:
    """Make the hardware that a document describes.

    Args:
        document: parsed JSON in which `check_hardware_document` finds no mistake.
        origin: the file from which it was read.
        known_ops: the ops that it may list.
    """
    descs = {name: _desc(name, body) for name, body in document["signatures"].items()}
    return Hardware(
        ops={op: tuple(descs[s] for s in listed) for op, listed in document["ops"].items()},
        name=document["name"],
        activation=TensorScheme(**document["activation"]),
        weight=TensorScheme(**document["weight"]),
        requantize=_requantize(document),
        other_ops=document["other_ops"],
        cost=dict(document.get("cost", {})),
        sources=tuple(document.get("sources", ())),
        notes=tuple(document.get("notes", ())),
        processor=document.get("processor", ""),
        origin=origin,
        known_ops=known_ops,
    )


def _requantize(document: Mapping[str, Any]) -> Requantize:
    """The arithmetic of requantization; a key that the document leaves out has the default of `Requantize`."""
    fields = {**document["requantize"], "rounding": document["rounding"]}
    if "multiplier_bits" in fields:
        fields["multiplier_bits"] = int(fields["multiplier_bits"])  # JSON may write 31.0
    return Requantize(**fields)


def _desc(name: str, body: Mapping[str, Any]) -> OpDesc:
    register, fixed, granularity = body.get("accumulator"), body.get("fixed_out"), body.get("granularity")
    limits = {k: int(body[k]) for k in ("min_bits", "max_bits") if k in body}
    return OpDesc(
        in_dtypes=body["in"],
        out_dtypes=body["out"],
        accumulator=register
        and Accumulator(
            dtype(register["dtype"]), register["overflow"], order=register.get("order"), bias=register.get("bias")
        ),
        requantize_at=body.get("requantize_at", "edge"),
        name=name,
        form=body.get("form"),
        fixed_out=fixed and FixedOut(float(fixed["scale"]), int(fixed["zero_point"])),
        groups=granularity and _groups(granularity),
        cost={k: v for k, v in body.items() if k not in _SIGNATURE_KEYS},
        **limits,
    )


def _groups(granularity: Mapping[str, Any]) -> Groups:
    bits, partial = granularity.get("multiplier_bits"), granularity.get("partial")
    return Groups(int(granularity["group"]), None if bits is None else int(bits), partial and dtype(partial))


# ---------------------------------------------------------------- finding files
#: The most mistakes that one error lists.
MOST_SHOWN: Final = 20


def available_hardware() -> tuple[str, ...]:
    """The names of the hardware that ships with hago."""
    return tuple(shipped_hardware())


def _read(name_or_path: str | os.PathLike[str]) -> tuple[str, bytes]:
    """The path of a hardware file, for messages, and its bytes."""
    text = os.fspath(name_or_path)
    is_path = not isinstance(name_or_path, str) or text.endswith(".json") or Path(text).name != text
    specs = {} if is_path else shipped_hardware()
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
    """Load hardware that ships with hago, or from a hardware file.

    Args:
        name_or_path: a name in `available_hardware()`, or the path of a JSON file (a str that ends
            in `.json` or has a folder, or any path object).
        known_ops: the ops that the file may list, e.g. `{**OPS, "my_op": RULE}`.

    Raises:
        HardwareError: there is no such file, or it is not JSON (the message says line and column), or it has
            mistakes (the message lists each with its JSON path, what was got and what is expected).
    """
    origin, data = _read(name_or_path)
    try:
        with told_from_other_kinds(data, origin, HARDWARE):
            document = _parse(data, origin)
            _refuse(origin, check_hardware_document(document, known_ops))
    except RecursionError as error:
        raise HardwareError(f"hardware file {origin!r} is nested too deeply") from error
    return hardware_from_document(document, origin, known_ops)


def check_hardware(hardware: Hardware) -> None:
    """Check hardware that was constructed in Python as if it were read from a file.

    Raises:
        HardwareError: it has mistakes; the message lists each with its path in the file that `save_hardware` would
            write.
    """
    _refuse(hardware.name, check_hardware_document(hardware_to_document(hardware), hardware.known_ops))


def _refuse(origin: str, findings: Sequence[Finding]) -> None:
    if findings:
        count = "1 mistake" if len(findings) == 1 else f"{len(findings)} mistakes"
        shown = list(map(str, findings[:MOST_SHOWN]))
        if len(findings) > MOST_SHOWN:
            shown.append(f"and {len(findings) - MOST_SHOWN} more, which are listed once these are fixed")
        raise HardwareError("\n  ".join([f"hardware {origin!r} has {count}:", *shown]))


def _parse(data: bytes, origin: str) -> Any:
    """Parse JSON, and refuse repeated keys."""
    repeated: list[tuple[dict[str, Any], str, int]] = []

    def take(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        repeated.extend((values, k, n) for k, n in Counter(k for k, _ in pairs).items() if n > 1)
        return values

    try:
        document = json.loads(data.decode("utf-8-sig"), object_pairs_hook=take)
    except json.JSONDecodeError as error:
        early = "; the file ends too early" if error.pos >= len(error.doc.rstrip()) else ""
        place = f"line {error.lineno}, column {error.colno}"
        raise HardwareError(f"hardware file {origin!r} is not JSON at {place}: {error.msg}{early}") from error
    except ValueError as error:
        raise HardwareError(f"hardware file {origin!r} is not JSON: {error}") from error
    places = {id(values): path for path, values in _objects(document)}
    _refuse(
        origin,
        [
            Finding((*places.get(id(values), ()), key), f"the key occurs {count} times; expected once")
            for values, key, count in repeated
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
    """Write hardware to a file, from which `load_hardware` reads an equal value. The file is replaced atomically.

    It names its schema, for editors, where it is written into `hardware_specs/` of the sources.

    Raises:
        HardwareError: the hardware has mistakes, or the file cannot be written.
    """
    check_hardware(hardware)
    try:
        replace_file(Path(path), _layout(_with_schema_beside(hardware_to_document(hardware), Path(path).parent)))
    except (LogError, ValueError) as error:
        raise HardwareError(f"hardware {hardware.name!r} cannot be written: {error}") from error


def _with_schema_beside(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The document without the path of its schema, which editors read, where there is none beside the folder."""
    return {k: v for k, v in document.items() if k != "$schema" or (folder / _SCHEMA).is_file()}


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
