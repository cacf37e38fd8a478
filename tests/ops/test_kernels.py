"""The integer form of every op, on its own; at the end, rules that were broken break their laws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hago.arithmetic.numerics import Order
from hago.ops import OPS
from hago.ops._rule import Addends, Attrs, Operand, TermsAt, WindowsOf

from .kernel_laws import (
    check_addends,
    check_bound,
    check_bound_is_reached,
    check_carriers,
    check_hull,
    check_scale,
    check_split,
    check_windows,
    varying_axes,
)
from .one_op import Case, internal
from .samples import INTERNAL_KEYS, imported

INTEGER = {n: r for n, r in OPS.items() if r.integer is not None and not r.integer.table}
KEYS = [(n, i) for n, r in INTEGER.items() for i in range(len(r.samples))] + INTERNAL_KEYS
EVERY = pytest.mark.parametrize("key", KEYS, ids=lambda k: f"{k[0]}-{k[1]}")

#: How many samples of an op are float for a reason of their own.
MISFITS = {
    "adaptive_avg_pool1d": 1,
    "adaptive_avg_pool2d": 1,
    "avg_pool1d": 2,
    "avg_pool2d": 2,
    "clamp": 1,
    "div": 2,
    "pad": 1,
}


def case_of(key: tuple[str, int]) -> Case:
    return internal(*key) if key in INTERNAL_KEYS else imported(*key)


# ---------------------------------------------------------------- over every op
@EVERY
def test_carriers_scale_and_bound(key: tuple[str, int]) -> None:
    case = case_of(key)
    if case.misfit is not None:
        return
    check_carriers(case)
    for varying in varying_axes(case.form):
        check_scale(case, varying)
    check_bound(case)
    if case.form.outputs_fit_input_dtype:
        check_hull(case)


@EVERY
def test_sums_of_products(key: tuple[str, int]) -> None:
    case = case_of(key)
    if case.form.split is not None:
        for parts in (2, 3):
            check_split(case, parts)
    if len(case.consts) > 0 and "bias" in case.form.slots:
        check_bound_is_reached(case)
    if case.misfit is None and case.form.addends is not None and case.form.addends.terms is not None:
        check_addends(case)
        if case.form.addends.windows_at is not None:
            check_windows(case)


def test_misfits_are_the_known_ones() -> None:
    reasons = [(k[0], case_of(k).misfit) for k in KEYS]
    found = [name for name, why in reasons if why is not None]
    assert {name: found.count(name) for name in set(found)} == MISFITS
    assert all(why is None or len(why) > 20 for _, why in reasons)


# ---------------------------------------------------------------- average pooling
windows = st.fixed_dictionaries(
    {
        "kernel_size": st.tuples(st.integers(1, 4)),
        "stride": st.tuples(st.integers(1, 4)),
        "padding": st.tuples(st.integers(0, 2)),
        "ceil_mode": st.booleans(),
        "count_include_pad": st.booleans(),
    }
)


@given(windows, st.integers(4, 9))
@settings(max_examples=150, deadline=None)
def test_average_is_integer_only_where_every_window_divides_alike(window: Attrs, length: int) -> None:
    window = {k: list(v) if isinstance(v, tuple) else v for k, v in window.items()}
    kernel, padding = window["kernel_size"][0], window["padding"][0]
    if 2 * padding > kernel:
        return
    rule, values = OPS["avg_pool1d"], torch.arange(1.0, 2.0 * length, 2.0).reshape(1, 1, length)
    form = rule.integer
    assert form is not None
    sums = rule.compute_int(window, values)
    exact = torch.allclose(sums / kernel, rule.compute(window, values))
    if form.unsupported(window, [(1, 1, length)]) is None:
        assert exact
    elif (length + 2 * padding - kernel) % window["stride"][0] == 0 or not window["ceil_mode"]:
        assert not exact  # refused for a reason that shows


# ---------------------------------------------------------------- clamp
@settings(deadline=None)
@given(st.fractions(-20, 0, max_denominator=64), st.fractions(0, 20, max_denominator=64), st.integers(-4, 4))
def test_clamp_limits_round_half_even(low: Fraction, high: Fraction, exponent: int) -> None:
    form = OPS["clamp"].integer
    assert form is not None
    scale = torch.tensor(2.0**exponent, dtype=torch.float64)
    found = form.attrs({"min": float(low), "max": float(high)}, [scale])
    size = Fraction(2) ** exponent
    assert found == {"min": round(low / size), "max": round(high / size)}  # Fraction rounds half to even


def test_clamp_limits_per_channel() -> None:
    form, rule = OPS["clamp"].integer, OPS["clamp"]
    assert form is not None
    scale = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64).reshape(1, 3, 1)
    attrs = form.attrs({"min": None, "max": 3.0}, [scale])
    out = rule.compute_int(attrs, torch.full((1, 3, 1), 100))
    assert attrs["min"] is None
    assert out.flatten().tolist() == [6, 12, 2]  # 3 / 2 is a tie, and 2 is even


def test_a_clamp_beyond_every_integer_changes_nothing() -> None:
    form = OPS["clamp"].integer
    assert form is not None
    attrs = form.attrs({"min": None, "max": 3.0e38}, [torch.tensor(2.0**-100, dtype=torch.float64)])
    assert int(OPS["clamp"].compute_int(attrs, torch.tensor([1 << 40]))) == 1 << 40


# ---------------------------------------------------------------- the laws bite
def broken(key: tuple[str, int], **changes: Any) -> Case:
    case = case_of(key)
    return replace(case, rule=replace(case.rule, integer=replace(case.form, **changes)))


def _too_small(attrs: Attrs, found: Sequence[Operand]) -> Tensor:
    return found[0].magnitude


def _too_large(attrs: Attrs, found: Sequence[Operand]) -> Tensor:
    return found[0].magnitude * 1e9


def _a_term_short(attrs: Attrs, values: Sequence[Tensor], order: Order) -> TermsAt:
    whole = OPS["conv2d"].integer.addends.terms(attrs, values, order)  # type: ignore[union-attr,misc]
    return lambda index: whole(index)[:, 1:]


def _shifted_windows(attrs: Attrs, shape: Sequence[int], w: Tensor, index: tuple[Tensor, ...]) -> WindowsOf:
    whole = OPS["conv2d"].integer.addends.windows_at(attrs, shape, w, index)  # type: ignore[union-attr,misc]
    return lambda x: whole(x).roll(1, 2)


def _negated_on_int64(attrs: Attrs, c: Tensor) -> Tensor:
    return c if c.is_floating_point() else -c


@pytest.mark.parametrize(
    "law, case",
    [
        (lambda c: check_scale(c, None), lambda: broken(("avg_pool2d", 0), scale=lambda a, s: s[0])),
        (lambda c: check_scale(c, None), lambda: broken(("mul", 0), scale=lambda a, s: s[0])),
        (lambda c: check_scale(c, 1), lambda: broken(("conv_transpose2d", 2), scale=lambda a, s: s[0] * s[1])),
        (lambda c: check_scale(c, 1), lambda: broken(("permute", 0), accepts_per_channel="axis1")),
        (check_bound, lambda: broken(("conv2d", 0), bound=_too_small)),
        (check_bound, lambda: broken(("sum", 0), bound=_too_small)),
        (check_bound_is_reached, lambda: broken(("conv2d", 0), bound=_too_large)),
        (check_addends, lambda: broken(("conv2d", 0), addends=Addends(_a_term_short))),
        (check_windows, lambda: broken(("conv2d", 0), addends=Addends(windows_at=_shifted_windows))),
        (check_addends, lambda: broken(("linear", 0), addends=replace(OPS["linear"].integer.addends, bias_axis=0))),  # type: ignore[union-attr,type-var]
        (check_carriers, lambda: broken(("relu", 0), compute=_negated_on_int64)),
        (check_hull, lambda: broken(("neg", 0), bound=OPS["relu"].integer.bound)),  # type: ignore[union-attr]
        (lambda c: check_split(c, 2), lambda: broken(("linear", 0), split=lambda a, t, n: [tuple(t)] * n)),
    ],
)
def test_a_broken_rule_breaks_its_law(law: Callable[[Case], None], case: Callable[[], Case]) -> None:
    made = case()
    with pytest.raises((AssertionError, RuntimeError)):
        law(made)
