"""What the tests of executors send to other processes; importable there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from hago.calibration.estimators import MaxRange


class Dying:
    """An estimator that kills its process once, in a process that is not the one that made it."""

    name = "dying"

    def __init__(self, mark: Path, times: int = 1) -> None:
        self.mark, self.times, self.home = mark, times, os.getpid()

    def __call__(self, statistics, grid):
        if os.getpid() != self.home:
            died = len(self.mark.read_text()) if self.mark.exists() else 0
            if died < self.times:
                self.mark.write_text("x" * (died + 1))
                os.kill(os.getpid(), signal.SIGKILL)
        return MaxRange()(statistics, grid)


def negative_error(reference, outputs, labels) -> float:
    """An objective of the user's."""
    return -float((reference[0] - outputs[0]).abs().mean())


def threads() -> int:
    return torch.get_num_threads()
