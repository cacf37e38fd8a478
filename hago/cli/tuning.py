"""`hago search --finetune`: training as the last stage of a search, resumable as the search is."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hago.cli.options import (
    Voices,
    default_path,
    load_batches,
    make_folder_of,
    named,
    resumable,
    training_so_far,
)
from hago.errors import HagoError, did_you_mean
from hago.frontend.data import Batches
from hago.hardware import Hardware
from hago.json_text import canonical
from hago.judgement import in_words
from hago.prepare import input_names
from hago.searching.search import Found
from hago.strategy import Strategy
from hago.training.after_search import Tuned, trained_after

#: What `--finetune` takes, and how each is read.
OPTIONS: Final[Mapping[str, Callable[[str], Any]]] = {
    "steps": int,
    "budget": str,
    "lr": float,
    "range_lr": float,
    "batch_size": int,
    "objective": lambda text: named(text, "objective"),
    "scheme": str,
    "seed": int,
    "every": int,
}


def tuning_options(text: str) -> dict[str, Any]:
    """The options of `hago.finetune` that "NAME=VALUE,..." means.

    Raises:
        HagoError: an unknown name, or a value that is not of its kind.
    """
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (p.strip() for p in part.partition("="))
        if name not in OPTIONS or not value:
            near = did_you_mean(name, OPTIONS)
            raise HagoError(f"--finetune got {part!r}; expected NAME=VALUE,... with {', '.join(OPTIONS)}.{near}")
        try:
            found[name] = OPTIONS[name](value)
        except ValueError:
            raise HagoError(f"--finetune got {part!r}; expected a number, e.g. steps=400 or lr=0.002") from None
    return found


def tune(
    args: Namespace, voices: Voices, model: Any, hardware: Hardware, data: Any, found: Found, saved: Path
) -> Tuned:
    """Train what a search found. A killed run goes on from the checkpoint of the same strategy."""
    mark = hashlib.sha256(canonical(found.strategy.to_json()).encode()).hexdigest()[:12]
    checkpoint = make_folder_of(default_path(args, hardware, "logs", f"-finetune-{mark}.safetensors"))
    log = default_path(args, hardware, "logs", "-finetune.jsonl")
    voices.note(f"{'training on from' if checkpoint.exists() else 'training; checkpoints go to'} {checkpoint}")
    files = {"log": log, "checkpoint": checkpoint, "save_weights": weights_of(saved)}
    with resumable(lambda: f"{training_so_far(checkpoint)}; the best of the search is {saved}".lstrip("; ")):
        return trained_after(
            model,
            hardware,
            Batches(data, input_names(model)),
            (found.strategy, found.score),
            {**tuning_options(args.finetune), **files},
            saved,
            None if args.held_out is None else load_batches(args, args.held_out),
            named(args.maximize or args.objective, "objective"),
        )


def weights_of(saved: Path) -> Path:
    """Where the trained weights of a strategy go."""
    return saved.with_suffix(".safetensors")


def tuned_lines(tuned: Tuned, saved: Path) -> list[str]:
    """What training brought, in words."""
    run = tuned.run
    end = f"for the weights in {weights_of(saved)}" if tuned.better else "no better than what was found, which is kept"
    return [
        f"trained {run.steps} steps in {run.seconds:.1f} s: {end}",
        *(f"  {when:<7} {in_words(results)}" for when, results in (("before", run.before), ("after", run.after))),
    ]


def tuned_values(tuned: Tuned, saved: Path) -> dict[str, Any]:
    """The same for programs."""
    run = tuned.run
    return {
        "before": dict(run.before),
        "after": dict(run.after),
        "better": tuned.better,
        "steps": run.steps,
        "weights": str(weights_of(saved)) if tuned.better else None,
    }


def strategy_of(found: Found, tuned: Tuned | None) -> Strategy:
    """The strategy that a search ends with."""
    return found.strategy if tuned is None else tuned.strategy
