"""What an error advises is true: each case raises it, takes the advice, and sees that it helps.

`advice.py` reads all messages that advise from the sources. Each is covered by a case here, by a test that is named in
`ELSEWHERE`, or stands in `UNTRIED` with the reason; a new message that advises fails the last test.
"""

from __future__ import annotations

import ast
import copy
import enum
import gc
import io
import json
import re
import runpy
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from advice import Message, messages
from networks import Outliers, Small, Stream, Uneven, images, randomized
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hago
from hago.analysis.inspect import inspect_plan
from hago.arithmetic.types import Edge, dtype
from hago.cli import _run
from hago.correction import Corrections
from hago.data.batches import Batches
from hago.data.sources import load_data
from hago.emulation import dorefa, oneflow
from hago.emulation import pytorch as pytorch_observers
from hago.emulation.tpu_mlir import operators as tpu_mlir_matmul
from hago.emulation.tpu_mlir import operators as tpu_mlir_pool
from hago.emulation.tpu_mlir.numerics import UniformType
from hago.errors import HagoError, HagoWarning
from hago.export.tpu_mlir import make_tables
from hago.graph.model_source import load_model, read_weights
from hago.graph.nesting import read_tree
from hago.graph.passes import PASSES, Pass, PassOptions
from hago.hardware.hardware import Accumulator, OpDesc, Requantize, TensorScheme
from hago.plan.space import Group, Space
from hago.plan.strategy import HardwareId
from hago.qat.losses import cross_entropy_loss as labels_loss
from hago.qat.losses import divergence_loss
from hago.qat.state_dict import trained_state
from hago.runtime.compiling import register, run_compiled
from hago.runtime.native.build import _refuse_world_writable
from hago.search.objective import OBJECTIVES, Objective, cross_entropy_probe
from hago.search.racing import shuffled
from hago.searchers.exhaustive import ExhaustiveOptions
from hago.searchers.registry import make_searcher
from hago.study.log import make_header
from hago.study.loop import run_study as drive
from hago.study.score import Score

CHIP: Final = "x86_vnni"
DATA: Final = [images(4, 1, 6, 6)]
LABELS: Final = [(DATA[0], torch.arange(4) % 3)]
OTHER_LABELS: Final = [(images(4, 1, 6, 6, seed=1), torch.arange(4) % 3)]
PAIR: Final = [torch.arange(1.0, 7.0).reshape(2, 3) / 6]
ROOT: Final = Path(__file__).parent.parent


@cache
def small() -> nn.Module:
    return randomized(Small())


@cache
def graph() -> hago.Graph:
    return hago.from_torch(small(), (DATA[0][:2],))


@cache
def strategy() -> hago.Strategy:
    return hago.quantize(graph(), CHIP, DATA).strategy


