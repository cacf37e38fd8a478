"""The networks and images on which searches are measured, and the time of a float forward and of a naive trial."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from _assets import load
from _naive_simulation import naive_forward
from _networks import NETWORKS, like_trained
from _timing import float_forward, seconds_of
from torch import Tensor, nn

from hago import Graph
from hago.search import Prepared


@dataclass(frozen=True)
class Subject:
    """A network and its images."""

    name: str
    network: nn.Module | Graph
    batches: list[tuple[Tensor, ...]]


def subjects(options: Any) -> Iterable[Subject]:
    """SqueezeNet with its images, and ResNet-18 and MobileNetV2 with batch norms fitted to random images."""
    if options.assets and wanted(options, "squeezenet1_1"):
        yield asset(options, "squeezenet1_1")
    images = torch.randn(options.images, 3, options.size, options.size, generator=torch.Generator().manual_seed(0))
    for name, make in NETWORKS.items():
        if wanted(options, name):
            torch.manual_seed(0)
            network = like_trained(make(), images[: options.batch])
            yield Subject(name, network, [(x,) for x in images.split(options.batch)])


def asset(options: Any, name: str) -> Subject:
    """A pretrained network with images that it was not tested on."""
    found = load(options.assets, name, options.images, 1)
    rows = [torch.cat(parts) for parts in zip(*found.calibration, strict=True)]
    return Subject(name, found.module, list(zip(*(r.split(options.batch) for r in rows), strict=True)))


def wanted(options: Any, name: str) -> bool:
    """Whether a network is to be measured."""
    return options.nets is None or name in options.nets


def naive_and_float(prepared: Prepared, subject: Subject, options: Any) -> list[tuple[float, float]]:
    """Seconds of a naive trial and of a float forward, pair by pair."""
    forward = float_forward(prepared.graph, subject.batches)
    naive = naive_forward(prepared.resolver(prepared.space.widest()), subject.batches)
    forward()
    return [(seconds_of(naive, options.clock), seconds_of(forward, options.clock)) for _ in range(options.pairs)]
