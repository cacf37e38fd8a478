"""The laws of operators, over every op file and each of its samples."""

from __future__ import annotations

from itertools import islice, product
from typing import get_args

import pytest
import torch
from chips import CHIPS, Chip, only
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import points, resolver_of
from products import some, whole
from specs import SHIPPED as SPECS
from torch import Tensor

from hago.arithmetic.numerics import ROUNDINGS, Requantize, RequantizeForm
from hago.graph.execute import infer_dtypes, infer_shape
from hago.graph.graph import INPUT, Graph, Node
from hago.hardware.hardware import Hardware
from hago.ops import OPS
from hago.ops._rule import Refusal
from hago.plan.topology import analyze, why_not_integer

from . import laws
from .samples import INTERNAL_KEYS, KEYS, among_integers, at_batch, compute_nodes, graph_of, inputs_of, model_and_graph

Key = tuple[str, int]
INTEGER_KEYS = [k for k in KEYS + INTERNAL_KEYS if OPS[k[0]].integer is not None]


def name_of(value: object) -> str:
    return f"{value[0]}-{value[1]}" if isinstance(value, tuple) else str(value)


EVERY = pytest.mark.parametrize("key", KEYS, ids=name_of)
EVERY_INTEGER = pytest.mark.parametrize("key", INTEGER_KEYS, ids=name_of)
#: An average pooling with a divisor of its own, which need not average.
DIVIDED_OTHERWISE = ("avg_pool2d", 4)
REFUSALS = [(rule.name, refusal) for rule in OPS.values() for refusal in rule.refuses]


def inputs_for(key: Key, batch: int = 2, seed: int = 7) -> list[Tensor]:
    if key in INTERNAL_KEYS:
        shape = graph_of(*key)["x"].shape or ()
        return [torch.randn((batch, *shape[1:]), generator=torch.Generator().manual_seed(seed))]
    sample = OPS[key[0]].samples[key[1]]
    return inputs_of(sample, at_batch(sample, batch, seed))


# ---------------------------------------------------------------- import, shape, cost, refuse
@EVERY
def test_import(key: Key) -> None:
    laws.check_import(key[0], OPS[key[0]].samples[key[1]], *model_and_graph(*key))


@EVERY
def test_shape(key: Key) -> None:
    laws.check_shape(graph_of(*key))


@EVERY
def test_dtypes(key: Key) -> None:
    laws.check_dtypes(infer_dtypes(graph_of(*key)), inputs_for(key))


@pytest.mark.parametrize("key", [k for k in KEYS if OPS[k[0]].any_layout], ids=name_of)
def test_any_layout(key: Key) -> None:
    laws.check_any_layout(graph_of(*key), inputs_for(key, batch=37))


def hiding(key: Key) -> bool:
    form = OPS[key[0]].integer
    return (
        form is not None and form.slots == ("follow",) and form.outputs_fit_input_dtype and form.allows_early_clipping
    )


@pytest.mark.parametrize("key", [k for k in KEYS if hiding(k)], ids=name_of)
def test_early_clipping(key: Key) -> None:
    laws.check_early_clipping(OPS[key[0]], graph_of(*key), inputs_for(key))


@pytest.mark.parametrize("name", sorted({name for name, _ in KEYS}))
def test_moves_values(name: str) -> None:
    keys = [k for k in KEYS if k[0] == name]
    laws.check_moves_values(name, [(graph_of(*k), inputs_for(k)) for k in keys])


@pytest.mark.parametrize(
    "key", [k for k in KEYS if OPS[k[0]].clips_or_averages and k != DIVIDED_OTHERWISE], ids=name_of
)
def test_clips_or_averages(key: Key) -> None:
    laws.check_clips_or_averages(graph_of(*key), inputs_for(key))


#: torch does not count it: 4 heads, 3 x 5 scores of width 8, and 5 values of width 8.
GROUPED_ATTENTION = ("scaled_dot_product_attention", 3)


@pytest.mark.parametrize("key", [k for k in KEYS if k != GROUPED_ATTENTION], ids=name_of)
def test_cost(key: Key) -> None:
    laws.check_cost(OPS[key[0]].samples[key[1]], graph_of(*key))


def test_cost_that_torch_does_not_count() -> None:
    for key, expected in ((GROUPED_ATTENTION, 4 * 3 * 5 * (8 + 8)), (("affine", 4), 3 * 4 * 5)):
        graph = graph_of(*key)
        (node,) = compute_nodes(graph)
        assert node.shape is not None
        assert OPS[key[0]].macs(node.attrs, [graph[s].shape or () for s in node.inputs], node.shape) == expected


