"""Sensitivity: squared gradients that can be worked out by hand, laws, and predictions against measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from building import Builder, residual_block, seeded
from torch import Tensor, nn

from hago.arithmetic.types import INT8, INT32, Edge, QParams
from hago.data.batches import Batch, Batches
from hago.errors import DataError, HagoError
from hago.hardware.file import available_hardware
from hago.plan.feasibility import point_at_choice
from hago.search import sensitivity
from hago.search.evaluate import Evaluator
from hago.search.gradients import GRADIENT_CHUNK, Spectrum, gradients
from hago.search.objective import cross_entropy_probe, divergence_probe, named_objective, squared_error_probe
from hago.search.preparation import Prepared, prepare
from hago.search.sensitivity import Sensitivity, sensitivity_of, spectrum_loss

DATA = [(seeded(8, 3, 8, 8, seed=s), torch.arange(8) % 5) for s in range(2)]


@pytest.fixture(scope="module", params=available_hardware())
def prepared(request: pytest.FixtureRequest) -> Prepared:
    return prepare(residual_block(), request.param, DATA)


def no_errors(edge: Edge) -> list[Tensor]:
    return []


def test_spectra_of_values_without_a_choice_of_bits_change_no_loss(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = named_objective("sqnr")
    found, few = sensitivity_of(prepared, objective).losses, len(sensitivity._ranges_of_choices(prepared))
    monkeypatch.setattr(sensitivity, "_ranges_of_choices", lambda of: of.calibration.counted_ranges)
    assert few < len(prepared.calibration.counted_ranges)
    assert sensitivity_of(prepared, objective).losses == found
    monkeypatch.setattr(sensitivity, "_ranges_of_choices", lambda of: {})
    of_values = any(group.source not in prepared.graph.consts for group in prepared.space.groups.values())
    assert (sensitivity_of(prepared, objective).losses != found) == of_values  # the law bites where there are any


# ---------------------------------------------------------------- by hand
def scaled_by(*factors: float) -> Builder:
    b = Builder()
    b.linear(b.input(len(factors), name="x"), torch.diag(torch.tensor(factors, dtype=torch.float32)), name="fc")
    return b


def test_squared_gradients_of_a_diagonal_matrix() -> None:
    x = torch.tensor([[0.5, -1.0, 0.0], [0.25, 1.0, -0.5]])
    found = gradients(
        scaled_by(1, 2, 4).graph(),
        [Batch((x,), None)],
        {"x": (-1.0, 1.0), "fc": (-2.0, 2.0)},
        squared_error_probe,
        no_errors,
    )
    spectrum = found.spectra[Edge("fc", 0)]
    # g is sqrt(2) w whatever the sign; the zero is left out
    assert float(spectrum.mass.sum()) == pytest.approx(2 * (1 + 4 + 1 + 4 + 16))
    assert float(spectrum.mass[int((0.5 + 1) / spectrum.width)]) == pytest.approx(2)
    assert found.samples == 2 and found.signal == pytest.approx(0.25 + 4 + 0.0625 + 4 + 4)
    assert float(found.spectra[Edge("output", 0)].mass.sum()) == pytest.approx(2 * 5)


def test_squared_gradients_of_weights() -> None:
    b = Builder()
    b.linear(b.input(3, name="x"), seeded(2, 3, seed=1), name="fc")
    x, errors = torch.tensor([[0.5, -1.0, 2.0]]), [seeded(2, 3, seed=s, size=0.01) for s in (2, 3)]
    found = gradients(b.graph(), [Batch((x,), None)], {"x": (-1.0, 2.0)}, squared_error_probe, lambda edge: errors)
    # with one sample the squared error of the outputs, exactly
    wanted = [2 * float((x @ e.T).square().sum()) for e in errors]
    assert found.weights[Edge("fc", 1)] == pytest.approx(wanted)


@pytest.mark.parametrize("probe", [divergence_probe, cross_entropy_probe, squared_error_probe])
def test_probes_have_the_second_moments_they_say(probe) -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0]])
    p = logits.softmax(1).double().squeeze()
    wanted = {
        divergence_probe: torch.diag(p) - torch.outer(p, p),
        cross_entropy_probe: torch.outer(p - torch.tensor([0, 1, 0]), p - torch.tensor([0, 1, 0])),
        squared_error_probe: 2 * torch.eye(3, dtype=torch.float64),
    }[probe]
    generator = torch.Generator().manual_seed(0)
    drawn = [probe([logits], torch.tensor([1]), generator)[0].double().squeeze() for _ in range(4000)]
    found = torch.stack([torch.outer(v, v) for v in drawn]).mean(0)
    assert torch.allclose(found, wanted, atol=0.1)
    assert abs(float(torch.stack(drawn).mean(0).abs().max())) < 0.1


@pytest.mark.parametrize(("bits", "clip"), [(4, 2.0), (8, 2.0), (4, 0.7), (6, 0.4), (16, 2.0)])
def test_the_loss_of_a_grid_is_its_squared_error(bits: int, clip: float) -> None:
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(20000, generator=generator).clamp(-2, 2) * 0.5
    g = torch.rand(20000, generator=generator)
    spectrum = Spectrum(float(x.min()), float(x.max()))
    for part in range(4):
        spectrum.add(x[part::4], g[part::4])
    top = 2 ** (bits - 1) - 1
    dtype = INT8 if bits <= 8 else INT32
    scale = torch.tensor(clip / 2 ** (bits - 1), dtype=torch.float64)
    grid = QParams(scale, torch.zeros((), dtype=torch.int64), -top, top, dtype)
    error = torch.round(x.double() / scale).clamp(-top, top) * scale - x
    assert spectrum_loss(spectrum, grid) == pytest.approx(float((g.double().square() * error.square()).sum()), rel=0.05)


# ---------------------------------------------------------------- laws
@pytest.mark.parametrize("name", ["sqnr", "agreement", "accuracy"])
def test_every_choice_has_a_loss_that_fewer_bits_never_lower(prepared: Prepared, name: str) -> None:
    found = sensitivity_of(prepared, named_objective(name))
    groups = prepared.space.groups
    assert found.losses.keys() == groups.keys() and found.samples == 16 and not found.unreached
    for key, by in found.losses.items():
        losses = [by[bits] for bits in groups[key].choices]
        assert losses == sorted(losses) and all(math.isfinite(x) and x >= 0 for x in losses) and losses[-1] > 0
    assert found.loss(prepared.space.widest()) < found.loss(prepared.space.narrowest())


def test_the_same_seed_gives_the_same_losses_and_batches_do_not_matter(prepared: Prepared) -> None:
    sqnr = named_objective("sqnr")
    first = sensitivity_of(prepared, sqnr)
    assert sensitivity_of(prepared, sqnr) == first
    assert sensitivity_of(prepared, sqnr, seed=1) != first
    x = torch.cat([x for x, _ in DATA])
    whole = gradients(
        prepared.graph, Batches([x], prepared.graph.inputs), prepared.calibration.ranges, squared_error_probe, no_errors
    )
    halves = gradients(prepared.graph, prepared.batches, prepared.calibration.ranges, squared_error_probe, no_errors)
    assert GRADIENT_CHUNK == 16 and whole.samples == halves.samples
    a, b = (float(s.spectra[Edge("fc", 0)].mass.sum()) for s in (whole, halves))
    assert a == pytest.approx(b, rel=0.5)


def test_nothing_is_left_behind() -> None:
    prepared = prepare(residual_block(), "vta", DATA)
    sensitivity_of(prepared, named_objective("sqnr"))
    assert not any(t.requires_grad or t.grad is not None for t in prepared.graph.consts.values())


@pytest.mark.parametrize("hardware", ["x86_vnni", "arm_dot"])
def test_it_predicts_the_noise(hardware: str) -> None:
    prepared = prepare(residual_block(), hardware, DATA)
    sqnr = named_objective("sqnr")
    found = sensitivity_of(prepared, sqnr)
    evaluator = Evaluator(prepared.graph, prepared.batches, sqnr)
    for rung in (0, 1, 2):
        bits = point_at_choice(prepared.space, rung)
        predicted = found.predicted(bits)
        assert predicted is not None
        assert abs(predicted - evaluator.score(prepared.resolver(bits), bits).value) < 6.0


# ---------------------------------------------------------------- the rest
class Rounding(nn.Module):
    """Nothing before the rounding has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.round(self.first(x)))


