"""The trained weights as a state dict of the user's module, and the command line that writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import ResNet, Small, randomized
from torch import Tensor, nn
from torch.nn import functional as F

import hago
from hago.cli import main
from hago.errors import HagoError
from hago.qat.finetuning import FinetuneOptions, finetune_with
from hago.qat.prepare import from_qat, prepare_qat
from hago.qat.state_dict import trained_state


class Odd(nn.Module):
    """A batch norm before any layer, one after an add, and one after a layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.bn = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.last = nn.BatchNorm2d(3, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.bn(self.conv(x)))


class Plain(nn.Module):
    """Batch norms without weight and bias: after layers with and without a bias, and after none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn_a = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)
        self.b, self.bn_b = nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False)
        self.bn_c = nn.BatchNorm2d(4, eps=1e-3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn_c(torch.relu(self.bn_b(self.b(torch.relu(self.bn_a(self.a(x)))))))


def trained(model: nn.Module, data: Tensor) -> Any:
    qat_model = prepare_qat(model, "x86_vnni", dataset=[data]).train()
    qat_model(data).square().mean().backward()
    torch.optim.SGD(qat_model.parameters(), 0.02).step()
    return qat_model


@pytest.mark.parametrize("model", [Odd(), Plain(), ResNet((4, 8), 1)])
def test_the_users_module_with_the_trained_state_is_the_trained_model(model: nn.Module) -> None:
    model = randomized(model)
    data = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    qat_model = trained(model, data)
    quantizer = from_qat(qat_model)
    state = trained_state(model, quantizer.plan.graph)
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)
    again = hago.create_quantizer(model, "x86_vnni", quantizer.strategy)
    assert torch.equal(again.realize()(data), qat_model.eval()(data))


class Functional(nn.Module):
    """A batch norm after no layer, with a factor that is a parameter of no batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mean, self.variance = nn.Conv2d(3, 3, 1), nn.Buffer(torch.zeros(3)), nn.Buffer(torch.ones(3))
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(torch.relu(self.conv(x)), self.mean, self.variance, self.factor * 2.0)


def test_a_batch_norm_that_cannot_hold_what_was_trained_is_named() -> None:
    model = Functional().eval()
    data = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    quantizer = from_qat(trained(model, data))
    with pytest.raises(HagoError, match="has no weight and bias to hold its trained multiplier and offset; use a"):
        trained_state(model, quantizer.plan.graph)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.BatchNorm2d(3, affine=True)).eval()
    quantizer = from_qat(trained(model, data))
    model.load_state_dict(trained_state(model, quantizer.plan.graph))
    assert torch.equal(model[2].weight, quantizer.plan.graph.consts["2.multiplier"])


class Numbers(nn.Module):
    """Numbers in the code and a buffer, which are no parameters, and a weight that is computed from one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.scale = weight, nn.Buffer(torch.full((1, 4, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x * 2.0, self.weight, padding=1) * self.scale + torch.full((1,), 0.25)
        return y * (1.0 - (x[:, :1] > 0).float()) + (x[:, :1] > 3).float() * torch.finfo(torch.float32).min


@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_parameters_without_a_gradient_are_not_trained(affine: bool, exports: bool) -> None:
    """Batch norms that were folded into frozen layers, and such as became nodes of their own, are not either."""
    layers = [nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3, affine=affine)]
    model = randomized(nn.Sequential(*layers, nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 2, 1))))
    model.requires_grad_(False)
    data = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for number, parts in ((0, []), (2, [model[4]]), (4, [model[0], model[1]])):
        for part in parts:
            part.requires_grad_()
        given = torch.export.export(model, (data,)) if exports else model
        names = {name for name, _ in prepare_qat(given, "x86_vnni", dataset=[data]).weights.named_parameters()}
        assert len(names) == number, names


@pytest.mark.parametrize("exports", [False, True])
def test_numbers_and_buffers_are_not_trained(exports: bool) -> None:
    model, data = Numbers(nn.Parameter(torch.randn(4, 3, 3, 3))).eval(), torch.randn(4, 3, 8, 8).clamp(-2.0, 2.0)
    given = torch.export.export(model, (data,)) if exports else model
    qat_model = trained(given, data)
    (weight,) = (p for p in qat_model.parameters() if p.shape == (4, 3, 3, 3))
    assert not weight.equal(model.weight)
    graph, start = from_qat(qat_model).plan.graph, hago.from_torch(model, (data,))
    assert [name for name in start.consts if not graph.consts[name].equal(start.consts[name])] == ["weight"]
    if not exports:
        assert trained_state(model, graph)["weight"].equal(weight)


def test_what_is_computed_from_a_parameter_is_trained() -> None:
    model, data = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)).eval(), torch.randn(4, 3, 8, 8)
    graph, start = from_qat(trained(model, data)).plan.graph, hago.from_torch(model, (data,))
    changed = {name for name in start.consts if not graph.consts[name].equal(start.consts[name])}
    assert changed == set(start.consts) and len(changed) == 2


class Shared(nn.Module):
    """One convolution, used twice, with a batch norm of its own each time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.one, self.two = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.conv(self.one(self.conv(x))))


