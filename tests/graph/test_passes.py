"""The table of passes: its order, what the hash of a model covers, and how a new pass is added."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from networks import images, randomized
from torch import Tensor, nn

import hago
from hago.errors import HagoError, StrategyMismatch
from hago.graph import passes
from hago.graph.execute import run_real
from hago.graph.frontend import from_torch
from hago.graph.graph import Graph
from hago.graph.passes import FOLDING, PASSES, Pass, PassOptions, fold_for
from hago.qat.batch_norm import NormStyle
from hago.qat.model import QatModel
from hago.qat.prepare import prepare_qat

CHIP: Final = "x86_vnni"
DATA: Final = [images(8, 3, 6, 6)]


class Net(nn.Module):
    """Something for every pass: batch norms, attention, a guarded division; and two layers to equalize."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.norm(self.first(x)))).flatten(2)
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        return self.head((x / (x.abs().sum(1, keepdim=True) + 1e-6)).flatten(2)).flatten(1)


def model() -> nn.Module:
    return randomized(Net())


def equalize(graph: Graph, options: PassOptions) -> Graph:
    """A pass that a newcomer might write: moves a factor of 2 from a convolution into the next, across a relu."""
    changed: dict[str, Tensor] = {}
    for node in graph:
        reads = [graph.source(edge) for edge in node.edges]
        relu = graph[reads[0]] if node.op == "conv2d" else node
        before = graph[relu.inputs[0]] if relu.op == "relu" and node is not relu else node
        if before.op == "conv2d" and before is not node:
            changed |= {name: graph.consts[name] / 2 for name in before.inputs[1:]}
            changed[reads[1]] = graph.consts[reads[1]] * 2
    return replace(graph, consts={**graph.consts, **changed})


def equalize_before_folding(graph: Graph, options: PassOptions) -> Graph:
    """The same where batch norms are still nodes: moves the factor from a batch norm into the convolution after it."""
    changed: dict[str, Tensor] = {}
    for node in graph:
        relu = graph[node.inputs[0]] if node.op == "conv2d" else node
        norm = graph[relu.inputs[0]] if relu.op == "relu" and node is not relu else node
        if norm.op == "batch_norm" and norm is not node:
            changed |= {name: graph.consts[name] / 2 for name in norm.inputs[1:3]}
            changed[node.inputs[1]] = graph.consts[node.inputs[1]] * 2
    return replace(graph, consts={**graph.consts, **changed})


NEW: Final = Pass("equalize", equalize, since=1 + max(p.since for p in PASSES))
EARLIER: Final = Pass("equalize_before_folding", equalize_before_folding, since=1 + max(p.since for p in PASSES))


def test_every_file_of_the_folder_is_in_the_table() -> None:
    files = {p.stem for p in Path(passes.__file__).parent.glob("*.py")} - {"__init__"}
    assert {p.name for p in PASSES} == files and len({p.name for p in PASSES}) == len(PASSES)


def test_versions_are_counted_without_gaps() -> None:
    assert {p.since for p in PASSES} == set(range(1, max(p.since for p in PASSES) + 1))


def test_folding_later_gives_what_the_import_gives() -> None:
    unfolded, folded = (from_torch(model(), (DATA[0],), fold=f) for f in (False, True))
    assert {n.op for n in unfolded} - {n.op for n in folded} == {"batch_norm"}
    assert fold_for(unfolded).model_hash == folded.model_hash


