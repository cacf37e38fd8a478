"""Rotations change what a network computes by rounding only, are kept where they help, and replay to the last bit."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up.random_graphs import random_graph, random_inputs
from made_up.random_transformers import random_transformer
from networks import Stream, images
from torch import Tensor, nn

import hago
from hago.correction import Corrections, find_rotatable, rotation, track_channels
from hago.correction.equalization import divide_channels
from hago.correction.rotation import Rotation
from hago.errors import HagoError, LogError
from hago.graph import Graph, Node, from_torch, run_real
from hago.plan import Strategy
from hago.runtime.exactness import compare_plan_exactly
from hago.search import correct, prepare
from hago.study import read_log

from .stored import check_stored
from .test_channels import octaves
from .test_splitting import all_splits

SEEDS = range(80)
WIDTHS = (4, 5, 6, 7, 8, 12, 24, 31, 48, 64)
#: The sha256 of a rotation's matrix, which is the same on every machine.
DIGEST = "b57264c93cdecd307d130f2be7300063e455b5d7f6c9653aeb285c73dd4f1bce"
DATA = [images(16, 6, 12, seed=n) for n in range(4)]
TOKENS = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0))


def precise(graph: Graph) -> Graph:
    """The same in float64, in which rounding hides no mistake."""
    return replace(graph, consts={n: t.double() if t.is_floating_point() else t for n, t in graph.consts.items()})


def precise_inputs(inputs: list[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in inputs]


def error(graph: Graph, changed: Graph, inputs: list[Tensor]) -> float:
    """The largest difference of the outputs, as a share of the largest output."""
    pairs = zip(run_real(graph, inputs), run_real(changed, inputs), strict=True)
    return max(float((a - b).abs().max()) / max(float(a.abs().max()), 1e-6) for a, b in pairs)


def with_all(graph: Graph, seed: int = 3) -> tuple[Corrections, Graph]:
    """Everything that can be rotated, and the network with it."""
    corrections = Corrections(rotations=dict.fromkeys(find_rotatable(graph), seed))
    return corrections, corrections.apply(graph)


def difference(graph: Graph, seed: int) -> tuple[int, float]:
    """How many rotations a network has, and the error with them."""
    graph, inputs = precise(graph), precise_inputs(random_inputs(graph, seed))
    corrections, changed = with_all(graph, seed)
    return len(corrections.rotations), error(graph, changed, inputs)


@pytest.mark.parametrize("make", [random_graph, random_transformer])
def test_rotations_keep_what_any_network_computes(make: Callable[[int], Graph]) -> None:
    found = {seed: difference(make(seed), seed) for seed in SEEDS}
    assert {seed: wrong for seed, (_, wrong) in found.items() if not wrong < 1e-9} == {}
    assert sum(bool(count) for count, _ in found.values()) > len(SEEDS) // 4


STREAM = "first"
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "GPT": ({}, {STREAM, "query", "value"}),
    "GPT without biases": ({"bias": False}, {STREAM, "query", "value"}),
    "LLaMA": ({"rms": True}, {STREAM, "query", "value"}),
    "BERT": ({"behind": True}, {"query", "value"}),
    "no power of two": ({"width": 36, "heads": 3}, {STREAM, "query", "value"}),
    "odd": ({"width": 35, "heads": 5, "rms": True}, {STREAM, "query", "value"}),
    "small heads": ({"width": 12, "heads": 4}, {STREAM}),
    "tokens": ({"tokens": 20}, {STREAM, "query", "value"}),
    "positions": ({"tokens": 20, "positions": True}, {STREAM, "query", "value"}),
    "tied": ({"tokens": 20, "positions": True, "tied": True}, {STREAM, "query", "value"}),
    "tied, LLaMA": ({"tokens": 20, "tied": True, "rms": True}, {STREAM, "query", "value"}),
    "tied, BERT": ({"tokens": 20, "tied": True, "behind": True}, {"query", "value"}),
}


def imported(model: nn.Module, inputs: Tensor) -> Graph:
    return from_torch(model.eval(), (inputs,))


def stream_of(name: str) -> tuple[Graph, Tensor]:
    options, _ = MODELS[name]
    inputs = TOKENS if "tokens" in options else DATA[0]
    return imported(Stream(**options), inputs), inputs


@pytest.mark.parametrize("name", MODELS)
def test_streams_and_heads_of_transformers_are_rotated(name: str) -> None:
    graph, inputs = stream_of(name)
    corrections, changed = with_all(precise(graph))
    names = {"attention.0": "query", "attention.4": "query", "attention.2": "value", "attention.6": "value"}
    assert {names.get(n, n) for n in corrections.rotations} == MODELS[name][1]
    assert error(precise(graph), changed, precise_inputs([inputs])) < 1e-9
    in_float = corrections.apply(graph)
    assert error(graph, in_float, [inputs]) < 1e-4
    assert all(in_float.consts[n].dtype == graph.consts[n].dtype for n in graph.consts)
    assert changed.model_hash == precise(graph).model_hash
    # what is tied is stored once for each of its readers, and only that
    more = changed.by_name.keys() - graph.by_name.keys()
    assert more == ({"first.weight.for.head.1"} if "tied" in name and STREAM in corrections.rotations else set())


class Shared(nn.Module):
    """Two norms with the same gains and bias; a table that is read as it is, too; and a layer that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(images(*parameter.shape, seed=number))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.a(self.norm(x))
        x = x + self.b(self.norm(x))
        x = x + self.a(nn.functional.gelu(self.b(x)))
        result: Tensor = self.last(self.norm(x)) * self.norm.weight.mean()
        return result


