"""Graph: its invariants, edges, hash and printed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from building import Builder, residual_block, seeded

from hago.arithmetic.types import Edge
from hago.errors import GraphError
from hago.graph.graph import CONST, INPUT, Graph, Node


def doubled() -> Graph:
    b = Builder()
    x = b.input(4, name="x")
    b.call("add", x, x, name="add")
    return b.graph()


# ---------------------------------------------------------------- invariants
X = Node("x", INPUT, (), {}, (1, 4))


@pytest.mark.parametrize(
    "nodes, inputs, outputs, says",
    [
        ((X, Node("x", "relu", ("x",))), ("x",), ("x",), "two nodes are called 'x'"),
        ((Node("r", "relu", ("x",)), X), ("x",), ("r",), "'r' reads 'x', which does not stand before it"),
        ((X, Node("r", "relu", ("r",))), ("x",), ("r",), "'r' reads 'r'"),
        ((X, Node("w", CONST, ())), ("x",), ("w",), "const node 'w' has no tensor"),
        ((X, Node("output", "relu", ("x",))), ("x",), ("x",), "cannot name a node"),
        ((X, Node("a:b", "relu", ("x",))), ("x",), ("x",), "cannot name a node"),
        ((X, Node("", "relu", ("x",))), ("x",), ("x",), "cannot name a node"),
        ((X, Node("r", "relu", ("x",))), ("r",), ("r",), "graph input 'r' is not a node of op 'input'"),
        ((X,), ("y",), ("x",), "graph input 'y'"),
        ((X,), ("x",), ("y",), "graph output 'y' is not a node"),
    ],
)
def test_what_is_no_graph(
    nodes: tuple[Node, ...], inputs: tuple[str, ...], outputs: tuple[str, ...], says: str
) -> None:
    with pytest.raises(GraphError, match=says):
        Graph(nodes, inputs, outputs)


# ---------------------------------------------------------------- edges
def test_an_edge_is_a_slot_of_its_reader() -> None:
    graph = doubled()
    assert [str(e) for e in graph.edges] == ["add:0", "add:1", "output:0"]
    assert [graph.source(e) for e in graph.edges] == ["x", "x", "add"]
    assert graph.out_edges == {"x": (Edge("add", 0), Edge("add", 1)), "add": (Edge("output", 0),)}


def test_every_edge_has_one_source() -> None:
    graph = residual_block()
    assert sorted(graph.edges) == sorted(e for edges in graph.out_edges.values() for e in edges)
    assert all(e in graph.out_edges[graph.source(e)] for e in graph.edges)


def test_an_unknown_name() -> None:
    assert len(residual_block()) == 18 and next(iter(residual_block())).name == "x"
    with pytest.raises(GraphError, match="no node 'stem.rleu'. Did you mean 'stem.relu'"):
        residual_block()["stem.rleu"]


# ---------------------------------------------------------------- hash
def test_equal_models_have_equal_hashes() -> None:
    assert residual_block().model_hash == residual_block().model_hash


def _changed(graph: Graph, node: str, **changes: object) -> Graph:
    nodes = tuple(replace(n, **changes) if n.name == node else n for n in graph)  # type: ignore[arg-type]
    return graph.with_nodes(nodes)


@pytest.mark.parametrize(
    "change",
    [
        lambda g: replace(g, consts={**g.consts, "fc.bias": g.consts["fc.bias"] + 1e-7}),
        lambda g: replace(g, consts={**g.consts, "fc.bias": g.consts["fc.bias"].double()}),
        lambda g: _changed(g, "pool", attrs={"output_size": [1, 1], "input_size": [8, 9]}),
        lambda g: _changed(g, "add", inputs=("right", "stem.relu")),
        lambda g: _changed(g, "add.relu", op="sigmoid"),
        lambda g: replace(g, outputs=("flat",)),
    ],
)
def test_other_models_have_other_hashes(change: Callable[[Graph], Graph]) -> None:
    assert change(residual_block()).model_hash != residual_block().model_hash


def test_the_hash_reads_values_and_not_layout() -> None:
    b = Builder()
    weight = seeded(4, 3, 3, 3)
    b.conv2d(b.input(3, 8, 8), weight)
    other = replace(b.graph(), consts={n: t.contiguous(memory_format=torch.channels_last) for n, t in b.consts.items()})
    assert other.model_hash == b.graph().model_hash


# ---------------------------------------------------------------- other forms
def test_constants_that_nothing_reads_are_dropped() -> None:
    graph = residual_block()
    less = graph.with_nodes(tuple(n for n in graph if n.name not in ("fc", "fc.weight", "fc.bias")), outputs=("flat",))
    assert set(graph.consts) - set(less.consts) == {"fc.weight", "fc.bias"}


def test_the_printed_form(golden: Callable[[str, str], None]) -> None:
    golden("residual_block.graph.txt", str(residual_block()))
