"""Hardware as a JSON document and back, and its hash.

Invariant: `from_document(to_document(h)) == h` for every hardware that `check_document` accepts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from hago.hardware import Accumulator, FixedOut, Hardware, OpDesc, TensorScheme
from hago.numerics import Requantize
from hago.ops import Ops
from hago.types import dtype

VERSION: Final = 1
_SCHEMA: Final = "../hago/schemas/hardware.schema.json"
#: Keys of a signature that are no cost figures.
_SIGNATURE_KEYS: Final = ("in", "out", "accumulator", "requantize_at", "min_bits", "max_bits", "form", "fixed_out")


def to_document(hardware: Hardware) -> dict[str, Any]:
    """The hardware as the JSON that a file holds; a signature without a name is given one."""
    signatures: dict[str, dict[str, Any]] = {}
    ops = {op: [_name(signatures, desc) for desc in descs] for op, descs in hardware.ops.items()}
    how = hardware.requantize
    document: dict[str, Any] = {
        "$schema": _SCHEMA,
        "version": VERSION,
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
    """What the form says of its multiplier; for other forms what differs from the default, to be refused."""
    said: dict[str, Any] = {"multiplier_bits": how.multiplier_bits, "two_stage": how.two_stage, "search": how.search}
    said |= {"shift_rounding": how.shift_rounding, "wide": how.wide}
    plain = Requantize()
    always = ("multiplier_bits", "two_stage") if how.form == "multiplier_shift" else ()
    return {k: v for k, v in said.items() if k in always or v != getattr(plain, k)}


def _scheme(scheme: TensorScheme) -> dict[str, str]:
    return {"scheme": scheme.scheme, "granularity": scheme.granularity}


def _signature(desc: OpDesc) -> dict[str, Any]:
    plain = OpDesc(desc.in_dtypes, desc.out_dtype)
    body: dict[str, Any] = {"in": [d.name for d in desc.in_dtypes], "out": desc.out_dtype.name}
    if desc.register != plain.register:
        said = {"order": desc.register.order, "bias": desc.register.bias}
        body["accumulator"] = {"dtype": desc.register.dtype.name, "overflow": desc.register.overflow}
        body["accumulator"] |= {key: value for key, value in said.items() if value is not None}
    for key in ("requantize_at", "min_bits", "max_bits", "form"):
        if getattr(desc, key) != getattr(plain, key):
            body[key] = getattr(desc, key)
    if desc.fixed_out is not None:
        body["fixed_out"] = {"scale": desc.fixed_out.scale, "zero_point": desc.fixed_out.zero_point}
    return body | dict(desc.cost)


def _name(signatures: dict[str, dict[str, Any]], desc: OpDesc) -> str:
    """The name of a signature in the file, which is entered there if it is new."""
    body = _signature(desc)
    wanted = desc.name or "_".join([*body["in"], "to", body["out"]])
    number, name = 1, wanted
    while signatures.setdefault(name, body) != body:
        number += 1
        name = f"{wanted}_{number}"
    return name


def hardware_hash(hardware: Hardware) -> str:
    """sha256 (hex) of what the hardware is and can do.

    Order of keys, spelling of op names, names of signatures, sources, notes, processor and the file it came
    from do not count; preference does.
    """
    how = hardware.requantize
    content = {
        "version": VERSION,
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
    """What only some hardware says: left out of the hash where it is not said, so that hashes last."""
    said = {k: getattr(how, k) for k in ("search", "shift_rounding", "wide")}
    return [f"{k}={v}" for k, v in said.items() if v != getattr(Requantize(), k)]


def _content(desc: OpDesc) -> list[Any]:
    fixed, register = desc.fixed_out, desc.register
    order = [] if register.order is None else [register.order, register.bias]
    return [
        [d.name for d in desc.in_dtypes],
        [desc.out_dtype.name, register.dtype.name, register.overflow, desc.requantize_at, *order],
        [desc.min_bits, desc.max_bits, desc.form, *([] if fixed is None else [float(fixed.scale), fixed.zero_point])],
        {k: float(v) for k, v in desc.cost.items()},
    ]


def from_document(document: Mapping[str, Any], origin: str, known_ops: Ops) -> Hardware:
    """The hardware that a document without findings describes.

    Args:
        document: parsed JSON that `check_document` found nothing in.
        origin: the file that it was read from.
        known_ops: the ops that it may list.
    """
    descs = {name: _desc(name, body) for name, body in document["signatures"].items()}
    how = document["requantize"]
    return Hardware(
        ops={op: tuple(descs[s] for s in listed) for op, listed in document["ops"].items()},
        name=document["name"],
        activation=TensorScheme(**document["activation"]),
        weight=TensorScheme(**document["weight"]),
        requantize=Requantize(
            form=how["form"],
            rounding=document["rounding"],
            multiplier_bits=int(how.get("multiplier_bits", 31)),
            two_stage=how.get("two_stage", False),
            search=how.get("search", "nearest"),
            shift_rounding=how.get("shift_rounding"),
            wide=how.get("wide"),
        ),
        other_ops=document["other_ops"],
        cost=dict(document.get("cost", {})),
        sources=tuple(document.get("sources", ())),
        notes=tuple(document.get("notes", ())),
        processor=document.get("processor", ""),
        origin=origin,
        known_ops=known_ops,
    )


def _desc(name: str, body: Mapping[str, Any]) -> OpDesc:
    register, fixed = body.get("accumulator"), body.get("fixed_out")
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
        cost={k: v for k, v in body.items() if k not in _SIGNATURE_KEYS},
        **limits,
    )
