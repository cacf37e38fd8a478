"""Checks of values and options that the emulations share, with one wording for the same error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hago.errors import HagoError, did_you_mean


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


# ---------------------------------------------------------------- options of quantizers
def check_choice(name: str, got: str, known: Sequence[str]) -> None:
    """Refuse an option that is not one of the known values.

    Raises:
        HagoError: `got` is not in `known`; the closest is suggested.
    """
    if got not in known:
        raise HagoError(f"{name} is {got!r}; expected one of {', '.join(known)}." + did_you_mean(str(got), known))


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
    """Refuse parameters per channel that do not fit the tensor.

    Raises:
        HagoError: there is no such axis, or its size differs.
    """
    if not -x.ndim <= axis < x.ndim or x.shape[axis] != size:
        raise HagoError(
            f"{what}: {size} entries per channel for axis {axis} of a tensor of shape {tuple(x.shape)}; "
            "expected one entry per index of that axis"
        )


def along(t: Tensor, axis: int, ndim: int) -> Tensor:
    """A vector of per-channel values, shaped to broadcast along one axis of an `ndim`-dimensional tensor."""
    shape = [1] * ndim
    shape[axis] = -1
    return t.reshape(shape)


def but(axis: int, ndim: int) -> tuple[int, ...]:
    """All axes of an `ndim`-dimensional tensor but one."""
    return tuple(d for d in range(ndim) if d != axis % ndim)
