"""GraphStatistic: what an inspection found of a whole model; a frozen value that prints as a table."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

from hago.debug.blame import Wrong, blame, find_wrong
from hago.debug.report import csv_rows, error_table, value_table
from hago.debug.statistic import NodeStatistic


@dataclass(frozen=True, slots=True)
class GraphStatistic:
    """Float against simulated against integer, node by node in order; prints as a table.

    Args:
        hardware: its name.
        batches, samples: what was run.
        rows: one per node, inputs included and constants not.
        outputs: names of the nodes that the model returns.
    """

    hardware: str
    batches: int
    samples: int
    rows: tuple[NodeStatistic, ...]
    outputs: tuple[str, ...]

    def __getitem__(self, name: str) -> NodeStatistic:
        return next(r for r in self.rows if r.name == name)

    @property
    def total_differences(self) -> int:
        """Values that differ between the simulator and the integer model: 0, as promised."""
        return sum(r.differences for r in self.rows)

    @property
    def blame(self) -> dict[str, float]:
        """The part that each node has in the outputs' error; see `hago.debug.blame`."""
        return blame(self.rows, self.outputs)

    @property
    def first_wrong(self) -> Wrong | None:
        """Where the model goes wrong, or None where no node does.

        The rule: the symptom is the first node in order whose SQNR is below 20 dB, that is, whose
        error is above a tenth of its value. What went wrong is the node that has the largest part
        in the symptom's error, which may be the symptom itself or a node before it; its main cause
        is the largest part of what that node added.
        """
        return find_wrong(self.rows)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values; None where there is no number."""
        wrong = self.first_wrong
        return {
            "hardware": self.hardware,
            "batches": self.batches,
            "samples": self.samples,
            "outputs": list(self.outputs),
            "total_differences": self.total_differences,
            "first_wrong": None if wrong is None else wrong.to_json(),
            "blame": self.blame,
            "nodes": [r.to_json() for r in self.rows],
        }

    def to_csv(self) -> str:
        """One line per node, with a head line; empty cells where there is no number."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(csv_rows(self.rows, self.blame))
        return text.getvalue()

    def values(self) -> str:
        """A table of ranges, means and standard deviations: float, simulated, integer."""
        return "\n".join(value_table(self.rows))

    def __str__(self) -> str:
        head = (
            f"float | simulated | integer on {self.hardware}: {len(self.rows)} nodes, {self.samples} samples in "
            f"{self.batches} batches"
        )
        return "\n".join([head, *error_table(self.rows, self.blame, self.first_wrong, self.total_differences)])
