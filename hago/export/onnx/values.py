"""Tensors of an ONNX file that stand for values of a Plan, and the nodes that quantize, dequantize and requantize them.

A value is represented as real numbers (float32), as stored integers (in its ONNX dtype, zero point included), or as
centered integers (zero point subtracted, in float32, where ONNX has no operator on wider integers). The integers that
the nodes compute are those of `hago.arithmetic.numerics`, bit for bit. N1, N2 and so on are the equations of
docs/numerics.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from hago.arithmetic.groups import in_groups
from hago.arithmetic.numerics import Requantize, ratio, ratio_of_float32
from hago.arithmetic.types import DType, QParams, SimQ
from hago.export.onnx.writer import MICROSOFT, NARROW_AND_WIDE_OPSET, GraphWriter
from hago.plan.topology import varies_along

#: The ONNX nodes that round a float64 in each mode, in order; Add and Sub take one half.
ROUNDING_NODES: Final = {
    "half_even": ("Round",),
    "half_up": ("Add", "Floor"),
    "half_down": ("Sub", "Ceil"),
    "floor": ("Floor",),
}

#: The forms of `Requantize` that ONNX nodes compute: by a float32 factor, or for `shift` by a power of two in float64.
REQUANTIZE_FORMS: Final = frozenset({"float32", "onnxruntime", "shift"})


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the ONNX file that stands for a value of the Plan.

    Args:
        name: of the tensor.
        representation: real numbers, stored integers, or centered integers in float32.
        qparams: scale, zero point and range of the integers; None for real numbers.
        label: the prefix of the names of its scale and zero point, if it differs from `name`: a node that only changes
            the scale writes no ONNX node, so its value is the tensor of its operand, at another scale.
    """

    name: str
    representation: Literal["real", "stored", "centered"]
    qparams: QParams | None = None
    label: str = ""

    @property
    def dtype(self) -> DType:
        """The dtype of the integers."""
        assert self.qparams is not None
        return self.qparams.dtype


def quantizes_to(dtype: DType) -> bool:
    """Whether QuantizeLinear can write integers of this dtype."""
    return dtype.bits <= 16


def numpy_dtype(dtype: DType) -> Any:
    """The numpy dtype of stored integers: the smallest that ONNX has, e.g. int8 for int5 and int32 for int24."""
    bits = next(n for n in (8, 16, 32, 64) if dtype.bits <= n)
    return np.dtype(f"int{bits}" if dtype.signed else f"uint{bits}")


def element_type_of(writer: GraphWriter, node: str, value: Value) -> int:
    """The ONNX element type of a value's tensor; of a real value, that of the node, e.g. int64 of a size."""
    if value.representation == "real":
        return writer.element_type(writer.dtype(node))
    return writer.element_type("float32" if value.representation == "centered" else str(numpy_dtype(value.dtype)))


def multiplies_groups(q: QParams) -> bool:
    """Whether MatMulNBits takes a weight with these groups: up to 4 bits, in groups of a power of two from 16 on."""
    return q.group is not None and q.dtype.bits <= 4 and q.group >= 16 and q.group & (q.group - 1) == 0


