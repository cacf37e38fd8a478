"""Import: what comes out of PyTorch models, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Small, images, randomized
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import hago
from hago.errors import DataError, GraphError
from hago.graph.execute import flatten_inputs, nest_outputs, run_real
from hago.graph.frontend import exported_program as exported
from hago.graph.frontend import exported_program as importer
from hago.graph.frontend import from_torch, tracing
from hago.graph.graph import CONST, INPUT, Graph
from hago.ops import OPS, parsers


def call(graph: Graph, *args: Any, **kwargs: Any) -> Any:
    """The graph as a function, called as the model is."""
    return nest_outputs(graph, run_real(graph, flatten_inputs(graph, args, kwargs)))


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph if n.op not in (INPUT, CONST)]


def names(graph: Graph) -> list[str]:
    return [n.name for n in graph if n.op not in (INPUT, CONST)]


class Fn(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, fn: Callable[[Tensor], Any], *parts: nn.Module) -> None:
        super().__init__()
        self.fn, self.parts = fn, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


def check(model: nn.Module, shape: Sequence[int], batches: Sequence[int] = (1, 2, 3, 4, 5)) -> Graph:
    """Import at batch 2 without folding or opening attention, and compare bit for bit at other batches."""
    graph = from_torch(model.eval(), (images(2, *shape),), fold=False, attention="whole")
    for batch in batches:
        x = images(batch, *shape, seed=batch)
        with torch.no_grad():  # with gradients, torch's LSTM of some CPUs differs in the last bit
            expected, got = model(x.clone()), call(graph, x)
        for e, g in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
            assert e.dtype == g.dtype and torch.equal(e, g)
    return graph


# ---------------------------------------------------------------- what is traced again
class Everyday(nn.Module):
    """Every call that is read without being traced again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.same, self.norm = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, padding="same"), nn.BatchNorm2d(8)
        self.line, self.plain = nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8, affine=False)
        self.drop, self.flat, self.linear = nn.Dropout(), nn.Flatten(), nn.Linear(144, 5)
        self.rows = nn.LayerNorm(8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x = self.drop(F.relu6(self.norm(self.conv(x))))
        x = F.hardtanh(F.pad(self.same(F.relu(x)), (1, 2, 0, 1))) * 2 + y
        x = torch.cat([F.leaky_relu(x), F.hardswish(x[:, 2:]), F.hardsigmoid(x[:, :2])], 1)[:, :8]
        x = F.avg_pool2d(F.max_pool2d(F.silu(x), 2, ceil_mode=True), 2, 1)
        lines = self.plain(self.line(torch.flatten(F.gelu(x), 2)))
        return (
            self.linear(self.flat(F.adaptive_avg_pool2d(torch.tanh(x), (3, 6)))),
            torch.sigmoid(lines).mean(2),
            F.adaptive_avg_pool2d(x, 1).flatten(1),
            torch.flatten(x, 0, 1),
            self.rows(x.permute(0, 2, 3, 1)),
        )


def indices(x: Tensor) -> Tensor:
    """Whole numbers from 0 to 3, one for each row of 4 x 6."""
    return (x[:, 0, :4] > 0).to(torch.int64).cumsum(1) - 1


def as_another(x: Tensor, other: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2).reshape_as(other) + x[:, :1].expand_as(other) * other


#: Functions of (n, 4, 6, 6) values, with the calls that are read as they are where all results are read.
FURTHER: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: F.layer_norm(x, (6,)),
    lambda x: F.group_norm(x, 2),
    lambda x: F.instance_norm(x),
    lambda x: torch.matmul(x, x),
    lambda x: torch.mm(x[0, 0], x[0, 1]),
    lambda x: torch.bmm(x[:, 0], x[:, 1]),
    lambda x: F.scaled_dot_product_attention(x, x, x),
    lambda x: (x.softmax(-1), F.log_softmax(x, -1)),
    lambda x: F.embedding(indices(x), torch.ones(4, 3)),
    lambda x: F.conv1d(x[:, 0], torch.ones(2, 6, 3), padding="same"),
    lambda x: F.conv3d(x[:, None], torch.ones(2, 1, 3, 3, 3)),
    lambda x: F.conv3d(x[:, None], torch.ones(2, 1, 3, 3, 3), padding="same"),
    lambda x: F.conv_transpose1d(x[:, 0], torch.ones(6, 2, 3)),
    lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 3, 3)),
    lambda x: (x - x * 2, 1 - x, x / (x * x + 1), -x, x.abs(), x.abs().sqrt(), (x * x + 1).rsqrt()),
    lambda x: ((x * x + 1).reciprocal(), x.exp(), (x * x + 1).log(), x.erf(), x.sin(), x.cos()),
    lambda x: (x.floor(), x.ceil(), x.round(), x.sign(), x**2, (x * x + 1) ** x),
    lambda x: (torch.maximum(x, -x), torch.minimum(x, -x), x.clamp(-1, 1), x.clamp_min(0), x.clamp_max(0)),
    lambda x: (F.elu(x), F.prelu(x, torch.ones(4)), F.softplus(x), F.mish(x)),
    lambda x: (x.sum(), x.sum(1), x.cumsum(1), torch.linalg.vector_norm(x, 2, 1), x.argmax(1), x.topk(2)),
    lambda x: (F.max_pool1d(x[:, 0], 2), F.avg_pool1d(x[:, 0], 2), F.adaptive_avg_pool1d(x[:, 0], 2)),
    lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True),
    lambda x: F.interpolate(x, scale_factor=2),
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    lambda x: (x.permute(0, 2, 3, 1), x.transpose(1, 2).contiguous(), x.view(x.shape[0], 24, 6), x.expand(-1, 4, 6, 6)),
    lambda x: (x.transpose(1, 2).reshape(x.shape[0], 24, 6), as_another(x, x * 3)),
    lambda x: (torch.div(x, 2, rounding_mode="floor"), 2.0**x),
    lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    lambda x: (x.unsqueeze(1).squeeze(1), x[:, :1].squeeze(1), x.unsqueeze(2).unsqueeze(1).squeeze((1, 3)), x[:, 1]),
    lambda x: torch.ones(1, 2, 1).squeeze() + x[..., :2],
    lambda x: (x.index_select(1, indices(x)[0, 0]), x[:, indices(x)[0, 0]], x[:, 0, :4].gather(1, indices(x))),
    lambda x: (torch.stack([x, -x], 1), x.repeat(1, 2, 1, 1), x.flip(1), F.pixel_shuffle(x, 2)),
    lambda x: (*x.unbind(1), *x.split([1, 3], 1), *x.chunk(4, -1), *x.chunk(3, 1)),
    lambda x: (x == 0, x == x.abs(), x != 0, x != x.abs(), x < 0, x < x.abs(), x <= 0, x <= x.abs()),
    lambda x: (x > 0, x > -x, x >= 0, x >= -x, ~(x > 0), (x > 0) & (x > 1), (x > 0) | (x < -1)),
    lambda x: (torch.logical_and(x > 0, x > 1), torch.logical_or(x > 0, x < -1), torch.logical_not(x > 0)),
    lambda x: (x.masked_fill(x > 0, 0.0), torch.where(x > 0, x, -x), torch.where(x > 0, x, 0.0)),
    lambda x: (torch.where(x > 0, 1.0, x), torch.where(x > 0, 1.0, 0.0), x[0, 0].tril()),
    lambda x: (torch.arange(x.shape[0]), torch.arange(1, x.shape[0] + 1), torch.arange(0, x.shape[0] * 2, 2)),
    lambda x: (torch.zeros(x.shape[0] * 3 // 2), torch.ones(x.shape[0] * 4 - 1), torch.full((x.shape[0] + 2,), 2.0)),
    lambda x: (x.new_zeros(x.shape[0]), x.new_ones(x.shape[0]), x.new_full((x.shape[0],), 2.0), (x > 0).type_as(x)),
)


class Further(nn.Module):
    """All of them in one program."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return pytree.tree_leaves([fn(x) for fn in FURTHER])


class InModules(nn.Module):
    """The same, each in a module of its own, whose path is the name of its only call."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(Fn(fn) for fn in FURTHER)

    def forward(self, x: Tensor) -> list[Tensor]:
        return pytree.tree_leaves([each(x) for each in self.each])


class Reshaped(nn.Module):
    """Modules of one call that gives another shape, to values that it copies and to others."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.first, self.last = nn.Flatten(), nn.Linear(4, 4), nn.Linear(24, 3)
        self.rows, self.like = Fn(lambda x: x.reshape(x.shape[0], 24)), Fn(lambda x: x.reshape(x.shape[0], 3, 2, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.first(x.transpose(1, 2))  # (n, 6, 4)
        turned = x.transpose(1, 2)
        return (
            self.last(self.flat(turned)),
            self.last(self.flat(x)),
            self.rows(turned),
            self.like(x),
            self.like(x[:, :, :1].expand(-1, -1, 4)),
        )


def check_traced_again(program: Any, monkeypatch: pytest.MonkeyPatch) -> Graph:
    """Compare a program as it is read with what it is read as once it is traced again."""
    read = from_torch(program)
    monkeypatch.setattr(importer, "reads_as_it_is", lambda program, known: False)
    traced = from_torch(program)
    assert (read.nodes, read.inputs, read.outputs) == (traced.nodes, traced.inputs, traced.outputs)
    assert read.consts.keys() == traced.consts.keys() and read.model_hash == traced.model_hash
    assert all(torch.equal(read.consts[name], const) for name, const in traced.consts.items())
    return read


def test_what_is_read_as_it_is_reads_as_it_does_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = randomized(Everyday()), (images(2, 4, 16, 18), images(2, 8, 15, 19))
    program = torch.export.export(model, inputs, dynamic_shapes=[{0: Dim.AUTO}, {0: Dim.AUTO}])
    calls = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    by_arguments = {"aten.batch_norm.default", "aten.flatten.using_ints"}
    assert calls == tracing._AS_THEY_ARE | by_arguments | {"aten.layer_norm.default", "aten.permute.default"}
    assert tracing.reads_as_it_is(program, calls)
    assert {"conv", "flat", "linear"} <= set(names(check_traced_again(program, monkeypatch)))


@pytest.mark.parametrize("model", [Further(), InModules()], ids=lambda m: type(m).__name__)
def test_more_is_read_as_it_is_where_all_is_read(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    program = torch.export.export(model, (images(2, 4, 6, 6),), dynamic_shapes=[{0: Dim.AUTO}])
    calls = {n.target for n in program.graph.nodes if n.op == "call_function"}
    assert (tracing._IF_ALL_IS_READ | tracing._BY_ARGUMENTS) - {str(call) for call in calls} == set()
    assert calls >= {*tracing._OF_PYTHON}
    assert tracing.reads_as_it_is(program, parsers(OPS).keys() | exported._IDENTITIES)
    check_traced_again(program, monkeypatch)


def test_a_reshape_that_copies_has_one_name_however_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    program = torch.export.export(Reshaped(), (images(2, 4, 6),), dynamic_shapes=[{0: Dim.AUTO}])
    assert tracing.reads_as_it_is(program, parsers(OPS).keys())
    found = names(check_traced_again(program, monkeypatch))
    assert {"flat.reshape", "rows.reshape"} <= set(found)


def test_a_batch_that_the_model_asks_for_is_fixed() -> None:
    def asks(x: Tensor) -> Tensor:
        x = x.transpose(1, 2).softmax(-1).reshape(x.shape[0], -1)
        return x * 2 if x.shape[0] == 2 else x * 3

    program = torch.export.export(Fn(asks), (images(2, 4, 6),), dynamic_shapes=[{0: Dim.AUTO}])
    assert not tracing.reads_as_it_is(program, parsers(OPS).keys())
    with pytest.raises(hago.HagoError, match=r"shape '\[2, 24\]' is invalid"):
        hago.quantize(program, "x86_vnni", [images(3, 4, 6)])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.relu_(x * 2),
        lambda x: x.chunk(2, 1)[1],  # nobody reads the other part
        lambda x: x.chunk(2)[0] + x.chunk(2)[1],  # of a number of samples that is open
        lambda x: torch.flatten(x, 1),  # which is flat
        lambda x: x.exp().to(torch.float32),
        lambda x: x[:, :1].expand_as(torch.exp(x)),  # of which only the sizes are read
        lambda x: x[:, 1:9].exp(),  # behind the last entry
        lambda x: F.batch_norm(x, None, None, training=True),
    ],
)
def test_what_is_not_is_traced_again(fn: Callable[[Tensor], Tensor]) -> None:
    program = torch.export.export(Fn(fn), (images(2, 4),), dynamic_shapes=[{0: Dim.AUTO}])
    calls = {str(n.target) for n in program.graph.nodes}
    assert not tracing.reads_as_it_is(program, calls)


def test_a_rule_that_reads_traced_calls_alone_is_given_them() -> None:
    spelled = ("aten._native_batch_norm_legit_no_training.default",)
    mine = {**OPS, "batch_norm": replace(OPS["batch_norm"], aten=spelled)}
    model, inputs = randomized(Small()), (images(2, 1, 6, 6),)
    assert from_torch(model, inputs, fold=False, ops=mine).nodes == from_torch(model, inputs, fold=False).nodes


def test_what_is_written_to_is_made_functional() -> None:
    def overwrite(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0] = 1.0
        return y.add_(x).relu_()

    check(Fn(overwrite), (3, 2))


# ---------------------------------------------------------------- names
def test_names_are_module_paths(golden: Callable[[str, str], None]) -> None:
    graph = from_torch(randomized(Small()), (images(2, 1, 6, 6),))
    golden("small.graph.txt", str(graph))
    assert names(graph) == ["stem.0", "stem.2", "body", "add", "relu", "mean", "fc"]
    assert set(graph.consts) == {f"{m}.{p}" for m in ("stem.0", "body", "fc") for p in ("weight", "bias")}


def test_a_module_that_is_called_twice() -> None:
    model = randomized(Twice())
    graph = check(model, (4,))
    assert names(graph)[:2] == ["fc", "fc_1"] or names(graph)[:2] == ["fc.linear", "fc.linear_1"]
    assert len(graph.consts) == 2 and graph["fc.weight"].op == CONST
    assert [graph[n].inputs[1] for n in names(graph)[:2]] == ["fc.weight", "fc.weight"]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(self.fc(x)))


def test_weights_that_are_shared_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)))

    graph = check(randomized(Tied()), (4,))
    assert len(graph.consts) == 1
    assert graph["a"].inputs[1] == graph["b"].inputs[1]


@pytest.mark.parametrize("name", ["output", "a:b"])
def test_a_shared_weight_whose_name_no_node_can_have(name: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.zeros(4, 4)))
            self.tied = getattr(self, name)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ getattr(self, name)) @ self.tied

    graph = check(randomized(Tied()), (4,))
    assert len(graph.consts) == 1
    assert graph["matmul"].inputs[1] == graph["matmul_1"].inputs[1]


def test_the_same_model_has_the_same_hash() -> None:
    model, x = randomized(Small()), (images(2, 1, 6, 6),)
    first, again = from_torch(model, x), from_torch(model, (images(5, 1, 6, 6, seed=3),))
    assert first.model_hash == again.model_hash
    assert from_torch(randomized(Small(), seed=1), x).model_hash != first.model_hash


# ---------------------------------------------------------------- arguments and results
def test_images_that_are_every_third_of_others() -> None:
    x = images(12, 1, 8, 8)
    graph, other = (from_torch(Small().eval(), (x,)) for x in (x[::3], x[:4].clone()))
    assert names(graph) == names(other) and call(graph, x[::3]).equal(call(graph, x[::3].contiguous()))


def test_nested_arguments_and_results() -> None:
    class Nested(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], named: dict[str, Tensor], scale: float = 2.0) -> Any:
            total = pair[0] + pair[1] * scale
            return {"total": total, "both": [named["mask"] * total, (named["mask"],)]}

    a, b, mask = images(2, 3), images(2, 3, seed=1), images(2, 3, seed=2)
    model = Nested().eval()
    graph = from_torch(model, ((a, b), {"mask": mask}), {"scale": 3.0})
    x = [images(4, 3, seed=s) for s in (5, 6, 7)]
    expected = model((x[0], x[1]), {"mask": x[2]}, scale=3.0)
    got = call(graph, (x[0], x[1]), {"mask": x[2]}, scale=3.0)
    assert got["total"].equal(expected["total"]) and got["both"][0].equal(expected["both"][0])
    assert isinstance(got["both"][1], tuple) and got["both"][1][0].equal(x[2])


def test_keyword_arguments() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor, *, c: Tensor) -> Tensor:
            return a - 2 * b + 4 * c

    a, b, c = images(2, 3), images(2, 3, seed=1), images(2, 3, seed=2)
    graph = from_torch(Two().eval(), (a,), {"c": c, "b": b})
    assert call(graph, a, b=b, c=c).equal(a - 2 * b + 4 * c)
    assert call(graph, a, c=c, b=b).equal(a - 2 * b + 4 * c)


def test_any_number_of_arguments() -> None:
    class Sum(nn.Module):
        def forward(self, *xs: Tensor) -> tuple[Tensor, Tensor]:
            return xs[0] + xs[1] + xs[2], xs[0]

    x = [images(3, 4, seed=s) for s in range(3)]
    graph = from_torch(Sum().eval(), tuple(x))
    total, first = call(graph, *x)
    assert total.equal(x[0] + x[1] + x[2]) and first is x[0]


def test_integer_inputs() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc = nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.fc(self.embed(ids).mean(1))

    model = randomized(Words())
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    graph = from_torch(model, (ids,))
    assert graph["ids"].attrs == {"dtype": "int64"}
    assert call(graph, ids[:1]).equal(model(ids[:1]))


# ---------------------------------------------------------------- what is taken out
INDICES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[torch.arange(x.shape[0]) * 1, (x[:, :, 0, 0] > 0).sum(1) // 2 + 1],
    "positions": lambda x: x.flatten(1).gather(1, ((x[:, 0, 0] > 0).cumsum(1) + 2).clamp(min=0, max=9)),
    "lengths": lambda x: (x > 0).flatten(1).sum(1) * 2 - 1,
    "mask": lambda x: x.masked_fill((torch.arange(x.shape[-1]) + 1 > 3) & (x.shape[0] > 0), -9.0),
}


@pytest.mark.parametrize("fn", INDICES.values(), ids=list(INDICES))
def test_arithmetic_on_indices_stays_whole(fn: Callable[[Tensor], Tensor]) -> None:
    """Numbers in it too: an index that had become a real number would index nothing."""
    assert not {"add", "sub", "mul", "clamp", "sum"} & set(ops(check(Fn(fn), (6, 4, 5))))


def test_what_does_nothing_in_eval_mode_is_gone() -> None:
    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x.clone().contiguous().detach(), 0.5, training=False)
        return torch.relu(nn.Identity()(y) + 0.5)

    graph = check(Fn(fn, nn.Dropout()), (3, 4))
    assert ops(graph) == ["add", "relu"]


def test_in_place_calls_become_plain_ones() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y.relu_()
        y += 1
        y.clamp_(max=3.0)
        return F.hardtanh(y, -1, 2, inplace=True)

    graph = check(Fn(fn), (3, 4))
    assert ops(graph) == ["mul", "relu", "add", "clamp", "clamp"]


def test_what_depends_on_constants_alone_is_computed_once() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(images(3, 4))
            self.register_buffer("order", torch.tensor([2, 0, 1]))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, (self.w * 2)[self.order].tanh())

    graph = check(Scaled(), (4,))
    assert ops(graph) == ["linear"] and len(graph.consts) == 1


def test_what_numbers_fill_is_computed_once() -> None:
    """Where the batch has no part in its size, and no chance in its values."""

    def fn(x: Tensor) -> Tensor:
        return x * (torch.arange(5) * 2 + x.new_full((5,), 3.0)) + x.new_zeros(4, 1).expand(4, 5)

    assert ops(check(Fn(fn), (4, 5))) == ["mul", "add"]
    assert "opaque" in ops(check(Fn(lambda x: x + x.new_ones(x.shape[0], 1, 1)), (4, 5)))
    drawn = from_torch(Fn(lambda x: x + torch.rand(5)).eval(), (images(2, 4, 5),))
    assert "opaque" in ops(drawn)


def test_a_whole_slice_is_no_node() -> None:
    assert ops(check(Fn(lambda x: torch.relu(x[:, :, :])[:, 0:4]), (4, 5))) == ["relu"]


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.reshape(x.shape[0], 2, -1).transpose(1, 2),
        lambda x: x.flatten(1).unsqueeze(1).expand(-1, 3, -1),
        lambda x: x.permute(0, 2, 3, 1).reshape(-1, 3),
        lambda x: x.reshape(x.shape[0] * 3, 16).relu().reshape(x.shape[0], 3, 16),
        lambda x: F.interpolate(x, scale_factor=2.0),
        lambda x: F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1),
        lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1)),
        lambda x: x.mean((2, 3)),
        lambda x: x - x.mean(0, keepdim=True),
    ],
)
def test_the_batch_stays_open(fn: Callable[[Tensor], Tensor]) -> None:
    check(Fn(fn), (3, 4, 4), batches=(2, 3, 5))


# ---------------------------------------------------------------- several results
@pytest.mark.parametrize(
    "fn, expected",
    [
        (lambda x: x.chunk(2, 1)[1] * x.chunk(2, 1)[0], ["slice", "slice", "mul"]),
        (
            lambda x: torch.cat([p.relu() for p in x.split([1, 2, 1], 1)][::-1], 1),
            ["slice"] * 3 + ["relu"] * 3 + ["concat"],
        ),
        (lambda x: torch.stack(x.unbind(1)[:2], 1), ["select", "select", "stack"]),
        (lambda x: F.max_pool1d(x, 2), ["max_pool1d"]),
    ],
)
def test_parts_of_a_tensor(fn: Callable[[Tensor], Tensor], expected: list[str]) -> None:
    found = ops(check(Fn(fn), (4, 6)))
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.cumsum(x, 1),
        lambda x: torch.topk(x, 2, dim=1),
        lambda x: torch.sort(x, dim=-1, descending=True),
        lambda x: torch.einsum("bcl,bdl->bcd", x, x),
        lambda x: torch.where(x > 0, x, x.exp()),
        lambda x: x.max(dim=1),
        lambda x: (x.argmax(1), x.std(1), x.norm(dim=1)),
        lambda x: F.softplus(x) * torch.arange(6.0),
        lambda x: F.max_pool1d(x, 2, return_indices=True),
        lambda x: torch.triu(x) + torch.ones_like(x) + torch.zeros(x.shape[0], 1, 1),
        lambda x: x.to(torch.float64).sum((1, 2)).float(),
    ],
)
def test_what_has_no_rule_runs_as_torch_runs_it(fn: Callable[[Tensor], Any]) -> None:
    check(Fn(fn), (4, 6))


def test_attention() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).reshape(x.shape[0], -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v)
            return x + F.gelu(self.out(y.transpose(1, 2).flatten(2)))

    graph = check(randomized(Block()), (5, 8))
    assert "scaled_dot_product_attention" in ops(graph) and "opaque" not in ops(graph)


def test_a_recurrent_layer() -> None:
    check(randomized(nn.LSTM(4, 3, batch_first=True)), (5, 4), batches=(2,))


# ---------------------------------------------------------------- models of other kinds
def test_an_exported_program_and_a_graph() -> None:
    model, x = randomized(Small()), images(2, 1, 6, 6)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    graph = from_torch(program)
    assert graph.model_hash == from_torch(model, (x,)).model_hash
    assert from_torch(graph) is graph


def test_an_example_of_one_sample_leaves_the_batch_open() -> None:
    model = randomized(Small())
    graph = from_torch(model, (images(1, 1, 6, 6),))
    assert call(graph, images(4, 1, 6, 6)).shape == (4, 3)


# ---------------------------------------------------------------- refusals
class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.relu(), 3


def half_norm() -> nn.Module:
    """In eval mode as a whole, but not its batch norm."""
    model = randomized(Small())
    model.stem[1].train()  # type: ignore[index, union-attr]
    return model


class Filling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return x


def with_nan() -> nn.Module:
    model = randomized(Small())
    with torch.no_grad():
        model.fc.bias[1] = float("nan")  # type: ignore[index, union-attr]
    return model


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: randomized(Small()).train(), "training mode; call model.eval"),
        (lambda: randomized(Small()).half(), r"is torch.float16; hago imports float32 models: call model.float\(\)"),
        (lambda: randomized(Small()).double(), "is torch.float64"),
        (with_nan, "'fc.bias' holds 1 NaN or infinite values of 3"),
        (lambda: Filling().eval(), "the model writes to its input 'x'; let forward leave inputs as they are"),
        (half_norm, r"writes to 'stem.1\.\w+' when run; call model.eval"),
        (
            lambda: Branching().eval(),
            r"test_exported_program.py:\d+ `.*` depends on the values of the data. Choose .* torch.where",
        ),
        (lambda: Conditional().eval(), "branches or loops on values .true_graph_0.; hago imports no control flow"),
        (lambda: Counting().eval(), "the model returns 3, which is not a tensor"),
    ],
)
def test_what_is_refused(make: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(GraphError, match=says):
        from_torch(make(), (images(2, 1, 6, 6),))


def test_a_package_whose_name_begins_with_torch_is_not_torch() -> None:
    folder = Path(torch.__file__).parent
    source = "def forward(self, x):\n    return x + 1 if x.sum() > 0 else x\n"
    for file, is_named in ((f"{folder}vision/net.py", True), (str(folder / "net.py"), False)):
        names: dict[str, Any] = {}
        exec(compile(source, file, "exec"), names)
        model = type("Net", (nn.Module,), {"forward": names["forward"]})().eval()
        with pytest.raises(GraphError) as caught:
            from_torch(model, (images(2, 1, 6, 6),))
        assert ("net.py:2" in str(caught.value)) == is_named


def test_what_is_no_model() -> None:
    with pytest.raises(GraphError, match="example_inputs are needed"):
        from_torch(randomized(Small()))
    with pytest.raises(GraphError, match="expected an nn.Module, ExportedProgram or Graph, got function"):
        from_torch(randomized, (images(2, 3),))  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match=r"example_inputs has shape \(2, 3, 6, 6\) .* takes \(batch, 1, height, width\)"
    ):
        from_torch(randomized(Small()), (images(2, 3, 6, 6),))


def test_a_batch_that_the_model_fixes_is_said() -> None:
    graph = from_torch(Fn(lambda x: x.reshape(2, 12).relu()).eval(), (images(2, 3, 4),))
    with pytest.raises(GraphError, match="reshape.*cannot be computed on shapes"):
        call(graph, images(5, 3, 4))


def test_results_that_cannot_be_written_down() -> None:
    with pytest.raises(GraphError, match="the model returns .*Pair.* cannot write down"):
        from_torch(Fn(lambda x: Pair(x, x.relu())).eval(), (images(2, 3),))


class Pair:
    """A kind of result that torch's export knows and hago does not."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b


pytree.register_pytree_node(Pair, lambda p: ([p.a, p.b], None), lambda parts, _: Pair(*parts))


# ---------------------------------------------------------------- the batch on another axis
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.permute(1, 0, 2).mean(1),
        lambda x: x.permute(1, 0, 2).sum((1, 2)),
        lambda x: x.transpose(0, 1)[:, 0:1],
        lambda x: x.transpose(0, 1)[:, 1:],
        lambda x: x.transpose(0, 1).reshape(4, -1).mean(1),
        lambda x: x.transpose(0, 1).chunk(2, 0)[1],
    ],
)
def test_the_batch_on_another_axis(fn: Callable[[Tensor], Tensor]) -> None:
    """How many samples there are is not taken for a size that is known."""
    graph = check(Fn(fn), (4, 6), batches=(2, 3, 5))
    for node in graph:
        if node.op in ("mean", "sum"):
            assert node.attrs["count"] == 6 and node.attrs["axes"] == [2]


