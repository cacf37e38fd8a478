"""Quantize the networks of a collection, with random weights, and count the values in which their forms differ.

Every network is imported, calibrated on random images, and taken at its most bits; simulator, integer model and fast
engine are compared value by value, and with --onnx the file that is written of it, node by node, with what ONNX
Runtime makes of it (where a scale is no power of two, that may be one quantum of an addition). The collections are
those of torchvision and timm, whichever is installed. Exits with 1 if simulator and integers differ anywhere.

    python scripts/check_zoo.py --from timm --names mobilenetv4_conv_small fastvit_t8 --hardware x86_vnni
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hago import HagoError
from hago.exactness import compare
from hago.export.onnx_check import check_onnx
from hago.export.onnx_export import FORMS, make_onnx
from hago.plan import Plan
from hago.prepare import prepare

SEED = 0


def main() -> int:
    """Run the check; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="collection", choices=sorted(COLLECTIONS), default="torchvision")
    parser.add_argument("--names", nargs="+", help="all that have at most --largest parameters by default")
    parser.add_argument("--hardware", default="x86_vnni")
    parser.add_argument("--size", type=int, default=96, help="of the images, where a network takes any size")
    parser.add_argument("--largest", type=float, default=60e6, help="parameters of a network, at most")
    parser.add_argument("--onnx", choices=sorted(FORMS), help="compare the ONNX file in this form, too")
    options = parser.parse_args()
    names, make = COLLECTIONS[options.collection]()
    wrong = 0
    for name in options.names or names:
        started = time.perf_counter()
        torch.manual_seed(SEED)
        network = lively(make(name))
        count = sum(p.numel() for p in network.parameters())
        if count > options.largest:
            print(f"{name:32} skipped: {count:,} parameters", flush=True)
            continue
        try:
            differ, said = checked(network, options)
        except HagoError as error:
            print(f"{name:32} {str(error).splitlines()[0][:200]}", flush=True)
            continue
        wrong += differ
        print(f"{name:32} {said} {time.perf_counter() - started:6.1f} s", flush=True)
    print(f"{wrong} values differ")
    return 1 if wrong else 0


def checked(network: nn.Module, options: Any) -> tuple[int, str]:
    """How many values differ, and a line."""
    images = taken(network, options.size)
    prepared = prepare(network, options.hardware, [images[:2], images[2:]])
    plan = prepared.resolver(prepared.space.widest())
    found = compare(plan, [images[:1]])
    differ = sum(found.differences.values())
    counts = f"{len(plan.nodes):5} integer nodes {in_float(plan):4} float, {found.compared:11} values, {differ} differ"
    return differ, counts + (in_onnx(plan, images, options.onnx) if options.onnx else "")


def in_float(plan: Plan) -> int:
    """Nodes that compute and are not quantized."""
    return sum(n.name not in plan.nodes and n.op not in ("input", "const") for n in plan.graph)


def in_onnx(plan: Plan, images: Tensor, form: str) -> str:
    """What ONNX Runtime makes of the file."""
    try:
        found = check_onnx(make_onnx(plan, form), plan, [[images[:2]]])
    except HagoError as error:
        return f"; onnx: {str(error).splitlines()[-1].strip()[:160]}"
    return f"; onnx: {found.differing} of {found.compared}"


def taken(network: nn.Module, size: int) -> Tensor:
    """Random images of the given size, or of the least usual one that the network takes."""
    for side in (size, 128, 224, 240, 256, 299):
        images = torch.randn(4, 3, side, side)
        try:
            with torch.no_grad():
                network(images[:2])
            return images
        except (RuntimeError, AssertionError, ValueError):
            continue
    raise HagoError("takes no images of the sizes that were tried")


def lively(network: nn.Module) -> nn.Module:
    """With batch norms that do something."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and module.weight is not None:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return network.eval()


Collection = tuple[Sequence[str], Callable[[str], nn.Module]]


def torchvision() -> Collection:
    """Classifiers, as they are made without weights."""
    models: Any = importlib.import_module("torchvision.models")

    def make(name: str) -> nn.Module:
        found: nn.Module = models.get_model(name, weights=None, **INITIAL.get(name, {}))
        return found

    return models.list_models(module=models), make


#: Networks that would take minutes to draw their weights.
INITIAL = {"googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}}


def timm() -> Collection:
    """All that timm lists."""
    package: Any = importlib.import_module("timm")

    def make(name: str) -> nn.Module:
        found: nn.Module = package.create_model(name, pretrained=False)
        return found

    return package.list_models(), make


COLLECTIONS: dict[str, Callable[[], Collection]] = {"torchvision": torchvision, "timm": timm}


if __name__ == "__main__":
    sys.exit(main())
