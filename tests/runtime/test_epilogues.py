"""What kernels do with their sums, on every instruction set: sums with another operand, clamps, and requantizations in
every form, of tiles of all widths, equal the arithmetic of `numerics`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from products import whole
from torch import Tensor

from hago.arithmetic.numerics import Requantize, apply_simq
from hago.arithmetic.types import INT8, INT16, INT32, UINT8, ZERO, DType, QParams, SimQ
from hago.runtime.native import library as native
from hago.runtime.native.calls import MatmulCall, RowsCall, conv_call
from hago.runtime.native.epilogue import AddedOperand, BuiltEpilogue, Epilogue, StoredOutput
from hago.runtime.native.requantize import Requantization, period, requantization_of, to_real
from hago.runtime.native.weights import Geometry, pack_for

from .instruction_sets import INSTRUCTION_SETS, library_for

#: The first three are computed in vectors where shifts allow it, the others row by row.
HOWS: Final = {
    "float32": Requantize("float32"),
    "multiplier_shift": Requantize("multiplier_shift", "half_up"),
    "two stages": Requantize("multiplier_shift", "half_away", two_stage=True),
    "float32, half away": Requantize("float32", "half_away"),
    "multiplier_shift, half even": Requantize("multiplier_shift", "half_even"),
    "shift": Requantize("shift", "half_up"),
}
CHANNELS: Final = (1, 5, 8, 16, 17, 24, 32, 33, 40, 48, 55, 56, 64, 65, 72, 100, 130)


@dataclass(frozen=True)
class Sums:
    """Sums of a kernel as (rows, channels), and the call that computes them with an epilogue.

    Args:
        run: from the epilogue and the other operand, as (rows, channels), to the outputs, which have that shape, too.
    """

    exact: Tensor
    run: Callable[[BuiltEpilogue, Tensor | None], list[Tensor]]


def conv_sums(library: native.Library, channels: int, depthwise: bool, seed: int) -> Sums:
    generator = torch.Generator().manual_seed(seed)
    dtype = (torch.uint8, torch.int8, torch.int16)[seed % 3]
    side, groups, depth = (3, channels, channels) if depthwise else (1, 1, (12, 64, 70)[seed % 5 % 3])
    x, zero = drawn(dtype, (2, depth, 5, 7), generator), 0 if dtype == torch.int16 else 3
    w = drawn(torch.int16 if dtype == torch.int16 else torch.int8, (channels, depth // groups, side, side), generator)
    w >>= 7 * (dtype == torch.int16)  # int32 holds the sums
    exact = F.conv2d(x.double() - zero, w.double(), padding=side // 2, groups=groups).to(torch.int64)
    geometry = Geometry(depth, channels, groups, (side, side), (1, 1), (side // 2, side // 2), (1, 1))
    most = None if dtype == torch.int16 else 255
    packed = pack_for(library.calls, w, geometry, most, library.has_tiles and dtype != torch.int16)
    source = (native.TYPES[str(dtype)[6:]], zero)

    def run(epilogue: BuiltEpilogue, addend: Tensor | None) -> list[Tensor]:
        other = [] if addend is None else [addend.view(2, 5, 7, channels).permute(0, 3, 1, 2)]
        outputs = conv_call(library.calls, geometry, packed, source, epilogue)([x, *other])
        return [output.permute(0, 2, 3, 1).reshape(-1, channels) for output in outputs]

    return Sums(exact.permute(0, 2, 3, 1).reshape(-1, channels), run)


def matrix_sums(library: native.Library, channels: int, seed: int) -> Sums:
    generator = torch.Generator().manual_seed(seed)
    a, b = (drawn(torch.uint8, shape, generator) for shape in ((1, 13, 37), (1, 37, channels)))
    formats = ((native.TYPES["uint8"], 3), (native.TYPES["uint8"], 131))
    exact = (a.to(torch.int64) - 3) @ (b.to(torch.int64) - 131)

    def run(epilogue: BuiltEpilogue, addend: Tensor | None) -> list[Tensor]:
        other = [] if addend is None else [addend.view(1, 13, channels)]
        outputs = MatmulCall(library.calls, epilogue, formats, (None, None), None)([a, b, *other])
        return [output.view(-1, channels) for output in outputs]

    return Sums(exact.view(-1, channels), run)


def stored_sums(library: native.Library, channels: int, seed: int) -> Sums:
    generator = torch.Generator().manual_seed(seed)
    dtype = (torch.int32, torch.uint8, torch.int16)[seed % 3]
    x = drawn(dtype, (1 if seed % 2 else 11, channels), generator) >> (8 if dtype == torch.int32 else 0)

    def run(epilogue: BuiltEpilogue, addend: Tensor | None) -> list[Tensor]:
        source = (native.TYPES[str(dtype)[6:]], 5)
        call = RowsCall(library.calls, epilogue, source, 1, period(channels))
        return list(call([x] if addend is None else [x, addend]))

    return Sums(x.to(torch.int64) - 5, run)


KERNELS: Final[dict[str, Callable[[native.Library, int, int], Sums]]] = {
    "convolution": lambda library, channels, seed: conv_sums(library, channels, False, seed),
    "depthwise": lambda library, channels, seed: conv_sums(library, channels, True, seed),
    "matrices": matrix_sums,
    "pass": stored_sums,
}


def drawn(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random values of a dtype, both ends among them."""
    ends = torch.iinfo(dtype)
    values = torch.randint(ends.min, ends.max + 1, shape, generator=generator)
    for end in (ends.min, ends.max):
        values = values.where(torch.rand(shape, generator=generator) < 0.9, torch.tensor(end))
    return values.to(dtype)


