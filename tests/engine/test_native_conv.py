"""The convolution of our own sums exactly whatever its windows, edges and zero points are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hago.engine import native
from hago.engine.calls import ConvCall
from hago.engine.moves import AS_IS, SLACK
from hago.engine.pack import Geometry, pack
from hago.engine.tail import Stored, Tail
from hago.types import INT32, ZERO, QParams

SUMS = QParams(torch.ones((), dtype=torch.float64), ZERO, INT32.min, INT32.max, INT32)
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


def sums_of(x: Tensor, w: Tensor, geometry: Geometry, zero: int, tiles: bool) -> Tensor:
    """Sums of the kernel, of bytes whose zero point is `zero`."""
    packed, signed = pack(w, geometry, tiles), x.dtype == torch.int8
    zeros = torch.full((geometry.channels + SLACK,), zero % 256, dtype=torch.uint8)
    offset = packed.offsets(None, zero + 128 * signed, geometry.groups)
    template = native.conv_of(geometry, packed, signed, offset, zeros)
    tail = Tail(geometry.out_channels, [], stored=[Stored("", AS_IS, SUMS)]).build()
    return ConvCall(native.library().calls, template, geometry, tail, (packed.weight, offset, zeros), False)([x])[0]


@pytest.mark.skipif(not native.library().has_conv, reason="the processor has no AVX512-VNNI, or there is no compiler")
@settings(max_examples=100, deadline=None)
@given(
    kernel=pairs,
    stride=pairs,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=pairs,
    images=st.integers(1, 3),
    size=st.tuples(st.integers(7, 24), st.integers(7, 24)),
    channels=st.sampled_from([(3, 64, 1), (8, 20, 1), (64, 64, 1), (128, 16, 1), (16, 200, 2), (6, 6, 6)]),
    signed=st.booleans(),
    zero=st.sampled_from([0, 0, 7, 255]),
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
    signed=False,
    zero=7,
    seed=0,
)
def test_sums_are_exact(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    images: int,
    size: tuple[int, int],
    channels: tuple[int, int, int],
    signed: bool,
    zero: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    each, out, groups = channels[0] // channels[2], channels[1], channels[2]
    x = torch.randint(0, 256, (images, channels[0], *size), generator=generator, dtype=torch.uint8)
    if signed:
        x, zero = (x ^ 128).view(torch.int8), zero - 128
    w = torch.randint(-128, 128, (out, each, *kernel), generator=generator, dtype=torch.int8)
    exact = F.conv2d(x.double() - zero, w.double(), None, stride, padding, dilation, groups)
    geometry = Geometry(channels[0], out, groups, kernel, stride, padding, dilation)
    for tiles in (False, True)[: 1 + native.library().has_tiles]:
        assert torch.equal(sums_of(x, w, geometry, zero, tiles).double(), exact)
