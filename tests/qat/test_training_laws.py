"""Laws of training over schemes and networks: simulate == integer, also in ONNX, in two processes and in bfloat16."""

from __future__ import annotations

import copy
import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from networks import randomized
from products import some
from torch import Tensor, nn

import hago
from hago.errors import HagoError
from hago.plan.strategy import Strategy
from hago.qat.model import QatModel
from hago.qat.prepare import from_qat, prepare_qat
from hago.qat.scheme import TRAINING_SCHEMES
from hago.runtime.exactness import compare_plan_exactly


class Residual(nn.Module):
    """A shortcut past a convolution with a batch norm, and one through another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = plain(3, 6), nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.side = nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.relu(x + self.body(x)) + self.side(x)


class Shared(nn.Module):
    """One convolution, one batch norm and one linear layer, each used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(torch.relu(self.norm(self.conv(x))))))
        return self.head(torch.relu(self.head(x.mean((2, 3)))))


def plain(channels: int, out: int, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, out, 3, padding=1, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Sequential(plain(3, 6), plain(6, 4)),
    "residual": Residual,
    "depthwise": lambda: nn.Sequential(plain(3, 6), plain(6, 6, 6), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4), nn.ReLU6()),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "shared": Shared,
}


def images(samples: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(samples, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


@functools.cache
def started(network: str, hardware: str = "x86_vnni") -> tuple[nn.Module, Strategy]:
    model = randomized(NETWORKS[network]())
    return model, hago.quantize(model, hardware, [images()], estimator="max_range", corrections="none").strategy


def prepared(network: str, scheme: str, hardware: str = "x86_vnni") -> QatModel:
    model, strategy = started(network, hardware)
    return prepare_qat(model, hardware, strategy, scheme=scheme).train()


def step(trained: nn.Module, x: Tensor, rate: float = 0.02) -> None:
    trained.zero_grad()
    trained(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0, error_if_nonfinite=True)
    torch.optim.SGD(trained.parameters(), rate).step()


# ---------------------------------------------------------------- simulate == integer
@pytest.mark.parametrize(("scheme", "network"), some(2, sorted(TRAINING_SCHEMES), sorted(NETWORKS)))
def test_simulation_is_the_integer_model_after_training(scheme: str, network: str) -> None:
    trained = prepared(network, scheme)
    before = trained.eval()(images(seed=9))
    for seed in range(2):
        step(trained.train(), images(seed=seed))
    quantizer = from_qat(trained)
    output = trained.eval()(images(seed=9))
    assert not torch.equal(output, before)
    assert compare_plan_exactly(quantizer.plan, [images(seed=9)]).same
    assert torch.equal(output, quantizer.realize()(images(seed=9)))
    trained.train().observe(False)
    trained.freeze_norms()
    assert torch.equal(trained(images(seed=9)), output)


@pytest.mark.parametrize(
    ("scheme", "hardware", "form"),
    [
        ("lsq", "onnxruntime_cpu", "qdq"),
        ("lsq", "onnxruntime_cpu", "qoperator"),
        ("lsq", "x86_vnni", "qoperator"),
        ("tensorflow", "onnxruntime_cpu", "qdq"),
        ("dorefa", "x86_vnni", "qoperator"),
    ],
)
def test_onnx_of_a_trained_model_is_its_integer_model(scheme: str, hardware: str, form: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from hago.export.onnx.export import make_onnx
    from hago.export.onnx.verification import check_onnx

    trained = prepared("residual", scheme, hardware)
    step(trained, images())
    quantizer = from_qat(trained)
    quantizer.export_onnx(tmp_path / "net.onnx", form=form)
    assert (tmp_path / "net.onnx").stat().st_size > 0
    check = check_onnx(make_onnx(quantizer.plan, form), quantizer.plan, [[images(seed=9)]])
    assert check.same and check.compared > 0, str(check)


# ---------------------------------------------------------------- an ordinary nn.Module
@pytest.mark.parametrize("scheme", sorted(TRAINING_SCHEMES))
def test_a_copy_trains_on_its_own(scheme: str) -> None:
    """A copy in the middle of training has its own batch norms and observers."""
    one = prepared("conv", scheme)
    step(one, images())
    other, before = copy.deepcopy(one), {n: t.clone() for n, t in one.state_dict().items()}
    step(other, images(seed=2))
    assert all(torch.equal(t, before[n]) for n, t in one.state_dict().items())
    step(one, images(seed=2))
    state = one.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items())


@pytest.mark.parametrize("scheme", ["tensorflow", "oneflow", "pytorch"])
def test_eval_and_frozen_observers_change_nothing(scheme: str) -> None:
    trained = prepared("conv", scheme)
    step(trained, images())
    before = {n: t.clone() for n, t in trained.state_dict().items()}
    first = trained.eval()(images(seed=5) * 10)
    assert torch.equal(first, trained(images(seed=5) * 10))
    assert all(torch.equal(t, before[n]) for n, t in trained.state_dict().items())
    trained.train().observe(False)
    trained.freeze_norms()
    trained(images(seed=5) * 10)
    changed = {n for n, t in trained.state_dict().items() if not torch.equal(t, before[n])}
    assert {n for n in changed if n.startswith("ranges.")} <= {n for n in changed if "weight" in n}
    assert not {n for n in changed if n.startswith("norms.")}
    trained.observe(True)
    trained(images(seed=5) * 10)
    assert {n for n, t in trained.state_dict().items() if not torch.equal(t, before[n]) and n.startswith("ranges.")}


@pytest.mark.parametrize("scheme", sorted(TRAINING_SCHEMES))
def test_a_model_trained_with_bfloat16_autocast_is_exact(scheme: str) -> None:
    trained = prepared("conv", scheme)
    for seed in range(2):
        trained.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = trained(images(seed=seed)).float().square().mean()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in trained.weights.parameters())
        torch.optim.SGD(trained.parameters(), 0.01).step()
    assert compare_plan_exactly(from_qat(trained).plan, [images(seed=9)]).same


# ---------------------------------------------------------------- two processes
SCRIPT = """
import os, sys
import torch
torch.set_num_threads(1)
from qat.test_training_laws import images, prepared
from torch import nn
path = sys.argv[1]

def rank_of_two(rank):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/group", rank=rank, world_size=2)
    for scheme in ("lsq", "pytorch"):
        inner = prepared("residual", scheme)
        together = nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(together.parameters(), 0.02)
        for seed in range(3):
            optimizer.zero_grad()
            together(images(seed=seed)[rank::2]).square().mean().backward()
            optimizer.step()
        together.eval()(images())
        torch.save(inner.state_dict(), f"{path}/{scheme}-{rank}.pt")
    torch.distributed.destroy_process_group()

prepared("residual", "lsq")
children = []
for rank in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        rank_of_two(rank)
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    """Two ranks with half of every batch each agree on weights and ranges bit for bit.

    Without observers they train as one process does on whole batches; with observers, those of the first rank count.
    """
    if not torch.distributed.is_available():
        pytest.skip("torch without distributed")
    tests = Path(__file__).parents[1]
    places = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    for scheme in ("lsq", "pytorch"):
        one, other = (torch.load(tmp_path / f"{scheme}-{rank}.pt", weights_only=True) for rank in range(2))
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name
        shipped = prepared("residual", scheme)
        shipped.load_state_dict(one)
        assert compare_plan_exactly(from_qat(shipped).plan, [images(seed=9)]).same
    alone = prepared("residual", "lsq")
    for seed in range(3):
        alone.zero_grad()
        alone(torch.cat([images(seed=seed)[rank::2] for rank in range(2)])).square().mean().backward()
        torch.optim.SGD(alone.parameters(), 0.02).step()
    together = torch.load(tmp_path / "lsq-0.pt", weights_only=True)
    for name, value in alone.state_dict().items():
        assert torch.allclose(value.double(), together[name].double(), atol=1e-6), name


# ---------------------------------------------------------------- bad input
def test_a_model_in_the_middle_of_a_step_is_refused() -> None:
    model = copy.deepcopy(started("conv")[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(images()).sum().backward()
    with pytest.raises(HagoError, match="holds a gradient that no optimizer step has used"):
        prepare_qat(model, "x86_vnni", started("conv")[1])
    optimizer.step()
    optimizer.zero_grad()
    prepare_qat(model, "x86_vnni", dataset=[images()])
    with pytest.raises(HagoError, match=r"call model.eval\(\) first"):
        prepare_qat(model.train(), "x86_vnni", dataset=[images()])


@pytest.mark.parametrize("scheme", sorted(TRAINING_SCHEMES))
def test_one_sample_under_a_batch_norm(scheme: str) -> None:
    """One value per channel is refused if the statistics of the batch are used, and trains otherwise."""
    trained = prepared("linear", scheme)
    if TRAINING_SCHEMES[scheme].norms == "frozen":
        step(trained, images(1))
        return
    with pytest.raises(HagoError, match=r"batch norm '2' got one value per channel in training"):
        trained(images(1))
    step(prepared("conv", scheme), images(1))  # 36 values per channel


@pytest.mark.parametrize("scheme", ["lsq", "tensorflow", "oneflow", "pytorch"])
def test_nan_and_infinity_in_the_data(scheme: str) -> None:
    """NaN is refused at the input; infinity is refused by observers, and clipped without."""
    trained = prepared("residual", scheme)
    x = images()
    x[0, 0, 0, 0] = math.nan
    with pytest.raises(HagoError, match="input 'x' holds NaN"):
        trained(x)
    x[0, 0, 0, 0] = math.inf
    if scheme == "lsq":
        assert bool(trained(x).isfinite().all())
        return
    with pytest.raises(HagoError, match="an observer saw NaN or infinite values"):
        trained(x)
    ranges = {n: t for n, t in trained.state_dict().items() if n.startswith("ranges.") and t.is_floating_point()}
    assert ranges and all(bool(t.isfinite().all()) for t in ranges.values())


@pytest.mark.parametrize("scheme", ["tensorflow", "oneflow", "pytorch"])
def test_without_a_batch_observed_ranges_are_those_of_the_strategy(scheme: str) -> None:
    """Observed ranges start from those of the strategy, which eval uses before the first batch."""
    trained = prepared("conv", scheme)
    quantizer = from_qat(trained)
    model, strategy = started("conv")
    assert quantizer.strategy.thresholds.keys() == strategy.thresholds.keys()
    assert torch.equal(trained.eval()(images()), hago.create_quantizer(model, "x86_vnni", strategy).realize()(images()))


@pytest.mark.parametrize("scheme", ["dorefa", "dorefa_relative"])
def test_weights_of_zeros_under_dorefa(scheme: str) -> None:
    model, strategy = copy.deepcopy(started("conv"))
    trained = prepare_qat(model, "x86_vnni", strategy, scheme=scheme)
    with torch.no_grad():
        next(trained.weights.parameters()).zero_()
    with pytest.raises(HagoError, match=r"weight '0.0.weight' is all 0, .* keep its layer float"):
        trained.train()(images())
    with pytest.raises(HagoError, match=r"weight '0.0.weight' is all 0, .* keep its layer float"):
        from_qat(trained)
