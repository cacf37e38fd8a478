"""Reports on strategies: measures, overflow, bytes, and the values in which the models differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hago
from hago.analysis import strategy_report
from hago.analysis.strategy_report import report_strategy
from hago.plan.strategy import Strategy
from hago.runtime.reference import IntegerModel


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).eval()


def data(labelled: bool = True) -> list[Any]:
    torch.manual_seed(1)
    images = [torch.randn(40, 2, 6, 6) for _ in range(2)]
    return [(x, model()(x).argmax(1)) for x in images] if labelled else images


@pytest.fixture(scope="module")
def strategy() -> Strategy:
    return hago.quantize(model(), "int16_accumulator", data()).strategy


def test_the_figures_of_three_models(strategy: Strategy) -> None:
    report = report_strategy(model(), "int16_accumulator", strategy, data())
    assert list(report.figures) == ["float", "simulated", "integer"] and report.samples == 80
    assert report.figures["float"]["sim_acc"] == 1.0 and report.figures["float"]["agreement"] == 1.0
    assert report.figures["simulated"] == report.figures["integer"] and report.figures["simulated"]["sqnr"] < 100
    assert report.same and report.differences == {} and report.compared > 80 * 5
    assert "all" in str(report) and "95 % interval" in str(report)


def test_without_labels_and_without_the_integer_model(strategy: Strategy) -> None:
    report = report_strategy(model(), "int16_accumulator", strategy, data(labelled=False), integer=False)
    assert list(report.figures) == ["float", "simulated"] and report.same and report.compared == 0
    assert "sim_acc" not in report.figures["float"] and "==" not in str(report)
    assert "same" not in report.to_json()


def test_bytes_before_and_after(strategy: Strategy) -> None:
    weights = report_strategy(model(), "int16_accumulator", strategy, data(), integer=False).weights
    conv, linear = 2 * 4 * 9, 64 * 5  # linear has float signatures only on this chip
    assert weights.before == 4 * (conv + 4 + linear + 5)
    assert weights.integer == conv + 2 * 4 and weights.left == 4 * (linear + 5)


def test_a_weight_that_two_nodes_read_counts_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.twice(self.twice(x).relu()))

    torch.manual_seed(0)
    net, batches = Shared().eval(), [torch.randn(8, 6)]
    quantizer = hago.quantize(net, "x86_vnni", batches)
    weights = report_strategy(net, "x86_vnni", quantizer.strategy, batches).weights
    assert (weights.before, weights.integer, weights.left) == (4 * (36 + 12 + 2), 36 + 12 + 4 * 2, 0)
    integer_model = quantizer.realize("reference")
    assert not any(integer_model.load_state_dict(integer_model.state_dict()))


class OffByOne(IntegerModel):
    """An integer model that is wrong in one value of its second batch."""

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        outputs = super().run(*args, **kwargs)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2:
            value: Tensor = outputs[0]
            value.view(-1)[3] = torch.nextafter(value.view(-1)[3], torch.tensor(torch.inf))
        return outputs


def test_one_differing_value_is_reported(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_report, "IntegerModel", OffByOne)
    report = report_strategy(model(), "int16_accumulator", strategy, data())
    assert not report.same and report.differences == {"output 0 of batch 1": 1}
    assert "simulated != integer: 1 of" in str(report) and report.to_json()["same"] is False


def test_overflow_is_counted(strategy: Strategy) -> None:
    loud = [x * 50 for x in data(labelled=False)]
    wide = replace(strategy, bits=dict.fromkeys(strategy.bits, 8))
    report = report_strategy(model(), "int16_accumulator", wide, loud)
    assert report.same  # overflow is simulated, so the models agree on it
    assert report.overflows["0"] > 0 and report.verdicts["0"] == "possible"
    assert "SEEN at 0" in str(report) and report.to_json()["overflow"]["seen"] == dict(report.overflows)
