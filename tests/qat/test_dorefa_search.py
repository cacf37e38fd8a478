"""Searches with DoReFa-Net's quantizers: training starts from their integers at every point, and ships them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chips import CHIPS
from networks import ResNet, Small, randomized
from plans import points
from torch import Tensor

import hago
from hago.calibration.estimators import DoReFaEstimator, Mse, named_estimator
from hago.cli import main
from hago.errors import HagoError
from hago.hardware.file import hardware_to_document, load_hardware
from hago.hardware.hardware import Hardware, OpDesc
from hago.qat.prepare import from_qat, prepare_qat
from hago.runtime.exactness import compare_plan_exactly
from hago.search.preparation import QuantizationOptions, prepare


def _few(desc: OpDesc) -> OpDesc:
    return replace(desc, min_bits=2, max_bits=5) if desc.is_integer else desc


def low(chip: Hardware) -> Hardware:
    """The same chip with 2 to 5 bits, which are 1 to 4 of DoReFa."""
    few = {op: tuple(_few(d) for d in descs) for op, descs in chip.ops.items()}
    return replace(chip, ops=few)


HARDWARE = {
    "x86_vnni": low(load_hardware("x86_vnni")),
    "symmetric": low(CHIPS["symmetric"].hardware()),
    "unsigned": low(CHIPS["unsigned_symmetric"].hardware()),
}


def data(channels: int = 1, size: int = 8, samples: int = 32, seed: int = 1) -> list[Tensor]:
    return [torch.randn(samples, channels, size, size, generator=torch.Generator().manual_seed(seed))]


def expected(weight: Tensor, bits: int, scheme: str) -> tuple[Tensor, float]:
    """DoReFa's integers and their scale, in float64 by the formulas of the paper."""
    unit = 1.0 if scheme == "dorefa" else float(weight.abs().max()) * 4.0
    w, top = weight.double() / unit, (1 << bits) - 1
    if bits == 1:
        return torch.where(w < 0, -1.0, 1.0), unit * float(w.abs().mean())
    squashed = torch.tanh(w)
    largest = float(squashed.abs().max())
    integers = 2 * torch.round(top * (squashed / (2 * largest) + 0.5)) - top
    return integers, unit * (1.0 if scheme == "dorefa" else largest) / top


# ---------------------------------------------------------------- laws
@pytest.mark.parametrize(
    ("hardware", "scheme"),
    [("x86_vnni", "dorefa"), ("x86_vnni", "dorefa_relative"), ("symmetric", "dorefa"), ("unsigned", "dorefa_relative")],
)
def test_every_point_has_dorefas_integers_from_which_training_starts(hardware: str, scheme: str) -> None:
    residual = hardware == "x86_vnni"
    batches, chip = data(3, 16, 4) if residual else data(), HARDWARE[hardware]
    model = hago.from_torch(randomized(ResNet((4, 8), 1) if residual else Small()), (batches[0],))
    prepared = prepare(model, chip, batches, QuantizationOptions(estimator=f"{scheme}:max_range"))
    for bits in islice(points(prepared.space, 3), 2):
        plan = prepared.resolver(bits)
        for node in plan.nodes.values():
            for slot, integers in node.consts.items():
                if node.operands[1] is None or slot != 1:
                    continue
                name = next(n.inputs[1] for n in plan.graph if plan.nodes.get(n.name) is node)
                k = node.operands[1].qmax.bit_length()
                levels, step = expected(plan.graph.consts[name], k, scheme)
                off = (integers.double() - levels).abs()
                assert float((off > 0).double().mean()) < 0.01  # float32 against float64, at a tie
                assert torch.allclose(node.operands[1].scale, torch.tensor(step).double(), rtol=1e-6)
                assert bool((integers % 2 == 1).all()) and int(integers.abs().max()) <= (1 << k) - 1
        assert compare_plan_exactly(plan, batches).same
    strategy = hago.quantize(model, chip, batches, estimator=f"{scheme}:max_range").strategy
    quantizer = hago.create_quantizer(model, chip, strategy)
    trained = prepare_qat(model, chip, strategy, scheme=scheme)
    output = quantizer.simulate()(batches[0])
    assert torch.equal(trained.eval()(batches[0]), output) and torch.equal(trained.train()(batches[0]), output)
    assert torch.equal(quantizer.realize()(batches[0]), output)


@pytest.mark.parametrize("bits", [2, 4])
def test_paper_activations_stand_for_0_to_1_and_relative_ones_for_their_threshold(bits: int) -> None:
    model, fixed = randomized(Small()), {"body:0": bits}
    chip = load_hardware("x86_vnni")
    chip = replace(
        chip,
        ops={op: tuple(replace(d, min_bits=2) if d.is_integer else d for d in descs) for op, descs in chip.ops.items()},
    )
    tops = {}
    for estimator in ("dorefa:max_range", "dorefa_relative:max_range", "max_range"):
        plan = hago.quantize(model, chip, data(), estimator=estimator, fix_bits=fixed, corrections="none").plan
        qparams = plan.nodes["body"].operands[0]
        assert qparams is not None
        tops[estimator] = float((qparams.qmax - qparams.zero_point) * qparams.scale)
    assert tops["dorefa:max_range"] == pytest.approx(1.0, rel=1e-6)
    assert tops["dorefa_relative:max_range"] == tops["max_range"] != pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("spec", ["dorefa", "dorefa_relative", "dorefa_relative:percentile:99.0"])
def test_an_estimator_is_found_by_its_name(spec: str) -> None:
    estimator = named_estimator(spec)
    assert isinstance(estimator, DoReFaEstimator) and named_estimator(estimator.name) == estimator
    assert named_estimator("mse") == Mse() and named_estimator(Mse()) == Mse()


