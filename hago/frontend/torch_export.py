"""From an nn.Module or ExportedProgram to a Graph; with `importer` all that touches torch.export and fx.

Why not keep torch's own graph: it holds in-place ops, its node names change between versions, and
its full decomposition turns `linear` into two calls. So `run_decompositions({})` makes it functional,
unless it is made of calls that stay as they are; names come from module paths, and every call is
read once, here, by the rule of its op.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from hago.errors import GraphError, as_strings
from hago.frontend.attention import open_attention
from hago.frontend.data import as_tensor
from hago.frontend.exported import check_finite, first_line
from hago.frontend.fold import fold_batch_norms
from hago.frontend.importer import Importer
from hago.graph import Graph
from hago.ops import OPS, Ops

Attention = Literal["opened", "whole"]
ModelLike = nn.Module | ExportedProgram | Graph


def from_torch(
    model: ModelLike,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    fold: bool = True,
    ops: Ops = OPS,
    attention: Attention = "opened",
    made_for: Collection[str] = (),
) -> Graph:
    """Import a model.

    Args:
        model: an nn.Module in eval mode that torch.export can export, an ExportedProgram, or a
            Graph (returned as it is).
        example_inputs, example_kwargs: arguments to export with; the first axis of every tensor is
            taken as the batch and left dynamic.
        fold: fold batch norms into what stands before them.
        attention: whether `scaled_dot_product_attention` is opened into products and a softmax, or kept whole.
        made_for: hashes of models that strategies and logs name. If the model had one of them as the first version of
            hago imported it (attention whole, nothing converted to real numbers), that is the graph.

    Raises:
        GraphError: the model is in training mode, cannot be exported, is not float32, or holds NaN
            or infinite parameters.
    """
    made_for = as_strings(made_for, "made_for")
    if isinstance(model, Graph):
        return model
    program = model if isinstance(model, ExportedProgram) else _export(model, example_inputs, example_kwargs)
    importer = Importer(program, ops)
    graph = importer.run()
    if made_for:
        first = Importer(program, ops, converts=False).run() if importer.converted else graph
        folded = fold_batch_norms(first)
        if folded.model_hash in made_for:
            return folded if fold else first
    graph = fold_batch_norms(graph) if fold else graph
    return graph if attention == "whole" else open_attention(graph, importer.open_axes, ops)


def _export(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> ExportedProgram:
    if not isinstance(model, nn.Module):
        raise GraphError(f"expected an nn.Module, ExportedProgram or Graph, got {type(model).__name__}")
    if model.training:
        raise GraphError("the model is in training mode; call model.eval() first")
    _check_parameters(model)
    if not args and not kwargs:
        raise GraphError("example_inputs are needed to export an nn.Module; pass one batch")
    args, kwargs = pytree.tree_map(_example, (tuple(args), dict(kwargs or {})))
    dynamic = pytree.tree_map(_open_batch, (tuple(args), dict(kwargs)))
    shapes = {**_positional(model, dynamic[0]), **dynamic[1]}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(model, tuple(args), dict(kwargs), dynamic_shapes=shapes)
    except Exception as error:
        raise GraphError(f"torch.export cannot export {type(model).__name__}: {_why(error)}") from error


def _why(error: Exception) -> str:
    """What torch.export said, and what helps."""
    unknown = re.search(r"Found <class '([\w.]+)'> in output", str(error))
    if unknown is None:
        said = first_line(error)
        return f"{said}. See that torch.export.export(model, example_inputs) works, or pass an ExportedProgram"
    return (
        f"it returns a {unknown[1].rpartition('.')[2]}. Let it return tensors alone (a model of transformers does with "
        "use_cache=False in its config or its arguments), or pass a module that calls it and returns the tensors, e.g. "
        "`return self.model(x).logits`"
    )


def _positional(model: nn.Module, shapes: Sequence[Any]) -> dict[str, Any]:
    """Shapes of positional arguments by parameter name; those of *args together."""
    found: dict[str, Any] = {}
    for index, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            found[parameter.name] = tuple(shapes[index:])
            break
        if index < len(shapes):
            found[parameter.name] = shapes[index]
    return found


def _example(x: Any) -> Any:
    """A tensor as torch.export takes it: it specialises sizes 0 and 1, and fails where the batch's stride is no other
    axes' product."""
    if not isinstance(x, (Tensor, np.ndarray)):
        return x
    x = as_tensor(x, "an example input")
    return torch.cat([x, x]) if x.ndim > 0 and x.shape[0] == 1 else x.contiguous()


def _open_batch(x: Any) -> Any:
    return {0: Dim.AUTO} if isinstance(x, Tensor) and x.ndim > 0 else None


def _check_parameters(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise GraphError(f"{name!r} is {tensor.dtype}; hago imports float32 models: call model.float()")
        if tensor.device.type != "cpu":
            raise GraphError(f"{name!r} is on {tensor.device}; hago imports models on the CPU: call model.cpu()")
    for name, tensor in model.named_parameters():
        check_finite(name, tensor)
