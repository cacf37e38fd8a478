"""A run of a stored integer model on data, compared with the simulation of the Plan that is stored with it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hago.analysis.strategy_report import ModelPair
from hago.data import Batches
from hago.errors import DataError, HagoError
from hago.graph import check_batches
from hago.runtime import IntegerModel
from hago.search import wilson_interval
from hago.search.objective import OBJECTIVES, check_rows, unfit_labels, warn_of_labels, warn_of_numbering
from hago.serialization.json_text import replace_file
from hago.serialization.text_table import counted


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The result of running an integer model over data, made by `run_model`; prints as a few lines.

    Args:
        hardware: name of the hardware.
        samples: number of samples of the data.
        accuracy: the fraction of samples that were classified correctly, and the ends of its 95 % interval; None
            without labels.
        compared: number of output values that were compared with the simulation.
        differences: number of them that differ, by place.
        outputs: every output over all samples; not among the JSON values.
    """

    hardware: str
    samples: int
    accuracy: tuple[float, float, float] | None
    compared: int
    differences: Mapping[str, int]
    outputs: tuple[Tensor, ...] = field(repr=False)

    @property
    def same(self) -> bool:
        """Whether every output equals its simulation bit for bit."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        document: dict[str, Any] = {"hardware": self.hardware, "samples": self.samples}
        if self.accuracy is not None:
            document |= {"acc": self.accuracy[0], "acc_interval": list(self.accuracy[1:])}
        return document | {"compared": self.compared, "same": self.same, "differences": dict(self.differences)}

    def __str__(self) -> str:
        lines = [f"on {self.hardware}, {counted(self.samples, 'sample')}"]
        if self.accuracy is not None:
            right, low, high = (100 * v for v in self.accuracy)
            lines.append(f"accuracy {right:.2f} % ({low:.2f} to {high:.2f} % with 95 % confidence)")
        if self.same:
            lines.append(f"simulated == integer: all {self.compared} output values are equal")
        else:
            places = "; ".join(f"{place}: {n}" for place, n in list(self.differences.items())[:5])
            wrong = sum(self.differences.values())
            lines.append(f"simulated != integer: {wrong} of {self.compared} output values differ ({places})")
        return "\n".join(lines)


def run_model(model: IntegerModel, dataset: Iterable[Any]) -> StoredRun:
    """Run an integer model over a data set, and compare it with its simulation.

    Args:
        dataset: as in `hago.search_quantize_strategy`.

    Raises:
        DataError: the data does not fit the model.
    """
    plan = model.plan
    batches = Batches(dataset, plan.graph.inputs)
    check_batches(plan.graph, batches)
    pair = ModelPair(model)
    rows: list[list[Tensor]] = []
    for batch in batches:
        outputs = pair.run(batch.inputs)
        check_rows(outputs, batch.size)
        rows.append(outputs)
    accuracy = None
    why_not = unfit_labels(batches, [outputs[0] for outputs in rows])
    warn_of_labels(why_not, "only whether the outputs are those of the simulation")
    if batches.labelled and not why_not:
        warn_of_numbering(batches, rows[0][0])
        pairs = zip(batches, rows, strict=True)
        right = sum(float(OBJECTIVES["accuracy"].per_sample(o, o, batch.labels).sum()) for batch, o in pairs)
        accuracy = (right / batches.samples, *wilson_interval(right, batches.samples))
    outputs_of_all = tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
    return StoredRun(plan.hardware.name, batches.samples, accuracy, pair.compared, pair.differences, outputs_of_all)


def save_outputs(path: str | PathLike[str], names: Sequence[str], outputs: Sequence[Tensor]) -> None:
    """Write outputs as an .npz file with one array each; the file is replaced atomically.

    Raises:
        HagoError: it could not be written.
        DataError: an output has a dtype that numpy lacks.
    """
    buffer = io.BytesIO()
    try:
        arrays = [t.detach().cpu().numpy() for t in outputs]
    except TypeError as error:
        raise DataError(f"outputs cannot be written: {error}") from None
    np.savez(buffer, **dict(zip(names, arrays, strict=True)))  # type: ignore[arg-type]
    try:
        replace_file(Path(path), buffer.getvalue())
    except HagoError as error:
        raise HagoError(f"outputs cannot be written: {error}") from None
