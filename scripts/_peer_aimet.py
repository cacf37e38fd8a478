"""AIMET's automatic mixed precision on one network: every point of the list that it draws up.

Activations have 8 bits, weights 8, 6 or 4. Both phases are told the SQNR of the calibration images. Points are
taken as its second phase asks for their score. torchvision is not needed and stands in as an empty module, since
the one on the registry wants another build of torch.
"""

from __future__ import annotations

import math
import sys
import tempfile
from typing import Any
from unittest.mock import MagicMock

for _name in ("torchvision", "torchvision.ops", "torchvision.datasets", "torchvision.transforms"):
    sys.modules[_name] = MagicMock()

import torch  # noqa: E402
from _peer_points import BATCH, Task  # noqa: E402
from aimet_torch.batch_norm_fold import fold_all_batch_norms  # noqa: E402
from aimet_torch.common.amp.utils import AMPSearchAlgo  # noqa: E402
from aimet_torch.common.defs import CallbackFunc, QuantizationDataType  # noqa: E402
from aimet_torch.mixed_precision import choose_mixed_precision  # noqa: E402
from aimet_torch.model_preparer import prepare_model  # noqa: E402
from aimet_torch.quantsim import QuantizationSimModel  # noqa: E402
from torch import nn  # noqa: E402

BITS = (8, 6, 4)
#: What stands for no noise at all, in dB.
MOST_DB = 100.0


def main() -> None:
    """Search, and hand over every model."""
    task = Task()
    with torch.no_grad():
        reference = torch.cat([task.network()(x) for x in task.batches()]).double()
    task.start()
    model = prepare_model(task.network())
    shape = (BATCH, *task.calibration.shape[1:])
    fold_all_batch_norms(model, shape)
    sim = QuantizationSimModel(model, torch.randn(shape), default_param_bw=8, default_output_bw=8)

    def calibrate(model: nn.Module, _: Any) -> None:
        with torch.no_grad():
            for x in task.batches():
                model(x)

    def sqnr(model: nn.Module, _: Any) -> float:
        with torch.no_grad():
            found = torch.cat([model(x) for x in task.batches()]).double()
        noise = float((found - reference).square().sum())
        signal = float(reference.square().sum())
        return MOST_DB if noise <= 0.0 else min(MOST_DB, 10 * math.log10(signal / noise))

    def taken(model: nn.Module, _: Any) -> float:
        score = sqnr(model, None)
        weights, written = bits_of(model)
        if score < MOST_DB:  # the first is the float network
            task.add(model, weights, written, f"point {len(task.points)}")
        return score

    whole = QuantizationDataType.int
    sim.compute_encodings(calibrate, None)
    with tempfile.TemporaryDirectory() as folder:
        choose_mixed_precision(
            sim,
            torch.randn(shape),
            [((8, whole), (bits, whole)) for bits in BITS],
            CallbackFunc(sqnr),
            CallbackFunc(taken),
            None,
            folder,
            True,
            CallbackFunc(calibrate),
            use_all_amp_candidates=True,
            amp_search_algo=AMPSearchAlgo.BruteForce,
        )
    task.end()


def bits_of(model: nn.Module) -> tuple[dict[str, float], dict[str, float]]:
    """By layer, of its weight and of what it writes."""
    weights, written = {}, {}
    for name, module in model.named_modules():
        own = getattr(module, "param_quantizers", {})
        if "weight" in own:
            weights[name] = _bits(own["weight"])
            written[name] = _bits(next(iter(module.output_quantizers), None))
    return weights, written


def _bits(quantizer: Any) -> float:
    return float(quantizer.bitwidth) if quantizer is not None and getattr(quantizer, "enabled", True) else 32.0


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
