"""Calibration and quantize tables of Plans: their rows and modes, and that they can be read again."""

from __future__ import annotations

import math

import pytest
import torch
from building import Builder
from chips import Chip
from plans import const_nodes, points, resolver_of
from random_graphs import random_graph, random_inputs
from specs import SHIPPED

from hago.emulation.tpu_mlir.tables import (
    format_calibration_table,
    format_quantize_table,
    parse_calibration_table,
    parse_quantize_table,
)
from hago.export.tpu_mlir import Tables, make_tables
from hago.graph.graph import Graph
from hago.hardware.file import load_hardware
from hago.hardware.hardware import Hardware
from hago.plan.plan import Plan
from hago.plan.resolve import Resolver
from hago.plan.space import build_space
from hago.plan.topology import analyze


def chain() -> Graph:
    """conv, relu, conv, max pooling, linear: as in any classifier."""
    b = Builder()
    torch.manual_seed(0)
    x = b.input(3, 8, 8, name="image")
    x = b.call("relu", b.conv2d(x, torch.randn(4, 3, 3, 3), name="first"), name="act")
    x = b.conv2d(x, torch.randn(4, 4, 3, 3), name="second")
    attrs = {"stride": [2, 2], "padding": [0, 0], "dilation": [1, 1], "ceil_mode": False}
    x = b.call("max_pool2d", x, name="pool", kernel_size=[2, 2], **attrs)
    x = b.call("reshape", x, name="flat", shape=[-1, 64])
    return b.graph(b.call("linear", x, b.const(torch.randn(3, 64)), name="head"))


def plan_of(graph: Graph, hardware: Hardware, bits: int = 8) -> tuple[Plan, dict[str, int]]:
    resolver = resolver_of(graph, hardware, random_inputs(graph, 1))
    chosen = {k: min(g.choices, key=lambda c: abs(c - bits)) for k, g in resolver.space.groups.items()}
    return resolver(chosen), chosen


def tables_of(graph: Graph, hardware: Hardware, bits: int = 8) -> tuple[Plan, Tables]:
    plan, chosen = plan_of(graph, hardware, bits)
    return plan, make_tables(plan, chosen)


SYMMETRIC = [
    n for n, c in SHIPPED.items() if c.activation.scheme in ("hago", "symmetric") and c.integer_descs("conv2d")
]


@pytest.mark.parametrize("name", SYMMETRIC)
def test_the_row_of_an_8_bit_tensor_gives_the_scale_of_the_plan(name: str) -> None:
    plan, tables = tables_of(chain(), load_hardware(name))
    target = plan.nodes["first"].operands[0]
    row = tables.calibration.rows["image"]
    assert target is not None
    levels = 127 if target.qmin < int(target.zero_point) else 255
    assert math.isclose(row.threshold / levels, float(target.scale), rel_tol=1e-6)
    assert row.minimum == (-row.threshold if levels == 127 else 0.0)


def test_nodes_that_only_move_values_have_the_row_of_their_input() -> None:
    for at in ("edge", "output"):
        _, tables = tables_of(chain(), Chip(at=at).hardware())
        rows = tables.calibration.rows
        assert rows["second"] == rows["pool"] == rows["flat"], at
        assert rows["first"] == rows["act"], at
        assert tables.without_range == (() if at == "output" else ("head",)), at


def test_an_observed_range_is_the_row_of_a_node_that_no_edge_quantizes() -> None:
    plan, chosen = plan_of(chain(), Chip().hardware())
    tables = make_tables(plan, chosen, {"head": (-3.0, 2.0), "image": (-9.0, 9.0)})
    row = tables.calibration.rows["head"]
    assert (row.threshold, row.minimum, row.maximum) == (3.0, -3.0, 2.0)
    assert tables.without_range == () and tables.calibration.rows["image"].threshold < 9.0


def test_affine_tensors_have_both_ends() -> None:
    plan, tables = tables_of(chain(), Chip(scheme="affine").hardware())
    target, row = plan.nodes["first"].operands[0], tables.calibration.rows["image"]
    assert target is not None
    scale, zero = (row.maximum - row.minimum) / 255, round(-128 - row.minimum * 255 / (row.maximum - row.minimum))
    assert math.isclose(scale, float(target.scale), rel_tol=1e-6) and zero == int(target.zero_point)
    assert row.threshold == max(-row.minimum, row.maximum)


def test_modes_of_float_nodes_and_of_four_bits() -> None:
    graph, chip = chain(), Chip(floats=True).hardware()
    topology = analyze(graph, chip, ["head"])
    space = build_space(graph, chip, topology)
    resolver = resolver_of(graph, chip, random_inputs(graph, 1))
    with_float_head = Resolver(graph, chip, topology, space, resolver.thresholds)
    bits = dict.fromkeys(space.groups, 8) | {"first:1": 4, "second:0": 4, "second:1": 4}
    tables = make_tables(with_float_head(bits), bits)
    assert tables.quantize.modes == {"first": "W4INT8", "second": "INT4", "head": "F32"}
    assert set(tables.calibration.int4) == {"act"}


def test_a_tensor_read_with_several_ranges_takes_the_widest() -> None:
    b = Builder()
    x = b.input(4, name="x")
    left, right = (b.call("linear", x, b.const(torch.eye(4)), name=n) for n in ("left", "right"))
    graph = b.graph(left, right)
    resolver = resolver_of(graph, Chip().hardware(), [torch.linspace(-1, 1, 8).reshape(2, 4)])
    bits = resolver.space.widest() | {"left:0": 8, "right:0": 3}
    tables = make_tables(resolver(bits), bits)
    assert tables.widened == ("x",) and tables.other_bits == {"right:0": 3}
    assert tables.calibration.rows["x"].threshold == 127 / 128


@pytest.mark.parametrize("seed", range(6))
def test_tables_of_random_graphs_can_be_parsed(seed: int) -> None:
    graph = random_graph(seed)
    for name in ("x86_vnni", "arm_dot", "vta"):
        resolver = resolver_of(graph, load_hardware(name), random_inputs(graph, seed))
        bits = next(points(resolver.space, seed))
        tables = make_tables(resolver(bits), bits)
        read = parse_calibration_table(format_calibration_table(tables.calibration))
        assert list(read.rows) == list(tables.calibration.rows)
        for node, row in read.rows.items():
            assert abs(row.threshold - max(tables.calibration.rows[node].threshold, 1e-5)) <= 5.1e-8
        assert parse_quantize_table(format_quantize_table(tables.quantize)).modes == tables.quantize.modes
        assert not set(read.rows) & set(const_nodes(graph))
