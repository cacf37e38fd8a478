"""The reports of the gallery: a short search of the demo's network on each chip, and its page.

`scripts/_site.py` runs this as a program of its own, in an empty folder: so the paths that pages show are short, and
the threads are as many as help so small a network.

    python scripts/_gallery.py CHIP ...   # writes CHIP.html of each; prints the answers of all pages as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Final

import torch

import hago
from hago.api import make_report
from hago.demo import load_digits, train

#: Images that the search calibrates on, and that its strategies are measured on.
CALIBRATION, TEST = 100, 200
#: Passes over the training data, which are enough for 95 % of the digits.
EPOCHS: Final = 2


def main(chips: list[str]) -> None:
    """Write the pages."""
    torch.set_num_threads(1)
    digits = load_digits()
    model = train(digits.train, epochs=EPOCHS)
    data = [tuple(part[:CALIBRATION] for part in digits.calibration)]
    test = [tuple(part[:TEST] for part in digits.test)]
    answers = {}
    for chip in chips:
        log, front = f"{chip}.jsonl", f"{chip}.front.json"
        hago.search_quantize_strategy(
            model,
            chip,
            data,
            searcher="pareto:points=6",
            effort="fast",
            budget="12 trials",
            log=log,
            save=f"{chip}.json",
            front=front,
            progress=False,
        )
        report = make_report(
            model,
            chip,
            [log, f"{chip}.json", front],
            data,
            held_out=test,
            save=f"{chip}.html",
            points=3,
            remedies=False,
            title=f"DigitNet on {chip}",
            progress=False,
        )
        answers[chip] = {each.question: each.answer for each in report.points[0].short}
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1:])
