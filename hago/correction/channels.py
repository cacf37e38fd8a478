"""Which channels of which values can be divided by a factor, so that a network still computes the same.

Dividing a channel changes nothing if all that compute it divide by the factor and all that read it multiply by it.
Layers and norms can, with their constants; operators such as relu, pooling and reshape give the factors of their
operands to their results, and sums need equal ones. `track_channels` follows them: every entry of every value gets the
number of its channel, channels that must have equal factors get one number, and those that must stay get FIXED.

References:
    Factors between two layers: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
    Correction", ICCV 2019. Here they are followed through any operator that commutes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from hago.correction.disjoint_sets import DisjointSets
from hago.graph import CONST, INPUT, Graph, Node
from hago.ops import OPS, Ops, upper_clip

#: The number of entries that are 0 whatever the factor, as padding is.
ZEROS: Final = 0
#: The number of channels whose factor is 1.
FIXED: Final = 1

#: Layers, and the axes of their weights along which output and input channels lie.
LAYERS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "linear"), (0, 1)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d"), (1, 0)),
}
#: Operators that commute with a positive factor for each entry.
COMMUTING: Final = frozenset({"relu", "leaky_relu", "prelu", "neg"})
#: The call of a norm that has no operator of its own.
_RMS_NORM: Final = "aten.rms_norm.default"
#: Operators that commute with a positive factor for each channel, since they join entries of one channel.
POOLINGS: Final = frozenset(
    {
        *("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d"),
    }
)


@dataclass(frozen=True, slots=True)
class Scalable:
    """The channels of a node whose constants can divide those of its value, and multiply those of its operand.

    Args:
        reads: the numbers of the channels of its operand; empty for a norm.
        gives: the numbers of the channels of its value.
    """

    reads: Tensor
    gives: Tensor


@dataclass(frozen=True, slots=True)
class Channels:
    """The result of `track_channels`.

    Args:
        scalable: layers and norms, by node.
        clips: by node that is a clamp from 0, its upper limit.
        values: by node, the number of every entry of its value at batch 1.
        count: numbers are less than it.
    """

    scalable: Mapping[str, Scalable]
    clips: Mapping[str, float]
    values: Mapping[str, Tensor]
    count: int

    def axis_of(self, name: str) -> int | None:
        """The axis of a node's value along which its channels lie, 1 or the last; None if they lie otherwise."""
        numbers = self.values[name]
        for axis in sorted({1, numbers.ndim - 1}):
            rows = numbers.movedim(axis, 0).flatten(1) if 0 < axis < numbers.ndim else numbers.new_zeros(0)
            if rows.numel() and torch.equal(rows, rows[:, :1].expand_as(rows)):
                return axis
        return None


def constants_of_norm(graph: Graph, node: Node) -> tuple[str, ...]:
    """The constants of a norm along the last axis, if nothing else reads them: its gains, and its biases if it has any;
    empty for other nodes."""
    if not is_norm(node):
        return ()
    constants = node.inputs[1:]
    own = all(graph[s].op == CONST and len(graph.out_edges[s]) == 1 for s in constants)
    return constants if own and graph[node.inputs[0]].op != CONST else ()


def is_norm(node: Node) -> bool:
    """Whether a node is a norm along the last axis."""
    if node.op == "layer_norm":
        return len(node.attrs["normalized_shape"]) == 1
    return node.op == "opaque" and node.attrs["target"] == _RMS_NORM and len(node.attrs["args"][1]) == 1


def channel_axis(node: Node) -> int:
    """The axis of channels of the value of a layer, an affine or a norm along the last axis."""
    return 1 if node.op == "affine" or node.op.startswith("conv") else -1


def track_channels(graph: Graph, ops: Ops = OPS) -> Channels:
    """Number the channels of all values of a graph whose batch norms are folded."""
    tracking = _Tracking(graph, ops)
    for node in graph:
        tracking.visit(node)
    for name in graph.outputs:
        tracking.fix(tracking.values.get(name))
    return tracking.finish()