@dataclass(frozen=True)
class Kind:
    """What an epilogue consists of.

    Args:
        addend: the type of the other operand of a sum; None for no sum.
        sign: of the sum.
        via: whether the kernel's own sums are requantized twice before the sum, or the outputs where there is none.
        outputs: types, or "raw" for the sums as they are, and "real" for real values.
    """

    addend: DType | None
    sign: int
    via: bool
    clamps: bool
    outputs: tuple[str, ...]


OUTPUTS: Final = (
    *(("uint8",), ("int8",), ("uint8",), ("int16",), ("int32",), ("real",), ("raw",)),
    *(("uint8", "int8"), ("raw", "uint8"), ("raw", "int8"), ("int16", "uint8", "real"), ("uint8", "uint8", "raw")),
)
#: Sums that `end_quick_sum` of quick_sums.cpp makes in registers, and some that it does not.
QUICK: Final = tuple(
    Kind(addend, native.PLUS, via, False, outputs)
    for outputs in (("uint8",), ("int8",), ("uint8", "int8"), ("raw", "uint8"), ("int16",))
    for addend in (UINT8, INT8, INT32)
    for via in (False, True)
)


def drawn_kind(rng: random.Random) -> Kind:
    addend = rng.choice([None, None, UINT8, INT8, INT16, INT32])
    sign = rng.choice([native.PLUS, native.MINUS, native.FROM])
    return Kind(addend, sign, rng.random() < 0.25, rng.random() < 0.25, rng.choice(OUTPUTS))


class Refused(Exception):
    """Kernels do not have a requantization."""


