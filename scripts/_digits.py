"""A small network on handwritten digits (scikit-learn's, 8 by 8), quantized in training as each system does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hago.emulation.dorefa import quantize_activation, quantize_gradient, quantize_weight
from hago.emulation.oneflow import QLayer, Quantizer
from hago.emulation.tensorflow import FakeQuant, FoldedLayer, LastValueQuantize, MovingAvgQuantize
from hago.qat import from_qat, prepare_qat
from hago.qat.model import QatModel

#: The table of models whose integers are those of a chip.
PLANS = "prepare_qat on x86_vnni (the integer model)"
#: Channels in and out, and the stride, of each convolution; all are 3 by 3.
CONVS = ((1, 16, 1), (16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 24, 2))
FEATURES = 24 * 2 * 2
TRAINED_ON = 1000
BATCH = 50


@dataclass(frozen=True)
class Data:
    """Images in [0, 1] and labels, to train on and to test on."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits(seed: int) -> Data:
    """The digits, split anew for every seed."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    return Data(x[:TRAINED_ON], y[:TRAINED_ON], x[TRAINED_ON:], y[TRAINED_ON:])


def train(model: nn.Module, data: Data, seed: int, epochs: int) -> float:
    """Train from scratch, Adam with a cosine schedule; the accuracy on the test images in percent."""
    normed = any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 if normed else 3e-3)
    order = torch.Generator().manual_seed(seed)
    steps = epochs * math.ceil(len(data.x) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(data.x), generator=order).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            optimizer.step()
            schedule.step()
    return accuracy(model.eval(), data)


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """On the test images, in percent: of the integer model where there is one.

    In one batch, since the ranges of OneFlow's demo are those of the batch they see.
    """
    outputs = model(data.test_x)
    if isinstance(model, QatModel):
        integers = from_qat(model).realize()(data.test_x)
        if not torch.equal(integers, outputs):
            raise SystemExit("the integer model differs from the trained one")
    return float((outputs.argmax(1) == data.test_y).float().mean()) * 100


def layers(norms: bool = True) -> tuple[list[nn.Conv2d], list[nn.BatchNorm2d], nn.Linear]:
    """The same layers for every system; convolutions have a bias where no batch norm follows."""
    convs = [nn.Conv2d(i, o, 3, stride, 1, bias=not norms) for i, o, stride in CONVS]
    return convs, [nn.BatchNorm2d(o) for _, o, _ in CONVS], nn.Linear(FEATURES, 10)


def floating(norms: bool = True) -> nn.Module:
    """The float network, with batch norms or without."""
    convs, after, head = layers(norms)
    parts: list[nn.Module] = []
    for conv, norm in zip(convs, after, strict=True):
        parts += [conv, norm, nn.ReLU()] if norms else [conv, nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), head)


def oneflow(quantizer: Quantizer) -> nn.Module:
    """As OneFlow's demo of AlexNet, without batch norms: every layer's weight and output, and the input."""
    convs, _, head = layers(norms=False)
    parts: list[nn.Module] = []
    for index, conv in enumerate(convs):
        parts += [QLayer(conv, quantizer, quantize_input=index == 0), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), QLayer(head, quantizer, quantize_input=False))


class _Head(nn.Module):
    """The last layer with its weight and its output fake-quantized."""

    def __init__(self, layer: nn.Linear, weight: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.layer, self.weight, self.output = layer, weight, output

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.output(functional.linear(x, self.weight(self.layer.weight), self.layer.bias))
        return found


def tensorflow(bits: int) -> nn.Module:
    """As contrib.quantize's training graph: batch norms folded, weights narrow, activations averaged."""
    convs, norms, head = layers()

    def weight() -> LastValueQuantize:
        return LastValueQuantize(FakeQuant(bits, True, "1.15"))

    def value(low: float = 0.0) -> MovingAvgQuantize:
        return MovingAvgQuantize(FakeQuant(bits, False, "1.15"), init_min=low)

    parts: list[nn.Module] = [
        FoldedLayer(c, n, functional.relu6, weight_quantizer=weight(), activation_quantizer=value())
        for c, n in zip(convs, norms, strict=True)
    ]
    return nn.Sequential(*parts, nn.Flatten(), _Head(head, weight(), value()))


class DoReFa(nn.Module):
    """As DoReFa-Net: the first and the last layer float, so are the activations that the last one reads.

    Args:
        bits: of weights, activations and gradients; 32 for float.
        seed: of the noise of the gradients.
    """

    def __init__(self, bits: tuple[int, int, int], seed: int) -> None:
        super().__init__()
        convs, norms, self.head = layers()
        self.convs, self.norms = nn.ModuleList(convs), nn.ModuleList(norms)
        self.bits, self.noise = bits, torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        weights, activations, gradients = self.bits
        last = len(self.convs) - 1
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            kernel = conv.weight if index == 0 else quantize_weight(conv.weight, weights)
            y = conv._conv_forward(x, kernel, None)
            if index > 0 and gradients < 32:
                y = quantize_gradient(y, gradients, generator=self.noise)
            x = quantize_activation(norm(y), 32 if index == last else activations)
        found: Tensor = self.head(x.flatten(1))
        return found


def planned(scheme: str, bits: int, seed: int) -> nn.Module:
    """With the Plan of a chip in the loop, from weights that were never trained."""
    start = floating(norms=False).eval()
    fixed = {} if bits == 8 else {"*": bits}
    return prepare_qat(start, "x86_vnni", dataset=[digits(seed).x[:200]], scheme=scheme, fix_bits=fixed)


Build = Callable[[int], nn.Module]


def cells() -> dict[str, dict[str, Build]]:
    """By table and by row: what makes the network of a seed."""
    from_oneflow: dict[str, Build] = {}
    for bits in (8, 4):
        for scheme in ("symmetric", "affine"):
            for per_layer in (True, False):
                quantizer = Quantizer("google", bits, scheme, per_layer)  # type: ignore[arg-type]
                name = f"{bits} bits google {scheme} per {'layer' if per_layer else 'channel'}"
                from_oneflow[name] = lambda seed, q=quantizer: oneflow(q)  # type: ignore[misc]
        from_oneflow[f"{bits} bits cambricon"] = lambda seed, b=bits: oneflow(Quantizer("cambricon", b))  # type: ignore[misc]
    from_tensorflow: dict[str, Build] = {
        f"{bits} bits": lambda seed, b=bits: tensorflow(b)  # type: ignore[misc]
        for bits in (8, 4)
    }
    mixes = [(1, 2, 32), (1, 2, 6), (1, 2, 4), (8, 8, 8)]
    alone = [tuple(k if i == place else 32 for i in range(3)) for place in range(3) for k in (1, 2, 4, 6, 8)]
    from_dorefa: dict[str, Build] = {
        " ".join(map(str, mix)): lambda seed, m=mix: DoReFa(m, seed)  # type: ignore[misc]
        for mix in [*alone, *mixes]
    }
    from_plans: dict[str, Build] = {
        f"{bits} bits, scheme {scheme}": lambda seed, s=scheme, b=bits: planned(s, b, seed)  # type: ignore[misc]
        for bits in (8, 4)
        for scheme in ("tensorflow", "pytorch")
    }
    tables = {"OneFlow": from_oneflow, "TensorFlow": from_tensorflow, "DoReFa-Net": from_dorefa, PLANS: from_plans}
    plain: Build = lambda seed: floating(norms=False)  # noqa: E731
    floats: dict[str, Build] = {"": lambda seed: floating(), "OneFlow": plain, PLANS: plain}
    return {"float": floats, **tables}
