"""Rules of the user's own are sent to workers, as are the integer models that hold them."""

from __future__ import annotations

import pickle

import torch
from networks import images, randomized
from torch import Tensor, nn

import hago
from hago.ops import OPS, Attrs, IntegerForm, OpRule, Sample, arguments, magnitude_bound


def compute(attrs: Attrs, x: Tensor) -> Tensor:
    return torch.abs(x)


#: That of docs/adding-an-op.md.
RULE = OpRule(
    name="abs",
    aten=("aten.abs.default",),
    parse=arguments(("self",)),
    compute=compute,
    integer=IntegerForm(slots=("follow",), bound=magnitude_bound, accepts_per_channel="all"),
    samples=(Sample(torch.abs, ((2, 3, 4, 4),)),),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).abs())


def test_a_rule_and_its_model_are_pickled() -> None:
    assert pickle.loads(pickle.dumps(RULE)).compute is compute
    ops, x = {**OPS, "abs": RULE}, images(8, 1, 8, 8)
    described = {"conv2d": [hago.OpDesc(["int8", "int8"], "int32")], "abs": [hago.OpDesc("int32", "int32")]}
    hardware = hago.Hardware(described, name="abs", known_ops=ops)
    model = hago.quantize(randomized(Net()), hardware, [x]).realize()
    assert "abs" in {node.op for node in model.plan.graph}
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
