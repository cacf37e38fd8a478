"""Warn of data that gives no useful ranges although a model runs on it: zeros alone, the same values in every sample,
or values so large that they were hardly normalized as in training.

A single sample is no reason for a warning: its values are real ones, and examples and first tries use it. Integer
inputs are not judged, since the same tokens may be in every sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from hago.errors import warn

#: The largest value of an input that was normalized, or is a physical quantity in common units. Masks of attention
#: hold large negative values, so only positive ones are compared with it.
LARGEST_USUAL: Final = 1e5


class ValueStatistics:
    """What is known of the values of real inputs, collected batch by batch.

    Attributes:
        samples: the number of samples.
        all_zero: whether every value of every input is 0; False if an input holds integers.
        all_equal: whether all samples are the same; False if an input holds integers.
        largest: the largest value.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.all_zero = self.all_equal = True
        self.largest = 0.0
        self._first: list[Tensor] = []

    def add(self, inputs: Sequence[Tensor]) -> None:
        """Take in the inputs of one batch."""
        self.samples += len(inputs[0])
        self._first = self._first or [x[:1].clone() for x in inputs]
        are_real = all(x.is_floating_point() and x.numel() for x in inputs)
        # one sample that differs decides for all that follow
        self.all_zero = self.all_zero and are_real and not any(bool(x.any()) for x in inputs)
        pairs = zip(inputs, self._first, strict=True)
        self.all_equal = self.all_equal and are_real and all(bool((x == first).all()) for x, first in pairs)
        real = [float(x.max()) for x in inputs if x.is_floating_point() and x.numel()]
        self.largest = max(self.largest, *real) if real else self.largest


def implausible(statistics: ValueStatistics) -> str:
    """What is odd about the values, and what to do; empty if nothing is."""
    if statistics.all_zero:
        return "holds zeros alone, from which no ranges of values can be learned; pass samples as the model will get"
    if statistics.all_equal and statistics.samples > 1:
        return (
            f"holds the same values in all {statistics.samples} samples, so that figures are those of one sample; pass "
            "samples that differ"
        )
    if statistics.largest > LARGEST_USUAL:
        return (
            f"holds values up to {statistics.largest:.6g}; if the network was trained on normalized inputs, normalize "
            "these in the same way"
        )
    return ""


def warn_if_implausible(title: str, statistics: ValueStatistics) -> None:
    """Warn once if values are odd.

    Args:
        title: the name of the data in the message.
    """
    if odd := implausible(statistics):
        warn(f"{title} {odd}")
