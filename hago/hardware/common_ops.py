"""The ops of common networks: which of them a chip does not compute in integers, and what other systems call them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

#: By the name of an op in other systems, that of hago, and what else is to be known. Names that hardware files may use
#: are aliases of rules instead.
FOREIGN_OPS: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(
        ("depthwise_conv2d", "depthwise_conv", "depthwiseconv2d", "dwconv", "dwconv2d", "group_conv2d"),
        ("conv2d", "which has every number of groups: a depthwise convolution has as many as channels"),
    ),
    **dict.fromkeys(("conv", "convolution", "conv_2d"), ("conv2d", "or 'conv1d'")),
    **dict.fromkeys(("deconv", "deconv2d", "transpose_conv", "conv2d_transpose"), ("conv_transpose2d", "")),
    **dict.fromkeys(("fully_connected", "fullyconnected", "fc", "gemm", "inner_product"), ("linear", "")),
    "mm": ("matmul", ""),
    **dict.fromkeys(("maxpool", "max_pool", "max_pooling"), ("max_pool2d", "or 'max_pool1d'")),
    **dict.fromkeys(("avgpool", "average_pool", "avg_pool", "average_pooling"), ("avg_pool2d", "or 'avg_pool1d'")),
    **dict.fromkeys(("global_average_pool", "global_avg_pool", "gap"), ("adaptive_avg_pool2d", "or 'mean'")),
    **dict.fromkeys(("concatenation", "cat"), ("concat", "")),
    "view": ("reshape", ""),
    **dict.fromkeys(("hard_swish", "hswish"), ("hardswish", "")),
    "logistic": ("sigmoid", ""),
    **dict.fromkeys(("eltwise_add", "elementwise_add", "residual"), ("add", "")),
}


def foreign_op(name: str, known: Iterable[str]) -> str:
    """`"hago calls it 'linear'"` for the name of an op in other systems, else an empty string.

    Args:
        known: the ops that a hardware file may list.
    """
    own, more = FOREIGN_OPS.get(name.lower().rpartition(".")[2], ("", ""))
    return f"hago calls it {own!r}{', ' if more else ''}{more}" if own in known else ""


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
