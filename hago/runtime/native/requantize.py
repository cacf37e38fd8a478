"""Requantizations in the form that the native kernels read, or the reasons why the kernels cannot apply them.

`lowering`, `kernels` and `epilogue` ask for them while a Plan is lowered. What the kernels cannot apply, the reference
arithmetic does.

A `native.RequantizeParams` holds pointers, so a `Requantization` keeps the tensors to which its structure points.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import addressof
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import (
    EXACT_FLOAT32,
    Requantize,
    apply_simq,
    clip_range,
    is_power_of_two,
    passes_float32,
    ratio,
    ratio_of_float32,
)
from hago.arithmetic.types import QParams, SimQ
from hago.plan.topology import varies_along
from hago.runtime.native import library as native

#: The type code and the zero point of a stored value.
StorageFormat = tuple[int, int]
#: The forms of `Requantize` that the kernels apply. The reference arithmetic applies the others.
FORMS: Final = frozenset({"float32", "onnxruntime", "multiplier_shift", "shift"})
#: The number of entries past the last channel that vector instructions may read.
SLACK: Final = 64
_STORED: Final = {torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3}


@dataclass(frozen=True, slots=True)
class Requantization:
    """A requantization as the native kernels read it, and the tensors that it points to. Made by `requantization_of`,
    cached by `KernelConstantCache`, and copied into the structures of calls, whose owners keep `kept` alive."""

    params: native.RequantizeParams
    kept: tuple[Any, ...] = ()


#: No change of scale.
AS_IS: Final = Requantization(native.RequantizeParams(native.AS_IS))


@dataclass(frozen=True, slots=True)
class FloatQuantization:
    """How kernels quantize real values. Made by `quantization_of`.

    Args:
        scale: of the integers, as float32 holds it.
        low, high: the limits of the centered integers.
        rounding: an index in `native.ROUNDINGS`.
        stored, dtype: the storage format and the dtype of the integers.
    """

    scale: float
    low: float
    high: float
    rounding: int
    stored: StorageFormat
    dtype: torch.dtype


def quantization_of(target: QParams, how: Requantize) -> FloatQuantization | None:
    """The quantization of float32 values to integers; None if the kernels do not have it."""
    code = stored_type(target)
    if code is None or target.scale.numel() > 1 or passes_float32(target) or how.rounding not in native.ROUNDINGS:
        return None
    low, high = (float(v) for v in clip_range(target))
    rounding, stored = native.ROUNDINGS.index(how.rounding), (code, int(target.zero_point))
    return FloatQuantization(float(target.scale.to(torch.float32)), low, high, rounding, stored, target.dtype.torch)


def stored_type(qparams: QParams) -> int | None:
    """The code of a storage type; None if the kernels do not have it, or if int32 does not hold centered integers."""
    if qparams.zero_point.numel() != 1:
        return None
    zero, ends = int(qparams.zero_point), torch.iinfo(torch.int32)
    holds = ends.min <= qparams.qmin - zero and qparams.qmax - zero <= ends.max
    return _STORED.get(qparams.dtype.torch) if holds else None


def storage_format(qparams: QParams | None) -> StorageFormat:
    """The storage format of a value whose type the kernels have."""
    code = None if qparams is None else stored_type(qparams)
    assert qparams is not None and code is not None
    return code, int(qparams.zero_point)


def period(channels: int) -> int:
    """The length of per-channel arrays: the channels, repeated as often as they fit `native.ROW` entries, and at least
    once."""
    return channels * max(1, native.ROW // channels)


def repeat_to_row(values: Tensor, channels: int) -> Tensor:
    """An array with one value per entry of a row, and `SLACK` more.

    Args:
        values: a single value, or one per channel.
    """
    flat = values.flatten()
    each = flat.expand(channels) if flat.numel() == 1 else flat
    return torch.cat([each.repeat(period(channels) // channels), each.new_ones(SLACK)]).contiguous()


def channel_axis(scale: Tensor, ndim: int) -> int | str | None:
    """The only axis of an `ndim`-dimensional value along which a scale varies.

    Returns:
        The axis; None for a single scale; the reason why kernels cannot use the scale if it varies along two axes.
    """
    axes = varies_along(scale, ndim)
    if len(axes) > 1:
        return "scales that vary along two axes"
    return axes[0] if axes else None


def largest_of(qparams: QParams) -> float:
    """A bound of |q - zero point| over the type; 2**31 - 1, the most that kernels take, from 32 bits on."""
    dtype = qparams.dtype
    zero = int(qparams.zero_point.abs().max())
    return float(max(abs(dtype.min), dtype.max) + zero) if dtype.bits < 32 else float(2**31 - 1)


def requantization_of(simq: SimQ | None, how: Requantize, channels: int, largest: float) -> Requantization | str:
    """The requantization of an edge between integers.

    Args:
        how: the requantization of the hardware.
        channels: the number of values in an array of scales; 1 if scales do not vary.
        largest: the largest |c| of the values to requantize.

    Returns:
        The requantization, or the reason why the kernels cannot apply it.
    """
    if simq is None:
        return AS_IS
    if simq.via is not None:
        return _in_two_steps(simq, how, channels, largest)
    source, target = simq.source, simq.target
    if source is None or target is None:
        return "reads or makes real values"
    if how.form not in FORMS:
        return f"requantize form {how.form!r}, which the kernels do not have"
    low, high = clip_range(target)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return "zero points per channel"
    if low < -(2**31) or high >= 2**31 or largest >= 2**31:
        return "more than 32 bits"
    how = how.of_register(source.dtype)
    r = _ratio(simq, how)
    if r.numel() not in (1, channels):
        return "scales that vary along another axis than the channels"
    if how.form in ("float32", "onnxruntime") or (how.form == "shift" and largest < EXACT_FLOAT32):
        return _by_ratio(r, how, target, channels, float(low), float(high), largest)
    if how.form == "shift" and bool((r >= 1).all()) and max(-low, high) <= EXACT_FLOAT32:
        # the results are integers, and values that float32 rounds are beyond the limits, rounded or not
        return _by_ratio(r, replace(how, rounding="half_even"), target, channels, float(low), float(high), largest)
    if how.form == "shift":
        _, exponent = torch.frexp(r)  # r is 2**(exponent - 1)
        return _by_multiplier(torch.ones_like(r), 1 - exponent, how, channels, (low, high))
    if source.scale is target.scale:  # only the clipping, with the multiplier c * 2 / 2**1
        one = torch.ones((), dtype=torch.int64)
        return _by_multiplier(2 * one, one, replace(how, two_stage=False), channels, (low, high))
    return _by_multiplier(*how.multiplier(r), how, channels, (low, high))


def _ratio(simq: SimQ, how: Requantize) -> Tensor:
    assert simq.source is not None and simq.target is not None
    return (ratio_of_float32 if how.form == "onnxruntime" else ratio)(simq.source, simq.target)


def _no_rounding(rounding: str) -> str:
    return f"rounding {rounding!r}, which the kernels do not have"


def _by_ratio(
    r: Tensor, how: Requantize, target: QParams, channels: int, low: float, high: float, largest: float
) -> Requantization | str:
    ratio32 = r.to(torch.float32)
    if not bool(torch.isfinite(ratio32).all()):
        return "a ratio of scales that float32 does not hold"
    if how.rounding not in native.ROUNDINGS:
        return _no_rounding(how.rounding)
    wide = passes_float32(target)
    entries = repeat_to_row(ratio32, channels)
    rounding = native.ROUNDINGS.index(how.rounding)
    plain = how.rounding == "half_even" and not wide
    params = native.RequantizeParams(
        form=native.RATIO,
        rounding=rounding,
        wide=wide,
        plain=plain,
        bounded=float(ratio32.max()) * largest < 2**30,
        ratio=entries.data_ptr(),
        low=low,
        high=high,
        least=low,
        most=high,
    )
    return Requantization(params, (entries,))


def _by_multiplier(m: Tensor, n: Tensor, how: Requantize, channels: int, clip: tuple[int, int]) -> Requantization | str:
    two_stage = how.form == "multiplier_shift" and how.two_stage
    rounding = (how.shift_rounding or how.rounding) if how.form == "multiplier_shift" else how.rounding
    if rounding not in native.ROUNDINGS:
        return _no_rounding(rounding)
    if int(n.min()) < (0 if two_stage else 1) or int(n.max()) > 62:
        return "a shift to the left, or past the word"
    if int(m.max()) >= 2**31 or int(m.min()) < 0:
        return "a multiplier that is negative or has more than 31 bits"
    multiplier, shift = repeat_to_row(m.to(torch.int32), channels), repeat_to_row(n.to(torch.int32), channels)
    low, high = map(float, clip)
    least_shift = int(n.min())
    params = native.RequantizeParams(
        form=native.TWO_STAGE if two_stage else native.MULTIPLIER,
        rounding=native.ROUNDINGS.index(rounding),
        plain=least_shift >= 31 if two_stage else least_shift >= 32 and rounding == "half_up",
        multiplier=multiplier.data_ptr(),
        shift=shift.data_ptr(),
        low=low,
        high=high,
    )
    return Requantization(params, (multiplier, shift))


def tflite_sum_requantizations(
    attrs: Mapping[str, Any], clip: tuple[int, int]
) -> tuple[Requantization, Requantization, Requantization] | str:
    """The requantizations of a TFLite sum (`tflite_sum` of `hago.ops`), or the reason why kernels cannot apply them.

    Returns:
        From the sum to the output, then from both operands to the sum:
        `multiply_by_quantized_multiplier(c << left, m, n, how)`.
    """
    how, ends = attrs["how"], (-(2**31), 2**31 - 1)
    # c << left is c * 2**(left + 1) / 2
    shift, one = torch.tensor(2 << attrs["left_shift"]), torch.ones((), dtype=torch.int64)
    (m, n), into = attrs["out"], attrs["into"]
    attempts = [
        _by_multiplier(shift, one, replace(how, two_stage=False), 1, ends),
        _by_multiplier(m, n, how, 1, clip),
        *(_by_multiplier(m, n, how, 1, ends) for m, n in into),
    ]
    requantizations = [a for a in attempts if not isinstance(a, str)]
    if len(requantizations) < len(attempts):
        return next(a for a in attempts if isinstance(a, str))
    before, out, first, second = requantizations
    return out, _in_sequence(before, first), _in_sequence(before, second)


def _in_two_steps(simq: SimQ, how: Requantize, channels: int, largest: float) -> Requantization | str:
    """Two requantizations in sequence; a single one that gives the same where the first multiplies by a power of two,
    exactly."""
    first, second = simq.steps
    assert first.target is not None and second.target is not None
    before = requantization_of(first, how, channels, largest)
    after = requantization_of(second, how, channels, largest_of(first.target))
    if isinstance(before, str) or isinstance(after, str):
        return before if isinstance(before, str) else after
    ratios = all(r.params.form == native.RATIO and r.params.plain for r in (before, after))
    if ratios and largest < EXACT_FLOAT32:
        first_ratio, second_ratio = (_ratio(x, how).to(torch.float32) for x in (first, second))
        both = first_ratio * second_ratio
        exact = bool((both / first_ratio == second_ratio).all())
        # c * first_ratio and the product of the ratios are exact, so c * both rounds as the two steps together do
        if is_power_of_two(first_ratio) and bool((first_ratio >= 1).all()) and exact:
            ends = torch.tensor(clip_range(first.target), dtype=torch.int64)
            low, high = (float(v) for v in apply_simq(ends, second, how))
            return _by_ratio(both, how, second.target, channels, low, high, largest)
    return _in_sequence(before, after)


def _in_sequence(before: Requantization, after: Requantization) -> Requantization:
    """A requantization that applies `before` first."""
    params = native.RequantizeParams.from_buffer_copy(after.params)
    params.first = addressof(before.params)
    return Requantization(params, (*after.kept, before))


def narrowed(requantization: Requantization, low: int | None, high: int | None) -> Requantization:
    """The requantization with narrower limits, in centered integers."""
    params = native.RequantizeParams.from_buffer_copy(requantization.params)
    params.low = params.low if low is None else min(max(params.low, low), params.high)
    params.high = params.high if high is None else max(min(params.high, high), params.low)
    params.least, params.most = params.low, params.high  # the same in float32
    return Requantization(params, requantization.kept)


def to_real(source: QParams, channels: int) -> Requantization | str:
    """Dequantization to float32, or the reason why the kernels cannot apply it."""
    scale = source.scale.to(torch.float32)
    if scale.numel() not in (1, channels):
        return "scales that vary along another axis than the channels"
    entries = repeat_to_row(scale, channels)
    return Requantization(native.RequantizeParams(form=native.TO_REAL, ratio=entries.data_ptr()), (entries,))
