"""The trained weights as a state dict of the user's own module.

Batch norms are folded into the trained weights. The module keeps its batch norms, so their state is set to values with
which they change nothing: with a variance of 1 - eps the multiplier is 1 to within a few parts in 10**9, which changes
no float32 weight. `finetune` calls `trained_state` and `save_state` at the end of a search with training.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from hago.errors import HagoError
from hago.graph import Attention, Graph, Node, example_inputs, from_torch
from hago.graph.passes.fold_batch_norms import multiplier_and_offset
from hago.ops import OPS, Ops
from hago.qat.model import QatModel
from hago.serialization.json_text import replace_file
from hago.serialization.tensor_file import to_bytes


def trained_state(model: nn.Module, trained: Graph, ops: Ops = OPS) -> dict[str, Tensor]:
    """A state dict for `model` with which it imports as `trained`, with the same model hash.

    Args:
        model: the module that training started from, in eval mode; it is not changed.
        trained: `quantizer.plan.graph` of the trained quantizer, or of the one that training did not improve.

    Raises:
        HagoError: the module cannot hold these weights, e.g. because two layers share a weight and were trained
            separately.
    """
    trained = trained.uncorrected
    args, kwargs = example_inputs(trained)
    unfolded = from_torch(model, args, kwargs, fold=False, ops=ops)
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    aliases: dict[int, list[str]] = {}  # the names of each tensor, by its address
    for name, tensor in model.state_dict(keep_vars=True).items():
        aliases.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), []).append(name)
    for names in aliases.values():
        const = next((n for n in names if n in trained.consts), None)
        if const is not None:
            for name in names:
                state[name] = trained.consts[const].clone()
    for norm in unfolded:
        if norm.op == "batch_norm":
            _neutralize(unfolded, trained, norm, state)
    _check_import(model, state, trained, ops)
    return state


def check_holds(module: nn.Module, model: QatModel) -> None:
    """Refuse a module that cannot hold the weights of a model once they are trained: each is changed by a factor of its
    own, in place of training.

    Raises:
        HagoError: as `trained_state`.
    """
    plan = model.training_plan.plan
    changed = {name: plan.graph.consts[name] * (1.0 + n * 2.0**-10) for n, name in enumerate(model.names, 1)}
    trained = replace(plan.graph, consts={**plan.graph.consts, **changed}, corrected_from=None)
    trained_state(module, trained, plan.ops)


def _neutralize(unfolded: Graph, trained: Graph, norm: Node, state: dict[str, Tensor]) -> None:
    """Set the state of a folded batch norm so that it does nothing, or only adds the bias that its layer lacks.

    One without weight and bias (affine=False) adds it as a mean of the opposite sign.
    """
    values = dict(zip(("gamma", "beta", "mean", "variance"), norm.inputs[1:], strict=True))
    missing = [values[part] for part in ("mean", "variance") if values[part] not in state]
    if missing:
        raise HagoError(f"batch norm {norm.name!r} has no {missing[0]!r} in its state dict to write to")
    shape = state[values["mean"]].shape
    gamma, beta, mean = torch.ones(shape), torch.zeros(shape), torch.zeros(shape)
    layer, affine = trained.by_name.get(norm.inputs[0]), trained.by_name.get(norm.name)
    has_affine = values["gamma"] in state and values["beta"] in state
    if affine is not None:  # the batch norm became an affine node instead of being folded
        gamma, beta = (trained.consts[name].clone() for name in affine.inputs[1:])
        if not has_affine:
            _check_unchanged(unfolded, norm, (gamma, beta))
            return
    elif layer is not None and len(layer.inputs) > 2 and layer.inputs[2] not in state:
        beta = trained.consts[layer.inputs[2]].clone()
    if has_affine:
        state[values["gamma"]], state[values["beta"]] = gamma, beta
    else:
        mean = -beta
    state[values["mean"]] = mean
    state[values["variance"]] = torch.full(shape, 1.0 - float(norm.attrs["eps"]))


def _check_unchanged(unfolded: Graph, norm: Node, constants: tuple[Tensor, Tensor]) -> None:
    """Refuse a batch norm without weight and bias whose multiplier or offset differs from that of its statistics."""
    before = (t.to(torch.float32) for t in multiplier_and_offset(unfolded, norm))
    if not all(torch.equal(t, constant) for t, constant in zip(before, constants, strict=True)):
        raise HagoError(
            f"batch norm {norm.name!r} has no weight and bias to hold its trained multiplier and offset; use a module "
            "such as nn.BatchNorm2d, with affine=True"
        )


def _check_import(model: nn.Module, state: dict[str, Tensor], trained: Graph, ops: Ops) -> None:
    """Refuse a state with which a copy of the module does not import as the trained graph."""
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(state)
    args, kwargs = example_inputs(trained)

    def imports(attention: Attention) -> bool:
        graph = from_torch(loaded, args, kwargs, ops=ops, attention=attention, made_for=[trained.model_hash])
        return graph.model_hash == trained.model_hash

    if not any(imports(attention) for attention in get_args(Attention)):  # chips differ in it
        raise HagoError(
            "the module cannot hold the trained weights (it shares weights that were trained apart, say); use the "
            "trained graph, quantizer.plan.graph, wherever a model is asked for"
        )


def save_state(state: dict[str, Tensor], path: Path) -> None:
    """Write a state dict as a safetensors file that replaces an older one atomically.

    Raises:
        LogError: it could not be written; an existing file is not changed.
    """
    replace_file(path, to_bytes("weights", {}, state))
