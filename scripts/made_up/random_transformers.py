"""Random small transformers as Graphs, by seed: norms before and after residual sums, attention, perceptrons with
gates and without, and convolutions in their place.

`random_transformer(seed)` is deterministic. Values are tokens (N, T, C) or images (N, C, H, W).
"""

from __future__ import annotations

from random_graphs import RandomBuilder

from hago.graph import Graph

_TABLES = ("gelu", "silu", "tanh", "sigmoid", "elu", "hardswish", "relu")
_ATTRS = {"gelu": {"approximate": "none"}, "elu": {"alpha": 1.0}}


def random_transformer(seed: int, blocks: int = 2) -> Graph:
    """A transformer of some blocks; its outputs are its last value, and sometimes others.

    Args:
        seed: equal seeds give equal graphs.
    """
    b = RandomBuilder(seed)
    images = b.rng.random() < 0.25
    x = b.input(6, 5, 5) if images else b.input(5, 6)
    for _ in range(blocks):
        x = _images(b, x) if images else _tokens(b, x)
    others = b.rng.sample(b.values, b.rng.choice([0, 0, 1]))
    return b.graph(*dict.fromkeys([x, *others]))


def _linear(b: RandomBuilder, x: str, out: int) -> str:
    return b.call("linear", x, b.weight(out, b.shapes[x][-1]), *b.bias(out))


def _norm(b: RandomBuilder, x: str) -> str:
    width = b.shapes[x][-1]
    gain = b.const(b.normal(width) + 1.0)
    if b.rng.random() < 0.4:
        args = [{"$": 0}, [width], {"$": 1}, 1e-5]
        return b.call("opaque", x, gain, target="aten.rms_norm.default", args=args, kwargs={})
    return b.call("layer_norm", x, gain, b.const(b.normal(width)), normalized_shape=[width], eps=1e-5)


def _table(b: RandomBuilder, x: str) -> str:
    op = b.rng.choice(_TABLES)
    return b.call(op, x, **_ATTRS.get(op, {}))


def _attention(b: RandomBuilder, x: str) -> str:
    width = b.shapes[x][-1]
    q, k, v = (_linear(b, x, width) for _ in range(3))
    scores = b.call("matmul", q, b.call("permute", k, axes=[0, 2, 1]))
    return _linear(b, b.call("matmul", b.call("softmax", scores, axis=-1), v), width)


def _perceptron(b: RandomBuilder, x: str) -> str:
    width, hidden = b.shapes[x][-1], b.rng.choice([8, 12])
    y = _table(b, _linear(b, x, hidden))
    if b.rng.random() < 0.3:
        y = b.call("mul", y, _linear(b, x, hidden))
    elif b.rng.random() < 0.3:
        y = b.call("softmax", y, axis=-1) if b.rng.random() < 0.5 else _table(b, y)
    return _linear(b, y, width)


def _tokens(b: RandomBuilder, x: str) -> str:
    for branch in (_attention, _perceptron):
        kind = b.rng.choice(["before", "behind", "both"])
        y = branch(b, _norm(b, x) if kind != "behind" else x)
        x = b.call("add", x, y)
        if kind != "before":
            x = _norm(b, x)
    return x


def _images(b: RandomBuilder, x: str) -> str:
    attrs = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    hidden = b.rng.choice([8, 12])
    y = b.call("conv2d", x, b.weight(hidden, 6, 3, 3), *b.bias(hidden), **attrs)
    y = _table(b, y)
    y = b.call("conv2d", y, b.weight(6, hidden, 3, 3), *b.bias(6), **attrs)
    return b.call("add", x, y)
