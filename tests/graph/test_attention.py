"""Attention opened into products and a softmax: what torch computes, on chips that multiply integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from networks import images, randomized
from products import some
from specs import SHIPPED
from torch import Tensor, nn
from torch.nn import functional as F

import hago
from hago.arithmetic.equality import count_differing
from hago.errors import UnsupportedOp
from hago.export.onnx.engines import onnxruntime
from hago.export.onnx.export import make_onnx
from hago.export.onnx.verification import check_onnx
from hago.graph.execute import run_real
from hago.graph.frontend import Attention, from_torch
from hago.graph.graph import CONST, INPUT, Graph
from hago.graph.passes import open_attention as attention
from hago.hardware.hardware import Hardware, OpDesc
from hago.ops import OPS
from hago.runtime.exactness import compare_plan_exactly
from hago.search.preparation import prepare

WHOLE: Final = attention.ATTENTION
#: Heads, queries, keys, their width, and that of values.
H, L, S, E, V = 4, 3, 5, 8, 6


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph if n.op not in (INPUT, CONST)]


class Heads(nn.Module):
    """One call of attention with what a case says; masks of numbers have rows and entries of -inf."""

    def __init__(self, mask: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask, **self.options)


class Computed(nn.Module):
    """A mask of whatever is given, computed when the model runs: tokens that are padding."""

    def __init__(self, boolean: bool) -> None:
        super().__init__()
        self.boolean = boolean

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
        mask = (tokens > 0)[:, None, None]
        if not self.boolean:
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        return F.scaled_dot_product_attention(q, k, v, mask)


def let_through(*shape: int) -> Tensor:
    """Some of it, and in row 1 of matrices nothing."""
    found = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    found[..., 1:2, :] = False
    return found


def added(*shape: int) -> Tensor:
    """Numbers, and -inf where nothing is let through."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return numbers.masked_fill(~let_through(*shape), -math.inf)


def qkv(batch: int, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    return [3 * images(batch, *shape, seed=seed + i) for i, shape in enumerate((q, k, v))]


Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
PLAIN: Final[Shapes] = ((H, L, E), (H, S, E), (H, S, V))
SAME: Final[Shapes] = ((H, L, E), (H, S, E), (H, S, E))  # torch has a faster kernel where values are as wide
SHARED: Final[Shapes] = ((H, L, E), (2, S, E), (2, S, E))
#: By name: the model and the shapes that a sample of q, k and v has.
CASES: Final[Mapping[str, tuple[Callable[[], nn.Module], Shapes]]] = {
    "plain": (Heads, PLAIN),
    "values as wide": (Heads, SAME),
    "one head": (Heads, ((L, E), (S, E), (S, V))),
    "one key for all heads": (Heads, ((H, L, E), (1, S, E), (1, S, V))),
    "scale": (lambda: Heads(scale=0.3), PLAIN),
    "scale of 0": (lambda: Heads(scale=0.0), PLAIN),
    "causal": (lambda: Heads(is_causal=True), PLAIN),
    "causal, more queries": (lambda: Heads(is_causal=True), ((H, S, E), (H, L, E), (H, L, E))),
    "boolean mask": (lambda: Heads(let_through(1, 1, L, S)), PLAIN),
    "boolean mask, values as wide": (lambda: Heads(let_through(1, 1, L, S)), SAME),
    "boolean mask of heads": (lambda: Heads(let_through(H, L, S)), SAME),
    "mask of numbers": (lambda: Heads(added(1, 1, L, S)), PLAIN),
    "mask of numbers, values as wide": (lambda: Heads(added(1, H, L, S)), SAME),
    "mask of a matrix": (lambda: Heads(added(L, S)), SAME),
    "mask of keys": (lambda: Heads(let_through(1, 1, 1, S).logical_or(torch.arange(S) == 2)), SAME),
    "shared keys": (lambda: Heads(enable_gqa=True), SHARED),
    "shared keys, causal": (lambda: Heads(enable_gqa=True, is_causal=True), SHARED),
    "shared keys, mask": (lambda: Heads(added(1, 1, L, S), enable_gqa=True), SHARED),
    "shared keys, mask of a matrix": (lambda: Heads(let_through(L, S), enable_gqa=True), SHARED),
    "shared keys that are not shared": (lambda: Heads(enable_gqa=True), SAME),
}
#: Heads that are shared in ways that no batch of groups says.
LEFT_WHOLE: Final[Mapping[str, tuple[Callable[[], nn.Module], Shapes]]] = {
    "a mask of shared heads": (lambda: Heads(added(1, H, L, S), enable_gqa=True), SHARED),
    "keys and values shared otherwise": (lambda: Heads(enable_gqa=True), ((H, L, E), (2, S, E), (1, S, E))),
}


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (4, 128, 128), (3, 0), (0, 3)])
@pytest.mark.parametrize("hidden", ["nothing", "all of a row", "a row, not a number"])
def test_masked_softmax_has_the_bits_of_torch(shape: tuple[int, ...], hidden: str) -> None:
    x = images(1, *shape)[0]
    if hidden != "nothing":
        x[..., :1, :] = -math.inf if hidden == "all of a row" else math.nan
    expected = torch.ops.aten._safe_softmax.default(x, -1)
    with torch.no_grad():
        found = OPS["masked_softmax"].compute({"scale": 1.0, "is_causal": False}, x)
    assert count_differing(found, expected) == 0


