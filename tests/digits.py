"""The demonstration on few of its digits, for tests of what stands around it."""

from __future__ import annotations

import pytest

from hago import demo


def few_digits(patch: pytest.MonkeyPatch, one_of: int) -> None:
    """Let the demonstration train, calibrate and test on one of so many digits."""
    load = demo.load_digits

    def some(seed: int = 0) -> demo.Digits:
        whole = load(seed)
        parts = (whole.train, whole.calibration, whole.test)
        return demo.Digits(*((x[: len(x) // one_of], labels[: len(x) // one_of]) for x, labels in parts))

    patch.setattr(demo, "load_digits", some)
