"""Random chains of layers, with operators between of which some let factors and shifts of channels pass."""

from __future__ import annotations

import functools
from typing import Any

import torch
from networks import images
from torch import Tensor, nn

from hago.graph import Graph, from_torch


class Chain(nn.Module):
    """Layers with a few operators between, some of which let no shift pass."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = torch.Generator().manual_seed(seed)

        def one_of(*choices: Any) -> Any:
            return choices[int(torch.randint(len(choices), (1,), generator=draw))]

        layers: list[nn.Module] = []
        for _ in range(3):
            groups = one_of(1, 1, 2, 4)
            layers.append(
                nn.Conv2d(4, 4, one_of(1, 1, 3), padding=one_of(0, 0, 1), groups=groups, bias=one_of(0, 1, 1))
            )
            between = [nn.ReLU(), nn.ReLU6(), nn.MaxPool2d(2, 1), nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(2, 1), nn.Tanh()]
            layers += [one_of(*between), one_of(nn.Identity(), *between[:4])]
        self.features = nn.Sequential(*layers)
        self.norm = one_of(nn.Identity(), nn.LayerNorm(4))
        self.pool = one_of(nn.Identity(), nn.AdaptiveAvgPool2d(1))
        self.branch = one_of(None, nn.Conv2d(4, 4, 1))
        size = self._features(torch.zeros(1, 4, 10, 10)).numel()
        self.head = nn.Sequential(nn.Linear(size, 5), one_of(nn.ReLU(), nn.Identity()), nn.Linear(5, 3))

    def _features(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.pool(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return (x if self.branch is None else x + self.branch(x)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._features(x))


@functools.cache
def random_chain(seed: int) -> Graph:
    return from_torch(Chain(seed).eval(), (images(1, 4, 10, 10),))