def imported(make: Callable[[], nn.Module], shapes: Shapes) -> tuple[nn.Module, Graph]:
    model = make().eval()
    return model, from_torch(model, tuple(qkv(2, *shapes)))


def law(model: nn.Module, graph: Graph, inputs: list[Tensor]) -> None:
    """The opened graph gives what torch gives, up to the rounding of float32: an average of values, by weights that
    the rounding of scores changes by as many parts as the scores are large."""
    expected, (got,) = model(*inputs), run_real(graph, inputs)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    q, k, v = inputs[:3]
    largest = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) + 4
    assert float((got - expected).abs().max()) <= 8 * torch.finfo(torch.float32).eps * largest * float(v.abs().max())


@pytest.mark.parametrize(("make", "shapes"), CASES.values(), ids=list(CASES))
def test_it_is_what_torch_computes(make: Callable[[], nn.Module], shapes: Shapes) -> None:
    model, graph = imported(make, shapes)
    assert WHOLE not in ops(graph) and ops(graph).count("matmul") == 2 and "opaque" not in ops(graph)
    for batch in (1, 2, 3):
        law(model, graph, qkv(batch, *shapes, seed=10 * batch))


@pytest.mark.parametrize("boolean", [True, False])
def test_a_mask_that_is_computed(boolean: bool) -> None:
    model, tokens = Computed(boolean).eval(), torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    graph = from_torch(model, (*qkv(2, *SAME), tokens[:2]))
    assert WHOLE not in ops(graph)
    law(model, graph, [*qkv(3, *SAME, seed=5), tokens])


@pytest.mark.parametrize(("make", "shapes"), LEFT_WHOLE.values(), ids=list(LEFT_WHOLE))
def test_what_is_left_whole(make: Callable[[], nn.Module], shapes: Shapes) -> None:
    model, graph = imported(make, shapes)
    assert ops(graph) == [WHOLE]
    inputs = qkv(3, *shapes, seed=7)
    assert torch.equal(run_real(graph, inputs)[0], model(*inputs))


@pytest.mark.parametrize("wrong", [{"scale": 0.36}, {"is_causal": False}, {"axis": -2}], ids=["scale", "mask", "axis"])
def test_the_law_notices(wrong: dict[str, Any]) -> None:
    name = "causal" if "is_causal" in wrong else "plain"
    model, graph = imported(*CASES[name])
    broken = tuple(replace(n, attrs={**n.attrs, **wrong}) if "softmax" in n.op else n for n in graph)
    inputs = qkv(2, *CASES[name][1], seed=3)
    law(model, graph, inputs)
    with pytest.raises(AssertionError):
        law(model, graph.with_nodes(broken), inputs)


# ---------------------------------------------------------------- names
class Block(nn.Module):
    """A block of a transformer whose keys are shared by two heads each where `groups` says so."""

    def __init__(self, mask: Tensor | None = None, groups: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.groups, self.causal = groups, causal
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 8 * groups), nn.Linear(16, 3)
        randomized(self)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.groups, 4)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.causal, enable_gqa=self.groups != 4)
        return self.out(y.transpose(1, 2).flatten(2))


def test_names_are_that_of_the_attention_and_a_word() -> None:
    model = nn.Sequential(Block()).eval()
    whole = from_torch(model, (images(2, 5, 16),), attention="whole")
    graph = from_torch(model, (images(2, 5, 16),))
    (name,) = (n.name for n in whole if n.op == WHOLE)
    assert [n.name for n in graph if n.name not in whole.by_name] == [
        f"{name}.keys_transposed", f"{name}.scores", f"{name}.probabilities"
    ]  # fmt: skip
    assert name == "0.scaled_dot_product_attention" and graph[name].op == "matmul"
    # nothing else changes
    assert [n for n in graph if n.name in whole.by_name and n.name != name] == [n for n in whole if n.name != name]


def test_a_name_that_is_taken() -> None:
    class Taken(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    whole = from_torch(Taken().eval(), qkv(2, *PLAIN), attention="whole")
    nodes = [replace(n, name=f"{WHOLE}.scores") if n.name == "q" else n for n in whole]
    nodes = [replace(n, inputs=tuple(f"{WHOLE}.scores" if s == "q" else s for s in n.inputs)) for n in nodes]
    taken = Graph(tuple(nodes), (f"{WHOLE}.scores", "k", "v"), whole.outputs)
    graph = attention.open_attention(taken, {})
    assert f"{WHOLE}.scores_" in graph.by_name and graph[WHOLE].op == "matmul"


# ---------------------------------------------------------------- on chips
BLOCKS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "plain": Block,
    "boolean mask": lambda: Block(let_through(5, 5).fill_diagonal_(True)),
    "mask of numbers": lambda: Block(added(4, 5, 5)),
    "groups, causal": lambda: Block(groups=2, causal=True),
}


