"""Corrections are found where they help, stored with the strategy, and replayed to the last bit."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up.random_graphs import random_graph, random_inputs
from networks import Uneven, images, randomized
from products import some
from torch import Tensor, nn

import hago
from hago.arithmetic.schemes import make_qparams
from hago.arithmetic.types import DTYPES
from hago.correction import LAYERS, Corrections
from hago.correction.offsets import decode_offsets, encode_offsets
from hago.errors import HagoError, LogError
from hago.graph import compute_real
from hago.ops import OPS
from hago.plan import Plan, Strategy
from hago.plan.space import FLOAT
from hago.runtime.exactness import compare_plan_exactly
from hago.search import correct, correcting, float_layers, layer_correction, prepare
from hago.search.equalize import find_equalization
from hago.search.evaluate import Evaluator
from hago.search.float_layers import FloatLayers
from hago.search.layer_correction import correct_layers
from hago.search.preparation import QuantizationOptions
from hago.search.safe_bits import safe_bits
from hago.search.squared_gradients import SquaredGradients
from hago.simulation import Simulator
from hago.study import read_log

from .stored import check_stored

CHIPS = ("x86_vnni", "tflite", "vta", "cmsis_nn")


DATA = [images(16, 3, 8, 8, seed=n) for n in range(4)]


def sqnr(quantizer: Any) -> float:
    return float(quantizer.strategy.made_by["results"]["sqnr"])


@pytest.mark.parametrize("chip", CHIPS)
def test_every_correction_helps_and_all_together_help_most(chip: str, tmp_path: Path) -> None:
    model = Uneven().eval()
    alone = {
        name: sqnr(hago.quantize(model, chip, DATA, corrections=name, fix_bits={"*:1": 4}))
        for name in ("none", "equalization", "thresholds", "rounding", "bias")
    }
    assert all(alone[name] >= alone["none"] for name in alone)
    together = hago.quantize(model, chip, DATA, fix_bits={"*:1": 4})
    assert sqnr(together) > alone["none"] + 3.0
    check_stored(together, model, chip, DATA, tmp_path)


class UnevenPerceptron(nn.Module):
    """Float layers, between which values are stored in 16 bits on `int16_accumulator`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
        sizes = torch.exp2(torch.arange(16) % 8 - 4.0)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(images(*parameter.shape, seed=number))
            self.first.weight.mul_(sizes[:, None])
            self.first.bias.mul_(sizes)
            self.last.weight.div_(sizes)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.act(self.first(x)))
        return result


