"""Find the trade between bytes of weights and accuracy, and take the smallest network that is good enough."""

from __future__ import annotations

import hago
from hago.demo import batches, load_digits, train


def main() -> None:
    digits = load_digits()
    model = train(digits.train, epochs=4)
    calibration, other = batches(digits.calibration), batches(digits.test)

    # vta takes weights of 2 to 8 bits; the log makes the search one that can be stopped, continued and repeated
    _, score = hago.search_quantize_strategy(
        model, "vta", calibration, searcher="pareto:points=12", log="front.jsonl", front="front.json", progress=False
    )
    print("bytes of weights   SQNR on calibration")
    for point in score.front:
        print(f"{point.costs['weight_bytes']:16,.0f}   {point.results['sqnr']:.1f} dB")

    # the smallest network of 20 dB or more, measured on images that the search has not seen
    strategy, _ = hago.search_quantize_strategy(
        model, "vta", calibration, minimize="weight_bytes", keep="sqnr >= 20 dB", progress=False
    )
    figures = hago.evaluate_strategy(model, "vta", strategy, other).results
    size = hago.estimate_cost(model, "vta", strategy).weight_bytes
    print(f"{size:,.0f} bytes: {figures['sqnr']:.1f} dB, accuracy {figures['sim_acc']:.3f} on other images")


if __name__ == "__main__":
    main()
