"""What the native kernels do on an edge is the requantization that the Plan says."""

from __future__ import annotations

import pytest
import torch

from hago.engine import native
from hago.engine.calls import RowsCall
from hago.engine.moves import move_of, period
from hago.engine.tail import Stored, Tail
from hago.hardware_file import load_hardware
from hago.numerics import apply_simq
from hago.types import INT32, ZERO, QParams, SimQ

HOW = load_hardware("vta").requantize


def of_scale(scale: float, most: int) -> QParams:
    return QParams(torch.tensor(scale, dtype=torch.float64), ZERO, -most, most, INT32)


@pytest.mark.parametrize("left", [0, 1, 7, 24])
@pytest.mark.parametrize("most", [127, 2**22 - 1, 2**24])
def test_a_shift_to_the_left_saturates_all_that_32_bits_hold(left: int, most: int) -> None:
    calls = native.library().calls
    if calls is None:
        pytest.skip("no compiler here")
    target = of_scale(2.0**-left, most)
    simq = SimQ(of_scale(1.0, 2**31 - 1), target)
    moved = move_of(simq, HOW, 1, 2.0**31 - 1)
    assert not isinstance(moved, str)
    near = torch.arange(-300, 301)
    c = torch.cat([near, *(side * limit + near for side in (-1, 1) for limit in (2**24, 2**22, 2**31 - 301))])
    tail = Tail(1, [], stored=[Stored("", moved, target)]).build()
    (found,) = RowsCall(calls, tail, (native.TYPES["int32"], 0), None, period(1))([c.to(torch.int32)])
    assert found.to(torch.int64).equal(apply_simq(c, simq, HOW))


def test_a_shift_to_the_left_into_more_than_float32_holds_is_not_taken() -> None:
    simq = SimQ(of_scale(1.0, 2**31 - 1), of_scale(0.5, 2**24 + 1))
    assert isinstance(move_of(simq, HOW, 1, 2.0**31 - 1), str)
