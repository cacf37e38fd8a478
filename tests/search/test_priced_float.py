"""Searches over which nodes run in float, on chips whose files say nothing of what float takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
from networks import Small, images, randomized

import hago
from hago.cost import METRICS, prices_float
from hago.hardware import Hardware, available_hardware, load_hardware

DATA = [images(16, 1, 6, 6)]


#: Chips whose files say what integers take, and not what float does.
UNPRICED: Final = [
    name
    for name in available_hardware()
    if not prices_float("cycles", load_hardware(name))
    and any("macs_per_cycle" in d.cost for d in load_hardware(name).ops["linear"])
]


@pytest.mark.parametrize("name", UNPRICED)
def test_float_is_not_free(name: str) -> None:
    """The least cycles, with nearly nothing asked of the outputs, are found with every node in integers."""
    model = randomized(Small())
    shot = hago.quantize(model, name, DATA, corrections="none")
    found, _ = hago.search_quantize_strategy(
        model, name, DATA, minimize="cycles", keep="sqnr >= 1 dB", budget=6, corrections="none", progress=False
    )
    assert {n for n, integer in found.topology.node_conds.items() if integer} == shot.plan.nodes.keys() != set()
    assert found.made_by["costs"]["cycles"] > 0.0


def test_vta_and_ethos_u_do_not_price_float() -> None:
    assert {"vta", "ethos_u"} <= set(UNPRICED)


def unpriced(chip: Hardware) -> Hardware:
    return replace(chip, ops={op: [replace(d, cost={}) for d in descs] for op, descs in chip.ops.items()})


def test_what_prices_float() -> None:
    chip = load_hardware("x86_vnni")
    assert all(prices_float(metric, chip) for metric in METRICS if metric != "energy")
    assert {m for m in METRICS if not prices_float(m, unpriced(chip))} == {"cycles", "latency", "energy"}
    assert prices_float("cycles", load_hardware("cpu_weight_only"))  # no op is in integers, so there is no choice
