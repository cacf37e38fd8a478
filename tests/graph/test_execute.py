"""The loop that runs a graph: order, lifetime of values, arguments and results."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from building import Builder, residual_block, seeded
from torch import Tensor
from torch.utils import _pytree as pytree

from hago.errors import GraphError
from hago.graph.execute import (
    channels_last,
    compute_real,
    example_inputs,
    flatten_inputs,
    infer_shape,
    nest_outputs,
    over_samples,
    run_graph,
    run_real,
)
from hago.graph.graph import CONST, INPUT, Graph, Node


def chain(length: int) -> Graph:
    b = Builder()
    value = b.input(4, name="x")
    for i in range(length):
        value = b.call("relu", value, name=f"relu{i}")
    return b.graph()


def nested(args: Any, kwargs: Any, outputs: Any = (0,)) -> Graph:
    """Two inputs a and b, and their sum, called as `args` and `kwargs` say."""
    b = Builder()
    one, two = b.input(4, name="a"), b.input(4, name="b")
    b.call("add", one, two, name="sum")
    plain = b.graph("sum", "a")
    specs = [pytree.treespec_dumps(pytree.tree_structure(v)) for v in ((args, kwargs), outputs)]
    return Graph(plain.nodes, plain.inputs, plain.outputs, {}, *specs)


# ---------------------------------------------------------------- running
def test_nodes_are_computed_once_in_order() -> None:
    graph, order = residual_block(), []
    run_real(graph, [seeded(2, 3, 8, 8)], lambda node, value: order.append(node.name))
    assert order == [n.name for n in graph if n.op != "const"]


def test_values_are_dropped_after_their_last_reader() -> None:
    graph = chain(20)
    refs: list[weakref.ref[Tensor]] = []
    alive = []

    def see(node: Node, value: Tensor) -> None:
        refs.append(weakref.ref(value))
        alive.append(sum(r() is not None for r in refs))

    run_real(graph, [torch.ones(2, 4)], see)
    assert max(alive[2:]) <= 3  # a node's input and output, and the caller's tensor


def test_a_schedule_drops_every_value_but_the_outputs_once() -> None:
    graph = residual_block()
    dropped = {s.step.name: s.dropped for s in graph.schedule}
    assert list(dropped) == [n.name for n in graph if n.op not in (INPUT, CONST)]
    assert sorted(name for names in dropped.values() for name in names) == sorted({n.name for n in graph} - {"fc"})
    assert "stem.relu" in dropped["add"]


def test_constants_can_be_replaced() -> None:
    graph = residual_block()
    zeros = {n: torch.zeros_like(t) for n, t in graph.consts.items()}
    (out,) = run_graph(graph, [seeded(2, 3, 8, 8)], lambda n, v: compute_real(n, v), consts=zeros)
    assert out.tolist() == torch.zeros(2, 5).tolist()


def test_an_output_may_be_an_input_or_stand_twice() -> None:
    b = Builder()
    x = b.input(4, name="x")
    b.call("relu", x, name="r")
    value = seeded(2, 4)
    outputs = run_real(b.graph("r", "x", "r"), [value])
    assert outputs[1] is value and outputs[0].equal(outputs[2]) and outputs[0].equal(value.relu())


def test_a_node_that_torch_refuses_is_named() -> None:
    node = Node("layer1.fc", "linear", ("x", "w"), {}, (1, 4))
    with pytest.raises(GraphError, match=r"layer1.fc = linear\(x, w\).*shapes \[\(2, 3\), \(4, 5\)\]"):
        compute_real(node, [torch.ones(2, 3), torch.ones(4, 5)])
    with pytest.raises(GraphError, match="layer1.fc"):
        infer_shape(node, [(1, 3), (4, 5)])


# ---------------------------------------------------------------- arguments
def test_arguments_as_the_model_takes_them() -> None:
    a, b = torch.ones(2, 4), torch.zeros(2, 4)
    calls: list[tuple[Any, Any]] = [((0, 0), {}), ((0,), {"b": 0}), (((0, 0),), {}), (({"a": 0, "b": 0},), {})]
    given: list[tuple[Any, Any]] = [((a, b), {}), ((a,), {"b": b}), (((a, b),), {}), (({"a": a, "b": b},), {})]
    for shape, (args, kwargs) in zip(calls, given, strict=True):
        found = flatten_inputs(nested(*shape), args, kwargs)
        assert [t is u for t, u in zip(found, (a, b), strict=True)] == [True, True]


@pytest.mark.parametrize(
    "args, says",
    [
        ((), "takes 2 tensors .a, b., got 0"),
        ((torch.ones(2, 4),), "takes 2 tensors .a, b., got 1"),
        ((torch.ones(2, 4), torch.ones(2, 5)), r"input 'b' has shape \(2, 5\); expected \(batch, 4\)"),
        ((torch.ones(2, 4), [1, 2]), "takes 2 tensors"),
        ((torch.ones(2, 4).long(), torch.ones(2, 4)), "input 'a' is torch.int64; the model takes torch.float32"),
    ],
)
def test_arguments_that_do_not_fit(args: tuple[Any, ...], says: str) -> None:
    with pytest.raises(GraphError, match=says):
        flatten_inputs(nested((0, 0), {}), args, {})


def test_names_count_and_their_order_does_not() -> None:
    a, b = torch.ones(2, 4), torch.zeros(2, 4)
    for graph in (nested((0, 0), {}), nested((0,), {"b": 0}), nested((), {"a": 0, "b": 0}), _plain()):
        for args, kwargs in (((a, b), {}), ((a,), {"b": b}), ((), {"a": a, "b": b}), ((), {"b": b, "a": a})):
            found = flatten_inputs(graph, args, kwargs)
            assert found[0] is a and found[1] is b
    found = flatten_inputs(nested(({"a": 0, "b": 0},), {}), ({"b": b, "a": a},), {})
    assert found[0] is a and found[1] is b


def test_an_argument_of_another_name() -> None:
    with pytest.raises(GraphError, match="no further argument 'bb'; its inputs are a, b. Did you mean 'b'"):
        flatten_inputs(_plain(), (torch.ones(2, 4),), {"bb": torch.ones(2, 4)})
    with pytest.raises(GraphError, match="no further argument 'a'"):
        flatten_inputs(_plain(), (torch.ones(2, 4),), {"a": torch.ones(2, 4)})


def _plain() -> Graph:
    """Two inputs without a nesting of their own."""
    graph = nested((0, 0), {})
    return Graph(graph.nodes, graph.inputs, graph.outputs)


def test_results_are_nested_as_the_model_returns_them() -> None:
    values = [torch.ones(1), torch.zeros(1)]
    assert nest_outputs(chain(1), values[:1]) is values[0]
    assert nest_outputs(Builder.graph(_two_outputs()), values) == tuple(values)
    assert nest_outputs(nested((0, 0), {}, {"sum": 0, "a": [0]}), values) == {"sum": values[0], "a": [values[1]]}


def _two_outputs() -> Builder:
    b = Builder()
    b.call("relu", b.input(4))
    return b


def test_example_inputs_fit_the_model() -> None:
    for shape in (((0, 0), {}), ((0,), {"b": 0}), (({"a": 0, "b": 0},), {})):
        graph = nested(*shape)
        args, kwargs = example_inputs(graph, batch=3)
        assert [tuple(t.shape) for t in flatten_inputs(graph, args, kwargs)] == [(3, 4), (3, 4)]
    with pytest.raises(GraphError, match="pass example_inputs"):
        example_inputs(nested((0, 0, 0), {}))


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, torch.amax])
@pytest.mark.parametrize(
    "shape", [(), (5,), (3, 4), (3, 4, 2), (3, 4, 2, 5), (3, 1, 2, 5), (1, 4, 2, 5), (2, 2, 2, 2, 2)]
)
def test_the_first_axis_is_reduced_in_any_layout(reduce: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for laid_out in (values, channels_last(values), values.transpose(-1, -2) if len(shape) > 2 else values):
        expected = reduce(laid_out, 0, keepdim=True) if shape else laid_out
        torch.testing.assert_close(over_samples(laid_out, reduce), expected, rtol=1e-14, atol=1e-14)