def search(**options: Any) -> Any:
    chip, data = options.pop("hardware", CHIP), options.pop("data", DATA)
    return hago.search_quantize_strategy(
        graph(), chip, data, **{"searcher": "default", "budget": 2, "progress": False, **options}
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One piece of advice.

    Args:
        says: a part of the message as it stands in the sources.
        fails: raises it, given a folder.
        helped: the same with the advice taken.
    """

    says: str
    fails: Callable[[Path], object]
    helped: Callable[[Path], object]


# ---------------------------------------------------------------- models
class Options(nn.Module):
    def forward(self, x: Tensor, twice: bool) -> Tensor:
        return x * 2 if twice else x


class Strange(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.fc = kind, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.kind([("a", self.fc(x)), ("b", x)])


def training_mode(folder: Path) -> object:
    return hago.from_torch(Small(), (DATA[0],))


def model_of(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2)).to(dtype).eval()


def with_nan(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2)).eval()
    with torch.no_grad():
        model[0].weight[0, 0] = value
    return model


def norm_of(scale: float, variance: float = 1.0) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).eval()
    with torch.no_grad():
        model[1].weight.fill_(scale)
        model[1].running_var.fill_(variance)
    return model


def without_inputs() -> hago.Strategy:
    found = strategy()
    return replace(found, made_by={k: v for k, v in found.made_by.items() if k != "inputs"})


def with_odd_inputs() -> hago.Strategy:
    found = strategy()
    spoilt = {"tensors": found.made_by["inputs"]["tensors"], "spec": "x"}
    return replace(found, made_by={**found.made_by, "inputs": spoilt})


# ---------------------------------------------------------------- files
def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"~")


def stored(folder: Path) -> Path:
    path = folder / "model.hago"
    hago.create_quantizer(graph(), CHIP, strategy()).realize().save(path)
    return path


def changed(folder: Path) -> object:
    cut(stored(folder))
    return hago.load_integer_model(folder / "model.hago")


def weights(folder: Path, kind: Any) -> object:
    torch.save(kind, folder / "w.pt")
    return read_weights(folder / "w.pt")


class Own:
    pass


def one_array(folder: Path, archive: bool) -> object:
    import numpy as np

    path = folder / "x.npz"
    with open(path, "wb") as file:
        if archive:
            np.savez(file, x=np.ones((2, 3)))
        else:
            np.save(file, np.ones((2, 3)))
    return load_data(str(path))


def pictures(folder: Path, **how: Any) -> object:
    from PIL import Image

    for i, size in enumerate(((8, 8), (8, 9))):
        Image.new("RGB", size).save(folder / f"{i}.png")
    return list(load_data(str(folder), images=hago.data.sources.ImageShape(**how)))


def open_folder(folder: Path, mode: int) -> object:
    folder.chmod(mode)
    try:
        return _refuse_world_writable(folder)
    except OSError as error:
        raise HagoError(str(error)) from None  # `library` says it in a warning
    finally:
        folder.chmod(0o700)


def logged(folder: Path, **options: Any) -> object:
    how = {"log": folder / "l.jsonl", "searcher": "random", "budget": 2}
    search(**how)
    return search(**{**how, **options})


def checkpointed(folder: Path, lr: float, path: str = "c") -> object:
    how: dict[str, Any] = {"steps": 1, "progress": False, "checkpoint": folder / "c"}
    hago.finetune(graph(), CHIP, strategy(), DATA, **how, lr=0.01)
    return hago.finetune(graph(), CHIP, strategy(), DATA, **{**how, "checkpoint": folder / path}, lr=lr)


def spoilt_checkpoint(folder: Path, remove: bool, **document: Any) -> object:
    from hago.qat import run as checkpoint
    from hago.serialization.tensor_file import from_bytes, to_bytes

    path = folder / "c"
    how: dict[str, Any] = {"steps": 1, "progress": False, "checkpoint": path}
    hago.finetune(graph(), CHIP, strategy(), DATA, **how)
    read, tensors = from_bytes(path.read_bytes(), checkpoint._KIND, "a test")
    kept = tensors if document else dict(list(tensors.items())[1:])
    path.write_bytes(to_bytes(checkpoint._KIND, {**read, **document}, kept))
    if remove:
        path.unlink()
    return hago.finetune(graph(), CHIP, strategy(), DATA, **how)


# ---------------------------------------------------------------- searches
def space_of(groups: int) -> Space:
    edges = [Edge(f"n{i}", 0) for i in range(groups)]
    return Space({str(e): Group(str(e), f"m{i}", (e,), (8, 7, 6, 5)) for i, e in enumerate(edges)})


def edited_topology() -> hago.Strategy:
    found = strategy()
    nodes = dict.fromkeys(found.topology.node_conds, False)
    return replace(found, topology=replace(found.topology, node_conds=nodes))


def other_hardware() -> hago.Hardware:
    return hago.load_hardware("x86_avx2")


class Shuffled:
    def __init__(self, shuffle: bool) -> None:
        self.shuffle, self.times = shuffle, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.times += self.shuffle
        yield DATA[0] + self.times


def reread(data: Any) -> object:
    batches = Batches(data, ("x",), cache_bytes=0)
    return [list(batches), list(batches)]


@dataclass(frozen=True)
class OwnEstimator:
    """An estimator of the user's."""

    name: str

    def __call__(self, statistics: Any, grid: Any) -> tuple[Tensor, Tensor]:
        return statistics.minimum.clamp_max(0), statistics.maximum.clamp_min(0)


#: An objective of the user's.
MEAN_ERROR: Final = Objective(
    "mean error",
    lambda reference, outputs, labels: (reference[0] - outputs[0]).abs().flatten(1).double().mean(1, keepdim=True),
    lambda mean: -float(mean[0]),
)

CASES: Final = (
    # models and what they are exported with
    Case("the model is in training mode; call model.eval() first", training_mode, lambda _: graph()),
    Case(
        "example_inputs are needed to export an nn.Module; pass one batch",
        lambda _: hago.from_torch(small()),
        lambda _: hago.from_torch(small(), (DATA[0],)),
    ),
    Case(
        "hago imports float32 models: call model.float()",
        lambda _: hago.from_torch(model_of(torch.float64), (torch.ones(2, 3, dtype=torch.float64),)),
        lambda _: hago.from_torch(model_of(torch.float64).float(), (torch.ones(2, 3),)),
    ),
    Case(
        "; check the weights",
        lambda _: hago.from_torch(with_nan(float("nan")), (torch.ones(2, 3),)),
        lambda _: hago.from_torch(with_nan(0.5), (torch.ones(2, 3),)),
    ),
    Case(
        "check its weight, bias and running statistics",
        lambda _: hago.from_torch(norm_of(1.0, -1.0), (torch.ones(2, 1, 3, 3),)),
        lambda _: hago.from_torch(norm_of(1.0), (torch.ones(2, 1, 3, 3),)),
    ),
    Case(
        "the model takes arguments that are not tensors; pass example_inputs",
        lambda _: hago.graph.execute.example_inputs(hago.from_torch(Options().eval(), (torch.ones(2, 3), True))),
        lambda _: hago.from_torch(Options().eval(), (torch.ones(2, 3), True)),
    ),
    Case(
        "the strategy does not say which inputs the model takes; pass example_inputs",
        lambda _: hago.create_quantizer(small(), CHIP, without_inputs()),
        lambda _: hago.create_quantizer(small(), CHIP, without_inputs(), (DATA[0],)),
    ),
    Case(
        "the strategy's made_by.inputs cannot be read ({}); pass example_inputs",
        lambda _: hago.create_quantizer(small(), CHIP, with_odd_inputs()),
        lambda _: hago.create_quantizer(small(), CHIP, with_odd_inputs(), (DATA[0],)),
    ),
    Case(
        "the strategy's made_by.inputs cannot be read ({}); pass example_inputs",
        lambda _: taken_by_key(),
        lambda _: taken_by_key({Key.value: torch.ones(2, 3)}),
    ),
    # strategies
    Case(
        "load the model and weights it was made for, or search again",
        lambda _: hago.create_quantizer(randomized(Small(), 1), CHIP, strategy()),
        lambda _: hago.create_quantizer(small(), CHIP, strategy()),
    ),
    Case(
        "use that description, or search again",
        lambda _: hago.create_quantizer(graph(), other_hardware(), strategy()),
        lambda _: hago.create_quantizer(graph(), CHIP, strategy()),
    ),
    Case(
        "made by another version of hago: search again",
        lambda _: hago.create_quantizer(graph(), CHIP, edited_topology()),
        lambda _: hago.create_quantizer(graph(), CHIP, search(searcher="default")[0]),
    ),
    # data
    Case("pass at least one batch", lambda _: search(data=[]), lambda _: search(data=DATA)),
    Case(
        "so do not shuffle or augment (DataLoader(shuffle=False)), or pass a list",
        lambda _: reread(Shuffled(True)),
        lambda _: [reread(Shuffled(False)), reread(list(Shuffled(True)))],
    ),
    Case(
        "which can be read only once; pass a list, a DataLoader, or fewer batches",
        lambda _: Batches(iter(DATA), ("x",), cache_bytes=0),
        lambda _: [Batches(DATA, ("x",), cache_bytes=0), Batches(iter(DATA), ("x",))],
    ),
    Case(
        "convert all in the same way",
        lambda _: search(data=[DATA[0], (DATA[0] * 9).to(torch.uint8)]),
        lambda _: search(data=[DATA[0], (DATA[0] * 9).to(torch.uint8).float()]),
    ),
    Case("write it with numpy.savez(path, x=array)", lambda p: one_array(p, False), lambda p: one_array(p, True)),
    Case("; give one size", lambda p: pictures(p), lambda p: pictures(p, size=(8, 8))),
    Case(
        "the accuracy objective needs labels; pass (inputs, labels) batches or objective='sqnr'",
        lambda _: OBJECTIVES["accuracy"].per_sample([torch.ones(2, 3)], [torch.ones(2, 3)], None),
        lambda _: [search(objective="accuracy", data=LABELS), search(objective="sqnr")],
    ),
    Case(
        "sensitivity to accuracy needs labels; pass (inputs, labels) batches",
        lambda _: cross_entropy_probe([torch.ones(4, 3)], None, torch.Generator()),
        lambda _: hago.measure_sensitivity(graph(), CHIP, LABELS, objective="accuracy"),
    ),
    Case(
        "the objective needs labels that are classes; pass (inputs, labels) batches",
        lambda _: search(objective="accuracy", data=LABELS, held_out=DATA),
        lambda _: search(objective="accuracy", data=LABELS, held_out=OTHER_LABELS),
    ),
    Case(
        "needs labels that are classes, got {}; pass (inputs, labels) batches",
        lambda _: hago.evaluate_strategy(graph(), CHIP, strategy(), DATA, objective="accuracy"),
        lambda _: hago.evaluate_strategy(graph(), CHIP, strategy(), LABELS, objective="accuracy"),
    ),
    Case(
        "objective 'labels' needs labels; pass (inputs, labels) batches, or use 'mse' or 'kl'",
        lambda _: labels_loss([torch.ones(2, 3)], [torch.ones(2, 3)], None),
        lambda _: [labels_loss([torch.ones(2, 3)], [torch.ones(2, 3)], torch.tensor([0, 1])),
                   finetuned(objective="mse"), finetuned(objective="kl")],
    ),
    Case(
        "objective 'kl' needs classes on axis 1; the first output has shape {}: use 'mse'",
        lambda _: divergence_loss([torch.ones(4, 1)], [torch.ones(4, 1)], None),
        lambda _: hago.qat.losses.LOSSES["mse"]([torch.ones(4, 1)], [torch.ones(4, 1)], None),
    ),
    Case(
        "pass the same samples in the same batches",
        lambda _: hago.replay(graph(), CHIP, strategy(), [DATA[0] * 0.5]),
        lambda _: hago.replay(graph(), CHIP, strategy(), DATA),
    ),
    Case(
        "there is nothing to inspect: the data set is empty; pass at least one batch",
        lambda _: inspect_plan(hago.create_quantizer(graph(), CHIP, strategy()).plan, []),
        lambda _: hago.inspect_graph_statistic(graph(), CHIP, strategy(), DATA),
    ),
    Case("lower the learning rate", lambda _: finetuned(lr=1e30), lambda _: finetuned(lr=1e-3)),
    # files
    Case("its checksum differs; write it again", changed, lambda p: hago.load_integer_model(stored(p))),
    Case(
        "holds no state dict; write one with torch.save(model.state_dict(), path)",
        lambda p: weights(p, [1, 2]),
        lambda p: weights(p, small().state_dict()),
    ),
    Case(
        "and hago runs no code from a file; write one with torch.save(model.state_dict(), path)",
        lambda p: weights(p, Own()),
        lambda p: weights(p, small().state_dict()),
    ),
    Case(
        "run in the folder that holds it, or install it",
        lambda _: load_model("not_there:x"),
        lambda _: load_model("networks:Small"),
    ),
    Case(
        "whose weights are its own; leave them out",
        lambda p: load_model("test_advice:graph", weights=p / "w"),
        lambda _: load_model("test_advice:graph"),
    ),
    Case("; run chmod o-w on it", lambda p: open_folder(p, 0o777), lambda p: open_folder(p, 0o777 & ~stat.S_IWOTH)),
    Case(
        "and would overwrite each other; give each a path of its own",
        lambda p: search(log=p / "x", save=p / "x"),
        lambda p: search(log=p / "x", save=p / "y"),
    ),
    Case(
        "this search has {}; search with the same model, data and settings, or give another log",
        lambda p: logged(p, data=[DATA[0] + 1]),
        lambda p: [logged(p), logged(p, data=[DATA[0] + 1], log=p / "other")],
    ),
    Case(
        "{}; give {} as a number",
        lambda _: search(keep="sqnr >= float - 3 dB"),
        lambda _: search(keep="sqnr >= 3 dB"),
    ),
    Case(
        "cannot be continued: {}; use {} again, or give another {}",
        lambda p: logged(p, seed=1),
        lambda p: [logged(p), logged(p, seed=1, log=p / "other")],
    ),
    Case(
        "log {} exists; resume it, or give another path",
        lambda p: logged(p, resume=False),
        lambda p: [logged(p, resume=True), logged(p, resume=False, log=p / "other")],
    ),
    Case(
        "it is no regular file; give a path of its own",
        lambda p: search(log=p),
        lambda p: search(log=p / "log"),
    ),
    Case(
        "give this run its own checkpoint, or remove that one",
        lambda p: checkpointed(p, 0.02),
        lambda p: [checkpointed(p, 0.02, "d"), (p / "c").unlink(), checkpointed(p, 0.01)],
    ),
    Case(
        "expected a count and a time; remove it to train from the start",
        lambda p: spoilt_checkpoint(p, False, step="x"),
        lambda p: spoilt_checkpoint(p, True, step="x"),
    ),
    Case(
        "than the model and its optimizer have ({}); remove it to train from the start",
        lambda p: spoilt_checkpoint(p, False),
        lambda p: spoilt_checkpoint(p, True),
    ),
    # searches
    Case(
        "for float, so that nodes in float would add nothing to {}; add it to its float signatures, or search without",
        lambda _: search(hardware="vta", searcher="auto", minimize="cycles", keep="sqnr >= 1 dB", search_topology=True),
        lambda _: [search(hardware="vta", searcher="auto", minimize="cycles", keep="sqnr >= 1 dB", search_topology=x)
                   for x in (False, None)],
    ),
    Case(
        "fix more bits, raise its limit, or use another searcher",
        lambda _: make_searcher("exhaustive", space_of(9)),
        lambda _: [make_searcher("exhaustive", space_of(2)), make_searcher("greedy", space_of(9)),
                   make_searcher("exhaustive", space_of(9), options=ExhaustiveOptions(limit=4**9))],
    ),
    Case(
        "or take the searcher 'pareto'",
        lambda _: search(maximize="sqnr", minimize="bops"),
        lambda _: [search(minimize="bops", keep="sqnr >= 1 dB"), search(searcher="pareto")],
    ),
    Case(
        "so points cannot be raced; take one of {} and {}, or do not race",
        lambda _: search(objective=own_objective, race=True, searcher="random"),
        lambda _: [search(objective="mse", race=True), search(objective=own_objective, searcher="random")],
    ),
    Case(
        "ask for less, keep sensitive nodes float (keep_float), or try another estimator",
        lambda _: search(keep="sqnr >= 300 dB"),
        lambda _: [search(keep="sqnr >= 1 dB")],
    ),
    Case(
        "takes no options; pass",
        lambda _: search(corrections="bias:3"),
        lambda _: search(corrections="bias"),
    ),
    Case(
        "means a figure of hago's own in logs and limits; give it another name",
        lambda _: search(objective=replace(MEAN_ERROR, name="sqnr"), searcher="default"),
        lambda _: search(objective=MEAN_ERROR, searcher="default"),
    ),
    Case(
        "means one of hago's own in logs and strategies; give it another name",
        lambda _: search(estimator=OwnEstimator("mse"), searcher="default"),
        lambda _: search(estimator=OwnEstimator("widest"), searcher="default"),
    ),
    Case(
        "or take executor='threads:N'",
        lambda _: search(objective=lambda *outputs: 1.0, executor="processes:1", searcher="random"),
        lambda _: search(objective=lambda *outputs: 1.0, executor="threads:2", searcher="random"),
    ),
    Case(
        "finetune must say where they go, e.g. finetune={'budget': '5m', 'save_weights': 'tuned.safetensors'}",
        lambda _: search(finetune={"steps": 1}),
        lambda p: hago.search_quantize_strategy(
            small(), CHIP, DATA, budget=2, progress=False, finetune={"steps": 1, "save_weights": p / "w.safetensors"}
        ),
    ),
    Case(
        "make the strategy without: corrections=['rounding', 'bias'] (--corrections rounding)",
        lambda folder: tables_of_uneven(folder),
        lambda folder: tables_of_uneven(folder, corrections=["rounding", "bias"]),
    ),
    # training
    Case(
        "take it, or drop it with model.zero_grad()",
        lambda _: hago.prepare_qat(pending(False), CHIP, strategy()),
        lambda _: hago.prepare_qat(pending(True), CHIP, strategy()),
    ),
    Case(
        "which cannot be trained on; give it a momentum, or norms='frozen'",
        lambda _: qat_of_norm(None),
        lambda _: [qat_of_norm(0.1), qat_of_norm(None, norms="frozen")],
    ),
    Case(
        "trains these norms from their own; use norms='frozen', or a strategy made with corrections='none'",
        lambda _: qat_of_corrected(None, "tensorflow"),
        lambda _: [qat_of_corrected(None, "frozen"), qat_of_corrected("none", "tensorflow")],
    ),
    Case(
        "make the strategy without splitting: corrections=['equalization', 'thresholds', 'rounding', 'bias']",
        lambda _: qat_of_outliers(None),
        lambda _: qat_of_outliers(["equalization", "thresholds", "rounding", "bias"]),
    ),
    Case(
        "make the strategy without equalization: corrections=['thresholds', 'rounding', 'bias'] (--corrections "
        "thresholds ...)",
        lambda _: qat_of_clamps("equalization"),
        lambda _: qat_of_clamps(["thresholds", "rounding", "bias"]),
    ),
    Case(
        "make the strategy without rotation: corrections=['equalization', 'thresholds', 'rounding', 'bias']",
        lambda _: qat_of_tied({"first": 1}),
        lambda _: qat_of_tied({}),
    ),
    Case(
        "before it was folded, but a later pass over the graph ({}) changed that weight; use norms='frozen'",
        lambda _: qat_after_a_new_pass("tensorflow"),
        lambda _: qat_after_a_new_pass("frozen"),
    ),
    Case(
        "the gradient of an example is all 0, which DoReFa cannot scale; pass zeros='zero'",
        lambda _: dorefa.stochastic_gradient(torch.zeros(2, 3), 4, torch.zeros(2, 3), zeros="raise"),
        lambda _: dorefa.stochastic_gradient(torch.zeros(2, 3), 4, torch.zeros(2, 3), zeros="zero"),
    ),
    Case(
        "all weights are 0, which DoReFa cannot scale; pass zeros='zero' to keep them 0",
        lambda _: dorefa.quantize_weight(torch.zeros(2, 3), 4, zeros="raise"),
        lambda _: dorefa.quantize_weight(torch.zeros(2, 3), 4, zeros="zero"),
    ),
    Case(
        "weight {} is all 0, which DoReFa cannot scale; keep its layer float (keep_float)",
        lambda _: hago.quantize(of_zeros(), CHIP, DATA, estimator="dorefa"),
        lambda _: hago.quantize(of_zeros(), CHIP, DATA, estimator="dorefa", keep_float=["fc"]),
    ),
    Case(
        "the model writes to its input {}; let forward leave inputs as they are, by x = x + 1 in place of x += 1, say",
        lambda _: hago.from_torch(Adding(in_place=True).eval(), (torch.ones(2, 3),)),
        lambda _: hago.from_torch(Adding(in_place=False).eval(), (torch.ones(2, 3),)),
    ),
    Case(
        "formula 'cambricon' has no per-channel form; set per_layer=True",
        lambda _: oneflow.Quantizer("cambricon", per_layer=False),
        lambda _: oneflow.Quantizer("cambricon", per_layer=True),
    ),
    Case(
        "the moving average has no per-channel form; set per_layer=True",
        lambda _: oneflow.MovingAverageMinMaxObserver(oneflow.Quantizer(per_layer=False)),
        lambda _: oneflow.MovingAverageMinMaxObserver(oneflow.Quantizer(per_layer=True)),
    ),
    Case(
        "quant_min and quant_max go together; give both or none",
        lambda _: pytorch_observers.QRange(quant_min=0),
        lambda _: [pytorch_observers.QRange(quant_min=0, quant_max=100), pytorch_observers.QRange()],
    ),
    Case(
        "take qint8, or an affine scheme",
        lambda _: reduced("quint8", "per_tensor_symmetric"),
        lambda _: [reduced("qint8", "per_tensor_symmetric"), reduced("quint8", "per_tensor_affine")],
    ),
    Case(
        "use larger batches, or norms='frozen'",
        lambda _: norm_of_one_value(1, "tensorflow"),
        lambda _: [norm_of_one_value(4, "tensorflow"), norm_of_one_value(1, "frozen")],
    ),
    Case(
        "no axis {} in a tensor of shape {}; set ch_axis",
        lambda _: pytorch_observers.MinMaxObserver(per_channel(), ch_axis=4)(torch.ones(2, 3)),
        lambda _: pytorch_observers.MinMaxObserver(per_channel(), ch_axis=1)(torch.ones(2, 3)),
    ),
    # what is exported and carried on
    Case(
        "which hago cannot write down; use tuples, lists and dicts",
        lambda _: hago.from_torch(Strange(Pair).eval(), (torch.ones(2, 3),)),
        lambda _: [hago.from_torch(Strange(kind).eval(), (torch.ones(2, 3),)) for kind in (dict, OrderedDict)],
    ),
    Case(
        "hago imports models on the CPU: call model.cpu()",
        lambda _: hago.from_torch(nn.Linear(3, 2, device="meta").eval(), (torch.ones(2, 3, device="meta"),)),
        lambda _: hago.from_torch(nn.Linear(3, 2).cpu().eval(), (torch.ones(2, 3),)),
    ),
    Case(
        "the model writes to {} when run; call model.eval() and export again, or let forward leave its buffers",
        lambda _: hago.from_torch(exported(nn.BatchNorm1d(3).train())),
        lambda _: hago.from_torch(exported(nn.BatchNorm1d(3).eval())),
    ),
    Case(
        "the model takes {}: convert it as the calibration data was, e.g. {}",
        lambda _: simulated((DATA[0] * 100).to(torch.uint8)),
        lambda _: simulated((DATA[0] * 100).to(torch.uint8).float() / 255),
    ),
    Case(
        "load another model with hago.load_integer_model, or quantize the network that has these weights",
        lambda _: other_state(),
        lambda p: [hago.load_integer_model(stored(p)), hago.quantize(randomized(Small(), 1), CHIP, DATA)],
    ),
    Case(
        "apply the strategy to the original model instead, with hago.create_quantizer",
        lambda p: unstorable().realize().save(p / "m"),
        lambda _: unstorable().realize()(torch.ones(2, 3)),
    ),
    Case(
        "so it is known in cycles only: use 'cycles'",
        lambda _: search(minimize="latency", hardware=without_clock()),
        lambda _: search(minimize="cycles", keep="sqnr >= 0", hardware=without_clock()),
    ),
    Case(
        "symmetric average pooling got a zero point; use avg_pool_asymmetric",
        lambda _: pooled(tpu_mlir_pool.avg_pool),
        lambda _: pooled(tpu_mlir_pool.avg_pool_asymmetric),
    ),
    Case(
        "so they must be in memory: pass fewer, or do not race",
        lambda _: shuffled(Batches(DATA, ("x",), cache_bytes=0), 0, 2, ("x",)),
        lambda _: [shuffled(Batches(DATA, ("x",)), 0, 2, ("x",)), search()],
    ),
    Case(
        "needs a header; make one with make_header",
        lambda p: drive(space_of(1), make_searcher("default", space_of(1)), scored, log=p / "l"),
        lambda p: drive(space_of(1), make_searcher("default", space_of(1)), scored, log=p / "l", header=header()),
    ),
    Case(
        "Ask for less, or give the search more trials",
        lambda _: search(budget_cost="weight_bytes <= 141", searcher="random", budget=1),
        lambda _: [search(budget_cost="weight_bytes <= 141", searcher="limited", budget=30),
                   search(budget_cost="weight_bytes <= 10000", searcher="random", budget=1)],
    ),
    Case(
        "choose hardware with a wider accumulator, or take it as it is with allow_overflow=True",
        lambda _: overflowing(),
        lambda _: [overflowing(allow_overflow=True), search()],
    ),
    Case(
        "batches have no labels; pass them with every batch, or none",
        lambda _: search(data=[*LABELS, *DATA]),
        lambda _: [search(data=[*LABELS, *LABELS]), search(data=[*DATA, *DATA])],
    ),
    Case(
        "They seem to count from 1: pass labels - 1",
        lambda _: search(data=counted_from(1)),
        lambda _: search(data=counted_from(0)),
    ),
    Case(
        "Correct the labels, or pass the inputs alone",
        lambda _: search(data=[(DATA[0], torch.randn(4))]),
        lambda _: search(data=DATA),
    ),
    Case(
        "take the form {}",
        lambda p: hago.create_quantizer(graph(), CHIP, strategy()).export_onnx(p / "x"),
        lambda p: [hago.create_quantizer(graph(), CHIP, strategy()).export_onnx(p / "x", form="qoperator"),
                   hago.quantize(graph(), "onnxruntime_cpu", DATA).export_onnx(p / "y")],
    ),
    # hardware files
    Case(
        "give two signatures, or one whose weight alone is an integer",
        lambda _: OpDesc(["int8", "float32"], "int32"),
        lambda _: [OpDesc(["int8", "int8"], "int32"), FLOAT, OpDesc(["float32", "int8"], "float32")],
    ),
    Case(
        "no op lists this signature; list it or remove it",
        lambda p: chip(p, {"linear": ["mac"]}, mac=MAC, real=REAL),
        lambda p: [chip(p, {"linear": ["mac", "real"]}, mac=MAC, real=REAL), chip(p, {"linear": ["mac"]}, mac=MAC)],
    ),
    Case(
        "list those of one place only",
        lambda p: chip(p, mac=MAC, narrow=NARROW),
        lambda p: [chip(p, mac=MAC), chip(p, narrow=NARROW)],
    ),
    Case(
        "has none: remove it",
        lambda p: chip(p, real={**REAL, "max_bits": 8}),
        lambda p: chip(p, real=REAL),
    ),
    Case(
        "(or state requantize_at: output)",
        lambda p: chip(p, mac={**MAC, "out": "int8"}),
        lambda p: [chip(p, mac=MAC), chip(p, mac={**MAC, "out": "int8", "requantize_at": "output"})],
    ),
    Case(
        "belongs to saturate_each, got {}: remove it",
        lambda p: chip(p, mac={**MAC, "accumulator": {**WRAPS, "order": "channels_inner"}}),
        lambda p: [chip(p, mac=MAC), chip(p, mac={**MAC, "accumulator": SATURATES})],
    ),
    Case(
        "List a signature for it, or other_ops: float32",
        lambda p: layers_on(chip(p, mac=MAC)),
        lambda p: [layers_on(chip(p, {"linear": ["mac"], "relu": ["sum"]}, mac=MAC, sum=SUM)),
                   layers_on(chip(p, other_ops="float32", mac=MAC))],
    ),
    Case(
        "List a float signature for it, or let it be integer",
        lambda p: layers_on(chip(p, other_ops="float32", mac=MAC), keep_float="0"),
        lambda p: [layers_on(chip(p, other_ops="float32", mac=MAC, real=REAL), keep_float="0"),
                   layers_on(chip(p, other_ops="float32", mac=MAC))],
    ),
    # bits that hardware or limits leave
    Case(
        "no bits were found that fit every node",
        lambda _: fixed(EITHER, WIDE),
        lambda _: [fixed(EITHER, {"*:0": 16}), fixed(EITHER, WIDE, keep_float=["stem.0", "body"]),
                   fixed([*EITHER, emits("int16", "int8", "int16")], WIDE)],
    ),
    Case(
        "allow more, or fewer bits (min_bits in the hardware file)",
        lambda _: limited(100),
        lambda _: [limited(141), limited(100, hardware=of_two_bits())],
    ),
    Case(
        "gave no float values to calibrate on; keep its readers float",
        lambda _: hago.quantize(Empty().eval(), CHIP, PAIR),
        lambda _: hago.quantize(Empty().eval(), CHIP, PAIR, keep_float="of_none"),
    ),
    Case(
        "was written by a different searcher or seed: {}; search with the same searcher and seed, or give another log",
        lambda p: reseeded(p, 1),
        lambda p: [reseeded(p, 0), reseeded(p, 1, "other")],
    ),
    # what formats and other systems' arithmetic cannot express
    Case(
        "share no right shift; quantize this matrix product per tensor",
        lambda _: uneven_columns(per_channel=True),
        lambda _: uneven_columns(per_channel=False),
    ),
    Case(
        "ONNX sums in int32 that wraps. Take fewer bits",
        lambda p: onnx_of(p, BYTES_IN_16),
        lambda p: onnx_of(p, BYTES_IN_16, fix_bits={"*:0": 4, "*:1": 4}),
    ),
    Case(
        "ONNX sums in int32. Take fewer bits",
        lambda p: onnx_of(p, IN_64),
        lambda p: onnx_of(p, IN_64, fix_bits={"*:1": 8}),
    ),
    Case(
        "quantize for hardware that the {} form can express for this network: {}",
        lambda p: onnx_of(p, "vta"),
        lambda p: [onnx_of(p, "vta", form="qoperator"), onnx_of(p, "onnxruntime_cpu")],
    ),
    Case(
        "quantize table has no mode that quantizes weights alone. Keep the weights float: keep_float={}",
        lambda _: tables_of(),
        lambda _: tables_of(keep_float=advised_names()),
    ),
    Case(
        "tables have no mode for. Keep such nodes float: keep_float={}",
        lambda _: tables_of(PRODUCTS),
        lambda _: tables_of(PRODUCTS, keep_float=advised_names(PRODUCTS)),
    ),
    Case(
        "scales per tensor and per channel are trained; train for a signature without granularity",
        lambda _: trained_on(replace(ALONE, groups=hago.hardware.Groups(32))),
        lambda _: trained_on(ALONE),
    ),
    Case(
        "have multipliers, which are not trained; train for a signature without granularity",
        lambda _: trained_on(PRODUCTS),
        lambda _: trained_on(replace(PRODUCTS, groups=None)),
    ),
    # nesting
    Case(
        "let the model take and return tensors, tuples, lists, and dicts whose keys are texts or numbers",
        lambda p: stored_and_run(p, Keyed(Key.value)),
        lambda p: [stored_and_run(p, Keyed(key)) for key in ("value", 1)],
    ),
    Case(
        "no named tuple {} is known; import the module that defines it first",
        lambda p: read_tree(nesting_of("collections.namedtuple", str(p))),
        lambda p: [imported(p, NAMED), read_tree(nesting_of("collections.namedtuple", str(p)))],
    ),
    Case(
        "this process does not know the type {}; import the module that defines it first",
        lambda p: read_tree(nesting_of(str(p), "null")),
        lambda p: [imported(p, REGISTERED), read_tree(nesting_of(str(p), "null"))],
    ),
    # what is exported, trained and compiled
    Case(
        "See that torch.export.export(model, example_inputs) works, or pass an ExportedProgram",
        lambda _: hago.from_torch(Foreign().eval(), (torch.ones(4, 3),)),
        lambda _: [hago.from_torch(Foreign(True).eval(), (torch.ones(4, 3),)),
                   hago.from_torch(exported(Foreign(True).eval()))],
    ),
    Case(
        "Let it return tensors alone (a model of transformers does with use_cache=False in its config",
        lambda _: hago.from_torch(Cached().eval(), (torch.ones(4, 3),)),
        lambda _: [hago.from_torch(Cached(use_cache=False).eval(), (torch.ones(4, 3),)),
                   hago.from_torch(Calling(Cached()).eval(), (torch.ones(4, 3),))],
    ),
    Case(
        "keep a reference to the model while its graph is used",
        lambda _: compiled_without(small_quantized()),
        lambda _: compiled_with(small_quantized()),
    ),
    Case(
        "it cannot hold DoReFa's levels times the batch norm {}; use norms='frozen'",
        lambda _: dorefa_per_tensor("tensorflow"),
        lambda _: dorefa_per_tensor("frozen"),
    ),
    Case(
        "the module cannot hold the trained weights",
        lambda _: trained_state(shared(), trained_apart().plan.graph),
        lambda _: hago.create_quantizer(trained_apart().plan.graph, CHIP, trained_apart().strategy).realize(),
    ),
    Case(
        "an observer saw NaN or infinite values; lower the learning rate",
        lambda _: observed(1e10),
        lambda _: observed(1e-3),
    ),
    Case(
        "an observer saw NaN or infinite values; lower the learning rate",
        lambda _: observed(1e30),
        lambda _: observed(1e-3),
    ),
    # the command line
    Case(
        "--check runs the file on data; give --data",
        lambda p: exported_by(p, "--check"),
        lambda p: exported_by(p, "--check", "--data", "test_advice:data"),
    ),
    Case(
        "is not a stored integer model; give MODEL and STRATEGY, or the file of a stored model",
        lambda p: api_command("export", "test_advice:small", "--format", "onnx"),
        lambda p: exported_by(p),
    ),
    Case(
        "explain needs the model's inputs: give either --data or --input-shape",
        lambda _: api_command("explain", "test_advice:small", "--hardware", CHIP),
        lambda _: api_command("explain", "test_advice:small", "--hardware", CHIP, "--input-shape", "1,6,6"),
    ),
)  # fmt: skip


#: A batch norm over rows, not images.
ROWS: Final = [torch.randn(8, 3, generator=torch.Generator().manual_seed(0))]
PLAIN: Final = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()


def norm_of_one_value(rows: int, norms: Any) -> object:
    return hago.prepare_qat(PLAIN, CHIP, dataset=ROWS, norms=norms).train()(ROWS[0][:rows])


def per_channel() -> Any:
    return pytorch_observers.QRange("qint8", "per_channel_symmetric")


class Pair:
    """A container that torch's pytree knows and cannot write down."""

    def __init__(self, items: Any) -> None:
        self.items = [v for _, v in items]


pytree.register_pytree_node(Pair, lambda p: (p.items, None), lambda items, _: Pair(list(enumerate(items))))


def exported(model: nn.Module) -> Any:
    return torch.export.export(model, (torch.ones(4, 3),))


def simulated(data: Tensor) -> object:
    return hago.create_quantizer(graph(), CHIP, strategy()).simulate()(data)


def other_state() -> object:
    quantized = hago.create_quantizer(graph(), CHIP, strategy()).realize()
    other = hago.quantize(randomized(Small(), 1), CHIP, DATA).realize().state_dict()
    try:
        return quantized.load_state_dict(other, strict=False)
    except RuntimeError as error:
        raise HagoError(str(error)) from None  # torch says what hago does


def of_zeros() -> nn.Module:
    model = randomized(Small())
    nn.init.zeros_(model.fc.weight)
    return model


class Adding(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_place:
            return x + 1.0
        x += 1.0
        return x


class Put(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.put(self.fc(x), torch.zeros(1, dtype=torch.long), torch.zeros(1))


@cache
def unstorable() -> hago.Quantizer:
    with pytest.warns(HagoWarning, match="no rule"):
        return hago.quantize(Put().eval(), CHIP, PAIR)


def without_clock() -> hago.Hardware:
    chip = hago.load_hardware(CHIP)
    return replace(chip, cost={k: v for k, v in chip.cost.items() if k != "clock_hz"})


def pooled(function: Any) -> object:
    source, target = UniformType(0.1, 3), UniformType(0.1, 1)
    return function(torch.ones(1, 1, 4, 4, dtype=torch.int64), (2, 2), source, target)


def scored(bits: Any) -> Any:
    return Score(1.0, {"sqnr": 1.0}, plan_key="x")


def header() -> Any:
    space = space_of(1)
    made = {"model_hash": "m", "hardware": HardwareId("c", "h"), "data_hash": "d"}
    return make_header(space, make_searcher("default", space), seed=0, **made, estimator="mse", objective="sqnr")


def overflowing(**options: Any) -> object:
    space = space_of(1)
    score = Score(1.0, {"sqnr": 1.0}, overflows={"n0": 3}, excess_bits={"n0": 1}, plan_key="x")
    return drive(space, make_searcher("default", space), lambda bits: score, **options)


def counted_from(least: int) -> Any:
    return [(DATA[0], torch.tensor([0, 1, 2, 0]) + least)]


def data() -> list[Tensor]:
    return DATA


def exported_by(folder: Path, *words: str) -> object:
    strategy().save(folder / "s.json")
    made = ("--format", "onnx", "--form", "qoperator", "--save", str(folder / "x.onnx"))
    return api_command("export", "test_advice:small", str(folder / "s.json"), *made, *words)


def own_objective(reference: Any, outputs: Any, labels: Any) -> float:
    return -float((reference[0] - outputs[0]).abs().mean())


def finetuned(**options: Any) -> object:
    return hago.finetune(graph(), CHIP, strategy(), DATA, steps=3, progress=False, **options)


def pending(dropped: bool) -> nn.Module:
    model = randomized(Small())
    model(DATA[0]).sum().backward()
    if dropped:
        model.zero_grad()
    return model


def qat_of_norm(momentum: float | None, **options: Any) -> object:
    model = randomized(Small())
    model.stem[1].momentum = momentum
    return hago.prepare_qat(model, CHIP, dataset=DATA, **{"norms": "tensorflow", **options})


def qat_of_tied(rotations: dict[str, int]) -> Any:
    model = Stream(20, tied=True).eval()
    prepared = hago.search.prepare(model, CHIP, [images(4, 6, 20, seed=1).argmax(2)])
    rotated = prepared.corrected(Corrections(rotations=rotations))
    bits = rotated.space.widest()
    return hago.prepare_qat(model, CHIP, hago.search.make_strategy(rotated, rotated.resolver(bits), bits, {}))


def qat_of_outliers(corrections: Any) -> Any:
    model, data = Outliers().eval(), [images(16, 6, 12, seed=n) for n in range(2)]
    return hago.prepare_qat(model, CHIP, hago.quantize(model, CHIP, data, corrections=corrections).strategy)


def qat_of_clamps(corrections: Any) -> Any:
    model, data, chip = Uneven(high=1.0).eval(), [images(16, 3, 8, 8)], hago.load_hardware("vta")
    chip = replace(chip, ops={**chip.ops, "channel_clamp": chip.ops["clamp"]})
    return hago.prepare_qat(model, chip, hago.quantize(model, chip, data, corrections=corrections).strategy)


def qat_of_corrected(corrections: str | None, norms: Any) -> object:
    model, data = Uneven().eval(), [images(16, 3, 8, 8)]
    corrected = hago.quantize(model, "vta", data, corrections=corrections).strategy
    return hago.prepare_qat(model, "vta", corrected, norms=norms)


def qat_after_a_new_pass(norms: str) -> object:
    """prepare_qat with a pass after folding that changes all constants."""

    def double(graph: hago.Graph, options: PassOptions) -> hago.Graph:
        return replace(graph, consts={name: 2 * const for name, const in graph.consts.items()})

    added = Pass("double", double, since=1 + max(p.since for p in PASSES))
    with mock.patch("hago.graph.passes.PASSES", (*PASSES, added)):
        return qat_of_norm(0.1, norms=norms)


def reduced(dtype: str, scheme: str) -> object:
    return pytorch_observers.MinMaxObserver(pytorch_observers.QRange(dtype, scheme, reduce_range=True))


#: Signatures of a small chip, as a hardware file has them.
WRAPS: Final = {"dtype": "int32", "overflow": "wrap"}
SATURATES: Final = {"dtype": "int32", "overflow": "saturate_each", "order": "channels_inner", "bias": "first"}
MAC: Final = {"in": ["uint8", "int8", "int32"], "out": "int32", "accumulator": WRAPS}
NARROW: Final = {**MAC, "out": "uint8", "requantize_at": "output"}
SUM: Final = {"in": ["int32"], "out": "int32", "max_bits": 23}
REAL: Final = {"in": ["float32"], "out": "float32"}


def chip(
    folder: Path, ops: dict[str, list[str]] | None = None, other_ops: str = "reject", **signatures: Any
) -> hago.Hardware:
    """Hardware read from a file; linear has all the signatures where no ops are given."""
    document = {
        "version": 1,
        "name": "small",
        "sources": ["made up"],
        "activation": {"scheme": "hago", "granularity": "per_tensor"},
        "weight": {"scheme": "hago", "granularity": "per_tensor"},
        "requantize": {"form": "float32"},
        "rounding": "half_even",
        "signatures": signatures,
        "ops": ops or {"linear": list(signatures)},
        "other_ops": other_ops,
    }
    (folder / "chip.json").write_text(json.dumps(document))
    return hago.load_hardware(folder / "chip.json")


def layers_on(hardware: hago.Hardware, **options: Any) -> object:
    return hago.quantize(nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval(), hardware, PAIR, **options)


FLOAT: Final = OpDesc("float32", "float32")
SYMMETRIC: Final = TensorScheme("symmetric")
#: Of every operand of a layer and of its weight.
WIDE: Final = {"*:0": 16, "*:1": 8}


def emits(operand: str, weight: str, out: str, register: str = "int32") -> OpDesc:
    """A signature of layers that requantize at the output."""
    return OpDesc([operand, weight], out, Accumulator(dtype(register)), "output")


#: 16 bits by 4, or 8 by 8.
EITHER: Final = [emits("int16", "int4", "int16"), emits("int8", "int8", "int8"), FLOAT]


def fixed(convolutions: list[OpDesc], bits: dict[str, int], **options: Any) -> object:
    ops = {"conv2d": convolutions, "linear": [emits("int16", "int16", "int16")]}
    hardware = hago.Hardware(ops, name="either", activation=SYMMETRIC)
    return hago.quantize(graph(), hardware, DATA, fix_bits=bits, **options)


def limited(most: int, **options: Any) -> object:
    return search(budget_cost=f"weight_bytes <= {most}", searcher="limited", **options)


def of_two_bits() -> hago.Hardware:
    found = hago.load_hardware(CHIP)
    ops = {
        op: tuple(replace(d, min_bits=2) if d.out_dtype.is_int else d for d in descs) for op, descs in found.ops.items()
    }
    return replace(found, ops=ops)


class Empty(nn.Module):
    """A layer that reads no values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.of_none = nn.Linear(3, 2), nn.Linear(0, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.of_none(self.fc(x)[:, :0])


def reseeded(folder: Path, seed: int, log: str = "log") -> object:
    """A search, and another one whose header is the same."""
    space = space_of(2)
    made = {"model_hash": "m", "hardware": HardwareId("c", "h"), "data_hash": "d"}
    first = make_searcher("random", space, seed=0)
    how: dict[str, Any] = {
        "header": make_header(space, first, seed=0, **made, estimator="mse", objective="sqnr"),
        "budget": 3,
    }
    drive(space, first, scored, log=folder / "log", **how)
    return drive(space, make_searcher("random", space, seed=seed), scored, log=folder / log, **how)


def uneven_columns(*, per_channel: bool) -> object:
    weight, uniform = torch.tensor([[1000.0, 1e-9]]), UniformType(1.0, 0)
    return tpu_mlir_matmul.lower_matmul(weight, None, uniform, uniform, per_channel=per_channel)


#: Chips whose sums are of 16 bits, and of 64.
BYTES_IN_16: Final = replace(hago.load_hardware("int16_accumulator"), requantize=Requantize())
IN_64: Final = hago.Hardware({"conv2d": [emits("int16", "int16", "int16", "int64")]}, name="wide", activation=SYMMETRIC)


def onnx_of(folder: Path, hardware: Any, form: str = "qdq", **options: Any) -> object:
    return hago.quantize(graph(), hardware, DATA, **options).export_onnx(folder / "x.onnx", form=form)


def tables_of_uneven(folder: Path, **options: Any) -> object:
    quantizer = hago.quantize(Uneven().eval(), "vta", [images(16, 3, 8, 8)], **options)
    return quantizer.export(folder / "x", "tpu-mlir")


ALONE: Final = OpDesc(["float32", "int4"], "float32")
PRODUCTS: Final = OpDesc(["int8", "int4", "int32"], "int32", groups=hago.hardware.Groups(32, 4))


def tables_of(conv: OpDesc = ALONE, **options: Any) -> object:
    hardware = hago.Hardware({"conv2d": [conv, FLOAT]}, name="weights", activation=SYMMETRIC, weight=SYMMETRIC)
    quantizer = hago.quantize(graph(), hardware, DATA, **options)
    return make_tables(quantizer.plan, quantizer.strategy.bits)


def advised_names(conv: OpDesc = ALONE) -> list[str]:
    with pytest.raises(HagoError) as caught:
        tables_of(conv)
    names: list[str] = ast.literal_eval(str(caught.value).rpartition("keep_float=")[2])
    return names


def trained_on(conv: OpDesc) -> object:
    hardware = hago.Hardware({"conv2d": [conv, FLOAT]}, name="weights", activation=SYMMETRIC, weight=SYMMETRIC)
    return hago.prepare_qat(small(), hardware, dataset=DATA)


class Key(enum.Enum):
    value = 1


class Keyed(nn.Module):
    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key, self.fc = key, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[Any, Tensor]:
        return {self.key: self.fc(x)}


class Taking(Keyed):
    def forward(self, x: dict[Any, Tensor]) -> Tensor:  # type: ignore[override]
        return self.fc(x[self.key])


def taken_by_key(*example_inputs: Any) -> object:
    model = Taking(Key.value).eval()
    found = hago.quantize(model, CHIP, [({Key.value: PAIR[0]},)]).strategy
    return hago.create_quantizer(model, CHIP, found, example_inputs)


def stored_and_run(folder: Path, model: nn.Module) -> object:
    (data,) = PAIR
    hago.quantize(model.eval(), CHIP, [data]).realize().save(folder / "m.hago")
    return hago.load_integer_model(folder / "m.hago")(data)


def nesting_of(kind: str, context: str) -> str:
    """A container of one value, as torch's pytree writes it."""
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])


#: Modules that define a container; its name is put in.
NAMED: Final = """
from collections import namedtuple
from torch.utils import _pytree as pytree
pytree._register_namedtuple(namedtuple("One", "value"), serialized_type_name=%r)
"""
REGISTERED: Final = """
from torch.utils import _pytree as pytree
class One(list): pass
pytree.register_pytree_node(One, lambda x: (list(x), None), lambda v, _: One(v), serialized_type_name=%r)
"""


def imported(folder: Path, source: str) -> object:
    (folder / "kinds.py").write_text(source % str(folder))
    return runpy.run_path(str(folder / "kinds.py"))


class Foreign(nn.Module):
    """It may compute in numpy, which torch.export cannot follow."""

    def __init__(self, in_torch: bool = False) -> None:
        super().__init__()
        self.in_torch = in_torch

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.in_torch else torch.from_numpy(2 * x.numpy())


class Output:
    """Of a type that torch does not know."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Cached(nn.Module):
    def __init__(self, use_cache: bool = True) -> None:
        super().__init__()
        self.use_cache, self.fc = use_cache, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return Output(self.fc(x)) if self.use_cache else self.fc(x)


class Calling(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def small_quantized() -> Any:
    return hago.create_quantizer(graph(), CHIP, strategy()).realize()


def compiled_with(model: Any) -> object:
    return run_compiled([DATA[0]], register(model))


def compiled_without(model: Any) -> object:
    handle = register(copy.copy(model))
    gc.collect()
    return run_compiled([DATA[0]], handle)


def dorefa_per_tensor(norms: Any) -> object:
    hardware = replace(hago.load_hardware(CHIP), weight=TensorScheme("symmetric"))
    return hago.prepare_qat(randomized(Small()), hardware, dataset=DATA, scheme="dorefa", norms=norms)


class Shared(nn.Module):
    """One convolution, used twice, with a batch norm of its own each time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.BatchNorm2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.conv(self.one(self.conv(x))))


