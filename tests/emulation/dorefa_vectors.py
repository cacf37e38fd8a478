"""The functions that compute the conformance vectors of DoReFa-Net, by the prefix of their op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from emulation.vectors import Vector, tensor, with_gradient
from hago.emulation.dorefa import (
    Variant,
    quantize_activation,
    quantize_gradient,
    quantize_k,
    quantize_weight,
    ternarize,
)


def _variant(vector: Vector) -> Variant:
    return "zzzxxxttt" if "zzzxxxttt" in vector.op else "tensorpack"


def _bits(vector: Vector) -> int:
    return int(next(vector.params[k] for k in ("bitW", "bitA", "bitG", "bits") if k in vector.params))


def _run(vector: Vector, call: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    y, grads = with_gradient(call, tensor(vector.inputs["x"]), vector.inputs.get("grad_out"))
    return {"y": y} | ({"grad_x": grads[0]} if grads else {})


def weight(vector: Vector) -> dict[str, Any]:
    return _run(vector, lambda w: quantize_weight(w, _bits(vector), _variant(vector), zeros="nan"))


def activation(vector: Vector) -> dict[str, Any]:
    if "clip" in vector.op:  # the op names the clip, which is then applied at 32 bits too
        return _run(vector, lambda x: quantize_k(x.clamp(0.0, 1.0), _bits(vector)))
    return _run(vector, lambda x: quantize_activation(x, _bits(vector), _variant(vector)))


def gradient(vector: Vector) -> dict[str, Any]:
    """The paper's formula in float64."""
    dr = tensor(vector.inputs["dr"], torch.float64)
    noise = tensor(vector.inputs["sigma"], torch.float64)
    x = torch.zeros_like(dr, requires_grad=True)
    quantize_gradient(x, _bits(vector), noise=noise, zeros="nan").backward(dr)
    return {"dr_quantised": x.grad}


def gradient_statistics(vector: Vector) -> dict[str, Any]:
    """The mean of many draws, and the levels that they have, relative to the largest value of the example."""
    dr, bits = tensor(vector.inputs["dr"]), _bits(vector)
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(int(vector.params.get("samples", 3000))):
        x = torch.zeros_like(dr, requires_grad=True)
        quantize_gradient(x, bits, generator=generator, zeros="nan").backward(dr)
        assert x.grad is not None
        draws.append(x.grad)
    drawn = torch.stack(draws)
    levels = torch.linspace(-1, 1, 2**bits, dtype=torch.float64)
    fractions = (drawn / dr.abs().amax(1, keepdim=True)).to(torch.float64).unique()
    assert float((fractions[:, None] - levels).abs().amin(1).max()) < 1e-5
    return {"mean": drawn.mean(0), "levels_over_rowmax": levels}


def ternary(vector: Vector) -> dict[str, Any]:
    p = vector.params
    threshold = p.get("thresh", 0.05)
    y, grads = with_gradient(
        lambda w, a, b: ternarize(w, a, b, threshold),
        tensor(vector.inputs["x"]),
        vector.inputs.get("grad_out"),
        tensor(p.get("Wp", 1.0)),
        tensor(p.get("Wn", 1.0)),
    )
    return {"y": y} | dict(zip(("grad_x", "grad_Wp", "grad_Wn"), grads, strict=False))


#: Functions by a prefix of the op; the longest prefix that matches is used.
DOREFA: Mapping[str, Callable[[Vector], dict[str, Any]]] = {
    "fw (": weight,
    "weight_quantize_fn": weight,
    "fa(": activation,
    "activation_quantize_fn": activation,
    "fg with injected noise": gradient,
    "fg (": gradient_statistics,
    "ternarize": ternary,
}
