"""The functions that compute the conformance vectors of OneFlow, by the prefix of their op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from emulation.vectors import Vector, tensor, with_gradient
from hago.emulation.oneflow import (
    MovingAverageMinMaxObserver,
    QatConv1d,
    QatConv2d,
    QatConv3d,
    QConvBN,
    QLayer,
    Quantizer,
    Range,
)


def quantizer_of(params: Mapping[str, Any]) -> Quantizer:
    return Quantizer(
        formula=params.get("quantization_formula", "google"),
        bits=params.get("quantization_bit", 8),
        scheme=params.get("quantization_scheme", "symmetric"),
        per_layer=params.get("per_layer_quantization", params.get("weight_quant_per_layer", True)),
        wraps=True,  # the vectors are from OneFlow on a CPU
    )


def dtype_of(vector: Vector) -> torch.dtype:
    return torch.float64 if vector.params.get("dtype") in ("float64", "double") else torch.float32


def min_max(vector: Vector) -> dict[str, Any]:
    scale, zero = quantizer_of(vector.params).observe(tensor(vector.inputs["x"], dtype_of(vector)))
    return {"scale": scale, "zero_point": zero}


def moving_average(vector: Vector) -> dict[str, Any]:
    p = vector.params
    observer = MovingAverageMinMaxObserver(
        quantizer_of(p), p.get("stop_update_after_iters", 1), p.get("momentum", 0.95)
    )
    observer.train(p.get("training", True))
    rows = vector.inputs["x"]
    steps = p.get("current_train_step", [0] * len(rows))
    results = []
    for x, step in zip(rows, steps, strict=True):
        scale, zero = observer(tensor(x, dtype_of(vector)), step)
        results.append([scale, zero, observer.moving_max.clone(), observer.moving_min.clone()])
    return {"steps": results}


def fake_quantization(vector: Vector) -> dict[str, Any]:
    scale, zero = (tensor(vector.params[k], dtype_of(vector)).reshape(-1) for k in ("scale", "zero_point"))
    quantizer = quantizer_of(vector.params)
    x = tensor(vector.inputs["x"], dtype_of(vector))
    y, grads = with_gradient(lambda v: quantizer.fake_quantize(v, scale, zero), x, vector.inputs.get("grad_out"))
    return {"y": y} | ({"grad_x": grads[0]} if grads else {})


def quantization(vector: Vector) -> dict[str, Any]:
    scale, zero = (tensor(vector.params[k], dtype_of(vector)).reshape(-1) for k in ("scale", "zero_point"))
    q = quantizer_of(vector.params).quantize(tensor(vector.inputs["x"], dtype_of(vector)), scale, zero)
    return {"q": q, "dtype": str(q.dtype).replace("torch", "oneflow")}


def _filled(layer: Any, weight: Any, bias: Any) -> Any:
    with torch.no_grad():
        layer.weight.copy_(tensor(weight))
        if bias is not None:
            layer.bias.copy_(tensor(bias))
    return layer


def _conv(inputs: Mapping[str, Any]) -> Any:
    weight = tensor(inputs["weight"])
    kind = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[weight.ndim]
    bias = inputs.get("bias")
    conv = kind(weight.shape[1], weight.shape[0], tuple(weight.shape[2:]), bias=bias is not None)
    return _filled(conv, inputs["weight"], bias)


def qat_conv(vector: Vector) -> dict[str, Any]:
    p = vector.params
    weight = tensor(p["weight"])
    kind: Any = {3: QatConv1d, 4: QatConv2d, 5: QatConv3d}[weight.ndim]
    bias = p.get("bias")
    conv = kind(
        weight.shape[1],
        weight.shape[0],
        tuple(weight.shape[2:]),
        bias=bias is not None,
        quantizer=quantizer_of(p),
        momentum=p.get("input_quant_momentum", 0.95),
    )
    conv = _filled(conv, p["weight"], bias).train(p.get("training", True))
    y = conv(tensor(vector.inputs["x"]))
    return {"y": y, "moving_max": conv.input_observer.moving_max, "moving_min": conv.input_observer.moving_min}


def qat_conv_steps(vector: Vector) -> dict[str, Any]:
    conv = QatConv2d(1, 2, 2).train(vector.params.get("training", True))
    counts, maxima = [], []
    for value in vector.inputs["x_constant_per_step"]:
        conv(torch.full((1, 1, 3, 3), float(value)))
        counts.append(int(conv.current_train_step))
        maxima.append(float(conv.input_observer.moving_max))
    return {"current_train_step": counts, "input_moving_max": maxima}


def _ranges(layer: QLayer) -> dict[str, Any]:
    assert isinstance(layer.qi, Range) and isinstance(layer.qo, Range)
    ranges = {"qi": layer.qi, "qw": layer.qw, "qo": layer.qo}
    return {name: [r.scale.clone(), r.zero_point.clone()] for name, r in ranges.items()}


def q_layer(vector: Vector) -> dict[str, Any]:
    if "QLinear" in vector.op:
        weight = tensor(vector.inputs["weight"])
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in vector.inputs)
        layer = QLayer(
            _filled(plain, vector.inputs["weight"], vector.inputs.get("bias")),
            Quantizer(bits=vector.params.get("quantization_bit", 8), wraps=True),
        )
    else:
        layer = QLayer(_conv(vector.inputs), quantizer_of(vector.params))
    results = {"y": layer(tensor(vector.inputs["x"])), **_ranges(layer)}
    if "M" in vector.expected:
        frozen = layer.freeze(upstream=True)
        results |= {"M": frozen.multiplier, "weight": frozen.weight, "bias": frozen.bias}
    return results


def q_conv_bn(vector: Vector) -> dict[str, Any]:
    p = vector.params
    conv = _conv(vector.inputs)
    bn = nn.BatchNorm2d(conv.out_channels, eps=p.get("eps", 1e-5), momentum=p.get("momentum", 0.1))
    with torch.no_grad():
        for ranges, name in ((bn.weight, "gamma"), (bn.bias, "beta")):
            ranges.copy_(tensor(p[name]))
        for buffer, name in ((bn.running_mean, "running_mean"), (bn.running_var, "running_var")):
            assert isinstance(buffer, Tensor)
            buffer.copy_(tensor(p[name]))
    layer = QConvBN(conv, bn, quantizer_of(p), inverted_momentum=True)
    x = tensor(vector.inputs["x"])
    results: dict[str, Any] = {}
    if "y_train" in vector.expected:
        results = {"y_train": layer(x), **_ranges(layer)}
    results |= {"running_mean": bn.running_mean, "running_var": bn.running_var}
    results["y_eval"] = layer.eval()(x)
    if "M" in vector.expected:
        frozen = layer.freeze(upstream=True)
        results |= {"M": frozen.multiplier, "weight": frozen.weight, "bias": frozen.bias}
    return _ranges(layer) | results


ONEFLOW: Mapping[str, Callable[[Vector], dict[str, Any]]] = {
    "MinMaxObserver": min_max,
    "MovingAverageMinMaxObserver": moving_average,
    "FakeQuantization": fake_quantization,
    "Quantization": quantization,
    "QatConv1d": qat_conv,
    "QatConv2d": qat_conv,
    "QatConv3d": qat_conv,
    "QatConv2d current_train_step": qat_conv_steps,
    "QConv2d (models demo)": q_layer,
    "QLinear (models demo)": q_layer,
    "QConvBN (models demo)": q_conv_bn,
}
