"""Chips that requantize at the output to one of several dtypes: the dtypes that layers store and read."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Final

import pytest
from building import Builder, seeded
from plans import points

import hago
from hago.arithmetic.types import INT32
from hago.errors import InfeasibleBits
from hago.graph.graph import Graph
from hago.hardware.hardware import Accumulator, Hardware, OpDesc, TensorScheme
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.stored_model import from_file_bytes, to_file_bytes
from hago.search.preparation import Prepared, QuantizationOptions, prepare
from hago.search.stored_strategy import make_strategy, plan_of

DATA: Final = [(seeded(4, 3, 6, 6) * 3,), (seeded(4, 3, 6, 6),)]


def layer(operand: str, out: str) -> OpDesc:
    return OpDesc([operand, "int8"], out, Accumulator(INT32), "output", min_bits=3)


def through(operand: str, out: str) -> OpDesc:
    return OpDesc(operand, out, Accumulator(INT32), "output", min_bits=3)


EITHER: Final = [layer("int4", "int4"), layer("int8", "int4"), layer("int8", "int8")]
CHIPS: Final = {
    "narrow results": ([layer("int8", "int4"), layer("int8", "int8")], [OpDesc("int8", "int8")]),
    "both": (EITHER, [OpDesc("int4", "int4"), OpDesc("int8", "int8")]),
    "wide first": (EITHER[::-1], [OpDesc("int8", "int8"), OpDesc("int4", "int4")]),
    "wider still": (EITHER, [OpDesc("int16", "int16"), OpDesc("int8", "int8"), OpDesc("int4", "int4")]),
    "between, at the output": (EITHER, [through("int4", "int4"), through("int8", "int8")]),
    "between, wider still": (EITHER, [through("int16", "int16"), through("int8", "int8"), through("int4", "int4")]),
    "without a sign": (
        [layer("uint4", "uint4"), layer("int4", "int4"), layer("uint8", "uint8"), layer("int8", "int8")],
        [OpDesc(d, d) for d in ("uint4", "int4", "uint8", "int8")],
    ),
}


def chip(name: str, scheme: str = "symmetric") -> Hardware:
    layers, between = CHIPS[name]
    return Hardware({"conv2d": layers, "relu": between}, name="widths", activation=TensorScheme(scheme))


def two_layers() -> Graph:
    b = Builder()
    x = b.conv2d(b.input(3, 6, 6, name="x"), seeded(4, 3, 3, 3), name="first")
    x = b.call("relu", x, name="relu")
    return b.graph(b.conv2d(x, seeded(4, 4, 3, 3), name="second"))


def prepared_on(name: str, scheme: str = "symmetric") -> Prepared:
    return prepare(two_layers(), chip(name, scheme), DATA, QuantizationOptions(estimator="max_range"))


@pytest.mark.parametrize("scheme", ["symmetric", "affine", "hago"])
@pytest.mark.parametrize("name", CHIPS)
def test_simulator_and_integer_model_agree_at_every_point(name: str, scheme: str) -> None:
    """Simulator, integer model and fast engine; a stored strategy, and a stored model, give the plan again."""
    prepared = prepared_on(name, scheme)
    for bits in islice(points(prepared.space, seed=5), 12):
        plan = prepared.resolver(bits)
        assert compare_plan_exactly(plan, DATA[0]).same, bits
        strategy = make_strategy(prepared, plan, bits, {})
        assert plan_of(prepared.graph, prepared.hardware, strategy).key == plan.key
        assert from_file_bytes(to_file_bytes(plan), "a test", plan.ops)[0].key == plan.key


def test_consumers_read_the_stored_dtype() -> None:
    """Whatever is listed first."""
    for name in ("both", "wide first", "wider still"):
        prepared = prepared_on(name)
        for bits, dtype in ((3, "int4"), (8, "int8")):
            plan = prepared.resolver({**prepared.space.widest(), "first:out": bits})
            first = plan.nodes["first"].desc.out_dtype.name
            assert first == (dtype if name != "wide first" else "int8")
            assert [d.name for d in plan.nodes["relu"].desc.in_dtypes] == [first]
            assert plan.nodes["relu"].simqs == (None,)


def test_a_wider_signature_reads_the_same_integers() -> None:
    """4 bits that are to be 8 behind the relu: nothing is rounded on the way into it."""
    prepared = prepared_on("between, at the output")
    plan = prepared.resolver({**prepared.space.widest(), "first:out": 4, "relu:out": 8})
    given, (taken,) = plan.nodes["first"].out, plan.nodes["relu"].operands
    assert taken is not None and (given.dtype.name, taken.dtype.name) == ("int4", "int8")
    assert given.key[:-1] == taken.key[:-1]  # all but the dtype
    assert "relu:0" not in plan.thresholds


def test_a_layer_after_a_relu_reads_the_dtype_that_its_output_needs() -> None:
    prepared = prepared_on("both")
    plan = prepared.resolver({**prepared.space.widest(), "first:out": 4, "second:out": 8})
    second = plan.nodes["second"]
    assert second.desc == EITHER[-1] and plan.nodes["relu"].out.dtype.name == "int4"
    assert second.operands[0] is not None and second.operands[0].key[:-1] == plan.nodes["relu"].out.key[:-1]


def test_a_stored_dtype_that_no_consumer_reads_is_named_in_the_error() -> None:
    layers = [layer("int8", "int4"), layer("int4", "int8")]
    hardware = Hardware({"conv2d": layers, "relu": [OpDesc("int8", "int8"), OpDesc("int4", "int4")]}, name="lopsided")
    prepared = prepare(two_layers(), hardware, DATA, QuantizationOptions(estimator="max_range"))
    bits = prepared.space.narrowest()
    prepared.resolver({**bits, "second:out": 8})
    with pytest.raises(InfeasibleBits, match="'second' .* holds bits {'relu': 'int8', .*} and 8 of its output; it has"):
        prepared.resolver({**bits, "first:out": 8, "second:out": 8})


@pytest.mark.parametrize("searcher", ["greedy", "sensitivity"])
@pytest.mark.parametrize("name", ["narrow results", "between, at the output"])
def test_a_search_and_its_log(name: str, searcher: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    limit = "activation_bytes <= 1 MB"
    strategy, _ = hago.search_quantize_strategy(
        two_layers(), chip(name), DATA, searcher=searcher, budget=12, log=log, budget_cost=limit
    )
    assert hago.replay(two_layers(), chip(name), log, DATA).same
    assert hago.replay(two_layers(), chip(name), strategy, DATA).same
