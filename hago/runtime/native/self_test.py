"""Self-tests of the kernels: every kernel is compared with exact integers once per process.

Without VNNI, many int8 kernels add pairs of products in a saturating int16, which makes most sums wrong, and a compiler
may trade accuracy for speed. So every kernel computes on extreme operands first, and it is used only if all integers
are right.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.arithmetic.numerics import Requantize, apply_simq
from hago.arithmetic.types import INT32, UINT8, ZERO, QParams, SimQ
from hago.calibration import count_in_bins
from hago.runtime.native import library as native
from hago.runtime.native.calls import BinCounter, MatmulCall, MultiplyCall, NormCall, RowsCall, TableCall, conv_call
from hago.runtime.native.epilogue import Epilogue, StoredOutput
from hago.runtime.native.onednn import onednn_conv, onednn_fused
from hago.runtime.native.requantize import AS_IS, StorageFormat, period, requantization_of
from hago.runtime.native.weights import WINOGRAD, Geometry, Packed, Products, pack, pack_for

#: (uint8 image, int8 weight, groups) to the sums.
SumsOf = Callable[[Tensor, Tensor, int], Tensor]
#: (uint8 image, int8 weight, ratio, zero point of the output) to uint8, requantized in the kernel.
FusedOf = Callable[[Tensor, Tensor, float, int], Tensor]
#: RuntimeError: oneDNN refuses on this processor, or torch was built without it and has no kernel for the CPU
#: (NotImplementedError is one). AttributeError: this version of torch has no operator of that name.
REFUSALS: Final = (RuntimeError, AttributeError)
_SUMS: Final = QParams(torch.ones((), dtype=torch.float64), ZERO, INT32.min, INT32.max, INT32)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a kernel is exact on this machine, and the evidence."""

    exact: bool
    why: str


