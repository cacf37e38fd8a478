"""clamp: values cut off at `min` and `max`, either of which may be None; also relu6 and hardtanh."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hago.ops._rule import Attrs, Call, IntegerForm, OpRule, Parsed, Refusal, Sample
from hago.ops._shared import has_ref

_RELU6: Final = {"min": 0.0, "max": 6.0}
#: Beyond every accumulator, and still an int64.
_FARTHEST: Final = float(1 << 62)


def upper_clip(attrs: Attrs) -> float | None:
    """The limit of a clamp from 0, such as relu6; None where it has none, or begins elsewhere."""
    limit: float | None = attrs["max"] if attrs["min"] == 0.0 else None
    return limit


def _parse(call: Call) -> Parsed | None:
    given: Mapping[str, Any] = call.arguments if call.target != "aten.relu6.default" else _RELU6
    low, high = given.get("min", given.get("min_val")), given.get("max", given.get("max_val"))
    if has_ref([low, high]):
        return None
    finite = {k: v for k, v in (("min", low), ("max", high)) if v is not None and math.isfinite(v)}
    return Parsed((call["self"],), {k: finite.get(k) for k in ("min", "max")}) if finite else None


class _Clamp(torch.autograd.Function):
    """`torch.clamp` of values between two numbers, with its gradients from one pass over memory instead of four."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limits = low, high
        return torch.clamp(x, low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,), (low, high) = ctx.saved_tensors, ctx.limits
        # a hardtanh passes no gradient at its limits, a clamp does
        ends = torch.tensor([low, high], dtype=x.dtype)
        below, above = torch.nextafter(ends, ends.new_tensor([-math.inf, math.inf])).tolist()
        return torch.ops.aten.hardtanh_backward(gradients[0], x, below, above), None, None


def _compute(attrs: Attrs, x: Tensor) -> Tensor:
    low, high = attrs["min"], attrs["max"]
    if x.requires_grad and torch.is_grad_enabled() and low is not None and high is not None and low <= high:
        clamped: Tensor = _Clamp.apply(x, low, high)  # type: ignore[no-untyped-call]
        return clamped
    return torch.clamp(x, low, high)


def _compute_int(attrs: Attrs, c: Tensor) -> Tensor:
    low, high = (v.to(c) if isinstance(v, Tensor) else v for v in (attrs["min"], attrs["max"]))
    return torch.clamp(c, low, high)


def quanta(limit: float | Tensor | None, scale: Tensor) -> int | Tensor | None:
    """A limit in whole quanta of a scale; None for no limit."""
    if limit is None:
        return None
    whole = torch.round(limit / scale).clamp(-_FARTHEST, _FARTHEST).to(torch.int64)
    return int(whole.item()) if whole.numel() == 1 else whole


def _integer_attrs(attrs: Attrs, scales: Sequence[Tensor]) -> Attrs:
    return {k: quanta(attrs[k], scales[0]) for k in ("min", "max")}


def _unsupported(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> str | None:
    low, high = attrs["min"], attrs["max"]
    if (low is None or low <= 0) and (high is None or high >= 0):
        return None
    return f"clamp to [{low}, {high}] leaves out 0, so its limits need not be among the input's integers"


RULE = OpRule(
    name="clamp",
    aten=tuple(f"aten.{n}.default" for n in ("clamp", "clamp_min", "clamp_max", "hardtanh", "relu6")),
    parse=_parse,
    compute=_compute,
    integer=IntegerForm(
        slots=("follow",),
        compute=_compute_int,
        attrs=_integer_attrs,
        accepts_per_channel="all",
        unsupported=_unsupported,
        limits=lambda attrs: (attrs["min"], attrs["max"]),
    ),
    any_layout=True,
    clips_or_averages=True,
    samples=(
        Sample(F.relu6, ((2, 3, 4, 4),), low=-9.0, high=9.0),
        Sample(lambda x: F.hardtanh(x, -1.5, 0.5), ((2, 3, 4, 4),)),
        Sample(lambda x: torch.clamp(x, -1, 1), ((2, 5),)),
        Sample(lambda x: torch.clamp(x, min=-0.5), ((2, 5),)),
        Sample(lambda x: x.clamp_max(0.7), ((2, 5),)),
        Sample(lambda x: x.clamp_min(0.3), ((2, 5),)),
    ),
    refuses=(Refusal({"min": None, "max": None}, ((1, 3),), "min"),),
    aliases=("clip", "relu6", "hardtanh"),
)
