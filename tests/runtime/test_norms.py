"""Layer norms in one kernel with their quantization: the bits of torch's, and the integers of the reference engine; and
quotients by a reciprocal, which are those of a division."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plans import check_passes, widest_plan
from products import some
from specs import EVERY
from torch import Tensor, nn

from hago import from_torch
from hago.arithmetic.rounding import ROUNDINGS
from hago.graph import Graph
from hago.plan import Plan
from hago.runtime.native import library as native
from hago.runtime.native.calls import NormCall, QuantizeCall
from hago.runtime.native.requantize import FloatQuantization
from hago.runtime.native.self_test import ExactKernels, Verdict, check_norm, exact_kernels

from .instruction_sets import INSTRUCTION_SETS, kernels_for, library_for

FOUND, X86 = exact_kernels(), EVERY["x86_vnni"]
needs_norm = pytest.mark.skipif(not FOUND.norm.exact, reason=FOUND.norm.why)
needs_kernels = pytest.mark.skipif(FOUND.calls is None, reason=FOUND.why)
DTYPES = {"uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32}


class Norms(nn.Module):
    """A linear layer, a layer norm along the last axes, and what reads it."""

    def __init__(self, shape: tuple[int, ...], given: str, behind: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape, self.behind = shape, behind
        self.before, self.after = nn.Linear(shape[-1], shape[-1]), nn.Linear(shape[-1], 6)
        self.weight = nn.Parameter(torch.randn(shape)) if "weight" in given else None
        self.bias = nn.Parameter(torch.randn(shape)) if "bias" in given else None

    def forward(self, x: Tensor) -> Tensor:
        norm = F.layer_norm(self.before(x), self.shape, self.weight, self.bias, 1e-3)
        return self.behind(norm, self.after)


#: What reads a norm.
READERS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "a layer": lambda y, layer: layer(y),
    "a layer and a sum": lambda y, layer: layer(y).sum(-1, keepdim=True) + y,
    "a layer and a float node": lambda y, layer: layer(y).softmax(-1)[..., :1] * torch.cos(y),
    "a layer, and it is an output": lambda y, layer: torch.cat([layer(y), y], -1),
    "a float node": lambda y, layer: layer(torch.cos(y)),
}


def check(plan: Plan, *inputs: Tensor, used: bool = True, using: ExactKernels | None = None) -> None:
    """The passes equal those of the reference, and the kernel is used, or is not."""
    executor = check_passes(plan, *inputs, using=using)
    assert ("native layer norm" in executor.explain().kernels) == used, executor.explain()


@needs_norm
@pytest.mark.parametrize("reader", READERS)
def test_readers(reader: str) -> None:
    x = torch.randn(2, 19, 24)
    plan = widest_plan(Norms((24,), "weight, bias", READERS[reader]), X86, x)
    check(plan, x, used=reader != "a float node")


SHAPES = some(3, [(1,), (7,), (16,), (5, 8), (200,)], ["weight, bias", "weight", ""], [1, 17, 40])


@needs_norm
@pytest.mark.parametrize(("shape", "given", "rows"), SHAPES)
def test_shapes(shape: tuple[int, ...], given: str, rows: int) -> None:
    x = torch.randn(2, rows, *shape)
    plan = widest_plan(Norms(shape, given, READERS["a layer and a sum"]), X86, x)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            check(plan, x * 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_norms_with_other_instructions(instruction_set: str) -> None:
    kernels = kernels_for(instruction_set)
    if not kernels.norm.exact:
        pytest.skip(kernels.norm.why)
    for (shape, given, rows), reader in zip(SHAPES, itertools.cycle(READERS)):
        plan, x = normed(shape, given, rows, reader if len(shape) == 1 else "a layer and a sum")
        check_passes(plan, x * 3, using=kernels)


@functools.cache
def normed(shape: tuple[int, ...], given: str, rows: int, reader: str) -> tuple[Plan, Tensor]:
    """A plan of layer norms, and an input."""
    x = torch.randn(2, rows, *shape)
    return widest_plan(Norms(shape, given, READERS[reader]), X86, x), x


@functools.cache
def of_twenty() -> Graph:
    model = Norms((20,), "weight, bias", READERS["a layer and a sum"])
    return from_torch(model.eval(), (torch.randn(2, 13, 20),))


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_hardware_with_and_without_the_kernel(name: str) -> None:
    x = torch.randn(2, 13, 20)
    plan = widest_plan(of_twenty(), EVERY[name], x)
    for kernels in (FOUND, replace(FOUND, norm=Verdict(False, "left out"))):
        check_passes(plan, x * 2, using=kernels)


@needs_norm
def test_other_dtypes_run_in_torch() -> None:
    called: list[torch.dtype] = []
    call = NormCall(FOUND.calls, lambda v: called.append(v[0].dtype) or (v[0],), 4, 1e-5, None, None, (None,))
    call([torch.randn(3, 4, dtype=torch.float64)])
    call([torch.randn(3, 4)])
    assert called == [torch.float64]


# ---------------------------------------------------------------- the self-test
class Replaced:
    """A library whose layer norm is torch's, but for what `change` does to it."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        self.change = change

    def hago_norm(self, address: int, x: int, threads: int) -> None:
        norm = native.Norm.from_address(address)
        output = native.NormOutput.from_address(norm.output)
        columns = (norm.columns,)
        weight, bias = (None if a is None else _at(a, columns) for a in (norm.weight, norm.bias))
        made = F.layer_norm(_at(x, (norm.rows, norm.columns)), columns, weight, bias, norm.epsilon)
        self.change(made)
        _at(output.data, made.shape).copy_(made)


