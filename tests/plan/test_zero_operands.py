"""What is always 0 changes nothing beside it, whatever it is joined to, on every chip and with every estimator."""

from __future__ import annotations

import pytest
import torch
from building import Builder, seeded

from hago import create_quantizer, quantize
from hago.graph.graph import Graph
from hago.hardware.file import available_hardware
from hago.runtime.exactness import compare_plan_exactly

DATA = [seeded(16, 6, seed=s) * 0.01 for s in range(2)]


def joined(op: str, zero: str, first: bool, fill: float) -> Graph:
    """Two layers with values near 0.01, of which the first is joined to what is `fill` everywhere.

    Args:
        zero: whether that is a constant, or what a layer gives.
        first: whether it is the first operand.
    """
    b = Builder()
    x = b.linear(b.input(6, name="x"), seeded(6, 6, seed=1), name="one")
    if zero == "constant":
        nothing = b.const(torch.full((1, 6) if op == "concat" else (6,), fill), "nothing")
    else:
        nothing = b.linear(x, torch.full((6, 6), fill), name="nothing")
    operands = [nothing, x] if first else [x, nothing]
    made = b.call(op, *operands, name="joined", **({"axis": 1} if op == "concat" else {}))
    b.linear(made, seeded(4, 12 if op == "concat" else 6, seed=2), name="two")
    return b.graph()


CASES = [
    (op, zero, first) for op in ("add", "sub", "concat") for zero in ("constant", "layer") for first in (False, True)
]


@pytest.mark.some_cases(60)
@pytest.mark.parametrize(("op", "zero", "first"), [c for c in CASES if c[:2] != ("concat", "constant")])
@pytest.mark.parametrize("name", available_hardware())
def test_zeros_take_nothing_with_them(name: str, op: str, zero: str, first: bool) -> None:
    for estimator in ("max_range", None):
        least = quantize(
            joined(op, zero, first, 1e-9), name, DATA, estimator=estimator, corrections="none"
        ).strategy.made_by["results"]
        found = quantize(joined(op, zero, first, 0.0), name, DATA, estimator=estimator, corrections="none")
        assert found.strategy.made_by["results"]["sqnr"] >= least["sqnr"] - 1.0
        again = create_quantizer(joined(op, zero, first, 0.0), name, found.strategy)
        assert again.plan.key == found.plan.key
        assert compare_plan_exactly(found.plan, [DATA[0]]).same
