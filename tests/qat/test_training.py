"""Training with the Plan in the forward pass: the trained model is the shipped one, on random networks and hardware."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from chips import Chip
from networks import Small, randomized
from plans import points
from random_graphs import random_graph, random_inputs
from specs import EVERY
from torch import Tensor, nn

import hago
from hago.arithmetic.equality import count_differing
from hago.arithmetic.numerics import Requantize
from hago.errors import HagoError
from hago.graph.execute import run_real
from hago.qat.model import QatModel
from hago.qat.prepare import from_qat, prepare_qat
from hago.qat.scheme import TRAINING_SCHEMES
from hago.search.preparation import QuantizationOptions, prepare
from hago.search.stored_strategy import make_strategy


def outputs(returned: Any) -> list[Tensor]:
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def equal(a: Any, b: Any) -> bool:
    return all(count_differing(x, y) == 0 for x, y in zip(outputs(a), outputs(b), strict=True))


#: Scales of groups are not trained.
TRAINED = sorted(n for n, chip in EVERY.items() if not any(d.groups for descs in chip.ops.values() for d in descs))


def in_training(seed: int, name: str, scheme: str) -> tuple[QatModel, list[Tensor]]:
    """A random network at random bits on some hardware, prepared; and inputs."""
    rng = random.Random(seed)
    graph = random_graph(seed)
    data = [tuple(random_inputs(graph, 10 * seed + i)) for i in range(2)]
    prepared = prepare(graph, EVERY[name], data, QuantizationOptions(estimator=rng.choice(["max_range", "mse"])))
    bits = next(islice(points(prepared.space, seed), 1, None))
    strategy = make_strategy(prepared, prepared.resolver(bits), bits, {})
    return prepare_qat(graph, EVERY[name], strategy, scheme=scheme).train(), random_inputs(graph, seed + 77)


@pytest.mark.parametrize("seed", range(30))
def test_the_trained_model_is_the_shipped_one(seed: int) -> None:
    """The forward pass in training, the simulation and the integer model are equal, before and after a step."""
    rng = random.Random(seed)
    scheme = rng.choice(sorted(TRAINING_SCHEMES))
    name = rng.choice(TRAINED)
    try:
        trained, inputs = in_training(seed, name, scheme)
    except HagoError as error:
        assert "cannot hold DoReFa's weights" in str(error) or "DoReFa's grid needs one number" in str(error)
        trained, inputs = in_training(seed, name, "hago")
    for _ in range(2):
        trained.train()(*inputs)  # updates the ranges with the inputs
        trained.observe(False)
        output = trained(*inputs)
        assert equal(output, trained.eval()(*inputs)), (seed, scheme)
        quantizer = from_qat(trained)
        assert equal(output, quantizer.simulate()(*inputs)) and equal(output, quantizer.realize()(*inputs))
        trained.observe(True)
        loss = torch.stack([o.square().mean() for o in outputs(output)]).sum()
        if not loss.requires_grad:  # no constant before the output, or a comparison between
            return
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0, error_if_nonfinite=True)
        torch.optim.SGD(trained.parameters(), 0.01).step()
        trained.zero_grad()


def test_the_strategy_of_a_trained_model_has_its_scheme_and_no_earlier_measures(tmp_path: Path) -> None:
    data = [torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))]
    start = hago.quantize(randomized(Small()), "x86_vnni", data, corrections="none").strategy
    start = replace(start, made_by={**start.made_by, "held_out": start.made_by["results"]})
    trained = prepare_qat(randomized(Small()), "x86_vnni", start, scheme="lsq").train()
    trained(data[0])
    quantizer = from_qat(trained)
    strategy = quantizer.strategy
    assert start.summary().facts["score"] and not {"results", "held_out"} & set(strategy.made_by)
    facts = strategy.summary().facts
    assert not facts["score"] and not facts["held out"]
    assert facts["made by"] == f"training with scheme lsq, from {start.summary().facts['made by']}"
    strategy.save(tmp_path / "trained.json")
    assert hago.Strategy.load(tmp_path / "trained.json") == strategy
    with pytest.raises(HagoError, match="no measures were recorded"):
        hago.replay(quantizer.plan.graph, "x86_vnni", strategy, data)


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_training_without_quantization_is_float_training(seed: int) -> None:
    trained, inputs = in_training(seed, "x86_vnni", "lsq")
    trained.quantizing = False
    expected = run_real(trained.graph, inputs)
    for output in (trained(*inputs), trained.eval()(*inputs)):
        for a, b in zip(outputs(output), outputs(expected), strict=True):
            # on some CPUs torch's kernels sum in another order if weights are trained
            torch.testing.assert_close(a, b, rtol=0.0, atol=1e-5 * max(1.0, float(b.abs().max())))


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("scheme", sorted(set(TRAINING_SCHEMES) - {"dorefa"}))  # dorefa squashes its weights
def test_gradients_at_8_bits_are_nearly_those_of_the_float_model(scheme: str) -> None:
    model, data = (
        randomized(Small()),
        [torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))],
    )
    trained = prepare_qat(model, "x86_vnni", dataset=data, scheme=scheme, estimator="max_range").train()
    gradients = {}
    for quantizing in (False, True):
        trained.quantizing = quantizing
        trained.zero_grad()
        trained(data[0]).square().mean().backward()
        gradients[quantizing] = {n: p.grad.clone() for n, p in trained.named_parameters() if n[0] != "r"}
    assert len(gradients[True]) == (6 if TRAINING_SCHEMES[scheme].norms == "frozen" else 8)  # with gamma and beta
    for name, grad in gradients[True].items():
        if name == "norms.stem/0.bias":  # without effect, because a batch norm subtracts it again
            continue
        assert torch.cosine_similarity(grad.flatten(), gradients[False][name].flatten(), 0) > 0.95, name
    if TRAINING_SCHEMES[scheme].activation.learned:
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.ranges.parameters())
        assert any(p.grad.abs().sum() > 0 for p in trained.ranges.parameters())


def test_learned_thresholds_grow_where_they_clip() -> None:
    """A threshold a tenth of the range, trained to give the float model's outputs, grows."""
    model, data = (
        randomized(Small()),
        [torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))],
    )
    strategy = hago.quantize(model, "x86_vnni", data, estimator="max_range", corrections="none").strategy
    low, high = strategy.thresholds["body:0"]
    small = {**strategy.thresholds, "body:0": (low * 0.1, high * 0.1)}
    trained = prepare_qat(model, "x86_vnni", replace(strategy, thresholds=small))
    for p in trained.weights.parameters():
        p.requires_grad_(False)
    reference = model(data[0]).detach()
    step = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], 0.05)
    losses = []
    for _ in range(30):
        loss = (trained.train()(data[0]) - reference).square().mean()
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    assert from_qat(trained).strategy.thresholds["body:0"][1] > 0.2 * high


