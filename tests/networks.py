"""Networks in plain torch, with random weights: what tests import and quantize from end to end."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two convolutions with batch norms and a residual, as in ResNet-18."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu((x if self.downsample is None else self.downsample(x)) + y)


class ResNet(nn.Module):
    """ResNet-18 where `widths` are (64, 128, 256, 512) and there are two blocks a stage."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512), blocks: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, channels = [], widths[0]
        for index, width in enumerate(widths):
            first = BasicBlock(channels, width, 1 if index == 0 else 2)
            stages.append(nn.Sequential(first, *(BasicBlock(width, width, 1) for _ in range(blocks - 1))))
            channels = width
        self.stages = nn.ModuleList(stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = stage(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Small(nn.Module):
    """A convolution, a residual add, a pooling and a linear: the least that shows everything."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.body(x))
        return self.fc(x.mean((2, 3)))


class Uneven(nn.Module):
    """A separable network whose channels have very different ranges, as training leaves some."""

    def __init__(self, high: float | None = None) -> None:
        super().__init__()
        self.expand, self.depthwise = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.project, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 10)
        self.act = nn.ReLU() if high is None else nn.Hardtanh(0.0, high)
        sizes = torch.exp2(torch.arange(16) % 8 - 4.0)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(images(*parameter.shape, seed=number).mul_(0.5))
            self.expand.weight.mul_(sizes[:, None, None, None])
            self.expand.bias.mul_(sizes)
            self.project.weight.div_(sizes[None, :, None, None])

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.depthwise(self.act(self.expand(x))))
        result: Tensor = self.head(self.project(x).mean((2, 3)))
        return result


class Outliers(nn.Module):
    """A transformer's block with norms behind sums; single channels of norms and of the perceptron are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.up, self.act, self.down = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(images(*parameter.shape, seed=number).mul_(0.3))
            for norm in (self.norm, self.last):
                norm.weight.add_(1.0)
            self.norm.weight[3] = 30.0
            self.up.weight[:, 3].div_(30.0)
            self.up.bias[5] = 40.0
            self.down.weight[:, 5].div_(40.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        result: Tensor = self.last(x + self.down(self.act(self.up(x))))
        return result


class Stream(nn.Module):
    """A small transformer of tokens with norms before its layers; two channels of what they all read are large.

    Args:
        tokens: entries of a table that are read; None for 12 features of every token.
        rms: RMSNorm, a gate and no biases, instead of layer norm and GELU.
        bias: whether layer norms and layers have biases.
        behind: norms behind sums instead.
        positions: whether a table of positions is added.
        tied: whether the last layer has the table of tokens for its weight.
    """

    def __init__(
        self,
        tokens: int | None = None,
        *,
        width: int = 32,
        heads: int = 4,
        blocks: int = 2,
        rms: bool = False,
        bias: bool = True,
        behind: bool = False,
        positions: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.behind, bias = heads, behind, bias and not rms
        self.first = nn.Linear(12, width) if tokens is None else nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.zeros(6, width)) if positions else None
        self.norms = nn.ModuleList(
            nn.RMSNorm(width, 1e-5) if rms else nn.LayerNorm(width, bias=bias) for _ in range(2 * blocks + (not behind))
        )
        layer = partial(nn.Linear, bias=bias)
        self.attention = nn.ModuleList(layer(width, width) for _ in range(4 * blocks))
        self.up = nn.ModuleList(layer(width, 2 * width) for _ in range(blocks))
        self.gate = nn.ModuleList(layer(width, 2 * width) for _ in range(blocks if rms else 0))
        self.down = nn.ModuleList(layer(2 * width, width) for _ in range(blocks))
        self.head = nn.Linear(width, tokens or 8, False)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(images(*parameter.shape, seed=number) * (0.2 if parameter.ndim > 1 else 0.1))
            for norm in self.norms:
                norm.weight.add_(1.0)
            table = self.first.weight if tokens is None else self.first.weight.T
            table[[1, width // 2]] *= 40.0
        if tied:
            self.head.weight = self.first.weight

    def attend(self, x: Tensor, block: int) -> Tensor:
        *layers, out = self.attention[4 * block : 4 * block + 4]
        q, k, v = (layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in layers)
        result: Tensor = out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result

    def perceive(self, x: Tensor, block: int) -> Tensor:
        hidden = self.up[block](x)
        if len(self.gate):
            hidden = hidden * nn.functional.silu(self.gate[block](x))
        result: Tensor = self.down[block](hidden if len(self.gate) else nn.functional.gelu(hidden))
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.positions is not None:
            x = x + self.positions
        for number, norm in enumerate(self.norms[: 2 * len(self.up)]):
            branch = self.perceive if number % 2 else self.attend
            x = norm(x + branch(x, number // 2)) if self.behind else x + branch(norm(x), number // 2)
        result: Tensor = self.head(x if self.behind else self.norms[-1](x))
        return result


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode, with weights and batch statistics that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            drawn = torch.randint(-2000, 2001, tensor.shape, generator=generator).float() / 1000
            if name.endswith("running_var"):
                tensor.copy_(drawn.abs() + 0.5)
            else:
                fan_in = max(1, tensor[0].numel()) if tensor.ndim > 1 else 4
                tensor.copy_(drawn / fan_in**0.5 + (1.0 if name.endswith("weight") and tensor.ndim == 1 else 0.0))
    return model.eval()


def images(*shape: int, seed: int = 0) -> Tensor:
    """Values in [-2, 2] that are the same on each machine."""
    return torch.randint(-2000, 2001, shape, generator=torch.Generator().manual_seed(seed)).float() / 1000