def _at(address: int, shape: tuple[int, ...]) -> Tensor:
    buffer = (ctypes.c_float * math.prod(shape)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.float32).view(shape)


def test_the_verdict_is_that_of_torch() -> None:
    assert check_norm(Replaced(lambda made: None)).exact


def test_one_bit_of_one_entry_is_noticed() -> None:
    def change(made: Tensor) -> None:
        if made.shape[1] == 129:
            made[7, 100] = torch.nextafter(made[7, 100], torch.tensor(9.0))

    verdict = check_norm(Replaced(change))
    assert not verdict.exact and verdict.why.startswith("4 of")


# ---------------------------------------------------------------- quotients
def _hard(scale: Tensor) -> Tensor:
    """Floats whose quotient by `scale` is next to a half or to a whole number, and others."""
    whole = torch.cat([torch.arange(-600.0, 600.0), torch.logspace(3, 7, 400).round()]).repeat_interleave(2)
    whole[1::2] += 0.5
    at = (whole.double() * scale.double()).float()
    near = [at]
    for _ in range(3):
        near += [torch.nextafter(near[-1], torch.tensor(math.inf))]
    down = at
    for _ in range(3):
        down = torch.nextafter(down, torch.tensor(-math.inf))
        near.append(down)
    extremes = torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-45, -1e-45, 1e-38, 0.0, -0.0])
    return torch.cat([*near, torch.randn(500) * scale * 100, extremes])


POWERS = (-120, -70, -63, -20, -3, 0, 5, 40, 63, 70, 120)


@needs_kernels
@pytest.mark.parametrize(("dtype", "rounding", "power"), some(2, list(DTYPES), list(native.ROUNDINGS), POWERS))
def test_quotients_are_those_of_a_division(dtype: str, rounding: str, power: int) -> None:
    check_quotients(FOUND.calls, dtype, rounding, power)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_quotients_with_other_instructions(instruction_set: str) -> None:
    for dtype, rounding, power in some(5, list(DTYPES), list(native.ROUNDINGS), POWERS):
        check_quotients(library_for(instruction_set).calls, dtype, rounding, power)


def check_quotients(calls: Any, dtype: str, rounding: str, power: int) -> None:
    """What a library quantizes is what a division gives."""
    random = torch.Generator().manual_seed(power)
    wide = {"uint8": (0.0, 255.0), "int8": (-127.0, 127.0), "int16": (-32768.0, 32767.0)}
    low, high = wide.get(dtype, (-4194303.0, 4194303.0))
    for scale in 2.0**power * (1 + torch.rand(8, generator=random)):
        x = _hard(scale)
        to = FloatQuantization(
            *(float(scale), low, high, native.ROUNDINGS.index(rounding)), (native.TYPES[dtype], 0), DTYPES[dtype]
        )
        (found,) = QuantizeCall(calls, lambda values: (), to)([x])
        quotient = (x / scale).double()
        expected = ROUNDINGS[rounding](quotient).nan_to_num(low, math.inf, -math.inf).clamp(low, high)
        assert found.double().equal(expected), (x[found.double() != expected][:3], scale)
