"""Run a model on example inputs before it is exported, and explain inputs on which it fails.

torch.export reports inputs of a wrong shape or dtype as a defect of the model, with symbols instead of sizes. Here the
model itself runs on them. If it fails, common conversions of the inputs are tried (another layout, a batch axis, real
numbers for bytes), and the message names one on which the model runs.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from hago.data import named_objects
from hago.errors import DataError, shortened_to

#: The heights and widths that are tried for images, the usual sizes of classifiers first.
SIZES: Final = (224, 32, 28, 64, 96, 16, 8, 128, 160, 192, 256, 299, 384, 448, 512)
#: The most values of two samples that are converted, since copies take memory.
MOST_VALUES: Final = 1 << 26
#: The most channels of images that are tried in other sizes, since these take memory.
MOST_CHANNELS: Final = 64
#: The most characters of an exception that a message quotes.
LONGEST_REASON: Final = 240


@dataclass(frozen=True, slots=True)
class Conversion:
    """One way to convert a tensor to what a model takes.

    Args:
        code: the conversion in Python; `{}` stands for the tensor.
        convert: computes it; None for tensors that it does not fit.
        adds_batch: whether the tensor is one sample, which gets a batch axis.
    """

    code: str
    convert: Callable[[Tensor], Tensor | None]
    adds_batch: bool = False


_AS_IT_IS: Final = Conversion("{}", lambda x: x)
_DTYPES: Final = (
    _AS_IT_IS,
    Conversion("{}.float() / 255", lambda x: x.float() / 255 if x.dtype == torch.uint8 else None),
    Conversion("{}.float()", lambda x: None if x.is_floating_point() or x.dtype == torch.uint8 else x.float()),
    Conversion("{}.long()", lambda x: x.long() if x.is_floating_point() and torch.equal(x, x.round()) else None),
)
_LAYOUTS: Final = (
    _AS_IT_IS,
    Conversion("{}[None]", lambda x: x[None], adds_batch=True),
    Conversion("{}.permute(0, 3, 1, 2)", lambda x: x.permute(0, 3, 1, 2) if x.ndim == 4 else None),
    Conversion("{}.permute(0, 2, 3, 1)", lambda x: x.permute(0, 2, 3, 1) if x.ndim == 4 else None),
    Conversion("{}.transpose(1, 2)", lambda x: x.transpose(1, 2) if x.ndim == 3 else None),
    Conversion("{}.unsqueeze(1)", lambda x: x.unsqueeze(1) if x.ndim > 1 else None),
    Conversion("{}.permute(2, 0, 1)[None]", lambda x: x.permute(2, 0, 1)[None] if x.ndim == 3 else None, True),
    Conversion("{}.flatten(1)", lambda x: x.flatten(1) if x.ndim > 2 else None),
    Conversion("{}.repeat(1, 3, 1, 1)", lambda x: x.repeat(1, 3, 1, 1) if x.ndim == 4 and x.shape[1] == 1 else None),
    Conversion("{}.mean(1, keepdim=True)", lambda x: x.mean(1, keepdim=True) if _is_color(x) else None),
)


def _is_color(x: Tensor) -> bool:
    return x.ndim == 4 and x.shape[1] == 3 and x.is_floating_point()


def check_runs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    where: str = "example_inputs",
    labels: Tensor | None = None,
) -> None:
    """Check that a model runs on the first two samples of its example inputs.

    Args:
        model: an nn.Module in eval mode, on the CPU.
        args, kwargs: example inputs; the first axis of every tensor is the batch.
        where: the name of the inputs in the message.
        labels: the labels of the same batch, which may have been taken for the inputs.

    Raises:
        DataError: the model fails on them. The message says their shapes and dtypes, the reason, and a conversion on
            which the model runs, if one was found.
    """
    call = (tuple(args), dict(kwargs or {}))
    reason = _failure(model, pytree.tree_map(_two_samples, call))
    if reason is None:
        return
    of_all = _failure(model, call)
    fails = "fails on it" if of_all else "runs on it, but fails on its first 2 samples"
    otherwise = "Pass the inputs that the model's forward takes"
    if of_all is None:
        otherwise = (
            "It fixes the size of its batches: write shapes with the batch of the input, such as x.flatten(1) for "
            "x.view(1, -1)"
        )
    advice = _advice(model, call, labels) or otherwise
    raise DataError(f"{where} has {_described(call)}; the model {fails}: {of_all or reason}. {advice}")


def _two_samples(x: Any) -> Any:
    """The first two samples; one sample is repeated."""
    if not isinstance(x, Tensor) or x.ndim == 0:
        return x
    return torch.cat([x, x]) if x.shape[0] == 1 else x[:2]


# ---------------------------------------------------------------- running the model
def _failure(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> str | None:
    """Why the model fails on arguments, in one line; None if it runs."""
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=()), _layers(model) as raised:
        warnings.simplefilter("ignore")
        try:
            model(*call[0], **call[1])
        except Exception as error:  # whatever the user's code raises
            said = named_objects.one_line(error).removesuffix(":").removesuffix(", but expected one of")
            inputs = pytree.tree_leaves(call)
            layer = next((f"; {_expectation(r, inputs)}" for r in raised if r.exception is error), "")
            return shortened_to(said.rstrip(". "), LONGEST_REASON) + layer
    return None


@dataclass(frozen=True, slots=True)
class _Raised:
    """A layer that ended while an exception was handled. Of several with one exception, the first raised it.

    Args:
        got: the first argument of the layer.
    """

    exception: BaseException
    name: str
    layer: Any
    got: Any


@contextmanager
def _layers(model: nn.Module) -> Iterator[list[_Raised]]:
    """The layers that raised exceptions, also ones that the model caught, in the order of their ends."""
    raised: list[_Raised] = []
    handles = []
    for name, module in model.named_modules():
        if name and isinstance(module, _LAYERS):

            def leave(module: nn.Module, args: tuple[Any, ...], result: Any, name: str = name) -> None:
                if (exception := sys.exc_info()[1]) is not None:
                    raised.append(_Raised(exception, name, module, args[0] if args else None))

            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield raised
    finally:
        raised.clear()  # tracebacks hold the frames that hold this list
        for handle in handles:
            handle.remove()


_SPATIAL: Final = {1: "length", 2: "height, width", 3: "depth, height, width"}
#: Layers whose expected input is known.
_LAYERS: Final = (_ConvNd, _BatchNorm, nn.Linear, nn.Embedding, nn.RNNBase)


def _expectation(raised: _Raised, inputs: Sequence[Any]) -> str:
    """What a layer takes, and what it got if that is not an input of the model."""
    name, layer, got = raised.name, raised.layer, raised.got
    if isinstance(layer, _ConvNd):
        axes = layer.weight.ndim - 2
        takes = f"(batch, {layer.in_channels}, {_SPATIAL[axes]})"
    elif isinstance(layer, _BatchNorm):
        takes = f"{layer.num_features} channels on axis 1"
    elif isinstance(layer, nn.Embedding):
        takes = f"integers from 0 to {layer.num_embeddings - 1}"
    else:
        takes = f"{layer.in_features if isinstance(layer, nn.Linear) else layer.input_size} values on the last axis"
    of_indices = isinstance(layer, nn.Embedding) and isinstance(got, Tensor) and not got.is_floating_point()
    is_input = any(got is x for x in inputs) and not of_indices
    return f"its {type(layer).__name__} {name!r} takes {takes}" + (
        "" if is_input else f" and got {_in_words(layer, got)}"
    )


def _in_words(layer: nn.Module, got: Any) -> str:
    if not isinstance(got, Tensor):
        return f"a {type(got).__name__}"
    if isinstance(layer, nn.Embedding) and not got.is_floating_point() and got.numel():
        return f"integers from {int(got.min())} to {int(got.max())}"
    return f"{_dtype(got)} of shape {tuple(got.shape)}"


# ---------------------------------------------------------------- messages
def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _described(call: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    """The shapes and dtypes of arguments."""
    tensors = [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]
    if not tensors:
        kinds = [type(x).__name__ for x in pytree.tree_leaves(call)[:6]]
        return f"no tensor{', but ' if kinds else ''}{' and '.join(kinds)}"
    keys = next(([str(k) for k in x] for x in call[0] if isinstance(x, Mapping)), [])
    of_dict = f", in a dict with the keys {', '.join(map(repr, keys[:8]))}" if keys else ""
    if len(tensors) == 1:
        return f"shape {tuple(tensors[0].shape)} and dtype {_dtype(tensors[0])}{of_dict}"
    return " and ".join(f"shape {tuple(t.shape)} of {_dtype(t)}" for t in tensors[:6]) + of_dict


def _advice(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], labels: Tensor | None) -> str | None:
    """A change of the data with which the model runs; None if none was found."""
    args, kwargs = call
    name = next(iter(inspect.signature(model.forward).parameters), "input")
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        for key, value in args[0].items():
            if isinstance(value, Tensor) and _failure(model, ((_two_samples(value),), {})) is None:
                return f"It runs on the tensor under {key!r}: name that key {name!r}, or pass the tensor alone"
    if labels is not None and len(args) == 1 and _failure(model, ((_two_samples(labels),), {})) is None:
        return (
            f"It runs on what was taken for the labels, of shape {tuple(labels.shape)}: a batch is (inputs, labels); "
            "change their order"
        )
    leaves, spec = pytree.tree_flatten(call)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf[:2].numel() > MOST_VALUES:
            continue
        for code, converted in _conversions(leaf):
            trial = [converted if i == index else _two_samples(x) for i, x in enumerate(leaves)]
            if _failure(model, pytree.tree_unflatten(trial, spec)) is None:
                shape = ", ".join(["batch", *map(str, converted.shape[1:])])
                what = code.format(_argument(model, call, leaf) or "x")
                scaled = "; normalize (mean and std) as in training" if "/ 255" in code else ""
                return f"It runs on {what}, of shape ({shape}): convert every batch in this way{scaled}"
    return None


def _argument(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], leaf: Tensor) -> str | None:
    """The name of the argument that a tensor is passed as."""
    named = dict(zip(inspect.signature(model.forward).parameters, call[0], strict=False)) | call[1]
    return next((name for name, value in named.items() if value is leaf), None)


def _conversions(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Conversions of a tensor, the simplest first, with two converted samples."""
    pairs = [(dtype, layout) for dtype in _DTYPES for layout in _LAYOUTS if dtype is _AS_IT_IS or layout is _AS_IT_IS]
    pairs += [(dtype, layout) for dtype in _DTYPES[1:] for layout in _LAYOUTS[1:]]
    for dtype, layout in pairs[1:]:
        samples = x if layout.adds_batch else _two_samples(x)
        real = dtype.convert(samples)
        converted = None if real is None else layout.convert(real)
        if converted is not None:
            first = f"({dtype.code})" if " " in dtype.code and layout is not _AS_IT_IS else dtype.code
            yield layout.code.replace("{}", first), _two_samples(converted)
    if x.ndim == 4 and x.numel() > 0 and x.shape[1] <= MOST_CHANNELS:
        real = _two_samples(x).float() / 255 if x.dtype == torch.uint8 else _two_samples(x).float()
        code = "{}.float() / 255" if x.dtype == torch.uint8 else "{}" if x.is_floating_point() else "{}.float()"
        for size in SIZES:
            scaled = nn.functional.interpolate(real, (size, size))
            yield f"torch.nn.functional.interpolate({code}, ({size}, {size}))", scaled
