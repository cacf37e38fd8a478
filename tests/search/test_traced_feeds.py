"""An accumulator that overflows although its operands have no bits of their own: those of nodes further up are lowered,
and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from networks import images
from torch import Tensor, nn

import hago
from hago.arithmetic.types import dtype
from hago.hardware import Accumulator, Hardware, OpDesc
from hago.search import prepare, session
from hago.search.safe_bits import feeds_behind, safe_bits

DATA: Final = [images(48, 3, 8, 8)]
INT16: Final = dtype("int16")
MOVED: Final = OpDesc("int16", "int16", min_bits=2)
LAYER: Final = OpDesc(["int8", "int8", "int16"], "int16", accumulator=Accumulator(INT16), min_bits=2)
#: Of 16-bit accumulators, in which the mean of 8 by 8 values is summed.
CHIP: Final = Hardware(
    {op: LAYER if op in ("conv2d", "linear") else MOVED for op in ("conv2d", "linear", "concat", "relu", "mean")},
    name="narrow",
)


class Pooled(nn.Module):
    """The mean of two branches, one of which reaches further."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.near, self.far = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(torch.cat([self.near(x), 8.0 * torch.relu(self.far(x))], 1).mean((2, 3)))


def network() -> nn.Module:
    torch.manual_seed(2)
    net = Pooled().eval()
    with torch.no_grad():
        net.far.bias.add_(1.0)
    return net


def decibels(model: nn.Module, quantizer: hago.Quantizer) -> float:
    with torch.no_grad():
        real, lost = model(DATA[0]), model(DATA[0]) - quantizer.simulate()(DATA[0])
    return float(10.0 * torch.log10(real.square().sum() / lost.square().sum()))


def searched(log: Path, searcher: str = "gradient", **how: Any) -> list[dict[str, Any]]:
    options = {"corrections": "none", "estimator": "max_range", "progress": False, "budget": 8} | how
    hago.search_quantize_strategy(network(), CHIP, DATA, searcher=searcher, log=log, **options)
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_the_operand_with_the_coarsest_scale_decides() -> None:
    prepared = prepare(network(), CHIP, DATA)
    groups = feeds_behind(prepared)
    assert groups == {"mean": ("concat:1",)}
    bits, widest = safe_bits(prepared), prepared.space.widest()
    assert bits["concat:0"] == widest["concat:0"] and bits["concat:1"] < widest["concat:1"]


@pytest.mark.parametrize("searcher", ["auto", "gradient", "sensitivity", "pareto", "greedy", "annealing"])
def test_searches_lower_no_other_bits(searcher: str) -> None:
    """Weights of 4 bits in one shot keep the limit, so no search may end far below them."""
    model, limit = network(), "size <= 60 %"
    names = [f"{name}:1" for name in ("first", "near", "far", "last")]
    shot = hago.quantize(model, CHIP, DATA, fix_bits=dict.fromkeys(names, 4), corrections="none")
    found, _ = hago.search_quantize_strategy(
        model, CHIP, DATA, searcher=searcher, budget_cost=limit, budget=60, corrections="none", progress=False
    )
    assert decibels(model, hago.create_quantizer(model, CHIP, found)) > decibels(model, shot) - 1.0


def test_an_earlier_log_goes_on_as_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, new = tmp_path / "earlier.jsonl", tmp_path / "new.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(session, "traces_feeds", lambda logged: False)
        before, *trials = searched(log)
    assert "traced_feeds" not in before["settings"]
    traced, *others = searched(new)
    assert traced["settings"]["traced_feeds"] is True
    bits = [[t["strategy"]["bits"] for t in some] for some in (trials, others)]
    assert bits[0] != bits[1]
    log.write_text("".join(json.dumps(line) + "\n" for line in (before, *trials[:-2])))
    assert [line["strategy"]["bits"] for line in searched(log)[1:]] == bits[0]
    for path in (log, new):
        assert hago.replay(network(), CHIP, path, DATA).same


def test_chips_with_wide_accumulators_need_no_tracing() -> None:
    assert feeds_behind(prepare(network(), "x86_vnni", DATA)) == {}
