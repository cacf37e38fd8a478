"""The frozen values that all packages share: DType, Edge, QParams, SimQ.

Invariants: a scale is a positive float64 tensor that broadcasts against its value; scales that come from thresholds
are exact in float32, so that products of two are exact in float64; `real = (q - zero_point) * scale`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor

from hago.arithmetic.groups import spread
from hago.errors import HagoError, did_you_mean, shortened

Kind = Literal["int", "uint", "float"]


@dataclass(frozen=True, slots=True)
class DType:
    """A storage dtype.

    Args:
        name: the name in hardware files, strategies and logs.
        bits: the number of bits, sign included.
        torch: the dtype of the torch tensors that hold the values; wider than `bits` if torch has no such dtype.

    Attributes:
        min, max: the range of the integers that it holds.
    """

    name: str
    bits: int
    kind: Kind
    torch: torch.dtype

    @property
    def is_int(self) -> bool:
        return self.kind != "float"

    @property
    def signed(self) -> bool:
        return self.kind != "uint"

    @property
    def min(self) -> int:
        return -(1 << (self.bits - 1)) if self.kind == "int" else 0

    @property
    def max(self) -> int:
        return (1 << (self.bits - (1 if self.kind == "int" else 0))) - 1

    def __str__(self) -> str:
        return self.name


def _dtypes() -> dict[str, DType]:
    dtypes = [DType(f"int{b}", b, "int", torch.int8) for b in range(2, 9)]
    dtypes += [DType(f"uint{b}", b, "uint", torch.uint8) for b in range(2, 9)]
    dtypes += [
        DType("int16", 16, "int", torch.int16),
        DType("uint16", 16, "uint", torch.int32),
        DType("int24", 24, "int", torch.int32),
        DType("int32", 32, "int", torch.int32),
        DType("int40", 40, "int", torch.int64),
        DType("int64", 64, "int", torch.int64),
        DType("float32", 32, "float", torch.float32),
        DType("float16", 16, "float", torch.float16),
        DType("bfloat16", 16, "float", torch.bfloat16),
    ]
    return {d.name: d for d in dtypes}


DTYPES: Final[dict[str, DType]] = _dtypes()


def dtype(name: str) -> DType:
    """The DType called `name`.

    Raises:
        HagoError: there is no such dtype; the message names the closest.
    """
    if name not in DTYPES:
        raise HagoError(f"unknown dtype {name!r}.{did_you_mean(name, DTYPES)}")
    return DTYPES[name]


#: torch's own dtypes by name, with aliases such as "half".
TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {name: found for name, found in vars(torch).items() if isinstance(found, torch.dtype)}
)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls `name`.

    Raises:
        HagoError: torch has no such dtype; the message names the closest.
    """
    # not getattr(torch, name), which imports modules for some names
    if not isinstance(name, str) or name not in TORCH_DTYPES:
        raise HagoError(f"torch has no dtype {shortened(name)}.{did_you_mean(str(name), TORCH_DTYPES)}")
    return TORCH_DTYPES[name]


INT8, UINT8, INT16 = DTYPES["int8"], DTYPES["uint8"], DTYPES["int16"]
INT32, INT64, FLOAT32 = DTYPES["int32"], DTYPES["int64"], DTYPES["float32"]


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class Edge:
    """The `slot`-th input of node `dst`, written `"layer1.0.add:1"`.

    A graph's i-th output is the edge `output:i`.
    """

    dst: str
    slot: int

    def __str__(self) -> str:
        return f"{self.dst}:{self.slot}"

    def __lt__(self, other: Edge) -> bool:
        return (self.dst, self.slot) < (other.dst, other.slot)

    @staticmethod
    def parse(text: str) -> Edge:
        """The edge that `text` names.

        Raises:
            HagoError: the text is not `node:slot`.
        """
        dst, colon, slot = text.rpartition(":")
        if not (colon and dst and slot.isascii() and slot.isdigit()):
            raise HagoError(f"{text!r} is not an edge; expected 'node:slot', e.g. 'layer1.0.add:1'")
        return Edge(dst, int(slot))


@dataclass(frozen=True, slots=True, eq=False)
class QParams:
    """The quantization parameters of one tensor, whose integers q represent `real = (q - zero_point) * scale`.

    Made by `schemes.make_qparams`, compared by `key`.

    Args:
        scale: float64, broadcasts against the value; real units per quantum.
        zero_point: int64, broadcasts against the value; the q of real zero.
        qmin, qmax: the range that q may take (after clipping), inside `dtype`.
        dtype: the storage type of q.
        group: of a weight whose groups have scales of their own, the number of entries of a group. Scale and zero point
            are then (channels, groups), see `hago.arithmetic.groups`, and broadcast after `spread_over`.
    """

    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    dtype: DType
    group: int | None = None

    @property
    def per_channel(self) -> bool:
        return self.scale.numel() > 1

    @property
    def key(self) -> tuple[object, ...]:
        """A hashable value that is equal for equal parameters."""
        return (
            tuple(self.scale.shape),
            self.scale.numpy().tobytes(),
            self.zero_point.numpy().tobytes(),
            self.qmin,
            self.qmax,
            self.dtype.name,
            *(() if self.group is None else (self.group,)),
        )

    def is_stored_as(self, other: QParams) -> bool:
        """Whether equal centered integers are stored as the same bytes."""
        return self.dtype.torch == other.dtype.torch and torch.equal(self.zero_point, other.zero_point)

    def spread_over(self, shape: Sequence[int]) -> QParams:
        """The parameters with a scale and a zero point that broadcast against a value of this shape: those of groups
        are repeated for every entry."""
        if self.group is None:
            return self
        scale, zero = (spread(t, shape, self.group) for t in (self.scale, self.zero_point))
        return replace(self, scale=scale, zero_point=zero, group=None)

    def __str__(self) -> str:
        low, high = float(self.scale.min()), float(self.scale.max())
        scale = f"{low:.6g}" if low == high else f"{low:.6g}..{high:.6g}"
        zero = int(self.zero_point.flatten()[0])
        groups = "" if self.group is None else f" in groups of {self.group}"
        return f"{self.dtype}[{self.qmin},{self.qmax}] scale {scale} zero {zero}{groups}"


ZERO: Final[Tensor] = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class SimQ:
    """The conversion on an edge: quantize (`source` is None), dequantize (`target` is None) or requantize.

    Args:
        via: the parameters to which a value is requantized before it is requantized to `target`; None for one step.
    """

    source: QParams | None
    target: QParams | None
    via: QParams | None = None

    @property
    def kind(self) -> str:
        if self.source is None:
            return "quantize"
        return "dequantize" if self.target is None else "requantize"

    @property
    def in_dtype(self) -> DType:
        return FLOAT32 if self.source is None else self.source.dtype

    @property
    def out_dtype(self) -> DType:
        return FLOAT32 if self.target is None else self.target.dtype

    @property
    def key(self) -> tuple[object, ...]:
        """A hashable value that is equal for equal conversions."""
        ends = (self.source and self.source.key, self.target and self.target.key)
        return ends if self.via is None else (*ends, self.via.key)

    @property
    def steps(self) -> tuple[SimQ, ...]:
        """The one or two conversions without a `via` that it consists of, in order."""
        if self.via is None:
            return (self,)
        return SimQ(self.source, self.via), SimQ(self.via, self.target)

    def __str__(self) -> str:
        through = "" if self.via is None else f" -> {self.via}"
        return f"{self.kind} {self.source or 'float32'}{through} -> {self.target or 'float32'}"
