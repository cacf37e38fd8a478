"""Attention in one kernel: the bits of torch's softmax, and the integers of the reference engine."""

from __future__ import annotations

import functools
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
from hago.graph import Graph
from hago.plan import Plan
from hago.runtime.native.self_test import REGISTERS, ExactKernels, Verdict, check_softmax, exact_kernels

from .instruction_sets import INSTRUCTION_SETS, kernels_for

FOUND, X86 = exact_kernels(), EVERY["x86_vnni"]
needs_softmax = pytest.mark.skipif(not FOUND.softmax.exact, reason=FOUND.softmax.why)


class Attention(nn.Module):
    """Heads over projections of one input; a mask is an input of its own."""

    def __init__(self, width: int, heads: int, residual: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.residual, self.options = heads, residual, options
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part(x) for part in (self.query, self.key, self.value))
        if self.heads:
            q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, **self.options)
        if self.residual:
            y = y + q
        return self.out(y.transpose(1, 2).flatten(2) if self.heads else y)


def rows(mask: Tensor) -> Tensor:
    """A mask of bool of which no row is empty."""
    mask[..., 0] = True
    return mask


def drawn(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


MASKS = {
    "none": None,
    "added": drawn(2, 1, 1, 19) * -4,
    "low": torch.where(drawn(2, 1, 1, 19) < 0.5, 0.0, -10000.0),
    "of every head": drawn(2, 4, 19, 19) * -9,
    "infinite": torch.where(rows(drawn(2, 1, 19, 19) < 0.5), 0.0, -math.inf),
    "empty rows": torch.where((drawn(2, 1, 19, 19) < 0.6) & (drawn(2, 1, 19, 1) < 0.7), 0.0, -math.inf),
    "bool": rows(drawn(2, 1, 1, 19) < 0.5),
    "bool, empty rows": (drawn(2, 1, 19, 19) < 0.6) & (drawn(2, 1, 19, 1) < 0.7),
    "not a number": torch.where(drawn(2, 1, 19, 19) < 0.01, math.nan, 0.0),
    "plus infinity": torch.where(drawn(2, 1, 19, 19) < 0.01, math.inf, 0.0),
}


def check(plan: Plan, *inputs: Tensor, using: ExactKernels | None = None) -> None:
    """The passes equal those of the reference, and the kernel is used."""
    executor = check_passes(plan, *inputs, using=using)
    assert "native attention" in executor.explain().kernels, executor.explain()


@functools.cache
def masked(mask: str) -> tuple[Plan, tuple[Tensor, ...]]:
    """A plan of attention with a mask, and its inputs."""
    x, given = torch.randn(2, 19, 16), MASKS[mask]
    if given is None:
        return widest_plan(Attention(16, 4), X86, x), (x,)
    open_mask = torch.ones_like(given) if given.dtype == torch.bool else torch.zeros_like(given)
    return widest_plan(Attention(16, 4), X86, x, open_mask), (x, given)


@needs_softmax
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str) -> None:
    plan, inputs = masked(mask)
    check(plan, *inputs)


