"""The ONNX operators of hago's float ops: the table `OPERATORS`, with a converter per op.

A converter is a function that writes the ONNX nodes of one hago node on real values; `write_float_node` looks it up and
calls it. Ops that ONNX has as a single node share the converters `one_node` and `with_integers`; ops that take several
nodes have a function each. ATen calls without an op of hago (the op `opaque`) are in the table `ATEN_CALLS`, by target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from hago.errors import UnsupportedOp
from hago.export.onnx.writer import GraphWriter
from hago.graph import Node
from hago.ops import opaque

#: The end of a Slice that reaches to the last element.
_TO_THE_END: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion of one node, made by `write_float_node` and passed to the converter of the node's op.

    Args:
        writer: the ONNX graph to append to.
        node: the node of hago.
        x: the names of the tensors that the node reads, as real values.
        out: the name of the tensor that the converter must write.
    """

    writer: GraphWriter
    node: Node
    x: Sequence[str]
    out: str

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.node.attrs

    def shape(self, slot: int = 0) -> tuple[int, ...]:
        """The shape of an input at batch 1."""
        return self.writer.graph[self.node.inputs[slot]].shape or ()

    def output(self, kind: str, inputs: Sequence[str], **attrs: Any) -> None:
        """Append the ONNX node that writes the output."""
        self.writer.op(kind, inputs, self.out, **attrs)

    def step(self, kind: str, inputs: Sequence[str], **attrs: Any) -> str:
        """Append an ONNX node for an intermediate value, and return its name."""
        return self.writer.step(kind, inputs, self.out, **attrs)

    def integers(self, values: Sequence[int]) -> str:
        """A constant list of int64."""
        return self.writer.integers(values, self.out)

    def number(self, value: float, dtype: str = "float32") -> str:
        """A constant scalar."""
        return self.writer.number(value, self.out, dtype)

    def constant(self, suffix: str, value: Any) -> str:
        """A constant tensor whose name ends in `suffix`."""
        return self.writer.constant(self.fresh(suffix), value)

    def fresh(self, suffix: str) -> str:
        """A new name for a tensor, from that of the output."""
        return self.writer.fresh(f"{self.out}:{suffix}")


Converter = Callable[[Conversion], None]


def one_node(kind: str, opset: int = 0, attributes: Mapping[str, str] | None = None, **constant: Any) -> Converter:
    """The converter of an op that is a single ONNX node on the same inputs.

    Args:
        opset: the first opset that has the ONNX operator.
        attributes: attributes of the ONNX operator, each with the name that the op of hago gives it.
        constant: attributes that are the same for every node of the op.
    """

    def convert(c: Conversion) -> None:
        c.writer.need(opset)
        c.output(kind, c.x, **constant, **{theirs: c.attrs[ours] for theirs, ours in (attributes or {}).items()})

    return convert


def with_integers(kind: str, attribute: str, opset: int = 0, keepdims: bool = False) -> Converter:
    """The converter of an op that is a single ONNX node, one of whose attributes is an input there: a list of int64.

    Args:
        keepdims: whether the ONNX operator has this attribute.
    """

    def convert(c: Conversion) -> None:
        c.writer.need(opset)
        value = c.attrs[attribute]
        integers = c.integers([value] if isinstance(value, int) else value)
        c.output(kind, [c.x[0], integers], keepdims=int(c.attrs["keepdim"]) if keepdims else None)

    return convert