def shared() -> nn.Module:
    return randomized(Shared())


@cache
def trained_apart() -> hago.Quantizer:
    model = hago.prepare_qat(shared(), CHIP, dataset=DATA).train()
    descend(model, 0.02, 1)
    return hago.from_qat(model)


def descend(model: nn.Module, lr: float, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(DATA[0]).square().mean().backward()
        optimizer.step()


def observed(lr: float) -> object:
    return descend(hago.prepare_qat(small(), CHIP, dataset=DATA, scheme="pytorch").train(), lr, 3)


def api_command(*words: str) -> object:
    return _run(words, io.StringIO(), lambda: None)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.says[:60])
def test_the_advice_of_an_error_helps(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    said = ".*".join(map(re.escape, case.says.split("{}")))
    with pytest.raises((HagoError, HagoWarning), match=re.compile(said, re.DOTALL)):
        case.fails(tmp_path / "before")
    case.helped(tmp_path / "after")


# ---------------------------------------------------------------- completeness
WRONG_DATA: Final = ("data/test_wrong_data.py", "test_wrong_data_is_explained")
IMPLAUSIBLE: Final = ("data/test_wrong_data.py", "test_implausible_values_are_warned_of")
BY_VALUES: Final = ("data/test_wrong_data.py", "test_control_flow_by_values_names_the_line")
#: Advice that other tests take, and which.
UNGUARDED: Final = (
    "search/test_workers.py",
    "test_a_script_that_searches_in_its_workers_too_is_told_what_it_lacks",
)
ELSEWHERE: Final = {
    "unset HAGO_MAX_CPU_ISA to use it": (
        "analysis/test_machine.py",
        "test_how_bytes_are_multiplied_is_said_and_what_limits_it",
    ),
    "switched off by HAGO_NATIVE=0; unset it": ("runtime/test_kernels.py", "test_the_library_can_be_switched_off"),
    "has no weight and bias to hold its trained multiplier": (
        "qat/test_state_dict.py",
        "test_a_batch_norm_that_cannot_hold_what_was_trained_is_named",
    ),
    "put the search of a script under": UNGUARDED,
    "or take fewer workers if the machine lacks memory": UNGUARDED,
    "computes several of its nodes together in another way": (
        "export/test_onnx_fusions.py",
        "test_a_file_that_differs_as_a_whole_fails",
    ),
    "which a single sample has not; let forward": (
        "graph/test_export_check.py",
        "test_what_depends_on_the_batch_or_on_chance_is_refused",
    ),
    "which is open along another axis": ("graph/test_export_check.py", "test_programs_with_other_open_axes_say_so"),
    "which torch.inference_mode() has not": ("graph/test_export_check.py", "test_inference_mode_is_named"),
    "fewer bits together (fix_bits, or max_bits in the": (
        "plan/test_wide_sums.py",
        "test_operands_have_fewer_bits_where_their_sums_are_too_large",
    ),
    "import hago\nhago.": ("report/test_document.py", "test_the_lines_of_python_run"),
    "serves searches, and is a callback of {} here": (
        "test_callbacks.py",
        "test_a_callback_of_searches_refuses_training",
    ),
    "would be written to {}.{}.json, the file of": (
        "export/test_model_explorer.py",
        "test_two_figures_of_one_file_are_refused",
    ),
    "of a module of TorchScript, pass the nn.Module": ("test_api.py", "test_modules_of_torchscript_are_refused"),
    "which mean the same; give one": ("test_api.py", "test_an_objective_is_given_once"),
    "leave such samples out, or have the model return numbers": (
        "search/test_infinite_outputs.py",
        "test_outputs_that_are_no_numbers_are_refused",
    ),
    "cannot be traced or scripted by torch.jit": ("test_api.py", "test_an_integer_model_is_not_traced"),
    "realize() for the integer model, simulate()": ("test_api.py", "test_models_are_modules"),
    "train it as any nn.Module, then hago.from_qat": (
        "qat/test_training.py",
        "test_the_trained_model_is_the_shipped_one",
    ),
    "the file sums {} in int64. Take fewer bits": ("export/test_onnx.py", "test_a_mean_whose_sum_may_wrap_is_refused"),
    "Let it return tensors alone": ("graph/test_exported_program.py", "test_a_model_that_returns_a_cache"),
    "was changed while it was written": (
        "study/test_log_faults.py",
        "test_a_log_that_another_process_changes_ends",
    ),
    "was removed while it was written": (
        "study/test_log_faults.py",
        "test_a_log_that_another_process_changes_ends",
    ),
    "was renamed while it was written": (
        "study/test_log_faults.py",
        "test_a_log_that_another_process_changes_ends",
    ),
    "was replaced by another file while": (
        "study/test_log_faults.py",
        "test_a_log_that_another_process_changes_ends",
    ),
    "{} exists; give another file with --output": ("cli/test_cli.py", "test_a_new_chip_is_edited_and_checked"),
    "ships with hago; give the new one another name": (
        "hardware/test_common_ops.py",
        "test_names_that_are_taken_or_none",
    ),
    "--objective compares two strategies; give a second STRATEGY": (
        "cli/test_cli.py",
        "test_options_of_a_comparison_fit_the_number_of_strategies",
    ),
    "compare realizations of one strategy; give one STRATEGY": (
        "cli/test_cli.py",
        "test_options_of_a_comparison_fit_the_number_of_strategies",
    ),
    "leave --no-resume out to continue it, or give another --log": (
        "cli/test_output_files.py",
        "test_a_log_is_not_continued_if_the_user_says_so",
    ),
    "cannot write {}: {} is {}; give another path": (
        "cli/test_output_files.py",
        "test_a_folder_that_cannot_be_made_is_refused_before_any_work",
    ),
    "To get hago's kernels, install a C++ compiler with OpenMP": (
        "runtime/test_kernels.py",
        "test_a_missing_compiler_is_a_warning",
    ),
    "is a folder; give the path of a file in it": (
        "cli/test_output_files.py",
        "test_a_folder_and_a_file_of_another_format_are_refused",
    ),
    "{}: {} is a {} file; give e.g. {}": (
        "cli/test_output_files.py",
        "test_a_folder_and_a_file_of_another_format_are_refused",
    ),
    "so it is not overwritten; give another path": (
        "cli/test_output_files.py",
        "test_a_file_that_hago_did_not_write_is_not_overwritten",
    ),
    "give another --log, or --save another file": (
        "cli/test_output_files.py",
        "test_a_new_log_overwrites_no_strategy_of_another",
    ),
    "search    {}  # may lose less than one shot": ("cli/test_answers.py", "test_one_shot_names_a_search_that_runs"),
    "which a stored integer model does not hold; give MODEL and STRATEGY": (
        "cli/test_cli_stored.py",
        "test_bad_input_is_one_clear_line",
    ),
    "does not give what {} needs{}. Add to its file": (
        "cli/test_answers.py",
        "test_a_cost_without_figures_names_the_keys_of_the_hardware_file",
    ),
    "a limit on {} (keep, or --keep) needs labels": (
        "cli/test_answers.py",
        "test_a_limit_that_needs_labels_names_itself",
    ),
    "fix_bits {} has no effect, since {}": ("plan/test_space.py", "test_fixed_bits_without_effect_are_warned_of"),
    "which keep_float keeps float; leave out one of them": (
        "cli/test_answers.py",
        "test_bits_of_nodes_that_stay_float_are_refused",
    ),
    "at most {}: set max_bits, or list a float signature": (
        "hardware/test_hardware_validation.py",
        "test_tables_have_entries_for_at_most_16_bits",
    ),
    "have lost most of their bits to their biases": (
        "search/test_narrow_biases.py",
        "test_biases_that_fit_are_not",
    ),
    "overflow on samples that this search did not look at": (
        "search/test_effort.py",
        "test_overflows_on_samples_that_were_not_looked_at_are_a_warning",
    ),
    "which is not given; give both": ("cli/test_answers.py", "test_samples_of_the_calibration_cut_no_held_out_data"),
    "pass other samples as held_out (--held-out)": (
        "cli/test_answers.py",
        "test_held_out_data_that_calibration_saw_is_a_warning",
    ),
    "is minimized and nothing limits the loss": (
        "cli/test_answers.py",
        "test_a_cost_that_is_minimized_without_a_limit_is_a_warning",
    ),
    "to rule overflow out at {}, try with hago {}: {}": (
        "analysis/test_answer.py",
        "test_inspection_tries_what_rules_overflow_out",
    ),
    "no strategy was made for it ({}); leave it out": (
        "cli/test_cli.py",
        "test_strategies_of_ones_own_chip_and_of_a_shipped_one_are_compared",
    ),
    "was made for hardware {}, which does not": ("cli/test_cli.py", "test_hardware_of_the_user_must_be_given_again"),
    "is of objective {}, which is none of hago's own": (
        "cli/test_cli.py",
        "test_objectives_of_the_user",
    ),
    "If it is one of your own, pass it as estimator=": (
        "cli/test_cli.py",
        "test_objectives_of_the_user",
    ),
    "give its rule: ops={**OPS": ("runtime/test_stored_model.py", "test_ops_of_the_user_are_loaded_with_their_rules"),
    "a signature with a wider accumulator": (
        "test_robustness.py",
        "test_what_is_advised_where_an",
    ),
    "keep what overflows float": ("test_robustness.py", "test_what_is_advised_where_an"),
    "pass the neighbour's Range": (
        "emulation/test_oneflow_layers.py",
        "test_ranges_come_from_the_layer_or_from_its_neighbour",
    ),
    "no edge quantizes these, so they have no row; give --data": (
        "cli/test_cli_stored.py",
        "test_export_starts_from_a_stored_model",
    ),
    "to rule that out at {}, quantize or search again with {}": (
        "analysis/test_answer.py",
        "test_the_remedy_of_an_overflow_rules_it_out",
    ),
    "one shot is not shown, since it needs the calibration data": (
        "cli/test_cli.py",
        "test_what_a_stored_strategy_is_compared_with_is_what_its_search_was",
    ),
    "expected batches: read it with hago.data.load_data": WRONG_DATA,
    "expected batches: pass one batch as [batch]": WRONG_DATA,
    "expected batches: pass one batch as [(inputs, labels)]": WRONG_DATA,
    "make one tensor of several samples with torch.stack": WRONG_DATA,
    "if it is one sample, pass a torch.utils.data.DataLoader": WRONG_DATA,
    "expected numbers: convert texts and files first": WRONG_DATA,
    "an iterator is read only once: pass a new one, or a list": WRONG_DATA,
    "leave out batches without samples": WRONG_DATA,
    "convert lists of numbers with torch.tensor": WRONG_DATA,
    "an array of numbers with numpy.stack": WRONG_DATA,
    "pass x.real where imaginary parts are 0": WRONG_DATA,
    ": pass torch.utils.data.DataLoader(dataset, batch_size={})": WRONG_DATA,
    "call it, and pass what it returns": WRONG_DATA,
    "pass samples as the model will get": IMPLAUSIBLE,
    "pass samples that differ": IMPLAUSIBLE,
    "else pass labels in an .npz file or by a callable": (
        "data/test_wrong_data.py",
        "test_folders_that_are_not_the_classes_of_the_network",
    ),
    "holds a single number beside tensors": (
        "data/test_wrong_data.py",
        "test_a_single_number_beside_tensors_is_refused",
    ),
    "give one value, or one per channel": (
        "data/test_data_source.py",
        "test_normalization_has_one_value_or_one_per_channel",
    ),
    "or was cut off ({}); write it again": ("data/test_wrong_data.py", "test_a_file_that_was_cut_off_is_told"),
    "sample {} holds NaN or infinite values; remove it": WRONG_DATA,
    "change their order": WRONG_DATA,
    "name that key {}, or pass the tensor alone": WRONG_DATA,
    "convert every batch in this way": WRONG_DATA,
    "Pass the inputs that the model's forward takes": (
        "data/test_wrong_data.py",
        "test_a_model_without_a_conversion_is_told_what_its_layer_takes",
    ),
    "or wrap the model in one that takes what the batch has": (
        "data/test_wrong_data.py",
        "test_inputs_with_a_default_are_inputs_if_the_data_has_them",
    ),
    "It fixes the size of its batches: write shapes with the batch": (
        "data/test_wrong_data.py",
        "test_a_model_for_one_sample_is_told_what_helps",
    ),
    "Choose between values with torch.where(condition, a, b)": BY_VALUES,
    "hago imports no control flow: choose between values": BY_VALUES,
    "each node was fed the integers of hago's model": (
        "export/test_onnx_refusals.py",
        "test_a_check_that_fails_says_what_and_what_helps",
    ),
    "try with hago {}{} (measured on {} samples": (
        "analysis/test_remedies.py",
        "test_remedies_are_legal_and_gain_what_they_say",
    ),
    "the records do not say which hardware": ("report/test_command.py", "test_hardware_that_is_not_known_is_asked_for"),
    "the records are for hardware {}, which does not ship": (
        "report/test_command.py",
        "test_hardware_that_is_not_known_is_asked_for",
    ),
    "a log has no sensitivities": ("report/test_document.py", "test_sensitivities_are_those_of_the_table"),
    "the records are for different models": (
        "report/test_document.py",
        "test_records_that_do_not_go_together_are_refused",
    ),
    "points are shown in full (at most {}, see --points)": (
        "report/test_document.py",
        "test_more_points_are_shown_where_they_are_asked_for",
    ),
    "bits and costs alone: this data is not that of the search": (
        "report/test_document.py",
        "test_other_data_than_the_search_had_gives_no_points_of_the_log",
    ),
    "load the model and weights that it was made for": (
        "report/test_document.py",
        "test_records_that_do_not_go_together_are_refused",
    ),
    "there is nothing to report on": ("report/test_document.py", "test_records_that_do_not_go_together_are_refused"),
    "has trials of another search; give another name or storage": (
        "test_callbacks.py",
        "test_a_study_goes_on_with_the_log_and_refuses_another_search",
    ),
    "shows no figures of nodes; leave figures out": (
        "export/test_model_explorer.py",
        "test_figures_are_for_formats_that_show_them",
    ),
    "hago has no rule for {}{}: these run": ("test_warnings.py", "test_an_operator_is_named_until_it_has_a_rule"),
}
PACKAGE: Final = "a package would have to be taken away and installed"
PROCESS: Final = "another process, machine or disk"
#: Advice that nothing here takes, and why.
UNTRIED: Final = {
    "reading images needs Pillow": PACKAGE,
    "needs the package tensorboard": PACKAGE,
    "--print-completion needs the package shtab": PACKAGE,
    "plots need the package matplotlib": PACKAGE,
    "data frames need the package pandas": PACKAGE,
    "needs the package wandb": PACKAGE,
    "the demo needs scikit-learn": PACKAGE,
    "this needs the package {}: pip install": PACKAGE,
    "ONNX export needs the package onnx": PACKAGE,
    "drawing a network needs the package grandalf": PACKAGE,
    "the page of a report needs the package jinja2": PACKAGE,
    "reading .safetensors needs a package more": PACKAGE,
    "; pip install 'hago[postgres]'": PACKAGE,
    "needs the package distributed": PACKAGE,
    "to install what is missing:": PACKAGE,
    "install one, e.g. g++ or clang++": "a compiler would have to be installed",
    "kernels cannot be built": "a compiler would have to be installed",
    "this CPU has no VNNI": "another processor",
    "so make room and resume": PROCESS,
    "another search is writing": PROCESS,
    "the one that this worker received has {}; start the workers again": PROCESS,
    "start it with the same versions on the same kind of machine": PROCESS,
    "Look after the workers of the executor": PROCESS,
    "samples and outputs take more than {} bytes": "more memory than a test may take",
}
#: Texts that only look like advice.
NO_ADVICE: Final = (
    "run in float32",
    "; continue with:",
    "with notes on what to change",
    "Begun as a copy of {}",
    "cost: no figures are given",
    "values to quantize hold NaN",
    "operators not in INT8",
    "read with several ranges here",
    "neither 4 nor 8 bits here, run in INT8 there",
    "add relu clamp",
    "so there is nothing to train on",
    "read from the log",
    "has no bits to choose in this space",
    "prefers to quantize its weight alone",
    "in its state dict to write to",
    "--check: export format {} has no check",
    "export format is of type {}; expected a name or an ExportFormat",
    "export format {} has no check: nothing here runs its files",
    "export format {} has no option {}; {}",
    "Trying contradicts the estimate",
)


def places(message: Message) -> list[str]:
    """The tables that know a message."""
    known = (*(c.says for c in CASES), *ELSEWHERE, *UNTRIED, *NO_ADVICE)
    return [says for says in known if says in message.text]


def test_every_message_that_advises_is_tried_or_explained() -> None:
    found = list(messages())
    assert [f"{m.module}, line {m.line}: {m.text}" for m in found if not places(m)] == []
    said = {says for m in found for says in places(m)}
    assert {*(c.says for c in CASES), *ELSEWHERE, *UNTRIED, *NO_ADVICE} - said == set()


def test_tests_elsewhere_are_there() -> None:
    for file, name in ELSEWHERE.values():
        assert f"def {name}" in (Path(__file__).parent / file).read_text("utf-8")


def test_a_new_message_that_advises_is_found() -> None:
    made = messages(
        {"m": "def f(x):\n    raise HagoError(f'the frobnicator {x} is off; ' 'turn it on with frob=True')\n"}
    )
    assert [m.text for m in made] == ["the frobnicator {} is off; turn it on with frob=True"]
    assert not places(Message("m", 1, "the frobnicator {} is off; turn it on with frob=True"))