def test_a_graph_with_nothing_to_gain_keeps_the_room_that_unseen_values_need(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = UnevenPerceptron().eval(), [images(64, 8, seed=n) for n in range(4)]

    def why_not_equalized(budget_cost: str | None = None) -> str:
        strategy, _ = hago.search_quantize_strategy(
            model, "int16_accumulator", data, budget="1 trials", budget_cost=budget_cost
        )
        return {name: each["why_not"] for each in strategy.made_by["passes"] for name in each["names"]}["equalization"]

    assert why_not_equalized() == "close already"
    assert why_not_equalized("size <= 100 %") == ""  # fewer bits may be taken
    monkeypatch.setattr(correcting, "CLOSE_DECIBELS", math.inf)
    assert why_not_equalized() == ""


@pytest.mark.parametrize("chip", ["x86_vnni", "vta"])
def test_an_estimator_that_the_user_names_gives_the_thresholds(chip: str) -> None:
    model = Uneven().eval()
    chosen, plain = (hago.quantize(model, chip, DATA, corrections=c) for c in ("thresholds", "none"))
    assert chosen.strategy.made_by["refined"] is True and sqnr(chosen) > sqnr(plain)
    named = hago.quantize(model, chip, DATA, estimator="max_range", corrections="thresholds")
    assert "refined" not in named.strategy.made_by and named.strategy.made_by["estimator"] == "max_range"


def test_equalization_moves_no_clip_that_binds_on_the_data() -> None:
    model = Uneven(high=1.0).eval()
    prepared = correct(prepare(model, "vta", DATA), "equalization")
    assert prepared.corrections
    outputs = [hago.graph.run_real(g, [DATA[0]])[0] for g in (prepared.graph, prepared.graph.uncorrected)]
    assert torch.allclose(*outputs, rtol=1e-4, atol=1e-5)


def test_what_clamps_cut_off_in_any_sample_binds_their_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only samples after those that give gradients reach the limits."""
    model, samples = Uneven(high=1.0).eval(), torch.cat([images(32, 3, 8, 8, seed=1) / 64, images(32, 3, 8, 8, seed=2)])
    differences = []
    for seen in (True, False):
        if not seen:
            monkeypatch.setattr(SquaredGradients, "with_at_least", lambda self, largest: self)
        prepared = prepare(model, "vta", samples.split(16))
        plan = prepared.resolver(safe_bits(prepared))
        found = find_equalization(prepared, plan, lambda of=prepared, at=plan: SquaredGradients.measure(of, at))
        assert found
        corrected = found.apply(prepared.graph, prepared.hardware.known_ops)
        outputs = [hago.graph.run_real(graph, [samples])[0] for graph in (corrected, prepared.graph)]
        differences.append(float((outputs[0] - outputs[1]).abs().max()))
    assert differences[0] < 1e-4 < 1e-2 < differences[1]  # without the other samples, the law is broken


def test_one_shot_does_not_measure_again_what_was_measured_for_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, simulate = [], Evaluator._simulate

    def count(self: Evaluator, plan: Plan, enough: Any = None, see: Any = None) -> Any:
        measured.append((plan.key, plan.graph.correction_hash))
        return simulate(self, plan, enough, see)

    monkeypatch.setattr(Evaluator, "_simulate", count)
    strategy = hago.quantize(Uneven().eval(), "vta", DATA, corrections=["equalization", "rounding"]).strategy
    kept = [made["names"] for made in strategy.made_by["passes"] if made["kept"]]
    assert ["equalization"] in kept and len(measured) == 3 == len(set(measured))


@pytest.mark.parametrize("chip", ["x86_vnni", "vta", "int16_accumulator"])
def test_corrected_layers_run_in_integers_as_simulated(chip: str) -> None:
    corrected = 0
    for seed in range(12):
        graph = random_graph(seed)
        inputs = random_inputs(graph, seed, batch=8)
        try:
            prepared = prepare(graph, chip, [tuple(inputs)])
        except HagoError:
            continue  # a chip without one of its operators
        bits = safe_bits(prepared)
        nearest = prepared.resolver(bits)
        real = FloatLayers(nearest.graph, nearest.ops, inputs)
        offsets = correct_layers(nearest, real, rounding=True, bias=True)
        plan = prepared.with_offsets(offsets).resolver(bits)
        found = compare_plan_exactly(plan, random_inputs(graph, seed + 1))
        assert found.same, (seed, found)
        corrected += bool(offsets)
    assert corrected > 4


def test_a_search_keeps_its_corrections_in_its_log(tmp_path: Path) -> None:
    model, log = Uneven().eval(), tmp_path / "log.jsonl"
    options: dict[str, Any] = {"log": log, "progress": False, "searcher": "greedy", "fix_bits": {"*:1": 6}}
    hago.search_quantize_strategy(model, "vta", DATA, budget=2, **options)
    header = read_log(log).header
    assert header is not None and header.settings["corrections"]["equalization"]
    strategy, score = hago.search_quantize_strategy(model, "vta", DATA, budget=5, **options)
    assert len(read_log(log).trials) > 2
    assert strategy.corrections.equalization and strategy.corrections.offsets
    assert hago.replay(model, "vta", log, DATA).same
    assert hago.replay(model, "vta", strategy, DATA).same
    assert hago.evaluate_strategy(model, "vta", strategy, DATA).value == score
    with pytest.raises(LogError, match="corrections was splitting, equalization"):
        hago.search_quantize_strategy(model, "vta", DATA, budget=6, corrections="none", **options)


def test_offsets_are_read_back_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    for values in (torch.tensor([[-1, 0], [127, 3]]), torch.tensor([1 << 20, -5, 0])):
        assert torch.equal(decode_offsets("w", encode_offsets(values), values.shape), values)
    bomb = base64.b64encode(zlib.compress(bytes(1 << 26), 9)).decode()
    for text in ("int8:" + bomb, "int8:AAAA", "int8:*", "int9:", encode_offsets(torch.zeros(5, dtype=torch.int64))):
        with pytest.raises(LogError, match="edited"):
            decode_offsets("w", text, torch.Size([4]))
    model = Uneven().eval()
    strategy = hago.quantize(model, "vta", DATA).strategy
    document = strategy.to_json()
    document["corrections"]["offsets"] = {"elsewhere": encode_offsets(torch.ones(2, dtype=torch.int64))}
    (tmp_path / "s.json").write_text(json.dumps(document), "utf-8")
    with pytest.raises(LogError, match="elsewhere"):
        hago.create_quantizer(model, "vta", tmp_path / "s.json")
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert replace(strategy, corrections=Corrections()).to_json().get("corrections") is None


def test_an_unknown_correction_is_refused() -> None:
    with pytest.raises(HagoError, match="expected one of none, rotation, splitting, equalization, absorption, "):
        hago.quantize(Uneven().eval(), "vta", DATA, corrections="rouding")


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.conv(x).relu().reshape(x.shape[0], -1))
        return result


@pytest.mark.parametrize("batch", [1, 2, 40])
def test_a_program_of_a_fixed_batch_is_quantized_as_it_is(batch: int) -> None:
    data = [images(batch, 3, 6, 6, seed=n) for n in range(3)]
    model = randomized(Flattening())
    quantizer = hago.quantize(torch.export.export(model, (data[0],)), "x86_vnni", data)
    assert not quantizer.strategy.corrections and "corrections" not in quantizer.strategy.made_by
    assert torch.equal(quantizer.simulate()(data[0]), quantizer.realize()(data[0]))
    assert hago.quantize(model, "x86_vnni", data).strategy.made_by["corrections"]


def test_a_race_tells_what_helps_on_samples_that_did_not_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race draws samples in an order of its own."""
    seen: list[Tensor] = []

    def watched(plan: Any, real: FloatLayers, **how: Any) -> Any:
        seen.append(torch.cat([part[0] for part in real.parts]))
        return correct_layers(plan, real, **how)

    monkeypatch.setattr(correcting, "correct_layers", watched)
    hago.search_quantize_strategy(Uneven().eval(), "vta", DATA, searcher="random", budget=2, race=True, progress=False)
    natural, (used,) = torch.cat(DATA), seen
    assert not torch.equal(used, natural[: len(used)])
    assert {tuple(x.flatten().tolist()) for x in used} <= {tuple(x.flatten().tolist()) for x in natural}


def test_what_was_corrected_is_said() -> None:
    corrected, plain = (hago.quantize(Uneven().eval(), "vta", DATA, corrections=c) for c in (None, "none"))
    facts = [q.strategy.summary().facts["corrected"] for q in (corrected, plain)]
    said = r"channels of 3 layers equalized, integers of \d+ constants rounded or moved for the outputs"
    assert re.fullmatch(said, facts[0]) and facts[1] == ""
    assert facts[0] in " ".join(repr(corrected.strategy).split())


def test_layers_give_back_what_those_before_them_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """On data that gave no correction, with layer inputs of 4 bits."""
    fresh = images(128, 3, 8, 8, seed=77)

    def decibels(seed: int) -> float:
        model = randomized(Uneven(), seed=seed).eval()
        data = [images(32, 3, 8, 8, seed=100 * seed + n) for n in range(4)]
        quantizer = hago.quantize(model, "x86_vnni", data, corrections="rounding", fix_bits={"*": 4})
        with torch.no_grad():
            float_outputs = model(fresh)
        error = quantizer.simulate()(fresh) - float_outputs
        return 10 * math.log10(float(float_outputs.square().sum() / error.square().sum()))

    given = [decibels(seed) for seed in range(4)]
    monkeypatch.setattr(layer_correction, "_given_back", lambda halves: 0.0)
    without = [decibels(seed) for seed in range(4)]
    gains = [a - b for a, b in zip(given, without, strict=True)]
    assert min(gains) > -0.5 and sum(gains) / len(gains) > 0.5, gains


@pytest.mark.parametrize("has_steps", [False, True])
@pytest.mark.parametrize(
    "groups, windows, weights, outputs", [(1, 12, 100, 9), (3, 5, 41, 4), (1, 1, 9, 3), (2, 30, 30, 5)]
)
def test_few_windows_round_as_many_do(groups: int, windows: int, weights: int, outputs: int, has_steps: bool) -> None:
    """Matrices of windows give what those of weights give, but for ties that roundoff decides."""
    generator = torch.Generator().manual_seed(weights)
    seen = torch.randint(-128, 128, (groups, windows, weights), generator=generator).to(torch.float64)
    lost = torch.randn(groups, windows, weights, generator=generator, dtype=torch.float64)
    real = 30.0 * torch.randn(groups, weights, outputs, generator=generator, dtype=torch.float64)
    ends = torch.full_like(real, -64.0), torch.full_like(real, 63.0)
    steps = 0.5 + torch.rand(real.shape, generator=generator, dtype=torch.float64) if has_steps else None
    results = []
    for kind in (layer_correction._Moments, layer_correction._FewWindows):
        halves = [kind.of(a, b, real) for a, b in zip(seen.chunk(2, 1), lost.chunk(2, 1), strict=True)]
        together, part = layer_correction._joined(halves), layer_correction._given_back(halves)
        results.append((real + part * together.change(), together.with_feedback(real, part, *ends, steps)))
    (first, rounded), (second, others) = results
    assert torch.allclose(first, second, rtol=1e-6, atol=1e-6)
    assert float((rounded != others).double().mean()) < 0.01
    nearest = (first if steps is None else first / steps).round().clamp(*ends)
    assert windows == 1 or not torch.equal(rounded, nearest)


@pytest.mark.parametrize("has_steps", [False, True])
@pytest.mark.parametrize(("groups", "windows", "weights"), [(1, 400, 150), (3, 40, 9), (2, 30, 65)])
def test_weights_make_up_for_those_that_are_rounded_before(
    groups: int, windows: int, weights: int, has_steps: bool
) -> None:
    """Each is rounded to what is best for the damped moments, when those before it are fixed and others can change."""
    generator = torch.Generator().manual_seed(weights)
    seen = torch.randn(groups, windows, weights, generator=generator) + 1.0
    lost = 0.3 * torch.randn(groups, windows, weights, generator=generator)
    real = 9.0 * torch.randn(groups, weights, 4, generator=generator)
    ends = torch.full_like(real, -20.0), torch.full_like(real, 20.0)
    steps = 0.5 + torch.rand(real.shape, generator=generator) if has_steps else None
    moments, part = layer_correction._Moments.of(seen, lost, real), torch.tensor(0.6, dtype=torch.float64)
    rounded = moments.with_feedback(real, part, *ends, steps)
    sizes = torch.ones_like(real) if steps is None else steps
    other = 0
    for group in range(groups):
        wanted = (real + part * moments.change())[group].double()
        curvature = moments.seen[group].double()
        diagonal = curvature.diagonal()
        diagonal += layer_correction.DAMPING * diagonal.mean()
        order = diagonal.argsort(descending=True)
        given = torch.empty_like(wanted)
        for j in range(weights):
            fixed, free = order[:j], order[j:]
            error = curvature[free][:, fixed] @ (wanted - given)[fixed]
            best = wanted[order[j]] + torch.linalg.solve(curvature[free][:, free], error)[0]
            size = sizes[group, order[j]].double()
            given[order[j]] = (best / size).round().clamp(-20.0, 20.0) * size
        other += int((rounded[group] != (given / sizes[group]).round()).sum())
    assert other < 0.01 * rounded.numel()  # ties that roundoff decides, and what follows from them
    assert float((rounded != (real / sizes).round().clamp(*ends)).double().mean()) > 0.1


@pytest.mark.parametrize(("bits", "stays"), [(16, False), (32, True)])
def test_integers_that_float32_does_not_hold_stay_the_nearest(bits: int, stays: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, seen = torch.randn(4, 20, generator=generator), torch.randn(1, 50, 20, generator=generator)
    wanted = seen + 0.5 * torch.randn(seen.shape, generator=generator)
    high = weight.double().abs().amax(1, keepdim=True)
    target = make_qparams("hago", -high, high, bits, DTYPES[f"int{bits}"])
    nearest = (weight / target.scale).round().clamp(target.qmin, target.qmax).to(torch.int32)
    rounded = layer_correction._rounded(weight, target, nearest, {}, seen, wanted)
    assert torch.equal(rounded, nearest) == stays
    assert target.qmin <= int(rounded.min()) and int(rounded.max()) <= target.qmax


@pytest.mark.parametrize("kind", [layer_correction._Moments, layer_correction._FewWindows])
def test_halves_of_windows_are_joined_as_their_whole(kind: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    seen, lost = torch.randn(2, 2, 30, 20, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, 20, 5, generator=generator, dtype=torch.float64)
    joined = layer_correction._joined(
        [kind.of(*half, weights) for half in zip(seen.chunk(2, 1), lost.chunk(2, 1), strict=True)]
    )
    whole = kind.of(seen, lost, weights)
    assert torch.allclose(joined.seen, whole.seen) and torch.allclose(joined.lost, whole.lost)


def test_clipped_samples_do_not_decide_what_layers_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 64 samples are far larger than the thresholds, which were found without them."""
    model, fresh = randomized(Uneven(), seed=3).eval(), images(256, 3, 8, 8, seed=77)
    options = QuantizationOptions(fix_bits={"*": 6})
    prepared = prepare(model, "x86_vnni", [images(64, 3, 8, 8, seed=1)], options)
    bits = safe_bits(prepared)
    ordinary = images(64, 3, 8, 8, seed=2)
    with_outliers = torch.cat([ordinary[:62], 30.0 * ordinary[62:]])
    with torch.no_grad():
        float_outputs = model(fresh)

    def decibels(inputs: Tensor) -> float:
        plan = prepared.resolver(bits)
        offsets = correct_layers(plan, FloatLayers(plan.graph, plan.ops, [inputs]), rounding=True, bias=False)
        error = Simulator(prepared.with_offsets(offsets).resolver(bits))(fresh) - float_outputs
        return 10 * math.log10(float(float_outputs.square().sum() / error.square().sum()))

    without = decibels(ordinary)
    assert decibels(with_outliers) > without - 1.0
    monkeypatch.setattr(layer_correction, "_ignore_outliers", lambda lost: None)
    assert decibels(with_outliers) < without - 1.0  # the law bites


@pytest.mark.parametrize("kept_bytes", [0, 60_000, 1 << 28])
def test_points_share_what_layers_read_in_the_float_model(kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_layers, "KEPT_BYTES", kept_bytes)
    ran: list[str] = []

    def counted(node: Any, *read: Any) -> Any:
        ran.append(node.name)
        return compute_real(node, *read)

    monkeypatch.setattr(float_layers, "compute_real", counted)
    model, x = Uneven().eval(), images(32, 3, 8, 8, seed=1)
    prepared = prepare(model, "x86_vnni", [x])
    few = {key: min(group.choices) for key, group in prepared.space.groups.items()}
    plans = [prepared.resolver(bits) for bits in (prepared.space.widest(), few)]
    shared = FloatLayers(prepared.graph, plans[0].ops, [x])
    for rounding, bias in ((False, True), (True, False), (False, True), (True, True)):
        for plan in plans:
            alone = FloatLayers(plan.graph, plan.ops, [x])
            expected = correct_layers(plan, alone, rounding=rounding, bias=bias)
            before = len(ran)
            found = correct_layers(plan, shared, rounding=rounding, bias=bias)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)
            reruns = len(ran) > before
    assert reruns == (kept_bytes < 1 << 28)  # the last asks for what the others kept
    kept = sum(layer.bytes for layer in shared._kept.values())
    assert kept <= kept_bytes and (kept > 0) == (kept_bytes == 1 << 28)


@pytest.mark.parametrize("left_bytes", [0, 1 << 26])
def test_simulations_share_what_their_first_float_steps_leave(left_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And end with the last layer that is corrected."""
    monkeypatch.setattr(float_layers, "LEFT_BYTES", left_bytes)
    ran: list[str] = []

    def counted(compute: Any, read: Any) -> Any:
        ran.append(compute.__self__.name)
        return float_layers.in_parts(compute, read)

    x = images(32, 3, 8, 8, seed=1)
    prepared = prepare(Uneven().eval(), "x86_vnni", [x], QuantizationOptions(search_topology=True))
    widest, few = prepared.space.widest(), {key: min(group.choices) for key, group in prepared.space.groups.items()}
    plans = []
    for bits, kept in itertools.product((widest, few), (("expand",), ("expand", "depthwise"), ("head",))):
        changed = {key: max(of.choices) for key, of in prepared.space.groups.items() if key.endswith(":kind")}
        plans.append(prepared.resolver({**bits, **changed, **{f"{name}:kind": FLOAT for name in kept}}))
    shared = FloatLayers(prepared.graph, plans[0].ops, [x])
    runs = []
    for plan in plans:
        expected = correct_layers(plan, FloatLayers(plan.graph, plan.ops, [x]), rounding=True, bias=True)
        ran.clear()
        with monkeypatch.context() as patch:
            patch.setattr(layer_correction, "in_parts", counted)
            found = correct_layers(plan, shared, rounding=True, bias=True)
        assert expected and found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        runs.append(list(ran))
    again = [{"expand", "depthwise"} & set(names) for names in runs]
    assert again[0] == {"expand", "depthwise"} and again[2] == {"expand", "depthwise"}
    assert (again[3] == {"depthwise"} and not again[4]) == (left_bytes > 0)
    assert [names[-1] for names in runs] == ["head", "head", "project"] * 2


@pytest.mark.parametrize("name", ["Uneven", "depthwise", "groups"])
def test_layers_are_corrected_in_parts_of_samples_as_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and means are those of all samples, whatever the size of a part, but for the order of sums."""
    torch.manual_seed(0)
    kernels = {"depthwise": nn.Conv2d(8, 8, 3, 2, 1, groups=8), "groups": nn.Conv2d(8, 6, 3, padding=1, groups=2)}
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), kernels.get(name), nn.Flatten(), nn.LazyLinear(5)]
    model = Uneven() if name == "Uneven" else nn.Sequential(*(layer for layer in layers if layer is not None))
    x = images(30, 3, 8, 8, seed=5)
    model(x)
    prepared = prepare(model.eval(), "x86_vnni", [x])
    plan = prepared.resolver({key: min(group.choices) for key, group in prepared.space.groups.items()})
    names = {node.name for node in plan.graph if node.op in LAYERS}
    found: dict[int, tuple[Tensor, Mapping[str, Tensor]]] = {}
    for part_bytes in (1, 20_000, 1 << 30):
        monkeypatch.setattr(float_layers, "PART_BYTES", part_bytes)
        real = FloatLayers(plan.graph, plan.ops, [x])
        seen = []
        for _, layer in real.of(names, windows=True):
            assert layer.windows is not None
            seen += [layer.mean, layer_correction._second_moments(layer.windows)]
        offsets = correct_layers(plan, real, rounding=True, bias=True)
        found[len(real.parts)] = torch.cat([t.flatten().double() for t in seen]), offsets
    assert len(found) == 3 and {1, 30} < found.keys()
    seen_whole, whole = found.pop(1)
    for seen_parts, parts in found.values():
        assert torch.allclose(seen_parts, seen_whole, rtol=1e-4, atol=1e-4)
        # what is rounded otherwise by roundoff moves later weights
        assert parts.keys() == whole.keys()
        assert sum(int((parts[n] != whole[n]).sum()) for n in whole) < 0.2 * sum(t.numel() for t in whole.values())


@pytest.mark.parametrize("samples, part", [(24, 24), (24, 4), (23, 5), (7, 1), (2, 1)])
def test_halves_of_windows_do_not_share_samples(samples: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those at the middle, since as many windows are in each half."""
    x = torch.arange(samples, dtype=torch.float32).reshape(-1, 1, 1, 1).expand(-1, 3, 40, 40)
    model = nn.Conv2d(3, 4, 1).eval()
    graph = hago.from_torch(model, x[:2])
    largest = 4 * 4 * 40 * 40
    monkeypatch.setattr(float_layers, "PART_BYTES", part * largest)
    real = FloatLayers(graph, OPS, [x])
    assert all(len(of[0]) <= part for of in real.parts) and real.samples >= samples - max(1, samples // 8)
    ((_, layer),) = real.of({node.name for node in graph if node.op in LAYERS}, windows=True)
    assert layer.windows is not None and layer.windows.shape[1] == 512
    first, second = (half[0, :, 0].long() for half in layer.windows.chunk(2, 1))
    assert float((first % 2 == 0).double().mean()) > 0.75 and float((second % 2 == 1).double().mean()) > 0.75
    assert set(layer.windows[0, :, 0].tolist()) == set(range(real.samples))


@pytest.mark.parametrize(("groups", "windows", "weights"), [(1, 300, 7), (3, 50, 97), (1, 500, 400), (2, 5, 193)])
def test_products_of_values_with_themselves_are_symmetric(groups: int, windows: int, weights: int) -> None:
    values = torch.randn(groups, windows, weights, generator=torch.Generator().manual_seed(weights))
    moments = layer_correction._second_moments(values)
    assert torch.allclose(moments, moments.transpose(1, 2), rtol=1e-6)
    assert torch.allclose(moments, values.transpose(1, 2) @ values / windows, atol=1e-5)


@pytest.mark.parametrize(
    ("batch", "searcher"),
    some(3, [1, 2, 40], ["auto", "gradient", "sensitivity", "limited", "pareto", "greedy", "tpe"]),
)
def test_a_program_of_a_fixed_batch_is_searched(batch: int, searcher: str) -> None:
    data = [images(batch, 3, 6, 6, seed=n) for n in range(3)]
    program = torch.export.export(randomized(Flattening()), (data[0],))
    how: dict[str, Any] = {"budget_cost": "size <= 60 %"} if searcher in ("auto", "limited") else {}
    how["effort"] = "fast" if searcher in ("limited", "pareto") else None
    strategy, _ = hago.search_quantize_strategy(
        program, "x86_vnni", data, searcher=searcher, progress=False, budget="3 trials", **how
    )
    quantizer = hago.create_quantizer(program, "x86_vnni", strategy, data)
    assert torch.equal(quantizer.simulate()(data[0]), quantizer.realize()(data[0]))
    assert hago.measure_sensitivity(program, "x86_vnni", data).samples == 3 * batch