# ---------------------------------------------------------------- language models
class Cache:
    """What torch.export does not know."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Cached(nn.Module):
    """A layer that returns its keys for the next call, beside what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.config_use_cache = nn.Linear(4, 4), True

    def forward(self, x: Tensor, use_cache: bool | None = None) -> Any:
        keys = self.keys(x)
        used = self.config_use_cache if use_cache is None else use_cache
        return (keys.relu(), Cache(keys)) if used else (keys.relu(),)


class Answer(nn.Module):
    """The tensor of a model's answer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[0]


def test_a_model_that_returns_a_cache() -> None:
    """The error says what is returned and what helps, and each of these helps."""
    model, x = randomized(Cached()), images(2, 3, 4)
    with pytest.raises(GraphError, match="returns a Cache.*use_cache=False in its config or its arguments.*calls it"):
        from_torch(model, (x,))
    expected = model(x)[0]
    for graph in (from_torch(model, (x,), {"use_cache": False}), from_torch(Answer(model).eval(), (x,))):
        assert torch.equal(run_real(graph, [x])[0], expected)
    model.config_use_cache = False  # type: ignore[assignment]
    assert torch.equal(run_real(from_torch(model, (x,)), [x])[0], expected)


class Growing(nn.Module):
    """Keys behind those of a cache, which begins empty; tables of angles are made without gradients."""

    def __init__(self, empty: tuple[int, ...]) -> None:
        super().__init__()
        self.empty, self.keys, self.out = empty, nn.Linear(4, 4), nn.Linear(4, 3)

    @torch.no_grad()
    def angles(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.arange(x.shape[1]).float()[:, None].cos()

    def forward(self, x: Tensor, scaled: bool = True) -> Tensor:
        keys = torch.cat([torch.zeros(self.empty), self.keys(x) * (self.angles(x) if scaled else 1)], 1)
        return self.out(torch.cat([keys, keys, torch.zeros(self.empty)], 1))


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("empty", [(0,), (2, 0, 4)])
def test_a_cache_that_begins_empty(empty: tuple[int, ...], gradients: bool) -> None:
    """As a model, and as a program that was exported with arguments that are no tensors, with gradients or without."""
    model, x = randomized(Growing(empty)), images(2, 3, 4)
    with torch.set_grad_enabled(gradients):
        program = torch.export.export(model, (x,), {"scaled": True})
    for given in (model, program):
        quantizer = hago.quantize(given, "x86_vnni", [x])
        graph = quantizer.plan.graph.uncorrected
        assert ops(graph).count("concat") == 1 and len(graph["concat"].inputs) == 2
        assert torch.equal(run_real(graph, [x])[0], model(x))
        assert torch.equal(quantizer.simulate()(x), quantizer.realize()(x))
