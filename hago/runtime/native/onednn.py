"""oneDNN's int8 convolution and matrix product, called through torch.

Activations are uint8, weights int8 without zero points. Sums come out as float32, exact below 2**24, or
requantized in the kernel: `rint(sum * scale + bias + zero point)` in float32, where a power-of-two scale is
exact and the zero point costs no bit while the scale is at least 2**-16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.numerics import Requantize, is_power_of_two, ratio
from hago.arithmetic.types import SimQ
from hago.runtime.native.weights import Geometry

CHANNELS_LAST: Final = torch.channels_last
#: The finest scale at which a sum, with a zero point added, keeps all its bits.
FINEST: Final = 2.0**-16


@dataclass(frozen=True, slots=True)
class OnednnConv:
    """A call of oneDNN's convolution.

    Args:
        weight: prepacked.
        zero: of the activations, as uint8.
        scales: float32 per output channel: the ratio to the scale of the output, or 1 for unscaled sums.
        bias: float32, in units of the output, or None.
        out_zero: zero point of the output.
        dtype: uint8, int8 or float32 of the output.
    """

    weight: Tensor
    geometry: Geometry
    zero: int
    scales: Tensor
    bias: Tensor | None
    out_zero: int
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Convolve uint8 values of shape (N, channels, H, W); the output has the shape (N, out_channels, H', W')."""
        g = self.geometry
        zeros = torch.zeros(g.out_channels, dtype=torch.int32)
        output: Tensor = torch.ops.onednn.qconv_pointwise(
            x.contiguous(memory_format=CHANNELS_LAST), 1.0, self.zero, self.weight, self.scales, zeros, self.bias,
            list(g.stride), list(g.padding), list(g.dilation), g.groups, 1.0, self.out_zero, self.dtype,
            "none", [], "",
        )  # fmt: skip
        return output


def prepack(weight: Tensor, geometry: Geometry, zero: int) -> Tensor:
    """int8 weights of shape (out, in / groups, h, w) in oneDNN's own order."""
    g = geometry
    prepacked: Tensor = torch.ops.onednn.qconv_prepack(
        weight, torch.ones(g.out_channels), 1.0, zero, list(g.stride), list(g.padding), list(g.dilation), g.groups, None
    )
    return prepacked


def requantizes_exactly(simq: SimQ, how: Requantize) -> bool:
    """Whether oneDNN requantizes sums below 2**24 as the Plan does.

    It does if the target is bytes of one scale, every ratio is a power of two that is not finer than `FINEST`, and
    rounding is half to even.
    """
    source, target = simq.source, simq.target
    if (
        source is None
        or target is None
        or simq.via is not None
        or how.form not in ("float32", "onnxruntime", "shift")
        or how.rounding != "half_even"
    ):
        return False
    r = ratio(source, target)
    bytes_ = target.dtype.torch in (torch.uint8, torch.int8) and target.scale.numel() == 1
    return bytes_ and is_power_of_two(r) and float(r.min()) >= FINEST and float(r.max()) <= 1.0 / FINEST


def run_on_any_rank(
    conv: OnednnConv, flat: bool, signed: bool, clip: tuple[int, int] | None, stored: Callable[[Tensor], Tensor] | None
) -> Callable[[Sequence[Any]], Sequence[Tensor]]:
    """A function that calls oneDNN on a value of any rank.

    Args:
        flat: whether the channels are the last axis, so that every row is a pixel.
        signed: whether the values are int8.
        clip: the limits of q, if they are narrower than those of the dtype.
        stored: applied to sums, if oneDNN does not requantize them.
    """

    def run(values: Sequence[Any]) -> Sequence[Tensor]:
        x = values[0]
        image = (x.view(torch.uint8) ^ 128) if signed else x
        if flat:
            image = image.reshape(-1, conv.geometry.channels, 1, 1)
        elif x.ndim == 3:
            image = image.unsqueeze(2)
        out = conv(image)
        if clip is not None:
            out.clamp_(*clip)
        if flat:
            out = out.reshape(*x.shape[:-1], conv.geometry.out_channels)
        elif x.ndim == 3:
            out = out.squeeze(2)
        return (out if stored is None else stored(out),)

    return run


def onednn_conv(x: Tensor, w: Tensor, groups: int) -> Tensor:
    """The sums of a convolution without padding, as float32."""
    return _plain(x, w, groups, 1.0, 0, torch.float32)


def onednn_fused(x: Tensor, w: Tensor, scale: float, zero: int) -> Tensor:
    """The sums times a scale, as uint8."""
    return _plain(x, w, 1, scale, zero, torch.uint8)


def _plain(x: Tensor, w: Tensor, groups: int, scale: float, zero: int, dtype: torch.dtype) -> Tensor:
    out, each, height, width = map(int, w.shape)
    geometry = Geometry(each * groups, out, groups, (height, width), (1, 1), (0, 0), (1, 1))
    packed = prepack(w, geometry, 0)
    return OnednnConv(packed, geometry, 0, torch.full((out,), scale), None, zero, dtype)(x)
