"""The answer that commands end with: figures, paired differences, what stays float, and remedies that are tried."""

from __future__ import annotations

import itertools
import math
import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hago
from hago.analysis.answer import (
    Answer,
    PairedDifference,
    answer_for_one_shot,
    answer_for_search,
    answer_for_stored,
    is_one_shot,
    load_stored,
)
from hago.analysis.remedies import overflow_changes, rule_out_overflow
from hago.data.progress import JobProgress
from hago.plan.plan import Plan
from hago.plan.strategy import Strategy
from hago.search.evaluate import Evaluator, Measurement
from hago.search.objective import named_objective
from hago.search.one_shot import quantize_and_measure
from hago.search.preparation import QuantizationOptions, prepare
from hago.search.session import SearchOptions, SearchOutcome, run_search
from hago.search.stored_strategy import make_strategy
from hago.serialization.text_table import WIDTH

CHIP = "int16_accumulator"
QUIET = JobProgress("test", shown=False)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 5)).eval()


def data(seed: int = 1, labelled: bool = True) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    images = [torch.randn(20, 2, 6, 6, generator=generator) for _ in range(2)]
    return [(x, model()(x).argmax(1)) for x in images] if labelled else images


@pytest.fixture(scope="module")
def outcome() -> SearchOutcome:
    options = SearchOptions.of(
        minimize="weight_bytes", keep="agreement >= 50 %", budget=4, held_out=data(2), progress=False
    )
    return run_search(model(), CHIP, data(), options)


@pytest.fixture(scope="module")
def found(outcome: SearchOutcome) -> Answer:
    return answer_for_search(outcome, QUIET)


def stored(strategy: Strategy, batches: Any, held_out: Any = None, chip: str = CHIP) -> Answer:
    return answer_for_stored(load_stored(model(), chip, strategy, batches, held_out, QUIET), QUIET)[1]


def test_the_figures_are_those_of_the_search(outcome: SearchOutcome, found: Answer) -> None:
    calibration, held_out = found.parts
    results = dict(outcome.strategy.made_by["results"])
    assert {name: results[name] for name in calibration.figures["found"]} == calibration.figures["found"]
    assert held_out.figures["found"].items() <= dict(outcome.strategy.made_by["held_out"]).items()
    one_shot = hago.quantize(model(), CHIP, data()).strategy.made_by["results"]
    assert calibration.figures["one shot"] == one_shot
    assert calibration.figures["float"]["sim_acc"] == 1.0


def test_differences_are_paired(outcome: SearchOutcome, found: Answer) -> None:
    for part in found.parts:
        assert [d.minus for d in part.differences] == ["one shot", "float"]
        for difference in part.differences:
            mean, low, high = difference.points
            gap = part.figures["found"]["sim_acc"] - part.figures[difference.minus]["sim_acc"]
            assert difference.measure == "accuracy" and mean == pytest.approx(gap) and low <= mean <= high
        decibels = part.differences[0].decibels
        assert decibels is not None and part.differences[1].decibels is None
        assert decibels[0] == pytest.approx(part.figures["found"]["sqnr"] - part.figures["one shot"]["sqnr"])
        assert decibels[1] < decibels[0] < decibels[2]


def test_answers_fit_into_the_width_of_reports(found: Answer) -> None:
    wide = PairedDifference("found", "one shot", "agreement", (-0.11, -0.12, 0.1), (-33.111, -44.222, 1.333))
    part = replace(found.parts[0], differences=(wide, *found.parts[0].differences))
    lines = str(replace(found, parts=(part,))).splitlines()
    assert len(f"    {wide}") > WIDTH >= max(map(len, lines)) and str(wide) in " ".join(" ".join(lines).split())


def test_a_difference_without_spread_or_of_one_sample_is_said_so(found: Answer) -> None:
    difference = found.parts[0].differences[0]
    assert "the same on every sample" in str(replace(difference, points=(0.0, 0.0, 0.0)))
    assert "may be chance" in str(replace(difference, points=(0.1, -0.1, 0.3), decibels=None))
    assert "may be chance" not in str(replace(difference, points=(0.1, 0.05, 0.3), decibels=None))
    single = replace(difference, points=(0.1, -math.inf, math.inf))
    assert "on a single sample" in str(single) and single.to_json()["points"] == [0.1, None, None]


def test_without_labels_agreement_is_compared_and_no_accuracy_is_shown() -> None:
    options = SearchOptions.of(minimize="weight_bytes", keep="agreement >= 50 %", budget=2, progress=False)
    answer = answer_for_search(run_search(model(), CHIP, data(labelled=False), options), QUIET)
    assert answer.parts[0].differences[0].measure == "agreement" and "accuracy" not in str(answer)