@dataclass(slots=True)
class _Tracking:
    """The state of one `track_channels`: numbers, of which some were found to be equal."""

    graph: Graph
    ops: Ops
    values: dict[str, Tensor] = field(default_factory=dict)
    scalable: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    clips: dict[str, float] = field(default_factory=dict)
    numbers: DisjointSets = field(default_factory=lambda: DisjointSets([ZEROS, FIXED]))

    # ------------------------------------------------------------ numbers
    def fresh(self, count: int) -> Tensor:
        """New numbers."""
        first = self.numbers.add(count)
        return torch.arange(first, first + count)

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """Make channels equal, entry by entry; their numbers, those of `a` where `b` has none."""
        a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
        differ = (a != b) & (a != ZEROS) & (b != ZEROS)
        count = len(self.numbers)
        pairs = torch.unique(a[differ] * count + b[differ])
        for x, y in zip((pairs // count).tolist(), (pairs % count).tolist(), strict=True):
            self.numbers.join(x, y)  # FIXED is the least
        return torch.where(a == ZEROS, b, a)

    def fix(self, numbers: Tensor | None) -> None:
        """Keep the factors of channels at 1."""
        if numbers is not None:
            self.join(numbers, torch.tensor(FIXED))

    def is_fixed(self, numbers: Tensor) -> bool:
        """Whether all factors are 1."""
        return all(self.numbers.least(n) <= FIXED for n in torch.unique(numbers).tolist())

    def per_channel(self, numbers: Tensor, axis: int) -> Tensor:
        """The number of each channel along an axis; all entries of a channel are made equal."""
        rows = numbers.movedim(axis, 0).flatten(1)
        found = rows.amax(1)
        self.join(rows, found.unsqueeze(1))
        return found

    # ------------------------------------------------------------ nodes
    def visit(self, node: Node) -> None:
        """Number the channels of a node's value."""
        if node.op == CONST or node.shape is None:
            return
        found = self._value(node)
        if found is None:
            for source in node.inputs:
                self.fix(self.values.get(source))
            found = torch.tensor(FIXED)
        self.values[node.name] = found.expand(node.shape)

    def _value(self, node: Node) -> Tensor | None:
        """The numbers of a node's value; None if its operands have to stay as they are."""
        rule = self.ops.get(node.op)
        if constants_of_norm(self.graph, node):
            return self._norm(node)
        if node.op == INPUT or rule is None or any(s not in self.values and not self._const(s) for s in node.inputs):
            return None
        if node.op in LAYERS:
            return self._layer(node)
        if node.op == "affine":
            return self._affine(node)
        if node.op in ("add", "sub"):
            return self._sum(node)
        first = self.values.get(node.inputs[0])
        if first is None:
            return None
        if node.op in COMMUTING:
            return first
        if node.op in POOLINGS:
            return self.per_channel(first, 1).reshape(1, -1, *[1] * (len(node.shape or ()) - 2))
        if node.op == "clamp":
            return self._clamp(node, first)
        if node.op in ("mean", "sum"):
            return self._reduced(node, first)
        if node.op == "mul":
            return self._product(node)
        if node.op == "matmul":
            return self._matmul(node)
        return self._moved(node) if rule.moves_values else None

    def _const(self, name: str) -> bool:
        return self.graph[name].op == CONST

    def _only_reader(self, name: str) -> bool:
        return len(self.graph.out_edges[name]) == 1

    def _layer(self, node: Node) -> Tensor | None:
        constants = node.inputs[1:]
        if not all(self._const(s) and self._only_reader(s) for s in constants) or self._const(node.inputs[0]):
            return None
        groups, (out_axis, _) = node.attrs.get("groups", 1), LAYERS[node.op]
        if out_axis and groups > 1:
            return None
        axis = channel_axis(node)
        read = self.per_channel(self.values[node.inputs[0]], axis)
        out = self.fresh(self.graph.consts[constants[0]].shape[out_axis])
        self.scalable[node.name] = (read, out)
        return out if axis == -1 else out.reshape(1, -1, *[1] * (len(node.shape or ()) - 2))

    def _affine(self, node: Node) -> Tensor | None:
        if not all(self._const(s) and self._only_reader(s) for s in node.inputs[1:]):
            return None
        out = self.fresh((node.shape or ())[1])
        self.scalable[node.name] = (self.per_channel(self.values[node.inputs[0]], 1), out)
        return out.reshape(1, -1, *[1] * (len(node.shape or ()) - 2))

    def _norm(self, node: Node) -> Tensor:
        self.fix(self.values.get(node.inputs[0]))
        out = self.fresh((node.shape or ())[-1])
        self.scalable[node.name] = (out[:0], out)
        return out

    def _sum(self, node: Node) -> Tensor | None:
        if any(self._const(s) for s in node.inputs):
            return None
        first, *others = (self.values[s] for s in node.inputs)
        for other in others:
            first = self.join(first, other)
        return first

    def _clamp(self, node: Node, first: Tensor) -> Tensor | None:
        if node.attrs["min"] != 0.0:
            return None
        limit = upper_clip(node.attrs)
        if limit is not None:
            self.clips[node.name] = limit
        return first

    def _reduced(self, node: Node, first: Tensor) -> Tensor | None:
        """A mean or a sum over some axes."""
        for axis in node.attrs["axes"]:
            first = self.join(first, first.amax(axis, keepdim=True)).amax(axis, keepdim=True)
        return first.reshape(node.shape or ())

    def _product(self, node: Node) -> Tensor | None:
        """A product entry by entry has the factors of one operand; the other's stay."""
        a, b = ((None if self._const(s) else self.values[s]) for s in node.inputs)
        if a is None or b is None:
            return b if a is None else a
        if node.inputs[0] == node.inputs[1]:
            return None
        kept, fixed = (b, a) if a.numel() < b.numel() or (a.numel() == b.numel() and self.is_fixed(a)) else (a, b)
        self.fix(fixed)
        return kept

    def _matmul(self, node: Node) -> Tensor | None:
        """A product of matrices has the factors of the columns of the second."""
        if any(self._const(s) for s in node.inputs):
            return None
        a, b = (self.values[s] for s in node.inputs)
        if b.ndim < 2:
            return None
        self.fix(a)
        columns = b.amax(-2, keepdim=True)
        self.join(b, columns)
        return columns

    def _moved(self, node: Node) -> Tensor | None:
        if any(self._const(s) for s in node.inputs) or (node.op == "pad" and node.attrs.get("value")):
            return None
        moved: Any = self.ops[node.op].compute(node.attrs, *(self.values[s] for s in node.inputs))
        return moved.to(torch.int64) if isinstance(moved, Tensor) else None

    # ------------------------------------------------------------ result
    def finish(self) -> Channels:
        """The result, each number replaced by the least that it is equal to."""
        least = torch.tensor([self.numbers.least(n) for n in range(len(self.numbers))])
        values = {name: least[numbers] for name, numbers in self.values.items()}
        return Channels(
            {n: Scalable(least[read], least[out]) for n, (read, out) in self.scalable.items()},
            self.clips,
            values,
            len(self.numbers),
        )
