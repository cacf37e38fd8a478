"""Which samples corrections are found on, and which judge them, where data comes in an order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import Uneven, images
from torch import nn

import hago
from hago.data import Batches
from hago.search import correcting
from hago.search.float_layers import FloatLayers
from hago.search.folds import last_samples, other_samples, spread_samples
from hago.search.squared_gradients import GRADIENT_SAMPLES, gradient_samples

#: 128 images in the order of their brightness, in batches of 8 and 24.
ORDERED = [images(128, 3, 8, 8) * torch.linspace(0.1, 1.0, 128).reshape(-1, 1, 1, 1)][0]
DATA = [ORDERED[start : start + size] for at in range(0, 128, 32) for start, size in ((at, 8), (at + 8, 24))]


@given(st.integers(1, 400), st.integers(1, 400))
def test_samples_are_spread_over_all_before_the_last_quarter(total: int, most: int) -> None:
    used = spread_samples(total, most)
    before = max(1, total - total // 4)
    assert len(used) == len(set(used)) == min(most, before) and used == sorted(used)
    assert used[0] == 0 and used[-1] < before
    # any stretch of as many samples as lie between two of them has one
    widest = max((b - a for a, b in zip(used, [*used[1:], before], strict=True)), default=0)
    assert widest <= -(-before // len(used))


@given(st.integers(1, 300))
def test_others_judge(total: int) -> None:
    for used in (spread_samples(total, 64), last_samples(total)):
        others = other_samples(total, used)
        assert others == sorted({*range(total)} - {*used}) or (total == len(used) and len(others) == total)
    differentiated, judging = gradient_samples(total)
    assert 0 < len(differentiated) <= GRADIENT_SAMPLES <= total or len(differentiated) == total
    assert len(judging) >= min(total, GRADIENT_SAMPLES)
    assert total < 2 * GRADIENT_SAMPLES or not {*differentiated} & {*judging}
    assert {*last_samples(total)} <= {*judging}


@given(st.sets(st.integers(0, 127), min_size=1))
def test_samples_are_found_by_number_in_any_batches(numbers: set[int]) -> None:
    for batches in (DATA, [ORDERED]):
        found = Batches(batches, ["x"]).at(sorted(numbers))
        assert torch.equal(found.inputs[0], ORDERED[sorted(numbers)])


def test_layers_are_corrected_on_samples_from_all_over_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[FloatLayers] = []

    class Watched(FloatLayers):
        def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
            seen.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(correcting, "FloatLayers", Watched)
    hago.quantize(Uneven().eval(), "x86_vnni", DATA, corrections=["rounding"], fix_bits={"*.weight": 5})
    (taken,) = {tuple(real.numbers) for real in seen}
    assert list(taken) == spread_samples(128, 64)
    for real in seen:
        assert torch.equal(torch.cat([x for (x,) in real.parts]), ORDERED[list(taken)])


def test_corrections_are_no_worse_where_data_is_in_an_order() -> None:
    """Samples of two kinds, each in a plane of its own, one kind after the other."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16)).eval()
    planes = torch.randn(2, 6, 64)

    def kinds(first: int, second: int) -> torch.Tensor:
        return torch.cat([torch.randn(first, 6) @ planes[0], torch.randn(second, 6) @ planes[1]])

    ordered, others = kinds(72, 56), kinds(256, 256)
    mixed = ordered[torch.randperm(128, generator=torch.Generator().manual_seed(0))]

    def unseen(data: torch.Tensor, corrections: str) -> float:
        found = hago.quantize(model, "x86_vnni", [data], corrections=corrections, fix_bits={"*.weight": 4})
        results = hago.evaluate_strategy(model, "x86_vnni", found.strategy, [others]).results
        return float(results["sqnr"])

    gained = unseen(mixed, "rounding") - unseen(mixed, "none")
    assert gained > 2.0
    assert unseen(ordered, "rounding") - unseen(ordered, "none") > gained - 0.5


@pytest.mark.parametrize("sizes", [(24,), (16, 8), (7, 17)])
def test_samples_may_be_along_another_axis(sizes: tuple[int, ...]) -> None:
    """Sequences first, as attention of PyTorch has them by default; 24 samples are differentiated in uneven parts."""
    torch.manual_seed(0)
    network = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=False)

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = network

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x.transpose(0, 1)).transpose(0, 1)
            return y

    model = Sequences().eval()
    found = hago.quantize(model, "x86_vnni", list(torch.randn(24, 5, 8).split(sizes)))
    assert hago.evaluate_strategy(model, "x86_vnni", found.strategy, [torch.randn(16, 5, 8)]).results["sqnr"] > 20.0
