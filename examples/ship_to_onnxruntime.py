"""Export a quantized network to ONNX, run it in ONNX Runtime, and compare it with hago's integer model.

It needs the packages of `pip install '.[demo,onnx]'`.
"""

from __future__ import annotations

import onnxruntime  # type: ignore[import-untyped]

import hago
from hago.demo import batches, load_digits, train


def main() -> None:
    digits = load_digits()
    model = train(digits.train, epochs=4)
    images, labels = digits.test

    # onnxruntime_cpu describes the arithmetic of ONNX Runtime's kernels
    quantizer = hago.quantize(model, "onnxruntime_cpu", batches(digits.calibration))
    print(quantizer.export("digits.onnx", "onnx").text)

    session = onnxruntime.InferenceSession("digits.onnx")
    (name,) = (value.name for value in session.get_inputs())
    answers = session.run(None, {name: images.numpy()})[0].argmax(1)
    ours = quantizer.realize()(images).argmax(1)
    print(f"answers equal to those of the integer model: {(ours.numpy() == answers).mean():.1%}")
    print(f"accuracy in ONNX Runtime: {(labels.numpy() == answers).mean():.3f}")


if __name__ == "__main__":
    main()