def test_every_pass_changes_what_the_hash_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = [from_torch(model(), (DATA[0],)).model_hash]
    for entry in PASSES:
        without = tuple(replace(p, apply=lambda graph, options: graph) if p is entry else p for p in PASSES)
        monkeypatch.setattr(passes, "PASSES", without)
        hashes.append(from_torch(model(), (DATA[0],)).model_hash)
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("place", [0, len(PASSES)])
def test_a_new_pass_leaves_the_strategies_of_before_valid(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    strategy = hago.quantize(model(), CHIP, DATA, corrections="none").strategy
    monkeypatch.setattr(passes, "PASSES", (*PASSES[:place], NEW, *PASSES[place:]))
    newest = from_torch(model(), (DATA[0],))
    if place > [p.name for p in PASSES].index(FOLDING):  # before that, a batch norm stands between the layers
        assert newest.model_hash != strategy.model_hash
        torch.testing.assert_close(run_real(newest, DATA)[0], model()(DATA[0]))
    assert hago.create_quantizer(model(), CHIP, strategy).plan.graph.model_hash == strategy.model_hash
    assert prepare_qat(model(), CHIP, strategy).graph.model_hash == strategy.model_hash


def test_a_new_pass_is_part_of_new_strategies_and_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASSES", (*PASSES, NEW))
    strategy = hago.quantize(model(), CHIP, DATA, corrections="none").strategy
    assert strategy.model_hash == from_torch(model(), (DATA[0],)).model_hash
    assert hago.create_quantizer(model(), CHIP, strategy).plan.graph.model_hash == strategy.model_hash
    choices: tuple[dict[str, Any], ...] = ({"strategy": strategy}, {"dataset": DATA})
    for arguments in choices:
        trainable = prepare_qat(model(), CHIP, **arguments)
        assert trainable.graph.model_hash == strategy.model_hash


def test_a_pass_that_says_it_was_always_there_breaks_the_strategies_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = hago.quantize(model(), CHIP, DATA, corrections="none").strategy
    monkeypatch.setattr(passes, "PASSES", (*PASSES, replace(NEW, since=1)))
    with pytest.raises(StrategyMismatch):
        hago.create_quantizer(model(), CHIP, strategy)


# ---------------------------------------------------------------- passes and batch norms in training
def in_float(trainable: QatModel) -> Tensor:
    """The outputs of a training pass before quantization begins."""
    outputs = trainable.train()(DATA[0])
    assert isinstance(outputs, Tensor)
    return outputs.detach()


def trainable_model(norms: NormStyle, **options: Any) -> QatModel:
    return prepare_qat(model(), CHIP, norms=norms, quant_delay=100, **(options or {"dataset": DATA}))


@pytest.mark.parametrize("norms", ["tensorflow", "oneflow"])
def test_norms_in_training_work_with_a_pass_before_folding(monkeypatch: pytest.MonkeyPatch, norms: NormStyle) -> None:
    before = trainable_model(norms)
    expected, weight = in_float(before), before.graph.consts["second.weight"]
    place = [p.name for p in PASSES].index(FOLDING)
    monkeypatch.setattr(passes, "PASSES", (*PASSES[:place], EARLIER, *PASSES[place:]))
    trainable = trainable_model(norms)
    assert trainable.graph.consts["second.weight"].equal(2 * weight)
    torch.testing.assert_close(in_float(trainable), expected)
    strategy = hago.quantize(model(), CHIP, DATA, corrections="none").strategy
    trained = prepare_qat(model(), CHIP, strategy, norms=norms).eval()(DATA[0])
    assert trained.equal(hago.create_quantizer(model(), CHIP, strategy).simulate()(DATA[0]))


@pytest.mark.parametrize("norms", ["tensorflow", "oneflow"])
def test_norms_in_training_are_refused_after_a_pass_that_changes_their_layers(
    monkeypatch: pytest.MonkeyPatch, norms: NormStyle
) -> None:
    monkeypatch.setattr(passes, "PASSES", (*PASSES, NEW))
    message = r"batch norm 'norm' .* weight of 'first' .* \(equalize\) changed that weight; use norms='frozen'"
    with pytest.raises(HagoError, match=message):
        trainable_model(norms)
    torch.testing.assert_close(in_float(trainable_model("frozen")), model()(DATA[0]))


def test_norms_would_train_from_other_weights_without_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = in_float(trainable_model("tensorflow"))
    monkeypatch.setattr(passes, "PASSES", (*PASSES, NEW))
    monkeypatch.setattr("hago.qat.prepare._check_folded", lambda norm, graph: None)
    assert not torch.allclose(in_float(trainable_model("tensorflow")), expected, rtol=0.01)


def test_strategies_of_before_a_pass_still_train_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = hago.quantize(model(), CHIP, DATA, corrections="none").strategy
    expected = in_float(trainable_model("tensorflow", strategy=strategy))
    monkeypatch.setattr(passes, "PASSES", (*PASSES, NEW))
    torch.testing.assert_close(in_float(trainable_model("tensorflow", strategy=strategy)), expected)