# ---------------------------------------------------------------- an ordinary nn.Module
def data_of(samples: int = 16) -> list[Tensor]:
    return [torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(1))]


def test_the_model_is_not_touched() -> None:
    model = randomized(Small())
    before = copy.deepcopy(model.state_dict())
    trained = prepare_qat(model, "x86_vnni", dataset=data_of()).train()
    trained(data_of()[0]).sum().backward()
    torch.optim.SGD(trained.parameters(), 1.0).step()
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert not model.training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("scheme", sorted(TRAINING_SCHEMES))
def test_a_state_dict_holds_the_whole_state_of_training(scheme: str) -> None:
    model, data = randomized(Small()), data_of()
    strategy = hago.quantize(model, "x86_vnni", data, corrections="none").strategy
    one, other = (prepare_qat(model, "x86_vnni", strategy, scheme=scheme).train() for _ in range(2))
    step = torch.optim.SGD(one.parameters(), 0.05)
    for _ in range(2):
        one(data[0]).square().mean().backward()
        step.step()
    assert not equal(one.eval()(data[0]), other.eval()(data[0]))
    other.load_state_dict(one.state_dict())
    assert equal(one.eval()(data[0]), other.eval()(data[0]))
    assert equal(one.train()(data[0]), other.train()(data[0]))
    twin = copy.deepcopy(one)
    assert equal(one.eval()(data[0]), twin.eval()(data[0]))


def test_eval_sees_every_change_of_the_weights() -> None:
    trained = prepare_qat(randomized(Small()), "x86_vnni", dataset=data_of()).eval()
    before = trained(data_of()[0])
    assert equal(before, trained(data_of()[0]))
    next(trained.weights.parameters()).data.mul_(3.0)  # through .data, which does not change the version
    assert not equal(before, trained(data_of()[0]))


def test_bfloat16_autocast_trains() -> None:
    model, data = randomized(Small()), data_of(32)
    reference = model(data[0]).detach()
    trained = prepare_qat(model, "x86_vnni", dataset=data, fix_bits={"body:0": 4, "body:1": 4}).train()
    step = torch.optim.Adam(trained.parameters(), 3e-3)
    losses = []
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            output = trained(data[0])
        loss = (output.float() - reference).square().mean()
        step.zero_grad()
        loss.backward()
        step.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert equal(trained.eval()(data[0]), from_qat(trained).realize()(data[0]))


