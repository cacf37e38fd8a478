"""Models whose export on two samples computes something else on others are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn import functional

import hago
from hago.graph.frontend import export_check


class Of(nn.Module):
    """A function of the values between two layers."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.between = nn.Linear(8, 8), nn.Linear(8, 4), between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.between(self.a(x)))
        return out


def swapped(z: Tensor) -> Tensor:
    first, second = z.chunk(2, 0)
    return torch.cat([second, first], 0)


def guided(z: Tensor) -> Tensor:
    first, second = z.chunk(2)
    return torch.cat([first + 3.0 * (second - first)] * 2, 0)


REFUSED = {
    "halves that are swapped": (swapped, "output 0 of the model and of its export differ"),
    "halves that are joined": (guided, "output 0 of the model has shape"),
    "halves by size": (lambda z: z - torch.cat([z[z.shape[0] // 2 :], z[: z.shape[0] // 2]]), "single sample has not"),
    "pairs": (lambda z: z.view(-1, 2, 8).flip(1).reshape(-1, 8), "single sample has not"),
    "the mean of three": (lambda z: z - z[:3].mean(0), "output 0 of the model and of its export differ"),
    "len": (lambda z: z.view(len(z), 2, 4).transpose(1, 2).reshape(len(z), 8), "export of the model fails.*len"),
    "another sample": (lambda z: z - z[1], "on 1 sample, the export of the model fails"),
    "a loop": (lambda z: torch.stack([z[i] * 2.0 for i in range(len(z))]), "the export of the model fails|has shape"),
    "the number of samples": (lambda z: z * 2.0 if len(z) > 4 else z * 0.5, "of its export differ"),
    "a division": (lambda z: z / float(len(z) > 2), r"of its export differ \(-inf dB\)"),
    "dropout": (lambda z: functional.dropout(z, 0.5), "of its export differ"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("size", [16, 40])
def test_what_depends_on_the_batch_or_on_chance_is_refused(case: str, size: int) -> None:
    between, why = REFUSED[case]
    data = [torch.randn(size, 8, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    with pytest.raises(hago.HagoError, match=why):
        hago.quantize(Of(between).eval(), "x86_vnni", data)


def test_small_batches_are_repeated() -> None:
    data = [torch.randn(1, 8) for _ in range(8)]
    with pytest.raises(hago.HagoError, match="on 4 samples, output 0 of the model and of its export differ"):
        hago.quantize(Of(lambda z: z * 2.0 if len(z) > 3 else z * 0.5).eval(), "x86_vnni", data)


def test_small_differences_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(hago.HagoWarning, match=r"of its export differ a little \(3\d\.\d dB\)"):
        hago.quantize(Of(lambda z: z * (1.02 if len(z) > 4 else 1.0)).eval(), "x86_vnni", [torch.randn(64, 8)])
    for limit in ("REFUSED", "ALIKE"):  # the law bites
        monkeypatch.setattr(export_check, limit, -300.0)
    hago.quantize(Of(swapped).eval(), "x86_vnni", [torch.randn(16, 8)])


TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "one by one": torch.relu,
    "a mean over the batch": lambda z: z - 0.01 * z.mean(0),
    "reshapes with the batch": lambda z: z.view(z.shape[0], 2, 4).transpose(1, 2).reshape(z.size(0), 8),
    "squeezed": lambda z: z.unsqueeze(-1).squeeze(),
    "bfloat16": lambda z: z.bfloat16().float(),
    "classes": lambda z: z * (z.argmax(1, keepdim=True) == 0),
    "zeros": lambda z: z - z,
}


@pytest.mark.parametrize("case", TAKEN)
@pytest.mark.filterwarnings("ignore:hago has no rule")
def test_other_models_are_taken(case: str) -> None:
    hago.quantize(Of(TAKEN[case]).eval(), "x86_vnni", [torch.randn(16, 8)])


def test_autocast_in_a_model_is_taken() -> None:
    def cast(z: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.linear(z, torch.eye(8)).relu().float()

    hago.quantize(Of(cast).eval(), "x86_vnni", [torch.randn(16, 8)])


def test_operators_without_gradients_of_their_constants_are_taken() -> None:
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with pytest.warns(hago.HagoWarning, match="no rule"):
        quantizer = hago.quantize(model, "x86_vnni", [torch.randn(8, 3, 7, 7)])
    assert quantizer.strategy.made_by["passes"]


@pytest.mark.parametrize("axes", [(0, 2), (1,)])
def test_programs_with_other_open_axes_say_so(axes: Any) -> None:
    model, x = nn.Sequential(nn.ReLU()).eval(), torch.randn(4, 6, 8)
    program = export(model, (x,), dynamic_shapes=({axis: Dim(f"d{axis}", min=2, max=64) for axis in axes},))
    with pytest.raises(hago.HagoError, match=r"has the shape \(.*\?.*open along another axis than the first"):
        hago.quantize(program, "x86_vnni", [x])


def test_inference_mode_is_named() -> None:
    model, data = Of(torch.relu).eval(), torch.randn(16, 8)
    with torch.inference_mode(), pytest.raises(hago.HagoError, match="torch.inference_mode.* call hago outside it"):
        hago.quantize(model, "x86_vnni", [data])
    with torch.no_grad():
        hago.quantize(model, "x86_vnni", [data])


def test_infinite_outputs_of_a_model_are_not_compared() -> None:
    class Masked(Of):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.masked_fill(y.argmax(1, keepdim=True) == torch.arange(4), -torch.inf)

    hago.quantize(Masked(torch.relu).eval(), "x86_vnni", [torch.randn(16, 8)])
