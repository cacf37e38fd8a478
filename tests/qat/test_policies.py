"""Policies on models: the tensors that they fake-quantize, and the integer Plans that follow them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from networks import ResNet, Small, randomized
from torch import Tensor, nn

import hago
from hago.arithmetic.types import Edge
from hago.graph.frontend import from_torch
from hago.graph.graph import CONST, Graph
from hago.hardware.file import available_hardware, load_hardware
from hago.plan.placement import Placement, expand_policies, place_policy
from hago.plan.space import build_space
from hago.plan.topology import analyze
from hago.qat.prepare import from_qat, prepare_qat


class Gated(nn.Module):
    """Depthwise and separable layers, a shortcut, a gate, poolings and a batch norm after a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.depth = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.BatchNorm2d(8), nn.ReLU6())
        self.point = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.gate = nn.Conv2d(8, 8, 1)
        self.head, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.point(self.depth(x))
        x = nn.functional.max_pool2d(x * torch.sigmoid(self.gate(x)), 2)
        return self.norm(self.head(x.mean((2, 3))))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "gated": (Gated, (2, 3, 10, 10)),
    "resnet": (lambda: ResNet((4, 8), 1), (2, 3, 16, 16)),
    "small": (Small, (2, 1, 6, 6)),
}


@functools.cache
def imported(name: str, *, fold: bool = True) -> Graph:
    make, shape = NETWORKS[name]
    return from_torch(randomized(make()), (torch.zeros(shape),), fold=fold)


def points(placement: Placement) -> dict[str, tuple[str, str]]:
    return {p.name: (p.source, " ".join(map(str, p.edges))) for p in placement.points}


# ---------------------------------------------------------------- laws
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("policy", ["hardware", "tensorflow", "dorefa"])
def test_points_are_edges_of_their_source_and_no_edge_has_two(policy: str, network: str, fold: bool) -> None:
    graph = imported(network, fold=fold)
    placed = place_policy(policy, graph, load_hardware("x86_vnni"))
    edges = [e for p in placed.points for e in p.edges]
    assert len(set(edges)) == len(edges) and frozenset(edges) == placed.edges
    assert len({p.name for p in placed.points}) == len(placed.points)
    for p in placed.points:
        assert all(graph.source(e) == p.source for e in p.edges)
        assert (p.role == "weight") == (graph[p.source].op == CONST)
        assert (p.norm is not None) <= (p.role == "weight" and not fold)


@pytest.mark.parametrize("network", NETWORKS)
def test_folding_before_or_after_gives_the_same_points(network: str) -> None:
    hardware = load_hardware("vta")
    folded, apart = (place_policy("tensorflow", imported(network, fold=f), hardware) for f in (True, False))
    assert {p.name for p in folded.points} == {p.name for p in apart.points}
    weights = [{(p.source, p.edges) for p in x.points if p.role == "weight"} for x in (folded, apart)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("network", NETWORKS)
def test_the_hardware_policy_is_the_space(network: str) -> None:
    graph, hardware = imported(network), load_hardware("vta")
    groups = build_space(graph, hardware, analyze(graph, hardware)).groups
    placed = place_policy("hardware", graph, hardware)
    assert {p.name: p.edges for p in placed.points} == {k: g.edges for k, g in groups.items()}
    assert placed.keep_float == ()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("hardware", ["vta", "x86_vnni"])
def test_a_plan_quantizes_no_operand_that_tensorflow_leaves_float(network: str, hardware: str) -> None:
    """Operands of layers and sums in the integer plan are inputs, quantized values, or poolings of these."""
    graph, chip = imported(network), load_hardware(hardware)
    placed = place_policy("tensorflow", graph, chip)
    sources = {p.source for p in placed.points} | set(graph.inputs)
    topology = analyze(graph, chip, expand_policies(["policy:tensorflow"], graph, chip))
    for node in graph:
        if topology.nodes[node.name] and node.op in ("conv2d", "linear", "add", "mul"):
            for source in node.inputs:
                while graph[source].op in ("max_pool2d", "mean", "adaptive_avg_pool2d", "reshape"):
                    source = graph[source].inputs[0]
                assert source in sources or graph[source].op == CONST, (node.name, source)


# ---------------------------------------------------------------- TensorFlow, by name
def test_tensorflow_on_a_residual_network() -> None:
    quantized = points(place_policy("tensorflow", imported("resnet"), load_hardware("vta")))
    assert quantized["conv1/weights_quant"] == ("conv1.weight", "conv1:1")
    assert quantized["conv1/act_quant"] == ("relu", "maxpool:0")
    # a shortcut: quantized before the add, and after the relu that follows it
    assert quantized["stages/0/0/conv2/conv_quant"] == ("stages.0.0.conv2", "stages.0.0:1")
    assert quantized["stages/0/0/act_quant"][0] == "stages.0.0.relu.relu_1"
    # two layers meet in an add: one is its bypassed layer, the other ends at its bias
    assert quantized["stages/1/0/downsample/0/conv_quant"] == ("stages.1.0.downsample.0", "stages.1.0:0")
    assert quantized["stages/1/0/conv2/act_quant"] == ("stages.1.0.conv2", "stages.1.0:1")
    assert quantized["fc/act_quant"] == ("fc", "output:0")
    assert not any(source in ("stages.0.0", "stages.1.0", "maxpool", "avgpool") for source, _ in quantized.values())


def test_tensorflow_on_separable_layers_and_a_gate() -> None:
    placed = place_policy("tensorflow", imported("gated", fold=False), load_hardware("x86_vnni"))
    quantized = points(placed)
    assert quantized["stem/0/act_quant"] == ("stem.2", "depth.0:0 add:0")
    assert quantized["post_activation_bypass_quant"] == ("add", "gate:0 mul:0")
    assert quantized["gate/act_quant"] == ("gate", "sigmoid:0")
    assert quantized["mul/activation_Mul_quant"] == ("mul", "max_pool2d:0")
    assert quantized["head/act_quant"] == ("norm", "output:0")
    norms = {p.source: p.norm for p in placed.points if p.role == "weight"}
    assert norms["depth.0.weight"] == "depth.1" and norms["head.weight"] == "norm" and norms["gate.weight"] is None
    # the gate is not quantized, so that its product is not computed in integers
    assert placed.keep_float == ("sigmoid", "mul")


# ---------------------------------------------------------------- DoReFa
def test_dorefa_leaves_the_first_and_the_last_layer_float() -> None:
    placed = place_policy("dorefa", imported("resnet"), load_hardware("vta"))
    quantized = points(placed)
    assert placed.keep_float == ("conv1", "fc")
    inner = {"stages.0.0.conv1", "stages.0.0.conv2", "stages.1.0.conv1", "stages.1.0.conv2", "stages.1.0.downsample.0"}
    assert {p.source for p in placed.points if p.role == "gradient"} == inner
    assert {p.source for p in placed.points if p.role == "weight"} == {f"{n}.weight" for n in inner}
    assert quantized["relu:activation"] == ("relu", "maxpool:0")  # where it is made, before the pooling
    assert "stages.1.0.relu.relu_1:activation" not in quantized  # the last activation


def test_an_activation_of_the_last_layer_stays_float_on_that_edge_only() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.a(x))
            return self.d(torch.relu(self.b(y)) + self.c(y)) + self.d(y)

    graph = from_torch(Shared().eval(), (torch.zeros(2, 4),))
    placed = place_policy("dorefa", graph, load_hardware("x86_vnni"))
    (activation,) = [p for p in placed.points if p.role == "activation"]
    assert set(activation.edges) == {Edge("b", 0), Edge("c", 0)}
    assert "a" in placed.keep_float and "b" not in placed.keep_float


