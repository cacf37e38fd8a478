"""Find the layer that costs most accuracy, and give its weights their bits back."""

from __future__ import annotations

import hago
from hago.demo import batches, load_digits, train

LAYERS = ("block1.conv1", "block1.conv2", "block2.conv1", "block2.conv2", "block2.shortcut", "classes")


def main() -> None:
    digits = load_digits()
    model = train(digits.train, epochs=4)
    calibration, other = batches(digits.calibration), batches(digits.test)

    # 4 bits for the weights of all layers but the first; slot 1 of a layer reads its weights
    bits = {f"{layer}:1": 4 for layer in LAYERS}
    coarse = hago.quantize(model, "x86_vnni", calibration, fix_bits=bits)
    statistic = hago.inspect_graph_statistic(model, "x86_vnni", coarse.strategy, other)
    print(statistic)

    worst = max(LAYERS, key=lambda layer: statistic.blame[layer])
    print(f"\nmost of the error of the outputs comes from {worst}, by its {statistic[worst].main_cause}")
    mended = hago.quantize(model, "x86_vnni", calibration, fix_bits={**bits, f"{worst}:1": 8})
    for what, quantizer in (("4 bits for all of them", coarse), (f"8 bits for {worst}", mended)):
        figures = hago.evaluate_strategy(model, "x86_vnni", quantizer.strategy, other).results
        size = hago.estimate_cost(model, "x86_vnni", quantizer.strategy).weight_bytes
        print(f"{what}: {figures['sqnr']:.1f} dB, accuracy {figures['sim_acc']:.3f}, {size:,.0f} bytes of weights")


if __name__ == "__main__":
    main()
