"""The command `hago finetune`, which trains a strategy further; a killed run continues from its checkpoint."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from torch import nn

from hago.analysis.strategy_report import figures_in_words
from hago.cli.console import OK, Console, Outcome
from hago.cli.options import (
    check_command,
    load_batches,
    load_held_out,
    load_strategy,
    named,
    resumable,
    training_so_far,
    watched,
)
from hago.cli.output_files import STRATEGY, WEIGHTS, check_output, default_stem, folders_of
from hago.qat import Finetuned, FinetuneOptions, finetune_with, save_state, trained_state
from hago.serialization.json_text import check_distinct
from hago.serialization.text_table import counted


def finetune_command(args: Namespace, console: Console) -> Outcome:
    """Run the command: train, save the strategy and the weights, and report measures before and after."""
    strategy, hardware, model = load_strategy(args)
    stem = default_stem(args, hardware, "finetuned", strategy.to_json(), args.budget)
    log = check_output(Path(args.log or Path("logs") / f"{stem}.jsonl"))
    checkpoint = check_output(Path(args.checkpoint or Path("logs") / f"{stem}.safetensors"))
    saved = check_output(Path(args.save or Path("strategies") / f"{stem}.json"), STRATEGY)
    weights = check_output(Path(args.save_weights or saved.with_suffix(".safetensors")), WEIGHTS)
    check_distinct({"--log": log, "--checkpoint": checkpoint, "--save": saved, "--save-weights": weights})
    console.continued.extend((log, checkpoint))
    continues = os.path.exists(checkpoint) and not args.no_resume
    console.note(f"{'continuing from' if continues else 'checkpoints go to'} {checkpoint}")
    with (
        folders_of(log, checkpoint, saved, weights),
        resumable(lambda: training_so_far(checkpoint)),
        watched(args) as callbacks,
    ):
        batches = load_batches(args)
        options = FinetuneOptions(
            steps=args.steps,
            budget=args.budget,
            lr=args.lr,
            range_lr=args.range_lr,
            batch_size=args.step_samples,
            objective=named(args.objective, "objective"),
            scheme=args.scheme,
            seed=args.seed,
            log=log,
            checkpoint=checkpoint,
            resume=not args.no_resume,
            held_out=load_held_out(args),
            callbacks=callbacks,
        )
        module = model if isinstance(model, nn.Module) else None
        tuned = finetune_with(model, hardware, strategy, batches, options, holder=module)
        plan = tuned.quantizer.plan
        state = None if module is None else trained_state(module, plan.graph, plan.ops)
        tuned.quantizer.strategy.save(saved)
        if state is not None:
            save_state(state, weights)
    if module is not None:
        return _outcome(args, tuned, log, saved, weights)
    console.note("the model is not an nn.Module, so its trained weights cannot be written")
    return _outcome(args, tuned, log, saved, None)


def before_and_after(run: Finetuned) -> list[str]:
    """Two lines with the measures of the model before and after training."""
    return [f"before  {figures_in_words(run.before)}", f"after   {figures_in_words(run.after)}"]


def _outcome(args: Namespace, tuned: Finetuned, log: Path, saved: Path, weights: Path | None) -> Outcome:
    how = "the trained strategy" if tuned.kept else "no better on the samples kept aside, so the strategy is unchanged"
    lines = [
        f"trained {counted(tuned.steps, 'step')} in {tuned.seconds:.1f} s: {how}",
        *before_and_after(tuned),
        f"log       {log}",
        f"strategy  {saved}",
    ]
    if weights is not None:
        lines.append(f"weights   {weights}")
        lines.append(f"next      {check_command(args, saved, weights)}")
    values = {
        "before": dict(tuned.before),
        "after": dict(tuned.after),
        "kept": tuned.kept,
        "steps": tuned.steps,
        "seconds": tuned.seconds,
        "log": str(log),
        "strategy": str(saved),
        "weights": None if weights is None else str(weights),
    }
    return Outcome("\n".join(lines), values, OK)
