"""Each law fails when its rule is broken. Laws of kernels bite in `ops/test_kernels.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chips import Chip, only
from ops import laws
from ops.samples import at_batch, graph_of, inputs_of, model_and_graph
from ops.test_laws import joined
from plans import resolver_of
from torch import Tensor

from hago.arithmetic import numerics
from hago.arithmetic.numerics import Requantize
from hago.arithmetic.types import SimQ
from hago.ops import OPS, Ops
from hago.ops._rule import Attrs, Operand
from hago.plan.resolve import Resolver


def broken(op: str, **changes: Any) -> Ops:
    """The ops with one rule changed."""
    return {**OPS, op: replace(OPS[op], **changes)}


def broken_form(op: str, **changes: Any) -> Ops:
    """The ops with the integer form of one rule changed."""
    form = OPS[op].integer
    assert form is not None
    return broken(op, integer=replace(form, **changes))


def resolved(op: str, index: int, chip: Chip, ops: Ops = OPS) -> tuple[Resolver, list[Tensor]]:
    """One sample alone on a chip, and inputs for it."""
    sample, graph = OPS[op].samples[index], graph_of(op, index)
    inputs = inputs_of(sample, at_batch(sample, 2, seed=7))
    return resolver_of(graph, only(chip.hardware(ops), op), inputs, ops=ops), inputs


def _nearly_relu(attrs: Attrs, x: Tensor) -> Tensor:
    return torch.relu(x) + 1e-6


def _in_float64(attrs: Attrs, x: Tensor) -> Tensor:
    return torch.relu(x).double()


def _deeper(attrs: Attrs, x: Tensor) -> Tensor:
    return torch.relu(x).unsqueeze(0)


def _in_order_of_memory(attrs: Attrs, x: Tensor) -> Tensor:
    """Noise that falls on entries as they lie."""
    return torch.relu(x) + torch.empty_like(x).uniform_(0, 1, generator=torch.Generator().manual_seed(0))


def _anything(attrs: Attrs, *values: Tensor) -> Tensor:
    return values[0]


def _a_larger_average(attrs: Attrs, x: Tensor) -> Tensor:
    return F.avg_pool2d(x, attrs["kernel_size"], divisor_override=1)


def _padded_otherwise(attrs: Attrs, x: Tensor) -> Tensor:
    return F.pad(x, attrs["pad"], value=0.5)


def _nothing(attrs: Attrs, operands: Sequence[Operand]) -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def _twice_the_macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return 2 * OPS["conv2d"].macs(attrs, shapes, out)


def _another_sum_on_floats(attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    return a + b + (1 if a.is_floating_point() else 0)


# ---------------------------------------------------------------- rules
def test_import_bites() -> None:
    model, graph = model_and_graph("relu", 0)
    laws.check_import("relu", OPS["relu"].samples[0], model, graph)
    with pytest.raises(AssertionError):
        laws.check_import("relu", OPS["relu"].samples[0], model, graph, broken("relu", compute=_nearly_relu))
    with pytest.raises(AssertionError):
        laws.check_import("neg", OPS["relu"].samples[0], model, graph)


def test_shape_bites() -> None:
    with pytest.raises(AssertionError):
        laws.check_shape(graph_of("relu", 0), broken("relu", compute=_deeper))


def test_dtypes_bites() -> None:
    x = torch.randn(2, 3, 4, 4)
    laws.check_dtypes(graph_of("relu", 0), [x])
    with pytest.raises(AssertionError):
        laws.check_dtypes(graph_of("relu", 0), [x], broken("relu", compute=_in_float64))


def test_any_layout_bites() -> None:
    x = torch.randn(37, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    laws.check_any_layout(graph_of("relu", 0), [x])
    with pytest.raises(AssertionError):
        laws.check_any_layout(graph_of("relu", 0), [x], broken("relu", compute=_in_order_of_memory))


def test_moves_values_bites() -> None:
    for op, says_wrongly in (("relu", True), ("reshape", False)):
        cases = [(graph_of(op, 0), at_batch(OPS[op].samples[0], 2, seed=7))]
        laws.check_moves_values(op, cases)
        with pytest.raises(AssertionError):
            laws.check_moves_values(op, cases, broken(op, moves_values=says_wrongly))
    padded = [(graph_of("pad", 3), at_batch(OPS["pad"].samples[3], 2, seed=7))]  # with -1.5
    laws.check_moves_values("pad", padded)
    with pytest.raises(AssertionError):
        laws.check_moves_values(
            "pad", padded, broken("pad", compute=lambda attrs, x: F.pad(x, attrs["pad"], value=0.5))
        )


def test_clips_or_averages_bites() -> None:
    inputs = at_batch(OPS["avg_pool2d"].samples[0], 2, seed=7)
    laws.check_clips_or_averages(graph_of("avg_pool2d", 0), inputs)
    with pytest.raises(AssertionError):
        laws.check_clips_or_averages(graph_of("avg_pool2d", 0), inputs, broken("avg_pool2d", compute=_a_larger_average))


def test_early_clipping_bites() -> None:
    inputs = at_batch(OPS["div"].samples[0], 2, seed=7)
    laws.check_early_clipping(OPS["relu"], graph_of("relu", 0), inputs)
    with pytest.raises(AssertionError):
        laws.check_early_clipping(broken_form("div", allows_early_clipping=True)["div"], graph_of("div", 0), inputs)


@pytest.mark.parametrize("op, macs", [("conv2d", _twice_the_macs), ("linear", lambda attrs, shapes, out: 0)])
def test_cost_bites(op: str, macs: Any) -> None:
    with pytest.raises(AssertionError):
        laws.check_cost(OPS[op].samples[0], graph_of(op, 0), broken(op, macs=macs))


def test_refuse_bites() -> None:
    ops = broken("conv2d", compute=_anything)
    with pytest.raises(pytest.fail.Exception):
        laws.check_refuse(ops["conv2d"], OPS["conv2d"].refuses[0], ops)
    with pytest.raises(AssertionError):
        laws.check_refuse(OPS["conv2d"], replace(OPS["conv2d"].refuses[0], names="colour"))


def test_rectify_bites() -> None:
    ops = broken_form("concat", slots=("own",))
    ranges: Mapping[str, tuple[float, float]] = {"concat:0": (-1.0, 1.0), "concat:1": (-3.0, 3.0)}
    bits = {"concat:0": 8, "concat:1": 8}
    laws.check_rectify(joined("concat", 2), Chip().hardware(), ranges, bits)
    with pytest.raises(AssertionError):
        laws.check_rectify(joined("concat", 2), Chip().hardware(ops), ranges, bits, ops)


@pytest.mark.parametrize("op", ["conv2d", "linear", "mul"])
def test_overflow_bites(op: str) -> None:
    """A bound that is too small proves what is not so, and the register is not looked at."""
    ops = broken_form(op, bound=_nothing)
    for overflow in ("wrap", "saturate_end"):
        chip = Chip("int8", "int8", overflow)  # type: ignore[arg-type]
        resolver, inputs = resolved(op, 0, chip)
        assert laws.check_overflow(resolver, inputs) > 0
        resolver, inputs = resolved(op, 0, chip, ops)
        with pytest.raises(AssertionError):
            laws.check_overflow(resolver, inputs)


def test_overflow_bites_where_registers_do_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver, _inputs = resolved("conv2d", 0, Chip("int8", "int16"))
    laws.check_overflow(resolver, laws.extreme_inputs(resolver.graph)[2])
    monkeypatch.setattr("hago.plan.plan.apply_overflow", lambda c, dtype, overflow: numerics.saturate(c, dtype))
    with pytest.raises(AssertionError):
        laws.check_overflow(resolver, laws.extreme_inputs(resolver.graph)[2])


@pytest.mark.parametrize("op", ["conv2d", "avg_pool2d", "add"])
def test_bound_bites(op: str) -> None:
    resolver, inputs = resolved(op, 0, Chip())
    assert laws.check_bound(resolver(resolver.space.widest()), [inputs]) > 0
    resolver, inputs = resolved(op, 0, Chip(), broken_form(op, bound=_nothing))
    with pytest.raises(AssertionError):
        laws.check_bound(resolver(resolver.space.widest()), [inputs])


# ---------------------------------------------------------------- exactness
def check_exact(op: str, chip: Chip, ops: Ops = OPS) -> None:
    resolver, inputs = resolved(op, 0, chip, ops)
    laws.check_exact(resolver, inputs, [resolver.space.widest()])


def test_exactness_bites_where_a_kernel_depends_on_the_carrier() -> None:
    check_exact("add", Chip())
    with pytest.raises(AssertionError):
        check_exact("add", Chip(), broken_form("add", compute=_another_sum_on_floats))


def _truncating(value: Tensor, simq: SimQ | None, how: Requantize) -> Tensor:
    return numerics.apply_simq(value, simq, replace(how, rounding="toward_zero"))


def _clipping_less(value: Tensor, simq: SimQ | None, how: Requantize) -> Tensor:
    if simq is not None and simq.target is not None:
        simq = replace(simq, target=replace(simq.target, qmin=simq.target.qmin - 1))
    return numerics.apply_simq(value, simq, how)


@pytest.mark.parametrize("change", [_truncating, _clipping_less])
@pytest.mark.parametrize("side", ["simulation", "integers"])
def test_exactness_bites_where_one_side_requantizes_otherwise(
    monkeypatch: pytest.MonkeyPatch, change: Any, side: str
) -> None:
    check_exact("mul", Chip("int8", "int16", at="output"))
    if side == "integers":
        monkeypatch.setattr("hago.runtime.reference.apply_simq", change)
    else:
        convert = lambda simq, how: partial(change, simq=simq, how=how)  # noqa: E731
        monkeypatch.setattr("hago.simulation.simulator.conversion", convert)
    with pytest.raises(AssertionError):
        check_exact("mul", Chip("int8", "int16", at="output"))


def test_exactness_bites_where_the_integer_model_stores_another_zero_point(monkeypatch: pytest.MonkeyPatch) -> None:
    check_exact("mul", Chip("uint8"))
    monkeypatch.setattr("hago.runtime.reference.center", lambda q, qparams: q.to(torch.int64))
    with pytest.raises(AssertionError):
        check_exact("mul", Chip("uint8"))