def _packed_pairs(values: Tensor) -> Tensor:
    """Numbers of 4 bits as bytes of two neighbours of the last axis, the first in the low half."""
    pairs = values.to(torch.uint8).reshape(*values.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def axis_of(qparams: QParams, rank: int) -> int | None:
    """The axis of per-channel scales; None for a per-tensor scale."""
    axes = varies_along(qparams.scale, rank)
    return axes[0] if axes else None


class QuantizationWriter:
    """Writes scales and zero points, and the nodes that quantize, dequantize and requantize.

    Made by a ModelBuilder, and called for every integer value.

    Args:
        writer: the graph to append to.
        requantization: the form and the rounding of the hardware.
    """

    def __init__(self, writer: GraphWriter, requantization: Requantize) -> None:
        self.writer, self.requantization = writer, requantization

    def parameters(self, name: str, q: QParams) -> list[str]:
        """The names of the scale and the zero point of the tensor `name`."""
        kind = numpy_dtype(q.dtype)
        scale = q.scale.to(torch.float32).flatten() if q.per_channel else q.scale.to(torch.float32).reshape(())
        zero = np.broadcast_to(q.zero_point.numpy().astype(kind).flatten(), scale.shape or (1,)).reshape(scale.shape)
        if kind.itemsize == 2:
            self.writer.need(NARROW_AND_WIDE_OPSET)
        return [self.writer.constant(f"{name}:scale", scale), self.writer.constant(f"{name}:zero", np.array(zero))]

    def constant(
        self, name: str, centered: Tensor, q: QParams, shape: tuple[int, ...] | None = None, packed: bool = False
    ) -> Value:
        """Constant integers.

        Args:
            centered: the integers, zero point subtracted.
            shape: to give them; their own where None.
            packed: store int4 and uint4 as ONNX's types of 4 bits, two to a byte.
        """
        stored = (centered.to(torch.int64) + q.zero_point).numpy().astype(numpy_dtype(q.dtype))
        narrow = packed and q.dtype.name in ("int4", "uint4")
        kind = q.dtype.name.upper() if narrow else ""
        self.writer.constant(name, stored if shape is None else stored.reshape(shape), kind)
        if narrow:
            self.writer.need(NARROW_AND_WIDE_OPSET)
            shape = (q.scale.numel(),) if q.per_channel else ()
            zero = q.zero_point.flatten().expand(shape) if shape else q.zero_point.reshape(())
            # written first, so that `parameters` keeps this one, whose type is that of the integers
            self.writer.constant(f"{name}:zero", zero, kind)
        return Value(name, "stored", q)

    def dequantize_groups(self, name: str, centered: Tensor, q: QParams, out: str) -> str:
        """Real values of a weight whose groups have scales of their own, from blocks of the opset's DequantizeLinear.

        A block is of neighbouring entries of one axis, so that the integers have the shape (channels, entries of one).

        Args:
            centered: the integers, zero point subtracted, in the shape of the weight.
        """
        assert q.group is not None
        rows, kind = centered.flatten(1), q.dtype.name.upper() if q.dtype.name in ("int4", "uint4") else ""
        dtype = numpy_dtype(q.dtype)
        stored = (rows.to(torch.int64) + q.spread_over(rows.shape).zero_point).numpy().astype(dtype)
        self.writer.need(NARROW_AND_WIDE_OPSET)
        inputs = [
            self.writer.constant(name, stored, kind),
            self.writer.constant(f"{name}:scale", q.scale.to(torch.float32)),
            self.writer.constant(f"{name}:zero", q.zero_point.numpy().astype(dtype), kind),
        ]
        size = min(q.group, rows.shape[1])
        if centered.ndim == 2:
            return self.writer.op("DequantizeLinear", inputs, out, axis=1, block_size=size)
        real = self.writer.step("DequantizeLinear", inputs, out, axis=1, block_size=size)
        return self.writer.op("Reshape", [real, self.writer.integers(centered.shape, out)], out)

    def matmul_by_groups(self, x: str, name: str, centered: Tensor, q: QParams, out: str) -> str:
        """The product of rows and a weight whose groups have scales of their own: ONNX Runtime's MatMulNBits, with
        sums in float32.

        Args:
            x: the name of real values (..., entries of a channel).
            centered: the integers (channels, entries), zero point subtracted; see `multiplies_groups`.

        References:
            ONNX Runtime, docs/ContribOperators.md, com.microsoft.MatMulNBits.
        """
        assert q.group is not None
        channels, entries = centered.shape
        # an unsigned byte holds two neighbouring entries, the first in its low half; a zero point is 8 if none is given
        middle = 8 if q.dtype.signed else 0
        zero = q.zero_point + middle
        stored = centered.to(torch.int64) + q.spread_over(centered.shape).zero_point + middle
        blocks = in_groups(stored, q.group).to(torch.uint8)
        inputs = [x, self.writer.constant(name, _packed_pairs(blocks))]
        inputs.append(self.writer.constant(f"{name}:scale", q.scale.to(torch.float32).flatten()))
        if bool((zero != 8).any()):
            inputs.append(self.writer.constant(f"{name}:zero", _packed_pairs(in_groups(zero, 2).flatten(1)).flatten()))
        kind, size = "MatMulNBits", q.group
        return self.writer.op(
            kind, inputs, out, MICROSOFT, K=entries, N=channels, bits=4, block_size=size, accuracy_level=1
        )

    def dequantize(self, value: Value, rank: int, out: str) -> str:
        """Real values of stored or centered integers  (N2)."""
        q = value.qparams
        assert q is not None
        if value.representation == "centered":
            scale = self.writer.constant(f"{out}:scale", q.scale.to(torch.float32))
            return self.writer.op("Mul", [value.name, scale], out)
        axis = axis_of(q, rank)
        return self.writer.op(
            "DequantizeLinear", [value.name, *self.parameters(value.label or value.name, q)], out, axis=axis
        )

    def quantize(self, real: str, q: QParams, rank: int, out: str) -> Value:
        """Stored integers of real values  (N1)."""
        if self.requantization.rounding == "half_even" and quantizes_to(q.dtype):
            return self._clipped(real, q, rank, out)
        scale = self.writer.constant(f"{out}:scale", q.scale.to(torch.float32))
        return self._store(self.writer.step("Div", [real, scale], out), q, out)

    def requantize(self, value: Value, simq: SimQ, out: str, centered: bool = False) -> Value:
        """Integers at one scale as integers at another  (N3, N6, N10).

        Args:
            centered: leave them centered in float32.
        """
        source, target = simq.source, simq.target
        assert source is not None and target is not None
        c = self.centered(value, out)
        m = self.multiplier(source, target)
        if m.dtype == torch.float64:
            c = self.writer.step("Cast", [c], out, to=self.writer.element_type("float64"))
        scaled = self.writer.step("Mul", [c, self.writer.constant(f"{out}:multiplier", m)], out)
        if centered:
            return self._center(scaled, target, out)
        return self._store(scaled, target, out)

    def multiplier(self, source: QParams, target: QParams) -> Tensor:
        """The factor from one scale to another: a power of two in float64 for the form `shift`, else a float32."""
        if self.requantization.form == "onnxruntime":
            return ratio_of_float32(source, target)
        return ratio(source, target).to(torch.float64 if self.requantization.form == "shift" else torch.float32)

    def centered(self, value: Value, out: str) -> str:
        """The tensor that holds a value as centered integers in float32."""
        if value.representation == "centered":
            return value.name
        q = value.qparams
        assert q is not None
        c = self.writer.step("Cast", [value.name], out, to=self.writer.element_type("float32"))
        if not bool(q.zero_point.any()):
            return c
        zero = self.writer.constant(self.writer.fresh(f"{out}:centre"), q.zero_point.to(torch.float32))
        return self.writer.step("Sub", [c, zero], out)

    def store(self, value: Value, out: str) -> Value:
        """Stored integers of centered ones that lie within the range of their qparams."""
        assert value.qparams is not None
        return self._store(value.name, value.qparams, out)

    # ------------------------------------------------------------ rounding and clipping
    def _clipped(self, x: str, q: QParams, rank: int, out: str, label: str = "") -> Value:
        """QuantizeLinear, and a Clip where the range of the integers is narrower than that of the ONNX dtype."""
        narrow = (q.qmin, q.qmax) != (np.iinfo(numpy_dtype(q.dtype)).min, np.iinfo(numpy_dtype(q.dtype)).max)
        parameters = self.parameters(label or out, q)
        if not narrow:
            self.writer.op("QuantizeLinear", [x, *parameters], out, axis=axis_of(q, rank))
        elif numpy_dtype(q.dtype).itemsize == 1:
            whole = self.writer.step("QuantizeLinear", [x, *parameters], out, axis=axis_of(q, rank))
            limits = [self.writer.number(v, out, str(numpy_dtype(q.dtype))) for v in (q.qmin, q.qmax)]
            self.writer.op("Clip", [whole, *limits], out)
        else:  # Clip takes no int16, so the real values are clipped
            ends = [((v - q.zero_point) * q.scale).to(torch.float32) for v in (q.qmin, q.qmax)]
            low, high = (self.writer.constant(f"{out}:{n}", v) for n, v in zip(("low", "high"), ends, strict=True))
            inside = self.writer.step("Min", [self.writer.step("Max", [x, low], out), high], out)
            self.writer.op("QuantizeLinear", [inside, *parameters], out, axis=axis_of(q, rank))
        return Value(out, "stored", q)

    def _store(self, x: str, q: QParams, out: str) -> Value:
        """Round, clip, add the zero point, cast."""
        # QuantizeLinear rounds half to even and takes float32; products of the form `shift` are float64
        if (
            self.requantization.rounding == "half_even"
            and self.requantization.form != "shift"
            and quantizes_to(q.dtype)
        ):
            one = QParams(torch.ones((), dtype=torch.float64), q.zero_point, q.qmin, q.qmax, q.dtype)
            return replace(self._clipped(x, one, 0, out, f"{out}:unit"), qparams=q)
        c = self._limited(self._rounded(x, out), q, out)
        zero = self.writer.constant(f"{out}:zero64", q.zero_point.to(torch.float64))
        shifted = self.writer.step("Add", [c, zero], out)
        self.writer.op("Cast", [shifted], out, to=self.writer.element_type(str(numpy_dtype(q.dtype))))
        return Value(out, "stored", q)

    def _center(self, x: str, q: QParams, out: str) -> Value:
        """Round, clip, cast to float32."""
        c = self._limited(self._rounded(x, out), q, out)
        self.writer.op("Cast", [c], out, to=self.writer.element_type("float32"))
        return Value(out, "centered", q)

    def _rounded(self, x: str, out: str) -> str:
        """Round in float64, where adding one half to a float32 is exact."""
        x = self.writer.step("Cast", [x], out, to=self.writer.element_type("float64"))
        for kind in ROUNDING_NODES[self.requantization.rounding]:
            half = [self.writer.number(0.5, out, "float64")] if kind in ("Add", "Sub") else []
            x = self.writer.step(kind, [x, *half], out)
        return x

    def _limited(self, c: str, q: QParams, out: str) -> str:
        """Clip centered integers to the range of their qparams."""
        for kind, limit in (("Max", q.qmin), ("Min", q.qmax)):
            end = self.writer.constant(self.writer.fresh(f"{out}:limit"), (limit - q.zero_point).to(torch.float64))
            c = self.writer.step(kind, [c, end], out)
        return c