def test_an_objective_of_its_own_has_a_column(outcome: SearchOutcome) -> None:
    answer = answer_for_search(outcome, QUIET, named_objective("cosine"))
    assert "cosine" in str(answer).splitlines()[1] and "cosine" in answer.parts[0].figures["one shot"]


def test_a_strategy_of_one_shot_is_compared_with_float_alone() -> None:
    strategy = hago.quantize(model(), CHIP, data()).strategy
    answer = stored(strategy, data(), data(2))
    assert list(answer.weight_bytes) == ["float", "one shot"]
    for part in answer.parts:
        (difference,) = part.differences
        gap = part.figures["one shot"]["sim_acc"] - part.figures["float"]["sim_acc"]
        assert difference.points[0] == pytest.approx(gap) and difference.points[1] <= gap <= difference.points[2]
        assert f"one shot minus float: {difference.measure} " in str(answer)


def test_one_shot_is_made_again_from_the_calibration_alone(outcome: SearchOutcome, found: Answer) -> None:
    assert stored(outcome.strategy, data(), data(2)) == found
    other = stored(outcome.strategy, data(2))
    assert list(other.weight_bytes) == ["float", "found"] and "--held-out" in other.note
    assert other.parts[0].data == "data"
    for made_by, why in (
        ({"estimator": "halved", "refined": False}, "cannot be made again: unknown estimator 'halved'"),
        ({"estimated": []}, "given by a table"),
        ({"topology": "searched", "keep_float": ["0"]}, "which nodes are float"),
    ):
        changed = replace(outcome.strategy, made_by={**outcome.strategy.made_by, **made_by})
        loaded = load_stored(model(), CHIP, outcome.strategy, data(), None, QUIET)
        assert why in answer_for_stored(replace(loaded, strategy=changed), QUIET)[1].note


def test_what_stays_float_is_listed_by_reason() -> None:
    quantizer = hago.quantize(model(), "x86_vnni", data(), keep_float="0")
    answer = stored(quantizer.strategy, data(), chip="x86_vnni")
    listed = {name for nodes in answer.floats for name in nodes.names}
    computed = {n.name for n in quantizer.plan.graph if n.op not in ("input", "const")}
    assert listed == computed - set(quantizer.plan.nodes) and len(computed) == answer.nodes
    assert "0 (conv2d): kept float by the user" in str(answer)
    assert f"{len(listed)} of {answer.nodes} nodes stay" in str(answer)
    integers = stored(hago.quantize(model(), "x86_vnni", data()).strategy, data(), chip="x86_vnni")
    assert "no node stays float" in str(integers) and "no accumulator can overflow" in str(integers)


