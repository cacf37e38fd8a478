"""Files of networks whose attention hago imported as one node: they load, and are continued, for ever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from networks import images, randomized
from torch import Tensor, nn
from torch.nn import functional as F

import hago
from hago import importing
from hago.errors import StrategyMismatch
from hago.graph.frontend import from_torch
from hago.graph.graph import Graph
from hago.plan.strategy import Strategy
from hago.qat.state_dict import trained_state

GOLDEN = Path(__file__).parent / "golden"
LOG, STRATEGY, FRONT = (GOLDEN / f"attention_{name}" for name in ("log_1.jsonl", "strategy_1.json", "front_1.json"))
DATA = [images(8, 5, 8, seed=i) for i in range(2)]
QUIET: dict[str, Any] = {"progress": False}


class Attention(nn.Module):
    """Two heads over five tokens, and a causal head after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.fc = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).reshape(-1, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.fc(F.scaled_dot_product_attention(x, x, x, is_causal=True).mean(1))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return randomized(Attention())


def chip() -> hago.Hardware:
    """A chip that multiplies matrices of integers."""
    mac = hago.OpDesc(["uint8", "int8", "int32"], "int32")
    wide = hago.OpDesc("int32", "int32", max_bits=23)
    moved = [hago.OpDesc("uint8", "uint8"), wide]
    return hago.Hardware(
        {"linear": [mac], "matmul": [mac], "add": [wide], "mean": [wide], "reshape": moved, "permute": moved},
        name="golden",
    )


def write_golden(model: nn.Module) -> None:
    """Only with the version that imported attention as one node."""
    hago.search_quantize_strategy(
        model, chip(), DATA, searcher="random", estimator="max_range", budget=4, seed=0, log=LOG, save=STRATEGY,
        front=FRONT, **QUIET,
    )  # fmt: skip


def kept_whole(graph: Graph) -> bool:
    ops = [n.op for n in graph]
    return ops.count("scaled_dot_product_attention") == 2 and "softmax" not in ops


def test_a_new_search_opens_attention(model: nn.Module) -> None:
    plan = hago.quantize(model, chip(), DATA).plan
    assert not kept_whole(plan.graph) and sum(n.op == "matmul" for n in plan.graph if n.name in plan.nodes) == 4


def test_a_strategy_applies_to_attention_kept_whole(model: nn.Module) -> None:
    strategy = Strategy.load(STRATEGY)
    quantizer = hago.create_quantizer(model, chip(), strategy)
    assert kept_whole(quantizer.plan.graph) and quantizer.plan.graph.model_hash == strategy.model_hash
    assert hago.create_quantizer(model, chip(), strategy, [DATA[0]]).plan.key == quantizer.plan.key
    score = hago.evaluate_strategy(model, chip(), strategy, DATA)
    assert score.results["sqnr"] == pytest.approx(strategy.made_by["results"]["sqnr"], abs=0.01)
    assert hago.replay(model, chip(), strategy, DATA).trials == 1


def test_it_would_not_apply_to_attention_that_is_opened(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*args: Any, made_for: Any, **options: Any) -> Graph:
        return from_torch(*args, **options)

    monkeypatch.setattr(importing, "from_torch", forgetful)
    with pytest.raises(StrategyMismatch):
        hago.create_quantizer(model, chip(), STRATEGY)
    with pytest.raises(StrategyMismatch):
        hago.replay(model, chip(), LOG, DATA)


def test_a_log_is_replayed(model: nn.Module) -> None:
    found = hago.replay(model, chip(), LOG, DATA)
    # other machines may round the float model's values otherwise, so figures may differ; what it is of may not
    assert found.trials == 4


def test_a_log_is_continued(model: nn.Module, tmp_path: Path) -> None:
    """Under the hash that it began with; what it has is not run again."""
    log = tmp_path / "log.jsonl"
    shutil.copy(LOG, log)
    options: dict[str, Any] = {"searcher": "random", "estimator": "max_range", "seed": 0, **QUIET}
    strategy, _ = hago.search_quantize_strategy(model, chip(), DATA, budget=6, log=log, **options)
    before, after = LOG.read_text().splitlines(), log.read_text().splitlines()
    assert after[: len(before)] == before and len(after) > len(before)
    assert strategy.model_hash == json.loads(before[0])["model_hash"]


def test_a_log_is_reused(model: nn.Module) -> None:
    strategy, _ = hago.search_quantize_strategy(
        model, chip(), DATA, searcher="default", estimator="max_range", reuse=LOG, **QUIET
    )
    assert strategy.model_hash == Strategy.load(STRATEGY).model_hash


def test_a_front_applies(model: nn.Module) -> None:
    front = hago.load_front(FRONT)
    assert front.points
    for point in front.points:
        assert kept_whole(hago.create_quantizer(model, chip(), point.strategy).plan.graph)


def test_a_strategy_is_trained_further(model: nn.Module) -> None:
    trained = hago.prepare_qat(model, chip(), strategy=STRATEGY)
    assert kept_whole(hago.from_qat(trained).plan.graph)
    tuned = hago.finetune(model, chip(), STRATEGY, DATA, steps=2, batch_size=8, progress=False)
    state = trained_state(model, tuned.quantizer.plan.graph)
    assert set(state) == set(model.state_dict())


def test_a_strategy_of_another_network_is_refused_as_ever(model: nn.Module) -> None:
    other = randomized(Attention(), seed=5)
    with pytest.raises(StrategyMismatch, match="made for the model with hash"):
        hago.create_quantizer(other, chip(), STRATEGY)


if __name__ == "__main__":
    write_golden(randomized(Attention()))
