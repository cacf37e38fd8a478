"""The check of every correction: the simulation equals the integer model, and what is stored replays to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import hago
from hago.hardware import Hardware
from hago.runtime.exactness import compare_plan_exactly


def check_stored(
    made: hago.Quantizer, model: nn.Module, hardware: str | Hardware, data: Sequence[Tensor], folder: Path
) -> None:
    """Store the strategy and the integer model of a quantizer in a folder, and read both again."""
    assert compare_plan_exactly(made.plan, [data[0]]).same
    strategy, integers = folder / "strategy.json", made.realize()
    made.strategy.save(strategy)
    again = hago.create_quantizer(model, hardware, strategy)
    assert again.plan.key == made.plan.key
    assert torch.equal(again.realize()(data[0]), integers(data[0]))
    assert hago.replay(model, hardware, strategy, data).same
    integers.save(folder / "integers")
    assert torch.equal(hago.load_integer_model(folder / "integers")(data[0]), integers(data[0]))
