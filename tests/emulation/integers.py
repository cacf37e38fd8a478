"""Types, random tensors and an exact requantization, shared by the tests of TPU-MLIR's operators."""

from __future__ import annotations

from fractions import Fraction

import torch
from exact import round_exactly
from torch import Tensor

from hago.arithmetic.types import UINT8
from hago.emulation.tpu_mlir.numerics import UniformType

SYMMETRIC, TARGET = UniformType(0.02), UniformType(0.05)
ASYMMETRIC, SHIFTED = UniformType(0.02, 18), UniformType(0.05, -7)
RELU = UniformType(0.03, 0, UINT8)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(seed: int, *shape: int, low: int = -128, high: int = 127) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def half_up(v: int, m: int, r: int) -> int:
    """`v * m / 2**r` exactly, ties up."""
    return round_exactly(Fraction(v * m) / Fraction(2) ** r, "half_up")
