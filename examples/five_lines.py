"""Search how to run an image network in 8-bit integers, and compare the result with float on other images.

`python examples/five_lines.py` takes a small network, which it trains on handwritten digits;
`python examples/five_lines.py mobilenetv4_conv_small DIR` takes a network of timm and a folder of images.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import hago
from hago.data import ImageShape, load_data
from hago.demo import batches, load_digits, train


def network_and_images(words: list[str]) -> tuple[nn.Module, Any, torch.Tensor]:
    """A float network in eval mode, calibration batches, and images that are not among them."""
    if not words:
        digits = load_digits()
        return train(digits.train, epochs=4), batches(digits.calibration), digits.test[0]
    import timm  # type: ignore[import-not-found]

    name, folder = words
    model = timm.create_model(name, pretrained=True).eval()
    shape = timm.data.resolve_model_data_config(model)
    images = ImageShape(shape["input_size"][1:], shape["mean"], shape["std"])
    *calibration, other = load_data(folder, batch_size=32, images=images)
    return model, calibration, other


def main(words: list[str]) -> None:
    model, calibration, images = network_and_images(words)

    strategy, score = hago.search_quantize_strategy(model, "x86_vnni", calibration, progress=False)
    quantizer = hago.create_quantizer(model, "x86_vnni", strategy)
    simulated, integer = quantizer.simulate(), quantizer.realize()
    same = torch.equal(simulated(images), integer(images))
    agreement = (integer(images).argmax(1) == model(images).argmax(1)).float().mean()

    print(f"the search scored {score:.4g}; simulated == integer on {len(images)} other images: {same}")
    print(f"answers that are those of the float network: {agreement:.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
