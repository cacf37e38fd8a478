"""Calls of the native kernels.

A call is a function from tensors to tensors. During lowering, `kernels` makes one for each node or group of fused
nodes, and `lowering` one for each conversion of a value; the steps of an `Executor` run them. Calls are frozen, so
several threads can run the same one at once.

For tensors of given shapes and addresses, a call is a `Launch`: a function of the library with all its arguments. A
`program.Program` keeps launches, and repeats them on the same memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from ctypes import CDLL, addressof
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.runtime.native import library as native
from hago.runtime.native.epilogue import BuiltEpilogue
from hago.runtime.native.requantize import SLACK, FloatQuantization, StorageFormat, period
from hago.runtime.native.weights import Geometry, Packed

#: The fewest values that a thread counts, since each has tables of its own to clear and to add up.
_PER_THREAD: Final = 1 << 16


def channels_inner(x: Tensor, axis: int) -> Tensor:
    """The tensor with `axis` innermost in memory."""
    if x.ndim == 4 and axis == 1:
        return x.contiguous(memory_format=torch.channels_last)
    moved = x.movedim(axis, -1)
    return x if moved.is_contiguous() else moved.contiguous().movedim(-1, axis)


#: Makes a tensor of a shape and a dtype whose entries lie in the order of its axes.
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in memory of its own: what a call allocates unless it is told where to write."""
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a function of the library with all its arguments. Made by `NativeCall.launch`.

    The arguments hold addresses, so a launch can be repeated as long as the memory of `reads` and `outputs` is there.

    Args:
        function: None if there is nothing to compute.
        reads: the tensors that it reads: the values of the call, or copies of them.
        kept: what the arguments point to besides these tensors.
    """

    function: Any
    arguments: tuple[Any, ...]
    reads: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    kept: tuple[object, ...]

    def __call__(self) -> None:
        """Compute the outputs."""
        if self.function is not None:
            self.function(*self.arguments)


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Those of some tensors that are there."""
    return tuple(x for x in tensors if x is not None)


class NativeCall:
    """A call of one function of the library."""

    __slots__ = ()

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch | None:
        """The launch that computes the outputs from values; None if they are not of the dtypes that it is for.

        Args:
            allocate: makes the outputs, one after the other.
        """
        raise NotImplementedError

    def otherwise(self, values: Sequence[Any]) -> Sequence[Any]:
        """The outputs for which there is no launch."""
        raise NotImplementedError

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        """The outputs, in memory of their own."""
        launch = self.launch(values)
        if launch is None:
            return self.otherwise(values)
        launch()
        return launch.outputs


def dense(x: Tensor) -> Tensor:
    """The tensor, copied if its entries are not dense in memory in one of the two usual orders of axes."""
    is_dense = x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))
    return x if is_dense else x.contiguous()


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which all shapes are broadcast."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def expand_batch(values: Sequence[Tensor]) -> Sequence[Tensor]:
    """Values whose first axis is the batch, with those of a single sample expanded to the batch of the others."""
    if len(values) == 1:
        return values
    sizes = {len(v) for v in values}
    if len(sizes) == 1:
        return values
    (size,) = sizes - {1}
    return [v.expand(size, *v.shape[1:]) for v in values]


def empty_channels_inner(allocate: Allocate, shape: Sequence[int], axis: int, dtype: torch.dtype) -> Tensor:
    """A new tensor with `axis` innermost in memory."""
    if axis == len(shape) - 1:
        return allocate(shape, dtype)
    if len(shape) == 4 and axis == 1:
        images, channels, height, width = shape
        return allocate((images, height, width, channels), dtype).permute(0, 3, 1, 2)
    return allocate([*shape[:axis], *shape[axis + 1 :], shape[axis]], dtype).movedim(-1, axis)


