"""Search, then train, then confirm: the last stage of a search that may change weights."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from hago.errors import HagoError
from hago.exactness import compare
from hago.finetuning import finetune
from hago.frontend.data import Batches
from hago.prepare import HardwareLike, ModelLike
from hago.strategy import Strategy
from hago.trained_state import save_state, trained_state


def trained_after(
    model: ModelLike,
    hardware: HardwareLike,
    batches: Batches,
    found: tuple[Strategy, float],
    options: Mapping[str, Any],
    save: str | PathLike[str] | None,
) -> tuple[Strategy, float]:
    """What a search found, trained further; as it was where that is no better.

    Args:
        found: the strategy and its score.
        options: of `hago.finetune`, and `save_weights`: a path for the trained weights, as a state dict of
            `model`. The strategy that is returned is for them.
        save: where the strategy goes too.

    Returns:
        The strategy and its score: accuracy on the data where it has labels, else the SQNR in dB.

    Raises:
        HagoError: there is nowhere for the weights to go; the integer model differs from its simulation.
    """
    rest = dict(options)
    weights = rest.pop("save_weights", None)
    if weights is None or not isinstance(model, nn.Module):
        raise HagoError(
            "a search with finetune= changes weights: the model must be an nn.Module, and finetune must say where they "
            "go, e.g. finetune={'budget': '5m', 'save_weights': 'tuned.safetensors'}"
        )
    tuned = finetune(model, hardware, found[0], batches, **rest)
    figure = "sim_acc" if "sim_acc" in tuned.after else "sqnr"
    if not tuned.kept or tuned.after[figure] < tuned.before[figure]:
        return found
    plan = tuned.quantizer.plan
    differences = compare(plan, next(iter(batches)).inputs)
    if not differences.same:
        raise HagoError(f"the trained integer model differs from its simulation: {dict(differences.differences)}")
    save_state(trained_state(model, plan.graph, plan.ops), Path(weights))
    if save is not None:
        tuned.quantizer.strategy.save(Path(save))
    return tuned.quantizer.strategy, float(tuned.after[figure])
