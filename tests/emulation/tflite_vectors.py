"""The functions that compute the conformance vectors of gemmlowp and TFLite, by the name of the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from emulation.vectors import Vector
from hago.emulation import gemmlowp, tflite
from hago.errors import HagoError

Answer = dict[str, Any]


def _integers(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


# ---------------------------------------------------------------- gemmlowp
def _high_mul(vector: Vector) -> Answer:
    a, b = _integers(vector.inputs["a"]), _integers(vector.inputs["b"])
    bits = vector.params.get("bits", 16 if "int16" in vector.op else 32)
    return {"y": gemmlowp.saturating_rounding_doubling_high_mul(a, b, bits).tolist()}


def _divide_by_pot(vector: Vector) -> Answer:
    exponent = vector.params.get("exponent", vector.inputs.get("exponent"))
    return {"y": gemmlowp.rounding_divide_by_pot(_integers(vector.inputs["x"]), _integers(exponent)).tolist()}


def _gemm(vector: Vector) -> Answer:
    gemm = gemmlowp.quantized_gemm(torch.tensor(vector.inputs["lhs"]), torch.tensor(vector.inputs["rhs"]))
    return {
        "lhs_scale": gemm.lhs_scale,
        "lhs_zp": gemm.lhs_zero_point,
        "rhs_scale": gemm.rhs_scale,
        "rhs_zp": gemm.rhs_zero_point,
        "result_scale": gemm.result_scale,
        "result_zp": gemm.result_zero_point,
        "lhs_q": gemm.lhs.tolist(),
        "rhs_q": gemm.rhs.tolist(),
        "real_multiplier": gemm.real_multiplier,
        "quantized_multiplier": gemm.multiplier,
        "right_shift": gemm.right_shift,
        "result_q": gemm.result.tolist(),
    }


# ---------------------------------------------------------------- tflite
def _quantize_multiplier(vector: Vector) -> Answer:
    inputs = vector.inputs
    real = next(inputs[key] for key in ("real_multiplier", "weights", "effective_scales") if key in inputs)
    multiplier, shift = tflite.quantize_multiplier(torch.tensor(real, dtype=torch.float64))
    answer = {"quantized_multiplier": multiplier.tolist(), "shift": shift.tolist()}
    if isinstance(real, float) and 0 < real < 1 and answer["shift"] <= 0:
        assert tflite.quantize_multiplier_smaller_than_one(real) == tuple(answer.values())
    if isinstance(real, float) and real > 1:
        assert tflite.quantize_multiplier_greater_than_one(real) == tuple(answer.values())
    return answer


def _multiply(vector: Vector) -> Answer:
    x, params = _integers(vector.inputs["x"]), {**vector.params, **vector.inputs}
    m, shift = _integers(params["quantized_multiplier"]), _integers(params["shift"])
    if "int64" in vector.op:
        return {"y": tflite.multiply_by_quantized_multiplier_int64(x, m, shift).tolist()}
    double = tflite.multiply_by_quantized_multiplier(x, m, shift, "double").tolist()
    single = tflite.multiply_by_quantized_multiplier(x, m, shift, "single").tolist()
    y = single if "single rounding" in vector.op else double
    return {"y": y, "double_rounding": double, "single_rounding": single}


def _choose(vector: Vector) -> Answer:
    inputs, params = vector.inputs, vector.params
    try:
        scale, zero = tflite.choose_quantization_params(inputs["rmin"], inputs["rmax"], params["qmin"], params["qmax"])
    except HagoError:
        return dict.fromkeys(vector.expected, "refused")
    return {"scale": scale, "zero_point": zero}


#: Functions by the start of an operation's name; the first that matches is called.
GEMMLOWP: dict[str, Callable[[Vector], Answer]] = {
    "SaturatingRoundingDoublingHighMul": _high_mul,
    "RoundingDivideByPOT": _divide_by_pot,
    "end-to-end uint8 GEMM": _gemm,
}
TFLITE: dict[str, Callable[[Vector], Answer]] = {
    "QuantizeMultiplier": _quantize_multiplier,
    "MultiplyByQuantizedMultiplier": _multiply,
    "ChooseQuantizationParams": _choose,
}
