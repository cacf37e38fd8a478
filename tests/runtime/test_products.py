"""Kernels other than convolutions (products, differences, sums over axes, padding) equal the reference bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest
import torch
from building import Builder, seeded
from products import whole
from specs import EVERY
from torch import Tensor

from hago.arithmetic.numerics import Requantize, apply_simq
from hago.arithmetic.types import INT32, UINT8, ZERO, QParams, SimQ
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.native import library as native
from hago.runtime.native.calls import MatmulCall, MultiplyCall
from hago.runtime.native.epilogue import Epilogue, StoredOutput
from hago.runtime.native.executor import Executor
from hago.runtime.native.requantize import AS_IS, requantization_of
from hago.runtime.native.self_test import Verdict, check_products, exact_kernels
from hago.runtime.reference import IntegerModel
from runtime.instruction_sets import INSTRUCTION_SETS, kernels_for, library_for

from .test_executor import check, plan_of

CHIPS = ["x86_vnni", "vta", "cambricon_mlu", "arm_dot", "tflite_int16", "onnxruntime_cpu", "affine_at_output",
         "int16_saturates", "int16_wraps"]  # fmt: skip
Grow = Callable[[Builder, str, str], object]


def _gate(b: Builder, x: str, y: str) -> None:
    b.call("mul", x, b.call("mean", y, axes=[2, 3], keepdim=True, count=48))


def _heads(b: Builder, x: str, y: str) -> None:
    parts = [b.call("reshape", v, shape=[-1, 4, 5, 48]) for v in (x, y)]
    scores = b.call("matmul", b.call("permute", parts[0], axes=[0, 1, 3, 2]), parts[1])
    b.call("matmul", parts[1], scores)


def _heads_with_a_residual(b: Builder, x: str, y: str) -> None:
    """What is subtracted lies in memory as an image, and is laid otherwise for the call."""
    heads = b.call("reshape", x, shape=[-1, 4, 5, 48])
    scores = b.call("matmul", b.call("permute", heads, axes=[0, 1, 3, 2]), heads)
    b.call("sub", b.call("matmul", heads, scores), heads)


def _matrices(b: Builder, x: str, y: str) -> None:
    tokens, others = (b.call("reshape", v, shape=[-1, 20, 48]) for v in (x, y))
    b.call("matmul", tokens, b.call("permute", others, axes=[0, 2, 1]))


def _linear(b: Builder, x: str, y: str) -> None:
    rows = b.call("reshape", x, shape=[-1, 20, 48])
    b.call("linear", rows, b.const(seeded(35, 48, seed=5)), b.const(seeded(35, seed=6)))


def _linear_by_a_value(b: Builder, x: str, y: str) -> None:
    """A weight that is computed lies with its columns first, too."""
    one = b.call("slice", b.call("slice", y, axis=0, start=0, stop=1, step=1), axis=1, start=0, stop=7, step=1)
    b.call("linear", b.call("reshape", x, shape=[-1, 20, 48]), b.call("reshape", one, shape=[7, 48]))


def _linear_by_all_samples(b: Builder, x: str, y: str) -> None:
    first, second = (b.call("mean", v, axes=[2, 3], keepdim=False, count=48) for v in (x, y))
    b.call("linear", first, second)


def _affine_rows(b: Builder, x: str, y: str) -> None:
    rows = b.call("sum", x, axes=[2, 3], keepdim=False, count=48)
    b.call("affine", rows, b.const(seeded(20, seed=3)), b.const(seeded(20, seed=4)), rank=2)


def _residual_product(b: Builder, x: str, y: str) -> None:
    b.call("relu", b.call("add", b.call("mul", x, y), b.conv2d(x, seeded(20, 20, 1, 1, seed=4), padding=[0, 0])))


def _option_a(b: Builder, x: str, y: str) -> None:
    half = b.call("slice", b.call("slice", x, axis=2, start=0, stop=None, step=2), axis=3, start=0, stop=None, step=2)
    padded = b.call("pad", half, pad=[0, 0, 0, 0, 4, 4], mode="constant", value=0.0)
    b.call("add", padded, b.conv2d(y, seeded(28, 20, 3, 3, seed=4), stride=[2, 2]))


def _reduced(op: str, axes: list[int], count: int) -> Grow:
    return lambda b, x, y: b.call(op, b.call("add", x, y), axes=axes, keepdim=False, count=count)


def _padded(mode: str) -> Grow:
    def grow(b: Builder, x: str, y: str) -> None:
        b.conv2d(b.call("pad", x, pad=[1, 2, 0, 3], mode=mode, value=0.0), seeded(6, 20, 3, 3, seed=4), padding=[0, 0])

    return grow


def _by(op: str, *shape: int, first: bool = False) -> Grow:
    """With a constant of a shape."""

    def grow(b: Builder, x: str, y: str) -> None:
        const = b.const(seeded(*shape, seed=3) * 0.5)
        b.call(op, *((const, x) if first else (x, const)))

    return grow


GROW: dict[str, Grow] = {
    "mul": lambda b, x, y: b.call("mul", x, y),
    "mul of itself": lambda b, x, y: b.call("mul", x, x),
    "mul by a gate": _gate,
    "mul by a gate before": lambda b, x, y: b.call("mul", b.call("mean", y, axes=[2, 3], keepdim=True, count=48), x),
    "mul by a map": lambda b, x, y: b.call("mul", x, b.call("slice", y, axis=1, start=3, stop=4, step=1)),
    "mul of a row and a column": lambda b, x, y: b.call(
        "mul", b.call("slice", x, axis=2, start=0, stop=1, step=1), b.call("slice", y, axis=3, start=1, stop=2, step=1)
    ),
    "mul by channels": _by("mul", 20, 1, 1),
    "mul by a number": _by("mul", first=True),
    "mul with a residual": _residual_product,
    "sub": lambda b, x, y: b.call("relu", b.call("sub", x, y)),
    "sub the other way": lambda b, x, y: b.call("sub", y, b.conv2d(x, seeded(20, 1, 3, 3, seed=4), groups=20)),
    "sub of channels": _by("sub", 20, 1, 1),
    "sub from a number": _by("sub", first=True),
    "add of columns": _by("add", 6),
    "add of a map": lambda b, x, y: b.call("add", b.call("slice", y, axis=1, start=0, stop=1, step=1), x),
    "affine": lambda b, x, y: b.call("affine", x, b.const(seeded(20, seed=3)), b.const(seeded(20, seed=4)), rank=4),
    "affine rows": _affine_rows,
    "mean of images": _reduced("mean", [2, 3], 48),
    "sum of rows": _reduced("sum", [3], 6),
    "mean of channels": _reduced("mean", [1], 20),
    "mean of channels and rows": _reduced("mean", [1, 2], 160),
    "pad": _padded("constant"),
    "reflected": _padded("reflect"),
    "replicated": _padded("replicate"),
    "circular": _padded("circular"),
    "option A": _option_a,
    "matrices": _matrices,
    "heads": _heads,
    "heads with a residual": _heads_with_a_residual,
    "linear": _linear,
    "linear by a value": _linear_by_a_value,
    "linear by all samples": _linear_by_all_samples,
}  # fmt: skip


def network(grow: Grow) -> Builder:
    b = Builder()
    image = b.input(3, 8, 6, name="x")
    x = b.call("relu", b.conv2d(image, seeded(20, 3, 3, 3, seed=1), seeded(20, seed=2), name="first"))
    y = b.conv2d(image, seeded(20, 3, 1, 1, seed=2), name="second", padding=[0, 0])
    grow(b, x, y)
    return b


@pytest.mark.parametrize("case", GROW)
def test_every_kernel(case: str) -> None:
    graph, used = network(GROW[case]).graph(), set()
    laid = seeded(3, 3, 8, 6, seed=7, size=3.0).contiguous(memory_format=torch.channels_last)
    place = list(GROW).index(case)
    for name in {"x86_vnni", *(CHIPS[(place + step) % len(CHIPS)] for step in (0, 3, 6))}:
        plan = plan_of(graph, EVERY[name], [seeded(2, 3, 8, 6)])
        executor = check(plan, [laid])
        if executor.segments:
            cut = Executor(plan, cached_bytes=1)
            assert cut.run([laid])[0].equal(IntegerModel(plan).run([laid])[0])
        assert compare_plan_exactly(plan, [laid[:2]]).same
        used |= set(executor.explain().kernels)
    ours = {"native multiply", "native add", "native sum over axes", "native matmul", "native conv", "torch on bytes"}
    assert not exact_kernels().products.exact or used & ours or any(name.startswith("native conv ") for name in used)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_kernel_with_other_instructions(instruction_set: str) -> None:
    kernels, laid = kernels_for(instruction_set), seeded(3, 3, 8, 6, seed=7, size=3.0)
    for place, case in enumerate(GROW):
        for name in CHIPS if whole() else (CHIPS[place % len(CHIPS)],):
            plan = plan_of(network(GROW[case]).graph(), EVERY[name], [seeded(2, 3, 8, 6)])
            check(plan, [laid], using=kernels)


@pytest.mark.parametrize("op", ["mul", "sub", "affine", "mean", "sum", "pad", "matmul", "linear"])
def test_no_node_runs_on_the_reference(op: str) -> None:
    if not (exact_kernels().products.exact and exact_kernels().conv.exact):
        pytest.skip(str(exact_kernels()))
    cases = [c for c in GROW if c.startswith(op)] or {"matmul": ["matrices", "heads"]}[op]
    for case in cases:
        plan = plan_of(network(GROW[case]).graph(), EVERY["x86_vnni"], [seeded(2, 3, 8, 6)])
        rows = [r for r in Executor(plan).explain().rows if r.op == op]
        assert rows and all(r.kernel != "reference" for r in rows), rows


def test_extreme_integers_through_every_type() -> None:
    """int16 by int8, as chips with 16-bit activations have it: the largest products, and sums next to 2**31."""
    b = Builder()
    x = b.input(500, name="x")
    b.linear(x, torch.full((40, 500), 1.0), name="sum")
    plan = plan_of(b.graph(), EVERY["tflite_int16"], [torch.ones(2, 500)])
    for value in (1.0, -1.0, 3.0, -3.0):
        check(plan, [torch.full((13, 500), value)])


# ---------------------------------------------------------------- and where they are not to be had
def test_results_are_equal_without_kernels() -> None:
    using = replace(exact_kernels(), products=Verdict(False, "found wrong"))
    for case in ("heads", "mul by a gate", "linear"):
        plan = plan_of(network(GROW[case]).graph(), EVERY["x86_vnni"], [seeded(2, 3, 8, 6)])
        executor, x = Executor(plan, using=using), [seeded(2, 3, 8, 6, seed=8)]
        assert executor.run(x)[0].equal(IntegerModel(plan).run(x)[0])
        assert not {"native multiply", "native matmul"} & set(executor.explain().kernels)


SUMS: Final = QParams(torch.ones((), dtype=torch.float64), ZERO, INT32.min, INT32.max, INT32)


BYTE: Final = QParams(torch.tensor(331.7, dtype=torch.float64), torch.tensor(7), 0, 255, UINT8)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_products_to_bytes_with_other_instructions(instruction_set: str) -> None:
    """Products that are requantized in registers: a gate per channel, a factor per row, and a value as large."""
    calls, generator = library_for(instruction_set).calls, torch.Generator().manual_seed(1)
    how, simq = Requantize("float32"), SimQ(SUMS, BYTE)
    moved = requantization_of(simq, how, 1, 2**31 - 1)
    assert not isinstance(moved, str)
    epilogue = Epilogue(1, [], stored=[StoredOutput("", moved, BYTE)]).build()
    kinds = [(torch.uint8, 0), (torch.uint8, 131), (torch.int8, 0), (torch.int8, -128)]
    for (a_dtype, a_zero), (b_dtype, b_zero) in itertools.product(kinds, kinds):
        for shape in ((2, 40, 1, 1), (1, 1, 3, 5), (2, 40, 3, 5)):
            a, b = _random(a_dtype, (2, 40, 3, 5), generator), _random(b_dtype, shape, generator)
            a, b = (x.contiguous(memory_format=torch.channels_last) for x in (a, b))
            formats = tuple((native.TYPES[str(x.dtype)[6:]], z) for x, z in ((a, a_zero), (b, b_zero)))
            (found,) = MultiplyCall(calls, epilogue, formats, (None, None), 1, None)([a, b])
            exact = (a.to(torch.int64) - a_zero) * (b.to(torch.int64) - b_zero)
            assert found.equal((apply_simq(exact, simq, how) + 7).to(torch.uint8)), (formats, shape)


def _random(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    ends = torch.iinfo(dtype)
    return torch.randint(ends.min, ends.max + 1, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_products_of_matrices_with_other_instructions(instruction_set: str) -> None:
    """Every type and zero point, rows and depths that fill no register, and either layout of the second operand."""
    calls, generator = library_for(instruction_set).calls, torch.Generator().manual_seed(1)
    kinds = [(torch.uint8, 0), (torch.uint8, 131), (torch.uint8, 128), (torch.int8, 0), (torch.int8, -3)]
    kinds.append((torch.int16, 0))
    for (a_dtype, a_zero), (b_dtype, b_zero), transposed in itertools.product(kinds, kinds, (False, True)):
        for rows, depth, columns in ((1, 1, 1), (13, 5, 33), (23, 7, 16), (6, 130, 70)):
            a = _random(a_dtype, (2, rows, depth), generator)
            b = _random(b_dtype, (2, columns, depth) if transposed else (2, depth, columns), generator)
            b = b.mT if transposed else b
            formats = tuple((native.TYPES[str(x.dtype)[6:]], z) for x, z in ((a, a_zero), (b, b_zero)))
            epilogue = Epilogue(columns, [], stored=[StoredOutput("", AS_IS, SUMS)]).build()
            (found,) = MatmulCall(calls, epilogue, formats, (None, None), None)([a, b])
            exact = (a.to(torch.int64) - a_zero) @ (b.to(torch.int64) - b_zero)
            assert found.equal(exact.to(torch.int32)), (formats, rows, depth, columns, transposed)


@pytest.mark.parametrize("name", ["hago_multiply", "hago_matmul"])
def test_a_library_with_wrong_products_is_detected(name: str) -> None:
    library = native.library()
    if library.calls is None:
        pytest.skip(library.why)
    assert check_products(library.calls).exact

    class Lying:
        def __getattr__(self, asked: str) -> object:
            real = getattr(library.calls, asked)

            def call(first: int, second: int, *rest: object) -> None:
                real(first, second, *rest)
                output = native.EpilogueParams.from_address(second if name == "hago_matmul" else first).output[0]
                (native.c_int32 * 1).from_address(output.data)[0] ^= 1

            return call if asked == name else real

    assert not check_products(Lying()).exact


def test_threads_share_the_work() -> None:
    before, x = torch.get_num_threads(), [seeded(5, 3, 8, 6, seed=8)]
    try:
        for case in ("heads", "mul by a gate", "linear", "mean of images"):
            plan = plan_of(network(GROW[case]).graph(), EVERY["x86_vnni"], [seeded(2, 3, 8, 6)])
            found: list[Tensor] = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                found += Executor(plan).run([x[0][:threads]])[:1]
                check(plan, x)
    finally:
        torch.set_num_threads(before)