# ---------------------------------------------------------------- convolutions and products
def onnx_padding(attrs: Mapping[str, Any], kernel: Sequence[int]) -> list[int]:
    """The `pads` of an ONNX convolution, all starts and then all ends, from PyTorch's `padding`: a list, "valid" or
    "same". A list that has starts and ends already is returned as it is."""
    padding = attrs["padding"]
    if padding == "valid":
        return [0] * (2 * len(kernel))
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(attrs["dilation"], kernel, strict=True)]
        return [t // 2 for t in total] + [t - t // 2 for t in total]
    return list(padding) if len(padding) == 2 * len(kernel) else list(padding) * 2


def convolution_window(attrs: Mapping[str, Any], kernel: Sequence[int]) -> dict[str, Any]:
    """The attributes of an ONNX convolution that describe its window."""
    return {
        "kernel_shape": list(kernel),
        "strides": attrs["stride"],
        "pads": onnx_padding(attrs, kernel),
        "dilations": attrs["dilation"],
    }


def _convert_conv(c: Conversion) -> None:
    c.output("Conv", c.x, group=c.attrs["groups"], **convolution_window(c.attrs, c.shape(1)[2:]))


def _convert_conv_transpose(c: Conversion) -> None:
    window = convolution_window(c.attrs, c.shape(1)[2:])
    c.output("ConvTranspose", c.x, group=c.attrs["groups"], output_padding=c.attrs["output_padding"], **window)


def _convert_linear(c: Conversion) -> None:
    if len(c.shape()) == 2:
        c.output("Gemm", c.x, transB=1)
        return
    transposed = c.step("Transpose", c.x[1:2], perm=[1, 0])
    if len(c.x) == 2:
        c.output("MatMul", [c.x[0], transposed])
    else:
        c.output("Add", [c.step("MatMul", [c.x[0], transposed]), c.x[2]])


def _convert_matmul(c: Conversion) -> None:
    c.output("MatMul" if len(c.x) == 2 else "Gemm", c.x)


def unflattened_shape(w: GraphWriter, x: str, shape: Sequence[int], out: str) -> str:
    """The shape that turns the rows of a matrix product back into a tensor of more than two axes.

    Args:
        x: the tensor that was flattened to rows; all its axes but the last are kept.
        shape: of the result at batch 1.
    """
    if shape[0] == 1 and 1 not in shape[1:-1]:
        return w.integers([-1, *shape[1:]], out)
    # the batch may be on any axis
    leading_sizes = w.step("Shape", [x], out, start=0, end=-1)
    return w.step("Concat", [leading_sizes, w.integers(shape[-1:], out)], out, axis=0)


# ---------------------------------------------------------------- arithmetic and activations
def _real_arithmetic(kind: str) -> Converter:
    """The converter of an arithmetic op; operands that are integers or booleans are cast to float32."""

    def convert(c: Conversion) -> None:
        c.output(kind, _real_operands(c))

    return convert


def _real_operands(c: Conversion) -> list[str]:
    """The operands as float32; integers and booleans are cast."""
    return [
        x if c.writer.dtype(source).is_floating_point else c.step("Cast", [x], to=c.writer.element_type("float32"))
        for source, x in zip(c.node.inputs, c.x, strict=True)
    ]


def _convert_div(c: Conversion) -> None:
    x = _real_operands(c)
    divisor = c.number(c.attrs["divisor"]) if len(x) == 1 else x[1]
    if "plus" in c.attrs:
        divisor = c.step("Add", [divisor, c.number(c.attrs["plus"])])
    c.output("Div", [x[0], divisor])


def _convert_clamp(c: Conversion) -> None:
    limits = ["" if c.attrs[k] is None else c.number(c.attrs[k]) for k in ("min", "max")]
    c.output("Clip", [c.x[0], *(limits if limits[1] else limits[:1])])


def _convert_channel_clamp(c: Conversion) -> None:
    shape = [1] * c.attrs["rank"]
    shape[c.attrs["axis"]] = -1
    limits = torch.tensor(c.attrs["limits"], dtype=torch.float64).reshape(shape)
    c.output("Min", [c.step("Relu", c.x), c.constant("limits", limits.to(torch.float32))])


def _convert_silu(c: Conversion) -> None:
    c.output("Mul", [c.x[0], c.step("Sigmoid", c.x)])


def _channel_shape(c: Conversion) -> str:
    """The constant shape in which a vector over channels broadcasts against the input."""
    return c.integers([-1, *[1] * (len(c.shape()) - 2)])


def _convert_prelu(c: Conversion) -> None:
    shape = _channel_shape(c)
    c.output("PRelu", [c.x[0], c.step("Reshape", [c.x[1], shape])])


def _convert_affine(c: Conversion) -> None:
    shape = _channel_shape(c)
    scale, bias = (c.step("Reshape", [v, shape]) for v in c.x[1:])
    c.output("Add", [c.step("Mul", [c.x[0], scale]), bias])


def _convert_to(c: Conversion) -> None:
    c.output("Cast", c.x, to=c.writer.element_type(c.attrs["dtype"]))


def _convert_softmax(c: Conversion) -> None:
    """A softmax, and a maximum with 0 that changes no value but prevents ONNX Runtime from fusing a softmax between
    quantized tensors: its QLinearSoftmax multiplies by floor(1 / scale), which is wrong where 1 / scale is no integer.
    """
    x = c.x
    if "scale" in c.attrs:
        x = [c.step("Mul", [x[0], c.number(c.attrs["scale"])])]
    c.output("Max", [c.step("Softmax", x, axis=c.attrs["axis"]), c.number(0.0)])


# ---------------------------------------------------------------- pooling
def pooling_window(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of an ONNX pooling that describe its window."""
    return {
        "kernel_shape": attrs["kernel_size"],
        "strides": attrs["stride"],
        "pads": list(attrs["padding"]) * 2,
        "ceil_mode": int(attrs["ceil_mode"]),
    }


def _convert_max_pool(c: Conversion) -> None:
    c.output("MaxPool", c.x, dilations=c.attrs["dilation"], **pooling_window(c.attrs))


def _convert_avg_pool(c: Conversion) -> None:
    """An average; with ceil_mode also a maximum that changes no value but prevents ONNX Runtime from fusing an average
    between quantized tensors: its QLinearAveragePool divides by the size of the whole window where that leaves the
    input."""
    attrs, divisor = c.attrs, c.attrs.get("divisor_override")
    if divisor and attrs["ceil_mode"]:
        raise UnsupportedOp("ONNX has no average with a divisor of its own and ceil_mode")
    if attrs["ceil_mode"]:
        average = c.step("AveragePool", c.x, count_include_pad=int(attrs["count_include_pad"]), **pooling_window(attrs))
        c.output("Max", [average, c.number(float(np.finfo(np.float32).min))])
        return
    if not divisor:
        c.output("AveragePool", c.x, count_include_pad=int(attrs["count_include_pad"]), **pooling_window(attrs))
        return
    average = c.step("AveragePool", c.x, count_include_pad=1, **pooling_window(attrs))
    c.output("Mul", [average, c.number(math.prod(attrs["kernel_size"]) / divisor)])


def _uniform_window(c: Conversion) -> dict[str, Any] | None:
    """The window of an adaptive pooling all of whose windows have the same size; None if they differ."""
    sizes = c.shape()[2:]
    output = [n if o is None else o for o, n in zip(c.attrs["output_size"], sizes, strict=True)]
    if any(n % o for n, o in zip(sizes, output, strict=True)):
        return None
    windows = [n // o for n, o in zip(sizes, output, strict=True)]
    return {"kernel_shape": windows, "strides": windows}


def _convert_adaptive_avg_pool(c: Conversion) -> None:
    window = _uniform_window(c)
    if set(c.attrs["output_size"]) == {1}:
        c.output("GlobalAveragePool", c.x)
    elif window is not None:
        c.output("AveragePool", c.x, **window)
    else:
        _average_by_matrices(c)


def _average_by_matrices(c: Conversion) -> None:
    """Average over windows of different sizes: one product per axis with the matrix of their weights."""
    value, sizes = c.x[0], c.shape()[2:]
    for axis, (n, o) in enumerate(zip(sizes, c.attrs["output_size"], strict=True)):
        o = n if o is None else o
        weights = np.zeros((n, o), dtype=np.float32)
        for i in range(o):
            low, high = i * n // o, -((-(i + 1) * n) // o)
            weights[low:high, i] = 1.0 / (high - low)
        is_last = axis == len(sizes) - 1
        name = c.out if is_last else c.fresh("rows")
        if is_last:
            c.writer.op("MatMul", [value, c.constant("means", weights)], name)
        else:
            c.writer.op("MatMul", [c.constant("means", weights.T.copy()), value], name)
        value = name


def _convert_adaptive_max_pool(c: Conversion) -> None:
    window = _uniform_window(c)
    if window is None:
        raise UnsupportedOp("ONNX has no maximum over windows of different sizes")
    c.output("MaxPool", c.x, **window)


# ---------------------------------------------------------------- shapes
def _convert_stack(c: Conversion) -> None:
    axis = c.attrs["axis"]
    c.output("Concat", [c.step("Unsqueeze", [v, c.integers([axis])]) for v in c.x], axis=axis)


def _convert_reshape(c: Conversion) -> None:
    x, shape = c.x[0], c.shape()
    if len(shape) > 2 and set(shape[2:]) == {1}:
        x = _transpose_to_channels_last(c.writer, x, len(shape), c.out)
    c.output("Reshape", [x, c.integers(c.attrs["shape"])])


def _convert_squeeze(c: Conversion) -> None:
    axes = c.attrs["axes"]
    if axes == list(range(2, len(c.shape()))):
        squeeze_pooled(c.writer, c.x[0], len(axes) + 2, c.out)
    else:
        c.output("Squeeze", [c.x[0], c.integers(axes)])


def squeeze_pooled(w: GraphWriter, x: str, rank: int, out: str) -> None:
    """Remove the spatial axes, all of size 1, of a tensor of this rank."""
    w.op("Squeeze", [_transpose_to_channels_last(w, x, rank, out), w.integers(range(1, rank - 1), out)], out)


def _transpose_to_channels_last(w: GraphWriter, x: str, rank: int, out: str) -> str:
    """Move the channels of a tensor behind spatial axes of size 1, which changes nothing in memory.

    With it ONNX Runtime keeps channels last up to here. Its layout optimization does not move past a Clip that no
    Transpose follows, and a global pooling with channels first takes twelve times as long.
    """
    return w.step("Transpose", [x], out, perm=[0, *range(2, rank), 1])


def _sizes(c: Conversion, values: Sequence[Any], unchanged: int = -1) -> str:
    """Sizes as one tensor of int64, constant if all are numbers.

    Args:
        values: integers, or references to inputs of an ATen call that are sizes.
        unchanged: the number that has the meaning of -1 in the ONNX operator.
    """
    if not any(map(_is_input, values)):
        return c.integers([unchanged if v == -1 else v for v in values])
    zero = c.integers([0])
    elements = [
        c.step("Unsqueeze", [c.x[v["$"]], zero]) if _is_input(v) else c.integers([unchanged if v == -1 else v])
        for v in values
    ]
    return c.step("Concat", elements, axis=0)


def _expand(c: Conversion, sizes: Sequence[Any]) -> None:
    """Expand the first input to these sizes; ONNX keeps a size that is to be expanded to 1."""
    c.output("Expand", [c.x[0], _sizes(c, sizes, 1)])


def _convert_expand(c: Conversion) -> None:
    _expand(c, c.attrs["size"])


def _convert_slice(c: Conversion) -> None:
    a = c.attrs
    stop = _TO_THE_END if a["stop"] is None else a["stop"]
    c.output("Slice", [c.x[0], *(c.integers([v]) for v in (a["start"], stop, a["axis"], a["step"]))])


def _convert_select(c: Conversion) -> None:
    index = c.number(c.attrs["index"], "int64")
    c.output("Gather", [c.x[0], index], axis=c.attrs["axis"])


_PAD_MODES: Final = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def pad_sizes(node: Node, rank: int) -> list[int]:
    """The `pads` of an ONNX Pad, all starts and then all ends, from PyTorch's pairs that begin at the last axis."""
    pairs = list(zip(node.attrs["pad"][::2], node.attrs["pad"][1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (rank - len(pairs)) + pairs
    return [low for low, _ in pairs] + [high for _, high in pairs]


def _convert_pad(c: Conversion) -> None:
    mode = _PAD_MODES[c.attrs["mode"]]
    c.writer.need(19 if mode == "wrap" else 0)
    sizes = c.integers(pad_sizes(c.node, len(c.shape())))
    value = [c.number(c.attrs["value"])] if mode == "constant" else []
    c.output("Pad", [c.x[0], sizes, *value], mode=mode)


def _resize(mode: str) -> Converter:
    def convert(c: Conversion) -> None:
        size, factors = c.attrs["size"], c.attrs["factors"]
        coordinates = "align_corners" if c.attrs.get("align_corners") else "half_pixel"
        attrs = {"mode": mode, "coordinate_transformation_mode": "asymmetric" if mode == "nearest" else coordinates}
        attrs |= {"nearest_mode": "floor"} if mode == "nearest" else {}
        if size is None:
            scales = np.asarray([1.0, 1.0, *factors], dtype=np.float32)
            c.output("Resize", [c.x[0], "", c.constant("factors", scales)], **attrs)
        else:
            # with `axes`, ONNX Runtime 1.31 refuses the node if its layout optimization puts channels last
            leading_sizes = c.step("Shape", c.x[:1], start=0, end=2)
            sizes = c.step("Concat", [leading_sizes, c.integers(size)], axis=0)
            c.output("Resize", [c.x[0], "", "", sizes], **attrs)

    return convert


# ---------------------------------------------------------------- norms
def _filled_constant(c: Conversion, shape: Sequence[int], value: float) -> str:
    return c.constant("filled", np.full(shape, value, dtype=np.float32))


def _convert_layer_norm(c: Conversion) -> None:
    normalized = c.attrs["normalized_shape"]
    scale = c.x[1] if len(c.x) > 1 else _filled_constant(c, normalized, 1.0)
    c.output("LayerNormalization", [c.x[0], scale, *c.x[2:]], axis=-len(normalized), epsilon=c.attrs["eps"])


def _convert_instance_norm(c: Conversion) -> None:
    channels = c.shape()[1]
    scale = c.x[1] if len(c.x) > 1 else _filled_constant(c, [channels], 1.0)
    bias = c.x[2] if len(c.x) > 2 else _filled_constant(c, [channels], 0.0)
    c.output("InstanceNormalization", [c.x[0], scale, bias], epsilon=c.attrs["eps"])


def _convert_group_norm(c: Conversion) -> None:
    """Write an instance norm with the groups as its channels, then multiply by the weight and add the bias."""
    groups, shape = c.attrs["num_groups"], c.shape()
    ones, zeros = _filled_constant(c, [groups], 1.0), _filled_constant(c, [groups], 0.0)
    grouped = c.step("Reshape", [c.x[0], c.integers([0, groups, -1])])
    normalized = c.step("InstanceNormalization", [grouped, ones, zeros], epsilon=c.attrs["eps"])
    ungrouped = c.integers([-1, *shape[1:]])
    per_channel = _channel_shape(c)
    value = c.writer.op("Reshape", [normalized, ungrouped], c.out if len(c.x) == 1 else c.fresh("normed"))
    for kind, operand, is_last in zip(("Mul", "Add"), c.x[1:], (len(c.x) == 2, True), strict=False):
        operands = [value, c.step("Reshape", [operand, per_channel])]
        value = c.writer.op(kind, operands, c.out if is_last else c.fresh("scaled"))


# ---------------------------------------------------------------- attention
def _convert_attention(c: Conversion) -> None:
    query, key = c.shape(0), c.shape(1)
    rank = len(key)
    scale = c.attrs["scale"]
    scale = 1.0 / math.sqrt(query[-1]) if scale is None else scale
    keys, values = c.x[1], c.x[2]
    if c.attrs["enable_gqa"] and query[-3] != key[-3]:
        keys, values = (_repeat_heads(c, x, slot) for slot, x in ((1, keys), (2, values)))
    transposed = c.step("Transpose", [keys], perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = c.step("Mul", [c.step("MatMul", [c.x[0], transposed]), c.number(scale)])
    probabilities = c.fresh("softmax")
    _masked_softmax(replace(c, out=probabilities), scores, (query[-2], key[-2]), c.x[3:])
    c.output("MatMul", [probabilities, values])


def _convert_masked_softmax(c: Conversion) -> None:
    scores = c.step("Mul", [c.x[0], c.number(c.attrs["scale"])])
    rows, columns = c.shape()[-2:]
    _masked_softmax(c, scores, (rows, columns), c.x[1:])


def _masked_softmax(c: Conversion, scores: str, size: tuple[int, int], masks: Sequence[str]) -> None:
    """Write the softmax of attention scores under a mask. Rows that are entirely masked are 0, as in PyTorch; an ONNX
    Softmax gives NaN.

    Args:
        size: of the matrix of scores.
        masks: the mask, if there is one; it is the node's last input.
    """
    masked_out = c.number(-math.inf)
    if c.attrs["is_causal"]:
        causal = c.constant("causal", torch.ones(size, dtype=torch.bool).tril())
        scores = c.step("Where", [causal, scores, masked_out])
    if not masks:
        c.output("Softmax", [scores], axis=-1)
        return
    boolean = c.writer.dtype(c.node.inputs[-1]) == torch.bool
    operands = [masks[0], scores, masked_out] if boolean else [scores, masks[0]]
    scores = c.step("Where" if boolean else "Add", operands)
    c.writer.need(18)
    largest = c.step("ReduceMax", [scores, c.integers([-1])], keepdims=1)
    empty = c.step("Equal", [largest, masked_out])
    c.output("Where", [empty, c.number(0.0), c.step("Softmax", [scores], axis=-1)])


def _repeat_heads(c: Conversion, x: str, slot: int) -> str:
    """Repeat each head of the keys or values of grouped-query attention for every query head that shares it."""
    query, shape = c.shape(0), c.shape(slot)
    unsqueezed = c.step("Unsqueeze", [x, c.integers([-3])])
    sizes = [1] * (len(shape) - 2) + [query[-3] // shape[-3], 1, 1]
    repeated = c.step("Expand", [unsqueezed, c.integers(sizes)])
    return c.step("Reshape", [repeated, c.integers([-1, *shape[1:-3], query[-3], *shape[-2:]])])


# ---------------------------------------------------------------- ATen calls
@dataclass(frozen=True, slots=True)
class AtenCall(Conversion):
    """The conversion of an ATen call without an op of hago. Its arguments are JSON: `{"$": i}` is the i-th input (see
    `hago.ops.opaque`)."""

    @property
    def args(self) -> Sequence[Any]:
        """The positional arguments of the call."""
        arguments: Sequence[Any] = self.attrs["args"]
        return arguments

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the inputs."""
        return [self.writer.dtype(name) for name in self.node.inputs]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self.writer.dtype(self.node.name)

    def argument(self, index: int, default: Any) -> Any:
        """A positional argument, or its default if it is not given."""
        return self.args[index] if len(self.args) > index else default

    def operand(self, value: Any, dtype: torch.dtype) -> str:
        """An argument, an input or a number, as a tensor of this dtype."""
        if not _is_input(value):
            return self.number(value, str(dtype).removeprefix("torch."))
        name, input_dtype = self.x[value["$"]], self.dtypes[value["$"]]
        return name if input_dtype == dtype else self.step("Cast", [name], to=self.writer.element_type(dtype))

    def refusal(self, description: str) -> UnsupportedOp:
        """The error for a call that ONNX cannot express."""
        return UnsupportedOp(f"ONNX has no op for {description}")


CallConverter = Callable[[AtenCall], None]


def _is_input(value: Any) -> bool:
    return isinstance(value, dict) and "$" in value


def _call_sym_size(call: AtenCall) -> None:
    axis = call.args[1]
    size = call.step("Shape", call.x[:1], start=axis, end=None if axis == -1 else axis + 1)
    call.output("Squeeze", [size, call.integers([0])])


def _size_arithmetic(kind: str) -> CallConverter:
    """The converter of Python arithmetic on sizes."""

    def convert(call: AtenCall) -> None:
        call.output(kind, [call.x[a["$"]] if _is_input(a) else call.number(a, "int64") for a in call.args])

    return convert


def _call_expand(call: AtenCall) -> None:
    _expand(call, call.args[1])


def _call_view(call: AtenCall) -> None:
    call.output("Reshape", [call.x[0], _sizes(call, call.args[1])])


def _call_repeat(call: AtenCall) -> None:
    new_axes = len(call.args[1]) - len(call.shape())
    x = call.step("Unsqueeze", [call.x[0], call.integers(range(new_axes))]) if new_axes else call.x[0]
    call.output("Tile", [x, _sizes(call, call.args[1])])


def _full(value: float | None) -> CallConverter:
    """The converter of a tensor filled with a number, which is the last argument of the call if `value` is None."""

    def convert(call: AtenCall) -> None:
        sizes = next(a for a in call.args if isinstance(a, list))
        number = call.operand(call.args[-1] if value is None else value, call.dtype)
        call.output("Expand", [number, _sizes(call, sizes)])

    return convert


def _call_arange(call: AtenCall) -> None:
    bounds = [0, *call.args] if len(call.args) == 1 else list(call.args)
    bounds += [1] * (3 - len(bounds))
    call.output("Range", [call.operand(b, call.dtype) for b in bounds])


def _tensor_arithmetic(kind: str) -> CallConverter:
    def convert(call: AtenCall) -> None:
        if call.dtype == torch.bool:
            raise call.refusal("arithmetic on conditions")
        call.output(kind, [call.operand(a, call.dtype) for a in call.args[:2]])

    return convert


def _comparison(kind: str, negated: bool = False) -> CallConverter:
    """The converter of a comparison of operands, which are first promoted to a common dtype."""

    def convert(call: AtenCall) -> None:
        dtype = call.dtypes[0]
        for value in call.args[:2]:
            other = call.dtypes[value["$"]] if _is_input(value) else type(value)
            dtype = torch.float32 if other is float and not dtype.is_floating_point else dtype
            dtype = torch.int64 if other is int and dtype == torch.bool else dtype
            dtype = torch.promote_types(dtype, other) if isinstance(other, torch.dtype) else dtype
        dtype = torch.int64 if dtype == torch.bool else dtype
        operands = [call.operand(a, dtype) for a in call.args[:2]]
        if negated:
            call.output("Not", [call.step(kind, operands)])
        else:
            call.output(kind, operands)

    return convert


def _logical(kind: str) -> CallConverter:
    def convert(call: AtenCall) -> None:
        if any(d != torch.bool for d in call.dtypes):
            raise call.refusal("this arithmetic on bits")
        call.output(kind, list(call.x))

    return convert


def _unary(*kinds: str) -> CallConverter:
    """The converter of a function of the first input, or of several functions applied one after the other."""

    def convert(call: AtenCall) -> None:
        value = call.x[0]
        for kind in kinds[:-1]:
            value = call.step(kind, [value])
        call.output(kinds[-1], [value])

    return convert


def _call_type_as(call: AtenCall) -> None:
    call.output("Cast", call.x[:1], to=call.writer.element_type(call.dtype))


def _call_pow(call: AtenCall) -> None:
    if _is_input(call.args[1]) or not math.isfinite(call.args[1]):
        raise call.refusal("this power")
    call.output("Pow", [call.x[0], call.number(call.args[1])])


def _call_addcmul(call: AtenCall) -> None:
    call.output("Add", [call.x[0], call.step("Mul", [call.x[1], call.x[2]])])


def _call_softplus(call: AtenCall) -> None:
    if list(call.args[1:]) not in ([], [1, 20]):
        raise call.refusal("this softplus")
    call.output("Softplus", call.x[:1])


def _call_mish(call: AtenCall) -> None:
    call.writer.need(18)
    call.output("Mish", call.x[:1])


def _call_vector_norm(call: AtenCall) -> None:
    order, axes, keepdim = call.argument(1, 2.0), call.argument(2, None), bool(call.argument(3, False))
    if order not in (1.0, 2.0) or not axes:
        raise call.refusal(f"a vector norm of order {order} over axes {axes}")
    call.writer.need(18)
    kind = "ReduceL2" if order == 2.0 else "ReduceL1"
    call.output(kind, [call.x[0], call.integers(axes)], keepdims=int(keepdim))


def _call_cumsum(call: AtenCall) -> None:
    call.output("CumSum", [call.operand(call.args[0], call.dtype), call.number(call.args[1], "int64")])


def _call_diff(call: AtenCall) -> None:
    """Write the differences of adjacent elements along an axis, after `prepend` if it is given."""
    axis, prepend = call.argument(2, -1), call.argument(3, None)
    if call.argument(1, 1) != 1 or call.argument(4, None) is not None or call.dtype == torch.bool:
        raise call.refusal("this difference")
    axes = call.integers([axis])
    x = call.operand(call.args[0], call.dtype)
    x = x if prepend is None else call.step("Concat", [call.operand(prepend, call.dtype), x], axis=axis)
    end = call.integers([_TO_THE_END])
    later = call.step("Slice", [x, call.integers([1]), end, axes])
    earlier = call.step("Slice", [x, call.integers([0]), call.integers([-1]), axes])
    call.output("Sub", [later, earlier])


def _call_roll(call: AtenCall) -> None:
    """Write, for each axis, a concatenation of the last elements and the first ones."""
    value, axes = call.x[0], call.argument(2, [])
    if len(axes) != len(call.args[1]) or any(map(_is_input, call.args[1])):
        raise call.refusal("a roll of the flattened tensor")
    for index, (shift, axis) in enumerate(zip(call.args[1], axes, strict=True)):
        cut, axes_input = call.integers([-shift]), call.integers([axis])
        end = call.step("Slice", [value, cut, call.integers([_TO_THE_END]), axes_input])
        start = call.step("Slice", [value, call.integers([0]), cut, axes_input])
        if not shift:
            end, start = value, call.step("Slice", [value, cut, cut, axes_input])
        name = call.out if index == len(axes) - 1 else call.fresh("roll")
        value = call.writer.op("Concat", [end, start], name, axis=axis)


def _call_gather(call: AtenCall) -> None:
    call.output("GatherElements", [call.x[0], call.operand(call.args[2], torch.int64)], axis=call.args[1])


def _call_index(call: AtenCall) -> None:
    """Write advanced indexing with one index tensor for each of the first axes, which broadcast."""
    indices = call.args[1]
    if not all(map(_is_input, indices)) or any(call.dtypes[i["$"]] == torch.bool for i in indices):
        raise call.refusal("this indexing")
    names = [call.operand(i, torch.int64) for i in indices]
    total = names[0]
    for other in names[1:]:
        total = call.step("Add", [total, other])
    shape, last = call.step("Shape", [total]), call.integers([-1])
    expanded = [call.step("Unsqueeze", [call.step("Expand", [n, shape]), last]) for n in names]
    call.output("GatherND", [call.x[0], call.step("Concat", expanded, axis=-1)])


def _call_log_softmax(call: AtenCall) -> None:
    if call.dtype != call.dtypes[0]:
        raise call.refusal("a softmax in another dtype")
    call.output("LogSoftmax", call.x[:1], axis=call.args[1])


def _call_where(call: AtenCall) -> None:
    condition = call.operand(call.args[0], torch.bool)
    call.output("Where", [condition, *(call.operand(a, call.dtype) for a in call.args[1:3])])


def _call_masked_fill(call: AtenCall) -> None:
    condition = call.operand(call.args[1], torch.bool)
    call.output("Where", [condition, call.operand(call.args[2], call.dtype), call.x[0]])


_COMPARISONS: Final = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
_UNARY: Final = ("exp", "log", "sqrt", "abs", "erf", "sin", "cos", "floor", "ceil", "round", "sign", "reciprocal")
#: The converter of each ATen call, and of Python arithmetic on sizes, by target.
ATEN_CALLS: Final[Mapping[str, CallConverter]] = {
    # sizes
    "aten.sym_size.int": _call_sym_size,
    "operator.add": _size_arithmetic("Add"),
    "operator.sub": _size_arithmetic("Sub"),
    "operator.mul": _size_arithmetic("Mul"),
    "operator.floordiv": _size_arithmetic("Div"),
    # shapes
    "aten.expand.default": _call_expand,
    "aten.view.default": _call_view,
    "aten.reshape.default": _call_view,
    "aten._unsafe_view.default": _call_view,
    "aten.repeat.default": _call_repeat,
    "aten.clone.default": _unary("Identity"),
    "aten.alias.default": _unary("Identity"),
    # arithmetic
    **{f"aten.{n}.default": _unary(n.capitalize()) for n in _UNARY},
    **{
        f"aten.{n}.{o}": _tensor_arithmetic(n.capitalize()) for n in ("add", "sub", "mul") for o in ("Tensor", "Scalar")
    },
    "aten.rsqrt.default": _unary("Sqrt", "Reciprocal"),
    "aten.pow.Tensor_Scalar": _call_pow,
    "aten.addcmul.default": _call_addcmul,
    "aten.maximum.default": _tensor_arithmetic("Max"),
    "aten.minimum.default": _tensor_arithmetic("Min"),
    "aten.softplus.default": _call_softplus,
    "aten.mish.default": _call_mish,
    "aten.type_as.default": _call_type_as,
    # conditions
    **{f"aten.{n}.{o}": _comparison(kind) for n, kind in _COMPARISONS.items() for o in ("Tensor", "Scalar")},
    **{f"aten.ne.{o}": _comparison("Equal", negated=True) for o in ("Tensor", "Scalar")},
    **dict.fromkeys(("aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default"), _logical("And")),
    **dict.fromkeys(("aten.__or__.Tensor", "aten.bitwise_or.Tensor", "aten.logical_or.default"), _logical("Or")),
    **dict.fromkeys(("aten.bitwise_not.default", "aten.logical_not.default"), _logical("Not")),
    **{f"aten.where.{n}": _call_where for n in ("self", "Scalar", "ScalarSelf", "ScalarOther")},
    "aten.masked_fill.Scalar": _call_masked_fill,
    # along axes
    "aten.linalg_vector_norm.default": _call_vector_norm,
    "aten.cumsum.default": _call_cumsum,
    "aten.diff.default": _call_diff,
    "aten.roll.default": _call_roll,
    "aten.log_softmax.int": _call_log_softmax,
    "aten.gather.default": _call_gather,
    "aten.index.Tensor": _call_index,
    # new tensors
    "aten.arange.default": _call_arange,
    "aten.arange.start": _call_arange,
    "aten.arange.start_step": _call_arange,
    "aten.zeros.default": _full(0),
    "aten.ones.default": _full(1),
    "aten.new_zeros.default": _full(0),
    "aten.new_ones.default": _full(1),
    "aten.full.default": _full(None),
    "aten.new_full.default": _full(None),
}
#: Keyword arguments that determine the memory and the device of a tensor, and not its values.
_MEMORY_ARGUMENTS: Final = frozenset({"memory_format", "device", "pin_memory", "layout"})


def _convert_call(c: Conversion) -> None:
    """The converter of `opaque`: convert an ATen call by its target."""
    ATEN_CALLS[c.attrs["target"]](AtenCall(c.writer, c.node, c.x, c.out))


def _why_not_called(node: Node) -> str | None:
    """The reason why an ATen call cannot be exported; None where ATEN_CALLS has it."""
    target, kwargs = node.attrs["target"], node.attrs["kwargs"]
    if target not in ATEN_CALLS:
        return f"ONNX export does not know the call {target}"
    unread = {k for k, v in kwargs.items() if v is not None} - _MEMORY_ARGUMENTS - {"dtype"}
    return f"ONNX export does not know the call {target} with {', '.join(sorted(unread))}" if unread else None


# ---------------------------------------------------------------- the table
#: The converter of each op.
OPERATORS: Final[Mapping[str, Converter]] = {
    # convolutions and products
    **{f"conv{d}d": _convert_conv for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _convert_conv_transpose for d in (1, 2)},
    "linear": _convert_linear,
    "matmul": _convert_matmul,
    "embedding": one_node("Gather"),
    # arithmetic and activations
    "add": _real_arithmetic("Add"),
    "sub": _real_arithmetic("Sub"),
    "mul": _real_arithmetic("Mul"),
    "div": _convert_div,
    "neg": one_node("Neg"),
    "relu": one_node("Relu"),
    "sigmoid": one_node("Sigmoid"),
    "tanh": one_node("Tanh"),
    "clamp": _convert_clamp,
    "channel_clamp": _convert_channel_clamp,
    "gelu": one_node("Gelu", 20, {"approximate": "approximate"}),
    "elu": one_node("Elu", attributes={"alpha": "alpha"}),
    "leaky_relu": one_node("LeakyRelu", attributes={"alpha": "negative_slope"}),
    "hardsigmoid": one_node("HardSigmoid", alpha=1 / 6, beta=0.5),
    "hardswish": one_node("HardSwish"),
    "silu": _convert_silu,
    "prelu": _convert_prelu,
    "affine": _convert_affine,
    "softmax": _convert_softmax,
    "to": _convert_to,
    # pooling and reductions
    **{f"max_pool{d}d": _convert_max_pool for d in (1, 2)},
    **{f"avg_pool{d}d": _convert_avg_pool for d in (1, 2)},
    **{f"adaptive_avg_pool{d}d": _convert_adaptive_avg_pool for d in (1, 2)},
    "adaptive_max_pool2d": _convert_adaptive_max_pool,
    "mean": with_integers("ReduceMean", "axes", 18, keepdims=True),
    "sum": with_integers("ReduceSum", "axes", 13, keepdims=True),
    # shapes
    "concat": one_node("Concat", attributes={"axis": "axis"}),
    "stack": _convert_stack,
    "permute": one_node("Transpose", attributes={"perm": "axes"}),
    "reshape": _convert_reshape,
    "squeeze": _convert_squeeze,
    "unsqueeze": with_integers("Unsqueeze", "axis"),
    "expand": _convert_expand,
    "slice": _convert_slice,
    "select": _convert_select,
    "index": one_node("Gather", attributes={"axis": "axis"}),
    "pad": _convert_pad,
    "pixel_shuffle": one_node("DepthToSpace", attributes={"blocksize": "factor"}, mode="CRD"),
    "upsample_nearest2d": _resize("nearest"),
    "upsample_bilinear2d": _resize("linear"),
    # norms
    "batch_norm": one_node("BatchNormalization", attributes={"epsilon": "eps"}),
    "layer_norm": _convert_layer_norm,
    "instance_norm": _convert_instance_norm,
    "group_norm": _convert_group_norm,
    # attention
    "scaled_dot_product_attention": _convert_attention,
    "masked_softmax": _convert_masked_softmax,
    # everything else
    opaque.NAME: _convert_call,
}
#: Ops of hago that ONNX operators cannot express, each with the reason, with which its nodes are refused.
UNSUPPORTED: Final[Mapping[str, str]] = {}


def write_float_node(w: GraphWriter, node: Node, inputs: Sequence[str], out: str) -> None:
    """Write a node on real values.

    Args:
        inputs: the names of the tensors that it reads.
        out: the name of the tensor that it must write.

    Raises:
        UnsupportedOp: the table has no such op, or ONNX cannot express this node.
    """
    try:
        _convert(Conversion(w, node, inputs, out))
    except UnsupportedOp as error:
        raise UnsupportedOp(f"node {node.name!r}: {error}") from None


def unsupported_reason(draft: GraphWriter, node: Node) -> str | None:
    """The reason why ONNX cannot express a node on real values; None where it can. The node is written to see.

    Args:
        draft: of the node's graph, to be thrown away.
    """
    try:
        _convert(Conversion(draft, node, node.inputs, node.name))
    except UnsupportedOp as error:
        return str(error)
    return None


def _convert(c: Conversion) -> None:
    """Convert a node, or raise UnsupportedOp with the reason."""
    if (reason := unknown_reason(c.node)) is not None:
        raise UnsupportedOp(reason)
    OPERATORS[c.node.op](c)


def unknown_reason(node: Node) -> str | None:
    """The reason why no converter knows a node; None where one does."""
    if node.op == opaque.NAME:
        return _why_not_called(node)
    if node.op in OPERATORS:
        return None
    return UNSUPPORTED.get(node.op, f"ONNX export knows no op {node.op!r}")