# ---------------------------------------------------------------- in plans, strategies and training
def batches(network: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(NETWORKS[network][1], generator=generator) for _ in range(2)]


@pytest.mark.parametrize("policy", ["tensorflow", "dorefa"])
@pytest.mark.parametrize("hardware", ["vta", "x86_vnni"])
def test_a_strategy_of_a_policy_is_found_again(policy: str, hardware: str) -> None:
    model = hago.from_torch(randomized(ResNet((4, 8), 1)), (batches("resnet")[0],))
    quantizer = hago.quantize(model, hardware, batches("resnet"), keep_float=[f"policy:{policy}"])
    nodes = quantizer.strategy.topology.node_conds
    assert nodes["fc"] == nodes["conv1"] == (policy == "tensorflow")
    assert nodes["stages.0.0.conv1"]
    again = hago.create_quantizer(model, hardware, quantizer.strategy)
    assert again.plan.key == quantizer.plan.key


@pytest.mark.parametrize("policy", ["tensorflow", "dorefa"])
def test_training_under_a_policy_ends_in_integers(policy: str) -> None:
    data = batches("gated")
    trained = prepare_qat(randomized(Gated()), "x86_vnni", dataset=data, policy=policy).train()
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    trained(data[0]).square().mean().backward()
    optimizer.step()
    quantizer = from_qat(trained.eval())
    floats = {n for n, integer in quantizer.strategy.topology.node_conds.items() if not integer}
    assert floats >= set({"tensorflow": ("sigmoid", "mul"), "dorefa": ("stem.0", "head")}[policy])
    assert torch.equal(quantizer.simulate().run([data[0]])[0], trained(data[0]))
    assert torch.equal(quantizer.realize().run([data[0]])[0], trained(data[0]))


def test_unknown_policies_are_refused() -> None:
    graph, hardware = imported("small"), load_hardware("vta")
    with pytest.raises(hago.HagoError, match="unknown policy 'tensorfow'.*Did you mean 'tensorflow'"):
        place_policy("tensorfow", graph, hardware)
    with pytest.raises(hago.HagoError, match="unknown policy"):
        hago.quantize(randomized(Small()), "vta", batches("small"), keep_float=["policy:none"])
    assert place_policy(lambda g, h, o: Placement("own", ()), graph, hardware).points == ()


def test_a_placement_prints_itself() -> None:
    text = str(place_policy("dorefa", imported("small"), load_hardware("vta")))
    assert text.splitlines()[0] == "policy dorefa" and text.splitlines()[-1] == "float: stem.0, fc"


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.query(x) @ x.transpose(1, 2), dim=-1)
        return self.out(scores @ x)


@pytest.mark.parametrize("name", available_hardware())
def test_policies_take_ops_that_only_a_form_computes_in_integers(name: str) -> None:
    """A softmax is in integers on some chips, by the form that their files name."""
    torch.manual_seed(0)
    data = [torch.randn(16, 5, 8)]
    quantizer = hago.quantize(Attending().eval(), name, data, keep_float=["policy:tensorflow"], corrections="none")
    assert quantizer.simulate()(data[0]).equal(quantizer.realize()(data[0]))
