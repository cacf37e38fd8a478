"""The library of native kernels: C++ that a wheel carries, or that the machine's compiler builds once; called through
ctypes.

There is one library for each instruction set (`instruction_sets`). Where none was shipped, `build` makes it on first
use and keeps it. If it cannot be built, `library()` gives the reason, and other kernels compute the same results.

`HAGO_MAX_CPU_ISA` names the largest instruction set that kernels may use, as `ONEDNN_MAX_CPU_ISA` does for oneDNN.

The structures mirror cpp/rows.h, cpp/conv.h, cpp/pool_window.h, cpp/multiply.cpp, cpp/matrices.h, cpp/quantize.h,
cpp/norm.cpp and cpp/attention.cpp field by field.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from ctypes import c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hago.errors import LogError, warn
from hago.runtime.native.build import Built, build
from hago.runtime.native.instruction_sets import InstructionSet, largest_set, limited_text, machine

#: The libraries that a wheel carries, one for each instruction set; absent where hago is installed from its sources.
SHIPPED: Final = Path(__file__).parent / "built"
#: The storage types, by the name of their dtype: `enum Type` of cpp/rows.h.
TYPES: Final = {"uint8": 0, "int8": 1, "int16": 2, "int32": 3, "float32": 4}
#: The roundings of cpp/rounding.h, in the order of their codes there. Kernels are refused for any other rounding of
#: `hago.arithmetic.rounding`, which the reference arithmetic then computes.
ROUNDINGS: Final = ("half_even", "half_up", "half_away", "half_down", "toward_zero", "floor")
#: How integers are brought to another scale: `enum Form` of cpp/rows.h. Not at all, by a float32 ratio, by a multiplier
#: and a shift, to real values, or by a multiplier and a shift that round separately (TFLite's two stages).
AS_IS, RATIO, MULTIPLIER, TO_REAL, TWO_STAGE = range(5)
#: Whether products of bytes are added: `enum Dots` of cpp/lanes.h. Never; exactly; or in 16 bits, where they fit.
NEVER, EXACTLY, IF_PAIRS_FIT = range(3)
#: The sum of an epilogue: `enum Sum` of cpp/rows.h. own + other, own - other, other - own; 0 for no sum.
PLUS, MINUS, FROM = 1, 2, 3
#: The most entries of a row that a kernel processes at once: `ROW` of cpp/rows.h.
ROW: Final = 512
#: The numbers that kernels work on side by side: `LANES` of cpp/lanes.h.
LANES: Final = 16


class RequantizeParams(ctypes.Structure):
    """From one scale to another, then clipped to centered integers: `Move` of cpp/rows.h. Made by
    `requantize.requantization_of`.

    Args:
        form: AS_IS, RATIO, MULTIPLIER, TO_REAL or TWO_STAGE.
        rounding: an index in ROUNDINGS.
        wide: whether the range is more than float32 holds.
        bounded: whether a value is within int32 before it is clipped.
        plain: whether kernels compute it in vectors: a ratio that is rounded half to even into a range that float32
            holds, a multiplier and a shift of 32 or more that round half up, or two stages that shift by 31 or more.
        ratio, multiplier, shift: arrays with an entry per channel.
        low, high: the range, in float64.
        least, most: the same in float32, where float32 holds it.
        first: a requantization that is done before this one; null for none.
    """

    _fields_ = [
        ("form", c_int32), ("rounding", c_int32), ("wide", c_int32), ("plain", c_int32), ("bounded", c_int32),
        ("ratio", c_void_p),
        ("multiplier", c_void_p), ("shift", c_void_p), ("low", c_double), ("high", c_double),
        ("least", c_float), ("most", c_float), ("first", c_void_p),
    ]  # fmt: skip


class Output(ctypes.Structure):
    """A stored output; `stride` is in elements, from one row to the next."""

    _fields_ = [
        ("move", RequantizeParams),
        ("type", c_int32),
        ("zero", c_int32),
        ("stride", c_int64),
        ("data", c_void_p),
    ]


class Addend(ctypes.Structure):
    """The other operand of a sum, and the requantizations of the kernel's own sums and of this operand before it."""

    _fields_ = [
        ("own", RequantizeParams), ("other", RequantizeParams),
        ("type", c_int32), ("zero", c_int32), ("stride", c_int64), ("data", c_void_p),
    ]  # fmt: skip


