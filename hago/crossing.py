"""Where a scale may vary and still pass through an op unchanged."""

from __future__ import annotations

from torch import Tensor

from hago.ops._rule import IntegerForm
from hago.types import DType, QParams


def varies_along(scale: Tensor, ndim: int) -> tuple[int, ...]:
    """The axes of an `ndim`-dimensional value along which a scale varies."""
    return tuple(ndim - scale.ndim + d for d, size in enumerate(scale.shape) if size > 1)


def crosses(form: IntegerForm, scale: Tensor, ndim: int) -> bool:
    """Whether an op with this form may take a value of `ndim` axes with this scale as it is."""
    axes = varies_along(scale, ndim)
    return not axes or form.crosses == "all" or (form.crosses == "axis1" and axes == (1,))


def passes(form: IntegerForm, source: QParams, dtype: DType, ndim: int) -> bool:
    """Whether a `follow` operand needs no requantization."""
    return source.dtype == dtype and crosses(form, source.scale, ndim)
