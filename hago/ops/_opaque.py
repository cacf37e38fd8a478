"""opaque: an ATen call that no rule reads. torch itself runs it, on real values.

Its attributes are JSON: the call's target, and its arguments with tensors replaced by `{"$": i}` (the i-th input) and
dtypes, layouts and the like by `{"torch": "float32", "kind": "dtype"}`. The importer calls `target_name` and `pack`.
Readers and writers of stored models call `why_not_portable`.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from hago.errors import GraphError, shortened
from hago.ops._rule import Attrs, Ref

NAME: Final = "opaque"

#: Functions of Python that torch.export writes for arithmetic on sizes.
_BUILTINS: Final[Mapping[str, Callable[..., Any]]] = {
    f"operator.{f.__name__}": f
    for f in (operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
              operator.neg, operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt,
              operator.ge, operator.getitem)
}  # fmt: skip
#: The ATen operators that a stored model may call: those that check their arguments, whatever these are, and whose
#: results have a size that is known before they run. Left out are operators that read what they should not
#: (`segment_reduce` with `unsafe`, `_unsafe_index`, `as_strided`, `empty`), whose size depends on values (`nonzero`,
#: `unique`), or that touch files, devices and generators. A test tries each with hostile arguments.
PORTABLE: Final = frozenset(
    """
    abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad
    digamma div divide elu eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin fmod frac ge
    gelu glu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan
    isneginf isposinf leaky_relu le lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2
    logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul multiply nan_to_num
    ne neg negative not_equal pow prelu rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign
    signbit silu sin sinc sinh softplus softshrink sqrt square sub subtract tan tanh threshold true_divide trunc where
    xlogy isclose special_expit special_log1p special_expm1 special_xlogy special_erf special_erfc special_i0
    special_entr
    all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum diff kthvalue
    logcumsumexp logsumexp max mean median min mode nanmean nansum norm prod sort std std_mean sum topk trace var
    var_mean linalg_vector_norm cosine_similarity pairwise_distance cdist msort nanmedian
    _log_softmax _softmax log_softmax softmax _safe_softmax
    addbmm addmm addmv baddbmm bilinear bmm chain_matmul dot einsum inner kron linalg_matmul linear matmul mm mv outer
    tensordot vdot linalg_vecdot linalg_cross cross
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    _native_batch_norm_legit_no_training batch_norm group_norm instance_norm layer_norm native_group_norm
    native_layer_norm rms_norm _fused_rms_norm _weight_norm
    scaled_dot_product_attention
    gru lstm rnn_relu rnn_tanh
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d affine_grid_generator grid_sampler grid_sampler_2d grid_sampler_3d upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
    _to_copy _unsafe_view alias alias_copy atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to cat
    channel_shuffle chunk clone col2im concat concatenate constant_pad_nd contiguous detach diag diag_embed diagonal
    dsplit dstack expand expand_as flatten flip fliplr flipud hsplit hstack im2col lift_fresh_copy meshgrid movedim
    moveaxis narrow native_channel_shuffle numpy_T pad permute pixel_shuffle pixel_unshuffle ravel reflection_pad1d
    reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
    reshape reshape_as roll rot90 row_stack column_stack select slice split split_with_sizes squeeze stack swapaxes
    swapdims t tile to transpose tril triu type_as unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze view
    view_as vsplit vstack
    diagonal_scatter select_scatter slice_scatter masked_scatter
    bucketize embedding gather index index_add index_copy index_fill index_put index_select isin one_hot scatter
    scatter_add scatter_reduce searchsorted take take_along_dim tril_indices triu_indices
    arange eye full full_like linspace new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like fill
    rand rand_like randn randn_like
    _fft_c2c _fft_c2r _fft_r2c fft_fft fft_fft2 fft_fftn fft_fftshift fft_ifft fft_ifft2 fft_ifftn fft_ifftshift
    fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn complex conj imag polar real resolve_conj resolve_neg
    stft view_as_complex view_as_real
    sym_numel sym_size
    """.split()  # noqa: SIM905
)
_SYMBOLIC: Final = ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite")
#: The operators of PORTABLE whose result is a number.
_SIZES: Final = ("sym_numel", "sym_size")
#: Types of arguments in torch's schemas whose values are named constants.
_CONSTANTS: Final = ("ScalarType", "Layout", "MemoryFormat", "Device")
_NAMED: Final = (torch.dtype, torch.layout, torch.memory_format, torch.device)


def target_name(target: Any) -> str:
    """The name of a call's target: `aten.cumsum.default`, `operator.mul`, `torch.sym_max`.

    Raises:
        GraphError: a target that is not an operator, e.g. a higher-order control-flow op.
    """
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", str(target))
    if f"operator.{name}" in _BUILTINS:
        return f"operator.{name}"
    if name in _SYMBOLIC:
        return f"torch.{name}"
    raise GraphError(f"{target} cannot be imported; only ATen operators can (no control flow)")


def resolve_target(name: str) -> Callable[..., Any]:
    """The callable of a name that `target_name` gave.

    Raises:
        GraphError: this torch has no such operator.
    """
    if name in _BUILTINS:
        return _BUILTINS[name]
    found: Any = torch if name.startswith("torch.sym_") else torch.ops
    for part in name.removeprefix("torch.").split("."):
        found = getattr(found, part, None)
        if found is None:
            raise GraphError(f"torch {torch.__version__} has no operator {name!r}")
    return found  # type: ignore[no-any-return]


def why_not_portable(attrs: Attrs) -> str | None:
    """The reason why a file may not hold this call, or None.

    Files may hold the operators of PORTABLE, and arithmetic on sizes.
    """
    target = str(attrs.get("target"))
    if target in _BUILTINS or target in (f"torch.{name}" for name in _SYMBOLIC):
        return None
    parts = re.fullmatch(r"aten\.(\w+)\.(\w+)", target, re.ASCII)
    if parts is None or parts[1] not in PORTABLE:
        return (
            f"it calls {shortened(target)}, which is not among the operators that a stored model may call "
            "(docs/stored-model.md); apply the strategy to the original model instead, with hago.create_quantizer"
        )
    try:
        found = resolve_target(target)
    except GraphError as error:
        return str(error)
    if not isinstance(found, torch._ops.OpOverload):
        return f"it calls {target!r}, which is no operator"
    if found._schema.is_mutable:
        return f"it calls {target!r}, which changes its operands"
    if parts[2].startswith("prim_") or (
        parts[1] not in _SIZES and not any("Tensor" in str(r.type) for r in found._schema.returns)
    ):
        return f"it calls {target!r}, which gives no tensor"  # arithmetic of TorchScript, unchecked
    return _wrong_constant(found._schema, attrs)


def _wrong_constant(schema: torch.FunctionSchema, attrs: Attrs) -> str | None:
    """The reason why an argument of a call is no dtype, layout, memory format or device although it must be, or None.

    torch accepts a number for any of them, and reads past the end of its tables for a number that it does not know.
    """
    given = [*zip(schema.arguments, attrs.get("args", ()), strict=False)]
    given += [(a, attrs["kwargs"][a.name]) for a in schema.arguments if a.name in attrs.get("kwargs", {})]
    for argument, value in given:
        kind = str(argument.real_type)
        named = isinstance(value, dict) and "torch" in value
        if any(name in kind for name in _CONSTANTS) and not named and not (value is None and "Optional" in kind):
            return f"it calls {attrs['target']!r} with {argument.name} {shortened(value)}; expected one of torch's own"
    return None


def pack(value: Any, inputs: list[str]) -> Any:
    """An argument as JSON; appends the names of the nodes in it to `inputs`."""
    if isinstance(value, Ref):
        inputs.append(value.name)
        return {"$": len(inputs) - 1}
    if isinstance(value, (list, tuple)):
        return [pack(v, inputs) for v in value]
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch."), "kind": type(value).__name__}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise GraphError(f"an argument of type {type(value).__name__} cannot be imported")


def unpack(value: Any, inputs: Sequence[Any]) -> Any:
    """The argument that `pack` wrote, with the inputs in their places.

    Raises:
        GraphError: a dtype, layout, memory format or device that this torch does not have.
    """
    if isinstance(value, list):
        return [unpack(v, inputs) for v in value]
    if not isinstance(value, dict):
        return value
    if "$" in value:
        return inputs[value["$"]]
    name, kind = value["torch"], value["kind"]
    found = torch.device(name) if kind == "device" else vars(torch).get(name)
    if not isinstance(found, _NAMED):
        raise GraphError(f"torch {torch.__version__} has no {kind} {name!r}")
    return found


def compute(attrs: Attrs, *inputs: Any) -> Any:
    """Run the call as torch runs it.

    Raises:
        GraphError: arithmetic on sizes is asked of anything but numbers and tensors, or its result is no size.
    """
    args = unpack(attrs["args"], inputs)
    kwargs = {k: unpack(v, inputs) for k, v in attrs["kwargs"].items()}
    target = attrs["target"]
    if target not in _BUILTINS or target == "operator.getitem":
        return resolve_target(target)(*args, **kwargs)
    # Python repeats lists, formats text and raises to powers without a limit
    if not all(isinstance(a, (int, float, torch.SymInt, torch.SymFloat, torch.Tensor)) for a in args):
        raise GraphError(f"{target} of {', '.join(type(a).__name__ for a in args)}; expected numbers or tensors")
    if target == "operator.pow" and any(isinstance(a, int) and abs(a) > 1 << 16 for a in args):
        raise GraphError(f"{target} of {args}; expected numbers up to {1 << 16}")
    result = _BUILTINS[target](*args, **kwargs)
    if isinstance(result, int) and abs(result) >= 1 << 63:
        raise GraphError(f"{target} gives a number of {result.bit_length()} bits; expected at most 63")
    return result


def macs(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> int:
    """Multiply-accumulates of the call on operands of these shapes.

    Counts the matrix products and convolutions that torch decomposes the call into, with `torch.utils.flop_counter`;
    0 if it counts none.
    """
    if len(shapes) < 2 or attrs["target"] in _BUILTINS:
        return 0
    return _macs(
        json.dumps({"target": attrs["target"], "args": attrs["args"], "kwargs": attrs["kwargs"]}), tuple(shapes)
    )


@functools.lru_cache(maxsize=1024)
def _macs(call: str, shapes: tuple[tuple[int, ...], ...]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        try:
            compute(json.loads(call), *tensors)
        except Exception:  # an operator that takes no floats, or knows no shapes without values, multiplies none
            return 0
    return int(counter.get_total_flops()) // 2
