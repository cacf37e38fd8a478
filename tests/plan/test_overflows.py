"""A new behaviour of registers past their range is one entry of a table: it is computed, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from building import Builder, seeded
from chips import Chip
from plans import resolver_of
from torch import Tensor

from hago.arithmetic.numerics import OVERFLOWS, OverflowBehaviour
from hago.arithmetic.types import DType
from hago.errors import HagoError
from hago.export.onnx.export import make_onnx
from hago.plan.plan import Plan
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.native.executor import Executor
from hago.runtime.native.self_test import exact_kernels
from hago.simulation.simulator import Simulator


def clear(c: Tensor, dtype: DType) -> Tensor:
    return torch.where((c < dtype.min) | (c > dtype.max), torch.zeros_like(c), c)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A convolution whose 16-bit register is cleared where a sum leaves it."""
    monkeypatch.setitem(OVERFLOWS, "clear", OverflowBehaviour("clears", clear))  # type: ignore[arg-type]
    b = Builder()
    b.conv2d(b.input(3, 8, 8), seeded(4, 3, 3, 3), name="conv")
    chip = replace(Chip(), register="int16", overflow="clear").hardware()  # type: ignore[arg-type]
    resolver = resolver_of(b.graph(), chip, [seeded(2, 3, 8, 8)])
    return resolver(resolver.space.widest())


def test_both_models_compute_a_new_overflow(plan: Plan) -> None:
    x = seeded(2, 3, 8, 8)
    sums: dict[str, Tensor] = {}
    Simulator(plan, watch=lambda node, c, lost: sums.__setitem__(node.name, c.clone())).run([x])
    past = sums["conv"].abs() > 2**15
    assert past.any() and not past.all()
    (output,) = Simulator(plan).run([x])
    assert (output[past] == 0).all() and (output[~past] != 0).any()
    assert compare_plan_exactly(plan, [x]).same


def test_onnx_and_kernels_refuse_a_new_overflow_by_name(plan: Plan) -> None:
    with pytest.raises(HagoError, match=r"'conv': sums may leave the register, up to \d+ in int16, which clears;"):
        make_onnx(plan)
    if exact_kernels().conv.exact:  # without a native convolution, torch's runs, and nothing is to refuse
        assert "may overflow (clear)" in str(Executor(plan).explain())
