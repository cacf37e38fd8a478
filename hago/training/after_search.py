"""Search, then train, then confirm: the last stage of a search that may change weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from hago.errors import HagoError
from hago.exactness import compare
from hago.frontend.data import Batches
from hago.frontend.torch_export import ModelLike
from hago.objective import ObjectiveLike, objective
from hago.plan import Plan
from hago.prepare import HardwareLike, as_graph
from hago.searching.descriptions import confirmed
from hago.strategy import Strategy
from hago.training.finetuning import Finetuned, finetune
from hago.training.state import save_state, trained_state


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a search with training ends with.

    Args:
        strategy, score: the trained ones where they are no worse, else those that were found. The score is
            accuracy on the data where it has labels, else the SQNR in dB.
        run: the fine-tuning.
        better: whether the strategy is the trained one, for the weights that were written.
    """

    strategy: Strategy
    score: float
    run: Finetuned
    better: bool


def trained_after(
    model: ModelLike,
    hardware: HardwareLike,
    batches: Batches,
    found: tuple[Strategy, float],
    options: Mapping[str, Any],
    save: str | PathLike[str] | None,
    held_out: Iterable[Any] | None = None,
    measure: ObjectiveLike = "sqnr",
) -> Tuned:
    """What a search found, trained further; as it was where that is no better.

    Args:
        found: the strategy and its score.
        options: of `hago.finetune`, and `save_weights`: a path for the trained weights, as a state dict of
            `model`. The strategy that is returned is for them.
        save: where the strategy goes too.
        held_out: further batches that the trained strategy is reported on, by `measure`.

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
        return Tuned(*found, tuned, better=False)
    plan, strategy = tuned.quantizer.plan, tuned.quantizer.strategy
    _confirm(plan, batches)
    if held_out is not None:
        graph, _ = as_graph(model, batches, plan.hardware, made_for=[found[0].model_hash])
        reported = confirmed(plan, Batches(held_out, graph.inputs), objective(measure), graph)
        strategy = replace(strategy, made_by={**strategy.made_by, "held_out": reported})
    save_state(trained_state(model, plan.graph, plan.ops), Path(weights))
    if save is not None:
        strategy.save(Path(save))
    return Tuned(strategy, float(tuned.after[figure]), tuned, better=True)


def training_files(options: Mapping[str, Any]) -> dict[str, Any]:
    """The files that training with `options` writes, by the argument that names each."""
    return {f"finetune[{name!r}]": options.get(name) for name in ("log", "checkpoint", "save_weights")}


def _confirm(plan: Plan, batches: Batches) -> None:
    """Run the integer model and its simulation."""
    differences = compare(plan, next(iter(batches)).inputs)
    if not differences.same:
        raise HagoError(f"the trained integer model differs from its simulation: {dict(differences.differences)}")
