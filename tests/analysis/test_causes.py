"""Each cause of error, compared with values computed by hand or counted."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from hago.analysis.error_causes import CAUSES
from hago.analysis.inspect import inspect_plan
from hago.graph.graph import Node
from hago.hardware.hardware import Hardware, OpDesc
from hago.runtime.reference import IntegerModel
from hago.simulation.simulator import Simulator

from .models import NARROW, OUTPUT, WIDE, Pooled, Residual, batches, make_plan, pattern, sample


class Scale(nn.Module):
    """One weight: y = 25/32 x."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.fc.weight, 25 / 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


TINY = Hardware({"linear": (OpDesc(["int4", "int4", "int6"], "int6", min_bits=2),)}, name="tiny")


def test_causes_by_hand() -> None:
    # x in steps of 1/2 up to 7/2, w in steps of 1/8: w = 6.25/8 becomes 6/8; the register holds -32..31
    x = torch.tensor([[1.3125], [5.0], [-1.0]])
    plan = make_plan(Scale(), TINY, x, fixed={"fc:0": (-4.0, 4.0), "fc:1": (-1.0, 1.0)})
    row = inspect_plan(plan, batches(x))["fc"]
    w, q = Fraction(25, 32), Fraction(3, 4)
    by_hand = {
        "inherited": [Fraction(0)] * 3,
        "rounding": [w * (Fraction(3, 2) - Fraction(21, 16)), Fraction(0), Fraction(0)],
        "constants": [(q - w) * Fraction(3, 2), (q - w) * 5, (w - q) * 1],
        "saturation": [Fraction(0), q * (Fraction(7, 2) - 5), Fraction(0)],
        "overflow": [Fraction(0), Fraction(-64, 16), Fraction(0)],  # 42 wraps to -22, in steps of 1/16
    }
    error = [sum(by_hand[c][i] for c in CAUSES) for i in range(3)]
    assert row.max_error == float(max(map(abs, error)))
    assert row.error_power == pytest.approx(float(sum(e * e for e in error) / 3), rel=1e-15)
    for cause in CAUSES:
        statistic, expected = row.causes[cause], by_hand[cause]
        assert statistic.power == pytest.approx(float(sum(d * d for d in expected) / 3), rel=1e-14)
        assert statistic.largest == float(max(map(abs, expected)))
        share = sum(d * e for d, e in zip(expected, error, strict=True)) / sum(e * e for e in error)
        assert statistic.share == pytest.approx(float(share), abs=1e-14)
    assert (row.overflows, row.accumulators, row.verdict, row.main_cause) == (1, 3, "overflows", "overflow")
    data, weight = row.edges
    assert (data.bits, data.saturated, data.values, data.scale) == (4, 1, 3, 0.5)
    assert (weight.bits, weight.saturated, weight.kind) == (4, 0, "constant")