def test_what_no_gradient_reaches_is_said() -> None:
    torch.manual_seed(0)
    found = sensitivity_of(prepare(Rounding().eval(), "x86_vnni", [torch.randn(8, 4)]), named_objective("sqnr"))
    assert found.unreached == ("first:0", "first:1")
    assert found.losses["first:0"][4] > found.losses["first:0"][8] > 0
    assert "no gradient" in str(found)


def test_labels_are_needed_for_accuracy() -> None:
    prepared = prepare(residual_block(), "vta", [DATA[0][0]])
    with pytest.raises(DataError, match="labels"):
        sensitivity_of(prepared, named_objective("accuracy"))


def test_it_is_saved_as_json(tmp_path: Path) -> None:
    found = Sensitivity("sqnr", "squared error", 3, {"a:0": {8: 0.25, 4: 0.5}, "b:0": {8: 2.0}})
    found.save(tmp_path / "s.json")
    record = json.loads((tmp_path / "s.json").read_text())
    assert record["losses"] == {"a:0": {"8": 0.25, "4": 0.5}, "b:0": {"8": 2.0}} and record["version"] == 1
    assert str(found).index("b:0") < str(found).index("a:0")
    assert found.loss({"a:0": 4, "b:0": 8, "c:0": 1}) == 2.5
    with pytest.raises(HagoError, match="cannot write"):
        found.save(tmp_path / "nowhere" / "s.json")