class OverflowRule(ctypes.Structure):
    """What the accumulator does to a sum that may leave it: `Register` of cpp/rows.h. All zeros if no sum can.

    Args:
        wrap_bits: the bits of an accumulator that wraps; 0 where it does not wrap, or has 32 bits.
        saturates: whether it saturates, between `low` and `high`.
    """

    _fields_ = [(name, c_int32) for name in ("wrap_bits", "saturates", "low", "high")]


class EpilogueParams(ctypes.Structure):
    """The epilogue of a kernel: `Tail` of cpp/rows.h. Made by `epilogue.Epilogue.build`.

    Args:
        sums, added: the overflow of the kernel's sums, and of the sum with another operand.
        clamps: whether there is a clamp; its limits are `clamp_low` and `clamp_high`, per channel.
        adds: PLUS, MINUS, FROM, or 0 for no sum with another operand.
        outputs: how many of `output` are stored.
    """

    _fields_ = [
        ("sums", OverflowRule), ("added", OverflowRule), *((name, c_int32) for name in ("clamps", "adds", "outputs")),
        ("clamp_low", c_void_p), ("clamp_high", c_void_p),
        ("addend", Addend), ("output", Output * 3),
    ]  # fmt: skip


class Conv(ctypes.Structure):
    """A convolution: `Conv` of cpp/conv.h, which lays out the weights. Made by `calls.conv_call` from `weights.Packed`.

    Args:
        channels: the bytes of a pixel as products read it: two for each channel where they are of words.
        values: the type code of the activations.
        widens: whether bytes are read as words, from which `zero` is subtracted.
        fits: how many sums of pairs of products 16 bits hold, see `weights.pairs_that_fit`; 0 where no pairs are added.
        panel: output channels that are computed at once, a multiple of 16; 0: every channel by itself.
        panels: of a group.
        depth: the bytes of a tap, a multiple of 4.
        taps: positions of the window that are read one after the other, as `gather` says: its pixels, its rows, or 1.
        gather: how the bytes of a window are read: `enum Gather` of cpp/conv.h.
        steps: of a window that is read in matrix tiles; 0 for no tiles.
        woven: rows of a window that tiles read at once; 0 where they do not.
        winograd: the side of the squares whose windows are transformed, see `weights.winograd_weights`; taps are then
            their points. 0 for other weights.
        offset: by output channel, bias - zero point * sum of the weights.
        zeros: the zero points of a pixel, as products read them.
        four_starts, places, four_taps: of weights in runs of four whose pairs fit, see `weights.Packed`; null for
            others.
    """

    _fields_ = [
        *((name, c_int32) for name in ("channels", "out_channels", "groups", "kernel_h", "kernel_w", "stride_h")),
        *((name, c_int32) for name in ("stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "values")),
        ("widens", c_int32), ("zero", c_int32), ("fits", c_int32),
        *((name, c_int32) for name in ("panel", "panels", "depth", "taps", "gather", "steps", "woven")),
        ("winograd", c_int32),
        ("weight", c_void_p), ("offset", c_void_p), ("zeros", c_void_p),
        ("four_starts", c_void_p), ("places", c_void_p), ("four_taps", c_void_p),
    ]  # fmt: skip


class Shape(ctypes.Structure):
    """The sizes of the images of a convolution."""

    _fields_ = [(n, c_int64) for n in ("images", "height", "width", "out_height", "out_width")]


class Window(ctypes.Structure):
    """A pooling."""

    _fields_ = [
        *((n, c_int64) for n in ("images", "height", "width", "out_height", "out_width", "channels")),
        *((n, c_int32) for n in ("kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w")),
        ("dilation_h", c_int32), ("dilation_w", c_int32),
    ]  # fmt: skip


class Operand(ctypes.Structure):
    """An operand of a product: its stored integers, the code of their type, and their zero point."""

    _fields_ = [("data", c_void_p), ("type", c_int32), ("zero", c_int32)]


class BroadcastLayout(ctypes.Structure):
    """How the smaller operand of a product repeats along the larger one: `Spread` of cpp/multiply.cpp. The larger one
    has [groups][repeat][inner] entries for the [groups][inner] entries of the smaller one.
    """

    _fields_ = [("repeat", c_int64), ("inner", c_int64)]


class Matrices(ctypes.Structure):
    """Products of matrices."""

    _fields_ = [
        *((n, c_int64) for n in ("outer", "inner", "rows", "columns", "depth", "a_outer", "a_inner", "a_row")),
        *((n, c_int64) for n in ("b_outer", "b_inner", "b_row", "b_column")),
        *((n, c_int32) for n in ("a_type", "a_zero", "b_type", "b_zero")),
        ("offset", c_void_p),
    ]


class Grid(ctypes.Structure):
    """The integers to which real values are rounded, and how they are stored.

    Args:
        low, high: the limits of the centered integers.
        rounding: an index in ROUNDINGS.
    """

    _fields_ = [
        *((n, c_float) for n in ("scale", "low", "high")),
        *((n, c_int32) for n in ("rounding", "type", "zero")),
    ]


class NormOutput(ctypes.Structure):
    """What a layer norm stores: integers, or floats where the type of `grid` says so."""

    _fields_ = [("grid", Grid), ("data", c_void_p)]


class Norm(ctypes.Structure):
    """Layer norms of rows: `Norm` of cpp/norm.cpp.

    Args:
        epsilon: what is added to the variance.
        outputs: the number of outputs at `output`.
        weight, bias: an entry per column, in float32; null for ones and zeros.
    """

    _fields_ = [
        ("rows", c_int64), ("columns", c_int64), ("epsilon", c_float), ("outputs", c_int32),
        ("weight", c_void_p), ("bias", c_void_p), ("output", c_void_p),
    ]  # fmt: skip


class Attention(ctypes.Structure):
    """Two products of matrices with a softmax between them: `Attention` of cpp/attention.cpp.

    Args:
        scores, product: of queries and keys; of the softmax, as it is stored, and values.
        scale: of the scores, before the mask is added.
        causal: whether row i sees columns up to i alone.
        registers: the floats of a register of torch's softmax.
        grid: of the softmax.
        mask: what is added to the scores, in float32; null for nothing. Its steps are in elements.
        to_outer, to_inner: the steps of what is stored.
    """

    _fields_ = [
        ("scores", Matrices), ("product", Matrices), ("scale", c_float), ("causal", c_int32), ("registers", c_int32),
        ("grid", Grid), ("mask", c_void_p),
        *((n, c_int64) for n in ("mask_outer", "mask_inner", "mask_row", "to_outer", "to_inner")),
    ]  # fmt: skip


_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "hago_adds_bytes": (c_int,),
    "hago_has_tiles": (),
    "hago_reads_signed": (),
    "hago_widest_panel": (),
    "hago_winograd_channels": (),
    "hago_conv": (c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "hago_pair_fours": (c_void_p, c_void_p, c_int64, c_int, c_void_p, c_void_p),
    "hago_conv_max_pool": (*[c_void_p] * 6, c_int),
    "hago_rows": (c_void_p, c_void_p, c_int, c_int, c_int64, c_int64, c_int),
    "hago_quantize": (
        *(c_void_p, *[c_int64] * 6, c_void_p),
        *(c_float, c_float, c_float, c_int, c_int, c_int, c_int),
    ),
    "hago_norm": (c_void_p, c_void_p, c_int),
    "hago_count_bins": (c_void_p, c_int64, c_double, c_int32, c_void_p, c_int),
    "hago_max_pool": (c_void_p, c_int, c_void_p, c_void_p, c_int),
    "hago_sum_pool": (c_void_p, c_void_p, c_int, c_int, c_void_p, c_int64, c_int),
    "hago_multiply": (*[c_void_p] * 4, *[c_int64] * 3, c_int),
    "hago_matmul": (*[c_void_p] * 4, c_int64, c_int),
    "hago_attention": (*[c_void_p] * 6, c_int64, c_int),
    "hago_softmax": (c_int64, c_int64, c_int, c_void_p),
    "hago_table": (c_void_p, c_void_p, c_void_p, c_int64, c_int),
    "hago_pair_table": (*[c_void_p] * 4, c_int64, c_int),
}


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library, or the reason why there is none.

    Args:
        calls: its functions; None where there is none.
        why: where it comes from and its instruction set, or why there is none.
        switched_off: whether there is none because the user wants none.
        instruction_set: the name of the set that it is for; empty where there is none, or the compiler found it.
    """

    calls: Any
    why: str
    switched_off: bool = False
    instruction_set: str = ""

    @property
    def has_tiles(self) -> bool:
        """Whether the processor has matrix tiles (AMX) and the system lets this process use them."""
        return self.calls is not None and bool(self.calls.hago_has_tiles())


@functools.cache
def library(instruction_set: str | None = None) -> Library:
    """The library, built on first use and loaded once per process.

    Args:
        instruction_set: the name of the largest instruction set that it may use; by default what `HAGO_MAX_CPU_ISA`
            says, else all that the processor has.

    Raises:
        HagoError: this architecture has no such instruction set.
    """
    target = largest_set(instruction_set)
    if os.environ.get("HAGO_NATIVE") == "0":
        why = "no native kernels: switched off by HAGO_NATIVE=0; unset it to use them"
        return Library(None, why, switched_off=True)
    try:
        if (shipped := _shipped(target)) is not None:
            calls, used, origin = typed(shipped), target, f"shipped with hago, for {_named(target)}"
        else:
            built = build(target)
            calls, used, origin = typed(ctypes.CDLL(str(built.path))), built.target, _origin(built, target)
    except (OSError, subprocess.SubprocessError, LogError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        why = next((line for line in lines if "error" in line), lines[-1])[:200]
        warn(
            f"hago's kernels cannot be built ({why}): slower kernels of torch run instead, with the same results. "
            "Install a C++ compiler with OpenMP (g++ or clang++) and see that the folder HAGO_CACHE names can be "
            "written; HAGO_NATIVE=0 selects the slower kernels without this warning"
        )
        return Library(None, f"no native kernels: {why}")
    why = f"{origin}: {products_text(calls.hago_adds_bytes(0))}"
    return Library(calls, why, instruction_set="" if used is None else used.name)


def _origin(built: Built, wanted: InstructionSet | None) -> str:
    """Where a library that was built here comes from, and what it lacks."""
    used = _named(built.target)
    if built.target is not None and wanted is not None and built.target != wanted:
        why = f"the compiler knows no {wanted.name}, which the processor has; a newer one, such as GCC 11, does"
        used = f"{built.target.name} ({why})"
    threads = "" if built.threads else ", on one thread (the compiler has no OpenMP; g++ has, and clang++ with libomp)"
    return f"built from source on this machine, for {used}{threads}"


def _named(used: InstructionSet | None) -> str:
    return "this processor" if used is None else f"{used.name}{limited_text(used)}"


def typed(calls: ctypes.CDLL) -> ctypes.CDLL:
    """The same library, with the types of the arguments and results of its functions declared."""
    for name, arguments in _ARGUMENTS.items():
        function = getattr(calls, name)
        function.argtypes, function.restype = arguments, None if arguments and arguments[0] is c_void_p else c_int
    return calls


def products_text(dots: int) -> str:
    """How kernels multiply bytes, and what would be faster.

    Args:
        dots: NEVER, EXACTLY or IF_PAIRS_FIT.
    """
    if dots == EXACTLY:
        return "four bytes are multiplied and added at once"
    pairs = ", or in pairs or fours where 16 bits hold the sums of their products" if dots == IF_PAIRS_FIT else ""
    faster = "dot products" if machine() == "aarch64" else "VNNI"
    return f"bytes are multiplied as words of 16 bits{pairs}; a processor with {faster} multiplies four at once"


def _shipped(target: InstructionSet | None) -> ctypes.CDLL | None:
    """The library for an instruction set that came with hago; None where there is none, or none that this system
    loads, such as one whose torch has no OpenMP of GCC's."""
    if target is None or not (path := SHIPPED / target.file_name).exists():
        return None
    try:
        _share_openmp()
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _share_openmp() -> None:
    """Let libraries without an OpenMP of their own call torch's, which its wheels for aarch64 load for torch alone.
    Nothing is done where the system does not list what a process has loaded; on x86 nothing need be."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    except OSError:
        return
    paths = [line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line]
    if paths:
        ctypes.CDLL(min(paths, key=lambda path: "torch" not in path), ctypes.RTLD_GLOBAL)
