"""The refusals that every engine's arithmetic shares."""

from __future__ import annotations

import torch
from torch import Tensor

from hago.errors import HagoError


def require_range(what: str, value: Tensor, low: int, high: int) -> None:
    """Refuse integers outside [low, high], and tensors that hold no integers.

    Raises:
        HagoError: a value lies outside, or the dtype is not an integer one.
    """
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise HagoError(f"{what} got {value.dtype}; expected integers in an int64 tensor")
    if value.numel() and (int(value.min()) < low or int(value.max()) > high):
        raise HagoError(f"{what} got values in [{int(value.min())}, {int(value.max())}]; expected [{low}, {high}]")


def require_finite(what: str, value: Tensor) -> None:
    """Refuse NaN and infinities.

    Raises:
        HagoError: a value is not finite.
    """
    if not bool(torch.isfinite(value).all()):
        raise HagoError(f"{what} hold NaN or infinity; expected finite numbers")
