"""NVIDIA ModelOpt's auto_quantize on one network, for several numbers of effective bits.

It is offered 8, 7, 6, 5 and 4 bits for the weights of every layer, all with 8 bits for what the layer reads, and
leaving a layer float, as it always does. Its scores are measured once and kept in its checkpoint.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from _peer_points import Task
from torch import Tensor, nn
from torch.nn import functional as F

TARGETS = (12.0, 10.0, 8.0, 7.5, 7.0, 6.5, 6.0, 5.5, 5.0, 4.5, 4.25, 4.0)


def formats() -> list[dict[str, Any]]:
    """The formats that a layer may have."""
    return [
        {
            "quant_cfg": [
                {"quantizer_name": "*", "enable": False},
                {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": bits, "axis": 0}},
                {"quantizer_name": "*input_quantizer", "cfg": {"num_bits": 8, "axis": None}},
            ],
            "algorithm": "max",
        }
        for bits in (8, 7, 6, 5, 4)
    ]


def bits_of(model: nn.Module, quantizer: str) -> dict[str, float]:
    """By layer, of its weight or its input."""
    found = {}
    for name, module in model.named_modules():
        part = getattr(module, quantizer, None)
        if part is not None and isinstance(module, (nn.Conv2d, nn.Linear)):
            found[name] = float(part.num_bits) if part.is_enabled else 32.0
    return found


def quantized(
    network: nn.Module, data: list[tuple[Tensor, Tensor]], target: float, method: str, folder: Path
) -> nn.Module:
    """A network with a number of effective bits.

    Args:
        folder: where scores are kept for further targets.
    """

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0])

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1])

    model, _ = mtq.auto_quantize(
        network,
        constraints={"effective_bits": target},
        quantization_formats=formats(),
        data_loader=data,
        forward_step=forward,
        loss_func=loss if method == "gradient" else None,
        num_calib_steps=len(data),
        num_score_steps=len(data),
        method=method,
        checkpoint=str(folder / "scores.pth"),
    )
    return model.eval()


def main() -> None:
    """Search, and hand over every model."""
    task, method = Task(), sys.argv[5]
    data = list(zip(task.batches(), task.labels.split(len(task.batches()[0])), strict=True))
    with tempfile.TemporaryDirectory() as folder:  # what is loaded at its first use is not in the times
        tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        quantized(tiny, [(torch.rand(4, 3, 8, 8), torch.arange(4))], TARGETS[-1], method, Path(folder))
    task.start()
    with tempfile.TemporaryDirectory() as folder:
        for target in TARGETS:
            model = quantized(task.network(), data, target, method, Path(folder))
            weights, read = bits_of(model, "weight_quantizer"), bits_of(model, "input_quantizer")
            task.add(model, weights, read, f"{target:g} effective bits")
    task.end()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