@dataclass(frozen=True, slots=True)
class ExactKernels:
    """The kernels that are exact on this machine. Made once per process by `exact_kernels`.

    Args:
        calls: the library of native kernels, or None.
        why: where the library comes from and its instruction set, or why there is none.
        passes, conv: its passes over whole values, and its convolution.
        tiles: that convolution on matrix tiles.
        words: that convolution of 16-bit activations.
        products: native products of two values, elementwise and of matrices.
        softmax: the native softmax, whose bits must be those of torch's.
        norm: native layer norms, whose bits must be those of torch's.
        of_onednn: tests oneDNN when `onednn` or `fused` is first read. It takes about as long as all other tests
            together, and where the native convolution is exact, no model reads them.
        softmax_registers: the floats of a register of torch's softmax; 0 where ours is not used.
        switched_off: whether there is no library because the user wants none.
    """

    calls: Any
    why: str
    passes: Verdict
    conv: Verdict
    tiles: Verdict
    words: Verdict
    products: Verdict
    softmax: Verdict
    norm: Verdict
    of_onednn: Callable[[], tuple[Verdict, Verdict]]
    softmax_registers: int = 0
    switched_off: bool = False

    @property
    def onednn(self) -> Verdict:
        """Of oneDNN's int8 convolution and matrix product, with unscaled sums."""
        return self.of_onednn()[0]

    @property
    def fused(self) -> Verdict:
        """Of the same with requantization by powers of two."""
        return self.of_onednn()[1]

    @property
    def outrun_floats(self) -> bool:
        """Whether a Plan runs faster in integers than it is simulated on float carriers.

        Without kernels of our own, sums of products are made by oneDNN without what follows them, or in float64, and
        passes in int64: 2 to 12 float forwards on ResNet-20 and MobileNetV2, where a simulation takes about one.
        """
        return self.passes.exact and self.conv.exact

    @property
    def count_bins(self) -> BinCounter | None:
        """The kernel that counts values for histograms; None where there are no kernels."""
        return None if self.calls is None else BinCounter(self.calls)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdict of every kind of kernels, by name."""
        return {
            **{"native passes": self.passes, "native products": self.products, "native convolution": self.conv},
            **{"native convolution, AMX": self.tiles, "native convolution, int16": self.words},
            **{"native softmax": self.softmax, "native layer norm": self.norm},
            **{"oneDNN": self.onednn, "oneDNN, fused": self.fused},
        }

    def __str__(self) -> str:
        head = f"kernels {self.why}" if self.calls is not None else f"no kernels ({self.why})"
        verdicts = {name: verdict for name, verdict in self.verdicts.items() if verdict.why != self.why}
        return "; ".join([head, *(f"{n} {'exact' if v.exact else 'not used'} ({v.why})" for n, v in verdicts.items())])


_OFF: Final = Verdict(False, "switched off")
NOTHING: Final = ExactKernels(
    None, "switched off", _OFF, _OFF, _OFF, _OFF, _OFF, _OFF, _OFF, of_onednn=lambda: (_OFF, _OFF)
)


@functools.cache
def exact_kernels() -> ExactKernels:
    """The kernels that are exact in this process. The first call tests them, in some tenths of a second."""
    return examine(native.library())


def examine(library: native.Library) -> ExactKernels:
    """The kernels of a library, and of torch, that are exact in this process."""
    absent = Verdict(False, library.why)
    passes = check_passes(library.calls) if library.calls is not None else absent
    conv = passes
    if passes.exact:
        conv = check_sums(lambda x, w, groups: native_sums(library.calls, x, w, groups, False))
        if conv.exact and library.calls.hago_winograd_channels() > 0:
            squares = check_squares(library.calls)
            conv = conv if squares.exact else squares
    tiles = conv
    if conv.exact:
        tiles = Verdict(False, "the processor has no AMX")
        if library.has_tiles:
            tiles = check_sums(lambda x, w, groups: native_sums(library.calls, x, w, groups, True))
    words = check_words(library.calls) if conv.exact else conv
    products = check_products(library.calls) if passes.exact else passes
    softmax, registers = check_softmax(library.calls) if products.exact else (products, 0)
    norm = check_norm(library.calls) if products.exact else products
    calls, why = (library.calls, library.why) if passes.exact else (None, passes.why)
    return ExactKernels(
        calls,
        why,
        passes,
        conv,
        tiles,
        words,
        products,
        softmax,
        norm,
        check_onednn,
        registers,
        library.switched_off,
    )


# ---------------------------------------------------------------- tests
def _verdict(
    cases: Iterator[tuple[Callable[[], Tensor], Tensor]],
    kind: str,
    refusals: tuple[type[Exception], ...] = (),
    said: str = "are wrong",
) -> Verdict:
    """Compare what a kernel computes with what it must compute.

    Args:
        cases: calls of the kernel, each with the exact tensor.
        kind: of the values, for the verdict.
        refusals: errors by which the kernel says that this process does not have it.
        said: of the values that differ, for the verdict.
    """
    wrong = total = 0
    for compute, exact in cases:
        try:
            computed = compute()
        except refusals as error:
            return Verdict(False, f"refused: {str(error).strip().splitlines()[0][:100]}")
        wrong += int((computed != exact).sum())
        total += exact.numel()
    return Verdict(not wrong, f"{wrong} of {total} {kind} {said}")


def _exact_sums(x: Tensor, w: Tensor, groups: int) -> Tensor:
    """The sums of a convolution without padding, exact in float64."""
    return F.conv2d(x.to(torch.float64), w.to(torch.float64), groups=groups)


def check_sums(sums_of: SumsOf) -> Verdict:
    """Compare dense, grouped and depthwise convolutions of extreme and random bytes with exact sums."""

    def cases() -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
        for x, w, groups in _operands():
            yield partial(sums_of, x, w, groups), _exact_sums(x, w, groups)

    return _verdict(cases(), "sums of extreme operands", REFUSALS)


@functools.cache
def check_onednn() -> tuple[Verdict, Verdict]:
    """The verdicts of oneDNN's sums, and of the sums that it requantizes."""
    sums = check_sums(onednn_conv)
    return sums, check_fused(onednn_fused) if sums.exact else sums


def check_squares(calls: Any) -> Verdict:
    """Compare convolutions by Winograd's algorithm, for every side of squares, with exact sums: of extreme and random
    bytes of both types with a zero point, of images whose edges squares pass, in whole and in started registers."""
    generator = torch.Generator().manual_seed(0)

    def cases() -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
        kinds = ((torch.uint8, 200), (torch.uint8, 0), (torch.int8, 72))
        for side, channels, (dtype, zero) in itertools.product(WINOGRAD, (64, 70), kinds):
            x = _extreme((1, channels, 9, 7), dtype, generator)
            w = torch.randint(-128, 128, (20, channels, 3, 3), generator=generator).to(torch.int8)
            geometry = Geometry(channels, len(w), 1, (3, 3), (1, 1), (1, 1), (1, 1))
            packed = pack(calls, w, geometry, Products(words=True, winograd=side), tiles=False)
            exact = F.conv2d(x.to(torch.float64) - zero, w.to(torch.float64), padding=1)
            yield partial(packed_sums, calls, x, packed, geometry, (native.TYPES[str(dtype)[6:]], zero)), exact

    return _verdict(cases(), "sums of squares")


