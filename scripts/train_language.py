"""Train a small causal language model of characters on the sources of Python's standard library.

    python scripts/train_language.py --kind gpt --seed 0 --out /tmp/gpt.pt

The same seed gives the same model on the same machine with the same number of threads.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from _language import LanguageModel, negative_log_likelihood, read_text, windows
from torch import Tensor, nn

KINDS = ("gpt", "llama")
WARM_UP = 50


def main() -> None:
    args = _parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model, text = LanguageModel(args.kind == "llama"), read_text(tested=False)
    print(f"{args.kind}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(text)} characters")
    train(model, text, args.steps, args.batch, args.lr, args.seed)
    test = windows(read_text(tested=True), 128, seed=1)
    with torch.no_grad():
        losses = torch.cat([negative_log_likelihood(model.eval()(part[:, :-1]), part) for part in test.split(16)])
    print(f"perplexity of a character on other files: {math.exp(float(losses.mean())):.4f}")
    torch.save(model.state_dict(), args.out)


def train(model: nn.Module, text: Tensor, steps: int, batch: int, lr: float, seed: int) -> None:
    """Train with AdamW; the learning rate rises for WARM_UP steps, then falls along a cosine."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr, betas=(0.9, 0.95))
    began = time.monotonic()
    for step in range(steps):
        done = (step - WARM_UP) / max(1, steps - WARM_UP)
        rate = lr * ((step + 1) / WARM_UP if step < WARM_UP else 0.05 + 0.475 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        samples = windows(text, batch, seed=1_000_000 * (seed + 1) + step)
        logits = model(samples[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5}  loss {float(loss.detach()):.3f}  {time.monotonic() - began:.0f} s", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="gpt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16, help="windows of a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="the file of weights that is written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
