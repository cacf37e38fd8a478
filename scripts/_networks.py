"""The networks whose speed is measured, in plain torch with random weights, at 224 x 224."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn


def _conv(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _conv(channels, out, 3, stride), _conv(out, out, 3)
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else _conv(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) to (N, out, H / stride, W / stride)."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """The ImageNet network of basic blocks; [2, 2, 2, 2] is ResNet-18, [3, 4, 6, 3] ResNet-34.

    References:
        He et al., "Deep residual learning for image recognition", arXiv:1512.03385.
    """

    def __init__(self, blocks: Sequence[int] = (2, 2, 2, 2)) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for stage, count in enumerate(blocks):
            for index in range(count):
                out = 64 << stage
                layers.append(BasicBlock(channels, out, 2 if stage and not index else 1))
                channels = out
        self.features = nn.Sequential(*layers)
        self.pool, self.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 224, 224) to (N, 1000)."""
        return self.classifier(self.pool(self.features(x)).flatten(1))


class InvertedResidual(nn.Module):
    """Expand, depthwise, project; a shortcut where shapes allow."""

    def __init__(self, channels: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        expand = [_conv(channels, hidden, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = [_conv(hidden, hidden, 3, stride, hidden), nn.ReLU6()]
        self.layers = nn.Sequential(*expand, *depthwise, _conv(hidden, out, 1))
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) to (N, out, H / stride, W / stride)."""
        return x + self.layers(x) if self.adds else self.layers(x)


class MobileNetV2(nn.Module):
    """Of width 1.0.

    References:
        Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", arXiv:1801.04381,
        table 2.
    """

    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 32, 3, 2), nn.ReLU6()]
        channels = 32
        for expansion, out, count, stride in self.STAGES:
            for index in range(count):
                layers.append(InvertedResidual(channels, out, 1 if index else stride, expansion))
                channels = out
        self.features = nn.Sequential(*layers, _conv(channels, 1280, 1), nn.ReLU6())
        self.pool, self.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 224, 224) to (N, 1000)."""
        return self.classifier(self.pool(self.features(x)).flatten(1))


def with_statistics(network: nn.Module, images: Tensor) -> nn.Module:
    """The network in eval mode, its batch norms fitted to `images`."""
    network.train()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        network(images)
    return network.eval()


#: What makes each network, by its name in tables.
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {"ResNet-18": ResNet, "MobileNetV2": MobileNetV2}
