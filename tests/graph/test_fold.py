"""Folding batch norms: the same function, with fewer nodes, or an affine where they must stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from building import Builder, seeded
from networks import images, randomized
from torch import Tensor, nn

from hago.errors import GraphError
from hago.graph.execute import run_real
from hago.graph.frontend import from_torch
from hago.graph.graph import CONST, INPUT, Graph
from hago.graph.passes.fold_batch_norms import fold_batch_norms, multiplier_and_offset


def norm(b: Builder, x: str, name: str = "bn", var: float = 1.3) -> str:
    """A batch norm over axis 1 of x."""
    channels = b.shapes[x][1]
    values = (seeded(channels, seed=11), seeded(channels, seed=12), seeded(channels, seed=13))
    spread = seeded(channels, seed=14).abs() + var
    named = zip(("weight", "bias", "mean", "var"), (*values, spread), strict=True)
    return b.call("batch_norm", x, *(b.const(t, f"{name}.{role}") for role, t in named), name=name, eps=1e-5)


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph if n.op not in (INPUT, CONST)]


def check_same(graph: Graph) -> Graph:
    """The folded graph, which computes what the graph did."""
    folded = fold_batch_norms(graph)
    inputs = [seeded(3, *(graph[n].shape or ())[1:], seed=5) for n in graph.inputs]
    for before, after in zip(run_real(graph, inputs), run_real(folded, inputs), strict=True):
        assert torch.allclose(before, after, rtol=1e-4, atol=1e-4)
    assert "batch_norm" not in ops(folded)
    assert set(folded.consts) == {n.name for n in folded if n.op == CONST}
    return folded


def conv_attrs(dims: int, groups: int = 1, transposed: bool = False) -> dict[str, object]:
    attrs: dict[str, object] = {"stride": [2] * dims, "padding": [1] * dims, "dilation": [1] * dims, "groups": groups}
    return attrs | ({"output_padding": [1] * dims} if transposed else {})


CASES = [(f"conv{d}d", d, g) for d in (1, 2, 3) for g in (1, 2, 4)]
CASES += [(f"conv_transpose{d}d", d, g) for d in (1, 2) for g in (1, 2, 4)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op, dims, groups", CASES)
def test_into_a_convolution(op: str, dims: int, groups: int, bias: bool) -> None:
    transposed = "transpose" in op
    b = Builder()
    x = b.input(4, *[6] * dims)
    shape = (4, 8 // groups, *[3] * dims) if transposed else (8, 4 // groups, *[3] * dims)
    consts = (b.const(seeded(*shape, seed=1)), *((b.const(seeded(8, seed=2)),) if bias else ()))
    conv = b.call(op, x, *consts, name="conv", **conv_attrs(dims, groups, transposed))
    b.call("relu", norm(b, conv), name="relu")
    folded = check_same(b.graph())
    assert ops(folded) == [op, "relu"]
    assert len(folded["conv"].inputs) == 3 and folded["relu"].inputs == ("conv",)


def test_into_a_linear() -> None:
    b = Builder()
    norm(b, b.linear(b.input(4), seeded(6, 4), name="fc"))
    folded = check_same(b.graph())
    assert ops(folded) == ["linear"] and folded.outputs == ("fc",)
    assert set(folded.consts) == {"fc.weight", "fc.bias"}


def test_known_numbers() -> None:
    """Weight 2, bias 1; gamma 3, variance 4, mean 5, beta 7: 2 * 1.5 = 3 and (1 - 5) * 1.5 + 7 = 1."""
    b = Builder()
    fc = b.linear(b.input(1, name="x"), torch.tensor([[2.0]]), torch.tensor([1.0]), name="fc")
    values = {"weight": 3.0, "bias": 7.0, "mean": 5.0, "var": 4.0}
    consts = [b.const(torch.tensor([v]), f"bn.{n}") for n, v in values.items()]
    b.call("batch_norm", fc, *consts, name="bn", eps=0.0)
    folded = fold_batch_norms(b.graph())
    assert float(folded.consts["fc.weight"]) == 3.0 and float(folded.consts["fc.bias"]) == 1.0


# ---------------------------------------------------------------- where it must stay
def after_concat(b: Builder, x: str) -> str:
    return norm(b, b.call("concat", x, x, axis=1, name="cat"))


def after_a_value_that_others_read(b: Builder, x: str) -> str:
    conv = b.conv2d(x, seeded(4, 3, 3, 3), name="conv")
    return b.call("add", norm(b, conv), conv, name="add")


def after_an_output(b: Builder, x: str) -> str:
    conv = b.conv2d(x, seeded(4, 3, 3, 3), name="conv")
    norm(b, conv)
    return conv


def after_a_relu(b: Builder, x: str) -> str:
    return norm(b, b.call("relu", b.conv2d(x, seeded(4, 3, 3, 3), name="conv"), name="relu"))


def after_a_product_of_activations(b: Builder, x: str) -> str:
    weight = b.call("relu", b.const(seeded(4, 3, 1, 1), "w"), name="computed")
    return norm(b, b.call("conv2d", x, weight, name="conv", **conv_attrs(2)))


@pytest.mark.parametrize(
    "make",
    [after_concat, after_a_value_that_others_read, after_an_output, after_a_relu, after_a_product_of_activations],
)
def test_what_cannot_be_folded_is_an_affine(make: Callable[[Builder, str], str]) -> None:
    b = Builder()
    last = make(b, b.input(3, 6, 6, name="x"))
    folded = check_same(b.graph(*dict.fromkeys([last, "bn"])))
    assert folded["bn"].op == "affine"
    assert folded["bn"].attrs == {"rank": 4} and folded["bn"].inputs[1:] == ("bn.multiplier", "bn.offset")


def test_over_tokens_a_norm_is_of_another_axis_than_a_linear() -> None:
    b = Builder()
    norm(b, b.linear(b.input(5, 4), seeded(6, 4), name="fc"))
    folded = check_same(b.graph())
    assert ops(folded) == ["linear", "affine"] and folded["bn"].attrs == {"rank": 3}


def test_statistics_that_are_computed_stay() -> None:
    b = Builder()
    x = b.input(3, 6, 6, name="x")
    consts = [b.const(seeded(3, seed=s).abs() + 1, f"c{s}") for s in range(3)]
    b.call("batch_norm", x, *consts, b.call("relu", b.const(torch.ones(3)), name="var"), name="bn", eps=1e-5)
    assert "batch_norm" in ops(fold_batch_norms(b.graph()))


# ---------------------------------------------------------------- constants
def test_a_weight_that_others_read_is_left_alone() -> None:
    b = Builder()
    x = b.input(4, 6, 6, name="x")
    shared = b.const(seeded(4, 4, 3, 3), "shared")
    attrs = {**conv_attrs(2), "stride": [1, 1]}
    first = b.call("conv2d", x, shared, name="first", **attrs)
    b.call("conv2d", norm(b, first), shared, name="second", **attrs)
    folded = check_same(b.graph())
    assert folded["first"].inputs[1] == "first.weight" and folded["second"].inputs[1] == "shared"
    assert folded.consts["shared"].equal(seeded(4, 4, 3, 3))


def test_several_norms_in_a_row() -> None:
    b = Builder()
    conv = b.conv2d(b.input(3, 6, 6), seeded(4, 3, 3, 3), name="conv")
    norm(b, norm(b, conv, "bn1"), "bn2")
    assert ops(check_same(b.graph())) == ["conv2d"]


def test_a_batch_norm_that_stays_takes_no_constant_of_others() -> None:
    b = Builder()
    x = b.input(3, 6, 6)
    offset = b.const(seeded(3, 1, 1, seed=9), "bn.offset")
    b.call("add", norm(b, x), offset)
    folded = check_same(b.graph())
    assert folded["bn"].op == "affine" and folded.consts["bn.offset"].equal(seeded(3, 1, 1, seed=9))


def test_the_graph_itself_is_unchanged() -> None:
    b = Builder()
    norm(b, b.conv2d(b.input(3, 6, 6), seeded(4, 3, 3, 3), name="conv"))
    graph = b.graph()
    before = graph.model_hash
    fold_batch_norms(graph)
    assert graph.model_hash == before and graph.consts["conv.weight"].equal(seeded(4, 3, 3, 3))


@pytest.mark.parametrize("role, value", [("var", float("nan")), ("var", -2.0), ("mean", float("inf"))])
def test_statistics_that_are_not_finite(role: str, value: float) -> None:
    b = Builder()
    norm(b, b.conv2d(b.input(3, 6, 6), seeded(4, 3, 3, 3), name="conv"))
    graph = b.graph()
    graph.consts[f"bn.{role}"][1] = value
    with pytest.raises(GraphError, match="batch norm 'bn' multiplies by NaN or infinity"):
        fold_batch_norms(graph)


def test_the_multiplier_is_in_float64() -> None:
    b = Builder()
    norm(b, b.input(3, 6, 6))
    m, o = multiplier_and_offset(b.graph(), b.graph()["bn"])
    assert m.dtype == o.dtype == torch.float64


# ---------------------------------------------------------------- from torch
def test_imported_with_and_without_folding() -> None:
    model = randomized(nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, affine=False), nn.ReLU(), nn.BatchNorm1d(4)))
    example = (images(2, 2, 8),)
    folded, plain = from_torch(model, example), from_torch(model, example, fold=False)
    assert ops(folded) == ["conv1d", "relu", "affine"]
    assert ops(plain) == ["conv1d", "batch_norm", "relu", "batch_norm"]
    x: Tensor = images(5, 2, 8, seed=3)
    assert run_real(plain, [x])[0].equal(model(x))
    assert torch.allclose(run_real(folded, [x])[0], model(x), rtol=1e-4, atol=1e-5)
