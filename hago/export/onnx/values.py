"""Values of the file: what stands for each value of the plan, and how it moves from one scale to another.

A value is real (float32), stored (q in its ONNX dtype, zero point included), or carried (centered integers in
float32, where ONNX has no operator on wider integers). Everything here is exact: what it gives are the integers
of `hago.arithmetic.numerics`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from hago.arithmetic.numerics import Requantize, ratio, ratio_of_float32
from hago.arithmetic.types import DType, QParams, SimQ
from hago.export.onnx.writer import NARROW_AND_WIDE_OPSET, Writer
from hago.plan.topology import varies_along

#: onnx.TensorProto's numbers.
_KINDS: Final = {"FLOAT": 1, "UINT8": 2, "INT8": 3, "UINT16": 4, "INT16": 5, "INT32": 6, "INT64": 7}
#: How each rounding is said on float64: nodes in order; x is the value, h one half.
ROUNDED: Final = {
    "half_even": ("Round",),
    "half_up": ("Add", "Floor"),
    "half_down": ("Sub", "Ceil"),
    "floor": ("Floor",),
}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the file.

    Args:
        name: of the tensor.
        held: as real numbers, stored integers or carried (centered, float32) integers.
        qparams: what the integers mean; None for real values.
        label: what the scale and zero point are called after, where another tensor's integers are read at
            another scale.
    """

    name: str
    held: Literal["real", "stored", "carried"]
    qparams: QParams | None = None
    label: str = ""

    @property
    def dtype(self) -> DType:
        """Of the integers."""
        assert self.qparams is not None
        return self.qparams.dtype


def stored_dtype(dtype: DType) -> str:
    """The name of the ONNX type that holds a dtype of hago's: int5 rests in INT8, int24 in INT32."""
    if dtype.bits <= 8:
        return "INT8" if dtype.signed else "UINT8"
    if dtype.bits <= 16:
        return "INT16" if dtype.signed else "UINT16"
    return "INT32" if dtype.bits <= 32 else "INT64"


def quantizes_to(dtype: DType) -> bool:
    """Whether QuantizeLinear can write it."""
    return dtype.bits <= 16


def numpy_dtype(dtype: DType) -> Any:
    """The numpy type of stored integers."""
    return np.dtype(stored_dtype(dtype).lower())


def kind_of_value(writer: Writer, node: str, value: Value) -> int:
    """The ONNX element type of its tensor; of a real value that of the node's, e.g. int64 of a size."""
    if value.held == "stored":
        return _KINDS[stored_dtype(value.dtype)]
    return writer.kind_of(writer.dtypes[node]) if value.held == "real" else _KINDS["FLOAT"]


def axis_of(qparams: QParams, rank: int) -> int | None:
    """The axis that scales vary along; None for one scale."""
    axes = varies_along(qparams.scale, rank)
    return axes[0] if axes else None


