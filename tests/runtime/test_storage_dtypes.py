"""The native engine where an op reads another dtype than its operand is stored in, or stores another than it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import products
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hago
from hago.hardware.file import hardware_from_document
from hago.ops import OPS

WRAPS: Final = {"dtype": "int32", "overflow": "wrap"}
SIGNATURES: Final[tuple[dict[str, Any], ...]] = (
    {"in": ["int8"], "out": "int16"},
    {"in": ["int8"], "out": "int32"},
    {"in": ["uint8"], "out": "int24"},
    {"in": ["int16"], "out": "int16"},
    {"in": ["int8"], "out": "int16", "accumulator": WRAPS, "requantize_at": "output"},
    {"in": ["int16"], "out": "int8", "accumulator": WRAPS, "requantize_at": "output"},
)
FUNCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "relu": F.relu,
    "clamp": F.relu6,
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "slice": lambda x: x[:, :, 1:],
    "concat": lambda x: torch.cat([x, x], 1),
    "upsample_nearest2d": lambda x: F.interpolate(x, scale_factor=2),
    "neg": torch.neg,
    "mul": lambda x: x * x,
}
STORED: Final = ("int8", "int16", "int32")


class Between(nn.Module):
    """Two convolutions, and a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], channels: int) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(channels, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize("scheme", ["symmetric", "affine"])
@pytest.mark.parametrize(("op", "signature", "stored"), products.some(3, FUNCTIONS, range(len(SIGNATURES)), STORED))
def test_engines_agree(op: str, signature: int, stored: str, scheme: str) -> None:
    sums = {"in": ["int8", "int8", "int32"], "out": stored, "accumulator": WRAPS, "requantize_at": "output"}
    document = {
        "version": 1,
        "name": "mixed",
        "activation": {"scheme": scheme, "granularity": "per_tensor"},
        "weight": {"scheme": "symmetric", "granularity": "per_tensor"},
        "requantize": {"form": "float32"},
        "rounding": "half_even",
        "signatures": {"sums": sums, "between": SIGNATURES[signature]},
        "ops": {"conv2d": ["sums"], op: ["between"]},
        "other_ops": "float32",
    }
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, 8, 8, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Between(FUNCTIONS[op], 16 if op == "concat" else 8).eval()
    quantizer = hago.quantize(net, hardware_from_document(document, "", OPS), [x], corrections="none")
    real = 3 * torch.randn(4, 4, 8, 8, generator=generator)
    simulated = quantizer.simulate()(real)
    assert torch.equal(quantizer.realize("reference")(real), simulated)
    model = quantizer.realize()
    for _ in range(3):  # passes are recorded
        assert torch.equal(model(real), simulated)
