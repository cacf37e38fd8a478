"""The rules of max_pool, avg_pool and adaptive_avg_pool of any dimension.

An average over integers is computed as their sum, with the scale divided by the size of the window. So all windows
must have the same divisor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.numerics import Order
from hago.ops._conv import windows
from hago.ops._rule import (
    Addends,
    Attrs,
    Call,
    IntegerForm,
    Operand,
    OpRule,
    Parsed,
    Refusal,
    Sample,
    TermsAt,
    WhyUnsupported,
)
from hago.ops._shared import has_ref, plain
from hago.ops.forms.qlinear import qlinear_average
from hago.ops.forms.tflite import tflite_average
from hago.ops.forms.tpu_mlir import tpu_mlir_average

_MAX: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d}
_AVG: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d}
_ADAPTIVE_AVG: dict[int, Callable[..., Tensor]] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d}
_OPTIONS = ("padding", "dilation", "ceil_mode", "count_include_pad", "divisor_override")


def _parse(dims: int) -> Callable[[Call], Parsed | None]:
    def sizes(value: Any) -> list[int]:
        listed = plain(value) if isinstance(value, (list, tuple)) else [value]
        return listed * dims if len(listed) == 1 else listed

    def parse(call: Call) -> Parsed | None:
        if len(call.shape_of("self")) != dims + 2 or call.item != 0:
            return None  # without a channel axis, axis 1 is pooled over; item 1 is where the maxima are
        kernel = sizes(call["kernel_size"])
        attrs = {"kernel_size": kernel, "stride": sizes(call["stride"] or kernel)}
        attrs |= {o: call[o] for o in _OPTIONS if o in call.arguments}
        attrs |= {o: sizes(attrs[o]) for o in ("padding", "dilation") if o in attrs}
        return None if has_ref(list(attrs.values())) else Parsed((call["self"],), attrs)

    return parse


def _flat_as_2d(attrs: Attrs) -> dict[str, Any]:
    """The attributes of a 1-dimensional window as those of a 2-dimensional one on an image of height 1."""
    ones = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}
    return {k: [ones[k], *v] if k in ones else v for k, v in attrs.items()}


# ---------------------------------------------------------------- maximum
def max_pool_rule(dims: int) -> OpRule:
    """The rule of `dims`-dimensional max pooling."""
    name, pool = f"max_pool{dims}d", _MAX[dims]

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        return pool(x, **attrs)

    def compute_as_2d(attrs: Attrs, c: Tensor) -> Tensor:  # max_pool1d takes no int64
        pooled: Tensor = F.max_pool2d(c.unsqueeze(2), **_flat_as_2d(attrs))
        return pooled.squeeze(2)

    def case(size: tuple[int, ...], **options: Any) -> Sample:
        return Sample(lambda x: pool(x, **options), ((2, 3, *size),))

    size = (9, 8)[:dims]
    bad = {"kernel_size": [2] * dims, "stride": [2] * dims, "padding": [2] * dims, "dilation": [1] * dims}
    return OpRule(
        name=name,
        aten=(f"aten.{name}.default",) + ((f"aten.{name}_with_indices.default",) if dims > 1 else ()),
        parse=_parse(dims),
        compute=compute,
        integer=IntegerForm(
            slots=("follow",), compute=compute_as_2d if dims == 1 else None, accepts_per_channel="axis1"
        ),
        moves_values=True,
        samples=(
            case(size, kernel_size=2),
            case(size, kernel_size=3, stride=2, padding=1),
            case(size, kernel_size=2, stride=3, dilation=2, ceil_mode=True),
        ),
        refuses=(Refusal(bad | {"ceil_mode": False}, ((1, 3, *[8] * dims),), "padding"),),
        aliases=(f"nn.{name}",),
    )


# ---------------------------------------------------------------- average
def _average_unsupported(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
    if attrs.get("divisor_override"):
        return None
    if any(attrs["padding"]) and not attrs["count_include_pad"]:
        return "padding is not counted, so windows at the border divide by less"
    windows = zip(shapes[0][2:], attrs["kernel_size"], attrs["stride"], attrs["padding"], strict=True)
    if attrs["ceil_mode"] and any((n + 2 * p - k) % s for n, k, s, p in windows):
        return "ceil_mode leaves a last window that reaches past the padding and divides by less"
    return None


def _uncounted(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
    if attrs.get("divisor_override"):
        return f"divides by {attrs['divisor_override']}, not by the window's size"
    if any(attrs["padding"]) and attrs["count_include_pad"]:
        return "counts the padding, which the chip does not"
    return None


def _window_sums(attrs: Attrs, c: Tensor) -> Tensor:
    is_flat = len(attrs["kernel_size"]) == 1
    window = _flat_as_2d(attrs) if is_flat else attrs
    sums = F.avg_pool2d(
        c.unsqueeze(2) if is_flat else c,
        window["kernel_size"],
        window["stride"],
        window["padding"],
        window["ceil_mode"],
        divisor_override=1,
    )
    return sums.squeeze(2) if is_flat else sums


def _window_terms(attrs: Attrs, operands: Sequence[Tensor], order: Order) -> TermsAt:
    """The entries of a window, row by row; the order of products makes no difference."""
    x, kernel, stride = operands[0], attrs["kernel_size"], attrs["stride"]
    # with ceil_mode, a last window may reach past the padding
    pads = [(p, p + (s - 1 if attrs["ceil_mode"] else 0)) for p, s in zip(attrs["padding"], stride, strict=True)]
    seen = windows(x, x.shape[1], pads, kernel, stride, [1] * len(kernel))
    return lambda index: seen[index].flatten(1)


def _average_forms(
    window: Callable[[Attrs], Attrs],
    unsupported: WhyUnsupported,
    uncounted: WhyUnsupported,
    is_global: Callable[[Attrs], bool],
) -> tuple[IntegerForm, dict[str, IntegerForm]]:
    """The integer side of an average, and those of other engines by name.

    Args:
        window: from the attributes of the op to those of an average pooling.
        unsupported: as in IntegerForm.
        uncounted: as `unsupported`, for engines that never count the padding.
        is_global: whether the window is the whole image.
    """

    def count(attrs: Attrs) -> int:
        pooling = window(attrs)
        return int(pooling.get("divisor_override") or math.prod(pooling["kernel_size"]))

    def scale(attrs: Attrs, scales: Sequence[Tensor]) -> Tensor:
        return scales[0] / count(attrs)

    def bound(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
        return operands[0].magnitude * math.prod(window(attrs)["kernel_size"])

    def sums(attrs: Attrs, c: Tensor) -> Tensor:
        return _window_sums(window(attrs), c)

    def terms(attrs: Attrs, operands: Sequence[Tensor], order: Order) -> TermsAt:
        return _window_terms(window(attrs), operands, order)

    form = IntegerForm(
        slots=("follow",),
        scale=scale,
        compute=sums,
        bound=bound,
        accepts_per_channel="axis1",
        unsupported=unsupported,
        addends=Addends(terms),
    )
    return form, {
        "qlinear": qlinear_average(form, count, is_global),
        "tflite": tflite_average(sums, uncounted),
        "tpu_mlir": tpu_mlir_average(window, unsupported),
        "tpu_mlir_asymmetric": tpu_mlir_average(window, unsupported, asymmetric=True),
    }


def avg_pool_rule(dims: int) -> OpRule:
    """The rule of `dims`-dimensional average pooling."""
    name, pool = f"avg_pool{dims}d", _AVG[dims]

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        return pool(x, **attrs)

    def case(size: tuple[int, ...], **options: Any) -> Sample:
        return Sample(lambda x: pool(x, **options), ((2, 3, *size),))

    size = (9, 8)[:dims]
    bad = {"kernel_size": [2] * dims, "stride": [2] * dims, "padding": [2] * dims, "ceil_mode": False}
    form, forms = _average_forms(lambda attrs: attrs, _average_unsupported, _uncounted, lambda attrs: False)
    return OpRule(
        name=name,
        aten=(f"aten.{name}.default",),
        parse=_parse(dims),
        compute=compute,
        integer=form,
        forms=forms,
        clips_or_averages=True,
        samples=(
            case(size, kernel_size=2),
            case(size, kernel_size=3, stride=2, padding=1),
            case(size, kernel_size=3, padding=1, count_include_pad=False),
            case(size, kernel_size=2, stride=2, ceil_mode=True),
            *([case(size, kernel_size=(3, 2), divisor_override=5, ceil_mode=True)] if dims == 2 else []),
        ),
        refuses=(Refusal(bad | {"count_include_pad": True}, ((1, 3, *[8] * dims),), "padding"),),
        aliases=(f"nn.{name}",),
    )


# ---------------------------------------------------------------- average down to a given size
def pool_window(attrs: Attrs) -> Attrs:
    """The attributes of a pooling; of an adaptive one, those of the average pooling that it is, if all its windows have
    one size."""
    if "output_size" not in attrs:
        return attrs
    sides = [i // o for i, o in zip(attrs["input_size"], attrs["output_size"], strict=True)]
    return {**attrs, "kernel_size": sides, "stride": sides, "padding": [0] * len(sides), "ceil_mode": False}


def _is_global(attrs: Attrs) -> bool:
    return set(attrs["output_size"]) == {1}


def _adaptive_unsupported(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
    sizes = list(zip(attrs["input_size"], attrs["output_size"], strict=True))
    if all(i % o == 0 for i, o in sizes):
        return None
    return f"{attrs['input_size']} is no multiple of {attrs['output_size']}, so windows differ in size"


def adaptive_avg_pool_rule(dims: int, aliases: tuple[str, ...] = ()) -> OpRule:
    """The rule of `dims`-dimensional adaptive average pooling."""
    name, pool = f"adaptive_avg_pool{dims}d", _ADAPTIVE_AVG[dims]

    def parse(call: Call) -> Parsed | None:
        shape, output = call.shape_of("self"), call["output_size"]
        if len(shape) != dims + 2 or has_ref(output):
            return None
        return Parsed((call["self"],), {"output_size": plain(output), "input_size": list(shape[2:])})

    def compute(attrs: Attrs, x: Tensor) -> Tensor:
        return pool(x, attrs["output_size"])

    def case(size: tuple[int, ...], output: tuple[int, ...]) -> Sample:
        return Sample(lambda x: pool(x, output[0] if dims == 1 else output), ((2, 3, *size),))

    size = (8, 6)[:dims]
    form, forms = _average_forms(pool_window, _adaptive_unsupported, _adaptive_unsupported, _is_global)
    return OpRule(
        name=name,
        aten=(f"aten.{name}.default",),
        parse=parse,
        compute=compute,
        integer=form,
        forms=forms,
        clips_or_averages=True,
        samples=(case(size, (1, 1)[:dims]), case(size, (4, 3)[:dims]), case(size, (3, 4)[:dims])),
        refuses=(Refusal({"output_size": [2] * (dims + 1)}, ((1, 3, *size),), "output_size"),),
        aliases=(f"nn.{name}", *aliases),
    )