class Scales:
    """Writes scales and zero points, and the nodes that quantize, dequantize and requantize.

    Args:
        how: the hardware's requantization.
    """

    def __init__(self, writer: Writer, how: Requantize) -> None:
        self.w, self.how = writer, how

    def parameters(self, name: str, q: QParams) -> list[str]:
        """The names of the scale and the zero point for the tensor `name`."""
        kind = numpy_dtype(q.dtype)
        scale = q.scale.to(torch.float32).flatten() if q.per_channel else q.scale.to(torch.float32).reshape(())
        zero = np.broadcast_to(q.zero_point.numpy().astype(kind).flatten(), scale.shape or (1,)).reshape(scale.shape)
        if q.dtype.bits == 16 or kind.itemsize == 2:
            self.w.need(NARROW_AND_WIDE_OPSET)
        found = [self.w.constant(f"{name}:scale", scale)]
        return [*found, self.w.constant(f"{name}:zero", np.array(zero))]

    def constant(
        self, name: str, centered: Tensor, q: QParams, shape: tuple[int, ...] | None = None, packed: bool = False
    ) -> Value:
        """Constant integers, in their own shape or another; int4 and uint4 are packed two to a byte where `packed`."""
        stored = (centered.to(torch.int64) + q.zero_point).numpy().astype(numpy_dtype(q.dtype))
        narrow = packed and q.dtype.name in ("int4", "uint4")
        kind = q.dtype.name.upper() if narrow else ""
        self.w.constant(name, stored if shape is None else stored.reshape(shape), kind)
        if narrow:
            self.w.need(NARROW_AND_WIDE_OPSET)
            shape = (q.scale.numel(),) if q.per_channel else ()
            zero = q.zero_point.flatten().expand(shape) if shape else q.zero_point.reshape(())
            self.w.constant(f"{name}:zero", zero, kind)
        return Value(name, "stored", q)

    def dequantize(self, value: Value, rank: int, out: str) -> str:
        """Real values of stored or carried ones  (N2)."""
        q = value.qparams
        assert q is not None
        if value.held == "carried":
            scale = self.w.constant(f"{out}:scale", q.scale.to(torch.float32))
            return self.w.op("Mul", [value.name, scale], out)
        axis = axis_of(q, rank)
        return self.w.op(
            "DequantizeLinear", [value.name, *self.parameters(value.label or value.name, q)], out, axis=axis
        )

    def quantize(self, real: str, q: QParams, rank: int, out: str) -> Value:
        """Stored integers of real values  (N1)."""
        if self.how.rounding == "half_even" and quantizes_to(q.dtype):
            return self._clipped(real, q, rank, out)
        scale = self.w.constant(f"{out}:scale", q.scale.to(torch.float32))
        return self._store(self.w.step("Div", [real, scale], out), q, out)

    def requantize(self, value: Value, simq: SimQ, out: str, carried: bool = False) -> Value:
        """Integers at one scale as integers at another  (N3, N6, N10).

        Args:
            carried: leave them centered in float32.
        """
        source, target = simq.source, simq.target
        assert source is not None and target is not None
        c = self.centered(value, out)
        m = self.multiplier(source, target)
        if m.dtype == torch.float64:
            c = self.w.step("Cast", [c], out, to=self.w.kind_of("float64"))
        moved = self.w.step("Mul", [c, self.w.constant(f"{out}:multiplier", m)], out)
        if carried:
            return self._carry(moved, target, out)
        return self._store(moved, target, out)

    def multiplier(self, source: QParams, target: QParams) -> Tensor:
        """What a centered integer is multiplied by: float64 where it is a power of two, else float32."""
        if self.how.form == "onnxruntime":
            return ratio_of_float32(source, target)
        return ratio(source, target).to(torch.float64 if self.how.form == "shift" else torch.float32)

    def centered(self, value: Value, out: str) -> str:
        """A value as centered integers in float32."""
        if value.held == "carried":
            return value.name
        q = value.qparams
        assert q is not None
        c = self.w.step("Cast", [value.name], out, to=self.w.kind_of("float32"))
        if not bool(q.zero_point.any()):
            return c
        zero = self.w.constant(self.w.fresh(f"{out}:centre"), q.zero_point.to(torch.float32))
        return self.w.step("Sub", [c, zero], out)

    def store(self, carried: Value, out: str) -> Value:
        """Carried integers, inside the range of their qparams, as stored ones."""
        assert carried.qparams is not None
        return self._store(carried.name, carried.qparams, out)

    # ------------------------------------------------------------ the one rounding of each
    def _clipped(self, x: str, q: QParams, rank: int, out: str, label: str = "") -> Value:
        """QuantizeLinear, and a Clip where fewer integers are allowed than the dtype has."""
        narrow = (q.qmin, q.qmax) != (np.iinfo(numpy_dtype(q.dtype)).min, np.iinfo(numpy_dtype(q.dtype)).max)
        parameters = self.parameters(label or out, q)
        if not narrow:
            self.w.op("QuantizeLinear", [x, *parameters], out, axis=axis_of(q, rank))
        elif numpy_dtype(q.dtype).itemsize == 1:
            whole = self.w.step("QuantizeLinear", [x, *parameters], out, axis=axis_of(q, rank))
            limits = [self.w.number(v, out, str(numpy_dtype(q.dtype))) for v in (q.qmin, q.qmax)]
            self.w.op("Clip", [whole, *limits], out)
        else:  # Clip takes no int16: cut the real values at the last integers
            ends = [((v - q.zero_point) * q.scale).to(torch.float32) for v in (q.qmin, q.qmax)]
            low, high = (self.w.constant(f"{out}:{n}", v) for n, v in zip(("low", "high"), ends, strict=True))
            inside = self.w.step("Min", [self.w.step("Max", [x, low], out), high], out)
            self.w.op("QuantizeLinear", [inside, *parameters], out, axis=axis_of(q, rank))
        return Value(out, "stored", q)

    def _store(self, x: str, q: QParams, out: str) -> Value:
        """Round, clip, add the zero point, cast."""
        if self.how.rounding == "half_even" and self.how.form != "shift" and quantizes_to(q.dtype):
            one = QParams(torch.ones((), dtype=torch.float64), q.zero_point, q.qmin, q.qmax, q.dtype)
            return replace(self._clipped(x, one, 0, out, f"{out}:unit"), qparams=q)
        c = self._limited(self._rounded(x, out), q, out)
        zero = self.w.constant(f"{out}:zero64", q.zero_point.to(torch.float64))
        shifted = self.w.step("Add", [c, zero], out)
        self.w.op("Cast", [shifted], out, to=self.w.kind_of(str(numpy_dtype(q.dtype))))
        return Value(out, "stored", q)

    def _carry(self, x: str, q: QParams, out: str) -> Value:
        c = self._limited(self._rounded(x, out), q, out)
        self.w.op("Cast", [c], out, to=self.w.kind_of("float32"))
        return Value(out, "carried", q)

    def _rounded(self, x: str, out: str) -> str:
        """In float64, where adding one half is exact for every float32."""
        x = self.w.step("Cast", [x], out, to=self.w.kind_of("float64"))
        for kind in ROUNDED[self.how.rounding]:
            half = [self.w.number(0.5, out, "float64")] if kind in ("Add", "Sub") else []
            x = self.w.step(kind, [x, *half], out)
        return x

    def _limited(self, c: str, q: QParams, out: str) -> str:
        for kind, limit in (("Max", q.qmin), ("Min", q.qmax)):
            edge = self.w.constant(self.w.fresh(f"{out}:limit"), (limit - q.zero_point).to(torch.float64))
            c = self.w.step(kind, [c, edge], out)
        return c
