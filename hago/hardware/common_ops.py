"""The ops of common networks, and which of them a chip does not compute in integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hago.hardware.hardware import Hardware, OtherOps

#: By family of networks, the ops that it needs beside those of the families before it, once batch norms are folded.
COMMON_OPS: Final[Mapping[str, tuple[str, ...]]] = {
    "convolutional networks (ResNet, VGG, SqueezeNet, DenseNet)": (
        *("conv2d", "linear", "relu", "add", "concat", "pad", "slice"),
        *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "reshape"),
    ),
    "networks for mobile devices (MobileNet, EfficientNet, ShuffleNet)": (
        *("clamp", "mean", "mul", "sigmoid", "silu", "hardsigmoid", "hardswish", "permute"),
    ),
    "transformers (BERT, ViT, Swin)": (
        *("matmul", "softmax", "layer_norm", "gelu", "embedding", "tanh", "sub", "div", "sum"),
        *("expand", "select", "squeeze", "unsqueeze", "index"),
    ),
    "segmentation, detection and super-resolution (U-Net, YOLO, ESPCN)": (
        *("conv_transpose2d", "upsample_nearest2d", "upsample_bilinear2d", "leaky_relu", "prelu", "pixel_shuffle"),
    ),
    "sound and time series (temporal convolutions)": ("conv1d", "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d"),
}

#: The ops that move values and compute nothing.
DATA_MOVEMENT: Final = (
    *("concat", "stack", "pad", "reshape", "permute", "squeeze", "unsqueeze", "expand", "slice", "select", "index"),
    *("pixel_shuffle", "upsample_nearest2d", "embedding"),
)


@dataclass(frozen=True, slots=True)
class MissingOps:
    """The common ops that a chip does not compute in integers, by family of networks. Made by `missing_common_ops`.

    Args:
        unlisted: ops without a line in the hardware file.
        float_only: ops whose signatures are all float.
        other_ops: what the hardware does with the unlisted ones.
    """

    unlisted: Mapping[str, tuple[str, ...]]
    float_only: Mapping[str, tuple[str, ...]]
    other_ops: OtherOps

    def __str__(self) -> str:
        lines: list[str] = []
        if self.unlisted:
            fate = "refuses networks with them" if self.other_ops == "reject" else "makes them float islands"
            lines.append(f"common ops that the file does not list, so that other_ops {self.other_ops!r} {fate}:")
            lines += [f"  {family}: {', '.join(ops)}" for family, ops in self.unlisted.items()]
        if self.float_only:
            lines.append("common ops without a signature in integers, which are float islands:")
            lines += [f"  {family}: {', '.join(ops)}" for family, ops in self.float_only.items()]
        return "\n".join(lines or ["all common ops run in integers"])


def missing_common_ops(hardware: Hardware) -> MissingOps:
    """The common ops that the hardware does not compute in integers."""
    unlisted: dict[str, tuple[str, ...]] = {}
    float_only: dict[str, tuple[str, ...]] = {}
    for family, ops in COMMON_OPS.items():
        if absent := tuple(op for op in ops if op not in hardware.ops):
            unlisted[family] = absent
        # weight-only signatures compute in float
        if floats := tuple(op for op in ops if op in hardware.ops and not hardware.integer_descs(op)):
            float_only[family] = floats
    return MissingOps(unlisted, float_only, hardware.other_ops)
