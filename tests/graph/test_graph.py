"""Graph: its invariants, edges, hash and printed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from building import Builder, residual_block, seeded
from networks import Small, images, randomized
from random_graphs import random_graph

from hago.arithmetic.types import Edge
from hago.errors import GraphError
from hago.graph.frontend import from_torch
from hago.graph.graph import CONST, INPUT, Graph, Node, hashed_text
from hago.plan.strategy import Strategy

ROOT = Path(__file__).parents[2]


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


#: Of `random_graph(seed)` with constants drawn as integers, by seed, when the first strategies were written.
RANDOM_HASHES = (
    "9074d31816a2414eb4ae7cc102b932cc18138d9127f79f5a29c7f7ad7064a96c",
    "264543d322687ba15c93228920eec01e6b4769d11329fbedd7e76820e6eec6f1",
    "814f1a232a25def7961b68f0c23d83e1baf66ae1c394e633497cc8a85c4f1386",
    "091ef5943cfe1179b8a1995d32ef130eca75051931cc5e28bb2e0819d794b055",
    "0b0c7ef1b558504bb8267359063170c525ecbffa105dc7fcfd6d864e6aa72cf3",
    "59ae339ffce69bb6810ffefed69900b538d7d4bac0cabf1db2ef836810d9eabf",
    "ea04e9ae21c3a0bb095d12e77a303e408267f675926b82b4043e9667e17cb033",
    "213029c2366b181c6d6af5ad6e79cc69980ed11315f7bd8bab33503a04034128",
    "c24df9fdb33b6b92c3dc429a2adca897dde0b9bd7ef8063570810157e5de5666",
    "1946833eebc8fa6c367e4786e2b8473f5e040290707a7d7d8d5ce4bce27dd9cd",
)
#: Of the networks that strategies/ is for.
SHIPPED_HASHES = {
    "cifar_resnet20": "9b317b5d9385afab81690f94ca71594a19ce83249e16a5baf8d894e4c4cad67c",
    "lenet": "137f4f2aaa0b9520fd8af4481030b7f1dc36c95fb2bf47c35f09d793a66608ac",
    "mlperf_kws": "635ecd595eadd2a386dad7634ade20745253b6c35734b88789ad808d9993d0de",
    "mlperf_resnet8": "705574a0e459035995588225b9d99cf74a83cbafe625d9da95d80a200aaaa949",
}
GOLDEN_HASHES = {
    "attention_strategy_1": "ee16de8d5769e8630a579079259ec3afc0f6c70abe81006b01747033e545be83",
    "strategy_1": "f9a6fb8aea45a6db89a22af900aa319116fc4f7a0c84e9fafb2dd23371380c2b",
    "tokens_strategy_1": "d5d4b732fcd56d7c31c976265626e65534d8b0b78f8c5a839ebd7b89e9914415",
}


def test_hashes_are_those_of_the_first_strategies() -> None:
    found = []
    for seed in range(len(RANDOM_HASHES)):
        graph = random_graph(seed)
        shapes = {name: tensor.shape for name, tensor in sorted(graph.consts.items())}
        consts = {name: seeded(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
        found.append(replace(graph, consts=consts).model_hash)
    assert tuple(found) == RANDOM_HASHES
    assert residual_block().model_hash == "99497d09647d751cfcce3b53c366a5b18fa2cb4cb3a0f9d121859479ef895a7e"
    imported = from_torch(randomized(Small()), (images(2, 1, 8, 8),))
    assert imported.model_hash == "72dda194a8bd17401ef57de74518519d7f07c2dfa88d0ff1ea5bb948c6b4ed50"


def test_shipped_strategies_are_for_the_networks_they_were_made_for() -> None:
    """Their weights are no part of the project; that the files are not rewritten under another hash is."""
    for name, expected in SHIPPED_HASHES.items():  # searches in this folder, as the demo's, write theirs beside them
        paths = sorted((ROOT / "strategies").glob(f"{name}-*.json"))
        assert paths and {Strategy.load(path).model_hash for path in paths} == {expected}
    for name, expected in GOLDEN_HASHES.items():  # their networks are built anew where they are applied
        assert Strategy.load(ROOT / "tests" / "golden" / f"{name}.json").model_hash == expected


def test_the_hash_does_not_depend_on_how_a_graph_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, expected = residual_block(), residual_block().model_hash
    # printed in lines of another width, with another title and other commas
    printed = str(graph).replace(", with shapes at batch 1", "").replace("input(dtype", "input(, dtype")
    assert hashed_text(graph).split() == printed.split()
    monkeypatch.setattr(Graph, "__str__", lambda self: "a graph")
    monkeypatch.setattr(Node, "__str__", lambda self: "a node")
    assert residual_block().model_hash == expected


def test_a_renamed_op_is_hashed_under_its_first_name(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = residual_block().model_hash
    renamed = _changed(residual_block(), "add.relu", op="rectify")
    assert renamed.model_hash != expected
    monkeypatch.setattr("hago.graph.graph._HASHED_AS", {"rectify": "relu"})
    assert _changed(residual_block(), "add.relu", op="rectify").model_hash == expected


# ---------------------------------------------------------------- other forms
def test_constants_that_nothing_reads_are_dropped() -> None:
    graph = residual_block()
    less = graph.with_nodes(tuple(n for n in graph if n.name not in ("fc", "fc.weight", "fc.bias")), outputs=("flat",))
    assert set(graph.consts) - set(less.consts) == {"fc.weight", "fc.bias"}


def test_the_printed_form(golden: Callable[[str, str], None]) -> None:
    golden("residual_block.graph.txt", str(residual_block()))