@pytest.mark.parametrize("name, refusal", REFUSALS, ids=[f"{n}-{r.names}" for n, r in REFUSALS])
def test_refuse(name: str, refusal: Refusal) -> None:
    laws.check_refuse(OPS[name], refusal)


def test_every_op_has_samples() -> None:
    assert {name for name, rule in OPS.items() if not rule.samples} == {"affine", "channel_clamp", "masked_softmax"}


# ---------------------------------------------------------------- rectify
def joined(op: str, count: int) -> Graph:
    """One node that brings `count` inputs to one scale."""
    names = tuple(f"x{i}" for i in range(count))
    attrs = {} if op in ("add", "sub") else {"axis": 1}
    shapes = [(1, 3, 4)] * count
    node = Node(op, op, names, attrs)
    inputs = [Node(n, INPUT, (), {"dtype": "float32"}, (1, 3, 4)) for n in names]
    return Graph((*inputs, Node(op, op, names, attrs, infer_shape(node, shapes))), names, (op,), {})


COMMON = sorted(name for name, rule in OPS.items() if rule.integer and "common" in rule.integer.slots)
RECTIFYING = {
    "int8_edge": Chip(),
    "uint8_edge": Chip("uint8"),
    "symmetric": Chip(scheme="symmetric"),
    "affine": Chip("uint8", scheme="affine"),
    "output": Chip(at="output"),
    "output_int16": Chip(register="int16", at="output"),
    "output_int8": Chip(register="int8", at="output", scheme="symmetric"),
    "output_affine": Chip("uint8", "int16", scheme="affine", at="output"),
    "shift": Chip(requantize=Requantize("shift", "half_up")),
}
ends = st.floats(0.01, 100.0)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(COMMON), st.sampled_from(sorted(RECTIFYING)))
def test_rectify(data: st.DataObject, op: str, chip: str) -> None:
    count = 2 if op in ("add", "sub") else data.draw(st.integers(2, 4))
    signed = data.draw(st.booleans())
    ranges = {
        f"{op}:{i}": (-data.draw(ends) if signed or data.draw(st.booleans()) else 0.0, data.draw(ends))
        for i in range(count)
    }
    bits = {key: data.draw(st.integers(4, 8)) for key in ranges}
    laws.check_rectify(joined(op, count), RECTIFYING[chip].hardware(), ranges, bits)


def test_rectify_keeps_the_coarsest_scale() -> None:
    """The rule of 2020: out scales 0.5 and 0.25 become 0.5 twice; 16 bits of 4 and 4 of 1 become 1/8."""
    hardware = Chip().hardware()
    for thresholds, bits, expected in (((64.0, 32.0), (8, 8), 0.5), ((4.0, 1.0), (16, 4), 0.125)):
        ranges = {f"add:{i}": (-t, t) for i, t in enumerate(thresholds)}
        found = laws.fixed_resolver(joined("add", 2), hardware, ranges)
        plan = found({f"add:{i}": b for i, b in enumerate(bits)}).nodes["add"]
        assert [float(q.scale) for q in plan.operands if q] == [expected, expected]


# ---------------------------------------------------------------- overflow and bound
REGISTERS = {
    "int8 wraps": Chip("int8", "int8", "wrap", floats=True),
    "int16 wraps": Chip("int8", "int16", "wrap", floats=True),
    "int16 saturates": Chip("uint8", "int16", "saturate_end", floats=True),
    "int16 wraps before the output": Chip("int8", "int16", "wrap", at="output", floats=True),
}
#: Ops that add up values, so that their registers can be too narrow for the samples here.
SUMMING = [
    k
    for k in INTEGER_KEYS
    if not (OPS[k[0]].integer.outputs_fit_input_dtype or OPS[k[0]].integer.table or k[0] == "neg")  # type: ignore[union-attr]
]


@pytest.mark.parametrize("register", REGISTERS)
@pytest.mark.parametrize("key", SUMMING, ids=name_of)
def test_overflow(key: Key, register: str) -> None:
    graph, chip = graph_of(*key), REGISTERS[register].hardware()
    if why_not_integer(graph, compute_nodes(graph)[0], chip) is not None:
        return
    chip = only(chip, key[0])
    resolver = resolver_of(graph, chip, inputs_for(key))
    past = sum(laws.check_overflow(resolver, inputs) for inputs in laws.extreme_inputs(graph))
    products = "own" in OPS[key[0]].integer.slots  # type: ignore[union-attr]
    plan = resolver(resolver.space.widest())
    if register == "int8 wraps" and products and not any(node.raised for node in plan.nodes.values()):
        assert past > 0  # 127 times 127; weights are small where they make room for a bias


