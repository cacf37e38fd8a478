"""The functions that compute the conformance vectors of TPU-MLIR, by the name of the operation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emulation.vectors import Vector, generate
from hago.arithmetic.types import DTYPES, INT8, UINT8, DType
from hago.emulation.tpu_mlir import calibration, numerics, operators
from hago.emulation.tpu_mlir.numerics import UniformType, quantize, requantize, uniform_type_of_row

Answer = dict[str, Any]
Match = re.Match[str]


def _reals(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _dtype(vector: Vector, name: str) -> DType:
    """The dtype of a tensor: uint8 if its calibration row has no negative minimum, else int8."""
    rows = vector.params.get("calibration", {})
    row = rows.get(name) or next((r for key, r in rows.items() if name == "out" and key.startswith("y_")), None)
    return INT8 if row is None or row[1] < 0 else UINT8


def _types(vector: Vector) -> tuple[UniformType, UniformType]:
    p = vector.params
    if "in_scale" in p:
        out = {"i8": INT8, "u8": UINT8}.get(p.get("out_type", ""), _dtype(vector, "out"))
        return (
            UniformType(p["in_scale"], p.get("in_zp", 0), _dtype(vector, "x")),
            UniformType(p["out_scale"], p.get("out_zp", 0), out),
        )
    source = p.get("in_", p.get("in"))
    return UniformType(*source, _dtype(vector, "x")), UniformType(*p["out"], _dtype(vector, "out"))


# ---------------------------------------------------------------- multipliers
def _search(vector: Vector, match: Match) -> Answer:
    scale = torch.tensor(vector.inputs["scale"], dtype=torch.float64)
    search = numerics.scale_and_shift_positive if match[1] else numerics.scale_and_shift
    m, r = search(scale, vector.params["bitwidth"])
    return {"multiplier": m.tolist(), "rshift": r.tolist()}


def _doc_example(vector: Vector, match: Match) -> Answer:
    m, rshift = numerics.qdm_multiplier_and_rshift(vector.inputs["scale"])
    return {"multiplier": m, "rshift": rshift + 31}


def _ties(vector: Vector, match: Match) -> Answer:
    bits = 32 if match[1] in ("Conv", "MatMul") else 8
    m, r = numerics.scale_and_shift(vector.params["effective_scale"], bits)
    acc = torch.tensor(vector.inputs["accumulator"])
    return {"y_int8": requantize(acc, m, r, UniformType(1.0)).tolist()}


def _add_multipliers(vector: Vector, match: Match) -> Answer:
    inputs, coefficients = vector.inputs, vector.inputs.get("coeff")
    scales, out = inputs["in_scales"], inputs["out_scale"]
    if match[1].startswith("cv18"):
        scaling = operators.add_multipliers_cv18xx(scales, out, coefficients)
        return {
            "multipliers": list(scaling.multipliers),
            "rshift": scaling.rshifts[0],
            "rshifts": list(scaling.rshifts),
        }
    if "trunc" in vector.params.get("rule", ""):
        # computed by the rule that the vector states; the lowering of the chip is tested on its own
        pairs = [numerics.multiplier_and_rshift_truncated(s / out) for s in scales]
        return {"multipliers": [m for m, _ in pairs], "rshifts": [r for _, r in pairs]}
    scaling = operators.add_multipliers_bm1684(scales, out, coefficients)
    return {"multipliers": list(scaling.multipliers), "rshifts": list(scaling.rshifts)}


def _pool_multiplier(vector: Vector, match: Match) -> Answer:
    inputs = vector.inputs
    m, r = operators.avg_pool_multiplier_cv18xx(inputs["in_scale"], inputs["out_scale"], inputs["k"])
    return {"multiplier": m, "rshift": r}


def _qdm(vector: Vector, match: Match) -> Answer:
    inputs = vector.inputs
    tx, ty = 127 * inputs["in_scale"], 127 * inputs["out_scale"]
    scales = [operators.cv18xx_qscale(127 * s, tx, ty) for s in inputs["filter_scales"]]
    pairs = [numerics.qdm_multiplier_and_rshift(s) for s in scales]
    for got, expected in zip([m for m, _ in pairs], vector.expected["multiplier"], strict=True):
        assert abs(got - expected) <= 256  # the tolerance that the note of the vector states
    return {"multiplier": [m for m, _ in pairs], "rshift": [r for _, r in pairs]}


# ---------------------------------------------------------------- operators
def _pads(vector: Vector, size: int, extent: int, axis: int) -> tuple[int, int]:
    """Padding before and after on one axis; if only the first is given, the output size determines the other."""
    p = vector.params
    if "pads" in p:
        return p["pads"][axis], p["pads"][axis + 2]
    before = p.get("pads_top_left", [0, 0])[axis]
    shape = torch.tensor(vector.expected["y_int"]).shape
    stride = p.get("strides", [1, 1])[axis]
    return before, max(0, (shape[axis + 2] - 1) * stride + extent - size - before)


def _conv(vector: Vector, match: Match) -> Answer:
    inputs, p = vector.inputs, vector.params
    source, target = _types(vector)
    x, weight = _reals(inputs["x"]), _reals(inputs["weight"])
    bias = None if inputs.get("bias") is None else _reals(inputs["bias"])
    q, conv = quantize(x, source), operators.lower_conv(weight, bias, source, target)
    dilations = p.get("dilations", [1, 1])
    extents = [(weight.shape[a + 2] - 1) * dilations[a] + 1 for a in (0, 1)]
    ends = [_pads(vector, x.shape[a + 2], extents[a], a) for a in (0, 1)]
    y = operators.run_conv(
        q,
        conv,
        source,
        target,
        strides=p.get("strides", [1, 1]),
        pads=[ends[0][0], ends[1][0], ends[0][1], ends[1][1]],
        dilations=dilations,
        groups=p.get("groups", p.get("group", 1)),
        do_relu=p.get("do_relu", False),
    )
    return {
        "x_int8": q.tolist(),
        "y_int": y.tolist(),
        "multiplier": conv.multiplier.tolist(),
        "rshift": conv.rshift.tolist(),
        "filter_int8": conv.weight.flatten().tolist(),
        "bias_int32": None if conv.bias is None else conv.bias.tolist(),
    }


def _matmul(vector: Vector, match: Match) -> Answer:
    inputs, p = vector.inputs, vector.params
    source, target = _types(vector)
    weight = _reals(inputs["weight_KxN"] if "weight_KxN" in inputs else inputs["weight"])
    bias = None if inputs.get("bias") is None else _reals(inputs["bias"])
    q = quantize(_reals(inputs["x"]), source)
    lowered = operators.lower_matmul(weight, bias, source, target, per_channel=p.get("per_channel", False))
    y = operators.run_matmul(q, lowered, source, target, do_relu=p.get("do_relu", False))
    return {
        "x_int8": q.tolist(),
        "multiplier": lowered.multiplier.reshape(-1).tolist(),
        "rshift": lowered.rshift.reshape(-1).tolist(),
        "filter_int8": lowered.weight.flatten().tolist(),
        "bias_int32": None if lowered.bias is None else lowered.bias.tolist(),
        "y_int8": y.tolist(),
    }


def _elementwise(vector: Vector, match: Match) -> Answer:
    p, relu = vector.params, vector.params.get("do_relu", False)
    sources = [UniformType(*p[name], _dtype(vector, name)) for name in ("a", "b")]
    target = UniformType(*p["out"], _dtype(vector, "out"))
    operands = [quantize(_reals(vector.inputs[n]), s) for n, s in zip(("a", "b"), sources, strict=True)]
    answer: Answer = {"a_int8": operands[0].tolist(), "b_int8": operands[1].tolist()}
    scales = [s.scale for s in sources]
    if match[1] == "Add":
        scaling = operators.add_multipliers(scales, target.scale, p.get("coeff"))
        y = operators.add(operands, sources, target, scaling, do_relu=relu)
        return {
            **answer,
            "multiplier": list(scaling.multipliers),
            "rshift": list(scaling.rshifts),
            "y_int8": y.tolist(),
        }
    m, r = operators.mul_multiplier(scales, target.scale)
    y = operators.mul(operands, sources, target, do_relu=relu)
    return {**answer, "multiplier": [m], "rshift": [r], "y_int8": y.tolist()}


def _avg_pool(vector: Vector, match: Match) -> Answer:
    p = vector.params
    source, target = _types(vector)
    kernel = p.get("kernel", [int(match[1]), int(match[2])])
    q = quantize(_reals(vector.inputs["x"]), source)
    window = kernel[0] * kernel[1]
    shape = {"strides": p.get("strides", kernel), "pads": p.get("pads", [0, 0, 0, 0])}
    if match[3] == "symmetric":
        m, r = operators.avg_pool_multiplier(source.scale, target.scale, window)
        y = operators.avg_pool(q, kernel, source, target, **shape)
        return {"multiplier": [m], "rshift": [r], "x_int8": q.tolist(), "y_int8": y.tolist()}
    scale, offset = operators.avg_pool_scale_and_offset(source, target, window)
    y = operators.avg_pool_asymmetric(q, kernel, source, target, **shape)
    return {"scale": scale, "offset": offset, "x_int8": q.tolist(), "y_int8": y.tolist()}


def _pad(vector: Vector, match: Match) -> Answer:
    source, _ = _types(vector)
    q, side = quantize(_reals(vector.inputs["x"]), source), int(match[2])
    value = float(vector.inputs.get("value", match[1]))
    ends = [0] * (q.dim() - 2) + [side, side]
    y = operators.pad(q, ends * 2, value, source)
    return {"val": float(operators.pad_value(value, source)), "y_int8": y.tolist()}


def _leaky(vector: Vector, match: Match) -> Answer:
    alpha = float(match[1])
    m, r = operators.leaky_relu_multiplier(alpha)
    if "q" in vector.inputs:
        q, dtype = torch.tensor(vector.inputs["q"]), INT8
    else:
        source, target = _types(vector)
        q, dtype = quantize(_reals(vector.inputs["x"]), source), target.dtype
    return {"multiplier": [m], "rshift": [r], "y_int8": operators.leaky_relu(q, alpha, dtype).tolist()}


def _prelu(vector: Vector, match: Match) -> Answer:
    source, target = _types(vector)
    slopes = _reals(vector.inputs["slope"])
    integers, rshift = operators.prelu_slopes(slopes)
    q = quantize(_reals(vector.inputs["x"]), source)
    y = operators.prelu(q, slopes, target.dtype)
    return {"rshift": [rshift], "slope_int8": integers.tolist(), "y_int8": y.tolist()}


def _prelu_ties(vector: Vector, match: Match) -> Answer:
    q = torch.tensor(vector.inputs["q"])
    # two channels, because a single slope is computed as a LeakyRelu
    both = torch.stack([q, q]).unsqueeze(0)
    y = operators.prelu(both, _reals([float(match[1])] * 2))
    assert bool((y[0, 0] == y[0, 1]).all())
    return {"y_int8": y[0, 0].tolist()}


# ---------------------------------------------------------------- casts and calibration
def _cast(vector: Vector, match: Match) -> Answer:
    p = vector.params
    target = UniformType(p["scale"], p["zero_point"], DTYPES[p.get("dtype", "int8")])
    return {"q": quantize(_reals(vector.inputs["x"]), target).tolist()}


def _row(vector: Vector, match: Match) -> Answer:
    i, p = vector.inputs, vector.params
    derived = uniform_type_of_row(
        i["threshold"], i["min"], i["max"], asymmetric=p["asymmetric"], bits=p.get("bits", p.get("bitwidth", 8))
    )
    return {"dtype": derived.dtype.name, "scale": derived.scale, "zp": derived.zero_point}


def _threshold(vector: Vector, match: Match) -> Answer:
    x = _reals(vector.inputs["x"])
    return {"threshold": calibration.threshold(x, match[1], vector.params.get("bits", 8))}


def _kl_of_counts(vector: Vector, match: Match) -> Answer:
    counts, p = torch.tensor(vector.inputs["hist"]), vector.params
    return {"threshold": calibration.kl_threshold_of_counts(counts, p["bin_width"], p["dst_bins"])}


def _kl_of_data(vector: Vector, match: Match) -> Answer:
    p = vector.params
    bits = 8 if p.get("dst_bins", 128) == 128 else 4
    return {"threshold": calibration.kl_threshold(_reals(vector.inputs["x"]), bits, p.get("bins", 2048))}


def _methods(vector: Vector, match: Match) -> Answer:
    x = torch.from_numpy(generate(vector.inputs["generator"]))
    answer = {}
    for key in vector.expected:
        name = re.fullmatch(r"(\D+?)(4|8)?", key)
        method, bits = ("percentile9999", None) if name is None else (name[1], name[2])
        method = {"absmax": "max", "percentile": "percentile9999"}.get(method, method)
        answer[key] = calibration.threshold(x, method, int(bits or 8))
    return answer


#: Patterns that match the whole name of an operation, and their functions; the first match counts.
TPU_MLIR: tuple[tuple[str, Callable[[Vector, Match], Answer]], ...] = (
    (r"get_scale_and_shift(_positive)?", _search),
    (r"QuantizeMultiplier.*", _doc_example),
    (r"(Conv|MatMul|Add|Mul|AvgPool)(?:2D)? int8 symmetric requant ties", _ties),
    (r"Conv(?:2D)? int8 a?symmetric", _conv),
    (r"MatMul int8 a?symmetric", _matmul),
    (r"(Add|Mul) int8 a?symmetric", _elementwise),
    (r"AvgPool(\d+)x(\d+) int8 (a?symmetric)", _avg_pool),
    (r"AvgPool\d+x\d+ int8 multiplier, cv18\w+", _pool_multiplier),
    (r"Add int8 multipliers, (bm1684|cv18\w+)", _add_multipliers),
    (r"Conv2D QDM multipliers, cv18\w+.*", _qdm),
    (r"Pad\(constant ([-\d.e]+), (\d+) each side\) int8 a?symmetric", _pad),
    (r"LeakyRelu\(alpha=([-\d.e]+)\) int8 symmetric", _leaky),
    (r"LeakyRelu int8 symmetric ties \(slope ([-\d.e]+)\)", _leaky),
    (r"PRelu\(slopes .*\) int8 symmetric", _prelu),
    (r"PRelu int8 symmetric ties \(slope ([-\d.e]+)\)", _prelu_ties),
    (r"Cast f32->int8.*", _cast),
    (r"calibration row -> quant params", _row),
    (r"threshold_(\w+)", _threshold),
    (r"kl_diversity_hist", _kl_of_counts),
    (r"kl threshold from data", _kl_of_data),
    (r"threshold methods on generated data", _methods),
)
