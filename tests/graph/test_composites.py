"""Calls that are short for several are read as these, and expansions that name the size of the batch as keeping it, so
that they run in integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import images, randomized
from products import some
from torch import Tensor, nn

import hago
from hago.graph.execute import run_real
from hago.graph.frontend import composites, from_torch
from hago.graph.frontend.exported_program import Importer
from hago.ops import OPS
from hago.runtime.exactness import compare_plan_exactly


def written(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 2:] = x[:, :2].relu()
    return x


CHIPS: Final = ("x86_vnni", "tflite", "vta", "onnxruntime_cpu")
#: Of real values (batch, 4, 6), by the call that they are short for.
CALLS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "aten.baddbmm.default": lambda x: torch.baddbmm(x[:, :, :1], x, x.transpose(1, 2), alpha=0.3),
    "aten.baddbmm.default scaled": lambda x: torch.baddbmm(x[:, :, :4], x, x.transpose(1, 2), beta=2),
    "aten.baddbmm.default alone": lambda x: torch.baddbmm(x[:, :, :1], x, x.transpose(1, 2), beta=0),
    "aten.addmm.default": lambda x: torch.addmm(x[:, 1], x[:, 0], torch.ones(6, 6).tril(), alpha=0.5),
    "aten.add.Tensor": lambda x: torch.add(x, x.relu(), alpha=2),
    "aten.sub.Tensor": lambda x: torch.sub(x, x.relu(), alpha=0.5),
    "aten.expand.default": lambda x: x[:, :1].expand_as(x),
    "aten.expand.default ahead": lambda x: x[:, :, None].expand(x.shape[0], 4, 3, 6).flatten(1, 2),
    "aten.addcmul.default": lambda x: torch.addcmul(torch.ones(6), x, torch.arange(1.0, 7), value=-0.5),
    "aten.addcmul.default alone": lambda x: torch.addcmul(x, x, x.relu()),
    "aten.einsum.default": lambda x: torch.einsum("bid,bjd->bij", x, x),
    "aten.einsum.default of groups": lambda x: torch.einsum("bgd,bhd->bdgh", x, x),
    "aten.einsum.default with a weight": lambda x: torch.einsum("dhk,bid->bihk", torch.arange(36.0).view(6, 3, 2), x),
    "aten.einsum.default of three": lambda x: torch.einsum("bid,bjd,bje->bie", x, x, x),
    "aten.einsum.default of rows": lambda x: torch.einsum("b i d, b i d -> b i", x, x),
    "aten.einsum.default of one": lambda x: torch.einsum("bid->bd", x),
    "aten.roll.default": lambda x: torch.roll(x, 1, 1),
    "aten.roll.default back": lambda x: torch.roll(x, (-2, 9), (1, -1)),
    "aten.roll.default once": lambda x: torch.roll(x, (4, 1), (1, 2)),
    "aten.slice_scatter.default": lambda x: torch.slice_scatter(x, x[:, :2].relu(), 1, 1, 3),
    "aten.slice_scatter.default from the front": lambda x: torch.slice_scatter(x, x[..., :2].relu(), -1, -9, 2),
    "aten.slice_scatter.default to the end": lambda x: written(x),
    "aten.copy.default": lambda x: torch.empty_like(x).copy_(x.relu()[:, :1]),
}
#: Calls that are read as they are, or that torch alone can run.
AS_THEY_ARE: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "linear": lambda x: torch.addmm(torch.ones(6), x[:, 0], torch.ones(6, 6).tril()),
    "add": lambda x: x + x.relu(),
    "diagonal": lambda x: torch.einsum("bii->bi", x[:, :, :4]),
    "einsum of the rest": lambda x: torch.einsum("...d->...", x),
    "roll of nothing": lambda x: torch.roll(x, (4, -6), (1, 2)),
    "roll of the batch": lambda x: torch.roll(x, 1, 0),
    "expansion to the batch": lambda x: x * torch.ones(1, 4, 6).expand(x.shape[0], 4, 6),
    "every second written": lambda x: torch.slice_scatter(x, x[:, :2].relu(), 1, 0, 4, 2),
}


class Net(nn.Module):
    """A layer before a call."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer(x))


def made(call: Callable[[Tensor], Tensor]) -> tuple[nn.Module, list[Tensor]]:
    """A network, and data."""
    return randomized(Net(call)), list(images(16, 4, 6).split(8))


def exported(model: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))


def test_every_composite_is_tested() -> None:
    names = {str(target) for target in composites._COMPOSITES}
    assert {name.split()[0] for name in CALLS} == {*names, "aten.expand.default"}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_torch_computes(name: str) -> None:
    model, (x, other) = made(CALLS[name])
    graph = from_torch(model, (x,))
    for inputs in (x, other, x[:3]):
        got = run_real(graph, [inputs])[0]
        with torch.no_grad():
            torch.testing.assert_close(got, model(inputs))


@given(st.lists(st.lists(st.sampled_from("abcd"), max_size=4, unique=True), min_size=1, max_size=3), st.data())
def test_einstein_sums(operands: list[list[str]], data: st.DataObject) -> None:
    letters = sorted({letter for axes in operands for letter in axes})
    result = data.draw(st.permutations(data.draw(st.lists(st.sampled_from(letters), unique=True)) if letters else []))
    equation = f"{','.join(''.join(axes) for axes in operands)}->{''.join(result)}"
    sizes = {letter: data.draw(st.integers(1, 3)) for letter in letters}
    tensors = [images(*(sizes[letter] for letter in axes), seed=i).double() for i, axes in enumerate(operands)]
    got = composites._einsum(equation, tensors)
    torch.testing.assert_close(got, torch.einsum(equation, tensors))


@pytest.mark.some_cases(14)
@pytest.mark.parametrize(("chip", "name"), some(2, CHIPS, CALLS))
def test_all_of_it_is_quantized(chip: str, name: str) -> None:
    model, data = made(CALLS[name])
    quantizer = hago.quantize(model, chip, data)
    plan = quantizer.plan
    assert compare_plan_exactly(plan, data[:1]).same
    assert [n.name for n in plan.graph if n.op not in ("input", "const") and n.name not in plan.nodes] == []


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_other_calls_are_left(name: str) -> None:
    model, (x, _) = made(AS_THEY_ARE[name])
    program = exported(model, x)
    importer = Importer(program)
    assert importer.run().model_hash == Importer(program, converts=False).run().model_hash
    assert not importer.converted


@pytest.mark.some_cases(10)
@pytest.mark.parametrize("name", CALLS)
def test_what_was_made_for_the_whole_call_applies(name: str) -> None:
    model, (x, _) = made(CALLS[name])
    whole = Importer(exported(model, x), converts=False).run()
    assert any(n.op not in OPS and n.op not in ("input", "const") for n in whole)
    assert from_torch(model, (x,)).model_hash != whole.model_hash
    assert from_torch(model, (x,), made_for=(whole.model_hash,)).model_hash == whole.model_hash
