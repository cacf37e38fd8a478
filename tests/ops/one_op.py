"""Samples of the op rules as one-op models, and an op with an integer form on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hago.ops import OPS
from hago.ops._rule import IntegerForm, OpRule, Sample

# torch.export wants a forward with as many arguments as there are inputs.
_FORWARDS: dict[int, Callable[..., Tensor]] = {
    1: lambda self, a: self.call(a),
    2: lambda self, a, b: self.call(a, b),
    3: lambda self, a, b, c: self.call(a, b, c),
    4: lambda self, a, b, c, d: self.call(a, b, c, d),
}


def draw(sample: Sample, seed: int) -> list[Tensor]:
    """Real tensors (or indices) for every position of a sample."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, int(sample.high), shape, generator=generator)
        if position in sample.indices
        else torch.empty(shape).uniform_(sample.low, sample.high, generator=generator)
        for position, shape in enumerate(sample.shapes)
    ]


class _OneOp(nn.Module):
    def __init__(self, sample: Sample, tensors: list[Tensor]) -> None:
        super().__init__()
        self.sample = sample
        for position in sample.consts:
            self.register_buffer(f"const{position}", tensors[position])

    def call(self, *inputs: Tensor) -> Tensor:
        left = iter(inputs)
        consts = self.sample.consts
        positions = range(len(self.sample.shapes))
        return self.sample.fn(*(getattr(self, f"const{p}") if p in consts else next(left) for p in positions))


def model_of(sample: Sample, tensors: list[Tensor]) -> tuple[nn.Module, list[Tensor]]:
    """A module in eval mode that is one call, and its inputs."""
    inputs = [t for p, t in enumerate(tensors) if p not in sample.consts]
    kind = type("OneOp", (_OneOp,), {"forward": _FORWARDS[len(inputs)]})
    return kind(sample, tensors).eval(), inputs


@dataclass(frozen=True)
class Case:
    """One node of an op with an integer form.

    Args:
        shapes: of its inputs, at batch 2.
        consts: constant inputs by slot: indices as they are, None where integers are drawn.
    """

    rule: OpRule
    attrs: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    consts: Mapping[int, Tensor | None]

    @property
    def form(self) -> IntegerForm:
        assert self.rule.integer is not None
        return self.rule.integer

    def kind(self, slot: int) -> str:
        return self.form.slot(slot)

    def at_batch_1(self, slot: int) -> tuple[int, ...]:
        shape = self.shapes[slot]
        return shape if slot in self.consts else (1, *shape[1:])

    @property
    def misfit(self) -> str | None:
        return self.form.unsupported(self.attrs, [self.at_batch_1(s) for s in range(len(self.shapes))])


def internal(name: str, rank: int) -> Case:
    """An op that has no torch call from which it could be imported."""
    shape = (2, 3, 4, 5)[:rank]
    if name == "affine":
        return Case(OPS[name], {"rank": rank}, (shape, (3,), (3,)), {1: None, 2: None})
    return Case(OPS[name], {"rank": rank, "axis": 1, "limits": [0.0, 0.7, 1.9]}, (shape,), {})