# ---------------------------------------------------------------- distributed
def test_distributed_data_parallel_trains_as_one(tmp_path: Path) -> None:
    """One process in a gloo group has the gradients of training without it, and the wrapped model can be shipped."""
    distributed = torch.distributed
    if not distributed.is_available() or distributed.is_initialized():
        pytest.skip("needs a process group of its own")
    model, data = randomized(Small()), data_of()
    strategy = hago.quantize(model, "x86_vnni", data, corrections="none").strategy
    alone, inner = (prepare_qat(model, "x86_vnni", strategy, scheme="lsq").train() for _ in range(2))
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        together = nn.parallel.DistributedDataParallel(inner)
        for model_in_training in (alone, together):
            model_in_training(data[0]).square().mean().backward()
            torch.optim.SGD(model_in_training.parameters(), 0.01).step()
    finally:
        distributed.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), inner.parameters(), strict=True))
    assert equal(from_qat(together).realize()(data[0]), alone.eval()(data[0]))


@pytest.mark.parametrize("form", ["tflite", "dequantize"])
def test_ops_that_requantize_their_own_output(form: str) -> None:
    """Such forms of add compute their integers forward, and have the gradient of the float op."""
    requantize = {
        "tflite": Requantize("multiplier_shift", "half_away", two_stage=True),
        "dequantize": Requantize("float32"),
    }
    chip = Chip(at="output", scheme="affine", requantize=requantize[form]).hardware()
    chip = replace(chip, ops={**chip.ops, "add": (replace(chip.ops["add"][0], form=form),)})
    trained = prepare_qat(randomized(Small()), chip, dataset=data_of(), scheme="lsq").train()
    output = trained(data_of()[0])
    assert equal(output, trained.eval()(data_of()[0]))
    trained.train()(data_of()[0]).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.weights.parameters())


# ---------------------------------------------------------------- bad input
def test_bad_input_is_refused_by_name() -> None:
    model = randomized(Small())
    with pytest.raises(HagoError, match="needs a strategy, or a data set"):
        prepare_qat(model, "x86_vnni")
    with pytest.raises(HagoError, match=r"unknown training scheme 'lqs'.*Did you mean 'lsq'"):
        prepare_qat(model, "x86_vnni", dataset=data_of(), scheme="lqs")
    with pytest.raises(HagoError, match=r"call model.eval\(\) first"):
        prepare_qat(model.train(), "x86_vnni", dataset=data_of())
    with pytest.raises(HagoError, match="from_qat got a Linear"):
        from_qat(nn.Linear(1, 1))


def test_an_observer_that_sees_infinity_says_so() -> None:
    trained = prepare_qat(randomized(Small()), "x86_vnni", dataset=data_of(), scheme="pytorch").train()
    with torch.no_grad():
        next(trained.weights.parameters()).fill_(torch.inf)
    with pytest.raises(HagoError, match="an observer saw NaN or infinite values"):
        trained(data_of()[0])
    with pytest.raises(HagoError, match="NaN or infinite"):
        trained.eval()(data_of()[0])


@pytest.mark.parametrize("scheme", ["hago", "lsq"])
@pytest.mark.parametrize(
    ("chip", "weights"),
    [
        ("x86_avx2", [1, 1, -1, 0]),
        ("int16_accumulator", [1, 1, 1, 1]),
        ("int16_saturates_each", [-1, -1, -1, 1, 1, 1]),
    ],
)
def test_overflow_that_only_trained_weights_cause_is_in_the_training_pass(
    chip: str, weights: list[int], scheme: str
) -> None:
    """Proved absent for the weights of the start, and not for those that training came to."""
    net = nn.Sequential(nn.Conv2d(8, 2, 1, bias=False), nn.ReLU(), nn.Conv2d(2, 2, 1)).eval()
    with torch.no_grad():
        net[0].weight.fill_(0.001)
        net[0].weight[:, 0] = 1.0
    x = torch.rand(16, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    x[0] = 1.0
    trained = prepare_qat(net, EVERY[chip], dataset=[x], scheme=scheme, fix_bits={"0:1": 8}).train()
    trained.observe(False)
    start = trained.training_plan.plan.nodes["0"]
    assert start.proved
    with torch.no_grad():
        trained.weights.get_parameter("0/weight")[0, : len(weights), 0, 0] = torch.tensor(weights).float()
    output = trained(x).detach()
    quantizer = from_qat(trained)
    assert not quantizer.plan.nodes["0"].proved
    assert torch.equal(output, trained.eval()(x)) and torch.equal(output, quantizer.realize()(x))
    trained.train()(x).sum().backward()
    assert bool(trained.weights.get_parameter("0/weight").grad.any())
