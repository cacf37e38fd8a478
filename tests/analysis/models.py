"""Small models whose weights and inputs are multiples of powers of two, so that float32 is exact in any
order of summation and every report is the same on every machine; and chips to run them on."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from hago.arithmetic.numerics import Requantize
from hago.arithmetic.schemes import Grid
from hago.arithmetic.types import dtype
from hago.data.batches import Batch
from hago.graph.execute import run_real
from hago.graph.frontend import from_torch
from hago.graph.graph import Graph
from hago.hardware.hardware import Accumulator, Hardware, OpDesc, TensorScheme
from hago.plan.plan import Plan
from hago.plan.resolve import Resolver
from hago.plan.space import build_space
from hago.plan.topology import analyze

SHAPE: Final = (2, 2, 4, 4)


# ---------------------------------------------------------------- models
def pattern(*shape: int, step: float = 1 / 16, period: int = 37, start: int = 0) -> Tensor:
    """Multiples of `step` from -period/2 to period/2, without order."""
    index = torch.arange(start, start + int(torch.Size(shape).numel()))
    return (((index * 23 + 5) % period) - period // 2).to(torch.float32).reshape(shape) * step


def set_weights(module: nn.Module, step: float = 1 / 16) -> None:
    """Set each parameter to a different pattern."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(pattern(*p.shape, step=step, period=29, start=7 * i))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        set_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + x)


class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Conv2d(2, 3, 1), nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(5, 2, 1)
        set_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([torch.relu(self.left(x)), self.right(x)], 1))


class Island(nn.Module):
    """A cumulative sum, which hago has no rule for, between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        set_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cumsum(self.first(x), 2))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(12, 2)
        set_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        pooled = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        return self.last(pooled.flatten(1))


class Curved(nn.Module):
    """A sigmoid, which some chips look up in a table. It is not exact, and therefore in no golden file."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        set_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.first(x)))


MODELS: Final[Mapping[str, type[nn.Module]]] = {c.__name__: c for c in (Residual, Concat, Island, Pooled, Curved)}

# ---------------------------------------------------------------- chips
_F32: Final = OpDesc("float32", "float32")
_MOVES: Final = ("relu", "max_pool2d", "reshape", "concat")


def chip(name: str, mac: OpDesc, moves: Sequence[OpDesc], add: OpDesc, **options: Any) -> Hardware:
    """A chip that multiplies, moves values and adds in integers, and does everything else in float."""
    ops: dict[str, tuple[OpDesc, ...]] = {"conv2d": (mac, _F32), "linear": (mac, _F32), "add": (add, _F32)}
    ops |= dict.fromkeys(_MOVES, (*moves, _F32))
    if mac.requantize_at == "output":
        ops["sigmoid"] = (OpDesc("int8", "int8", requantize_at="output"), _F32)
    return Hardware(ops, name=name, **options)


_SHIFT: Final = Requantize("shift")
_I24: Final = OpDesc("int32", "int32", max_bits=24)
_I8: Final = OpDesc("int8", "int8")
_MAC: Final = ["int8", "int8", "int32"]
_INT32: Final = Accumulator(dtype("int32"))

#: Sums in int32, requantized on edges; scales are powers of two.
WIDE: Final = chip("wide", OpDesc(_MAC, "int32", min_bits=2), (_I24,), _I24, requantize=_SHIFT)
#: The same with sums in int16, which wraps.
NARROW: Final = chip("narrow", OpDesc(_MAC, "int16", min_bits=2), (OpDesc("int16", "int16"),), _I24, requantize=_SHIFT)
#: int8 in, int8 out, requantized at the output; a scale per weight channel.
OUTPUT: Final = chip(
    "output",
    OpDesc(_MAC, "int8", _INT32, "output", min_bits=2),
    (_I8,),
    OpDesc("int8", "int8", _INT32, "output"),
    requantize=_SHIFT,
    weight=TensorScheme("hago", "per_channel"),
)
CHIPS: Final = {c.name: c for c in (WIDE, NARROW, OUTPUT)}


# ---------------------------------------------------------------- plans
@dataclass
class Ranges:
    """A source of thresholds: the range of one float run, or the entry of `fixed` for a key."""

    graph: Graph
    inputs: Sequence[Tensor]
    fixed: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values: dict[str, Tensor] = dict(self.graph.consts)
        run_real(self.graph, self.inputs, on_value=lambda n, v: self.values.__setitem__(n.name, v))

    def signed(self, key: str, source: str) -> bool:
        return bool((self.values[source] < 0).any())

    def __call__(self, key: str, source: str, grid: Grid, channel_axis: int | None) -> tuple[Tensor, Tensor]:
        if key in self.fixed:
            lo, hi = self.fixed[key]
            return torch.tensor([lo], dtype=torch.float64), torch.tensor([hi], dtype=torch.float64)
        rows = self.values[source].to(torch.float64)
        rows = rows.reshape(1, -1) if channel_axis is None else rows.movedim(channel_axis, 0).flatten(1)
        return rows.amin(1).clamp_max(0.0), rows.amax(1).clamp_min(0.0)


def sample(batch: int = SHAPE[0], step: float = 1 / 16) -> Tensor:
    """The input of every model here."""
    return pattern(batch, *SHAPE[1:], step=step, period=41)


@functools.cache
def _imported(model: type[nn.Module]) -> Graph:
    return from_torch(model().eval(), (sample(),))


def import_model(model: nn.Module) -> Graph:
    """The graph of a model, imported once for each of MODELS; the batch size is free."""
    is_listed = type(model) in MODELS.values()
    return _imported(type(model)) if is_listed else from_torch(model.eval(), (sample(),))


def make_plan(
    model: nn.Module,
    hardware: Hardware,
    x: Tensor | None = None,
    *,
    bits: Mapping[str, int] | None = None,
    at_most: int = 64,
    fixed: Mapping[str, tuple[float, float]] | None = None,
    keep_float: Sequence[str] = (),
) -> Plan:
    """The Plan of a model with the widest bits, at most `at_most`, except for those that `bits` gives."""
    x = sample() if x is None else x
    graph = import_model(model) if tuple(x.shape[1:]) == SHAPE[1:] else from_torch(model.eval(), (x,))
    topology = analyze(graph, hardware, keep_float)
    space = build_space(graph, hardware, topology)
    chosen = {k: max(min(v, at_most), space.groups[k].choices[-1]) for k, v in space.widest().items()}
    return Resolver(graph, hardware, topology, space, Ranges(graph, [x], fixed or {}))({**chosen, **(bits or {})})


def batches(*inputs: Tensor) -> list[Batch]:
    """Batches without labels."""
    return [Batch((x,), None) for x in inputs]
