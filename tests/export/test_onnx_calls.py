"""ONNX files of ATen calls without an op of hago: sizes, indices and conditions, run at another batch size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from networks import images, randomized
from ops.laws import check_dtypes
from torch import Tensor, nn
from torch.nn import functional as F

from hago.errors import HagoError
from hago.export.onnx.engines import onnxruntime
from hago.export.onnx.export import FORMS, make_onnx
from hago.export.onnx.operators import ATEN_CALLS
from hago.export.onnx.verification import check_onnx
from hago.graph.execute import run_real
from hago.graph.frontend import from_torch
from hago.graph.frontend.exported_program import Importer
from hago.graph.graph import Graph
from hago.hardware.file import load_hardware
from hago.ops import OPS
from hago.plan.plan import Plan
from hago.search.preparation import prepare

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

CHIP: Final = load_hardware("onnxruntime_cpu")


class Fn(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, fn: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


def rows(x: Tensor) -> Tensor:
    """Integer indices from 0 to 3, two per row."""
    return (x > 0).cumsum(1)[:, :2] - 1


#: Functions of images with 4 channels of 4 by 5 values.
CALLS: Final[dict[str, Callable[[Tensor], Any]]] = {
    "sizes": lambda x: x.reshape(x.shape[0] * 2, -1, 5).repeat(1, 2, 1) + torch.zeros(x.shape[0] * 2, 1, 1),
    "a token": lambda x: torch.cat([torch.ones(1, 1, 4, 5).expand(x.shape[0], -1, -1, -1), x], 1),
    "pairs": lambda x: (x[None] * x[:, None]).reshape(x.shape[0], x.shape[0] * 4, 20),
    "more axes": lambda x: x.repeat(2, 1, 1, 1, 1),
    "sizes subtracted": lambda x: torch.ones(x.shape[0] + 2 - 1, 4) * x.shape[0],
    "halves": lambda x: x.flatten(1).reshape(x.shape[0] * 4 // 2, 40),
    "filled": lambda x: x + torch.full((x.shape[0], 1, 1, 1), 0.5) + x.new_zeros(x.shape[0], 1, 4, 1),
    "filled as it is": lambda x: x + x.new_ones(x.shape[0], 1, 1, 1) + x.new_full((x.shape[0], 4, 1, 1), 2.5),
    "ranges": lambda x: (torch.arange(x.shape[0]), torch.arange(x.shape[0], x.shape[0] * 3, x.shape[0])),
    "ranges from one": lambda x: x.sum(1) * torch.arange(1, x.shape[0] + 1)[:, None, None],
    "roots": lambda x: ((x.abs() + 1).rsqrt(), (x.abs() + 1).sqrt().reciprocal().log()),
    "waves": lambda x: x.sin() + x.cos() + x.erf() + x.exp(),
    "steps": lambda x: (x.floor(), x.ceil(), (x * 2).round(), x.sign()),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1) + torch.linalg.vector_norm(x, 1, dim=(1,)),
    "powers": lambda x: x.abs() ** 1.5,
    "soft": lambda x: F.softplus(x) + F.mish(x),
    "fused product": lambda x: torch.addcmul(x, x, x),
    "the larger": lambda x: torch.maximum(x, -x) + torch.minimum(x, x * x),
    "indices": lambda x: (rows(x) * 2 + 1, rows(x) - rows(x) * 3, torch.add(rows(x), rows(x))),
    "compared with numbers": lambda x: (x == 0, x != 0, x < 0, x <= 0.5, x > 0, x >= 1),
    "compared": lambda x: (x == -x, x != -x, x < -x, x <= -x, x > -x, x >= -x),
    "whole and real": lambda x: (rows(x) > 0.5, rows(x)[:, :1, :1] >= x[:, :1, :1], rows(x) == 1),
    "conditions": lambda x: ((x > 0) & (x < 1)) | ~(x > -1),
    "logic": lambda x: torch.logical_or(torch.logical_and(x > 0, x < 1), torch.logical_not(x > -1)),
    "conditions compared": lambda x: (x > 0) == (x < 1),
    "where": lambda x: torch.where(x > 0, x, -x) + torch.where(x > 0, x, 2.0) + torch.where(x > 0, 1.0, x),
    "where numbers": lambda x: torch.where(x > 0, 1.0, 2.0),
    "masked": lambda x: x.masked_fill(x > 0, -9.0),
    "logarithms of shares": lambda x: x.log_softmax(1) + torch.nn.functional.log_softmax(x, -1),
    "counted": lambda x: (x > 0).cumsum(1) + x.cumsum(2).cumsum(1),
    "gathered": lambda x: x.gather(2, torch.where(rows(x) < 0, 0, rows(x))),
    "indexed": lambda x: x[torch.arange(x.shape[0])[:, None], torch.arange(2)[None]],
    "rolled": lambda x: torch.roll(x, (-1, 2), (2, 3)) + torch.roll(x, (3,), (1,)) + torch.roll(x, 0, 1),
    "differences": lambda x: (x.diff(dim=2), x.diff(dim=1, prepend=x[:, :1]), (x > 0).cumsum(1).diff(dim=1)),
    "as another": lambda x: (x > 0).cumsum(1).type_as(x),
    "copied": lambda x: torch.ops.aten.alias(x.clone(memory_format=torch.contiguous_format)) + 1,
}


#: Targets that the functions above do not use: older ones, and those of programs that were traced in other ways.
UNTRIED: Final = {
    *(f"aten.{n}.default" for n in ("_unsafe_view", "alias", "clone", "reshape")),
    *(f"aten.bitwise_{n}.Tensor" for n in ("and", "or")),
}


@functools.cache
def imported(fn: Callable[[Tensor], Any]) -> Graph:
    return from_torch(Fn(fn).eval(), (images(2, 4, 4, 5),))


@functools.cache
def imported_unconverted(fn: Callable[[Tensor], Any]) -> Graph:
    """The graph as strategies of the first version have it, with composite calls not converted."""
    program = torch.export.export(Fn(fn).eval(), (images(2, 4, 4, 5),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    return Importer(program, converts=False).run()


def export(graph: Graph, form: str = "qdq") -> Any:
    return make_onnx(Plan(graph, CHIP, OPS, {}, dict.fromkeys(graph.edges)), form).model


@pytest.mark.parametrize("unconverted", [False, True])
@pytest.mark.parametrize("fn", CALLS.values(), ids=list(CALLS))
def test_calls(fn: Callable[[Tensor], Any], unconverted: bool) -> None:
    graph, x = imported_unconverted(fn) if unconverted else imported(fn), images(3, 4, 4, 5, seed=3)
    theirs = list(onnxruntime(export(graph), threads=1)({graph.inputs[0]: x.numpy()}).values())
    ours = run_real(graph, [x])
    check_dtypes(graph, [x])
    for mine, other in zip(ours, theirs, strict=True):
        assert other.dtype == mine.numpy().dtype
        np.testing.assert_allclose(other, mine.numpy(), rtol=2e-5, atol=2e-5)


def test_every_call_is_tried() -> None:
    known = set(ATEN_CALLS)
    graphs = [make(fn) for fn in CALLS.values() for make in (imported, imported_unconverted)]
    tried = {n.attrs["target"] for graph in graphs for n in graph if n.op == "opaque"}
    # other overloads of calls that are tried, or calls that torch.export writes as these
    spelled = {t for t in known if t.rpartition(".")[0] in {u.rpartition(".")[0] for u in tried}}
    assert known - spelled == UNTRIED


#: Functions with calls that ONNX cannot express, and what the reason names.
REFUSED: Final[dict[str, tuple[Callable[[Tensor], Any], str]]] = {
    "a flat roll": (lambda x: torch.roll(x, 1), "ONNX has no op for a roll of the flattened tensor"),
    "a number to a power": (lambda x: 2.0**x, "does not know the call aten.pow.Scalar"),
    "bits": (lambda x: (x > 0).cumsum(1) & (x < 0).cumsum(1), "ONNX has no op for this arithmetic on bits"),
    "two axes": (lambda x: x[:, torch.arange(2), (x > 0).cumsum(1)[0, 0, 0, :2]], "this indexing"),
    "a second difference": (lambda x: x.diff(n=2), "this difference"),
    "a norm": (lambda x: torch.linalg.vector_norm(x, 3, dim=1), "a vector norm of order 3 over axes [1]"),
    "softplus": (lambda x: F.softplus(x, beta=2), "this softplus"),
    "a mean": (lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=2), "a divisor of its own"),
    "windows": (lambda x: F.adaptive_max_pool2d(x, 3), "no maximum over windows of different sizes"),
    "a size": (lambda x: (x, x.shape[0]), "is returned and no tensor"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_onnx_cannot_express_are_refused_before_anything_is_written(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, says = REFUSED[name]
    monkeypatch.setattr("hago.export.onnx.export.ModelBuilder", None)
    with pytest.raises(HagoError) as caught:
        export(imported(fn), form)
    assert says in str(caught.value) and f"ONNX in {form} form cannot express this strategy" in str(caught.value)
    assert "What helps" not in str(caught.value)  # no other chip has the call either


# ---------------------------------------------------------------- networks
class Attention(nn.Module):
    """Multi-head attention with a computed mask, in which the batch is temporarily the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        masked = (places[None] > places[:, None])[None, None] & x.new_ones(x.shape[0], 1, 1, 1, dtype=torch.bool)
        x, _ = self.attention(x, x, x, need_weights=True)
        return self.last(F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], ~masked)[:, 0])


class Enlarged(nn.Module):
    """A convolution before and after an interpolation to a given size."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.first, self.last = mode, nn.Conv2d(4, 8, 3), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.interpolate(self.first(x), size=x.shape[-2:], mode=self.mode))


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
@pytest.mark.parametrize(
    ("network", "shape"),
    [(Attention(), (5, 8)), (Enlarged("bilinear"), (4, 8, 6)), (Enlarged("nearest"), (4, 8, 6))],
    ids=["attention", "bilinear", "nearest"],
)
def test_networks(network: nn.Module, shape: tuple[int, ...], form: str) -> None:
    prepared = prepare(randomized(network), CHIP, [images(2, *shape)])
    plan = prepared.resolver(prepared.space.widest())
    check_dtypes(plan.graph, [images(3, *shape)])
    result = check_onnx(make_onnx(plan, form), plan, [[images(3, *shape, seed=1)]])
    assert result.compared > 100 and result.differing == 0
