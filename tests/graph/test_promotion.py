"""Whole numbers and conditions in real arithmetic: imported as torch promotes them, and quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from networks import images, randomized
from products import some
from torch import Tensor, nn
from torch.nn import functional as F

import hago
from hago.errors import StrategyMismatch
from hago.graph.execute import run_real
from hago.graph.frontend import exported_program, from_torch
from hago.graph.frontend.exported_program import Importer
from hago.graph.graph import Graph
from hago.ops import OPS
from hago.plan.strategy import Strategy
from hago.runtime.exactness import compare_plan_exactly

GOLDEN = Path(__file__).parents[1] / "golden"
CHIPS: Final = ("x86_vnni", "tflite", "vta", "tensorrt_gpu")

#: Of real values x, a buffer i of whole numbers, and one b of conditions.
FUNCTIONS: Final[Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "add a range": lambda x, i, b: x + torch.arange(4),
    "add": lambda x, i, b: x + i,
    "add to": lambda x, i, b: i + x,
    "sub": lambda x, i, b: x - i,
    "sub from": lambda x, i, b: i - x,
    "mul": lambda x, i, b: i * x,
    "div": lambda x, i, b: x / torch.arange(1, 5),
    "div by": lambda x, i, b: i / (x * x + 1),
    "other widths": lambda x, i, b: x * i.int() + i.abs().to(torch.uint8),
    "half": lambda x, i, b: x + torch.arange(4).half(),
    "add conditions": lambda x, i, b: x + b,
    "mul conditions": lambda x, i, b: b * x,
    "mul a comparison": lambda x, i, b: x * (x > i),
    "mul both": lambda x, i, b: x + (x > 0) * i,
    "concat": lambda x, i, b: torch.cat([i.expand(x.shape[0], 4), x, b.expand(x.shape[0], 4)], 1),
    "stack": lambda x, i, b: torch.stack([x, i.expand(x.shape[0], 4)], 1).flatten(1),
    "where": lambda x, i, b: torch.where(b, x, i) + torch.where(x > 0, x, 0),
    "a single number": lambda x, i, b: x * torch.tensor(3) + i[3] + i.sum(),
    "by a number": lambda x, i, b: x + i * 0.5 + i / 2,
    "by a size": lambda x, i, b: x / x.shape[1],
    "compared": lambda x, i, b: (x == i).float() + x,
    "powers": lambda x, i, b: x.abs() ** torch.arange(4),
    "the largest": lambda x, i, b: torch.maximum(x, i),
    "an index": lambda x, i, b: x * x.argmax(1, keepdim=True) + F.one_hot(x.argmax(1), 4),
    "rounded": lambda x, i, b: x + x.long(),
    "counted": lambda x, i, b: x + torch.ones(4, dtype=torch.long).cumsum(0),
    "moved": lambda x, i, b: x + i.repeat(1).view(1, 4) - i.neg().abs(),
    "activated": lambda x, i, b: F.leaky_relu(x + F.relu(i), 0.1),
    "outer": lambda x, i, b: (x[:, :, None] * i).sum(2),
    "masked": lambda x, i, b: x.masked_fill(b, 1) * (b | (i > 0)),
}
#: Of embeddings e and the tokens t that they are of.
OF_TOKENS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "their mean": lambda e, t: (e * (t > 0)[..., None]).sum(1) / (t > 0).sum(1, keepdim=True).clamp(min=1),
    "themselves": lambda e, t: torch.cat([e * t[..., None], (t * 0.5)[..., None], (t / 2)[..., None]], -1),
    "differences": lambda e, t: t[..., None] - e,
}


class Between(nn.Module):
    """A function between two layers, so that what it computes can be integer."""

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fn, self.before = fn, nn.Linear(4, 4)
        self.register_buffer("i", torch.tensor([3, -2, 0, 5]))
        self.register_buffer("b", torch.tensor([True, False, True, True]))
        self.after = nn.Linear(fn(torch.zeros(2, 4), self.i, self.b).shape[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.fn(self.before(x), self.i, self.b))


class Tokens(nn.Module):
    """A function of tokens and their embeddings before a layer."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fn, self.embedding = fn, nn.Embedding(4, 4)
        self.after = nn.Linear(fn(torch.zeros(2, 5, 4), torch.ones(2, 5, dtype=torch.long)).shape[-1], 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.after(self.fn(self.embedding(tokens), tokens))


def made(name: str) -> tuple[nn.Module, list[Tensor]]:
    if name in FUNCTIONS:
        return randomized(Between(FUNCTIONS[name])), [images(8, 4), images(8, 4, seed=1)]
    tokens = torch.randint(0, 4, (16, 5), generator=torch.Generator().manual_seed(0))
    return randomized(Tokens(OF_TOKENS[name])), list(tokens.split(8))


NAMES: Final = [*FUNCTIONS, *OF_TOKENS]


def check_operands(graph: Graph, inputs: list[Tensor]) -> None:
    """What is real and could be quantized is computed from real numbers of 32 bits."""
    seen: dict[str, Any] = dict(graph.consts)
    run_real(graph, inputs, lambda node, value: seen.__setitem__(node.name, value))
    for node in graph:
        rule = OPS.get(node.op)
        if rule is None or rule.integer is None or seen[node.name].dtype != torch.float32:
            continue
        for slot, source in enumerate(node.inputs):
            assert rule.integer.slot(slot) == "plain" or seen[source].dtype == torch.float32, (node, source)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_torch_computes(name: str) -> None:
    model, (x, other) = made(name)
    graph = from_torch(model, (x,))
    check_operands(graph, [x])
    for inputs in (x, other, x[:3]):
        got = run_real(graph, [inputs])[0]
        with torch.no_grad():
            expected = model(inputs)
        assert got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.some_cases(16)
@pytest.mark.parametrize(("chip", "name"), some(2, CHIPS, NAMES))
def test_it_is_quantized(chip: str, name: str) -> None:
    model, data = made(name)
    quantizer = hago.quantize(model, chip, data)
    assert compare_plan_exactly(quantizer.plan, data[:1]).same
    # 15 dB: int8 with the ranges of random numbers
    assert hago.evaluate_strategy(model, chip, quantizer.strategy, data).results["sqnr"] > 15


def test_the_law_notices() -> None:
    model, (x, _) = made("add")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    check_operands(Importer(program).run(), [x])
    with pytest.raises(AssertionError):
        check_operands(Importer(program, converts=False).run(), [x])


# ---------------------------------------------------------------- files of before
def golden_chip() -> hago.Hardware:
    return hago.Hardware({"linear": [hago.OpDesc(["uint8", "int8", "int32"], "int32")]}, name="golden")


def write_golden() -> None:
    """Only with the version that left promotion to torch."""
    model, data = made("their mean")
    hago.quantize(model, golden_chip(), data).strategy.save(GOLDEN / "tokens_strategy_1.json")


def test_a_strategy_of_before_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = made("their mean")
    strategy = Strategy.load(GOLDEN / "tokens_strategy_1.json")
    assert from_torch(model, (data[0],)).model_hash != strategy.model_hash
    assert hago.create_quantizer(model, golden_chip(), strategy).plan.graph.model_hash == strategy.model_hash
    assert hago.replay(model, golden_chip(), strategy, data).trials == 1
    monkeypatch.setattr(exported_program, "Importer", lambda program, ops, converts=True: Importer(program, ops))
    with pytest.raises(StrategyMismatch):
        hago.create_quantizer(model, golden_chip(), strategy)
