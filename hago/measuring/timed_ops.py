"""Ops that signatures are timed on: each at a size that computes long on few bytes, and at one that moves many.

The first op that a signature lists, in this order, stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from torch import Tensor, nn

Kind = Literal["macs", "elements"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A module of one op, and the shapes of what it reads, the batch first."""

    make: Callable[[], nn.Module]
    shapes: tuple[Shape, ...]

    def __str__(self) -> str:
        return " and ".join("x".join(map(str, shape)) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One op.

    Args:
        kind: what its throughput is counted in.
        in_cache: where computing takes the time.
        in_memory: where moving values takes the time: several times what caches hold.
    """

    kind: Kind
    in_cache: Case
    in_memory: Case


class _Call(nn.Module):
    """A function as a module; two operands where it takes two."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _Call2(_Call):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.function(x, y)


class _Product(nn.Module):
    """A product with a constant matrix."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / rows**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


_SMALL: Final[Shape] = (1, 128, 32, 32)
_LARGE: Final[Shape] = (64, 64, 64, 64)


def _elements(make: Callable[[], nn.Module], operands: int = 1) -> TimedOp:
    return TimedOp("elements", Case(make, (_SMALL,) * operands), Case(make, (_LARGE,) * operands))


def _call(function: Callable[..., Tensor]) -> TimedOp:
    return _elements(partial(_Call, function))


def _call2(function: Callable[..., Tensor]) -> TimedOp:
    return _elements(partial(_Call2, function), 2)


def _macs(small: Callable[[], nn.Module], shape: Shape, large: Callable[[], nn.Module], wide: Shape) -> TimedOp:
    return TimedOp("macs", Case(small, (shape,)), Case(large, (wide,)))


_CONV1, _CONV2, _CONV3 = (partial(conv, 128, 128, 3, padding=1) for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d))
_THIN1, _THIN2, _THIN3 = (partial(conv, 16, 16, 1) for conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d))

#: By name, the preferred first.
TIMED: Final[Mapping[str, TimedOp]] = {
    "conv2d": _macs(_CONV2, (1, 128, 28, 28), _THIN2, (64, 16, 128, 128)),
    "linear": _macs(partial(nn.Linear, 1024, 1024), (64, 1024), partial(nn.Linear, 4096, 4096), (1, 4096)),
    "matmul": _macs(partial(_Product, 1024, 1024), (64, 1024), partial(_Product, 4096, 4096), (1, 4096)),
    "conv1d": _macs(_CONV1, (4, 128, 196), _THIN1, (64, 16, 128 * 128)),
    "conv3d": _macs(_CONV3, (1, 128, 4, 10, 10), _THIN3, (64, 16, 8, 32, 32)),
    "add": _call2(torch.add),
    "relu": _elements(nn.ReLU),
    "clamp": _elements(nn.ReLU6),
    "max_pool2d": _elements(partial(nn.MaxPool2d, 2)),
    "avg_pool2d": _elements(partial(nn.AvgPool2d, 2)),
    "adaptive_avg_pool2d": _elements(partial(nn.AdaptiveAvgPool2d, 1)),
    "sub": _call2(torch.sub),
    "mul": _call2(torch.mul),
    "concat": _elements(partial(_Call2, lambda x, y: torch.cat((x, y), 1)), 2),
    "sigmoid": _call(torch.sigmoid),
    "tanh": _call(torch.tanh),
    "silu": _elements(nn.SiLU),
    "gelu": _elements(nn.GELU),
    "hardswish": _elements(nn.Hardswish),
    "leaky_relu": _elements(partial(nn.LeakyReLU, 0.125)),
    "softmax": _elements(partial(nn.Softmax, 1)),
}
