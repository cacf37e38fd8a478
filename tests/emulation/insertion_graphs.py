"""The graphs for which TensorFlow's insertion points were recorded, built from their names.

A name is a sequence of words: a layer, then the ops after it. Layers have the scope `a` (`dw` if depthwise), inside `s`
if the graph has an add; a graph ends with the Identity `o`.
"""

from __future__ import annotations

from hago.emulation.tensorflow.rewrite import Op

_LAYERS = {
    "conv": ("Conv2D", "Conv2D", "weights"),
    "matmul": ("MatMul", "MatMul", "weights"),
    "fc": ("MatMul", "MatMul", "weights"),
    "depthwise": ("DepthwiseConv2dNative", "depthwise", "depthwise_weights"),
}
_ACTIVATIONS = {"relu": "Relu", "relu6": "Relu6", "identity": "Identity"}


class Drawing:
    """A graph under construction; each method adds ops and returns the name of the last one."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def op(self, name: str, kind: str, *inputs: str) -> str:
        self.ops.append(Op(name, kind, inputs))
        return name

    def weight(self, name: str) -> str:
        return self.op(f"{name}/read", "Identity", self.op(name, "VariableV2"))

    def layer(self, word: str, scope: str, x: str, *, bias: bool = True, weight: str | None = None) -> str:
        kind, name, variable = _LAYERS[word]
        y = self.op(f"{scope}/{name}", kind, x, weight or self.weight(f"{scope}/{variable}"))
        return self.op(f"{scope}/BiasAdd", "BiasAdd", y, self.weight(f"{scope}/biases")) if bias else y

    def fused_norm(self, scope: str, x: str) -> str:
        parts = [self.weight(f"{scope}/BatchNorm/{n}") for n in ("gamma", "beta", "moving_mean", "moving_variance")]
        return self.op(f"{scope}/BatchNorm/FusedBatchNormV3", "FusedBatchNormV3", x, *parts)

    def unfused_norm(self, scope: str, x: str) -> str:
        inside = f"{scope}/BatchNorm/batchnorm_1"
        mean = self.op(f"{scope}/BatchNorm/moments/Squeeze", "Squeeze", x)
        gamma, beta = (self.weight(f"{scope}/BatchNorm/{n}") for n in ("gamma", "beta"))
        scale = self.op(f"{inside}/mul", "Mul", self.op(f"{inside}/Rsqrt", "Rsqrt", mean), gamma)
        scaled = self.op(f"{inside}/mul_1", "Mul", x, scale)
        shift = self.op(f"{inside}/sub", "Sub", beta, self.op(f"{inside}/mul_2", "Mul", mean, scale))
        return self.op(f"{inside}/add_1", "AddV2", scaled, shift)


def named(pattern: str) -> list[Op]:
    """The graph of a pattern's name.

    Raises:
        KeyError: a word is unknown.
    """
    drawing, words = Drawing(), pattern.split("_")
    x = drawing.op("x", "Placeholder")
    if words[0] == "concat":
        ends = [drawing.op(f"{s}/Relu", "Relu", drawing.layer("conv", s, x)) for s in "ab"]
        drawing.op("concat", "ConcatV2", *ends, drawing.op("concat/axis", "Const"))
        return drawing.ops
    has_add = any("bypass" in w for w in words)
    scope = ("s/" if has_add else "") + ("dw" if words[0] == "depthwise" else "a")
    y = drawing.layer(words[0], scope, x, bias="bn" not in words)
    current_scope = scope
    for word in words[1:]:
        if word in ("biasadd", "only", "fused", "unfused"):
            continue
        if word == "sep":  # the first half of a separable convolution has an activation
            word = "relu6"
        if word == "bn":
            y = drawing.unfused_norm(scope, y) if "unfused" in words else drawing.fused_norm(scope, y)
        elif word in ("bypass", "postbypass"):
            y, current_scope = drawing.op("s/add", "AddV2", y, drawing.op("s/other", "Placeholder")), "s"
        elif word == "sigmoid":
            return [*drawing.ops, Op("Sigmoid", "Sigmoid", (y,))]
        elif word == "maxpool":
            y = drawing.op("MaxPool", "MaxPool", y)
        elif word == "reshape":
            y = drawing.op("Reshape", "Reshape", y, drawing.op("Reshape/shape", "Const"))
        else:
            kind = _ACTIVATIONS[word]
            y = drawing.op(f"{current_scope}/{'id' if kind == 'Identity' else kind}", kind, y)
    if "only" not in words:
        drawing.op("o", "Identity", y)
    return drawing.ops
