"""Accuracy with scales per tensor, per channel and per group of weights, in one shot, as a table.

Weights alone are quantized (`--kind alone`: everything else is float), or multiplied as integers on `x86_vnni` with
that scheme, and with a multiplier of 4 bits for each group (`--kind products`). Calibration sees no labels; results are
of test samples that calibration did not see, with and without corrections.

    python scripts/benchmark_groups.py --assets DIR --models cifar_resnet20 --kind alone
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import replace

from _assets import NAMES, Asset, load, outputs, sqnr

import hago
from hago.arithmetic.types import dtype
from hago.cost import plan_cost
from hago.hardware import Groups, Hardware, OpDesc, TensorScheme, load_hardware
from hago.hardware.hardware import Granularity

LAYERS = ("linear", "conv1d", "conv2d", "conv3d")
#: The bits of multipliers, with which the joined integers of 4 bits are bytes.
MULTIPLIER_BITS = 4
SIZES = (128, 64, 32, 16)


def alone(bits: int, granularity: Granularity, size: int | None) -> Hardware:
    """Layers that compute in float on integer weights."""
    groups = None if size is None else Groups(size)
    desc = OpDesc(["float32", f"int{bits}", "float32"], "float32", groups=groups)
    return Hardware(dict.fromkeys(LAYERS, desc), name="alone", weight=TensorScheme("symmetric", granularity))


def products(bits: int, granularity: Granularity, size: int | None) -> Hardware:
    """The chip `x86_vnni` with weights of fewer bits, and multipliers for groups."""
    chip = load_hardware("x86_vnni")
    groups, ops = None if size is None else Groups(size, MULTIPLIER_BITS), dict(chip.ops)
    for op in LAYERS:
        ops[op] = tuple(
            replace(d, in_dtypes=(d.in_dtype(0), dtype(f"int{bits}"), *d.in_dtypes[2:]), groups=groups)
            if d.is_integer
            else d
            for d in ops[op]
        )
    return replace(chip, name="products", ops=ops, weight=TensorScheme("symmetric", granularity))


KINDS = {"alone": alone, "products": products}


def rows(asset: Asset, kind: str, bits: int, estimator: str) -> Iterator[str]:
    """The lines of the table, one for each granularity."""
    reference = outputs(asset.module, asset.test)
    yield f"| {asset.name} | float | | | {asset.score(reference):.3f} | | |"
    chips = [("per tensor", "per_tensor", None), ("per channel", "per_channel", None)]
    chips += [(f"groups of {size}", "per_channel", size) for size in SIZES]
    for name, granularity, size in chips:
        cells = []
        for corrections in ("none", None):
            hardware = KINDS[kind](bits, granularity, size)  # type: ignore[arg-type]
            quantizer = hago.quantize(
                asset.module, hardware, asset.calibration, estimator=estimator, corrections=corrections
            )
            simulated = outputs(quantizer.simulate(), asset.test)
            cells += [f"{sqnr(reference, simulated):.1f} dB", f"{asset.score(simulated):.3f}"]
            stored = plan_cost(quantizer.plan)
        yield f"| {asset.name} | {name} | {stored.weight_bytes / 1e6:.3f} MB | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", required=True, help="the folder of networks and data")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["cifar_resnet20"])
    parser.add_argument("--kind", choices=sorted(KINDS), default="alone")
    parser.add_argument("--bits", type=int, default=4, help="of weights")
    parser.add_argument("--estimator", default="max_range")
    parser.add_argument("--calibration", type=int, default=128)
    parser.add_argument("--test", type=int, default=600)
    args = parser.parse_args()
    warnings.simplefilter("ignore", hago.errors.HagoWarning)
    print("| network | scales | weights | SQNR | metric | SQNR, corrected | metric, corrected |")
    print("|---|---|---|---|---|---|---|")
    for name in args.models:
        asset = load(args.assets, name, args.calibration, args.test)
        for line in rows(asset, args.kind, args.bits, args.estimator):
            print(line, flush=True)


if __name__ == "__main__":
    main()
