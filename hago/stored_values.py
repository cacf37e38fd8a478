"""Stored values: what a Plan is made of as JSON values, with the large tensors aside.

A closed set of types: JSON's own, tuples, mappings, tensors, dtypes, QParams, SimQ and the hardware's
Requantize. What JSON has no form for is an object with the key "hago". Invariants: `Reader` gives back
what `Writer` was given, dtypes, shapes and float bits included; QParams and scales that were one object
are one object again, since a Plan tells by identity what needs no requantization.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

import torch
from torch import Tensor

from hago.errors import HagoError
from hago.numerics import Requantize
from hago.ops._tpu_mlir import RECORDS
from hago.packing import Packed, pack, unpack
from hago.tensor_file import RESERVED, dtype_name, storable, storable_dtype
from hago.types import DType, QParams, SimQ
from hago.types import dtype as named_dtype

#: Tensors of at most so many elements stand in the JSON itself.
SMALL: Final = 16
#: Records that attributes of operators hold, by name.
_RECORDS: Final = {kind.__name__: kind for kind in RECORDS}
_TAG: Final = "hago"
_NOT_FINITE: Final = ("nan", "inf", "-inf")


class Writer:
    """Turns values into JSON values; lives while one document is written.

    Attributes:
        tensors: what stands aside, by name.
        scales, qparams: what values refer to by number, as JSON values.
    """

    def __init__(self, requantize: Requantize) -> None:
        self._requantize = requantize
        self.tensors: dict[str, Tensor] = {}
        self.scales: list[Any] = []
        self.qparams: list[Any] = []
        self._numbers: dict[tuple[str, int], tuple[int, object]] = {}  # holding the object keeps its id
        self._stored: dict[tuple[str, bytes], str] = {}

    def __call__(self, value: Any, name: str) -> Any:
        """The JSON values of a value.

        Args:
            name: what a tensor would be called in the file.

        Raises:
            HagoError: a value of another type.
        """
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {_TAG: "float", "is": str(value)}
        if isinstance(value, list):
            return [self(v, f"{name}.{i}") for i, v in enumerate(value)]
        if isinstance(value, tuple):
            return {_TAG: "tuple", "items": [self(v, f"{name}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, Mapping):
            return self._mapping(value, name)
        return self._object(value, name)

    def _mapping(self, value: Mapping[Any, Any], name: str) -> Any:
        if _TAG not in value and all(isinstance(k, str) for k in value):
            return {k: self(v, f"{name}.{k}") for k, v in value.items()}
        return {_TAG: "mapping", "items": [[self(k, name), self(v, f"{name}.{k}")] for k, v in value.items()]}

    def _object(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, DType):
            return {_TAG: "dtype", "name": value.name}
        if isinstance(value, QParams):
            return {_TAG: "qparams", "number": self.number(value)}
        if isinstance(value, SimQ):
            return {_TAG: "simq", "source": self(value.source, name), "target": self(value.target, name)}
        if type(value) in _RECORDS.values():
            held = {f.name: self(getattr(value, f.name), f"{name}.{f.name}") for f in fields(value)}
            return {_TAG: "record", "type": type(value).__name__, "fields": held}
        if isinstance(value, Requantize) and value == self._requantize:
            return {_TAG: "requantize"}
        raise HagoError(f"{name} is a {type(value).__name__}, which cannot be stored")

    def number(self, qparams: QParams) -> int:
        """The number of qparams, entered at first sight."""
        return self._numbered("qparams", self.qparams, qparams, lambda: self._qparams(qparams))

    def _qparams(self, q: QParams) -> Any:
        name = f"qparams.{len(self.qparams)}"
        scale = self._numbered("scales", self.scales, q.scale, lambda: self._tensor(q.scale, f"{name}.scale"))
        zero = self._tensor(q.zero_point, f"{name}.zero_point")
        return {"scale": scale, "zero_point": zero, "qmin": q.qmin, "qmax": q.qmax, "dtype": q.dtype.name}

    def _numbered(self, kind: str, table: list[Any], value: object, make: Callable[[], Any]) -> int:
        found = self._numbers.get((kind, id(value)))
        if found is None:
            made = make()
            found = self._numbers[kind, id(value)] = (len(table), value)
            table.append(made)
        return found[0]

    # ------------------------------------------------------------ tensors
    def _tensor(self, t: Tensor, name: str) -> Any:
        if not storable(t.dtype) or t.device.type == "meta":
            raise HagoError(f"{name} is a tensor of {t.dtype} on {t.device}, which cannot be stored")
        t = t.detach().cpu()
        said: dict[str, Any] = {_TAG: "tensor", "dtype": dtype_name(t.dtype), "shape": list(t.shape)}
        if t.numel() <= SMALL:
            return said | {"values": [self(v, name) for v in t.flatten().tolist()]}
        if t.is_floating_point() or t.dtype == torch.bool:
            order = _order(t)
            kept = t.permute(order).contiguous()
            if kept.dtype == torch.float64 and torch.equal(kept.to(torch.float32).to(torch.float64), kept):
                kept = kept.to(torch.float32)
            said |= {"order": order} if order != sorted(order) else {}
            return said | {"at": self._keep(kept, name)}
        packed = pack(t)
        said |= {} if packed.bits is None else {"bits": packed.bits, "offset": packed.offset}
        return said | {"at": self._keep(packed.data, name)}

    def _keep(self, t: Tensor, name: str) -> str:
        """The name under which the content stands in the file; equal content stands there once."""
        key = (str(t.dtype), hashlib.sha256(t.flatten().view(torch.uint8).numpy().tobytes()).digest())
        if key not in self._stored:
            taken, number = name, 1
            while taken in self.tensors or taken == RESERVED:
                number += 1
                taken = f"{name}~{number}"
            self.tensors[taken] = t
            self._stored[key] = taken
        return self._stored[key]


def _order(t: Tensor) -> list[int]:
    """The axes as they lie in memory: float kernels, and so float results, may depend on it."""
    if t.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(t):
        return list(range(t.ndim))
    return sorted(range(t.ndim), key=t.stride, reverse=True)


class Reader:
    """Turns the JSON values of a Writer back; lives while one document is read.

    Raises:
        HagoError: what no Writer writes. Values of a wrong type may raise KeyError, TypeError,
            IndexError or ValueError.
    """

    def __init__(self, tensors: Mapping[str, Tensor], requantize: Requantize) -> None:
        self._tensors, self._requantize = tensors, requantize
        self._qparams: list[QParams] = []
        self._read: dict[str, Callable[[Any], Any]] = {
            "float": lambda v: _not_finite(v["is"]),
            "tuple": lambda v: tuple(map(self, v["items"])),
            "mapping": lambda v: {self(k): self(x) for k, x in v["items"]},
            "tensor": self._tensor,
            "dtype": lambda v: named_dtype(v["name"]),
            "qparams": lambda v: self.qparams(v["number"]),
            "simq": lambda v: SimQ(self(v["source"]), self(v["target"])),
            "requantize": lambda v: self._requantize,
            "record": lambda v: _RECORDS[v["type"]](**self(v["fields"])),
        }

    def enter(self, scales: list[Any], qparams: list[Any]) -> None:
        """Take in the tables that values refer to by number."""
        made = [self(s) for s in scales]
        for q in qparams:
            dtype, zero = named_dtype(q["dtype"]), self(q["zero_point"])
            whole = type(q["qmin"]) is type(q["qmax"]) is int and dtype.is_int and zero.dtype == torch.int64
            if not whole or not dtype.min <= q["qmin"] <= q["qmax"] <= dtype.max:
                raise HagoError(f"integers from {q['qmin']} to {q['qmax']} in {dtype}, zero points in {zero.dtype}")
            if not bool(((zero >= dtype.min) & (zero <= dtype.max)).all()):
                raise HagoError(f"a zero point that {dtype} does not hold; expected {dtype.min} to {dtype.max}")
            scale = made[_index(q["scale"], made)]
            if scale.dtype != torch.float64 or not bool(((scale > 0) & scale.isfinite()).all()):
                raise HagoError("a scale that is not positive and finite, or not in float64")
            self._qparams.append(QParams(scale, zero, q["qmin"], q["qmax"], dtype))

    def qparams(self, number: int) -> QParams:
        """The qparams of a number."""
        return self._qparams[_index(number, self._qparams)]

    def __call__(self, value: Any) -> Any:
        """The value of JSON values."""
        if isinstance(value, list):
            return [self(v) for v in value]
        if not isinstance(value, dict):
            return value
        if _TAG not in value:
            return {k: self(v) for k, v in value.items()}
        if value[_TAG] not in self._read:
            raise HagoError(f"a value of kind {value[_TAG]!r}")
        return self._read[value[_TAG]](value)

    def _tensor(self, value: Any) -> Tensor:
        dtype, shape = storable_dtype(value["dtype"]), tuple(value["shape"])
        if "values" in value:
            return torch.tensor(self(value["values"]), dtype=dtype).reshape(shape)
        kept = self._tensors[value["at"]]
        if not dtype.is_floating_point and dtype != torch.bool:
            return unpack(Packed(kept, value.get("bits"), value.get("offset", 0)), shape, dtype)
        order = value.get("order", list(range(len(shape))))
        lying = kept.to(dtype).reshape([shape[d] for d in order])
        return lying.permute([order.index(d) for d in range(len(order))])


def _index(number: int, table: list[Any]) -> int:
    if not 0 <= number < len(table):
        raise HagoError(f"number {number} of a table of {len(table)}")
    return number


def _not_finite(text: str) -> float:
    if text not in _NOT_FINITE:
        raise HagoError(f"the number {text!r}")
    return float(text)
