"""Checks of arguments and two helpers for axes, which the modules of this package share."""

from __future__ import annotations

import torch
from torch import Tensor

from hago.errors import HagoError


# ---------------------------------------------------------------- values
def check_range(what: str, value: Tensor, low: int, high: int) -> None:
    """Refuse a tensor that is not of an integer dtype, or that has values outside `[low, high]`.

    Raises:
        HagoError: as said; the message begins with `what`.
    """
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise HagoError(f"{what} got {value.dtype}; expected integers in an int64 tensor")
    if value.numel() and (int(value.min()) < low or int(value.max()) > high):
        raise HagoError(f"{what} got values in [{int(value.min())}, {int(value.max())}]; expected [{low}, {high}]")


def check_finite(what: str, value: Tensor) -> None:
    """Refuse NaN and infinities.

    Raises:
        HagoError: a value is not finite.
    """
    if not bool(torch.isfinite(value).all()):
        raise HagoError(f"{what} hold NaN or infinity; expected finite numbers")


# ---------------------------------------------------------------- options of quantizers
def check_bits(bits: int, low: int, high: int, what: str) -> None:
    """Refuse a number of bits outside `[low, high]`.

    Raises:
        HagoError: the bits are not an integer, or out of range.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not low <= bits <= high:
        raise HagoError(f"{what} with {bits!r} bits; expected an integer from {low} to {high}")


def check_float(x: Tensor, what: str) -> None:
    """Refuse a value that is not floating point.

    Raises:
        HagoError: the dtype is not a float.
    """
    if not x.is_floating_point():
        raise HagoError(f"{what} got a tensor of {x.dtype}; expected a floating-point tensor")


def check_axis(x: Tensor, axis: int, size: int, what: str) -> None:
    """Refuse a vector of `size` per-channel parameters that does not fit axis `axis` of `x`.

    Raises:
        HagoError: there is no such axis, or its size differs.
    """
    if not -x.ndim <= axis < x.ndim or x.shape[axis] != size:
        raise HagoError(
            f"{what}: {size} entries per channel for axis {axis} of a tensor of shape {tuple(x.shape)}; "
            "expected one entry per index of that axis"
        )


# ---------------------------------------------------------------- axes
def broadcast_along(t: Tensor, axis: int, ndim: int) -> Tensor:
    """Reshape a vector of per-channel values so that it broadcasts along one axis of an `ndim`-dimensional tensor."""
    shape = [1] * ndim
    shape[axis] = -1
    return t.reshape(shape)


def other_axes(axis: int, ndim: int) -> tuple[int, ...]:
    """All axes of an `ndim`-dimensional tensor but one."""
    return tuple(d for d in range(ndim) if d != axis % ndim)