def test_shared_weights_that_were_trained_separately_are_refused() -> None:
    model, data = randomized(Shared()), torch.randn(4, 3, 8, 8)
    with pytest.raises(HagoError, match=r"cannot hold the trained weights"):
        trained_state(model, from_qat(trained(model, data)).plan.graph)


@pytest.mark.parametrize("model", [Shared(), nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))])
def test_a_module_that_cannot_hold_the_weights_is_refused_before_training(model: nn.Module, tmp_path: Path) -> None:
    model, data = randomized(model), [torch.randn(16, 3, 8, 8)]
    strategy = hago.quantize(model, "x86_vnni", data, corrections="none").strategy
    options = FinetuneOptions(steps=2, checkpoint=tmp_path / "c.safetensors", log=tmp_path / "log.jsonl")
    with pytest.raises(HagoError, match="cannot hold the trained weights"):
        finetune_with(model, "x86_vnni", strategy, data, options, holder=model)
    assert list(tmp_path.iterdir()) == []
    assert finetune_with(model, "x86_vnni", strategy, data, options).steps == 2


class WholeAttention(nn.Module):
    """Attention, and a divisor with a guard, which versions of the import read in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(x, x, self.fc(x))
        return x / (x.square().sum(-1, keepdim=True) + 1e-6)


def test_attention_that_a_chip_keeps_whole() -> None:
    mac = hago.OpDesc(["uint8", "int8", "int32"], "int32")
    chip = hago.Hardware({"linear": [mac]}, name="no products")
    model, data = randomized(WholeAttention()), torch.randn(4, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    quantizer = from_qat(prepare_qat(model, chip, dataset=[data]))
    assert "scaled_dot_product_attention" in [n.op for n in quantizer.plan.graph]
    assert trained_state(model, quantizer.plan.graph).keys() == model.state_dict().keys()


def small() -> nn.Module:
    return randomized(Small())


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Quantize, finetune, continue, and check with the weights that it wrote."""
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    np.savez("data.npz", np.random.default_rng(0).standard_normal((64, 1, 8, 8), dtype=np.float32))
    model, shared = "test_state_dict:small", ["--data", "data.npz", "--json"]
    low = [f"--fix-bits={n}:{s}=4" for n in ("stem.0", "body", "fc") for s in (0, 1)]
    assert main(["quantize", model, "--hardware", "x86_vnni", "--save", "s.json", *low, *shared]) == 0
    capsys.readouterr()
    command = ["finetune", model, "s.json", "--steps", "6", "--lr", "0.005", *shared]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(command) == 0  # finds its checkpoint, finished
    assert json.loads(capsys.readouterr().out)["after"] == first["after"]
    assert Path(first["log"]).read_text().count("\n") == 3
    assert main(["realize", model, first["strategy"], "--weights", first["weights"], *shared]) == 0
    assert json.loads(capsys.readouterr().out)["same"]
    assert main(["realize", model, first["strategy"], *shared]) == (2 if first["kept"] else 0)


def test_a_search_ends_with_training(tmp_path: Path) -> None:
    """The returned strategy is for the weights that were written, and no worse than that of the search."""
    pytest.importorskip("safetensors")
    from hago.graph.model_source import read_weights

    data = [torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1))]
    fixed = {f"{n}:{s}": 4 for n in ("stem.0", "body", "fc") for s in (0, 1)}
    options: dict[str, Any] = {"searcher": "default", "fix_bits": fixed, "progress": False, "corrections": "none"}
    _, before = hago.search_quantize_strategy(small(), "x86_vnni", data, **options)
    path, saved = tmp_path / "w.safetensors", tmp_path / "s.json"
    tuning = {"steps": 40, "batch_size": 16, "range_lr": 0.0, "save_weights": path}
    strategy, after = hago.search_quantize_strategy(small(), "x86_vnni", data, **options, finetune=tuning, save=saved)
    assert after > before
    model = small()
    model.load_state_dict(read_weights(path))
    assert hago.create_quantizer(model, "x86_vnni", saved).strategy == strategy
    with pytest.raises(HagoError, match="finetune must say where they go"):
        hago.search_quantize_strategy(small(), "x86_vnni", data, **options, finetune={"steps": 1})
