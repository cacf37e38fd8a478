"""Biases in slots that are narrower than the accumulator take precision from weights, which is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from networks import images, randomized
from torch import nn

import hago
from hago.errors import HagoWarning
from hago.hardware.file import hardware_from_document
from hago.hardware.hardware import Hardware
from hago.ops import OPS


def chip(bias: str) -> Hardware:
    document: dict[str, Any] = {
        "version": 1,
        "name": f"bias_of_{bias}",
        "activation": {"scheme": "symmetric", "granularity": "per_tensor"},
        "weight": {"scheme": "symmetric", "granularity": "per_channel"},
        "requantize": {"form": "float32"},
        "rounding": "half_even",
        "other_ops": "reject",
        "signatures": {"mac": {"in": ["int8", "int8", bias], "out": "int32"}, "i32": {"in": ["int32"], "out": "int32"}},
        "ops": {"conv2d": ["mac"], "relu": ["i32"]},
    }
    return hardware_from_document(document, "", OPS)


NETWORK = randomized(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)))
DATA = [images(8, 2, 6, 6)]
SAID = r"the weights of 0, 2 have lost most of their bits to their biases, which must fit int8"


def test_weights_that_narrow_biases_cost_their_bits_are_named() -> None:
    with pytest.warns(HagoWarning, match=SAID):
        plan = hago.quantize(NETWORK, chip("int8"), DATA).plan
    assert int(plan.nodes["2"].consts[1].abs().max()) < 127 / 4
    with pytest.warns(HagoWarning, match=SAID):
        hago.search_quantize_strategy(NETWORK, chip("int8"), DATA, searcher="default", budget=1, progress=False)


@pytest.mark.parametrize(("bias", "bits"), [("int32", None), ("int16", None), ("int8", 4)])
def test_biases_that_fit_are_not(bias: str, bits: int | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HagoWarning)
        hago.quantize(NETWORK, chip(bias), DATA, fix_bits=None if bits is None else {"*": bits})


def test_a_channel_whose_weights_hardly_matter_is_not() -> None:
    """What raised scales are for."""
    network = randomized(nn.Sequential(nn.Conv2d(2, 4, 3)))
    with torch.no_grad():
        network[0].weight[1] *= 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("error", HagoWarning)
        plan = hago.quantize(network, chip("int32"), DATA, corrections="none").plan
    assert plan.nodes["0"].raised == (1,)
