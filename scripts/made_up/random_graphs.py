"""Random small networks as Graphs: every kind of op and of wiring that hago supports, by seed.

`random_graph(seed)` is deterministic. Values are images (N, C, H, W), rows (N, C) or tokens (N, T, C).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from building import Builder, Shape
from torch import Tensor

from hago.graph import Graph

#: Rows that a product of a value with itself may have: it has as many columns.
_TOKENS: Final = 1024
#: The output channels that convolutions may have, besides as many as they read.
WIDTHS: Final = (4, 6)


class RandomBuilder(Builder):
    """A graph in the making, and what it is made of by chance."""

    def __init__(self, seed: int, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.widths = widths
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.weights: dict[Shape, str] = {}  # what another op may share

    def normal(self, *shape: int, size: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * size

    def weight(self, *shape: int) -> str:
        """A weight, sometimes one that another op has too."""
        if shape in self.weights and self.rng.random() < 0.4:
            return self.weights[shape]
        size = self.rng.choice([0.05, 0.3, 1.0])
        self.weights[shape] = self.const(self.normal(*shape, size=size))
        return self.weights[shape]

    def pick(self, rank: int) -> str | None:
        """A value of that rank, rather a new one."""
        found = [v for v in self.values if len(self.shapes[v]) == rank]
        return found[-1 - int(abs(self.rng.gauss(0, 1))) % len(found)] if found else None

    def pick_like(self, name: str) -> str:
        """A value of the same shape: perhaps the same value."""
        return self.rng.choice([v for v in self.values if self.shapes[v] == self.shapes[name]])

    def bias(self, channels: int) -> tuple[str, ...]:
        return (self.const(self.normal(channels, size=0.5)),) if self.rng.random() < 0.6 else ()


# ---------------------------------------------------------------- images
def _conv(b: RandomBuilder, x: str) -> None:
    channels, groups = b.shapes[x][1], b.rng.choice([1, 1, b.shapes[x][1]])
    out = channels if groups > 1 else b.rng.choice([channels, *b.widths])
    kernel = b.rng.choice([1, 3])
    attrs = {"stride": [1, 1], "padding": [kernel // 2] * 2, "dilation": [1, 1], "groups": groups}
    b.call("conv2d", x, b.weight(out, channels // groups, kernel, kernel), *b.bias(out), **attrs)


def _conv_transpose(b: RandomBuilder, x: str) -> None:
    channels = b.shapes[x][1]
    if b.shapes[x][2] > 8:
        return
    attrs = {"stride": [2, 2], "padding": [0, 0], "output_padding": [0, 0], "groups": 1, "dilation": [1, 1]}
    b.call("conv_transpose2d", x, b.weight(channels, 4, 2, 2), *b.bias(4), **attrs)


def _affine(b: RandomBuilder, x: str) -> None:
    channels = b.shapes[x][1]
    pair = (b.weight(channels), b.const(b.normal(channels)))
    b.call("affine", x, *pair, rank=len(b.shapes[x]))


def _max_pool(b: RandomBuilder, x: str) -> None:
    if b.shapes[x][2] > 2:
        b.call("max_pool2d", x, kernel_size=[3, 3], stride=[2, 2], padding=[1, 1], dilation=[1, 1], ceil_mode=False)


def _avg_pool(b: RandomBuilder, x: str) -> None:
    if b.shapes[x][2] > 2 and b.shapes[x][3] > 1:
        attrs = {"ceil_mode": False, "count_include_pad": True, "divisor_override": None}
        b.call("avg_pool2d", x, kernel_size=[2, 2], stride=[2, 2], padding=[0, 0], **attrs)


def _gate(b: RandomBuilder, x: str) -> None:
    """Squeeze and excite: a product with a broadcast gate."""
    size = list(b.shapes[x][2:])
    pooled = b.call("adaptive_avg_pool2d", x, output_size=[1, 1], input_size=size)
    b.call("mul", x, b.call("hardsigmoid", pooled))


def _upsample(b: RandomBuilder, x: str) -> None:
    if b.shapes[x][2] <= 6:
        b.call("upsample_nearest2d", x, size=None, factors=[2.0, 2.0])


def _pad(b: RandomBuilder, x: str) -> None:
    b.call("pad", x, pad=[1, 0, 0, 1], mode="constant", value=0.0)


def _pad_otherwise(b: RandomBuilder, x: str) -> None:
    if b.shapes[x][2] > 2 and b.shapes[x][3] > 2:
        sizes = b.rng.choice([[1, 0, 0, 1], [0, 1, 0, 1], [1, 2, 2, 1], [-1, 0, 1, 0]])
        b.call("pad", x, pad=sizes, mode=b.rng.choice(["constant", "reflect", "replicate", "circular"]), value=0.0)


def _option_a(b: RandomBuilder, x: str) -> None:
    """A shortcut without weights: every other pixel, and channels of zeros."""
    for axis in (2, 3):
        x = b.call("slice", x, axis=axis, start=0, stop=None, step=2)
    b.call("pad", x, pad=[0, 0, 0, 0, 1, 1], mode="constant", value=0.0)


def _gate_of_mean(b: RandomBuilder, x: str) -> None:
    axes = b.rng.choice([[2, 3], [1], [3]])
    count = math.prod(b.shapes[x][a] for a in axes)
    mean = b.call(b.rng.choice(["mean", "sum"]), x, axes=axes, keepdim=True, count=count)
    pair = [x, b.call("sigmoid", mean) if b.rng.random() < 0.5 else mean]
    b.rng.shuffle(pair)
    b.call(b.rng.choice(["mul", "mul", "sub", "add"]), *pair)


def _by_channels(b: RandomBuilder, x: str) -> None:
    pair = [x, b.const(b.normal(b.shapes[x][1], 1, 1))]
    b.rng.shuffle(pair)
    b.call(b.rng.choice(["mul", "sub", "add"]), *pair)


def _heads(b: RandomBuilder, x: str) -> None:
    """A product of matrices with two axes of batches."""
    channels, size = b.shapes[x][1], b.shapes[x][2] * b.shapes[x][3]
    if channels % 2 == 0 and size <= _TOKENS:
        a = b.call("reshape", x, shape=[-1, 2, channels // 2, size])
        scores = b.call("matmul", b.call("permute", a, axes=[0, 1, 3, 2]), a)
        b.call("matmul", a, scores)


def _slice(b: RandomBuilder, x: str) -> None:
    half = b.shapes[x][1] // 2
    if half:
        low, high = (b.call("slice", x, axis=1, start=s, stop=e, step=1) for s, e in ((0, half), (half, None)))
        b.call("concat", high, low, axis=1)


def _flatten(b: RandomBuilder, x: str) -> None:
    kind = b.rng.choice(["mean", "sum", "reshape"])
    if kind == "reshape":
        b.call("reshape", x, shape=[-1, b.shapes[x][1] * b.shapes[x][2] * b.shapes[x][3]])
    else:
        b.call(kind, x, axes=[2, 3], keepdim=False, count=b.shapes[x][2] * b.shapes[x][3])


def _tokens(b: RandomBuilder, x: str) -> None:
    flat = b.call("reshape", x, shape=[-1, b.shapes[x][1], b.shapes[x][2] * b.shapes[x][3]])
    b.call("permute", flat, axes=[0, 2, 1])


# ---------------------------------------------------------------- rows and tokens
def _linear(b: RandomBuilder, x: str) -> None:
    width = b.shapes[x][-1]
    out = b.rng.choice([width, 5]) if width < 40 else 5
    b.call("linear", x, b.weight(out, width), *b.bias(out))


def _attention(b: RandomBuilder, x: str) -> None:
    width = b.shapes[x][-1]
    if b.shapes[x][-2] > _TOKENS:
        return
    q, k = (b.call("linear", x, b.weight(width, width)) for _ in range(2))
    scores = b.call("div", b.call("matmul", q, b.call("permute", k, axes=[0, 2, 1])), divisor=2.0)
    b.call("matmul", b.call("softmax", scores, axis=-1), x)


def _norm(b: RandomBuilder, x: str) -> None:
    width = b.shapes[x][-1]
    pair = (b.const(b.normal(width)), b.const(b.normal(width)))
    b.call("layer_norm", x, *pair, normalized_shape=[width], eps=1e-5)


def _opaque(b: RandomBuilder, x: str) -> None:
    b.call("opaque", x, target="aten.cumsum.default", args=[{"$": 0}, 1], kwargs={})


def _select(b: RandomBuilder, x: str) -> None:
    b.call("unsqueeze", b.call("select", x, axis=1, index=0), axis=1)
    b.call("expand", b.values[-1], size=[-1, b.shapes[x][1], -1])


# ---------------------------------------------------------------- any rank
def _add(b: RandomBuilder, x: str) -> None:
    b.call(b.rng.choice(["add", "add", "sub"]), x, b.pick_like(x))


def _twice(b: RandomBuilder, x: str) -> None:
    b.call("add", x, x)


def _mul(b: RandomBuilder, x: str) -> None:
    b.call("mul", x, b.pick_like(x))


def _number(b: RandomBuilder, x: str) -> None:
    b.call(b.rng.choice(["add", "mul", "sub"]), x, b.const(torch.tensor(b.rng.choice([0.5, -1.25, 2.0]))))


def _concat(b: RandomBuilder, x: str) -> None:
    if b.shapes[x][1] <= 12:
        b.call("concat", x, b.pick_like(x), axis=1)


def _relu(b: RandomBuilder, x: str) -> None:
    b.call("relu", x)


def _clamp(b: RandomBuilder, x: str) -> None:
    low, high = b.rng.choice([(0.0, 6.0), (-1.0, 1.0), (None, 0.75), (-0.3, None)])
    b.call("clamp", x, min=low, max=high)


def _table(b: RandomBuilder, x: str) -> None:
    op = b.rng.choice(["sigmoid", "tanh", "hardswish", "silu", "gelu", "leaky_relu"])
    attrs = {"gelu": {"approximate": "none"}, "leaky_relu": {"negative_slope": 0.1}}
    b.call(op, x, **attrs.get(op, {}))


def _neg(b: RandomBuilder, x: str) -> None:
    b.call("neg", x)


def _mean_token(b: RandomBuilder, x: str) -> None:
    axis = b.rng.choice([1, 2])
    b.call("mean", x, axes=[axis], keepdim=b.rng.random() < 0.5, count=b.shapes[x][axis])


Grow = Callable[[RandomBuilder, str], None]
_ANY: Final[tuple[Grow, ...]] = (_add, _add, _twice, _mul, _number, _concat, _relu, _relu, _clamp, _table, _neg)
_GROW: Final[Mapping[int, tuple[Grow, ...]]] = {
    4: (_conv, _conv, _conv, _conv_transpose, _affine, _max_pool, _avg_pool, _gate, _upsample, _pad, _slice,
        _flatten, _tokens, _opaque, *_ANY),
    3: (_linear, _linear, _attention, _norm, _select, *_ANY),
    2: (_linear, _linear, _affine, _norm, *_ANY),
}  # fmt: skip
#: Besides, of networks with even seeds: the others are those that reports of differences have named.
_BESIDES: Final[Mapping[int, tuple[Grow, ...]]] = {
    4: (_pad_otherwise, _option_a, _gate_of_mean, _gate_of_mean, _by_channels, _heads),
    3: (_mean_token, _attention),
    2: (),
}


def random_graph(seed: int, steps: int = 10, widths: Sequence[int] = WIDTHS) -> Graph:
    """A network of some `steps` pieces; its outputs are its last value and up to two others.

    Args:
        seed: equal seeds give equal graphs.
        widths: in place of `WIDTHS`.
    """
    b = RandomBuilder(seed, widths)
    for _ in range(b.rng.choice([1, 1, 2])):
        b.input(*b.rng.choice([(4, 6, 6), (6, 6, 6), (3, 7, 5)]))
    _conv(b, b.values[-1])
    grow = {rank: _GROW[rank] + (() if seed % 2 else _BESIDES[rank]) for rank in _GROW}
    while steps > 0:
        x = b.pick(b.rng.choice([4, 4, 4, 3, 2]))
        if x is not None and max(b.shapes[x]) < 300:
            b.rng.choice(grow[len(b.shapes[x])])(b, x)
        steps -= 1
    others = b.rng.sample(b.values, b.rng.choice([0, 0, 1, 2]))
    outputs = tuple(dict.fromkeys([b.values[-1], *others]))
    return b.graph(*outputs)


def random_inputs(graph: Graph, seed: int, batch: int = 3, size: float = 1.0) -> list[Tensor]:
    """Normal values for every input of a graph."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [graph[n].shape or () for n in graph.inputs]
    return [torch.randn((batch, *s[1:]), generator=generator) * size for s in shapes]