# ---------------------------------------------------------------- search, train, confirm
def test_a_search_of_2_to_4_bits_is_trained_and_confirmed(tmp_path: Path) -> None:
    from hago.graph.model_source import read_weights

    model, chip, log = randomized(Small()), HARDWARE["x86_vnni"], tmp_path / "log.jsonl"
    options: dict[str, Any] = {"estimator": "dorefa_relative:max_range", "budget": 5, "log": log, "progress": False}
    goal = {"budget_cost": "weight_bytes <= 200"}
    untrained, before = hago.search_quantize_strategy(model, chip, data(), **options, **goal)
    assert untrained.made_by["weights"] == "dorefa_relative" and max(untrained.bits.values()) <= 5
    assert hago.replay(model, chip, log, data()).same and hago.replay(model, chip, untrained, data()).same
    weights, held_out = tmp_path / "w.safetensors", data(samples=8, seed=2)
    tuning = {"scheme": "dorefa_relative", "steps": 40, "batch_size": 16, "lr": 5e-3, "save_weights": weights}
    strategy, after = hago.search_quantize_strategy(
        model, chip, data(), **options, **goal, finetune=tuning, held_out=iter(held_out)
    )
    assert after > before + 1.0 and strategy.bits == untrained.bits
    assert "weights" not in strategy.made_by and strategy.made_by["held_out"]["samples"] == 8
    shipped = randomized(Small())
    shipped.load_state_dict(read_weights(weights))
    quantizer = hago.create_quantizer(shipped, chip, strategy)
    assert compare_plan_exactly(quantizer.plan, data()).same
    for name in ("stem.0", "body", "fc"):
        integers = quantizer.plan.nodes[name].consts[1]
        assert bool((integers % 2 == 1).all())


def test_workers_give_the_result_of_one_process(tmp_path: Path) -> None:
    options: dict[str, Any] = {"estimator": "dorefa_relative", "budget": 4, "progress": False, "searcher": "random"}
    one, other = (
        hago.search_quantize_strategy(randomized(Small()), HARDWARE["x86_vnni"], data(), executor=e, **options)
        for e in (None, "threads:2")
    )
    assert one == other


def test_the_integers_travel_in_a_stored_model_without_tanh(tmp_path: Path) -> None:
    model, chip = randomized(Small()), HARDWARE["x86_vnni"]
    quantizer = hago.quantize(model, chip, data(), estimator="dorefa_relative")
    integer = quantizer.realize()
    integer.save(tmp_path / "m.safetensors")
    again = hago.load_integer_model(tmp_path / "m.safetensors")
    assert torch.equal(again(data()[0]), integer(data()[0]))


# ---------------------------------------------------------------- the command line
def small() -> Any:
    return randomized(Small())


def test_the_command_line_searches_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    np.savez("data.npz", np.random.default_rng(0).standard_normal((64, 1, 8, 8), dtype=np.float32))
    Path("chip.json").write_text(json.dumps(hardware_to_document(HARDWARE["x86_vnni"])))
    command = ["search", "test_dorefa_search:small", "--hardware", "chip.json", "--data", "data.npz", "--json"]
    command += ["--estimator", "dorefa_relative", "--budget", "4 trials", "--save", "s.json", "--held-out", "data.npz"]
    command += ["--finetune", "scheme=dorefa_relative,steps=30,batch_size=16,lr=0.005,every=10"]
    assert main(command) == 0, capsys.readouterr().err
    first = json.loads(capsys.readouterr().out)
    assert first["finetuned"]["better"] and first["score"] == first["finetuned"]["after"]["sqnr"]
    assert first["held_out"]["sqnr"] == pytest.approx(first["score"], abs=0.01)
    saved = Path("s.json").read_text()
    assert main(command) == 0  # the search is in its log and the training in its checkpoint
    again = json.loads(capsys.readouterr().out)
    assert first.pop("this_run")["trials"] == 4 and again.pop("this_run")["trials"] == 0
    assert again == first and Path("s.json").read_text() == saved
    check = ["realize", "test_dorefa_search:small", "s.json", "--hardware", "chip.json", "--data", "data.npz", "--json"]
    assert main([*check, "--weights", first["finetuned"]["weights"]]) == 0
    assert json.loads(capsys.readouterr().out)["same"]
    assert main([*command[:-1], "stepz=3"]) == 2
    assert "Did you mean 'steps'" in capsys.readouterr().err
    assert main([*command[:-1], "steps=many"]) == 2
    assert "expected a number" in capsys.readouterr().err


# ---------------------------------------------------------------- bad input
def test_unsupported_hardware_and_weights_are_refused() -> None:
    model = randomized(Small())
    with pytest.raises(HagoError, match="vta cannot hold DoReFa's weights"):
        hago.quantize(model, "vta", data(), estimator="dorefa_relative")
    with pytest.raises(HagoError, match=r"unknown estimator 'mses'.*Did you mean 'mse'"):
        hago.quantize(model, "x86_vnni", data(), estimator="dorefa_relative:mses")
    with torch.no_grad():
        model.body.weight.zero_()
    with pytest.raises(HagoError, match=r"weight 'body.weight' is all 0, .* keep its layer float"):
        hago.quantize(model, HARDWARE["x86_vnni"], data(), estimator="dorefa_relative")


def test_training_with_another_scheme_starts_from_dorefas_integers() -> None:
    model, chip = randomized(Small()), HARDWARE["x86_vnni"]
    strategy = hago.quantize(model, chip, data(), estimator="dorefa_relative").strategy
    trained = prepare_qat(model, chip, strategy, scheme="lsq").train()
    output = trained(data()[0])
    assert torch.equal(output, from_qat(trained).realize()(data()[0]))
