"""Accuracy with few bits of weights and of layer inputs on `x86_vnni`, in one shot, as a table.

The first and the last layer have 8 bits, as papers have it; everything else is as the chip computes it in integers.
Rows are the corrections that are made: none, those of the default, or other sets, and block reconstruction behind those
of the default, with a number of steps each, and then the whole network trained from the last of these
(`hago.finetune`), on the calibration samples or on more. Calibration and training see no labels; results are of test
samples that they did not see. Lost is float's accuracy less ours, in points, paired on the same samples, with its 95 %
interval. Seconds are those of the processor on one thread, for all of `hago.quantize`, and for training alone.

    python scripts/benchmark_few_bits.py --assets DIR --models mobilenetv2_cifar96 --steps 100 400
    python scripts/benchmark_few_bits.py --assets DIR --models mobilenetv2_cifar96 --finetune 400 --train 256 4660
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from _assets import NAMES, Asset, load, outputs, sqnr
from torch import Tensor

import hago
from hago.search import DEFAULT_CORRECTIONS, paired_interval

LAYERS = ("linear", "conv1d", "conv2d", "conv3d")


def fixed_bits(asset: Asset, weights: int, inputs: int) -> dict[str, int]:
    """Bits by edge: those of the layers' inputs and weights, and 8 for the first and the last layer."""
    layers = [node.name for node in hago.from_torch(asset.module, asset.calibration[0]) if node.op in LAYERS]
    bits = {f"{name}:{slot}": b for name in layers for slot, b in ((0, inputs), (1, weights))}
    return bits | {f"{name}:{slot}": 8 for name in (layers[0], layers[-1]) for slot in (0, 1)}


def figures(asset: Asset, reference: Tensor, out: Tensor) -> str:
    """The cells of a row: accuracy, what is lost, agreement with float and SQNR."""
    assert asset.labels is not None
    right, ours = ((o.argmax(1) == asset.labels).double() for o in (reference, out))
    lost, low, high = (100 * x for x in paired_interval(right - ours))
    agreement = float((reference.argmax(1) == out.argmax(1)).double().mean())
    lost_text = f"{lost:.1f} ({low:.1f} to {high:.1f})"
    return f"{float(ours.mean()):.3f} | {lost_text} | {agreement:.3f} | {sqnr(reference, out):.1f} dB"


def rows(
    asset: Asset,
    weights: int,
    inputs: int,
    sets: Sequence[str],
    steps: Sequence[int],
    tuned: Sequence[int],
    training: Mapping[int, Asset],
) -> Iterator[str]:
    """The lines of the table.

    Args:
        sets: of corrections, joined by +; "default" for those.
        steps: of reconstruction.
        tuned: of training.
        training: the network with the samples that it is trained on, by their number.
    """
    reference = outputs(asset.module, asset.test)
    yield f"| {asset.name} | float | | {asset.score(reference):.3f} | | | | |"
    bits = fixed_bits(asset, weights, inputs)
    kinds = {text: list(DEFAULT_CORRECTIONS) if text == "default" else text.split("+") for text in sets}
    kinds |= {f"reconstruction, {n} steps": [*DEFAULT_CORRECTIONS, f"reconstruction:{n}"] for n in steps}
    for name, corrections in kinds.items():
        start = time.process_time()
        quantizer = hago.quantize(asset.module, "x86_vnni", asset.calibration, fix_bits=bits, corrections=corrections)
        seconds = time.process_time() - start
        cells = figures(asset, reference, outputs(quantizer.simulate(), asset.test))
        yield f"| {asset.name} | W{weights}A{inputs} | {name} | {cells} | {seconds:.0f} s |"
    for (samples, trained_on), n in itertools.product(training.items(), tuned):
        start = time.process_time()
        found = hago.finetune(
            asset.module, "x86_vnni", quantizer.strategy, trained_on.calibration, steps=n, progress=False
        )
        seconds = time.process_time() - start
        cells = figures(asset, reference, outputs(found.quantizer.simulate(), asset.test))
        how = f"{n} steps of training on {samples} samples" + ("" if found.kept else ", not kept")
        yield f"| {asset.name} | W{weights}A{inputs} | {how} | {cells} | {seconds:.0f} s |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True, help="the folder of networks and data")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["cifar_resnet20", "mobilenetv2_cifar96"])
    parser.add_argument("--weights", type=int, default=4, help="bits of weights")
    parser.add_argument("--inputs", type=int, default=4, help="bits of layer inputs")
    parser.add_argument("--corrections", nargs="+", default=["none", "default"], help="sets, each joined by +")
    parser.add_argument("--steps", type=int, nargs="*", default=[200], help="of reconstruction")
    parser.add_argument("--finetune", type=int, nargs="*", default=[], help="steps of training the whole network")
    parser.add_argument("--train", type=int, nargs="*", default=[256], help="samples that it is trained on")
    parser.add_argument("--calibration", type=int, default=256)
    parser.add_argument("--test", type=int, default=600)
    args = parser.parse_args()
    warnings.simplefilter("ignore", hago.errors.HagoWarning)
    torch.set_num_threads(1)
    print("| network | bits | corrections | accuracy | lost, points | agreement | SQNR | processor time |")
    print("|---|---|---|---|---|---|---|---|")
    for name in args.models:
        asset = load(args.assets, name, args.calibration, args.test)
        training = {n: load(args.assets, name, n, 1) for n in (args.train if args.finetune else ())}
        of_network = (args.corrections, args.steps, args.finetune, training)
        for line in rows(asset, args.weights, args.inputs, *of_network):
            print(line, flush=True)


if __name__ == "__main__":
    main()
