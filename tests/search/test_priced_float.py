"""Searches over which nodes run in float, on chips whose files say nothing of what float takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from networks import Small, images, randomized

import hago
from hago.cost import METRICS, prices_float
from hago.hardware import Hardware, available_hardware, load_hardware

DATA = [images(16, 1, 6, 6)]


@pytest.mark.parametrize("name", available_hardware())
def test_float_is_not_free(name: str) -> None:
    """The least cycles, with nearly nothing asked of the outputs, are found in integers wherever float has no price."""
    chip, model = load_hardware(name), randomized(Small())
    shot = hago.quantize(model, chip, DATA, corrections="none")
    costs = hago.estimate_cost(model, chip, shot.strategy)
    if "cycles" not in costs.figures or not shot.plan.nodes:
        return
    found, _ = hago.search_quantize_strategy(
        model, chip, DATA, minimize="cycles", keep="sqnr >= 1 dB", budget=6, corrections="none", progress=False
    )
    in_integers = {n for n, integer in found.topology.node_conds.items() if integer}
    if not prices_float("cycles", chip):
        assert in_integers == shot.plan.nodes.keys()
    assert found.made_by["costs"]["cycles"] > 0.0


def unpriced(chip: Hardware) -> Hardware:
    return replace(chip, ops={op: [replace(d, cost={}) for d in descs] for op, descs in chip.ops.items()})


def test_what_prices_float() -> None:
    chip = load_hardware("x86_vnni")
    assert all(prices_float(metric, chip) for metric in METRICS if metric != "energy")
    assert {m for m in METRICS if not prices_float(m, unpriced(chip))} == {"cycles", "latency", "energy"}
    assert prices_float("cycles", load_hardware("cpu_weight_only"))  # no op is in integers, so there is no choice