def check_words(calls: Any) -> Verdict:
    """Compare convolutions of extreme and random 16-bit values and weights with exact sums modulo 2**32."""
    generator = torch.Generator().manual_seed(0)

    def cases() -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
        for channels, out, groups, size in WINDOWS:
            x = _extreme((2, channels, 5, 4), torch.int16, generator)
            w = _extreme((out, channels // groups, size, size), torch.int16, generator)
            exact = _exact_sums(x, w, groups).to(torch.int64).to(torch.int32)
            yield partial(_sums, calls, x, w, groups, native.TYPES["int16"], False, 0), exact

    return _verdict(cases(), "sums of extreme operands")


def _operands() -> Iterator[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    for channels, out, groups, size in WINDOWS:
        shape = (2, channels, 5, 4)
        kernel = (out, channels // groups, size, size)
        ends = torch.randint(0, 2, shape, generator=generator) * 255
        signs = torch.where(torch.randint(0, 2, kernel, generator=generator) > 0, 127, -128)
        for x, w in (
            (torch.full(shape, 255), torch.full(kernel, 127)),
            (torch.full(shape, 255), torch.full(kernel, -128)),
            (ends, signs),
            (torch.randint(0, 256, shape, generator=generator), torch.randint(-128, 128, kernel, generator=generator)),
            # values of which 16 bits hold the sums of one, two and four pairs of products
            *((ends.clamp_max(127), signs), (ends, signs.clamp(-32, 31)), (ends, signs.clamp(-16, 15))),
            # pairs whose sums are the greatest that 16 bits hold, and some of which they do not hold the sums
            (ends, torch.where(torch.rand(kernel, generator=generator) < 0.02, signs, signs.clamp(-64, 64))),
        ):
            yield x.to(torch.uint8), w.to(torch.int8), groups


def check_fused(fused_of: FusedOf) -> Verdict:
    """Compare sums that the kernel requantizes by powers of two, ties among them, with equation N3."""

    def cases() -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
        for x, w, groups in _operands():
            if groups > 1:
                continue
            sums = _exact_sums(x, w, groups).to(torch.int64)
            for n, zero in itertools.product((0, 1, 7, 10, 16), (0, 128)):
                target = QParams(torch.tensor(2.0**n, dtype=torch.float64), torch.tensor(zero), 0, 255, UINT8)
                exact = apply_simq(sums, SimQ(_SUMS, target), Requantize()) + zero
                yield partial(fused_of, x, w, 2.0**-n, zero), exact

    return _verdict(cases(), "requantized sums", REFUSALS)


def check_products(calls: Any) -> Verdict:
    """Compare both products of extreme and random values of every type with exact integers modulo 2**32."""
    generator = torch.Generator().manual_seed(0)

    def cases() -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
        kinds = itertools.product((torch.uint8, torch.int8, torch.int16), repeat=2)
        for dtypes, zeros in itertools.product(kinds, ((0, 0), (3, -5), (131, 0), (-3, 128))):
            small = torch.int16 not in dtypes or zeros == (0, 0)  # int16 must hold what is multiplied, centered
            for shapes in PRODUCTS if small else PRODUCTS[:2]:
                pair = [_extreme(shape, dtype, generator) for shape, dtype in zip(shapes, dtypes, strict=True)]
                a, b = (x.to(torch.int64) - zero for x, zero in zip(pair, zeros, strict=True))
                formats = tuple((native.TYPES[str(x.dtype)[6:]], zero) for x, zero in zip(pair, zeros, strict=True))
                exact = a @ b if len(shapes[0]) == 3 else a * b
                compute = partial(_product, calls, pair, (formats[0], formats[1]), len(shapes[0]) == 3)
                yield compute, exact.to(torch.int32)

    return _verdict(cases(), "products of extreme operands")


#: Channels, output channels, groups and width of windows: dense, in rows, by Winograd, depthwise, grouped.
WINDOWS: Final = ((64, 80, 1, 1), (12, 20, 1, 3), (40, 20, 1, 3), (80, 80, 80, 3), (12, 8, 2, 3), (3, 5, 1, 3))
#: Shapes of operands: of products entry by entry, then of matrices.
PRODUCTS: Final = (
    *(((2, 40, 3, 5), (2, 40, 1, 1)), ((700,), (700,))),
    *(((2, 13, 37), (1, 37, 40)), ((1, 25, 64), (2, 64, 65))),
)


def _extreme(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    ends = torch.iinfo(dtype)
    drawn = torch.randint(ends.min, ends.max + 1, shape, generator=generator)
    drawn = drawn.where(torch.rand(shape, generator=generator) < 0.5, torch.tensor(ends.min))
    return drawn.where(torch.rand(shape, generator=generator) < 0.8, torch.tensor(ends.max)).to(dtype)


def _product(calls: Any, pair: list[Tensor], formats: tuple[StorageFormat, StorageFormat], matrices: bool) -> Tensor:
    """The unscaled sums of a product."""
    none = (None, None)
    epilogue = Epilogue(pair[1].shape[-1] if matrices else 1, [], stored=[StoredOutput("", AS_IS, _SUMS)]).build()
    multiply = MultiplyCall(calls, epilogue, formats, none, 1, None)
    output: Tensor = (MatmulCall(calls, epilogue, formats, none, None) if matrices else multiply)(pair)[0]
    return output


def check_passes(calls: Any) -> Verdict:
    """Compare every form and rounding that the library has with `numerics`, on ties, extremes and random sums, a table
    with torch's indexing, and counts of values in bins with torch's."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, 1, -1, 3, -3, 5, -5, 6, -6, 2**24 + 1, -(2**24) - 1, 2**31 - 1, -(2**31)])
    sums = torch.cat([ends, torch.randint(-(2**31), 2**31, (300,), generator=generator), torch.arange(-700, 700)])

    def cases() -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
        for how, step in itertools.product(_requantizations(), (2.0**-1, 2.0, 2.0**9, 733.1, 2.0**17 / 3)):
            shifts = math.log2(step).is_integer()
            if (how.form == "shift" and not shifts) or (how.form == "multiplier_shift" and step < 1):
                continue
            simq = SimQ(_SUMS, QParams(torch.tensor(step, dtype=torch.float64), torch.tensor(7), 0, 255, UINT8))
            yield partial(_requantized, calls, sums, simq, how), apply_simq(sums, simq, how) + 7
        entries, x = (torch.randint(0, 256, (size,), generator=generator).to(torch.uint8) for size in (256, 1001))
        yield lambda: TableCall(calls, entries, torch.uint8)([x])[0], entries[x.long()]
        for limit in (2.0**-100, 2.0**-3, 1.0, 2.0**12, 2.0**127):
            values = _of_bins(limit, generator)
            plain = count_in_bins(values.view(1, 1, -1), torch.tensor([limit], dtype=torch.float64), _BINS)[0]
            yield partial(BinCounter(calls), values, _BINS / 2 / limit, _BINS), plain
            # many, which several threads count
            yield partial(BinCounter(calls), values.repeat(64), _BINS / 2 / limit, _BINS), 64 * plain

    return _verdict(cases(), "requantized sums, looked up bytes and counts")


#: Of the histograms that are counted.
_BINS: Final = 256


def _of_bins(limit: float, generator: torch.Generator) -> Tensor:
    """Values up to a limit: the edges between bins, their neighbours, both zeros, and random ones."""
    edges = torch.arange(-_BINS // 2, _BINS // 2 + 1) * (limit / (_BINS // 2))
    beside = [torch.nextafter(edges, torch.tensor(end)).clamp(-limit, limit) for end in (-math.inf, math.inf)]
    drawn = (torch.rand(1001, generator=generator) * 2.0 - 1.0) * limit
    return torch.cat([edges, *beside, torch.tensor([-0.0]), drawn, drawn * 2.0**-40, drawn.relu()])


def _requantizations() -> Iterator[Requantize]:
    for rounding in native.ROUNDINGS:
        yield Requantize("float32", rounding)
        yield Requantize("multiplier_shift", rounding)
        yield Requantize("shift", rounding)
    yield Requantize("multiplier_shift", "half_up", two_stage=True)


def _requantized(calls: Any, sums: Tensor, simq: SimQ, how: Requantize) -> Tensor:
    requantization = requantization_of(simq, how, 1, 2**31 - 1)
    assert not isinstance(requantization, str) and simq.target is not None
    epilogue = Epilogue(1, [], stored=[StoredOutput("", requantization, simq.target)]).build()
    rows = RowsCall(calls, epilogue, (native.TYPES["int32"], 0), None, period(1))
    output: Tensor = rows([sums.to(torch.int32)])[0]
    return output


#: The floats in a register of torch's softmax: with AVX-512, and with AVX2.
REGISTERS: Final = (16, 8)


#: Of the values of kernels whose bits must be those of torch's.
_OTHER_BITS: Final = "have other bits than torch's"


def check_softmax(calls: Any) -> tuple[Verdict, int]:
    """Compare the softmax of rows of many lengths and ranges with torch's, bit for bit.

    Returns:
        The verdict, and the floats in a register with which both are equal; 0 if there are none.
    """
    generator, rows = torch.Generator().manual_seed(0), []
    for columns in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 50, 64, 100, 128, 197, 257, 512, 577):
        x = torch.randn(24, columns, generator=generator) * torch.logspace(-3, 3, 24)[:, None]
        x[::5] = x[::5].where(torch.rand(x[::5].shape, generator=generator) < 0.7, torch.tensor(-math.inf))
        x[:, 0] = 0.0  # no row is -inf everywhere
        rows.append(x)
    for registers in REGISTERS:
        cases = ((partial(_softmax, calls, x, registers), F.softmax(x, -1)) for x in rows)
        verdict = _verdict(cases, "floats", said=_OTHER_BITS)
        if verdict.exact:
            return verdict, registers
    return verdict, 0


def _softmax(calls: Any, x: Tensor, registers: int) -> Tensor:
    """The softmax of the last axis of a matrix; without one, what is no softmax."""
    made = x.clone()
    calls.hago_softmax(*x.shape, registers, made.data_ptr())
    return made


def check_norm(calls: Any) -> Verdict:
    """Compare layer norms of rows of many lengths and ranges, with and without weights, with torch's, bit for bit."""
    generator = torch.Generator().manual_seed(0)

    def cases() -> Iterator[tuple[Callable[[], Tensor], Tensor]]:
        for columns in (1, 5, 8, 13, 64, 100, 129, 384, 577, 1024, 2051):
            x = torch.randn(20, columns, generator=generator) * torch.logspace(-3, 3, 20)[:, None]
            x += torch.randn(20, 1, generator=generator)
            weight, bias = torch.randn(2, columns, generator=generator)
            for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
                yield partial(_norm, calls, x, w, b), F.layer_norm(x, [columns], w, b, 1e-5)

    return _verdict(cases(), "floats", said=_OTHER_BITS)


def _norm(calls: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The layer norms of rows."""
    call = NormCall(calls, lambda values: (), x.shape[1], 1e-5, weight, bias, (None,))
    norm: Tensor = call([x])[0]
    return norm


def native_sums(calls: Any, x: Tensor, w: Tensor, groups: int, tiles: bool) -> Tensor:
    """The sums of the native convolution of uint8 values, checked against those of the same values as int8."""
    unsigned = _sums(calls, x, w, groups, native.TYPES["uint8"], tiles, 0)
    signed = _sums(calls, (x ^ 128).view(torch.int8), w, groups, native.TYPES["int8"], tiles, -128)
    return torch.where(unsigned == signed, unsigned, torch.iinfo(torch.int32).max)


def _sums(calls: Any, x: Tensor, w: Tensor, groups: int, type_code: int, tiles: bool, zero: int) -> Tensor:
    """The sums of the native convolution of values of a type, with their zero point subtracted."""
    out, each, height, width = w.shape
    geometry = Geometry(each * groups, int(out), groups, (int(height), int(width)), (1, 1), (0, 0), (1, 1))
    most = None if x.dtype == torch.int16 else int(x.max()) + 128 * (x.dtype == torch.int8)
    return packed_sums(calls, x, pack_for(calls, w, geometry, most, tiles), geometry, (type_code, zero))


def packed_sums(calls: Any, x: Tensor, packed: Packed, geometry: Geometry, source: StorageFormat) -> Tensor:
    """The sums of the native convolution by packed weights, of values as they are stored."""
    epilogue = Epilogue(geometry.out_channels, [], stored=[StoredOutput("", AS_IS, _SUMS)]).build()
    output: Tensor = conv_call(calls, geometry, packed, source, epilogue)([x])[0]
    return output