class Moving(nn.Module):
    """What moves vectors of channels as a whole, or in halves, between two layers."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.first, self.last, self.whole = nn.Linear(12, 16), nn.Linear(16, 8), whole
        self.token = nn.Parameter(images(1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.whole:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x * 0.5, nn.functional.pad(x, (0, 0, 1, 2))], 1)
            result: Tensor = self.last(x.transpose(1, 2)[:, :, 1:].transpose(1, 2).mean(1))
        else:  # halves of neighbouring tokens
            result = self.last(torch.cat([x[:, 1:, :8], x[:, :-1, 8:]], 2))
        return result


class Patches(nn.Module):
    """A vision transformer's block: patches of a convolution, a class token, and heads that share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(2, 24, 2, 2), nn.Parameter(images(1, 1, 24))
        self.norm, self.last, self.head = nn.LayerNorm(24), nn.LayerNorm(24), nn.Linear(24, 5)
        self.q, self.k, self.v, self.out = nn.Linear(24, 24), nn.Linear(24, 12), nn.Linear(24, 12), nn.Linear(24, 24)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(images(*parameter.shape, seed=number) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(2, (-1, 6)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        result: Tensor = self.head(self.last(x)[:, 0])
        return result


def test_patches_and_shared_heads_are_rotated() -> None:
    inputs = images(3, 2, 6, 4, seed=1)
    graph = precise(imported(Patches(), inputs))
    corrections, changed = with_all(graph)
    assert {name: found.width for name, found in find_rotatable(graph).items()} == {"patch": 24, "q": 6, "v": 6}
    assert error(graph, changed, precise_inputs([inputs])) < 1e-9
    whole = precise(from_torch(Patches().eval(), (inputs,), attention="whole"))
    assert find_rotatable(whole).keys() == corrections.rotations.keys()
    assert error(whole, with_all(whole)[1], precise_inputs([inputs])) < 1e-9


def test_norms_and_layers_that_share_constants_are_rotated() -> None:
    graph = precise(imported(Shared(), DATA[0]))
    corrections, changed = with_all(graph)
    assert set(corrections.rotations) == {"first"}
    assert error(graph, changed, precise_inputs([DATA[0]])) < 1e-9


@pytest.mark.parametrize(("whole", "width"), [(True, 16), (False, 8)])
def test_moves_show_what_a_vector_is(whole: bool, width: int) -> None:
    graph = precise(imported(Moving(whole), DATA[0]))
    assert {name: found.width for name, found in find_rotatable(graph).items()} == {"first": width}
    assert error(graph, with_all(graph)[1], precise_inputs([DATA[0]])) < 1e-9


class Refused(nn.Module):
    """A stream that cannot be rotated, and why not."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.why = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 8), why
        self.narrow, self.single = nn.Linear(12, 8), nn.Linear(1, 8)
        if why == "a bias without gain, and no layer that takes it":
            self.last = nn.Linear(16, 8, False)
            with torch.no_grad():
                self.norm.bias.fill_(1.0)
                self.norm.weight[2] = 0.0

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        y = self.norm(x)
        if self.why == "a norm that another operator reads":
            return self.last(y), y.sigmoid()
        if self.why == "an output":
            return self.last(y), x
        if self.why == "a curve":
            return self.last(y) + x.tanh().mean()
        if self.why == "a mean over channels":
            return self.last(y) + x.mean(2, keepdim=True)
        if self.why == "a layer on a mean over channels":
            return self.last(y) + self.single(x.mean(2, keepdim=True))
        if self.why == "padded channels":
            return self.last(nn.functional.pad(y, (1, 0))[:, :, :-1])
        if self.why == "tokens that are padded behind a norm":
            return self.last(nn.functional.pad(y, (0, 0, 1, 0)))
        if self.why == "norms that are multiplied":
            return (y @ y.transpose(1, 2)) @ self.last(y)
        if self.why == "channels from within a vector":
            return self.last(y), self.narrow(x[..., 2:14])
        if self.why == "a factor for each channel":
            return self.last(y * torch.arange(16.0))
        return self.last(y)


REFUSED = (
    "a norm that another operator reads",
    "an output",
    "a curve",
    "a mean over channels",
    "a layer on a mean over channels",
    "padded channels",
    "norms that are multiplied",
    "channels from within a vector",
    "tokens that are padded behind a norm",
    "a factor for each channel",
    "a bias without gain, and no layer that takes it",
)


@pytest.mark.parametrize("why", REFUSED)
def test_what_would_change_is_left_as_it_is(why: str) -> None:
    assert find_rotatable(imported(Refused("nothing"), DATA[0])).keys() == {"first"}
    assert not find_rotatable(imported(Refused(why), DATA[0]))


def test_a_norm_keeps_its_bias_where_a_layer_cannot_take_it() -> None:
    graph, inputs = stream_of("GPT")  # whose head has no bias
    changed = with_all(precise(graph))[1]
    assert changed.consts["norms.4.bias"].abs().max() > 0.01 > 1e-9 > changed.consts["norms.0.bias"].abs().max()
    assert error(precise(graph), changed, precise_inputs([inputs])) < 1e-9


def first_without_norm(places: dict[str, Any], node: Node) -> Any:
    """The place of a node's first operand, as if no norm had made it."""
    place = places.get(node.inputs[0])
    return None if place is None else replace(place, norm=None)


BREAKS: dict[str, tuple[str, Any, str]] = {
    "ones are not kept": ("Rotation._reflected", lambda self, vectors: vectors, "GPT"),
    "gains stay": ("_Changed.move_gains", lambda self, norm, layers: None, "LLaMA"),
    "biases are lost": ("_has_bias", lambda graph, norm: False, "GPT"),
    "norms behind sums pass": ("_Tracking._sum", lambda self, node: first_without_norm(self.places, node), "BERT"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_the_law_bites(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, broken, name = BREAKS[how]
    monkeypatch.setattr(f"{rotation.__name__}.{path}", broken)
    graph, inputs = stream_of(name)
    assert error(precise(graph), with_all(precise(graph))[1], precise_inputs([inputs])) > 1e-4


@pytest.mark.parametrize("keeps_ones", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_rotations_are_orthogonal_and_mix_channels(width: int, keeps_ones: bool) -> None:
    unit, ones = torch.eye(width, dtype=torch.float64), torch.ones(width, dtype=torch.float64)
    matrices = [Rotation(width, seed, keeps_ones).along(unit, 1) for seed in range(8)]
    for matrix in matrices:
        assert float((matrix @ matrix.T - unit).abs().max()) < 1e-12
        assert not keeps_ones or float((ones @ matrix - ones).abs().max()) < 1e-12
        assert width < 24 or float(matrix.abs().max()) < 0.6
    assert len({matrix.numpy().tobytes() for matrix in matrices}) > 1
    # along any axis, and block by block
    values = images(3, 2 * width, 2).double()
    expected = torch.einsum("abwc,wv->abvc", values.reshape(3, 2, width, 2), matrices[1]).reshape(values.shape)
    got = Rotation(width, 1, keeps_ones).along(values, 1)
    assert float((got - expected).abs().max()) < 1e-12


def test_rotations_are_equal_on_every_machine() -> None:
    matrix = Rotation(48, 7, True).along(torch.eye(48, dtype=torch.float64), 1)
    assert hashlib.sha256(matrix.numpy().tobytes()).hexdigest() == DIGEST


def test_stored_rotations_give_the_same_network() -> None:
    for graph in [*map(random_transformer, range(24)), *(stream_of(name)[0] for name in MODELS)]:
        corrections, expected = with_all(graph)
        again = Corrections.from_json(json.loads(json.dumps(corrections.to_json())))
        assert again == corrections
        got = again.apply(graph)
        assert got.nodes == expected.nodes and got.model_hash == graph.model_hash
        assert all(torch.equal(got.consts[name], t) for name, t in expected.consts.items())
        twice = again.apply(got)  # not rotated twice
        assert all(torch.equal(twice.consts[name], t) for name, t in expected.consts.items())


def test_rotated_networks_are_split_and_equalized() -> None:
    made = 0
    for seed in SEEDS:
        graph, inputs = random_transformer(seed), random_inputs(random_transformer(seed), seed)
        corrections, rotated = with_all(graph)
        changed = replace(corrections, splits=all_splits(rotated)).apply(graph)
        tracked = track_channels(changed)
        changed = divide_channels(changed, tracked, torch.exp2(octaves(tracked, seed).to(torch.float64)))
        assert error(graph, changed, inputs) < 2e-3
        made += bool(corrections and all_splits(rotated))
    assert made > len(SEEDS) // 8


@pytest.mark.parametrize("chip", ["x86_vnni", "tflite", "vta"])
def test_rotated_networks_run_in_integers_as_simulated(chip: str) -> None:
    ran = 0
    for seed in range(12):
        graph, inputs = random_transformer(seed), random_inputs(random_transformer(seed), seed, batch=8)
        corrections, _ = with_all(graph)
        if not corrections:
            continue
        try:
            prepared = prepare(graph, chip, [tuple(inputs)])
        except HagoError:
            continue  # a chip without one of its operators
        rotated = prepared.corrected(corrections)
        found = compare_plan_exactly(rotated.resolver(rotated.space.widest()), random_inputs(graph, seed + 1))
        assert found.same, (seed, found)
        ran += 1
    assert ran > 3


def sqnr(quantizer: Any) -> float:
    return float(quantizer.strategy.made_by["results"]["sqnr"])


@pytest.mark.parametrize("rms", [False, True])
def test_rotations_help_and_are_stored(rms: bool, tmp_path: Path) -> None:
    model, chip = Stream(rms=rms).eval(), "vta"
    others = ["splitting", "equalization"]
    plain, without = (hago.quantize(model, chip, DATA, corrections=c) for c in ("none", others))
    alone, both = (hago.quantize(model, chip, DATA, corrections=c) for c in ("rotation", ["rotation", *others]))
    assert sqnr(alone) > sqnr(plain) + 2.0 and sqnr(both) > sqnr(without) + 1.5
    assert "first" in both.strategy.corrections.rotations
    kept = [made["names"] for made in both.strategy.made_by["passes"] if made["kept"]]
    assert ["rotation"] in kept and kept.count(["equalization"]) <= 1
    check_stored(both, model, chip, DATA, tmp_path)


def test_rotations_are_not_kept_where_others_gain_more() -> None:
    names = ["rotation", "splitting", "equalization"]
    model = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    found = correct(prepare(model, "x86_vnni", DATA), names)
    (made,) = (each for each in found.passes if "rotation" in each.names)
    assert bool(found.corrections.rotations) == made.kept
    assert not correct(prepare(model, "x86_vnni", DATA), names[1:]).corrections.rotations


def test_a_search_keeps_its_rotations_in_its_log(tmp_path: Path) -> None:
    model, log = Stream().eval(), tmp_path / "log.jsonl"
    options: dict[str, Any] = {"log": log, "corrections": ["rotation", "rounding"], "progress": False}
    hago.search_quantize_strategy(model, "vta", DATA, budget=2, **options)
    header = read_log(log).header
    assert header is not None and "first" in header.settings["corrections"]["rotations"]
    strategy, score = hago.search_quantize_strategy(model, "vta", DATA, budget=4, **options)
    assert strategy.corrections.rotations
    assert hago.replay(model, "vta", log, DATA).same
    assert hago.evaluate_strategy(model, "vta", strategy, DATA).value == score


@functools.cache
def rotated_strategy() -> Strategy:
    return hago.quantize(Stream().eval(), "vta", DATA, corrections="rotation").strategy


def edited(strategy: Strategy, path: Path, rotations: Any) -> Path:
    document = strategy.to_json()
    document["corrections"]["rotations"] = rotations
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("rotations", "said"),
    [
        ({"elsewhere": 1}, r"rotations\['elsewhere'\]: got a node whose channels cannot be rotated, expected one of"),
        ({"norms.0": 1}, r"rotations\['norms.0'\].* edited"),
        ({"first": -1}, "first"),
        ({"first": 1.5}, "first"),
        ({"first": "1"}, "first"),
        ([], "rotations"),
    ],
)
def test_edited_rotations_are_refused(rotations: Any, said: str, tmp_path: Path) -> None:
    model = Stream().eval()
    strategy = rotated_strategy()
    assert hago.create_quantizer(model, "vta", edited(strategy, tmp_path / "s.json", strategy.corrections.rotations))
    with pytest.raises(LogError, match=said):
        hago.create_quantizer(model, "vta", edited(strategy, tmp_path / "s.json", rotations))


def test_rotated_models_are_trained_unless_they_store_a_weight_twice() -> None:
    data = [images(16, 6, 20, seed=n).argmax(2) for n in range(2)]
    trained = {}
    for tied in (False, True):
        model = Stream(20, tied=tied).eval()
        prepared = prepare(model, "vta", data)
        rotated = prepared.corrected(Corrections(rotations={"first": 1}))
        trained[tied] = (
            model,
            hago.search.make_strategy(rotated, rotated.resolver(rotated.space.widest()), rotated.space.widest(), {}),
        )
    assert hago.prepare_qat(trained[False][0], "vta", trained[False][1])
    with pytest.raises(HagoError, match="make the strategy without rotation"):
        hago.prepare_qat(trained[True][0], "vta", trained[True][1])
