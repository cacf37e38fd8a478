"""The dtypes of nodes: those of the values that torch computes, whatever passes a graph went through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, get_args

import pytest
import torch
from networks import ResNet, Small, images, randomized
from ops.laws import check_dtypes
from random_graphs import random_graph, random_inputs
from torch import Tensor, nn

from hago.errors import GraphError, HagoError
from hago.graph.execute import infer_dtypes
from hago.graph.frontend import Attention, exported_program, from_torch
from hago.graph.graph import CONST, INPUT, Graph, Node

from . import test_attention, test_composites, test_constants, test_guards, test_promotion
from .test_exported_program import Everyday

Network = tuple[nn.Module, list[Tensor]]


class Mixed(nn.Module):
    """Tokens, sizes, conditions, several results, and floats of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.linear = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        e = self.embedding(tokens).transpose(1, 2)
        largest, where = self.norm(e).topk(2, -1)
        wide = self.linear(x).double() / (x.shape[0] + 1)
        counted = wide.new_ones(x.shape[0], 2, dtype=torch.int32)
        return largest, where, wide, wide.half(), wide > 0, counted, tokens + 1


NETWORKS: Final[dict[str, Callable[[], Network]]] = {
    "small": lambda: (randomized(Small()), [images(3, 1, 6, 6)]),
    "resnet": lambda: (randomized(ResNet((4, 8), 1)), [images(3, 3, 16, 16)]),
    "everyday": lambda: (randomized(Everyday()), [images(3, 4, 16, 18), images(3, 8, 15, 19)]),
    "mixed": lambda: (randomized(Mixed()), [torch.arange(18).view(3, 6) % 7, images(3, 4)]),
    **{f"promotion, {n}": lambda n=n: _first(test_promotion.made(n)) for n in test_promotion.NAMES},
    **{f"composite, {n}": lambda c=c: _first(test_composites.made(c)) for n, c in test_composites.CALLS.items()},
    **{f"call, {n}": lambda c=c: _first(test_composites.made(c)) for n, c in test_composites.AS_THEY_ARE.items()},
    **{f"guard, {n}": lambda c=c: _first(test_guards.made(c)) for n, c in test_guards.GUARDED.items()},
    **{f"sum, {n}": lambda c=c: _first(test_guards.made(c)) for n, c in test_guards.OTHERS.items()},
    **{
        f"weight, {n}": lambda c=c: (randomized(test_constants.Net(c)), [images(3, 3, 5, 5)])
        for n, c in test_constants.WEIGHTS.items()
    },
    **{
        f"attention, {n}": lambda make=make, shapes=shapes: (make().eval(), test_attention.qkv(3, *shapes))
        for n, (make, shapes) in {**test_attention.CASES, **test_attention.LEFT_WHOLE}.items()
    },
}


def _first(network: Network) -> Network:
    model, (x, *_) = network
    return model, [x]


def graphs(network: Network) -> Iterator[Graph]:
    """A network imported by way of every choice of passes, and as the first version imported it."""
    model, inputs = network
    program = exported_program._export(model, inputs, None)
    for fold in (False, True):
        for attention in get_args(Attention):
            yield from_torch(program, fold=fold, attention=attention)
    yield exported_program.Importer(program, converts=False).run()


def stripped(graph: Graph) -> Graph:
    """The graph as it would be built by hand: dtypes of inputs and constants alone."""
    bare = replace(graph, nodes=tuple(replace(n, dtype=None) for n in graph))
    assert all((n.dtype is not None) == (n.op in (INPUT, CONST)) for n in bare)
    return bare


@pytest.mark.some_cases(20)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_node_states_the_dtype_of_its_value(name: str) -> None:
    network = NETWORKS[name]()
    for graph in graphs(network):
        check_dtypes(graph, network[1])
        assert infer_dtypes(graph) is graph
        assert infer_dtypes(stripped(graph)).nodes == graph.nodes


@pytest.mark.parametrize("seed", range(20))
def test_dtypes_of_a_graph_that_was_built_by_hand(seed: int) -> None:
    graph = infer_dtypes(random_graph(seed))
    check_dtypes(graph, random_inputs(graph, seed))


def test_the_law_notices() -> None:
    model, inputs = NETWORKS["mixed"]()
    graph = from_torch(model, inputs)
    check_dtypes(graph, inputs)
    for node in graph:
        if node.op not in (INPUT, CONST):
            wrong = replace(node, dtype="float16" if node.dtype != "float16" else None)
            with pytest.raises(AssertionError):
                check_dtypes(graph.with_nodes(tuple(wrong if n is node else n for n in graph)), inputs)


# ---------------------------------------------------------------- inputs and constants
def test_an_input_has_the_dtype_of_its_attribute_and_a_constant_that_of_its_tensor() -> None:
    nodes = (Node("x", INPUT, (), {"dtype": "int64"}, (1, 2)), Node("c", CONST, (), {}, (2,), "float32"))
    graph = Graph((*nodes, Node("y", INPUT, (), {}, (1, 2))), ("x", "y"), ("c",), {"c": torch.ones(2).half()})
    assert [n.dtype for n in graph] == ["int64", "float16", "float32"]
    changed = graph.with_nodes(graph.nodes, consts={"c": torch.ones(2) > 0})
    assert changed["c"].dtype == "bool" and changed["c"].torch_dtype == torch.bool


def test_a_node_without_a_dtype_says_where_to_get_one() -> None:
    node = Node("relu", "relu", ("x",), {}, (1, 2))
    with pytest.raises(GraphError, match="node 'relu' states no dtype; complete its graph with execute.infer_dtypes"):
        _ = node.torch_dtype
    with pytest.raises(HagoError, match="torch has no dtype 'float33'"):
        _ = replace(node, dtype="float33").torch_dtype


def test_what_no_tensor_can_be() -> None:
    for attrs, shape in (({"dtype": "float32"}, (1, -2)), ({"dtype": "float33"}, (1, 2))):
        graph = Graph((Node("x", INPUT, (), attrs, shape), Node("r", "relu", ("x",), {}, shape)), ("x",), ("r",))
        with pytest.raises(GraphError, match="input 'x' cannot be a tensor of"):
            infer_dtypes(graph)


# ---------------------------------------------------------------- what dtypes must not change
def test_they_are_neither_printed_nor_hashed() -> None:
    model, inputs = NETWORKS["mixed"]()
    graph = from_torch(model, inputs)
    assert str(stripped(graph)) == str(graph) and stripped(graph).model_hash == graph.model_hash
