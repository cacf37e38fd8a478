"""Calls that write to their operand: networks of them are imported as torch computes them, most without being traced
again."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from networks import ResNet, images, randomized
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from hago.graph.execute import run_real
from hago.graph.frontend import exported_program, from_torch
from hago.graph.frontend.exported_program import reads_as_it_is
from hago.graph.graph import Graph
from hago.ops import OPS, parsers

SHAPE = (2, 4, 6)
KNOWN = parsers(OPS).keys() | exported_program._IDENTITIES

WRITING: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x.add_(y),
    lambda x, y: x.mul_(y),
    lambda x, y: x.add_(y, alpha=2),
    lambda x, y: x.add_(1),
    lambda x, y: F.relu(x, inplace=True),
    lambda x, y: F.relu6(x, inplace=True),
    lambda x, y: F.hardtanh(x, -0.5, 0.5, inplace=True),
    lambda x, y: F.leaky_relu(x, 0.25, inplace=True),
    lambda x, y: x.sigmoid_(),
    lambda x, y: x.tanh_(),
    lambda x, y: F.hardswish(x, inplace=True),
    lambda x, y: F.hardsigmoid(x, inplace=True),
    lambda x, y: F.silu(x, inplace=True),
    lambda x, y: F.dropout(x, 0.5, training=False, inplace=True),
)
MAKING: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: F.relu(x),
    lambda x, y: F.silu(x),
    lambda x, y: torch.cat([x, y], 1)[:, :4] * 1.5,
    lambda x, y: F.layer_norm(x, SHAPE[2:]),
    lambda x, y: x - y,
    lambda x, y: (x / 2).contiguous(),
)
#: Of another shape, they are brought back by what reads them.
VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x[:, 1:3],
    lambda x: x.permute(0, 2, 1),
    lambda x: torch.flatten(x, 1),
    lambda x: x.transpose(1, 2),
    lambda x: x.view(x.shape[0], 24),
    lambda x: x.reshape(x.shape[0], 6, 4),
    lambda x: x.unsqueeze(1),
    lambda x: x[:, 1],
    lambda x: x.expand(-1, 4, 6),
    lambda x: x.view(x.shape[0], 4, 2, 3).transpose(1, 2),
)


class Program(nn.Module):
    """Calls drawn at random, of values drawn at random from those before; views may be of what is written later."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.scale = seed, nn.Parameter(torch.rand(SHAPE[1:]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rng = random.Random(self.seed)
        values, views = [x * self.scale, x + 0.25], list[Tensor]()
        for _ in range(rng.randrange(2, 9)):
            # the last ones more often, as in networks
            own = values[-min(rng.randrange(1, 4), len(values))]
            other = rng.choice(values)
            kind = rng.random()
            if kind < 0.5:
                values.append(rng.choice(WRITING)(own, other))
            elif kind < 0.85:
                values.append(rng.choice(MAKING)(own, other))
            else:
                views.append(rng.choice(VIEWS)(own))
        read = [view * 2 for view in views if rng.random() < 0.7]
        read += [view.transpose(1, 2) * 3 for view in views if view.ndim > 2 and rng.random() < 0.3]
        return (*read, rng.choice(values) * 1, values[-1])


def exported(model: nn.Module, x: Tensor) -> ExportedProgram:
    return torch.export.export(model.eval(), (x,), dynamic_shapes=({0: Dim.AUTO},))


def traced_again(program: ExportedProgram, monkeypatch: pytest.MonkeyPatch) -> Graph:
    with monkeypatch.context() as patched:
        patched.setattr(exported_program, "reads_as_it_is", lambda program, known: False)
        return from_torch(program)


@pytest.mark.some_cases(24)
@pytest.mark.parametrize("seed", range(300))
def test_any_program_is_imported_as_torch_runs_it(seed: int) -> None:
    model, x = Program(seed).eval(), images(3, *SHAPE[1:], seed=seed)
    with torch.no_grad():
        expected = model(x.clone())
    found = run_real(from_torch(exported(model, images(2, *SHAPE[1:]))), [x])
    for real, imported in zip(expected, found, strict=True):
        assert torch.equal(real, imported)


