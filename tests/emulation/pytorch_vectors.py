"""The functions that compute the conformance vectors of PyTorch, by the prefix of their op."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from emulation.vectors import Vector, tensor, with_gradient
from hago.emulation.pytorch import (
    FakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    QRange,
    fake_quantize,
    fake_quantize_learnable,
    quantize,
)


def _qrange(params: Mapping[str, Any], default: str = "per_tensor_affine") -> QRange:
    known = ("dtype", "reduce_range", "quant_min", "quant_max", "eps")
    return QRange(qscheme=params.get("qscheme", default), **{k: params[k] for k in known if k in params})


def _batches(vector: Vector) -> list[Tensor]:
    inputs = vector.inputs
    if "batches" in inputs:
        return [tensor(b) for b in inputs["batches"]]
    x = inputs["x"]
    ragged = isinstance(x[0], list) and "PerChannel" not in vector.op and len({len(b) for b in x}) > 1
    several = ragged or ("MovingAverage" in vector.op and isinstance(x[0], list) and "PerChannel" not in vector.op)
    return [tensor(b) for b in x] if several else [tensor(x)]


def observer(vector: Vector) -> dict[str, Any]:
    p = vector.params
    per_channel = "PerChannel" in vector.op
    averaging = None
    if "MovingAverage" in vector.op:
        in_name = re.search(r"averaging_constant=([0-9.]+)", vector.op)
        averaging = float(in_name[1]) if in_name else p.get("averaging_constant", 0.01)
    qrange = _qrange(p, "per_channel_affine" if per_channel else "per_tensor_affine")
    module = MinMaxObserver(qrange, ch_axis=p.get("ch_axis", 0), averaging_constant=averaging)
    for batch in _batches(vector):
        module(batch)
    scale, zero = module.qparams()
    low, high = qrange.ends
    return {
        "min_val": module.min_val,
        "max_val": module.max_val,
        "scale": scale,
        "zero_point": zero,
        "quant_min": low,
        "quant_max": high,
    }


def histogram(vector: Vector) -> dict[str, Any]:
    in_name = re.search(r"bins=([0-9]+)", vector.op)
    module = HistogramObserver(_qrange(vector.params), bins=int(in_name[1]) if in_name else 2048)
    for batch in _batches(vector):
        module(batch)
    scale, zero = module.qparams()
    state = {"min_val": module.min_val, "max_val": module.max_val, "histogram": module.histogram}
    return state | {"scale": scale, "zero_point": zero}


def fake_quantize_state(vector: Vector) -> dict[str, Any]:
    p = vector.params
    qrange = QRange("qint8", "per_channel_symmetric", quant_min=p["quant_min"], quant_max=p["quant_max"])
    module = FakeQuantize(MinMaxObserver(qrange, ch_axis=p.get("ch_axis", 0)))
    y = module(tensor(vector.inputs["x"]))
    return {**module.state_dict(), "y": y}


def fused_range(vector: Vector) -> dict[str, Any]:
    low, high = _qrange(vector.params).ends
    return {"quant_min": low, "quant_max": high}


def _parameter(value: Any) -> Any:
    return tensor(value) if isinstance(value, list) else value


def fake(vector: Vector) -> dict[str, Any]:
    p = vector.params
    axis = p.get("axis", p.get("ch_axis")) if "per_channel" in vector.op else None
    scale, zero = _parameter(p["scale"]), _parameter(p["zero_point"])
    y, grads = with_gradient(
        lambda x: fake_quantize(x, scale, zero, p["quant_min"], p["quant_max"], axis),
        tensor(vector.inputs["x"]),
        vector.inputs.get("grad_out"),
    )
    return {"y": y} | ({"grad_x": grads[0]} if grads else {})


def learnable(vector: Vector) -> dict[str, Any]:
    p = vector.params
    axis = p.get("axis", p.get("ch_axis")) if "per_channel" in vector.op else None
    y, grads = with_gradient(
        lambda x, s, z: fake_quantize_learnable(
            x, s, z, p["quant_min"], p["quant_max"], p.get("grad_factor", 1.0), axis
        ),
        tensor(vector.inputs["x"]),
        vector.inputs.get("grad_out"),
        tensor(p["scale"]).reshape(-1),
        tensor(p["zero_point"]).reshape(-1),
    )
    return {"y": y} | dict(zip(("grad_x", "grad_scale", "grad_zero_point"), grads, strict=False))


def quantized(vector: Vector) -> dict[str, Any]:
    p = vector.params
    axis = p.get("axis", p.get("ch_axis")) if "per_channel" in vector.op else None
    q = quantize(tensor(vector.inputs["x"]), _parameter(p["scale"]), _parameter(p["zero_point"]), p["dtype"], axis)
    return {"q": q.to(torch.int64)}


#: Functions by a prefix of the op; the longest prefix that matches is used.
PYTORCH: Mapping[str, Callable[[Vector], dict[str, Any]]] = {
    "MinMaxObserver": observer,
    "HistogramObserver": histogram,
    "MovingAverageMinMaxObserver": observer,
    "PerChannelMinMaxObserver": observer,
    "MovingAveragePerChannelMinMaxObserver": observer,
    "FakeQuantize(default_per_channel_weight_observer)": fake_quantize_state,
    "FusedMovingAvgObsFakeQuantize reduce_range": fused_range,
    "fake_quantize": fake,
    "_fake_quantize_learnable": learnable,
    "quantize_per_": quantized,
}
