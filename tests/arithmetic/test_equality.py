"""Equality against Python's exact numbers; and every comparison of hago uses this definition."""

from __future__ import annotations

import ast
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hago
from hago.arithmetic.equality import count_differing, differences, equal, to_quanta

NAN, INF, MOST = float("nan"), float("inf"), sys.float_info.max
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 0, 1]),
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 0.5, 2.0**53, 2.0**63, -(2.0**63), NAN, INF, -INF]),
)


def exactly_equal(a: float, b: float) -> bool:
    """Whether two numbers are equal, as fractions."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a == b or (math.isnan(a) and math.isnan(b))
    return Fraction(a) == Fraction(b)


def tensor_of(number: float) -> Tensor:
    return torch.tensor([number], dtype=torch.float64 if isinstance(number, float) else torch.int64)


@given(numbers, numbers)
@settings(deadline=None, max_examples=300)
def test_numbers_are_equal_if_and_only_if_fractions_are(a: float, b: float) -> None:
    assert equal(tensor_of(a), tensor_of(b)) == exactly_equal(a, b) == equal(a, b)
    assert equal(tensor_of(a), tensor_of(a))


@pytest.mark.parametrize("a_dtype", INTEGERS + FLOATS)
@pytest.mark.parametrize("b_dtype", INTEGERS + FLOATS)
def test_the_dtype_makes_no_difference(a_dtype: torch.dtype, b_dtype: torch.dtype) -> None:
    a, b = torch.tensor([0, 1, 1], dtype=a_dtype), torch.tensor([0, 1, 0], dtype=b_dtype)
    assert differences(a, b) == (1, 1.0)


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([2**53 + 1, 5], [2**53, 5], (1, 1.0)),  # the same float64
        ([2.0**53, 5.0], [2**53 + 1, 5], (1, 0.0)),  # of a float and an integer, the gap is that of float64
        ([1.0, NAN, 3.0], [1.0, NAN, 3.0], (0, 0.0)),
        ([1.0, NAN, 3.0], [1.0, 2.0, 4.0], (2, MOST)),
        ([0.0, -0.0], [-0.0, 0.0], (0, 0.0)),
        ([INF, -INF], [INF, INF], (1, MOST)),
        ([5.0, 6.0], [5, 7], (1, 1.0)),
        ([5.5, INF, NAN], [5, 6, 7], (3, MOST)),
        ([0.0, -0.0], [0, 0], (0, 0.0)),
        ([-(2**63)], [2**63 - 1], (1, 2.0**64)),
        ([2.0**63], [2**63 - 1], (1, 0.0)),  # the float lies outside of int64
        ([], [], (0, 0.0)),
    ],
)
def test_the_number_and_size_of_differences(a: list[float], b: list[float], expected: tuple[int, float]) -> None:
    made = [torch.tensor(x, dtype=torch.float64 if any(isinstance(i, float) for i in x) else None) for x in (a, b)]
    assert differences(*made) == expected
    assert differences(*reversed(made)) == expected
    assert count_differing(*made) == expected[0]


def test_an_unsigned_byte_is_its_value() -> None:
    stored = torch.tensor([255, 128, 0], dtype=torch.uint8)
    assert equal(stored, torch.tensor([255, 128, 0]))
    assert differences(stored, torch.tensor([-1, -128, 0], dtype=torch.int8)) == (2, 256.0)


def test_floats_of_two_widths_are_compared_by_value() -> None:
    tenth = torch.tensor([0.1, 0.5], dtype=torch.float64)
    assert count_differing(tenth, tenth.to(torch.float32)) == 1
    assert equal(tenth.to(torch.float32), tenth.to(torch.float32).to(torch.float64))
    assert count_differing(tenth[0], tenth[0].to(torch.float32)) == 1  # scalars are compared as entries are


def test_layout_in_memory_makes_no_difference() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert equal(x, x.to(memory_format=torch.channels_last))
    assert equal(torch.complex(x, x), torch.complex(x, x)) and not equal(torch.complex(x, x), torch.complex(x, -x))


def test_tensors_of_different_shapes_differ_everywhere() -> None:
    assert differences(torch.zeros(2, 3), torch.zeros(3)) == (6, MOST)
    assert not equal(torch.zeros(0), torch.zeros(0, 3))
    assert not equal(torch.zeros(()), torch.zeros(1))


def nested(last: Any) -> Any:
    return (torch.ones(2), [None, {"a": torch.tensor([1, 2]), "b": last}], "text", 3)


def test_nested_values() -> None:
    assert equal(nested(NAN), nested(NAN))
    assert equal(nested(torch.zeros(2)), nested(-torch.zeros(2)))
    assert differences(nested(torch.zeros(4)), nested(torch.tensor([0.0, 2.0, 0.0, 0.25]))) == (2, 2.0)
    assert count_differing(nested(1), nested(None)) == 1
    assert count_differing(nested(torch.zeros(4)), nested((torch.zeros(2), torch.zeros(2)))) == 4
    assert count_differing([torch.zeros(4)], [torch.zeros(4), torch.zeros(3)]) == 7
    assert count_differing({"a": 1}, {"b": 1}) == 1
    assert count_differing((), None) == 1
    assert differences(10**400, 1.0) == (1, MOST)
    assert equal((torch.ones(1),), [torch.ones(1)])  # a nesting's type is not a value
    assert equal({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_quanta_given_as_reals_are_rounded_to_integers() -> None:
    scale = torch.tensor(0.1, dtype=torch.float32)
    quanta = torch.arange(-128, 128)
    assert equal(to_quanta(quanta.to(torch.float32) * scale, scale), quanta)
    assert equal(to_quanta(torch.tensor([1.0000001, 2.6, NAN, INF])), torch.tensor([1.0, 3.0, NAN, INF]))
    assert to_quanta(quanta) is quanta
    assert not equal(torch.tensor([1.0000001], dtype=torch.float64), torch.tensor([1]))  # nowhere but there


# ---------------------------------------------------------------- nobody else defines it
def test_no_other_module_defines_equality() -> None:
    """No other module looks at bit patterns, closeness or NaN to tell whether two values are equal."""
    others = {"isclose", "allclose", "array_equal", "array_equiv", "assert_close", "assert_array_equal"}
    root = Path(hago.__file__).parent
    for path in root.rglob("*.py"):
        calls = [n.func for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
        names = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}
        assert not names & others, path


def test_comparing_modules_call_it() -> None:
    root = Path(hago.__file__).parent
    for name in (
        "runtime/exactness",
        "analysis/inspect",
        "analysis/strategy_report",
        "export/onnx/verification",
        "search/replay",
    ):
        assert "from hago.arithmetic.equality import" in (root / f"{name}.py").read_text("utf-8"), name
