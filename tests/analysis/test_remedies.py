"""Remedies of an inspection: each is legal on the chip, and gains what it says."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from networks import ResNet, Small, images, randomized
from plans import points
from products import some, whole
from random_graphs import random_graph, random_inputs
from specs import EVERY
from torch import Tensor, nn

import hago
from hago.analysis.graph_statistic import GraphStatistic
from hago.analysis.remedies import (
    LEAST_GAIN,
    TRIED_NODES,
    TRIED_SAMPLES,
    Change,
    Remedy,
    find_remedies,
    with_given_options,
)
from hago.cli.arguments import build_parser
from hago.data import Batches, spread_indices
from hago.errors import HagoError, as_strings
from hago.plan.strategy import Strategy
from hago.search import CORRECTIONS
from hago.search.preparation import QuantizationOptions, prepare
from hago.search.stored_strategy import make_strategy, stored_resolver

CHIPS: Final = (
    "x86_vnni", "vta", "cmsis_nn", "cmsis_nn_int16", "tflite_int16", "int16_accumulator", "ethos_u", "onnxruntime_cpu",
)  # fmt: skip


class Uneven(nn.Module):
    """A first layer with one large channel, and a head whose weights have outliers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(x)).flatten(1))


class Drawn(nn.Module):
    """Layers that a seed chooses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        layers: list[nn.Module] = []
        channels = 1
        for _ in range(3):
            kind = int(torch.randint(4, (), generator=draw))
            width = int(torch.randint(1, 5, (), generator=draw))
            if kind < 2:
                layers += [nn.Conv2d(channels, width, 3, padding=1)]
                channels = width
            else:
                layers += [nn.ReLU(), nn.Sigmoid()][kind - 2 :][:1]
        self.body, self.fc = nn.Sequential(*layers), nn.Linear(36 * channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).flatten(1) + 0.1)


def uneven() -> nn.Module:
    model = randomized(Uneven())
    with torch.no_grad():
        model.conv.weight[0] *= 50  # type: ignore[operator, union-attr, index]
        model.fc.weight[0, 0] = 40.0  # type: ignore[operator, union-attr, index]
    return model


NETWORKS: Final[Mapping[str, Any]] = {
    "small": lambda: randomized(Small()),
    "uneven": uneven,
    "sigmoid": lambda: randomized(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 3))),
    "few bits": lambda: randomized(Small()),
    **{f"drawn {seed}": lambda seed=seed: randomized(Drawn(seed)) for seed in range(4)},
}
#: The bits that networks are quantized to.
FIXED: Final = {"few bits": {"*.weight": 4, "body:1": 5}}
DATA: Final = [images(20, 1, 6, 6), images(20, 1, 6, 6, seed=1)]
#: The samples on which changes are tried, spread over the data.
TRIED: Final = torch.split(torch.cat(DATA)[spread_indices(40, TRIED_SAMPLES)], 20)
_INSPECTED: dict[tuple[str, str], tuple[nn.Module, Strategy, GraphStatistic]] = {}


def inspected(name: str, chip: str) -> tuple[nn.Module, Strategy, GraphStatistic]:
    if (name, chip) not in _INSPECTED:
        model = NETWORKS[name]()
        strategy = hago.quantize(model, chip, DATA, fix_bits=FIXED.get(name)).strategy
        _INSPECTED[name, chip] = model, strategy, hago.inspect_graph_statistic(model, chip, strategy, DATA)
    return _INSPECTED[name, chip]


def with_options(change: Change, name: str) -> Change:
    """A change and the options that a network was quantized with, without bits of nodes that it keeps float."""
    kept = as_strings(change.keep_float or (), "keep_float")
    given = {key: b for key, b in FIXED.get(name, {}).items() if key.split(":")[0] not in kept}
    return Change(None, given).merged(change)


def sqnr(model: nn.Module, chip: Any, strategy: Strategy) -> float:
    return float(hago.evaluate_strategy(model, chip, strategy, TRIED).results["sqnr"])


def gains(model: nn.Module, chip: Any, strategy: Strategy, remedy: Remedy) -> bool:
    """Whether a strategy with a remedy, stored and evaluated anew, gains what the remedy says."""
    stored = Strategy.from_json(json.loads(json.dumps(remedy.strategy.to_json())))
    return sqnr(model, chip, stored) - sqnr(model, chip, strategy) == remedy.gain


CASES: Final = some(3, CHIPS, tuple(NETWORKS))


@pytest.mark.some_cases(9)
@pytest.mark.parametrize(("chip", "name"), CASES)
def test_remedies_are_legal_and_gain_what_they_say(chip: str, name: str) -> None:
    model, strategy, statistic = inspected(name, chip)
    assert statistic.remedies is not None and statistic.remedies.samples == TRIED_SAMPLES
    assert statistic.remedies.sqnr == sqnr(model, chip, strategy)
    for remedy in statistic.remedies.found[:1]:
        hago.quantize(model, chip, DATA, **remedy.change.to_json())
    for remedy in statistic.remedies.found:
        assert remedy.gain >= LEAST_GAIN
        assert gains(model, chip, strategy, remedy), str(remedy)
        quantizer = hago.create_quantizer(model, chip, remedy.strategy)
        assert torch.equal(quantizer.simulate()(TRIED[0]), quantizer.quantize()(TRIED[0]))
        before, after = (hago.estimate_cost(model, chip, s)["weight_bytes"] for s in (strategy, remedy.strategy))
        assert after - before == remedy.bytes


@pytest.mark.parametrize(("chip", "name"), CASES)
def test_the_command_is_the_change(chip: str, name: str) -> None:
    _, _, statistic = inspected(name, chip)
    assert statistic.remedies is not None
    for remedy in statistic.remedies.found:
        words = ["quantize", "m:n", "--hardware", chip, "--data", "d.npz", *shlex.split(str(remedy.change))]
        args = build_parser().parse_args(words)
        assert args.estimator == remedy.change.estimator
        assert args.keep_float == ([] if remedy.change.keep_float is None else [remedy.change.keep_float])
        assert dict(args.fix_bits) == remedy.change.fix_bits


@pytest.mark.parametrize(("chip", "name"), CASES)
def test_nodes_are_named_for_which_something_was_tried(chip: str, name: str) -> None:
    _, _, statistic = inspected(name, chip)
    remedies = statistic.remedies
    assert remedies is not None
    assert {*remedies.kept_float, *(r.node for r in remedies.found if r.node)} <= {*remedies.tried_for}
    assert {*remedies.tried_for} <= {suspect.node for suspect in statistic.suspects}


def test_nothing_is_said_to_be_tried_where_all_is_impossible() -> None:
    model, _, statistic = inspected("uneven", "vta")
    chip = hago.load_hardware("vta")
    integers = {op: tuple(d for d in descs if d.is_integer) for op, descs in chip.ops.items()}
    closed = replace(chip, ops={op: descs for op, descs in integers.items() if descs}, other_ops="reject")
    made = hago.quantize(model, closed, DATA, corrections=[n for n in CORRECTIONS if n != "reconstruction"])
    node = next(suspect for suspect in statistic.suspects if suspect.cause != "overflow")
    found = find_remedies(made.plan, made.strategy, Batches(DATA, made.plan.graph.inputs), [node], [])
    assert found.tried_for == () and found.kept_float == {} and found.tried > 0  # estimators, for all nodes


@pytest.mark.some_cases(9)
@pytest.mark.parametrize(("chip", "name"), CASES)
def test_what_is_called_impossible_is_refused(chip: str, name: str) -> None:
    model, _, statistic = inspected(name, chip)
    assert statistic.remedies is not None
    hardware = hago.load_hardware(chip)
    for node, words in statistic.remedies.impossible.items():
        for said in words:
            if "for each channel" in said:
                assert hardware.weight.granularity == "per_tensor"
            elif "in float" in said:
                with pytest.raises(HagoError):
                    hago.quantize(model, chip, DATA, keep_float=node)
            else:
                edge = re.fullmatch(r"more bits on (\S+) \(it has the most that .+ takes\)", said)[1]  # type: ignore[index]
                bits = next(e.bits for e in statistic[node].edges if e.edge == edge)
                for more in (bits + 1, bits + 2, bits + 4, bits + 8):
                    with pytest.raises(HagoError):
                        hago.quantize(model, chip, DATA, fix_bits={edge: more})


def test_all_kinds_of_remedies_are_found() -> None:
    of_all = [r for chip, name in (*CASES, ("vta", "uneven")) if (r := inspected(name, chip)[2].remedies) is not None]
    found = [remedy for remedies in of_all for remedy in remedies.found]
    options = {option for remedy in found for option in remedy.change.to_json()}
    assert options >= {"keep_float", "estimator"} and len(found) > 10
    impossible = [word for remedies in of_all for words in remedies.impossible.values() for word in words]
    assert any("a scale for each channel" in w for w in impossible)
    assert any("it has the most that" in w for w in impossible)
    assert any("in float" in w for w in impossible)


def test_remedies_are_listed_by_gain_and_apart_from_what_is_not_possible() -> None:
    several = 0
    for chip, name in CASES:
        remedies = inspected(name, chip)[2].remedies
        assert remedies is not None
        gains_found = [remedy.gain for remedy in remedies.found]
        assert gains_found == sorted(gains_found, reverse=True)
        lines = list(remedies.lines())
        refused = lines[lines.index("not possible:") :] if remedies.impossible else []
        assert not any("it has the most that" in line for line in lines[: len(lines) - len(refused)])
        several += len(set(gains_found)) > 1
    assert several


def test_the_law_of_gains_notices_another_gain() -> None:
    model, strategy, statistic = inspected("uneven", "vta")
    assert statistic.remedies is not None
    remedy = statistic.remedies.found[0]
    assert gains(model, "vta", strategy, remedy)
    assert not gains(model, "vta", strategy, replace(remedy, gain=remedy.gain + 0.001))
    assert not gains(model, "vta", strategy, replace(remedy, strategy=strategy))


@pytest.mark.parametrize("chip", ["x86_vnni", "vta", "cmsis_nn_int16"])
def test_more_bits_are_found_where_a_strategy_has_few(chip: str) -> None:
    model = NETWORKS["small"]()
    strategy = hago.quantize(model, chip, DATA, fix_bits={"fc:1": 4}, corrections="rounding").strategy
    statistic = hago.inspect_graph_statistic(model, chip, strategy, DATA)
    assert statistic.remedies is not None
    remedy = next(r for r in statistic.remedies.found if r.change.fix_bits)
    assert set(remedy.change.fix_bits) == {"fc:1"} and gains(model, chip, strategy, remedy)
    assert remedy.bytes > 0
    assert f"fc: --fix-bits fc:1={remedy.change.fix_bits['fc:1']} costs {remedy.bytes} B and gains" in str(statistic)


def test_a_searched_strategy_with_float_nodes_gets_remedies() -> None:
    model = NETWORKS["small"]()
    strategy, _ = hago.search_quantize_strategy(
        model, "x86_vnni", DATA, keep_float="fc", searcher="random", budget=3, progress=False
    )
    statistic = hago.inspect_graph_statistic(model, "x86_vnni", strategy, DATA)
    assert statistic.remedies is not None and statistic.remedies.found
    for remedy in statistic.remedies.found:
        assert gains(model, "x86_vnni", strategy, remedy)
        assert not remedy.strategy.topology.node_conds["fc"]


def test_remedies_can_be_left_out() -> None:
    model, strategy, statistic = inspected("uneven", "vta")
    without = hago.inspect_graph_statistic(model, "vta", strategy, DATA, remedies=False)
    assert without.remedies is None and without.to_json()["remedies"] is None
    assert "what may help" not in str(statistic)
    assert replace(statistic, remedies=None) == without
    assert statistic.remedies is not None
    document = statistic.to_json()["remedies"]
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["found"][0]["options"] == statistic.remedies.found[0].change.to_json()


def test_few_nodes_and_samples_are_tried() -> None:
    model = randomized(ResNet((4, 4), 1))
    data = [images(64, 3, 8, 8)]
    statistic = hago.inspect_graph_statistic(model, "x86_vnni", hago.quantize(model, "x86_vnni", data).strategy, data)
    assert statistic.remedies is not None
    assert statistic.remedies.samples == TRIED_SAMPLES and len(statistic.suspects) > TRIED_NODES
    assert statistic.remedies.tried <= 5 * TRIED_NODES + 4


@pytest.mark.parametrize("seed", range(8 if whole() else 4))
def test_random_networks_get_legal_remedies(seed: int) -> None:
    graph, rng = random_graph(seed), random.Random(seed)
    data = [tuple(random_inputs(graph, 10 * seed + i)) for i in range(2)]
    chip = EVERY[rng.choice(sorted(EVERY))]
    prepared = prepare(graph, chip, data, QuantizationOptions(estimator="max_range"))
    bits = next(iter(points(prepared.space, seed)))
    strategy = make_strategy(prepared, prepared.resolver(bits), bits, {"estimator": "max_range"})
    remedies = hago.inspect_graph_statistic(graph, chip, strategy, data).remedies
    assert remedies is not None
    before = hago.evaluate_strategy(graph, chip, strategy, data)
    for remedy in remedies.found:
        stored = Strategy.from_json(json.loads(json.dumps(remedy.strategy.to_json())))
        after = hago.evaluate_strategy(graph, chip, stored, data)
        assert after.results["sqnr"] - before.results["sqnr"] == remedy.gain
        assert sum(after.overflows.values()) <= sum(before.overflows.values())
        hago.create_quantizer(graph, chip, stored).quantize()


def test_names_with_brackets_are_escaped() -> None:
    assert str(Change(keep_float="a[[]0]", fix_bits={"b:1": 8})) == "--keep-float 'a[[]0]' --fix-bits b:1=8"


def test_a_change_keeps_the_options_of_the_strategy() -> None:
    """What rules overflow out was advised without the options that were given, and undid what these had cured."""
    model, options = randomized(Small()), {"keep_float": ["mean"], "fix_bits": {"fc:1": 6, "body:1": 7, "*:0": 8}}
    strategy = hago.quantize(model, "x86_vnni", DATA, estimator="max_range", **options).strategy
    graph = hago.from_torch(model, DATA[:1])
    resolver = stored_resolver(graph, hago.load_hardware("x86_vnni"), strategy)

    def shown(change: Change) -> str:
        return str(with_given_options(change, strategy, resolver))

    assert shown(Change(fix_bits={"fc:1": 5})) == (
        "--keep-float mean --fix-bits fc:1=5 --fix-bits body:1=7 --fix-bits '*:0=8' --estimator max_range"
    )
    # bits of a node that is kept float are refused
    assert shown(Change(keep_float="fc", estimator="percentile:99")) == (
        "--keep-float mean --keep-float fc --fix-bits body:1=7 --fix-bits '*:0=8' --estimator percentile:99"
    )


@pytest.mark.parametrize(("chip", "name"), [*CASES, ("x86_vnni", "few bits")])
def test_remedies_in_one_command_gain_more_than_each(chip: str, name: str) -> None:
    model, strategy, statistic = inspected(name, chip)
    remedies = statistic.remedies
    assert remedies is not None
    together = remedies.together
    assert (together is None) == (remedies.found == ())
    if together is None:
        return
    first = with_options(remedies.found[0].change, name)
    assert gains(model, chip, strategy, together) and together.gain >= remedies.found[0].gain
    assert (together.gain > remedies.found[0].gain) == (together.change != first)
    hago.quantize(model, chip, DATA, **together.change.to_json())
    shown = f"in one command, which {together.effect}: hago quantize with {together.change}"
    assert (shown in " ".join(str(remedies).split())) == (str(together.change) != str(remedies.found[0].change))
    assert remedies.to_json()["together"] == together.to_json()


def test_some_remedies_are_given_in_one_command() -> None:
    """So that the test before this one can fail."""
    found = [inspected(name, chip)[2].remedies for chip, name in (*CASES, ("x86_vnni", "few bits"))]
    assert sum(r is not None and "in one command" in str(r) for r in found) >= 3