@needs_softmax
@pytest.mark.parametrize(("heads", "tokens", "causal"), some(3, [0, 1, 4], [1, 3, 16, 33, 64, 197], [False, True]))
def test_sizes(heads: int, tokens: int, causal: bool) -> None:
    model, x = Attention(32, heads, is_causal=causal, scale=0.4), torch.randn(3, tokens, 32)
    plan = widest_plan(model, X86, x)
    check(plan, x * 3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        check(plan, x[:1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_attention_with_other_instructions(instruction_set: str) -> None:
    """Every mask; rows, columns and depths that fill registers and that do not; a sum behind."""
    kernels = kernels_for(instruction_set)
    if not kernels.softmax.exact:
        pytest.skip(kernels.softmax.why)
    for mask in MASKS:
        plan, inputs = masked(mask)
        check(plan, *inputs, using=kernels)
    for heads, tokens, causal in ((0, 1, False), (1, 3, True), (4, 16, False), (2, 33, True), (1, 64, False)):
        plan, x = with_a_residual(heads, tokens, causal)
        check(plan, x * 3, using=kernels)


@functools.cache
def with_a_residual(heads: int, tokens: int, causal: bool) -> tuple[Plan, Tensor]:
    """A plan of attention whose queries are added to what it makes, and an input."""
    model, x = Attention(32, heads, residual=True, is_causal=causal, scale=0.4), torch.randn(3, tokens, 32)
    return widest_plan(model, X86, x), x


@needs_softmax
def test_a_sum_after_attention() -> None:
    x = torch.randn(2, 21, 24)
    check(widest_plan(Attention(24, 3, residual=True), X86, x), x)


class Chain(nn.Module):
    """A product of two values, and what a case says behind it."""

    def __init__(self, behind: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.behind = nn.Linear(8, 8), nn.Linear(8, 8), behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.query(x), self.key(x))


def _by_weights(q: Tensor, k: Tensor) -> Tensor:
    """Scores whose keys are the weights of a linear layer, as `torch.stack` of the products with single samples."""
    return torch.stack([F.linear(q[i], k[i]).softmax(-1) @ k[i] for i in range(2)])


#: What stands behind a product that is no attention, or one that the kernel does not have.
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "float nodes": lambda q, k: F.layer_norm((q @ k.mT).relu(), (6,)).softmax(-1) + 1,
    "a softmax that is read in float": lambda q, k: F.layer_norm((q @ k.mT).softmax(-1), (6,)),
    "a softmax along rows": lambda q, k: (q @ k.mT).softmax(-2) @ k,
    "a softmax that is read twice": lambda q, k: (p := (q @ k.mT).softmax(-1)) @ k + (p @ q),
    "scores that are read twice": lambda q, k: (s := q @ k.mT).softmax(-1) @ k + s @ k,
    "probabilities on the right": lambda q, k: k.mT @ (q @ k.mT).softmax(-1),
    "weights": _by_weights,
    "values of fewer axes": lambda q, k: (q @ k.mT).softmax(-1) @ k[0],
    "constant keys": lambda q, k: (q @ torch.ones(8, 6)).softmax(-1) @ k,
}


@pytest.mark.parametrize("behind", OTHERS)
def test_what_is_no_attention(behind: str) -> None:
    x = torch.randn(2, 6, 8)
    plan = widest_plan(Chain(OTHERS[behind]), X86, x)
    check_passes(plan, x * 2)


@functools.cache
def two_heads() -> Graph:
    return from_torch(Attention(16, 2).eval(), (torch.randn(2, 13, 16),))


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_hardware_with_and_without_the_kernel(name: str) -> None:
    x = torch.randn(2, 13, 16)
    plan = widest_plan(two_heads(), EVERY[name], x)
    for kernels in (FOUND, replace(FOUND, softmax=Verdict(False, "left out"))):
        check_passes(plan, x * 2, using=kernels)


# ---------------------------------------------------------------- the self-test
class Replaced:
    """A library whose softmax is another one."""

    def __init__(self, softmax: Any) -> None:
        self.hago_softmax = softmax


def at(rows: int, columns: int, address: int) -> Tensor:
    """The matrix at an address."""
    import ctypes

    buffer = (ctypes.c_float * (rows * columns)).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.float32).view(rows, columns)


def test_the_verdict_is_that_of_torch() -> None:
    def torchs(rows: int, columns: int, registers: int, address: int) -> int:
        x = at(rows, columns, address)
        x.copy_(F.softmax(x, -1) if registers == 8 else x.softmax(-1) * (1 + 2**-23))
        return 1

    verdict, registers = check_softmax(Replaced(torchs))
    assert verdict.exact and registers == 8


def test_one_bit_of_one_entry_is_noticed() -> None:
    def nearly(rows: int, columns: int, registers: int, address: int) -> int:
        x = at(rows, columns, address)
        x.copy_(F.softmax(x, -1))
        if columns == 197:
            x[7, 100] = torch.nextafter(x[7, 100], torch.tensor(2.0))
        return 1

    verdict, registers = check_softmax(Replaced(nearly))
    assert not verdict.exact and registers == 0 and "1 of" in verdict.why


def test_registers_are_told_apart() -> None:
    if not FOUND.softmax.exact:
        pytest.skip(FOUND.softmax.why)
    other = next(n for n in REGISTERS if n != FOUND.softmax_registers)

    def swapped(rows: int, columns: int, registers: int, address: int) -> int:
        return int(FOUND.calls.hago_softmax(rows, columns, other, address))

    assert not check_softmax(Replaced(swapped))[0].exact
