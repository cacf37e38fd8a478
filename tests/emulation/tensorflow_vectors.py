"""The functions that compute the conformance vectors of TensorFlow, by the prefix of their op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from emulation.insertion_graphs import named
from emulation.vectors import Vector, float_differences, tensor, with_gradient
from hago.emulation.tensorflow.fake_quantize import (
    FakeQuant,
    Kernel,
    LastValueQuantize,
    MovingAvgQuantize,
    RangeObserver,
    Schedule,
)
from hago.emulation.tensorflow.layers import FoldedLayer, FoldedPass
from hago.emulation.tensorflow.rewrite import Op, quantize_ops


def kernel_of(vector: Vector) -> Kernel:
    """The release that a vector names, by default 2.15."""
    return "1.15" if str(vector.params.get("kernel", vector.op)).find("1.15") >= 0 else "2.15"


def fake_quant(vector: Vector) -> dict[str, Any]:
    """Args, Vars and VarsPerChannel, their gradients and the edge cases."""
    p, inputs = vector.params, vector.inputs
    options = FakeQuant(p.get("num_bits", 8), p.get("narrow_range", False), kernel_of(vector))
    x = tensor(inputs["x"])
    x = x.reshape(inputs["shape"]) if "shape" in inputs else x
    grad_out = inputs.get("grad_out")
    if "Args" in vector.op:
        low, high = float(p.get("min", -6.0)), float(p.get("max", 6.0))
        y, grads = with_gradient(lambda v: options.args(v, low, high), x, grad_out)
    else:
        call = options.vars_per_channel if "PerChannel" in vector.op else options.vars
        y, grads = with_gradient(call, x, grad_out, tensor(p["min"]), tensor(p["max"]))
    return {"y": y} | dict(zip(("grad_x", "grad_min", "grad_max"), grads, strict=False))


def observer(vector: Vector) -> dict[str, Any]:
    p = vector.params
    batches = [tensor(b) for b in vector.inputs["batches"]]
    channels = batches[0].shape[-1] if p.get("per_channel", False) else None
    more = {"ema_decay": p.get("ema_decay", 0.999)} if vector.op.startswith("Moving") else {}
    kind: Any = MovingAvgQuantize if more else LastValueQuantize
    module: RangeObserver = kind(
        FakeQuant(p.get("num_bits", 8), p.get("narrow_range", False), "1.15"),
        symmetric=p.get("symmetric", False),
        channels=channels,
        init_min=p.get("init_min", -6.0),
        init_max=p.get("init_max", 6.0),
        **more,
    )
    module.train(p.get("is_training", True))
    results: dict[str, Any] = {"min": [], "max": [], "y": []}
    for batch in batches:
        results["y"].append(module(batch))
        results["min"].append(module.minimum.clone())
        results["max"].append(module.maximum.clone())
    final = {"min": float(module.minimum.mean()), "max": float(module.maximum.mean())}
    for key, bound in vector.expected.items():  # inequalities on the final range
        name, _, relation = key.partition("_")
        if relation:
            holds = final[name] > bound if relation == "gt" else final[name] < bound
            results[key] = bound if holds else float("nan")
    return results


def folded_layer(vector: Vector) -> FoldedLayer:
    """The layer of a vector: Conv2D, batch norm and Relu6 without padding, given in NHWC and HWIO."""
    p, inputs = vector.params, vector.inputs
    weight = tensor(inputs["W"]).permute(3, 2, 0, 1).contiguous()
    conv = nn.Conv2d(weight.shape[1], weight.shape[0], tuple(weight.shape[2:]), bias=False)
    bn = nn.BatchNorm2d(weight.shape[0], eps=p.get("eps", 1e-3), momentum=1 - p.get("bn_decay", 0.999))
    with torch.no_grad():
        conv.weight.copy_(weight)
        bn.weight.copy_(tensor(inputs["gamma"]))
        bn.bias.copy_(tensor(inputs["beta"]))
        for buffer, name in ((bn.running_mean, "moving_mean"), (bn.running_var, "moving_variance")):
            assert isinstance(buffer, Tensor)
            buffer.copy_(tensor(inputs[name]))
    low, high = p.get("weight_range", (-6.0, 6.0)), p.get("act_range", (0.0, 6.0))
    symmetric = p.get("symmetric", False)
    weight_options = FakeQuant(p.get("weight_bits", 8), True, "1.15")
    activation_options = FakeQuant(p.get("activation_bits", 8), False, "1.15")
    return FoldedLayer(
        conv,
        bn,
        functional.relu6,
        weight_quantizer=LastValueQuantize(weight_options, symmetric=symmetric, init_min=low[0], init_max=low[1]),
        activation_quantizer=MovingAvgQuantize(
            activation_options, symmetric=symmetric, init_min=high[0], init_max=high[1]
        ),
        schedule=Schedule(p.get("quant_delay") or 0, p.get("freeze_bn_delay")),
    )


def _nhwc(y: Tensor) -> Tensor:
    return y.permute(0, 2, 3, 1)


def _hwio(w: Tensor) -> Tensor:
    return w.permute(2, 3, 1, 0)


def _as_expected(layer: FoldedLayer, run: FoldedPass, out: Tensor) -> dict[str, Any]:
    return {
        "mul_fold": _hwio(run.mul_fold),
        "weights_quant": _hwio(run.weights_quant),
        "Conv2D_Fold": _nhwc(run.conv_fold),
        "post_conv_mul": _nhwc(run.post_conv_mul),
        "add_fold": _nhwc(run.add_fold),
        "act_quant": _nhwc(out),
        "new_moving_mean": layer.bn.running_mean,
        "new_moving_variance": layer.bn.running_var,
    }


def _pass(layer: FoldedLayer, x: Tensor) -> dict[str, Any]:
    runs: list[FoldedPass] = []
    trace = layer.trace

    def record(value: Tensor) -> FoldedPass:
        runs.append(trace(value))
        return runs[-1]

    layer.trace = record  # type: ignore[method-assign]
    try:
        out = layer(x)
    finally:
        layer.trace = trace  # type: ignore[method-assign]
    return _as_expected(layer, runs[0], out)


def _starts(vector: Vector, x: Tensor) -> Iterator[FoldedLayer]:
    """Yield the layer before step 1 in two ways.

    A vector of a later step gives the statistics before step 1 or before its own step. The batch is the same at every
    step, so that the statistics before step 1 follow from the latter too.
    """
    yield folded_layer(vector)
    layer = folded_layer(vector)
    with torch.no_grad():
        y = functional.conv2d(x, layer.layer.weight)
        mean, var = layer.bn.running_mean, layer.bn.running_var
        assert mean is not None and var is not None and layer.bn.momentum is not None
        rate = layer.bn.momentum
        for _ in range(vector.inputs.get("step", 1) - 1):
            mean.copy_((mean - rate * y.mean((0, 2, 3))) / (1 - rate))
            var.copy_((var - rate * y.var((0, 2, 3))) / (1 - rate))
    yield layer


def training_fold(vector: Vector) -> dict[str, Any]:
    x = tensor(vector.inputs["X"]).permute(0, 3, 1, 2).contiguous()
    results: dict[str, Any] = {}
    for layer in _starts(vector, x):
        for _ in range(vector.inputs.get("step", 1)):
            results = _pass(layer, x)
        if not float_differences(results, vector.expected, vector.tolerance):
            break
    return results


def eval_fold(vector: Vector) -> dict[str, Any]:
    return _pass(folded_layer(vector).eval(), tensor(vector.inputs["X"]).permute(0, 3, 1, 2).contiguous())


def schedule(vector: Vector) -> dict[str, Any]:
    layer = folded_layer(vector)
    x = tensor(vector.inputs["X"]).permute(0, 3, 1, 2).contiguous()
    outs, means, variances = [], [], []
    for _ in range(vector.inputs["steps"]):
        outs.append(_nhwc(layer(x)))
        assert layer.bn.running_var is not None and layer.bn.running_mean is not None
        means.append(layer.bn.running_mean.clone())
        variances.append(layer.bn.running_var.clone())
    return {"out_per_step": outs, "moving_variance_per_step": variances, "moving_mean_per_step": means}


def insertion_points(vector: Vector) -> dict[str, Any]:
    """The insertion points as `scope  <-  producer -> consumers`, in order of scope."""
    drawn = vector.inputs["graph"]
    ops = named(drawn) if isinstance(drawn, str) else [Op(name, kind, tuple(inputs)) for name, kind, inputs in drawn]
    inserted = quantize_ops(ops, training="eval" not in vector.op, scope=vector.params.get("scope")).fake_quants
    return {"fake_quants": sorted(f"{q.name}  <-  {q.producer} -> {', '.join(sorted(q.consumers))}" for q in inserted)}


#: Functions by a prefix of the op; the longest prefix that matches is used.
TENSORFLOW: Mapping[str, Callable[[Vector], dict[str, Any]]] = {
    "FakeQuantWithMinMax": fake_quant,
    "LastValueQuantize": observer,
    "MovingAvgQuantize": observer,
    "create_training_graph: Conv2D+FusedBatchNorm+Relu6": training_fold,
    "create_eval_graph: Conv2D+FusedBatchNorm+Relu6": eval_fold,
    "experimental_create_training_graph(": schedule,
    "create_training_graph insertion points": insertion_points,
    "create_eval_graph insertion points": insertion_points,
}
