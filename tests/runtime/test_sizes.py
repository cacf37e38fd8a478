"""The engine on inputs whose sizes differ from those of the Plan, or exceed the arrays of an epilogue."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from building import Builder, seeded
from specs import EVERY

from .test_executor import check, plan_of


def _residual(b: Builder, x: str, z: str) -> None:
    b.call("relu", b.call("add", b.conv2d(x, seeded(6, 6, 3, 3, seed=1)), z))


def _row(b: Builder, x: str, z: str) -> None:
    """A matrix product, added to what lies with its channels elsewhere."""
    b.call("sub", b.call("matmul", x, b.call("permute", x, axes=[0, 1, 3, 2])), z)


def _product(b: Builder, x: str, z: str) -> None:
    y = b.conv2d(x, seeded(6, 6, 3, 3, seed=1))
    b.call("add", b.call("mul", y, y), b.call("relu", z))


def _mean(b: Builder, x: str, z: str) -> None:
    means = [b.call("mean", b.call("relu", v), axes=[2, 3], keepdim=True, count=36) for v in (x, z)]
    b.call("add", *means)


def _pooled(b: Builder, x: str, z: str) -> None:
    y = b.call("add", b.conv2d(x, seeded(6, 6, 3, 3, seed=1)), z)
    b.call("max_pool2d", y, kernel_size=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1], ceil_mode=False)


@pytest.mark.parametrize("batches", [(4, 1), (1, 4), (0, 1)])
@pytest.mark.parametrize("grow", [_residual, _row, _product, _mean, _pooled])
def test_one_sample_is_broadcast(grow: Callable[[Builder, str, str], None], batches: tuple[int, int]) -> None:
    b = Builder()
    grow(b, b.input(6, 6, 6, name="x"), b.input(6, 6, 6, name="z"))
    plan = plan_of(b.graph(), EVERY["x86_vnni"], [seeded(2, 6, 6, 6), seeded(2, 6, 6, 6, seed=2)])
    check(plan, [seeded(n, 6, 6, 6, seed=3) for n in batches])


def test_a_constant_that_is_moved_first() -> None:
    b = Builder()
    moved = b.call("permute", b.const(seeded(1, 6, 6, 20, seed=5)), axes=[0, 3, 1, 2])
    b.call("add", moved, b.call("relu", b.conv2d(b.input(3, 6, 6, name="x"), seeded(20, 3, 3, 3, seed=1))))
    check(plan_of(b.graph(), EVERY["x86_vnni"], [seeded(2, 3, 6, 6)]), [seeded(4, 3, 6, 6)])


@pytest.mark.parametrize("hardware", ["x86_vnni", "vta", "onnxruntime_cpu"])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_sums_of_rows_longer_than_an_array(op: str, hardware: str) -> None:
    b = Builder()
    rows = b.call("linear", b.input(4, 30, name="x"), b.const(seeded(900, 30, seed=2)))
    b.call(op, rows, axes=[1], keepdim=False, count=4)
    check(plan_of(b.graph(), EVERY[hardware], [seeded(2, 4, 30)]), [seeded(3, 4, 30, seed=3)])


@pytest.mark.parametrize("hardware", ["x86_vnni", "vta", "onnxruntime_cpu"])
def test_the_batch_as_columns(hardware: str) -> None:
    b = Builder()
    x = b.input(8, name="x")
    b.call("matmul", x, b.call("permute", x, axes=[1, 0]))
    check(plan_of(b.graph(), EVERY[hardware], [seeded(1, 8)]), [seeded(700, 8, seed=3)])


def test_scales_along_an_axis_as_long_as_the_columns() -> None:
    """The convolution's scales vary along the channels, of which there are as many as columns."""
    b = Builder()
    x = b.input(6, 6, 6, name="x")
    wide = b.conv2d(x, seeded(6, 6, 3, 3, seed=1) * torch.arange(1.0, 7.0).reshape(6, 1, 1, 1))
    b.call("add", b.call("matmul", x, b.call("permute", x, axes=[0, 1, 3, 2])), wide)
    check(plan_of(b.graph(), EVERY["x86_vnni"], [seeded(2, 6, 6, 6)]), [seeded(3, 6, 6, 6, seed=3)])


@pytest.mark.parametrize("uniform", ["rows", "image", ""])
@pytest.mark.parametrize("rows_first", [False, True])
def test_equal_numbers_of_channels_and_columns(rows_first: bool, uniform: str) -> None:
    b = Builder()
    x = b.input(6, 6, 6, name="x")
    made = {}
    for name in ("rows", "image")[:: 1 if rows_first else -1]:
        sizes = torch.ones(6) if name == uniform else torch.arange(1.0, 7.0)
        if name == "rows":
            made[name] = b.call("linear", x, b.const(seeded(6, 6, seed=4) * sizes.reshape(6, 1)))
        else:
            made[name] = b.conv2d(x, seeded(6, 6, 3, 3, seed=1) * sizes.reshape(6, 1, 1, 1))
    b.call("add", *made.values())
    check(plan_of(b.graph(), EVERY["x86_vnni"], [seeded(2, 6, 6, 6)]), [seeded(3, 6, 6, 6, seed=3)])
