"""DType, Edge, QParams and SimQ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hago.arithmetic.types import DTYPES, FLOAT32, INT8, INT32, UINT8, ZERO, Edge, QParams, SimQ, dtype
from hago.errors import HagoError


def test_dtypes_have_consistent_properties() -> None:
    for kind in DTYPES.values():
        assert dtype(kind.name) is kind and str(kind) == kind.name
        if not kind.is_int:
            continue
        assert kind.max - kind.min + 1 == 1 << kind.bits
        assert kind.signed == (kind.min < 0)
        stored = torch.iinfo(kind.torch)
        assert stored.min <= kind.min and kind.max <= stored.max


def test_known_ranges() -> None:
    assert (dtype("int4").min, dtype("int4").max) == (-8, 7)
    assert (UINT8.min, UINT8.max) == (0, 255)
    assert (INT32.min, INT32.max) == (-(2**31), 2**31 - 1)
    assert (dtype("int24").max, dtype("int40").max) == (2**23 - 1, 2**39 - 1)
    assert not FLOAT32.is_int and dtype("bfloat16").bits == 16


def test_an_unknown_dtype() -> None:
    with pytest.raises(HagoError, match="unknown dtype 'itn8'. Did you mean 'int8'"):
        dtype("itn8")


@given(st.text(min_size=1), st.integers(0, 10**6))
def test_edges_are_parsed_from_their_text(dst: str, slot: int) -> None:
    edge = Edge(dst, slot)
    assert Edge.parse(str(edge)) == edge


@given(st.text())
@example("add:²")
@example("add:٣")
def test_parsing_any_text_raises_only_hago_error(text: str) -> None:
    try:
        edge = Edge.parse(text)
    except HagoError:
        return
    assert text.startswith(f"{edge.dst}:") and edge.slot >= 0


@pytest.mark.parametrize("text", ["", "add", "add:", ":0", "add:x", "add:-1", "add:1.0"])
def test_text_that_is_not_an_edge_is_refused(text: str) -> None:
    with pytest.raises(HagoError, match="not an edge; expected 'node:slot'"):
        Edge.parse(text)


def test_edges_are_ordered_by_node_and_slot() -> None:
    edges = [Edge("b", 0), Edge("a", 10), Edge("a", 9)]
    assert sorted(edges) == [Edge("a", 9), Edge("a", 10), Edge("b", 0)]
    assert Edge("a", 1) <= Edge("a", 1) < Edge("b", 0)


def qparams(**changes: object) -> QParams:
    plain = QParams(torch.tensor(0.5, dtype=torch.float64), ZERO, -127, 127, INT8)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_qparams_are_equal_by_key() -> None:
    one = qparams()
    assert one.key == qparams().key and hash(one.key) == hash(qparams().key)
    for change in (
        {"scale": torch.tensor(0.25, dtype=torch.float64)},
        {"scale": torch.tensor([0.5], dtype=torch.float64)},
        {"zero_point": torch.tensor(1)},
        {"qmin": -128},
        {"qmax": 126},
        {"dtype": UINT8},
    ):
        assert qparams(**change).key != one.key


def test_qparams_as_text() -> None:
    assert str(qparams()) == "int8[-127,127] scale 0.5 zero 0"
    many = qparams(scale=torch.tensor([0.5, 0.25], dtype=torch.float64))
    assert many.per_channel and not qparams().per_channel
    assert str(many) == "int8[-127,127] scale 0.25..0.5 zero 0"


def test_the_kind_of_a_simq() -> None:
    q, r = qparams(), qparams(dtype=INT32)
    assert [SimQ(None, q).kind, SimQ(q, r).kind, SimQ(q, None).kind] == ["quantize", "requantize", "dequantize"]
    assert (SimQ(None, q).in_dtype, SimQ(None, q).out_dtype) == (FLOAT32, INT8)
    assert (SimQ(r, None).in_dtype, SimQ(r, None).out_dtype) == (INT32, FLOAT32)
    assert SimQ(q, r).key == SimQ(qparams(), qparams(dtype=INT32)).key
    assert len({SimQ(q, r).key, SimQ(r, q).key, SimQ(None, q).key, SimQ(q, None).key}) == 4
    assert str(SimQ(q, None)) == "dequantize int8[-127,127] scale 0.5 zero 0 -> float32"
