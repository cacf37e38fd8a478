"""The way in which trials run is found nowhere in a search: logs are equal, byte for byte, whichever it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from networks import images, randomized
from products import whole
from torch import Tensor, nn
from toys import timeless

import hago
from hago.runtime.exactness import compare_plan_exactly
from hago.runtime.native.executor import Executor
from hago.runtime.native.processor import processor_flags
from hago.runtime.native.self_test import ExactKernels, exact_kernels
from hago.search import evaluate

CHIPS = ("x86_vnni", "tflite", "vta", "tpu_mlir_bm1684x")


class Island(nn.Module):
    """Convolutions around a softmax, which runs in float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = self.last(x + torch.softmax(x, 1))
        return self.fc(x.mean((2, 3)))


def searched(chip: str, log: Path) -> list[str]:
    data = [images(4, 3, 8, 8, seed=s) for s in range(2)]
    hago.search_quantize_strategy(randomized(Island()), chip, data, budget=6, log=log, progress=False)
    return timeless(log.read_bytes())


@pytest.mark.parametrize("chip", CHIPS)
def test_logs_do_not_know_the_engine(chip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    class Seen(Executor):
        def begin(self, inputs: object) -> dict[str, object]:
            used.append("integer")
            return super().begin(inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluate, "Executor", Seen)
    texts = {}
    for fast in (True, False):
        monkeypatch.setattr(ExactKernels, "outrun_floats", property(lambda self, fast=fast: fast))
        monkeypatch.setattr(evaluate, "_runs_on_kernels", lambda executor: True)  # on machines without any as well
        used.clear()
        texts[fast] = searched(chip, tmp_path / f"{fast}.jsonl")
        assert bool(used) == fast  # both ways were taken
    assert texts[True] == texts[False]


def test_logs_are_equal_without_kernels_of_our_own(tmp_path: Path) -> None:
    """In a process of its own, since kernels are found out once per process."""
    ours = searched("tflite", tmp_path / "here.jsonl")
    there = tmp_path / "there.jsonl"
    code = f"import sys; sys.path[:0] = {sys.path!r}; import torch; torch.set_num_threads(1); "
    code += "from pathlib import Path; from search.test_engines import searched; "
    code += f"searched('tflite', Path({str(there)!r}))"
    env = {**os.environ, "HAGO_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert timeless(there.read_bytes()) == ours


MISSING = (("AVX512_CORE", "avx512"), ("AVX2", "avx2"), ("SSE41", "default"))
FLAGS = {"avx512": "avx512f", "avx2": "avx2"}


@pytest.mark.parametrize("onednn, aten", MISSING if whole() else (MISSING[0], MISSING[-1]))
def test_logs_do_not_know_the_engine_where_instructions_are_missing(onednn: str, aten: str, tmp_path: Path) -> None:
    """In a process of its own, since instruction sets are chosen once per process. Kernels of torch and oneDNN that are
    not exact there are left out by the engine itself."""
    if FLAGS.get(aten) not in (None, *processor_flags()):
        pytest.skip(f"the processor has no {FLAGS[aten]}, which torch would use all the same")
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; import torch; torch.set_num_threads(1)\n"
        "from pathlib import Path; from search.test_engines import ExactKernels, evaluate, searched\n"
        "texts, evaluate._runs_on_kernels = [], lambda executor: True\n"
        "for fast in (True, False):\n"
        "    ExactKernels.outrun_floats = property(lambda self, fast=fast: fast)\n"
        f"    texts.append(searched('x86_vnni', Path({str(tmp_path)!r}) / f'{{fast}}.jsonl'))\n"
        "assert texts[0] == texts[1]\n"
    )
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten, "HAGO_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Layers(nn.Module):
    """Two layers of one kind, and a pointwise convolution of two dimensions."""

    def __init__(self, layer: type[nn.Module], size: int) -> None:
        super().__init__()
        self.first, self.second, self.last = layer(3, 8, size), layer(8, 8, size), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.relu(self.first(x))).flatten(3))


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Conv3d, (4, 3, 5, 5, 5)), (nn.ConvTranspose2d, (4, 3, 5, 5)), (nn.Conv2d, (4, 3, 9, 9))]
)
def test_plans_that_mostly_run_on_no_kernel_are_simulated(layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    data = [images(*shape)]
    plan = hago.quantize(randomized(Layers(layer, 3)), "tflite", data).plan
    fast = evaluate._runs_on_kernels(Executor(plan))
    if layer is not nn.Conv2d:
        assert not fast
    elif exact_kernels().outrun_floats:
        assert fast
    assert compare_plan_exactly(plan, data).same


def test_integers_are_taken_where_convolutions_of_our_own_run() -> None:
    here = exact_kernels()
    assert here.outrun_floats == (here.conv.exact and here.passes.exact)
