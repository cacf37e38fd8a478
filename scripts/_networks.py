"""The networks whose speed is measured, in plain torch with random weights: of images of 224 x 224, and of text.

Weights are drawn as the networks' own papers and libraries draw them, from normal distributions: how often neighbouring
weights are both large matters to kernels whose sums of pairs saturate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, VOCABULARY = 128, 30522


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


class SqueezeExcitation(nn.Module):
    """Channels scaled by factors that are computed from their means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) to the same shape."""
        return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class MBConv(nn.Module):
    """Expand, depthwise, squeeze and excite, project; a shortcut where shapes allow."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        expand = [_conv(channels, hidden, 1), nn.SiLU()] if expansion > 1 else []
        depthwise = [_conv(hidden, hidden, kernel, stride, hidden), nn.SiLU()]
        squeeze = SqueezeExcitation(hidden, max(1, channels // 4))
        self.layers = nn.Sequential(*expand, *depthwise, squeeze, _conv(hidden, out, 1))
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) to (N, out, H / stride, W / stride)."""
        return x + self.layers(x) if self.adds else self.layers(x)


class EfficientNetB0(nn.Module):
    """Without stochastic depth, which evaluation does not have.

    References:
        Tan and Le, "EfficientNet: rethinking model scaling for convolutional neural networks", arXiv:1905.11946,
        table 1.
    """

    #: Expansion, channels, blocks, stride and kernel.
    STAGES = (
        *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)),
        *((6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)),
    )

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 32, 3, 2), nn.SiLU()]
        channels = 32
        for expansion, out, count, stride, kernel in self.STAGES:
            for index in range(count):
                layers.append(MBConv(channels, out, kernel, 1 if index else stride, expansion))
                channels = out
        self.features = nn.Sequential(*layers, _conv(channels, 1280, 1), nn.SiLU())
        self.pool, self.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 224, 224) to (N, 1000)."""
        return self.classifier(self.pool(self.features(x)).flatten(1))


class EncoderLayer(nn.Module):
    """Attention and a perceptron, each with a shortcut; norms stand before them, or after their sums."""

    def __init__(self, width: int, heads: int, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.norm_first = heads, norm_first
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(N, tokens, width) to the same shape."""
        heads = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (self.query(x), self.key(x), self.value(x)))
        return self.out(F.scaled_dot_product_attention(*heads, mask).transpose(1, 2).flatten(2))

    def perceptron(self, x: Tensor) -> Tensor:
        """(N, tokens, width) to the same shape."""
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(N, tokens, width) to the same shape."""
        if self.norm_first:
            x = x + self.attention(self.first(x), mask)
            return x + self.perceptron(self.second(x))
        x = self.first(x + self.attention(x, mask))
        return self.second(x + self.perceptron(x))


class VisionTransformer(nn.Module):
    """ViT-S/16, as DeiT-S.

    References:
        Dosovitskiy et al., "An image is worth 16x16 words", arXiv:2010.11929; Touvron et al., "Training data-efficient
        image transformers", arXiv:2012.12877, table 1.
    """

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 197, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, norm_first=True) for _ in range(layers)))
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 224, 224) to (N, 1000)."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.positions
        return self.classifier(self.norm(self.layers(x))[:, 0])


class MiniLM(nn.Module):
    """The encoder of sentences all-MiniLM-L6-v2.

    References:
        Wang et al., "MiniLM: deep self-attention distillation", arXiv:2002.10957.
    """

    def __init__(self, width: int = 384, heads: int = 12, layers: int = 6) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([EncoderLayer(width, heads, norm_first=False) for _ in range(layers)])

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token ids and a mask, 1 where a token is, int64 (N, tokens), to (N, width)."""
        x = self.norm(self.words(ids) + self.positions.weight[: ids.shape[1]])
        real = mask.to(x.dtype)
        hidden = (1.0 - real)[:, None, None, :] * -10000.0
        for layer in self.layers:
            x = layer(x, hidden)
        return (x * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)


def like_trained(network: nn.Module, *inputs: Tensor) -> nn.Module:
    """The network in eval mode, its weights drawn from normal distributions, its batch norms fitted to `inputs`."""
    network.train()
    for module in network.modules():
        if isinstance(module, nn.Conv2d):  # He et al., "Delving deep into rectifiers", arXiv:1502.01852
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        network(*inputs)
    return network.eval()


def random_images(count: int, size: int) -> tuple[Tensor, ...]:
    """Images of (count, 3, size, size)."""
    return (torch.randn(count, 3, size, size),)


def random_text(count: int, size: int) -> tuple[Tensor, ...]:
    """Token ids of `count` sentences of `TOKENS` tokens at most, and their mask."""
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (count, 1))
    mask = (torch.arange(TOKENS) < lengths).long()
    return torch.randint(1, VOCABULARY, (count, TOKENS)) * mask, mask


@dataclass(frozen=True)
class Network:
    """What makes a network, and random inputs of it from a number of samples and the size of images."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], tuple[Tensor, ...]] = random_images


#: Convolutional networks of images, by their names in tables.
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {"ResNet-18": ResNet, "MobileNetV2": MobileNetV2}
#: All networks, by their names in tables.
ALL_NETWORKS: Mapping[str, Network] = {
    **{name: Network(make) for name, make in NETWORKS.items()},
    "EfficientNet-B0": Network(EfficientNetB0),
    "ViT-S/16": Network(VisionTransformer),
    "MiniLM": Network(MiniLM, random_text),
}
