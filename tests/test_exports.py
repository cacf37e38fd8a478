"""Equal networks are exported once in tests, and only equal ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exports import Exports, key_of
from networks import Small, Stream, Uneven, images, randomized
from torch import Tensor, nn
from torch.export import ExportedProgram

import hago
from hago.graph.frontend import exported_program


class Rolled(nn.Module):
    """Calls that are decomposed where they are traced again."""

    def __init__(self, shift: int = 1) -> None:
        super().__init__()
        self.layer, self.shift = nn.Conv2d(3, 4, 1), shift

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :, self.shift :] = x[:, :, : -self.shift]
        result: Tensor = self.layer(y)
        return result


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small": (lambda: randomized(Small()), (2, 1, 6, 6)),
    "stream": (lambda: randomized(Stream()), (2, 6, 12)),
    "decomposed": (lambda: randomized(Rolled()), (2, 3, 8, 8)),
}
PLAIN = (exported_program._export, exported_program._traced_again)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was exported or traced again, with exports of this test alone."""
    made: list[str] = []
    for plain in PLAIN:

        def counted(*args: Any, plain: Any = plain) -> Any:
            made.append(plain.__name__)
            return plain(*args)

        monkeypatch.setattr(exported_program, plain.__name__, counted)
    Exports().install(monkeypatch)
    return made


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_networks_are_exported_once_and_are_the_network(
    name: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = NETWORKS[name]
    imported = [hago.from_torch(make(), images(*shape)) for _ in range(3)]
    converted = [exported_program.Importer(exported(make(), shape)).converted for _ in range(2)]
    assert calls.count("_export") == 1 and calls.count("_traced_again") <= 2  # with composite calls and without
    for function in PLAIN:
        monkeypatch.setattr(exported_program, function.__name__, function)
    plain = hago.from_torch(make(), images(*shape))
    assert all(graph.model_hash == plain.model_hash and str(graph) == str(plain) for graph in imported)
    assert {*converted} == {exported_program.Importer(exported(make(), shape)).converted}


def exported(model: nn.Module, shape: tuple[int, ...]) -> ExportedProgram:
    return exported_program._export(model, (images(*shape),), None)


def test_others_are_exported_themselves(calls: list[str]) -> None:
    x, changed = images(2, 3, 8, 8), randomized(Uneven())
    others = [(randomized(Uneven(high=1.0)), x), (randomized(Uneven(), seed=1), x), (randomized(Uneven()), x[:, :, :6])]
    others += [(randomized(Rolled()), x), (randomized(Rolled(shift=2)), x), (changed, x)]
    hashes = {hago.from_torch(model, data).model_hash for model, data in others}
    with torch.no_grad():
        changed.get_submodule("head").bias[0] += 1.0
    hashes.add(hago.from_torch(changed, x).model_hash)
    assert len(hashes) == len(others) + 1 == calls.count("_export")


def test_a_program_does_not_change_with_the_model_that_it_was_exported_from(calls: list[str]) -> None:
    x, model = images(2, 3, 8, 8), randomized(Uneven())
    before = hago.from_torch(model, x).model_hash
    with torch.no_grad():
        model.get_submodule("head").weight.mul_(2.0)
    assert hago.from_torch(randomized(Uneven()), x).model_hash == before
    assert hago.from_torch(model, x).model_hash != before


def test_classes_of_a_test_have_no_key() -> None:
    class Local(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1.0

    x = images(2, 3)
    assert key_of(Local(), (x,), {}) is None
    assert key_of(nn.Linear(1024, 1024), (x,), {}) is None, "too large"
