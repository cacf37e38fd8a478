"""Which programs are traced once more before they are read.

`run_decompositions({})` makes a program functional. It takes longer than the export, and changes little: most calls
stay as they are, and some become others that are read as the same. A program of such calls alone is read as it is, and
gives the Graph, with its names, that the traced one gives.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any, Final

from torch.export import ExportedProgram
from torch.fx import Node as FxNode

from hago.errors import GraphError
from hago.graph.frontend.calls import is_check, is_specialised, named_arguments, open_axes_of
from hago.graph.frontend.composites import Decompositions
from hago.graph.frontend.export_failure import first_line
from hago.graph.frontend.writes import without_writing

#: Calls that tracing again leaves as they are, among those of which most networks of convolutions are made.
_AS_THEY_ARE: Final = frozenset(
    f"aten.{name}"
    for name in (
        "conv1d.default", "conv2d.default", "conv2d.padding", "linear.default", "add.Tensor", "mul.Tensor",
        "relu.default", "relu6.default", "hardtanh.default", "leaky_relu.default", "sigmoid.default", "tanh.default",
        "hardswish.default", "hardsigmoid.default", "silu.default", "gelu.default", "max_pool2d.default",
        "avg_pool2d.default", "adaptive_avg_pool2d.default", "mean.dim", "cat.default", "pad.default",
        "slice.Tensor", "dropout.default",
    )
)  # fmt: skip
#: Tracing again leaves these as they are, too, but leaves out what nobody reads and gives its names to others. Earlier
#: versions traced programs with these calls again, and such with calls that write. So that names stay the same, they
#: are read as they are only where all results are read.
_IF_ALL_IS_READ: Final = frozenset(
    f"aten.{name}"
    for name in (
        # norms and products
        "layer_norm.default", "group_norm.default", "instance_norm.default", "matmul.default", "mm.default",
        "bmm.default", "scaled_dot_product_attention.default", "softmax.int", "log_softmax.int", "embedding.default",
        "conv1d.padding", "conv3d.default", "conv3d.padding", "conv_transpose1d.default", "conv_transpose2d.input",
        # arithmetic
        "sub.Tensor", "rsub.Scalar", "div.Tensor", "div.Tensor_mode", "neg.default", "abs.default", "sqrt.default",
        "rsqrt.default", "reciprocal.default", "exp.default", "log.default", "erf.default", "sin.default",
        "cos.default", "floor.default", "ceil.default", "round.default", "sign.default", "pow.Tensor_Scalar",
        "pow.Tensor_Tensor", "pow.Scalar", "maximum.default", "minimum.default", "clamp.default", "clamp_min.default",
        "clamp_max.default", "elu.default", "prelu.default", "softplus.default", "mish.default",
        # reductions and resizing
        "sum.default", "sum.dim_IntList", "cumsum.default", "linalg_vector_norm.default", "argmax.default",
        "topk.default", "max_pool1d.default", "avg_pool1d.default", "adaptive_avg_pool1d.default",
        "adaptive_max_pool2d.default", "upsample_nearest2d.vec", "upsample_bilinear2d.vec",
        "upsample_bicubic2d.vec",
        # moves
        "permute.default", "transpose.int", "view.default", "expand.default",
        "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "select.int", "index_select.default",
        "index.Tensor", "gather.default", "stack.default", "repeat.default", "flip.default", "pixel_shuffle.default",
        "unbind.int", "split_with_sizes.default",
        # conditions, masks and new tensors
        "eq.Scalar", "eq.Tensor", "ne.Scalar", "ne.Tensor", "lt.Scalar", "lt.Tensor", "le.Scalar", "le.Tensor",
        "gt.Scalar", "gt.Tensor", "ge.Scalar", "ge.Tensor", "logical_and.default", "logical_or.default",
        "logical_not.default", "bitwise_not.default", "__and__.Tensor", "__or__.Tensor", "masked_fill.Scalar",
        "where.self", "where.Scalar", "where.ScalarSelf", "where.ScalarOther", "tril.default",
        "arange.default", "arange.start", "arange.start_step", "zeros.default", "ones.default", "full.default",
        "new_zeros.default", "new_ones.default", "new_full.default", "type_as.default",
    )
)  # fmt: skip
#: Likewise, but tracing again gives them as other calls, which are read as the same for some arguments.
_BY_ARGUMENTS: Final = frozenset(
    f"aten.{name}"
    for name in (
        "reshape.default", "reshape_as.default", "contiguous.default", "expand_as.default", "chunk.default", "to.dtype",
    )
)  # fmt: skip
#: Calls of Python on sizes and several results, likewise.
_OF_PYTHON: Final = (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv)


def reads_as_it_is(program: ExportedProgram, known: Collection[str]) -> bool:
    """Whether no call need be traced again before it is read, which takes longer than the export itself.

    Args:
        known: the calls that can be read.
    """
    calls = [n for n in program.graph.nodes if n.op not in ("placeholder", "output")]
    names = [without_writing(call, str(call.target)) for call in calls]
    pairs = list(zip(calls, names, strict=True))
    if any(is_specialised(each) for each in program.graph.nodes):
        return False
    if all(name == str(call.target) and name in known and _stays(call, name) for call, name in pairs):
        return True
    if not all(call.users or is_check(call) for call in calls):
        return False
    # a call that is left as it is need not be known
    return all(
        (_stays(call, name) and name in known and not _passes_the_end(call)) or _stays_if_all_is_read(call, name, known)
        for call, name in pairs
        if not is_check(call)
    )


def _stays(fx: FxNode, name: str) -> bool:
    """Whether tracing again leaves a call as it is, or gives another that is read as the same."""
    if name == "aten.batch_norm.default":
        return not dict(named_arguments(fx))["training"]
    if name == "aten.flatten.using_ints":
        value, whole = fx.meta["val"], dict(named_arguments(fx))["self"].meta["val"]
        return value.ndim < whole.ndim and len(open_axes_of(value)) <= 1
    return name in _AS_THEY_ARE


def _passes_the_end(fx: FxNode) -> bool:
    """Whether a call is a slice that may end behind the last entry of its axis. Tracing again may leave it out."""
    if str(fx.target) != "aten.slice.Tensor":
        return False
    named = dict(named_arguments(fx))
    value, end = named["self"].meta["val"], named["end"]
    fixed = named["dim"] % value.ndim not in open_axes_of(value)
    return isinstance(end, int) and end != sys.maxsize and not (fixed and end <= value.shape[named["dim"]])


def _stays_if_all_is_read(fx: FxNode, name: str, known: Collection[str]) -> bool:
    """The same of calls of which names depend on what nobody reads."""
    if name in _BY_ARGUMENTS:
        return name in known and _stays_by_arguments(name, fx.meta["val"], dict(named_arguments(fx)))
    return name in _IF_ALL_IS_READ or name == "aten.sym_size.int" or fx.target in _OF_PYTHON


def _stays_by_arguments(name: str, result: Any, named: Mapping[str, Any]) -> bool:
    """The same of calls that tracing again gives as others."""
    value, other = named["self"].meta["val"], named.get("other")
    if name == "aten.to.dtype":  # one to the dtype that it has is left out
        return value.dtype != named["dtype"] and not (named["non_blocking"] or named["copy"] or named["memory_format"])
    if name == "aten.chunk.default":
        return named["dim"] % value.ndim not in open_axes_of(value)
    if isinstance(other, FxNode) and len(other.users) == 1:
        return False  # of which only the sizes are read
    if name == "aten.expand_as.default":
        added = result.ndim - value.ndim
        return {*open_axes_of(result)} <= {axis + added for axis in open_axes_of(value)}
    return len(open_axes_of(result)) <= 1


def expands_as(program: ExportedProgram) -> bool:
    """Whether a program has an expansion that the first version read otherwise."""
    return any(str(fx.target) == "aten.expand_as.default" for fx in program.graph.nodes)


def traced_again(program: ExportedProgram, table: Decompositions) -> ExportedProgram:
    """The same without calls that write to what they are given, and with what some calls are short for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            traced: ExportedProgram = program.run_decompositions(dict(table))
            return traced
        except Exception as error:
            raise GraphError(f"run_decompositions failed: {first_line(error)}") from error
