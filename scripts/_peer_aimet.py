"""AIMET on one network: cross-layer equalization with AdaRound at 8 bits, or automatic mixed precision.

Equalization with AdaRound follows its documentation: batch norms are folded, layers equalized, weights rounded with the
calibration images (as many iterations for each layer as are asked for; its default is 10,000), then ranges computed,
with 8-bit weights per channel, asymmetric 8-bit activations, and ranges of the largest SQNR ("tf_enhanced").

Of mixed precision every point of the list that it draws up is taken, as its second phase asks for the score.
Activations have 8 bits, weights 8, 6 or 4. Both phases are told the SQNR of the calibration images.

Outputs are those of its simulation. torchvision is not needed and stands in as an empty module, since the one on the
registry wants another build of torch.
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
from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters  # noqa: E402
from aimet_torch.batch_norm_fold import fold_all_batch_norms  # noqa: E402
from aimet_torch.common.amp.utils import AMPSearchAlgo  # noqa: E402
from aimet_torch.common.defs import CallbackFunc, QuantizationDataType, QuantScheme  # noqa: E402
from aimet_torch.cross_layer_equalization import equalize_model  # noqa: E402
from aimet_torch.mixed_precision import choose_mixed_precision  # noqa: E402
from aimet_torch.model_preparer import prepare_model  # noqa: E402
from aimet_torch.quantsim import QuantizationSimModel  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

BITS = (8, 6, 4)
#: What stands for no noise at all, in dB.
MOST_DB = 100.0


def main() -> None:
    """Quantize in the way that was named, and hand over every model."""
    task, way = Task(), sys.argv[5]
    if way == "adaround":
        equalized_and_rounded(task, int(sys.argv[6]))
    else:
        mixed_precision(task)
    task.end()


def equalized_and_rounded(task: Task, iterations: int) -> None:
    """Equalize, round and simulate, with `iterations` of AdaRound for each layer."""
    task.start()
    model = prepare_model(task.network())
    example = task.calibration[:BATCH]
    equalize_model(model, dummy_input=example)
    data = DataLoader(TensorDataset(task.calibration), BATCH)
    rounding = AdaroundParameters(
        data, len(data), default_num_iterations=iterations, forward_fn=lambda model, batch: model(batch[0])
    )
    how = {"quant_scheme": QuantScheme.post_training_tf_enhanced, "default_param_bw": 8}
    with tempfile.TemporaryDirectory() as folder:
        model = Adaround.apply_adaround(
            model,
            example,
            rounding,
            folder,
            "rounded",
            default_param_bw=8,
            default_quant_scheme=QuantScheme.post_training_tf_enhanced,
        )
        sim = QuantizationSimModel(model, example, default_output_bw=8, **how)
        sim.set_and_freeze_param_encodings(f"{folder}/rounded.encodings")
    sim.compute_encodings(lambda model, _: [model(x) for x in task.batches()], None)
    seconds = task.seconds()
    label = f"{iterations:,} iterations for each layer"
    task.add(sim.model, *bits_of(sim.model), label, seconds, integer_share(sim.model, example))


def mixed_precision(task: Task) -> None:
    """Search, and hand over every point."""
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


def bits_of(model: nn.Module) -> tuple[dict[str, float], dict[str, float]]:
    """By layer, of its weight and of what it writes."""
    weights, written = {}, {}
    for name, module in model.named_modules():
        own = getattr(module, "param_quantizers", {})
        if "weight" in own:
            weights[name] = _bits(own["weight"])
            written[name] = _bits(next(iter(module.output_quantizers), None))
    return weights, written


def integer_share(model: nn.Module, example: torch.Tensor) -> float:
    """The part of the multiply-adds of convolutions and linear layers whose weights are quantized.

    What they read is quantized everywhere: the configuration quantizes inputs and the outputs of all operators.
    """
    macs: dict[nn.Module, int] = {}

    def see(layer: nn.Module, _: Any, out: torch.Tensor) -> None:
        macs[layer] = out.numel() * layer.weight[0].numel()

    layers = [m for m in model.modules() if "weight" in getattr(m, "param_quantizers", {}) and m.weight.ndim > 1]
    seen = [layer.register_forward_hook(see) for layer in layers]
    with torch.no_grad():
        model(example)
    for hook in seen:
        hook.remove()
    whole = sum(m for layer, m in macs.items() if _bits(layer.param_quantizers["weight"]) < 32)
    return whole / sum(macs.values())


def _bits(quantizer: Any) -> float:
    return float(quantizer.bitwidth) if quantizer is not None and getattr(quantizer, "enabled", True) else 32.0


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
