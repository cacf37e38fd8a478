"""Describe a chip, a DSP that adds products of bytes in 24 bits, see what it can run, and quantize a network for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import hago
from hago.demo import batches, load_digits, train

CHIP: dict[str, Any] = {
    "version": 1,
    "name": "my_dsp",
    "activation": {"scheme": "hago", "granularity": "per_tensor"},
    "weight": {"scheme": "hago", "granularity": "per_tensor"},
    "requantize": {"form": "shift"},
    "rounding": "half_up",
    "signatures": {
        "mac": {
            "in": ["int8", "int8", "int24"],
            "out": "int24",
            "accumulator": {"dtype": "int24", "overflow": "saturate_end"},
        },
        "sum": {"in": ["int24"], "out": "int24", "max_bits": 16},
        "float": {"in": ["float32"], "out": "float32"},
    },
    "ops": {
        "conv2d": ["mac", "float"],
        "linear": ["mac", "float"],
        "add": ["sum", "float"],
        "relu": ["sum", "float"],
        "reshape": ["sum", "float"],
    },
    "other_ops": "float32",
}


def main() -> None:
    Path("my_dsp.json").write_text(json.dumps(CHIP, indent=2), "utf-8")
    digits = load_digits()
    model = train(digits.train, epochs=4)
    images, labels = digits.test

    explanation = hago.explain(model, "my_dsp.json", (images[:2],))
    print(f"{explanation.integer_nodes} nodes in integers, {explanation.float_nodes} in float")

    quantizer = hago.quantize(model, "my_dsp.json", batches(digits.calibration))
    integer = quantizer.realize()
    print("simulated == integer:", torch.equal(quantizer.simulate()(images), integer(images)))
    for name, network in (("float", model), ("integer", integer)):
        print(f"accuracy, {name}: {(network(images).argmax(1) == labels).float().mean():.3f}")


if __name__ == "__main__":
    main()