@pytest.mark.parametrize(("chip", "block"), some(4, sorted(SHIPPED), sorted(BLOCKS)))
def test_simulator_and_integers_agree(chip: str, block: str) -> None:
    made = prepare(BLOCKS[block]().eval(), SHIPPED[chip], [images(4, 5, 16)])
    plan = made.resolver(made.space.widest())
    found = compare_plan_exactly(plan, [images(3, 5, 16, seed=4)])
    assert found.same, found.differences
    products = [n.name for n in plan.graph if n.op == "matmul"]
    if SHIPPED[chip].integer_descs("matmul"):
        assert len(products) == 2 and set(products) <= plan.nodes.keys()
    else:
        assert WHOLE in ops(plan.graph) and not products


@pytest.mark.parametrize(("block", "form"), some(2, sorted(BLOCKS), ["qdq", "qoperator"]))
def test_onnx(block: str, form: str) -> None:
    pytest.importorskip("onnxruntime")
    made = prepare(BLOCKS[block]().eval(), "onnxruntime_cpu", [images(4, 5, 16)])
    plan = made.resolver(made.space.widest())
    found = check_onnx(make_onnx(plan, form), plan, [[images(3, 5, 16, seed=4)]])  # type: ignore[arg-type]
    assert found.differing <= found.compared // 100


@pytest.mark.parametrize("mask", [let_through(L, S), added(L, S)], ids=["boolean", "numbers"])
@pytest.mark.parametrize("how", ["whole", "opened"])
def test_rows_of_which_nothing_is_let_through_are_0_in_onnx_too(how: Attention, mask: Tensor) -> None:
    pytest.importorskip("onnxruntime")
    inputs = qkv(3, *SAME)
    graph = from_torch(Heads(mask).eval(), inputs, attention=how)
    made = prepare(graph, "onnxruntime_cpu", [tuple(inputs)])
    feed = {name: value.numpy() for name, value in zip(graph.inputs, inputs, strict=True)}
    plan = made.resolver(made.space.widest())
    (found,) = onnxruntime(make_onnx(plan).model, threads=1)(feed).values()
    assert np.isfinite(found).all() and not found[..., 1, :].any() and found[..., 0, :].any()


def strict(**listed: list[OpDesc]) -> Hardware:
    """A chip that refuses all that it does not list."""
    real, mac = OpDesc("float32", "float32"), OpDesc(["int8", "int8", "int32"], "int32")
    moved = {op: [real, OpDesc("int8", "int8")] for op in ("reshape", "permute", "slice")}
    return Hardware({"linear": [mac], **moved, **listed}, name="strict", other_ops="reject")


REAL: Final = [OpDesc("float32", "float32")]
MATMUL: Final = {"matmul": [OpDesc(["int8", "int8"], "int32")]}


@pytest.mark.parametrize(
    ("listed", "opened"),
    [
        ({WHOLE: REAL}, False),
        ({WHOLE: REAL, **MATMUL}, False),
        ({WHOLE: REAL, "softmax": REAL, **MATMUL}, False),
        ({WHOLE: REAL, "softmax": REAL, "masked_softmax": REAL, **MATMUL}, True),
        ({"softmax": REAL, **MATMUL}, True),
    ],
    ids=["whole", "no softmax", "no masked softmax", "all", "no attention"],
)
def test_a_chip_that_refuses_what_it_does_not_list(listed: dict[str, list[OpDesc]], opened: bool) -> None:
    """Attention is opened where the chip takes what it is opened into, and what ran goes on running."""
    found = hago.quantize(Block().eval(), strict(**listed), [images(4, 5, 16)])
    assert (WHOLE not in ops(found.plan.graph)) == opened


class SharedHeads(nn.Module):
    """Attention that shares keys, then attention that does not; no call of its own has the ops of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(E, E)
        randomized(self)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = self.fc(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        return F.scaled_dot_product_attention(y, y, y)


@pytest.mark.parametrize(
    ("moved", "whole"),
    [((), 1), (("reshape",), 1), (("unsqueeze",), 1), (("reshape", "unsqueeze"), 0)],
    ids=["neither", "no unsqueeze", "no reshape", "both"],
)
def test_a_chip_that_refuses_the_ops_of_groups(moved: tuple[str, ...], whole: int) -> None:
    """Attention with shared heads is left whole; all other attention is opened."""
    listed = dict.fromkeys((WHOLE, "softmax", "masked_softmax", "permute", *moved), REAL)
    chip = replace(strict(), ops={"linear": strict().ops["linear"], **MATMUL, **listed})
    found = hago.quantize(SharedHeads().eval(), chip, [tuple(qkv(4, *SHARED))])
    assert (ops(found.plan.graph).count(WHOLE), ops(found.plan.graph).count("matmul")) == (whole, 4 - 2 * whole)


def test_a_chip_that_takes_attention_in_no_way() -> None:
    with pytest.raises(UnsupportedOp, match=WHOLE):
        hago.quantize(Block().eval(), strict(), [images(4, 5, 16)])
