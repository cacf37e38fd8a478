"""TensorFlow's insertion patterns on torch networks: the points of the policy, and those of a Plan."""

from __future__ import annotations

import functools

import pytest
import torch
from networks import randomized
from torch import Tensor, nn
from torch.nn import functional

from hago.graph.frontend import from_torch
from hago.graph.graph import CONST, OUTPUT, Graph
from hago.hardware.file import load_hardware
from hago.plan.placement import MOVES, Placement, place_policy
from hago.plan.topology import analyze
from hago.qat.prepare import prepare_qat


class Pattern(nn.Module):
    """The network of a pattern's name, whose words are a layer and the ops after it, as in `insertion_graphs`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.words = name.split("_")
        groups = 4 if self.words[0] == "depthwise" else 1
        self.a: nn.Module = nn.Linear(4, 4) if self.flat else nn.Conv2d(4, 4, 3, padding=1, groups=groups)
        if "bn" in self.words:
            self.bn = nn.BatchNorm2d(4)
        if self.words[0] == "concat":
            self.b = nn.Conv2d(4, 4, 1)

    @property
    def flat(self) -> bool:
        return self.words[0] in ("matmul", "fc")

    def example(self) -> Tensor:
        shape = (8, 4) if self.flat else (8, 4, 6, 6)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.words[0] == "concat":
            return torch.cat([torch.relu(self.a(x)), torch.relu(self.b(x))], 1)
        y = self.a(x)
        for word in self.words[1:]:
            if word == "bn":
                y = self.bn(y)
            elif word in ("bypass", "postbypass"):
                y = y + x
            elif word in ("relu6", "sep"):
                y = functional.relu6(y)
            elif word in ("relu", "sigmoid"):
                y = getattr(torch, word)(y)
            elif word == "maxpool":
                y = functional.max_pool2d(y, 2)
            elif word == "reshape":
                y = y.reshape(y.shape[0], -1)
        return y


#: The fake quantizations of each pattern besides that of the weight: the last part of its name, and the node.
EXPECTED = {
    "conv_relu": {("act_quant", "relu")},
    "conv_relu6": {("act_quant", "clamp")},
    "conv_biasadd_only": {("act_quant", "a")},
    "conv_sigmoid": {("act_quant", "a")},
    "conv_relu_maxpool": {("act_quant", "relu")},
    "conv_maxpool_relu": {("act_quant", "a")},
    "conv_relu_reshape": {("act_quant", "relu")},
    "conv_bn_relu": {("act_quant", "relu")},
    "conv_bypass_relu": {("conv_quant", "a"), ("act_quant", "relu")},
    "conv_bn_bypass_relu6": {("conv_quant", "a"), ("act_quant", "clamp")},
    "conv_relu_postbypass": {("act_quant", "relu"), ("post_activation_bypass_quant", "add")},
    "conv_relu_postbypass_relu": {("act_quant", "relu")},
    "depthwise_sep": {("act_quant", "clamp")},
    "depthwise_relu": {("act_quant", "relu")},
    "matmul_relu": {("act_quant", "relu")},
    "matmul_biasadd_only": {("act_quant", "a")},
    "matmul_sigmoid": {("act_quant", "a")},
    "concat_two": {("act_quant", "relu"), ("act_quant", "relu_1")},
}


@functools.cache
def imported(pattern: str) -> tuple[Pattern, Graph]:
    model = randomized(Pattern(pattern))
    assert isinstance(model, Pattern)
    return model, from_torch(model, (model.example(),))


def sources(placement: Placement, role: str) -> set[str]:
    return {p.source for p in placement.points if p.role == role}


@pytest.mark.parametrize("pattern", EXPECTED)
def test_the_policy_has_tensorflows_points(pattern: str) -> None:
    """The points are those of the recorded graphs, and each is on all edges of its value."""
    _, graph = imported(pattern)
    placed = place_policy("tensorflow", graph, load_hardware("tflite"))
    activations = {(p.name.rpartition("/")[2], p.source) for p in placed.points if p.role == "activation"}
    assert activations == EXPECTED[pattern]
    layers = {"a", "b"} if pattern == "concat_two" else {"a"}
    assert sources(placed, "weight") == {f"{n}.weight" for n in layers}
    assert all(set(p.edges) == set(graph.out_edges[p.source]) for p in placed.points)


@pytest.mark.parametrize("pattern", EXPECTED)
def test_a_plan_for_chips_that_requantize_at_outputs_has_them_all(pattern: str) -> None:
    """`prepare_qat(policy="tensorflow")` quantizes these values, the inputs, and nothing else."""
    model, graph = imported(pattern)
    placed = place_policy("tensorflow", graph, load_hardware("tflite"))
    weights, values = quantized(model, graph, placed, "tflite")
    assert weights == sources(placed, "weight")
    assert values == sources(placed, "activation")


@pytest.mark.parametrize("hardware", ["x86_vnni", "vta"])
@pytest.mark.parametrize("pattern", ["conv_relu_postbypass", "conv_bypass_relu", "concat_two", "conv_sigmoid"])
def test_a_plan_for_other_chips_has_those_that_integer_nodes_read(pattern: str, hardware: str) -> None:
    """A value that only the caller or a float node reads is the accumulator, which is exact and not quantized."""
    model, graph = imported(pattern)
    placed = place_policy("tensorflow", graph, load_hardware(hardware))
    weights, values = quantized(model, graph, placed, hardware)
    integer = analyze(graph, load_hardware(hardware), placed.keep_float).nodes

    def is_read(name: str) -> bool:
        for edge in graph.out_edges[name]:
            moves = edge.dst != OUTPUT and graph[edge.dst].op in MOVES | {"relu", "clamp"}
            if edge.dst != OUTPUT and (is_read(edge.dst) if moves else integer[edge.dst]):
                return True
        return False

    assert weights == sources(placed, "weight")
    read = {s for s in sources(placed, "activation") if is_read(s)}
    assert read <= values <= sources(placed, "activation")


def quantized(model: Pattern, graph: Graph, placed: Placement, hardware: str) -> tuple[set[str], set[str]]:
    """The constants and the values, without inputs, that have a range in the Plan of `prepare_qat`.

    For a value that is moved or clipped before it is quantized, the value that the policy quantizes is returned.
    """
    trained = prepare_qat(model, hardware, dataset=[model.example()], policy="tensorflow", estimator="max_range")
    ranged = {g.source for g in trained.space.groups.values()}
    weights = {s for s in ranged if graph[s].op == CONST}
    values = {value for name in ranged - weights - set(graph.inputs) for value in _components_of(graph, placed, name)}
    return weights, values


def _components_of(graph: Graph, placed: Placement, name: str) -> set[str]:
    """The values of which a value consists, because the operands of a concatenation share a range."""
    if name in sources(placed, "activation") or graph[name].op not in MOVES | {"relu", "clamp", "concat"}:
        return {name}
    return {value for source in graph[name].inputs for value in _components_of(graph, placed, source)}
