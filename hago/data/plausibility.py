"""Warn of data that gives no useful ranges although a model runs on it: zeros alone, the same values in every sample,
or values so large that they were hardly normalized as in training; and of held-out data that calibration has seen.

A single sample is no reason for a warning: its values are real ones, and examples and first tries use it. Integer
inputs are not judged, since the same tokens may be in every sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from torch import Tensor

from hago.errors import warn
from hago.serialization.text_table import counted

#: The largest value of an input that was normalized, or is a physical quantity in common units. Masks of attention
#: hold large negative values, so only positive ones are compared with it.
LARGEST_USUAL: Final = 1e5


class ValueStatistics:
    """What is known of the values of inputs, collected batch by batch.

    Attributes:
        samples: the number of samples.
        first: the inputs of the first sample, each of shape (1, ...).
        checksums: of all inputs of a sample, for every sample.
        all_zero: whether every value of every input is 0; False if an input holds integers.
        all_equal: whether all samples are the same; False if an input holds integers.
        largest: the largest value.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.checksums: list[int] = []
        self.all_zero = self.all_equal = True
        self.largest = 0.0
        self.first: list[Tensor] = []

    def add(self, inputs: Sequence[Tensor]) -> None:
        """Take in the inputs of one batch."""
        self.samples += len(inputs[0])
        self.checksums += map(_checksum, zip(*(x.contiguous().numpy() for x in inputs), strict=True))
        self.first = self.first or [x[:1].clone() for x in inputs]
        are_real = all(x.is_floating_point() and x.numel() for x in inputs)
        # one sample that differs decides for all that follow
        self.all_zero = self.all_zero and are_real and not any(bool(x.any()) for x in inputs)
        pairs = zip(inputs, self.first, strict=True)
        self.all_equal = self.all_equal and are_real and all(bool((x == first).all()) for x, first in pairs)
        real = [float(x.max()) for x in inputs if x.is_floating_point() and x.numel()]
        self.largest = max(self.largest, *real) if real else self.largest


def _checksum(sample: Sequence[np.ndarray[Any, Any]]) -> int:
    checksum = 0
    for values in sample:
        checksum = zlib.crc32(values.data, checksum)
    return checksum


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


def warn_if_shared(held_out: ValueStatistics, calibration: ValueStatistics) -> None:
    """Warn of held-out data if most of its samples, or most of those that calibration saw, are in both. Data of so few
    different samples that any two sets of it share most is not judged."""
    seen = set(calibration.checksums)
    shared = [checksum for checksum in held_out.checksums if checksum in seen]
    is_diverse = 2 * len(seen) > calibration.samples
    if is_diverse and (2 * len(shared) > held_out.samples or 2 * len(set(shared)) > len(seen)):
        warn(
            f"{len(shared)} of {counted(held_out.samples, 'sample')} of the held-out data are in the calibration data, "
            "too, so they do not show how the model does on samples that calibration did not see; pass other samples "
            "as held_out (--held-out)"
        )
