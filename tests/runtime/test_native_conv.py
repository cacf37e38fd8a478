"""The native convolution is exact for all windows, edges and zero points, on every instruction set of this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hago.arithmetic.types import INT32, ZERO, QParams
from hago.runtime.native import library as native
from hago.runtime.native.calls import conv_call
from hago.runtime.native.epilogue import Epilogue, StoredOutput
from hago.runtime.native.requantize import AS_IS
from hago.runtime.native.weights import Geometry, pack_for
from runtime.instruction_sets import INSTRUCTION_SETS, library_for

SUMS = QParams(torch.ones((), dtype=torch.float64), ZERO, INT32.min, INT32.max, INT32)
sides = st.sampled_from([1, 2, 3, 3, 4, 5, 7])
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


def sums_of(calls: Any, x: Tensor, w: Tensor, geometry: Geometry, zero: int, tiles: bool) -> Tensor:
    """Sums of the kernel, of values whose zero point is `zero`."""
    most = None if x.dtype == torch.int16 else max(int(x.max()), zero) + 128 * (x.dtype == torch.int8)
    packed = pack_for(calls, w, geometry, most, tiles)
    values = native.TYPES[str(x.dtype).removeprefix("torch.")]
    epilogue = Epilogue(geometry.out_channels, [], stored=[StoredOutput("", AS_IS, SUMS)]).build()
    return conv_call(calls, geometry, packed, (values, zero), epilogue)([x])[0]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@settings(max_examples=150, deadline=None)
@given(
    kernel=st.tuples(sides, sides),
    stride=pairs,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=pairs,
    images=st.integers(1, 3),
    size=st.tuples(st.integers(7, 24), st.integers(7, 24)),
    channels=st.sampled_from(
        [
            *((3, 64, 1), (1, 16, 1), (18, 33, 1), (30, 16, 1), (8, 20, 1), (64, 64, 1), (128, 16, 1), (16, 200, 2)),
            *((6, 6, 6), (32, 32, 32), (64, 64, 64), (70, 70, 70), (120, 120, 120)),
        ]
    ),
    dtype=st.sampled_from([torch.uint8, torch.int8, torch.int16]),
    zero=st.sampled_from([0, 0, 7, 255]),
    bits=st.sampled_from([8, 8, 7, 6, 4]),
    seed=st.integers(0, 2**20),
)
# fewer pixels than a matrix tile has rows, and windows between them that are of no pixel
@example(
    kernel=(3, 3),
    stride=(1, 1),
    padding=(1, 1),
    dilation=(1, 1),
    images=1,
    size=(3, 4),
    channels=(128, 16, 1),
    dtype=torch.uint8,
    zero=7,
    bits=8,
    seed=0,
)
def test_sums_are_exact(
    instruction_set: str,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    images: int,
    size: tuple[int, int],
    channels: tuple[int, int, int],
    dtype: torch.dtype,
    zero: int,
    bits: int,
    seed: int,
) -> None:
    library = library_for(instruction_set)
    assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    generator = torch.Generator().manual_seed(seed)
    each, out, groups = channels[0] // channels[2], channels[1], channels[2]
    words, ends = dtype == torch.int16, torch.iinfo(dtype)
    x = torch.randint(ends.min, ends.max + 1, (images, channels[0], *size), generator=generator, dtype=dtype)
    zero = 0 if words else zero + ends.min
    kind = torch.int16 if words else torch.int8
    w = torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max + 1, (out, each, *kernel), generator=generator)
    if not words:
        w = w.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)  # so that 16 bits hold sums of pairs of products
    exact = F.conv2d(x.double() - zero, w.double(), None, stride, padding, dilation, groups)
    geometry = Geometry(channels[0], out, groups, kernel, stride, padding, dilation)
    for tiles in (False, True)[: 1 + (library.has_tiles and not words)]:
        found = sums_of(library.calls, x, w.to(kind), geometry, zero, tiles)
        assert torch.equal(found, exact.to(torch.int64).to(torch.int32))  # modulo 2**32
