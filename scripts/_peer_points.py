"""The data that the process of a peer reads, and the points that it writes.

A peer runs in an environment of its own, where hago is not installed. It reads `calibration.npy`, `labels.npy` and
`held_out.npy` from a folder, and writes `points.json` and the held-out outputs of each of its models there.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BATCH = 32


class Task:
    """The data and the network of one peer, and its points.

    Times are those of the processor where one thread computes, so that other work on the machine is not in them. The
    time of measuring points on held-out data is not part of the time that is reported.
    """

    def __init__(self) -> None:
        self.folder, assets, network, threads = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
        torch.set_num_threads(threads)
        self.threads = threads
        sys.path.insert(0, assets)
        self._make: Callable[[], nn.Module] = lambda: importlib.import_module("loaders").net(network)[0]
        self.calibration, self.labels, self.held_out = (
            torch.from_numpy(np.load(self.folder / f"{name}.npy")) for name in ("calibration", "labels", "held_out")
        )
        self.points: list[dict[str, Any]] = []
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self._begun, self._aside = self._clock(), 0.0

    def network(self) -> nn.Module:
        """The float network, loaded again."""
        return self._make().eval()

    def start(self) -> None:
        """Start the clock; the time of imports and of reading data does not count."""
        self._begun, self._aside = self._clock(), 0.0

    def batches(self) -> list[Tensor]:
        """The calibration images."""
        return list(self.calibration.split(BATCH))

    def add(
        self,
        run: Callable[[Tensor], Tensor],
        weights: Mapping[str, float],
        activations: Mapping[str, float],
        label: str,
        seconds: float | None = None,
        integer_share: float | None = None,
    ) -> None:
        """Add a quantized model as a point.

        Args:
            run: runs the model in the peer's own simulation or engine.
            weights, activations: bits by layer; 32 for a float layer.
            seconds: the time at which it was found; by default now.
            integer_share: the part of its multiply-adds that run in integers.
        """
        paused = self._clock()
        with torch.no_grad():
            found = torch.cat([run(x) for x in self.held_out.split(BATCH)])
        name = f"outputs_{len(self.points)}.npy"
        np.save(self.folder / name, found.float().numpy())
        self._aside += self._clock() - paused
        seconds = self.seconds() if seconds is None else seconds
        parts = {"weights": dict(weights), "activations": dict(activations), "integer_share": integer_share}
        self.points.append({"label": label, "outputs": name, "seconds": seconds, **parts})

    def seconds(self) -> float:
        """The seconds since the start, without those of measuring points."""
        return self._clock() - self._begun - self._aside

    def end(self, seconds: float | None = None) -> None:
        """Write the points.

        Args:
            seconds: of the whole search; by default all since the start.
        """
        spent = self.seconds() if seconds is None else seconds
        (self.folder / "points.json").write_text(json.dumps({"seconds": spent, "points": self.points}))