def wide_linear(depth: int) -> tuple[Graph, list[Tensor]]:
    """A linear of that many products per sum, whose weights all have the largest magnitude."""
    weight = torch.where(torch.arange(2 * depth).reshape(2, depth) % 3 == 0, -1.0, 1.0)
    nodes = (
        Node("x", INPUT, (), {"dtype": "float32"}, (1, depth)),
        Node("w", "const", (), {}, (2, depth)),
        Node("fc", "linear", ("x", "w"), {}, (1, 2)),
    )
    graph = Graph(nodes, ("x",), ("fc",), {"w": weight})
    return graph, [torch.cat([weight[:1], -weight[:1], weight[1:] * 0.7])]


@pytest.mark.parametrize("register, depth", [("int16", 3), ("int24", 521), ("int32", 133_145)])
@pytest.mark.parametrize("overflow", ["wrap", "saturate_end"])
def test_overflow_at_the_edge(register: str, depth: int, overflow: str) -> None:
    """127 * 127 * depth is just past the register; one product less is not."""
    for products in (depth, depth - 1):
        graph, inputs = wide_linear(products)
        resolver = resolver_of(graph, Chip("int8", register, overflow).hardware(), inputs)  # type: ignore[arg-type]
        plan = resolver(resolver.space.widest())
        assert plan.nodes["fc"].bound == 127 * 127 * products
        assert plan.nodes["fc"].proved == (products < depth)
        assert (laws.check_overflow(resolver, inputs) > 0) == (products == depth)
        laws.check_exact(resolver, inputs, [resolver.space.widest()])


@EVERY_INTEGER
def test_bound(key: Key) -> None:
    graph = among_integers(graph_of(*key))
    seen = 0
    for chip in (Chip("uint8", "int16", floats=True), Chip("int8", "int32", scheme="affine", floats=True)):
        resolver = resolver_of(graph, chip.hardware(), inputs_for(key))
        for bits in islice(points(resolver.space, seed=1), 3):
            seen += laws.check_bound(resolver(bits), [inputs_for(key, seed=8), *laws.extreme_inputs(graph)])
    assert seen > 0


# ---------------------------------------------------------------- bit-exact
def check_spec(key: Key, hardware: Hardware) -> None:
    inputs, graph = inputs_for(key), graph_of(*key)
    among, (node,) = among_integers(graph), compute_nodes(graph)
    fits = why_not_integer(graph, node, hardware) is None
    if fits or hardware.float_descs(key[0]):
        resolver = resolver_of(among, hardware, inputs)
        laws.check_exact(resolver, inputs, islice(points(resolver.space, seed=1), 3 if whole() else 2))
    if fits:
        alone = only(hardware, key[0])
        assert analyze(graph, alone).nodes[node.name]
        resolver = resolver_of(graph, alone, inputs, "power2_range")
        laws.check_exact(resolver, inputs, islice(points(resolver.space, seed=2), 2, 3))


def met(key: Key, number: int, spec: str) -> bool:
    """Whether a spec meets a sample: each op that it lists with one of its samples, in turn."""
    own = [other for other in INTEGER_KEYS if other[0] == key[0]]
    return bool(SPECS[spec].integer_descs(key[0])) and (whole() or own[number % len(own)] == key)


SHIPPED = [(k, name) for k in INTEGER_KEYS for number, name in enumerate(SPECS) if met(k, number, name)]


@pytest.mark.parametrize("key, spec", SHIPPED, ids=name_of)
def test_bit_exact_on_what_ships(key: Key, spec: str) -> None:
    check_spec(key, SPECS[spec])


def test_every_op_of_every_spec_is_met() -> None:
    listed = {(op, name) for op, _ in INTEGER_KEYS for name, chip in SPECS.items() if chip.integer_descs(op)}
    assert {(key[0], name) for key, name in SHIPPED} == listed


#: Every chip with an eighteenth of the samples, every sample with two chips or more.
SOME = some(18, INTEGER_KEYS, CHIPS)


@pytest.mark.parametrize("key, chip", SOME, ids=name_of)
def test_bit_exact_on_made_up_chips(key: Key, chip: str) -> None:
    inputs, hardware = inputs_for(key), CHIPS[chip].hardware()
    graph = among_integers(graph_of(*key))
    if why_not_integer(graph, graph[graph_of(*key).outputs[0]], hardware) is None:
        resolver = resolver_of(graph, hardware, inputs)
        laws.check_exact(resolver, inputs, islice(points(resolver.space, seed=3), 3))


def test_the_chips_cover_every_rounding_and_form() -> None:
    covered = {(c.requantize.form, c.requantize.rounding) for c in CHIPS.values()}
    forms = [form for form in get_args(RequantizeForm) if form != "onnxruntime"]  # of a chip that ships
    assert covered >= set(product(forms, ROUNDINGS))
