"""The native kernels requantize an edge as the Plan prescribes."""

from __future__ import annotations

import pytest
import torch

from hago.arithmetic.numerics import Requantize, apply_simq
from hago.arithmetic.types import INT32, ZERO, QParams, SimQ
from hago.hardware.file import load_hardware
from hago.runtime.native import library as native
from hago.runtime.native.calls import RowsCall
from hago.runtime.native.epilogue import Epilogue, StoredOutput
from hago.runtime.native.requantize import period, requantization_of

from .instruction_sets import INSTRUCTION_SETS, library_for

HOW = load_hardware("vta").requantize


def of_scale(scale: float, most: int) -> QParams:
    return QParams(torch.tensor(scale, dtype=torch.float64), ZERO, -most, most, INT32)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("left", [0, 1, 7, 24])
@pytest.mark.parametrize("most", [127, 2**22 - 1, 2**24])
def test_left_shifts_saturate_all_32_bit_values(instruction_set: str, left: int, most: int) -> None:
    calls = library_for(instruction_set).calls
    target = of_scale(2.0**-left, most)
    simq = SimQ(of_scale(1.0, 2**31 - 1), target)
    moved = requantization_of(simq, HOW, 1, 2.0**31 - 1)
    assert not isinstance(moved, str)
    near = torch.arange(-300, 301)
    c = torch.cat([near, *(side * limit + near for side in (-1, 1) for limit in (2**24, 2**22, 2**31 - 301))])
    epilogue = Epilogue(1, [], stored=[StoredOutput("", moved, target)]).build()
    (found,) = RowsCall(calls, epilogue, (native.TYPES["int32"], 0), None, period(1))([c.to(torch.int32)])
    assert found.to(torch.int64).equal(apply_simq(c, simq, HOW))


def test_left_shifts_beyond_float32_are_not_native() -> None:
    simq = SimQ(of_scale(1.0, 2**31 - 1), of_scale(0.5, 2**24 + 1))
    assert isinstance(requantization_of(simq, HOW, 1, 2.0**31 - 1), str)


MULTIPLIED = {
    f"{rounding}{', two stages' if stages else ''}": Requantize("multiplier_shift", rounding, 31, stages)
    for rounding in native.ROUNDINGS
    for stages in ((False, True) if rounding == "half_away" else (False,))
}


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("how", MULTIPLIED.values(), ids=MULTIPLIED)
def test_multipliers_and_shifts(instruction_set: str, how: Requantize) -> None:
    calls = library_for(instruction_set).calls
    random = torch.Generator().manual_seed(0)
    some = torch.rand(40, generator=random, dtype=torch.float64) * 2.0 ** torch.arange(-20, 20)
    scales = torch.cat([2.0 ** -torch.arange(24.0, dtype=torch.float64), some])
    source = QParams(scales.view(-1, 1), ZERO, -(2**31), 2**31 - 1, INT32)
    simq = SimQ(source, of_scale(1.0, 2**20))
    moved = requantization_of(simq, how, len(scales), 2.0**31 - 1)
    assert not isinstance(moved, str), moved
    rows = torch.randint(-(2**31), 2**31, (300, 1), generator=random) >> torch.randint(
        0, 31, (300, 1), generator=random
    )
    c = torch.cat([rows, torch.tensor([[-(2**31)], [2**31 - 1], [0]])]).expand(-1, len(scales))
    epilogue = Epilogue(len(scales), [], stored=[StoredOutput("", moved, simq.target)]).build()
    call = RowsCall(calls, epilogue, (native.TYPES["int32"], 0), 1, period(len(scales)))
    (found,) = call([c.to(torch.int32).contiguous()])
    assert found.to(torch.int64).equal(apply_simq(c.T, simq, how).T)
