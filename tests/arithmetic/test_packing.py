"""Packing: unpacked tensors equal the packed ones, which take as few bits as their range needs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hago.arithmetic.packing import Packed, pack, unpack
from hago.errors import HagoError

DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@st.composite
def integers(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    limits = torch.iinfo(dtype)
    low = draw(st.integers(limits.min, limits.max))
    high = min(limits.max, low + draw(st.sampled_from([0, 1, 3, 4, 15, 16, 255, 256, 1 << 20, 1 << 40])))
    shape = draw(st.lists(st.integers(1, 5), max_size=3))
    values = draw(st.lists(st.integers(low, high), min_size=1, max_size=1)) + [
        draw(st.integers(low, high)) for _ in range(torch.Size(shape).numel() - 1)
    ]
    return torch.tensor(values, dtype=dtype).reshape(shape)


@given(integers())
def test_unpacking_restores_the_packed_tensor(values: torch.Tensor) -> None:
    packed = pack(values)
    back = unpack(packed, tuple(values.shape), values.dtype)
    assert back.dtype == values.dtype and torch.equal(back, values)


@given(integers())
def test_no_more_bits_than_the_range_needs(values: torch.Tensor) -> None:
    packed, spread = pack(values), int(values.max()) - int(values.min())
    count = values.numel()
    if spread < 4:
        assert packed.bits == 2 and packed.data.numel() == -(-count // 4)
    elif spread < 16:
        assert packed.bits == 4 and packed.data.numel() == -(-count // 2)
    else:
        bits = min(torch.iinfo(d).bits for d in DTYPES if (values.to(d).to(torch.int64) == values).all())
        assert packed.bits is None and packed.data.element_size() * 8 == bits


def test_the_first_value_lies_in_the_lowest_bits() -> None:
    packed = pack(torch.tensor([-8, 7, 1], dtype=torch.int8))
    assert (packed.bits, packed.offset) == (4, -8)
    assert packed.data.tolist() == [0 | 15 << 4, 9]
    assert pack(torch.tensor([0, 1, 2, 3, 3])).data.tolist() == [0 | 1 << 2 | 2 << 4 | 3 << 6, 3]


@pytest.mark.parametrize(
    "packed, shape",
    [
        (Packed(torch.zeros(2, dtype=torch.uint8), 4), (5,)),
        (Packed(torch.zeros(3, dtype=torch.uint8), 4), (4,)),
        (Packed(torch.zeros(4, dtype=torch.int8)), (5,)),
        (Packed(torch.zeros(4, dtype=torch.uint8), 3), (4,)),
        (Packed(torch.zeros(4, dtype=torch.int16), 4), (8,)),
    ],
)
def test_data_that_does_not_match_the_shape_is_refused(packed: Packed, shape: tuple[int, ...]) -> None:
    with pytest.raises(HagoError, match="expected"):
        unpack(packed, shape, torch.int8)
