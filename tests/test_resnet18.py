"""ResNet-18 on the prototype's int16 hardware: the counts that its one published log rests on, by our rules.

The prototype had 113 nodes, 120 edges, 66 integer nodes, 114 quantized edges and 1,162 choices. It kept
every bias as an add of its own (20 nodes, 40 edges) and chose bits for every edge. Here a bias is a slot
of its convolution with a derived scale, and an edge that is never requantized has nothing to choose.
"""

from __future__ import annotations

import pytest
from networks import ResNet, images, randomized

from hago.graph.frontend import from_torch
from hago.graph.graph import CONST, INPUT, Graph
from hago.hardware.file import load_hardware
from hago.plan.space import build_space
from hago.plan.topology import analyze
from hago.runtime.exactness import compare_plan_exactly
from hago.search.preparation import prepare


@pytest.fixture(scope="module")
def graph() -> Graph:
    """The topology of ResNet-18 with narrow stages."""
    return from_torch(randomized(ResNet((4, 8, 12, 16))), (images(2, 3, 32, 32),))


def test_what_is_computed(graph: Graph) -> None:
    ops = [n.op for n in graph if n.op not in (INPUT, CONST)]
    counted = {op: ops.count(op) for op in dict.fromkeys(ops)}
    # 1 + 8 x 2 convolutions and 3 that downsample; batch norms are folded
    assert counted == {
        "conv2d": 20, "relu": 17, "max_pool2d": 1, "add": 8, "adaptive_avg_pool2d": 1, "reshape": 1, "linear": 1,
    }  # fmt: skip
    assert all(len(n.inputs) == 3 for n in graph if n.op == "conv2d")  # folding gave each a bias


def test_what_is_integer(graph: Graph) -> None:
    topology = analyze(graph, load_hardware("int16_accumulator"))
    # the prototype's 66, less its 20 adds of biases
    assert sum(topology.nodes.values()) == 66 - 20
    # its 114 edges, less the 40 of those adds; the 20 biases are slots of convolutions
    assert sum(topology.edges.values()) == 114 - 40 + 20
    left = [n.name for n in graph if n.op not in (INPUT, CONST) and not topology.nodes[n.name]]
    assert left == ["avgpool", "reshape", "fc"]  # its hardware had no integer average, flatten or dense


def test_what_there_is_to_choose(graph: Graph) -> None:
    chip = load_hardware("int16_accumulator")
    space = build_space(graph, chip, analyze(graph, chip))
    limits = [group.choices[0] for group in space.groups.values()]
    # per convolution image and weight (8 bits), per add two operands (16); relu and max pooling pass on
    identity, down = [8, 8, 8, 8, 16, 16], [8, 8, 8, 8, 8, 8, 16, 16]
    assert limits == [8, 8] + identity * 2 + (down + identity) * 3
    assert len(limits) == 20 * 2 + 8 * 2
    assert space.size == 40 * 5 + 16 * 13  # 8 to 4 bits, 16 to 4; the prototype swept 1,162
    assert [k for k in space.groups if space.groups[k].choices[0] == 16][:2] == ["stages.0.0:0", "stages.0.0:1"]


def test_residuals_keep_their_order(graph: Graph) -> None:
    for node in graph:
        if node.op == "add":
            residual, body = node.inputs
            assert body.endswith("conv2") and not residual.endswith("conv2")


@pytest.mark.parametrize("name", ["int16_accumulator", "x86_vnni", "arm_dot"])
def test_simulated_equals_realized(graph: Graph, name: str) -> None:
    prepared = prepare(graph, name, [images(4, 3, 32, 32, seed=1)])
    for bits in (prepared.space.widest(), prepared.space.narrowest()):
        found = compare_plan_exactly(prepared.resolver(bits), [images(2, 3, 32, 32, seed=2)])
        assert found.same and found.compared > 10_000


def test_wide_bits_overflow_where_the_accumulator_is_narrow(graph: Graph) -> None:
    prepared = prepare(graph, "int16_accumulator", [images(4, 3, 32, 32, seed=1)])
    wide = prepared.resolver(prepared.space.widest())
    assert set(wide.verdicts.values()) == {"proved", "possible"}
    narrow = prepared.resolver(prepared.space.narrowest())
    proved = [list(plan.verdicts.values()).count("proved") for plan in (wide, narrow)]
    assert proved[0] < proved[1]