def adds() -> nn.Module:
    """Additions, whose sums leave their register on data with larger values, between convolutions."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.second(x) + x
            return y + 3.0 * x

    torch.manual_seed(0)
    return Adds().eval()


def with_options(words: str) -> dict[str, Any]:
    """The options of `hago.quantize` that a command of a remedy gives."""
    pairs = list(itertools.pairwise(shlex.split(words)))
    fixed = dict(word.rsplit("=", 1) for option, word in pairs if option == "--fix-bits")
    kept = [word for option, word in pairs if option == "--keep-float"]
    return {"fix_bits": {edge: int(bits) for edge, bits in fixed.items()}, "keep_float": kept}


@pytest.mark.parametrize("net", [model, adds])
@pytest.mark.parametrize("larger", [1.0, 50.0])
def test_the_remedy_of_an_overflow_rules_it_out(net: Any, larger: float) -> None:
    """One command cures every node that overflowed, and names these; it named the first that may overflow."""
    images = data(labelled=False)
    strategy = hago.quantize(net(), CHIP, images).strategy
    wide = strategy if larger == 1.0 else replace(strategy, bits=dict.fromkeys(strategy.bits, 8))
    loaded = load_stored(net(), CHIP, wide, [larger * x for x in images], None, QUIET)
    answer = answer_for_stored(loaded, QUIET)[1]
    seen = answer.parts[0].overflows
    if larger == 1.0:
        assert not seen
    nodes = sorted(seen) or list(answer.possible)
    assert nodes and answer.remedy, str(answer)
    named = answer.remedy.split(" out at ", 1)[1].split(", quantize")[0].split(", ")
    assert sorted(named) == sorted(nodes)
    for words in answer.remedy.split(" with ", 1)[1].split(", or with "):
        options = with_options(words)
        assert any(options.values())
        plan = hago.quantize(net(), CHIP, images, **options).plan
        assert all(name not in plan.nodes or plan.nodes[name].proved for name in nodes)


def test_many_weights_are_named_by_a_pattern() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2 if i == 0 else 8, 8, 3, padding=1) for i in range(6)]
    deep = nn.Sequential(*(layer for conv in layers for layer in (conv, nn.ReLU()))).eval()
    images = data(labelled=False)
    prepared = prepare(deep, CHIP, images, QuantizationOptions(fix_bits={"*:0": 6}))
    widest = {key: group.choices[0] for key, group in prepared.space.groups.items()}
    nodes = [name for name, verdict in prepared.resolver(widest).verdicts.items() if verdict == "possible"]
    proved, fewer = rule_out_overflow(prepared.resolver, widest, nodes)
    assert len(nodes) > 4 and list(proved) == nodes
    point = {**widest, **fewer}
    assert all(prepared.resolver(point).nodes[name].proved for name in nodes)
    strategy = replace(make_strategy(prepared, prepared.resolver(widest), widest, {"estimator": "mse"}))
    (where, change), *_ = overflow_changes(prepared.resolver, strategy, nodes)
    assert where == nodes and change.fix_bits == {"*.weight": 5, "0:1": 7}
    fixed = {"*:0": 6, **change.fix_bits}
    assert all(hago.quantize(deep, CHIP, images, fix_bits=fixed).plan.nodes[name].proved for name in nodes)


def test_inspection_tries_what_rules_overflow_out() -> None:
    images = data(labelled=False)
    strategy = hago.quantize(adds(), CHIP, images).strategy
    wide = replace(strategy, bits=dict.fromkeys(strategy.bits, 8))
    statistic = hago.inspect_graph_statistic(adds(), CHIP, wide, [50 * x for x in images])
    assert statistic.overflowing and statistic.remedies is not None and statistic.remedies.overflow is not None
    found = statistic.remedies.overflow
    assert set(statistic.overflowing) == set(found.nodes)
    plan = hago.create_quantizer(adds(), CHIP, found.remedy.strategy).plan
    assert all(name not in plan.nodes or plan.nodes[name].proved for name in found.nodes)
    said = f"out at {', '.join(found.nodes)}, try with hago quantize: {found.remedy.change}"
    assert said in " ".join(str(statistic).split())
    assert statistic.remedies.to_json()["overflow"]["nodes"] == list(found.nodes)


def test_overflow_that_was_seen_is_said_first() -> None:
    strategy = hago.quantize(model(), CHIP, data()).strategy
    wide = replace(strategy, bits=dict.fromkeys(strategy.bits, 8))
    lines = stored(wide, [x * 50 for x in data(labelled=False)]).overflow_lines()
    assert lines[0].startswith("OVERFLOWS on the data: 0 ") and "though none did" not in lines[1]


def test_a_trained_strategy_is_not_one_shot() -> None:
    quantizer = hago.quantize(model(), CHIP, data())
    assert is_one_shot(quantizer.strategy)
    trained = hago.prepare_qat(model(), CHIP, strategy=quantizer.strategy, dataset=data())
    assert not is_one_shot(hago.from_qat(trained).strategy)


def test_one_shot_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    measure = Evaluator.measure

    def counted(self: Evaluator, plan: Plan, *rest: Any) -> Measurement:
        measured.append(plan.key)
        return measure(self, plan, *rest)

    monkeypatch.setattr(Evaluator, "measure", counted)
    prepared = prepare(model(), CHIP, data(), QuantizationOptions())
    made = quantize_and_measure(prepared)
    before = len(measured)
    answer = answer_for_one_shot(made, prepared, None, QUIET)
    assert len(measured) == before
    assert answer.parts[0].figures["one shot"] == made.quantizer.strategy.made_by["results"]


@pytest.mark.parametrize("chip", ["tflite", "x86_vnni", "vta", CHIP])
@pytest.mark.parametrize("bits", [8, 6])
def test_bits_below_the_width_of_a_dtype_save_no_bytes_on_the_chip(chip: str, bits: int) -> None:
    quantizer = hago.quantize(model(), chip, data(), fix_bits={"*.weight": bits})
    cost = hago.estimate_cost(model(), chip, quantizer.strategy)
    expected = sum(
        t.numel() * (4 if (target := quantizer.plan.target(edge)) is None else target.dtype.bits // 8)
        for edge in quantizer.plan.graph.edges
        if (t := quantizer.plan.graph.consts.get(quantizer.plan.graph.source(edge))) is not None
    )
    assert cost.stored_bytes == expected
    answer = stored(quantizer.strategy, data(), chip=chip)
    assert answer.stored_bytes == answer.to_json()["stored_bytes"] == expected
    said = f"weights as stored on {chip}: {expected} B, since those of fewer bits are stored in 8"
    assert (said in str(answer)) == (expected != answer.weight_bytes["one shot"]) == (bits < 8)
