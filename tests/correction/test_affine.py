"""The affine correction changes scales of weights and biases only, helps where it is kept, and replays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_up.random_graphs import random_graph, random_inputs
from networks import Uneven, images

import hago
from hago.correction import LAYERS
from hago.errors import HagoError
from hago.graph import compute_real, run_graph
from hago.plan import Plan
from hago.runtime.exactness import compare_plan_exactly
from hago.search import affine, prepare
from hago.search.affine import affine_corrections, channel_factors
from hago.search.measured_point import first_point_if_any, sqnr_evaluator

from .stored import check_stored

DATA = [images(16, 3, 8, 8, seed=n) for n in range(4)]
CHIPS = ("x86_vnni", "tflite", "cmsis_nn")


def layer_errors(plan: Plan, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """By layer, what the integers of its weight change in each channel's output on float inputs, apart from its mean:
    the sum of squares."""
    errors = {}

    def compute(node: hago.graph.Node, operands: list[torch.Tensor]) -> torch.Tensor:
        given: torch.Tensor = compute_real(node, operands, plan.ops)
        if node.name in plan.nodes and node.op in LAYERS and 1 in plan.nodes[node.name].consts:
            target = plan.nodes[node.name].operands[1]
            assert target is not None
            weight = (plan.nodes[node.name].consts[1] * target.scale).to(torch.float32)
            other = compute_real(node, (operands[0], weight, *operands[2:]), plan.ops)
            rows = (other - given).movedim(-1 if node.op == "linear" else 1, 0).flatten(1).to(torch.float64)
            errors[node.name] = (rows - rows.mean(1, keepdim=True)).square().sum(1)
        return given

    with torch.no_grad():
        run_graph(plan.graph, inputs, compute)
    return errors


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups_of_transposed_convolutions_share_their_factors(groups: int) -> None:
    model = torch.nn.Sequential(
        torch.nn.ConvTranspose2d(6, 12, 3, 2, groups=groups), torch.nn.ReLU(), torch.nn.Conv2d(12, 4, 1)
    ).eval()
    data = [images(16, 6, 5, 4, seed=n) for n in range(2)]
    quantizer = hago.quantize(model, "x86_vnni", data, corrections=["affine"], fix_bits={"*.weight": 4})
    assert compare_plan_exactly(quantizer.plan, data[:1]).same
    plan = hago.quantize(model, "x86_vnni", data, corrections="none", fix_bits={"*.weight": 4}).plan
    (factors,) = (of for edge, of in channel_factors(plan, data[:1]).items() if edge.dst == "0")
    node_plan, target = plan.nodes["0"], plan.nodes["0"].operands[1]
    assert target is not None and factors.shape == (12 // groups,)
    weight = (node_plan.consts[1] * target.scale).float()
    with torch.no_grad():
        wanted, given = (
            torch.nn.functional.conv_transpose2d(data[0], w, stride=2, groups=groups).double()
            for w in (model[0].weight, weight)
        )
    wanted, given = (y - y.mean((0, 2, 3), keepdim=True) for y in (wanted, given))
    for i, factor in enumerate(factors):  # output channel i of every group
        own, other = (y[:, i :: 12 // groups] for y in (wanted, given))
        assert factor == pytest.approx(float((own * other).sum() / other.square().sum()), rel=1e-5)


def test_integers_stay_and_no_channel_of_a_layer_gets_worse() -> None:
    changed = 0
    for seed in range(24):
        graph, inputs = random_graph(seed), random_inputs(random_graph(seed), seed, batch=8)
        try:
            prepared = prepare(graph, "tflite", [tuple(inputs)])
        except HagoError:
            continue  # a chip without one of its operators
        point = first_point_if_any(prepared.with_most_bits(4), sqnr_evaluator(prepared))
        made = () if point is None else affine_corrections(point, inputs)
        if point is None or not made:
            continue
        before, after = point.plan, made[1].resolver(point.bits)
        scaled = {edge.dst for edge in channel_factors(before, inputs)}
        assert scaled
        for name in scaled & before.nodes.keys():
            integers, same = (plan.nodes[name].consts[1] for plan in (before, after))
            assert torch.equal(integers.to(torch.int64), same.to(torch.int64)), (seed, name)
        errors, fewer = layer_errors(before, inputs), layer_errors(after, inputs)
        for name in scaled & errors.keys():
            assert bool((fewer[name] <= errors[name] * (1 + 1e-6) + 1e-9).all()), (seed, name)
        assert compare_plan_exactly(after, random_inputs(graph, seed + 1)).same
        changed += sum(float(errors[n].sum()) > 1.001 * float(fewer[n].sum()) for n in scaled & errors.keys())
    assert changed > 8


@pytest.mark.parametrize("chip", CHIPS)
def test_it_helps_where_it_is_kept_and_replays(chip: str, tmp_path: Path) -> None:
    model = Uneven().eval()
    options = {"fix_bits": {"*:1": 4}}
    plain, made = (hago.quantize(model, chip, DATA, corrections=c, **options) for c in ("none", "affine"))
    (record,) = made.strategy.made_by["passes"]
    assert record["names"] == ["affine"] and record["kept"] and record["after"] > record["before"]
    assert made.plan.key != plain.plan.key and not made.strategy.corrections.of_graph
    check_stored(made, model, chip, DATA, tmp_path)


def test_it_goes_with_rounding_and_a_search(tmp_path: Path) -> None:
    model, log = Uneven().eval(), tmp_path / "log.jsonl"
    names = ["equalization", "rounding", "bias", "affine"]
    strategy, score = hago.search_quantize_strategy(
        model, "x86_vnni", DATA, budget=3, log=log, progress=False, corrections=names, fix_bits={"*:1": 4}
    )
    assert any("affine" in record["names"] for record in strategy.made_by["passes"])
    assert hago.evaluate_strategy(model, "x86_vnni", strategy, DATA).value == score
    assert hago.replay(model, "x86_vnni", log, DATA).same


@pytest.mark.parametrize("chip", ["vta", "int16_accumulator"])
def test_a_chip_that_cannot_hold_it_says_so(chip: str) -> None:
    strategy = hago.quantize(Uneven().eval(), chip, DATA, corrections="affine").strategy
    (record,) = strategy.made_by["passes"]
    assert not record["kept"] and record["why_not"] == "nothing to change"


def test_it_is_not_kept_where_it_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affine, "_least_squares", lambda wanted, given: torch.full((len(wanted),), 1.9).double())
    plain, made = (hago.quantize(Uneven().eval(), "x86_vnni", DATA, corrections=c) for c in ("none", "affine"))
    assert not made.strategy.made_by["passes"][0]["kept"] and made.plan.key == plain.plan.key
