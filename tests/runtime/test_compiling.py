"""Integer models in torch.compile: one graph, and equal outputs for every batch size."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch
from building import Builder, residual_block, seeded
from plans import resolver_of
from random_graphs import random_graph, random_inputs
from torch import Tensor

from hago.api import load_integer_model
from hago.errors import GraphError, HagoError
from hago.graph.graph import Graph
from hago.hardware.file import load_hardware
from hago.plan.plan import Plan
from hago.runtime.compiling import run_compiled
from hago.runtime.native.executor import NativeIntegerModel
from hago.runtime.reference import IntegerModel

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


def mixed() -> Graph:
    """Residual, depthwise, concatenated, with a float island and two outputs, one of them twice."""
    b = Builder()
    x = b.input(3, 6, 5, name="x")
    wide = b.call("relu", b.conv2d(x, seeded(8, 3, 3, 3, seed=1)))
    deep = b.conv2d(wide, seeded(8, 1, 3, 3, seed=2), groups=8)
    joined = b.call("concat", b.call("add", wide, deep), deep, axis=1)
    mean = b.call("mean", joined, axes=[2, 3], keepdim=False, count=30)
    scores = b.call("linear", mean, b.const(seeded(5, 16, seed=3)))
    return b.graph(b.call("softmax", scores, axis=-1), joined, joined)


def plan_of(graph: Graph, x: list[Tensor], hardware: str = "x86_vnni") -> Plan:
    resolver = resolver_of(graph, load_hardware(hardware), x)
    return resolver(resolver.space.widest())


def same(found: object, expected: object) -> bool:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        return found.equal(expected) and found.stride() == expected.stride()
    assert isinstance(found, tuple) and isinstance(expected, tuple)
    return len(found) == len(expected) and all(map(same, found, expected))


@BACKENDS
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("engine", [NativeIntegerModel, IntegerModel])
def test_one_graph_with_equal_outputs(backend: str, dynamic: bool, engine: type[IntegerModel]) -> None:
    model = engine(plan_of(mixed(), [seeded(2, 3, 6, 5)]))
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for batch in (4, 1, 3):
        x = seeded(batch, 3, 6, 5, seed=batch, size=3.0).requires_grad_()
        assert same(compiled(x), model(x))


@pytest.mark.parametrize("seed", range(40, 43))
def test_random_networks(seed: int) -> None:
    graph = random_graph(seed)
    model = NativeIntegerModel(plan_of(graph, random_inputs(graph, seed)))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch in (3, 2):
        x = random_inputs(graph, seed + 1, batch=batch)
        assert same(compiled(*x), model(*x))


@pytest.mark.parametrize("engine", [NativeIntegerModel, IntegerModel])
def test_an_output_that_is_a_constant_is_a_copy(engine: type[IntegerModel]) -> None:
    """A graph may write into what it was given."""
    b = Builder()
    wide = b.conv2d(b.input(3, 6, 5, name="x"), seeded(8, 3, 3, 3, seed=1))
    model = engine(plan_of(b.graph(wide, b.const(seeded(1, 5, seed=5))), [seeded(2, 3, 6, 5)]))
    x = [seeded(2, 3, 6, 5)]
    run_compiled(x, model._handle)[1].zero_()
    assert run_compiled(x, model._handle)[1].equal(seeded(1, 5, seed=5))


def test_a_graph_never_runs_another_model() -> None:
    x = seeded(2, 3, 8, 8)
    models = [NativeIntegerModel(plan_of(residual_block(), [x * size])) for size in (1.0, 3.0)]
    compiled = [torch.compile(m, backend="eager", fullgraph=True) for m in models]
    assert [c(x).equal(m(x)) for c, m in zip(compiled, models, strict=True)] == [True, True]
    assert not models[0](x).equal(models[1](x))


def test_surrounding_operations_are_in_the_same_graph() -> None:
    x = seeded(2, 3, 8, 8)
    model, graphs = NativeIntegerModel(plan_of(residual_block(), [x])), []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    @torch.compile(backend=count, fullgraph=True)
    def classes(image: Tensor) -> Tensor:
        return model(image / 2).flatten(1).argmax(1)

    assert classes(x).equal(model(x / 2).flatten(1).argmax(1)) and len(graphs) == 1


def test_copies_and_stored_models_compile(tmp_path: Path) -> None:
    x = seeded(2, 3, 6, 5)
    model = NativeIntegerModel(plan_of(mixed(), [x]))
    expected = model(x)
    model.save(tmp_path / "model")
    again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), load_integer_model(tmp_path / "model")]
    for other in again:
        assert same(torch.compile(other, backend="aot_eager", fullgraph=True)(x), expected)


def test_bad_inputs_are_refused_as_without_compilation() -> None:
    model = NativeIntegerModel(plan_of(residual_block(), [seeded(2, 3, 8, 8)]))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for bad, why in ((torch.full((2, 3, 8, 8), torch.nan), "holds NaN"), (seeded(2, 3, 8, 9), "expected")):
        with pytest.raises(GraphError, match=why):
            compiled(bad)
        assert torch.is_grad_enabled()


def test_a_graph_whose_model_was_deleted_raises() -> None:
    x = seeded(2, 3, 8, 8)
    model = NativeIntegerModel(plan_of(residual_block(), [x]))
    handle = model._handle
    assert run_compiled([x], handle)[0].equal(model(x))
    del model
    gc.collect()
    with pytest.raises(HagoError, match="was deleted; keep a reference"):
        run_compiled([x], handle)


@pytest.mark.parametrize("engine", [NativeIntegerModel, IntegerModel])
def test_a_program_of_torch_export_has_equal_outputs(engine: type[IntegerModel]) -> None:
    model = engine(plan_of(mixed(), [seeded(2, 3, 6, 5)]))
    sizes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (seeded(3, 3, 6, 5),), dynamic_shapes=(sizes,)).module()
    for batch in (4, 2):
        x = seeded(batch, 3, 6, 5, seed=batch, size=3.0)
        assert all(a.equal(b) for a, b in zip(program(x), model(x), strict=True))


def test_arrays_are_taken_as_without_compiling() -> None:
    x = seeded(2, 3, 6, 5, seed=4)
    model = NativeIntegerModel(plan_of(mixed(), [x]))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for array in (x.numpy(), x.numpy().astype("float64")):
        found = tuple(map(torch.as_tensor, compiled(array)))  # torch.compile answers arrays with arrays
        assert all(ours.equal(theirs) for ours, theirs in zip(found, model(x), strict=True))