class EveryWrite(nn.Module):
    """Every call that writes, where nobody reads afterwards, among what networks have around it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
        self.acts = nn.ModuleList(
            [nn.ReLU(True), nn.ReLU6(True), nn.Hardtanh(-0.5, 0.75, True), nn.LeakyReLU(0.25, True), nn.SiLU(True)]
        )
        self.last, self.linear = nn.Sequential(nn.Hardswish(True), nn.Dropout(0.2, True)), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        for act in self.acts:
            y = act(self.norm(self.conv(x)))
            y += x
            x = F.hardsigmoid((y * self.conv(y)).mul_(y), inplace=True)
        x = self.conv(x).sigmoid_() + self.conv(x).tanh_()
        return self.linear((self.last(self.conv(x)) * 2).permute(0, 2, 1).flatten(1))


@pytest.mark.parametrize("model", [EveryWrite(), ResNet((4, 8, 8, 8), 1)], ids=lambda m: type(m).__name__)
def test_what_nobody_reads_afterwards_is_read_as_it_does_traced_again(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = exported(randomized(model), images(2, 4, 6) if isinstance(model, EveryWrite) else images(2, 3, 32, 32))
    assert any(str(n.target).split(".")[1].endswith("_") for n in program.graph.nodes if n.op == "call_function")
    assert reads_as_it_is(program, KNOWN)
    read, traced = from_torch(program), traced_again(program, monkeypatch)
    assert (read.nodes, read.inputs, read.outputs) == (traced.nodes, traced.inputs, traced.outputs)
    assert read.model_hash == traced.model_hash


@pytest.mark.some_cases(12)
@pytest.mark.parametrize("seed", range(300))
def test_a_program_has_one_graph_however_it_is_read(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = exported(Program(seed), images(2, *SHAPE[1:]))
    all_are_read = all(n.users for n in program.graph.nodes if n.op == "call_function")
    if all_are_read and reads_as_it_is(program, KNOWN):
        read, traced = from_torch(program), traced_again(program, monkeypatch)
        assert (read.nodes, read.outputs) == (traced.nodes, traced.outputs)


def test_most_programs_are_of_either_kind() -> None:
    """So that the laws above look at both."""
    kinds = [reads_as_it_is(exported(Program(seed), images(2, *SHAPE[1:])), KNOWN) for seed in range(20)]
    assert 3 <= sum(kinds) <= 17


class Of(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def viewed_before(x: Tensor) -> Tensor:
    y = x * 2
    z = y[:, :2]
    F.relu_(y)
    return z * 3


def of_a_view(x: Tensor) -> Tensor:
    y = x * 2
    F.relu_(y.permute(0, 2, 1))
    return y


def in_parts(x: Tensor) -> Tensor:
    first, last = F.relu_(x * 2).split([2, 2], 1)
    return last * torch.sigmoid(first)


def in_parts_of_a_view(x: Tensor) -> Tensor:
    first, last = F.relu_(x * 2).view(x.shape[0], 2, 2, 6).permute(1, 0, 2, 3).unbind(0)
    return last * torch.sigmoid(first)


def viewed_twice(x: Tensor) -> Tensor:
    x = F.relu_(x * 2).view(x.shape[0], 4, 2, 3).transpose(1, 2)
    return x.matmul(x.transpose(-1, -2))


def beside_what_nobody_reads(x: Tensor) -> Tensor:
    x + 1
    return F.relu_(x * 2)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "viewed before": viewed_before,
    "of a view": of_a_view,
    "in parts": in_parts,
    "in parts of a view": in_parts_of_a_view,
    "viewed twice": viewed_twice,
    "of whole numbers": lambda x: (x * 2).add_((x > 0).to(torch.int64)),
    "alpha": lambda x: (x * 2).add_(x, alpha=2),
    "beside what nobody reads": beside_what_nobody_reads,
}


@pytest.mark.parametrize("case", CASES)
def test_what_others_see_is_traced_again(case: str) -> None:
    model, x = Of(CASES[case]).eval(), images(2, *SHAPE[1:])
    program = exported(model, x)
    assert not reads_as_it_is(program, KNOWN)
    (found,) = run_real(from_torch(program), [x])
    assert torch.equal(found, model(x))


def test_what_is_read_behind_a_write_is_what_was_written() -> None:
    """Of programs in which torch.export did not put the result of the call in the place of what it wrote to."""

    def read_behind(x: Tensor) -> Tensor:
        y = x * 2
        return F.relu_(y) + y

    model, x = Of(read_behind).eval(), images(2, *SHAPE[1:])
    program = exported(model, x)
    product, write, total = (n for n in program.graph.nodes if n.op == "call_function")
    total.args = (write, product)
    assert not reads_as_it_is(program, KNOWN)
    (found,) = run_real(from_torch(program), [x])
    assert torch.equal(found, model(x))