def empty_as(allocate: Allocate, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor of the shape of `x`, which is dense, whose entries lie in the same order."""
    if x.is_contiguous():
        return allocate(x.shape, dtype)
    order = sorted(range(x.ndim), key=lambda axis: (x.stride(axis), x.shape[axis] > 1), reverse=True)
    return allocate([x.shape[axis] for axis in order], dtype).permute(_back(order))


@functools.lru_cache(maxsize=4096)
def conv_sizes(g: Geometry, flat: bool, x: torch.Size) -> tuple[native.Shape, tuple[int, ...]]:
    """The sizes of images of shape `x` for a convolution, which nobody changes, and the shape of its outputs.

    Args:
        flat: as in `ConvCall`.
    """
    if flat:
        pixels = x.numel() // g.channels
        return native.Shape(1, 1, pixels, 1, pixels), (*x[:-1], g.out_channels)
    images, height, width = x[0], *(1, *x[2:])[-2:]
    sizes = g.out_size(height, width)
    out = (images, g.out_channels, *sizes[4 - len(x) :])
    if g.pointwise:  # every pixel stands by itself, so all images are one row
        pixels = images * height * width
        return native.Shape(1, 1, pixels, 1, pixels), out
    return native.Shape(images, height, width, *sizes), out


@dataclass(frozen=True, slots=True)
class ConvCall(NativeCall):
    """A convolution, or a matrix product by a constant, with its epilogue. Made by `conv_call`.

    Args:
        template: the structure of the convolution; it points to the arrays in `kept`.
        flat: whether the channels are the last axis, so that every row is a pixel (linear, matmul).
    """

    library: CDLL
    template: native.Conv
    geometry: Geometry
    epilogue: BuiltEpilogue
    kept: tuple[Tensor, ...]
    flat: bool

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch:
        values, g = expand_batch(values), self.geometry
        x = values[0]
        axis = x.ndim - 1 if self.flat else 1
        x = channels_inner(x, axis)
        shape, out = conv_sizes(g, self.flat, x.shape)
        outputs = tuple(empty_channels_inner(allocate, out, axis, dtype) for dtype in self.epilogue.dtypes)
        addend = channels_inner(values[1], axis) if len(values) > 1 else None
        epilogue = self.epilogue.bind(outputs, g.out_channels, addend)
        function = self.library.hago_conv if outputs[0].numel() else None
        arguments = (
            *(addressof(self.template), addressof(shape), addressof(epilogue), x.data_ptr()),
            torch.get_num_threads(),
        )
        return Launch(function, arguments, _present(x, addend), outputs, (self, shape, epilogue))


def conv_call(
    library: CDLL,
    geometry: Geometry,
    packed: Packed,
    source: StorageFormat,
    epilogue: BuiltEpilogue,
    bias: Tensor | None = None,
    flat: bool = False,
) -> ConvCall:
    """The call of a convolution.

    Args:
        packed: the weights of this geometry.
        source: the storage format of the activations.
        bias: integers on the scale of the sums, or None.
        flat: as in `ConvCall`.
    """
    g, (code, zero), size = geometry, source, packed.weight.element_size()
    # words have zero point 0; bytes of the type that is not read are turned, which adds 128 or takes it away
    read_zero = zero
    if size == 2:
        read_zero = 0
    elif library.hago_reads_signed():
        read_zero -= 128 * (code == native.TYPES["uint8"])
    else:
        read_zero += 128 * (code == native.TYPES["int8"])
    offset = packed.offsets(bias, read_zero, g.groups)
    padding = 0 if size == 2 else read_zero if packed.fours else zero % 256
    zeros = torch.full((g.channels * size + SLACK,), padding, dtype=torch.uint8)
    widens = size == 2 and code != native.TYPES["int16"]
    template = native.Conv(
        g.channels * size, g.out_channels, g.groups, *g.kernel, *g.stride, *g.padding, *g.dilation, code, widens,
        zero, packed.fits, packed.panel, packed.panels, packed.depth, packed.taps, packed.gather, packed.steps,
        packed.woven, packed.winograd,
        packed.weight.data_ptr(), offset.data_ptr(), zeros.data_ptr(), *(x.data_ptr() for x in packed.fours),
    )  # fmt: skip
    return ConvCall(library, template, g, epilogue, (packed.weight, offset, zeros, *packed.fours), flat)


@dataclass(frozen=True, slots=True)
class RowsCall(NativeCall):
    """A pass that applies an epilogue to every entry of a stored value.

    Args:
        source: the storage format of the value.
        axis: the channel axis of the epilogue's per-channel arrays; None if the value is quantized per tensor.
        period: the length of these arrays: the channels, repeated up to `native.ROW` entries.
        const: the other operand of a sum in its storage dtype, if it is a constant.
    """

    library: CDLL
    epilogue: BuiltEpilogue
    source: StorageFormat
    axis: int | None
    period: int
    const: Tensor | None = None

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch:
        x, other = values[0], values[1] if len(values) > 1 else self.const
        if other is not None and other.shape != x.shape:
            x = x.expand(broadcast_shape(x.shape, other.shape))
        x = dense(x) if self.axis is None else channels_inner(x, self.axis)
        outputs = tuple(empty_as(allocate, x, dtype) for dtype in self.epilogue.dtypes)
        addend = other
        if other is not None and (other.shape != x.shape or other.stride() != x.stride()):
            addend = torch.empty_like(x, dtype=other.dtype).copy_(other)
        epilogue = self.epilogue.bind(outputs, 0, addend)
        arguments = (
            *(addressof(epilogue), x.data_ptr(), *self.source, x.numel(), self.period),
            torch.get_num_threads(),
        )
        function = self.library.hago_rows if x.numel() else None
        reads = _present(x, addend if self.const is None else None)
        return Launch(function, arguments, reads, outputs, (self, epilogue, addend if self.const is not None else None))


def grid_of(to: FloatQuantization) -> native.Grid:
    """A quantization in the structure of the kernels."""
    return native.Grid(to.scale, to.low, to.high, to.rounding, *to.stored)


@dataclass(frozen=True, slots=True)
class FloatCall(NativeCall):
    """A call that reads real values in float32.

    Args:
        in_torch: computes the same from values of other dtypes.
    """

    library: CDLL
    in_torch: Callable[[Sequence[Any]], Sequence[Any]]

    def launch_on(self, x: Tensor, allocate: Allocate) -> Launch:
        """The launch that computes the outputs from float32 values."""
        raise NotImplementedError

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch | None:
        return self.launch_on(values[0], allocate) if values[0].dtype == torch.float32 else None

    def otherwise(self, values: Sequence[Any]) -> Sequence[Any]:
        return self.in_torch(values)


@dataclass(frozen=True, slots=True)
class QuantizeCall(FloatCall):
    """Quantization of real values."""

    to: FloatQuantization

    def launch_on(self, x: Tensor, allocate: Allocate) -> Launch:
        if x.ndim == 4 and x.is_contiguous() and x.shape[1] <= 4:  # an image: to channels innermost on the way
            images, channels, pixels = x.shape[0], x.shape[1], x.shape[2] * x.shape[3]
            output = empty_channels_inner(allocate, x.shape, 1, self.to.dtype)
            # the last three are the strides of an image, a channel and a pixel
            sizes = (images, channels, pixels, channels * pixels, pixels, 1)
        else:
            x = dense(x)
            output = empty_as(allocate, x, self.to.dtype)
            sizes = (1, 1, x.numel(), 0, 0, 1)
        to = self.to
        arguments = (
            *(x.data_ptr(), *sizes, output.data_ptr(), to.scale, to.low, to.high, to.rounding, *to.stored),
            torch.get_num_threads(),
        )
        return Launch(self.library.hago_quantize if x.numel() else None, arguments, (x,), (output,), ())


@dataclass(frozen=True, slots=True)
class NormCall(FloatCall):
    """Layer norms along the last axes, with the bits of torch's, and their quantization.

    Args:
        columns: the number of entries that are brought to mean 0 and variance 1.
        weight, bias: float32, one entry per column; None for ones and zeros.
        outputs: how the norms are stored; None for float32.
    """

    columns: int
    epsilon: float
    weight: Tensor | None
    bias: Tensor | None
    outputs: tuple[FloatQuantization | None, ...]

    def launch_on(self, x: Tensor, allocate: Allocate) -> Launch:
        x = x.contiguous()
        outputs = tuple(allocate(x.shape, torch.float32 if to is None else to.dtype) for to in self.outputs)
        stored = (native.NormOutput * len(outputs))()
        for each, to, output in zip(stored, self.outputs, outputs, strict=True):
            grid = native.Grid(type=native.TYPES["float32"]) if to is None else grid_of(to)
            each.grid, each.data = grid, output.data_ptr()
        pointers = (0 if v is None else v.data_ptr() for v in (self.weight, self.bias))
        norm = native.Norm(
            *(x.numel() // self.columns, self.columns, self.epsilon, len(outputs), *pointers, addressof(stored))
        )
        arguments = (addressof(norm), x.data_ptr(), torch.get_num_threads())
        return Launch(self.library.hago_norm if x.numel() else None, arguments, (x,), outputs, (self, norm, stored))


@dataclass(frozen=True, slots=True)
class PoolCall(NativeCall):
    """Maxima of windows, or their sums if there is an epilogue.

    Args:
        window: kernel, stride, padding and dilation, two values each.
        output_size: computes the size of the output from that of the image.
    """

    library: CDLL
    window: tuple[int, ...]
    output_size: Callable[[Sequence[int]], Sequence[int]]
    source: StorageFormat
    epilogue: BuiltEpilogue | None

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch:
        values = expand_batch(values)
        x = channels_inner(values[0], 1)
        images, channels = x.shape[:2]
        height, width = (1, *x.shape[2:])[-2:]
        size = self.output_size(x.shape[2:])
        window = native.Window(images, height, width, *(1, *size)[-2:], channels, *self.window)
        shape = (images, channels, *size)
        code, zero = self.source
        threads = torch.get_num_threads()
        if self.epilogue is None:
            output = empty_channels_inner(allocate, shape, 1, x.dtype)
            arguments: tuple[Any, ...] = (addressof(window), code, x.data_ptr(), output.data_ptr(), threads)
            return Launch(self.library.hago_max_pool, arguments, (x,), (output,), (window,))
        outputs = tuple(empty_channels_inner(allocate, shape, 1, dtype) for dtype in self.epilogue.dtypes)
        addend = channels_inner(values[1], 1) if len(values) > 1 else None
        epilogue = self.epilogue.bind(outputs, channels, addend)
        arguments = (
            *(addressof(window), addressof(epilogue), code, zero, x.data_ptr(), self.epilogue.period),
            threads,
        )
        return Launch(self.library.hago_sum_pool, arguments, _present(x, addend), outputs, (self, window, epilogue))


@dataclass(frozen=True, slots=True)
class ReduceCall(NativeCall):
    """Sums over axes.

    Args:
        axes: not negative; neither the first axis nor all of the others.
        keepdim: whether the output keeps these axes with size 1.
    """

    library: CDLL
    axes: tuple[int, ...]
    keepdim: bool
    source: StorageFormat
    epilogue: BuiltEpilogue

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch:
        values = expand_batch(values)
        x = values[0]
        kept = [a for a in range(x.ndim) if a not in self.axes]
        x = x.permute(*kept[:-1], *self.axes, kept[-1]).contiguous()
        sizes, width = [values[0].shape[a] for a in kept], math.prod(values[0].shape[a] for a in self.axes)
        channels, images = sizes[-1], math.prod(sizes[:-1])
        window = native.Window(  # the summed axes are one window of 1 x width
            images=images, height=1, width=width, out_height=1, out_width=1, channels=channels,
            kernel_h=1, kernel_w=width, stride_h=1, stride_w=1, pad_h=0, pad_w=0, dilation_h=1, dilation_w=1,
        )  # fmt: skip
        outputs = tuple(allocate(sizes, dtype) for dtype in self.epilogue.dtypes)
        addend = values[1].reshape(sizes).contiguous() if len(values) > 1 else None
        epilogue = self.epilogue.bind(outputs, channels, addend)
        arguments = (
            *(addressof(window), addressof(epilogue), *self.source, x.data_ptr(), self.epilogue.period),
            torch.get_num_threads(),
        )
        if self.keepdim:
            kept_shape = [1 if a in self.axes else n for a, n in enumerate(values[0].shape)]
            outputs = tuple(m.view(kept_shape) for m in outputs)
        return Launch(self.library.hago_sum_pool, arguments, _present(x, addend), outputs, (self, window, epilogue))


@dataclass(frozen=True, slots=True)
class ConvPoolCall(NativeCall):
    """A convolution of images fused with the max pooling that is its only reader.

    Args:
        conv: its epilogue stores the value that is pooled.
        window, output_size: of the pooling, as in `PoolCall`.
        epilogue: stores the outputs of the call.
    """

    conv: ConvCall
    window: tuple[int, ...]
    output_size: Callable[[Sequence[int]], Sequence[int]]
    epilogue: BuiltEpilogue

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch:
        conv, values = self.conv, expand_batch(values)
        x, channels = channels_inner(values[0], 1), conv.geometry.out_channels
        shape, (images, _, *inner) = conv_sizes(conv.geometry, False, x.shape)
        size = self.output_size(inner)
        window = native.Window(images, *inner, *size, channels, *self.window)
        inner_shape = (images, channels, *size)
        outputs = tuple(empty_channels_inner(allocate, inner_shape, 1, dtype) for dtype in self.epilogue.dtypes)
        addend = channels_inner(values[1], 1) if len(values) > 1 else None
        structures = (
            *(conv.template, shape, conv.epilogue.bind((), channels, addend)),
            *(window, self.epilogue.bind(outputs, channels)),
        )
        function = conv.library.hago_conv_max_pool if outputs[0].numel() else None
        arguments = (*map(addressof, structures), x.data_ptr(), torch.get_num_threads())
        return Launch(function, arguments, _present(x, addend), outputs, (self, structures))


@dataclass(frozen=True, slots=True)
class TableCall(NativeCall):
    """A lookup in a table of 256 bytes.

    Args:
        entries: the result of byte b, read as uint8, at index b.
        dtype: of the results.
    """

    library: CDLL
    entries: Tensor
    dtype: torch.dtype

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch:
        x = dense(values[0])
        output = empty_as(allocate, x, self.dtype)
        pointers = (each.data_ptr() for each in (x, self.entries, output))
        arguments = (*pointers, x.numel(), torch.get_num_threads())
        return Launch(self.library.hago_table, arguments, (x,), (output,), (self,))


# ---------------------------------------------------------------- histograms
@dataclass(frozen=True, slots=True)
class BinCounter:
    """Counts values in bins: a kernel that `calibration.Observer` takes. It is no step of a model, so it is no
    `NativeCall`."""

    library: CDLL

    def __call__(self, values: Tensor, per_value: float, bins: int) -> Tensor:
        """The number of values in each bin: int64 (bins,).

        Args:
            values: float32, contiguous, none of them beyond the outermost bins.
            per_value: bins per unit, a power of two.
            bins: how many; half of them on each side of 0.
        """
        counts = torch.zeros(bins, dtype=torch.int64)
        threads = max(1, min(torch.get_num_threads(), values.numel() // _PER_THREAD))
        self.library.hago_count_bins(values.data_ptr(), values.numel(), per_value, bins, counts.data_ptr(), threads)
        return counts


# ---------------------------------------------------------------- products
# Calls of kernels with two operands. `consts` holds the operands that are constants, in their storage dtypes. The
# others are the values of the call, in order, followed by the value that the epilogue adds, if there is one.

Pair = tuple[Tensor | None, Tensor | None]


def _within(x: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor lies in the memory of one of others."""
    return any(x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in tensors)


def _operands(consts: Pair, values: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    remaining = iter(values)
    a, b = (next(remaining) if const is None else const for const in consts)
    return a, b, next(remaining, None)


# ---------------------------------------------------------------- elementwise
@dataclass(frozen=True, slots=True)
class MultiplyCall(NativeCall):
    """An elementwise product with broadcasting.

    Args:
        channels, axis: the size and the index of the channel axis of the epilogue's per-channel arrays; 1 and None if
            the values are quantized per tensor.
    """

    library: CDLL
    epilogue: BuiltEpilogue
    formats: tuple[StorageFormat, StorageFormat]
    consts: Pair
    channels: int
    axis: int | None

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch:
        a, b, addend = _operands(self.consts, values)
        spread = None if addend is not None else _direct_spread(self.axis, a.shape, a.stride(), b.shape, b.stride())
        if spread is not None:
            outputs = tuple(empty_as(allocate, a, dtype) for dtype in self.epilogue.dtypes)
            return self._launch(spread, (a, b), self.formats, None, outputs, outputs)
        shape = broadcast_shape(a.shape, b.shape, *([] if addend is None else [addend.shape]))
        formats = self.formats
        if a.shape != shape:
            a, b, formats = b, a, formats[::-1]
        order = _order(a.expand(shape), self.axis)
        large, small = (x.expand(shape).permute(order) for x in (a, b))
        large = large.contiguous()
        written = tuple(allocate(large.shape, dtype) for dtype in self.epilogue.dtypes)
        if addend is not None:
            addend = addend.expand(shape).permute(order).contiguous()
        outputs = tuple(m.permute(_back(order)) for m in written)
        if not large.numel():
            return Launch(None, (), (), outputs, ())
        spread, small = _broadcast_layout(small)
        return self._launch(spread, (large, small.contiguous()), formats, addend, written, outputs)

    def _launch(
        self,
        spread: native.BroadcastLayout,
        pair: tuple[Tensor, Tensor],
        formats: tuple[StorageFormat, StorageFormat],
        addend: Tensor | None,
        written: Sequence[Tensor],
        outputs: tuple[Tensor, ...],
    ) -> Launch:
        """The launch that multiplies the larger operand by the smaller one, written as it lies in memory."""
        operands = [native.Operand(x.data_ptr(), *stored) for x, stored in zip(pair, formats, strict=True)]
        epilogue = self.epilogue.bind(written, 0, addend)
        structures = (epilogue, *operands, spread)
        sizes = (pair[0].numel(), self.channels, period(self.channels))
        arguments = (*map(addressof, structures), *sizes, torch.get_num_threads())
        held = [x for x in self.consts if x is not None]
        reads = tuple(x for x in (*pair, addend) if x is not None and not _within(x, held))
        return Launch(self.library.hago_multiply, arguments, reads, outputs, (self, structures, pair))


@dataclass(frozen=True, slots=True)
class PairTableCall(NativeCall):
    """A lookup in a table of all pairs of bytes, with broadcasting.

    Args:
        entries: (65536,) in the storage dtype; the result of bytes a and b, read as uint8, at index 256 * a + b.
    """

    library: CDLL
    entries: Tensor
    consts: Pair

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch:
        a, b, _ = _operands(self.consts, values)
        shape = broadcast_shape(a.shape, b.shape)
        order = _order((a if a.shape == shape else b).expand(shape), None)
        a, b = (x.expand(shape).permute(order).contiguous() for x in (a, b))
        output = allocate(a.shape, self.entries.dtype)
        pointers = (x.data_ptr() for x in (a, b, self.entries, output))
        arguments = (*pointers, output.numel(), torch.get_num_threads())
        outputs = (output.permute(_back(order)),)
        return Launch(self.library.hago_pair_table, arguments, (a, b), outputs, (self,))


def _order(x: Tensor, axis: int | None) -> list[int]:
    """The axes in the order in which they are stored: `axis` innermost, or the current order if it is None."""
    if axis is None and x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        axis = 1
    order = list(range(x.ndim))
    return order if axis is None else [*order[:axis], *order[axis + 1 :], axis]


def _back(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _broadcast_layout(x: Tensor) -> tuple[native.BroadcastLayout, Tensor]:
    """How the entries of an expanded operand repeat along those of the other one, and the entries themselves.

    A `BroadcastLayout` holds one run of adjacent repeated axes. If there are several, the operand is taken in full.
    """
    sizes = [size for size in x.shape if size > 1]
    varies = [stride > 0 for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    first = varies.index(False) if False in varies else 0
    last = len(varies) - varies[::-1].index(False) if False in varies else 0
    if any(varies[first:last]) or first == last:
        return native.BroadcastLayout(1, x.numel()), x
    kept = x[tuple(0 if stride == 0 else slice(None) for stride in x.stride())]
    return native.BroadcastLayout(math.prod(sizes[first:last]), math.prod(sizes[last:])), kept


@functools.lru_cache(maxsize=4096)
def _direct_spread(
    axis: int | None, a: torch.Size, a_strides: tuple[int, ...], b: torch.Size, b_strides: tuple[int, ...]
) -> native.BroadcastLayout | None:
    """How b repeats along a, which nobody changes, if the kernel can read both as they lie; else None."""
    x, y = torch.empty_strided(a, a_strides, device="meta"), torch.empty_strided(b, b_strides, device="meta")
    if not x.numel() or broadcast_shape(a, b) != tuple(a):
        return None
    order = _order(x, axis)
    spread, small = _broadcast_layout(y.expand(a).permute(order))
    return spread if x.permute(order).is_contiguous() and small.is_contiguous() else None


# ---------------------------------------------------------------- matrices
@dataclass(frozen=True, slots=True)
class MatmulCall(NativeCall):
    """A product of matrices (..., m, k) and (..., k, n); the latter may be a constant.

    Args:
        offset: int32 (n,), the initial values of the sums; None for zeros.
        transposed: whether the second operand has the shape (..., n, k), as weights of linear layers have.
    """

    library: CDLL
    epilogue: BuiltEpilogue
    formats: tuple[StorageFormat, StorageFormat]
    consts: Pair
    offset: Tensor | None
    transposed: bool = False

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch:
        a, b, addend = _operands(self.consts, values)
        b = b.mT if self.transposed else b
        product = (*broadcast_shape(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        shape = product if addend is None else broadcast_shape(product, addend.shape)
        *batch, rows, columns = shape
        outputs = tuple(allocate(shape, dtype) for dtype in self.epilogue.dtypes)
        a, b = a.expand(*a.shape[:-2], rows, a.shape[-1]), b.expand(*b.shape[:-1], columns)
        if b.ndim == 2:  # all rows are independent
            a = a.expand(*batch, *a.shape[-2:]).reshape(1, -1, a.shape[-1])
            batch, rows = [1], a.shape[1]
        a, b = _laid_rows(_two_batches(a, batch)), _laid_columns(_two_batches(b, batch))
        matrices = _matrices(a, b, self.formats, self.offset)
        addend = None if addend is None else addend.expand(shape).contiguous()
        epilogue = self.epilogue.bind(outputs, columns, addend)
        pointers = (addressof(matrices), addressof(epilogue), a.data_ptr(), b.data_ptr())
        arguments = (*pointers, self.epilogue.period, torch.get_num_threads())
        held = [x for x in self.consts if x is not None]
        reads = tuple(x for x in (a, b, addend) if x is not None and not _within(x, held))
        function = self.library.hago_matmul if outputs[0].numel() else None
        return Launch(function, arguments, reads, outputs, (self, matrices, epilogue))


def _two_batches(x: Tensor, batch: Sequence[int]) -> Tensor:
    """The matrices with exactly two batch axes."""
    x = x.expand(*batch, *x.shape[-2:])
    if len(batch) > 2:
        return x.reshape(-1, batch[-1], *x.shape[-2:])
    return x[(None,) * (2 - len(batch))]


def _laid_rows(a: Tensor) -> Tensor:
    """The first operand of a product with the entries of a row side by side."""
    return a if a.stride(-1) == 1 else a.contiguous()


def _laid_columns(b: Tensor) -> Tensor:
    """The second operand of a product with the entries of a row or of a column side by side."""
    return b if 1 in b.stride()[-2:] else b.contiguous()


def _matrices(
    a: Tensor, b: Tensor, formats: tuple[StorageFormat, StorageFormat], offset: Tensor | None
) -> native.Matrices:
    """The product of two operands with two batch axes each."""
    return native.Matrices(
        *a.shape[:3], b.shape[-1], a.shape[-1], *a.stride()[:3], *b.stride(), *formats[0], *formats[1],
        0 if offset is None else offset.data_ptr(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Softmax:
    """The softmax of attention.

    Args:
        scale: of the scores, before the mask is added.
        causal: whether row i sees columns up to i alone.
        registers: the floats of a register of torch's kernel.
        to: how it is stored.
    """

    scale: float
    causal: bool
    registers: int
    to: FloatQuantization


@dataclass(frozen=True, slots=True)
class AttentionCall(NativeCall):
    """The product of queries and keys, its softmax, and the product of that and values: queries (..., m, k), keys
    (..., k, n), values (..., n, l), and what the values of the call have besides them: a mask that is added to the
    scores, and the value that the epilogue adds.

    Args:
        scores: the epilogue of the first product, which stores real values.
        epilogue: of the second product.
        formats: of queries, keys and values.
        masked: whether there is a mask, of float32 or of bool, which is True where scores are let through.
    """

    library: CDLL
    scores: BuiltEpilogue
    epilogue: BuiltEpilogue
    formats: tuple[StorageFormat, StorageFormat, StorageFormat]
    softmax: Softmax
    masked: bool

    def launch(self, values: Sequence[Any], allocate: Allocate = fresh) -> Launch:
        q, k, v, *others = values
        mask, addend = others.pop(0) if self.masked else None, others.pop(0) if others else None
        batch = broadcast_shape(*(x.shape[:-2] for x in (q, k, v, mask) if x is not None))
        rows, keys, columns = q.shape[-2], k.shape[-1], v.shape[-1]
        q, k, v = _laid_rows(_two_batches(q, batch)), *(_laid_columns(_two_batches(x, batch)) for x in (k, v))
        (outer, inner), swaps = q.shape[:2], len(batch) == 2
        # heads side by side, as the layers after attention read them
        shape = (outer, rows, inner, columns) if swaps else (*batch, rows, columns)
        outputs = tuple(allocate(shape, dtype) for dtype in self.epilogue.dtypes)
        if swaps:
            outputs = tuple(m.transpose(1, 2) for m in outputs)
        row, to = (
            (inner * columns, (rows * inner * columns, columns))
            if swaps
            else (columns, (inner * rows * columns, rows * columns))
        )
        if mask is not None:
            mask = _two_batches(_added(mask).expand(*batch, rows, keys), batch)
            mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        if addend is not None:
            addend = addend.expand(*batch, rows, columns)
            addend = addend.transpose(1, 2).contiguous() if swaps else addend.contiguous()
        softmax, stored = self.softmax, self.softmax.to
        probabilities = torch.empty((), dtype=stored.dtype).expand(outer, inner, rows, keys)
        product = _matrices(probabilities, v, (stored.stored, self.formats[2]), None)
        product.a_row = -(-keys // native.LANES) * native.LANES
        attention = native.Attention(
            _matrices(q, k, self.formats[:2], None), product, softmax.scale, softmax.causal, softmax.registers,
            grid_of(stored), 0 if mask is None else mask.data_ptr(),
            *((0, 0, 0) if mask is None else mask.stride()[:3]), *to,
        )  # fmt: skip
        structures = (attention, self.scores.bind((), 0), self.epilogue.bind(outputs, row, addend))
        pointers = (*map(addressof, structures), *(x.data_ptr() for x in (q, k, v)))
        function = self.library.hago_attention if outputs[0].numel() else None
        arguments = (*pointers, self.epilogue.period, torch.get_num_threads())
        return Launch(function, arguments, _present(q, k, v, mask, addend), outputs, (self, structures))


def _added(mask: Tensor) -> Tensor:
    """What a mask adds to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