class Drawn:
    """Random epilogues of one form of requantization, and what they do with sums."""

    def __init__(self, how: Requantize, channels: int, seed: int) -> None:
        self.how, self.channels, self.rng = how, channels, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def scale(self, mean: float, per_channel: bool = False) -> Tensor:
        """Scales around a mean: powers of two where ratios must be."""
        exponents = torch.rand(self.channels if per_channel else (), generator=self.generator, dtype=torch.float64) * 2
        exponents = exponents + torch.tensor(mean, dtype=torch.float64).log2()
        return 2.0 ** (exponents.round() if self.how.power_of_two else exponents)

    def integers(self, dtype: DType, scale: Tensor, bits: int) -> QParams:
        """Integers of so many bits; of bytes, with a zero point."""
        zero = ZERO if dtype is INT32 else torch.tensor(self.rng.choice([0, 0, 7, -5 if dtype.signed else 128]))
        whole_type = dtype.bits <= 16 and self.rng.random() < 0.5
        low, high = (dtype.min, dtype.max) if whole_type else (-(2 ** (bits - 1)) * dtype.signed, 2 ** (bits - 1) - 1)
        return QParams(scale, zero, low, high, dtype)

    def requantization(self, simq: SimQ, largest: int) -> Requantization:
        found = requantization_of(simq, self.how, self.channels, min(float(largest), 2.0**31 - 1))
        if isinstance(found, str):
            raise Refused(found)
        return found

    def sum_with_another(self, sums: Tensor, kind: Kind, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        """Add the sum with another operand to an epilogue, and compute what it makes of sums.

        Returns:
            The operand as it is stored, and the sums.
        """
        dtype = kind.addend
        assert dtype is not None
        common = self.scale(1.0)
        bits = self.rng.choice([9, 16, 23])
        spread = float(sums.double().abs().mean()) + 1
        own = SimQ(
            QParams(self.scale(2.0**bits / spread / 4, self.rng.random() < 0.7), ZERO, INT32.min, INT32.max, INT32),
            self.integers(INT32, common, bits),
        )
        if kind.via:  # as if the sums were stored as bytes
            own = replace(own, via=self.integers(UINT8, self.scale(2.0 ** (bits - 8)), 8))
        operand = drawn(dtype.torch, tuple(sums.shape), self.generator) >> (10 if dtype is INT32 else 0)
        source = self.integers(dtype, self.scale(2.0 ** (bits - min(dtype.bits, 22))), min(dtype.bits, 22))
        other = SimQ(source, self.integers(INT32, common, bits))
        centered = operand.to(torch.int64) - int(source.zero_point)
        epilogue.added = AddedOperand(
            *("", source),
            self.requantization(own, int(sums.abs().max())),
            self.requantization(other, int(centered.abs().max())),
            kind.sign,
            native.OverflowRule(),
        )
        first, second = apply_simq(sums, own, self.how), apply_simq(centered, other, self.how)
        sign = {native.PLUS: (1, 1), native.MINUS: (1, -1), native.FROM: (-1, 1)}[kind.sign]
        return operand, sign[0] * first + sign[1] * second

    def clamp(self, sums: Tensor, epilogue: Epilogue) -> Tensor:
        """Add a clamp to an epilogue, and compute what it makes of sums."""
        low = int(sums.double().mean())
        high = low + torch.arange(self.channels) * 3 + int(sums.double().abs().mean())
        epilogue.clamp(low, high)
        return sums.clamp(min=low).minimum(high)

    def output(self, sums: Tensor, per_channel: bool, via: bool, stored_as: str) -> tuple[StoredOutput, Tensor]:
        """An output and its values."""
        spread = float(sums.double().abs().mean()) + 1
        source = QParams(self.scale(1.0, per_channel), ZERO, INT32.min, INT32.max, INT32)
        if stored_as == "real":
            real = to_real(source, self.channels)
            assert not isinstance(real, str)
            return StoredOutput("", real, None), sums.to(torch.float32) * source.scale.to(torch.float32)
        if stored_as == "raw":
            return StoredOutput("", Requantization(native.RequantizeParams(native.AS_IS)), source), sums.to(torch.int32)
        dtype = {"uint8": UINT8, "int8": INT8, "int16": INT16, "int32": INT32}[stored_as]
        bits = min(dtype.bits, 20)
        target = self.integers(dtype, self.scale(4 * spread / 2.0**bits), bits)
        simq = SimQ(source, target)
        if via:
            simq = replace(simq, via=self.integers(INT16, self.scale(4 * spread / 2.0**14), 14))
        stored = apply_simq(sums, simq, self.how) + target.zero_point
        # as of sums of which nothing is known, which are clipped before they are rounded
        found = self.requantization(simq, self.rng.choice([int(sums.abs().max()), 2**31 - 1]))
        return StoredOutput("", found, target), stored.to(dtype.torch)


def differing(sums: Sums, how: Requantize, channels: int, kind: Kind, seed: int) -> int:
    """How many values of a random epilogue of a kind differ."""
    draw, epilogue, of, addend = Drawn(how, channels, seed), Epilogue(channels, []), sums.exact, None
    if kind.addend is not None:
        addend, of = draw.sum_with_another(of, kind, epilogue)
    if kind.clamps:
        of = draw.clamp(of, epilogue)
    alone = kind.addend is None
    made = [draw.output(of, alone, alone and kind.via, stored_as) for stored_as in kind.outputs]
    epilogue.stored = [output for output, _ in made]
    found = sums.run(epilogue.build(), addend)
    return sum(int((one != exact).sum()) for one, (_, exact) in zip(found, made, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_epilogues(instruction_set: str, kernel: str) -> None:
    library, compared, refusals = library_for(instruction_set), 0, set[str]()
    cases = 1200 if whole() else 120
    for seed in range(cases):
        rng = random.Random(seed)
        channels, form, kind = rng.choice(CHANNELS), rng.choice([*HOWS]), drawn_kind(rng)
        sums = KERNELS[kernel](library, channels, seed)
        try:
            assert differing(sums, HOWS[form], channels, kind, seed) == 0, (channels, form, kind, seed)
            compared += 1
        except Refused as refused:
            refusals.add(str(refused))
    assert compared > cases / 2, refusals


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_sums_of_every_width_in_registers(instruction_set: str) -> None:
    library, how = library_for(instruction_set), HOWS["float32"]
    for seed, (channels, kind) in enumerate(itertools.product([c for c in CHANNELS if c <= 72], QUICK)):
        sums = conv_sums(library, channels, False, seed)
        assert differing(sums, how, channels, kind, seed) == 0, (channels, kind, seed)


def test_one_wrong_byte_is_noticed() -> None:
    real = library_for("").calls

    class Lying:
        def hago_rows(self, epilogue: int, *rest: object) -> None:
            real.hago_rows(epilogue, *rest)
            output = native.EpilogueParams.from_address(epilogue).output[0]
            (native.c_int32 * 1).from_address(output.data)[0] ^= 1

    for calls, wrong in ((real, 0), (Lying(), 1)):
        sums = stored_sums(native.Library(calls, ""), 8, 0)
        assert differing(sums, HOWS["float32"], 8, QUICK[0], 0) == wrong
