"""Searches over small networks of every kind: none raises, and what they find runs as it was promised."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from networks import images, randomized
from products import whole
from torch import Tensor, nn
from torch.nn import functional

import hago
from hago.runtime.exactness import compare_plan_exactly


class PreActivation(nn.Module):
    """Batch norms in front of convolutions, so that they cannot be folded, around a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(2))
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=False):
            y = conv(torch.relu(norm(y)))
        return self.fc(torch.relu(self.norms[2](x + y)).mean((2, 3)))


class Dense(nn.Module):
    """Blocks that read all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (3, 5, 7))
        self.convs = nn.ModuleList(nn.Conv2d(c, 2, 3, padding=1, bias=False) for c in (3, 5))
        self.fc = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = torch.cat([x, conv(torch.relu(norm(x)))], 1)
        return self.fc(functional.avg_pool2d(torch.relu(self.norms[2](x)), 2).mean((2, 3)))


class SqueezeAndExcite(nn.Module):
    """A depthwise convolution whose channels a small network weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.reduce, self.gate, self.project = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.depthwise(functional.hardswish(self.expand(x))))
        weight = torch.sigmoid(self.gate(torch.relu(self.reduce(x.mean((2, 3), keepdim=True)))))
        return self.project(x * weight)


class Attention(nn.Module):
    """A block of a transformer over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 4, 8))
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.fc = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        q, k, v = (t.reshape(-1, 4, 2, 4).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(self.second(x))))
        return self.fc(x.mean(1))


class Recurrent(nn.Module):
    """Rows of an image one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lstm, self.fc = nn.Linear(24, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.relu(self.inner(x.permute(0, 2, 1, 3).flatten(2)))
        return self.fc(self.lstm(rows)[0][:, -1])


class Heads(nn.Module):
    """Classes, boxes and a mask from two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 8, 3, 2, 1)
        self.lateral, self.classes = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 5, 3, padding=1)
        self.boxes, self.mask = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = torch.relu(self.stem(x))
        coarse = self.lateral(torch.relu(self.down(fine)))
        fine = fine + functional.interpolate(coarse, scale_factor=2.0)
        mask = functional.interpolate(self.mask(fine), scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.classes(fine).flatten(2).softmax(1), torch.exp(self.boxes(coarse)), mask


class Generator(nn.Module):
    """From a small image to a larger one: transposed convolutions and pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.ConvTranspose2d(3, 6, 4, 2, 1), nn.BatchNorm2d(6)
        self.wide, self.last = nn.Conv2d(6, 12, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu(self.norm(self.up(x)), 0.2)
        return torch.tanh(self.last(functional.pixel_shuffle(functional.elu(self.wide(x)), 2)))


class Decoder(nn.Module):
    """Weights that are multiplied from the right, as those of GPT-2 are, under a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)
        self.project, self.out = nn.Parameter(torch.ones(8, 24)), nn.Parameter(torch.ones(8, 5))
        self.bias = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(1).unflatten(1, (-1, 8))
        rows = torch.addmm(self.bias, x.flatten(0, 1), self.project).unflatten(0, x.shape[:2])
        q, k, v = rows.split(8, 2)
        return (x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)) @ self.out


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (PreActivation, Dense, SqueezeAndExcite, Attention, Recurrent, Heads, Generator, Decoder)
}
SEARCHERS = ("gradient", "pareto", "sensitivity", "greedy", "annealing")
CHIPS = ("x86_vnni", "tflite", "vta", "onnxruntime_cpu", "cmsis_nn", "int16_accumulator")
#: Two of every network, with each searcher and each chip in turn.
SOME = [
    (name, SEARCHERS[(number + turn) % len(SEARCHERS)], CHIPS[(number + 3 * turn) % len(CHIPS)])
    for number, name in enumerate(sorted(NETWORKS))
    for turn in range(2)
]
CASES = list(product(sorted(NETWORKS), SEARCHERS, CHIPS)) if whole() else SOME


@pytest.mark.parametrize(("name", "searcher", "chip"), CASES)
def test_every_search_ends_with_what_it_promised(name: str, searcher: str, chip: str) -> None:
    model, data = randomized(NETWORKS[name]()), [images(4, 3, 8, 8, seed=s) for s in range(2)]
    strategy, _ = hago.search_quantize_strategy(model, chip, data, searcher=searcher, budget=5, progress=False)
    quantizer = hago.create_quantizer(model, chip, strategy)
    assert quantizer.plan.nodes
    assert not compare_plan_exactly(quantizer.plan, [data[0]]).differences
    assert hago.replay(model, chip, strategy, data).same
