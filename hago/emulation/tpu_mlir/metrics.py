"""Similarities and losses of tensors, with which TPU-MLIR compares a quantized model to the float one.

In all functions `a` is the reference and `b` the tensor that is compared to it. They have the same number of values;
their shapes may differ. NaN counts as 0 only where a definition says so.

hago itself does not call these; they are for users who compare with TPU-MLIR, and for tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from hago.errors import HagoError

#: The cosine and the euclidean similarity that a whole model must exceed in TPU-MLIR's own tests.
ACCEPTANCE: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {"int8_symmetric": (0.95, 0.70), "int8_asymmetric": (0.90, 0.54), "default": (0.90, 0.90)}
)

#: Added to denominators, so that they are not 0.
SMALL: Final = 1e-7


def _pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.numel() != b.numel() or a.numel() == 0:
        raise HagoError(f"tensors of {a.numel()} and {b.numel()} values to compare; expected as many, at least one")
    return a.to(torch.float64).reshape(-1), b.to(torch.float64).reshape(-1)


def cosine_similarity(a: Tensor, b: Tensor) -> float:
    """`<a, b> / (|a| |b|)`; NaN counts as 0.

    Two tensors of zeros give 1; one tensor of zeros gives 0.

    Raises:
        HagoError: the tensors are empty, or their numbers of values differ.

    References:
        TPU-MLIR python/numpy_helper/tensor_compare.py.
    """
    x, y = (torch.where(torch.isnan(t), 0.0, t) for t in _pair(a, b))
    norms = float(x.norm() * y.norm())
    if norms == 0:
        return 1.0 if bool((x == y).all()) else 0.0
    return float(x @ y) / norms


def euclidean_similarity(a: Tensor, b: Tensor) -> float:
    """`1 - |a - b| / (|(a + b) / 2| + 1e-7)`; NaN counts as 0, and an infinite norm gives 0.

    It can be negative.

    Raises:
        HagoError: the tensors are empty, or their numbers of values differ.

    References:
        TPU-MLIR python/numpy_helper/tensor_compare.py.
    """
    x, y = (torch.where(torch.isnan(t), 0.0, t) for t in _pair(a, b))
    distance, middle = float((x - y).norm()), float(((x + y) / 2).norm())
    if not (math.isfinite(distance) and math.isfinite(middle)):
        return 0.0
    return 1.0 - distance / (middle + SMALL)


def accepted(a: Tensor, b: Tensor, minimum: tuple[float, float] = ACCEPTANCE["default"]) -> bool:
    """Whether `b` equals `a`, or its cosine and euclidean similarities both exceed `minimum`.

    Args:
        minimum: of the cosine and of the euclidean similarity; a value of ACCEPTANCE, or another pair.

    Raises:
        HagoError: the tensors are empty, or their numbers of values differ.

    References:
        TPU-MLIR python/numpy_helper/tensor_compare.py; python/test/test_onnx.py for ACCEPTANCE.
    """
    x, y = _pair(a, b)
    if bool((x == y).all()):
        return True
    return cosine_similarity(a, b) > minimum[0] and euclidean_similarity(a, b) > minimum[1]


def sqnr(a: Tensor, b: Tensor, *, remove_zero: bool = False) -> float:
    """`10 log10(sum (a - mean a)**2 / sum (n - mean n)**2)` in decibels, n = a - b.

    Infinite where either sum is 0.

    Args:
        remove_zero: leave out the values at which `a` is 0, as TPU-MLIR does when it compares files.

    Raises:
        HagoError: the tensors are empty, or their numbers of values differ.

    References:
        TPU-MLIR `sqnr_similarity` (python/numpy_helper/tensor_compare.py).
    """
    x, y = _pair(a, b)
    if remove_zero:
        x, y = x[x != 0], y[x != 0]
    if x.numel() == 0:
        return math.inf
    noise = x - y
    signal_power, noise_power = (float((t - t.mean()).square().sum()) for t in (x, noise))
    if signal_power == 0 or noise_power == 0:
        return math.inf
    return 10 * math.log10(signal_power / noise_power)


def snr_loss(a: Tensor, b: Tensor) -> float:
    """`sum (a - b)**2 / (sum a**2 + 1e-7)`: noise over signal, 0 for equal tensors.

    Raises:
        HagoError: the tensors are empty, or their numbers of values differ.

    References:
        TPU-MLIR python/calibration/mix_precision.py, loss `snr`.
    """
    x, y = _pair(a, b)
    return float((x - y).square().sum() / (x.square().sum() + SMALL))


def mse_loss(a: Tensor, b: Tensor) -> float:
    """`mean (a - b)**2`.

    Raises:
        HagoError: the tensors are empty, or their numbers of values differ.
    """
    x, y = _pair(a, b)
    return float((x - y).square().mean())