class Heavy(nn.Module):
    """Sums that an int16 register cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.last = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 1, 1)
        for p in self.parameters():
            nn.init.constant_(p, 0.875)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.sum(x)))


def test_overflow_dominates() -> None:
    x = sample().abs()
    plan = make_plan(Heavy(), NARROW, x)
    statistic = inspect_plan(plan, batches(x))
    wrong = statistic.first_wrong
    assert wrong is not None and (wrong.node, wrong.cause, wrong.symptom) == ("sum", "overflow", "sum")
    assert "int16 and wrap" in wrong.words
    row = statistic["sum"]
    assert row.causes["overflow"].share == pytest.approx(1.0, abs=0.01)
    assert row.overflows == accumulators_outside(plan, "sum", x, 1 << 15) > 0
    assert row.bound is not None and row.bound > 1.0


def accumulators_outside(plan, name: str, x: Tensor, limit: int) -> int:  # type: ignore[no-untyped-def]
    """The number of accumulators outside [-limit, limit), counted in int64, where nothing overflows."""
    accumulators: dict[str, Tensor] = {}

    def watch(node: Node, c: Tensor, lost: object) -> None:
        accumulators[node.name] = c.to(torch.int64)

    Simulator(plan, watch=watch).run([x])
    return int(((accumulators[name] < -limit) | (accumulators[name] > limit - 1)).sum())


def test_no_overflow_where_it_is_proved() -> None:
    x = sample().abs()
    row = inspect_plan(make_plan(Heavy(), WIDE, x), batches(x))["sum"]
    assert (row.verdict, row.overflows) == ("proved", 0)
    assert row.bound is not None and row.bound <= 1.0


def test_saturation_dominates_a_tight_threshold() -> None:
    x = sample()
    plan = make_plan(Residual(), WIDE, x, fixed={"second:0": (0.0, 0.25)})
    statistic = inspect_plan(plan, batches(x))
    wrong = statistic.first_wrong
    assert wrong is not None and (wrong.node, wrong.cause) == ("second", "saturation")
    assert "second:0" in wrong.words and "second:0" in wrong.remedy
    edge = statistic["second"].edges[0]
    # the value of relu is exact, so that the clipped values can be counted on the float model
    relu = torch.relu(Residual().first(x))
    top = 0.25 * 127 / 128
    assert (edge.saturated, edge.values) == (int((relu > top + 0.25 / 256).sum()), relu.numel())


class Channels(nn.Module):
    """A convolution of which one channel is far larger than the others."""

    def __init__(self, step: float = 1 / 1024) -> None:
        super().__init__()
        self.wide, self.last = nn.Conv2d(2, 4, 1, bias=False), nn.Conv2d(4, 1, 1, bias=False)
        with torch.no_grad():
            self.wide.weight.copy_(pattern(4, 2, 1, 1, step=step, period=13))
            self.wide.weight[0] = 1.5
            self.last.weight.copy_(torch.tensor([0.0, 0.5, -0.5, 0.5]).reshape(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(x))


def test_constants_dominate_where_channels_share_a_scale() -> None:
    statistic = inspect_plan(make_plan(Channels(), WIDE, bits={"last:0": 8}), batches(sample()))
    weight = statistic["wide"].edges[1]
    assert (weight.channels, weight.narrow_channels, weight.per_channel) == (4, 3, False)
    assert statistic["wide"].main_cause == "constants"
    wrong = statistic.first_wrong
    assert wrong is not None and wrong.symptom == "last"
    per_channel = inspect_plan(make_plan(Channels(), OUTPUT), batches(sample()))["wide"].edges[1]
    assert (per_channel.narrow_channels, per_channel.per_channel) == (0, True)


def test_clipping_values_that_a_relu_would_clip_is_no_error() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
            with torch.no_grad():
                self.conv.weight.copy_(pattern(2, 2, 1, 1))
                self.conv.bias.fill_(-1.0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.conv(x))

    plan = make_plan(Cut(), OUTPUT)
    statistic = inspect_plan(plan, batches(sample()))
    conv, relu = statistic["conv"], statistic["relu"]
    assert conv.past == "relu"
    assert conv.edges[-1].edge == "conv:out" and conv.edges[-1].saturated > 0
    assert (conv.sqnr, conv.max_error) == (relu.sqnr, relu.max_error)
    assert (conv.causes["saturation"].share or 0.0) < 0.01


def test_errors_are_taken_after_a_pooling_too() -> None:
    statistic = inspect_plan(make_plan(Pooled(), OUTPUT), batches(sample()))
    assert statistic["first"].past == "reshape"
    assert statistic["first"].error_power == statistic["reshape"].error_power


def test_rounding_effects_of_weight_and_bias_are_told_apart() -> None:
    # relative to its size the bias is rounded more than the weight, but its effect is negligible
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
            with torch.no_grad():
                self.conv.weight.copy_(pattern(2, 2, 1, 1, step=3 / 64))
                self.conv.bias.fill_(2.0**-20)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)

    row = inspect_plan(make_plan(Biased(), WIDE, at_most=3), batches(sample()))["conv"]
    weight, bias = row.edges[1:]
    assert bias.rounding_sqnr is not None and weight.rounding_sqnr is not None
    assert bias.rounding_sqnr < weight.rounding_sqnr and bias.rounding_effect < weight.rounding_effect


def test_a_disagreement_of_the_integer_model_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(IntegerModel):
        def run(self, inputs, on_value=None):  # type: ignore[no-untyped-def]
            outputs = super().run(inputs, on_value)
            if self.plan.graph.outputs == ("second",):
                outputs[0].view(-1)[3] += 5
            return outputs

    monkeypatch.setattr("hago.analysis.inspect.IntegerModel", Broken)
    statistic = inspect_plan(make_plan(Residual(), WIDE), batches(sample()))
    row = statistic["second"]
    assert (row.differences, row.max_difference) == (1, 5.0)
    assert row.integer_values != row.simulated_values
    assert statistic.total_differences > 0
    assert "DISAGREE" in str(statistic) and statistic.to_json()["total_differences"] == statistic.total_differences
