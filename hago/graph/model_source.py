"""Model source: a model named by text, `package.module:callable`, and its weights from a file.

The command line reads its models with `load_model`.

Importing a module runs it, as `import` does; a weights file runs nothing: it is read by safetensors,
or by torch with `weights_only=True`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from hago.data.named_objects import call_named, import_object, one_line
from hago.errors import GraphError, HagoError
from hago.graph.frontend import ModelLike
from hago.graph.graph import Graph
from hago.serialization.json_text import is_file

#: How many keys an error lists before it says "and n more".
_LISTED = 4


def load_model(spec: str, weights: str | Path | None = None) -> ModelLike:
    """The model that `spec` names, in eval mode, with the weights of a file.

    Args:
        spec: `package.module:name` of an nn.Module, an ExportedProgram or a Graph, or of a function or class that
            returns one when called without arguments.
        weights: a `.safetensors` file, or a state dict that `torch.save` wrote; for an nn.Module only.

    Raises:
        HagoError: no such callable, it returns no model, or the weights are not this model's.
    """
    named = import_object(spec, "model")
    kinds = (nn.Module, ExportedProgram, Graph)
    model = named if isinstance(named, kinds) else call_named(named, spec, "model")
    if not isinstance(model, kinds):
        raise GraphError(f"model {spec!r} returned {type(model).__name__}; expected an nn.Module")
    if isinstance(model, nn.Module):
        model.eval()
    if weights is not None:
        if not isinstance(model, nn.Module):
            raise GraphError(f"model {spec!r} is a {type(model).__name__}, whose weights are its own; leave them out")
        _load_weights(model, read_weights(weights), str(weights))
    return model


def _load_weights(model: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    expected = model.state_dict()
    wrong = [
        f"{name!r} has shape {tuple(state[name].shape)}, the model's has {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    # checkpoints of old versions of torch lack this counter, which nothing in eval mode reads
    missing = [n for n in expected if n not in state and not n.endswith("num_batches_tracked")]
    extra = [n for n in state if n not in expected]
    problems = [
        f"{len(names)} {text}: {_listed(names)}"
        for names, text in ((missing, "tensors of the model are missing"), (extra, "tensors are not the model's"))
        if names
    ]
    if wrong or problems:
        raise GraphError(f"weights {where} do not fit the model: {'; '.join([*wrong[:_LISTED], *problems])}")
    model.load_state_dict(dict(state), strict=False)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(repr, names[:_LISTED])) + more


# ---------------------------------------------------------------- weights
def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a weights file, by name; of a checkpoint, those under its key `state_dict`.

    Raises:
        GraphError: there is no such file, or it holds something else than tensors by name.
        HagoError: safetensors is not installed.
    """
    file = Path(path)
    if not is_file(file):
        raise GraphError(f"there is no weights file {str(path)!r}")
    state = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise GraphError(f"{path} holds no state dict; write one with torch.save(model.state_dict(), path)")
    return {str(k): v for k, v in state.items()}


def _read_safetensors(file: Path) -> Any:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise HagoError("reading .safetensors needs a package more: pip install 'hago[safetensors]'") from None
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise GraphError(f"{file} is not a safetensors file: {one_line(error)}") from None


def _read_torch(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise GraphError(
            f"{file} is not a plain state dict, and hago runs no code from a file; write one with "
            "torch.save(model.state_dict(), path)"
        ) from None
    except Exception as error:  # of a damaged file, whatever torch's reader stumbles over
        raise GraphError(f"{file} cannot be read as a state dict: {one_line(error)}") from None
