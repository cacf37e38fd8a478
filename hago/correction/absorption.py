"""Absorption: constant parts of channels, moved from the biases that add them to those of the layers that read them.

A channel whose values are x + c gives the layers behind it W x + W c, and W c is a constant: the channel's bias can
leave out c if the biases of these layers add W c. The values are then smaller, or lie around zero, and fewer of the
integers of their grid are wasted. Values may be moved, pooled and averaged on their way; a relu passes c where no value
of the channel is less than c.

References:
    M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.1.3,
    absorb high biases of layers behind which a relu stands;
    X. Wei et al., "Outlier Suppression+: Accurate quantization of large language models by equivalent and effective
    shifting and scaling", EMNLP 2023, shift the channels of norms to be symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.correction.channels import LAYERS, channel_axis, constants_of_norm
from hago.errors import LogError
from hago.graph import CONST, Graph, Node
from hago.ops import OPS, Ops, upper_clip

#: The most that the magnitude of a stored step is.
MOST_STEPS: Final = 255
#: Operators without constants whose value is linear in their operands.
_LINEAR: Final = frozenset(
    {"add", "sub", "mean", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"}
)
#: Operators whose value is the largest of some entries.
_MAXIMA: Final = frozenset({"max_pool1d", "max_pool2d", "adaptive_max_pool2d"})


@dataclass(frozen=True, slots=True)
class Shifts:
    """What is taken from the channels of a node's value.

    Args:
        exponent: of the power of two that a step stands for.
        steps: by channel.
    """

    exponent: int
    steps: tuple[int, ...]

    @staticmethod
    def towards(wanted: Tensor) -> Shifts:
        """The shifts, float64 by channel, each rounded towards 0."""
        largest = float(wanted.abs().max())
        exponent = math.frexp(largest / MOST_STEPS)[1] if largest else 0
        steps = torch.ldexp(wanted, torch.tensor(-exponent)).trunc()
        return Shifts(exponent, tuple(steps.to(torch.int64).tolist()))

    def values(self) -> Tensor:
        """float64 (channels,)."""
        return torch.ldexp(torch.tensor(self.steps, dtype=torch.float64), torch.tensor(self.exponent))

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` gives the same shifts back."""
        return {"exponent": self.exponent, "steps": list(self.steps)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Shifts:
        """The shifts that JSON values, checked by the schema, describe."""
        return Shifts(int(value["exponent"]), tuple(value["steps"]))


@dataclass(frozen=True, slots=True)
class Passage:
    """Where the shift of a node's channels goes.

    Args:
        values: the nodes whose values are shifted, from the first.
        one_sided: whether a relu is among them, so that no value may be smaller than its shift.
        limit: the least upper limit of clamps among them, which no value may exceed; infinite if there is none.
    """

    values: tuple[str, ...]
    one_sided: bool
    limit: float


def shiftable(graph: Graph, ops: Ops = OPS) -> dict[str, Passage]:
    """The layers and norms whose channels can be shifted: by name of the node, where its shift goes."""
    found = {}
    for node in graph:
        if (bias := _own_bias(graph, node)) is None:
            continue
        # of channels that all differ, so that only what keeps them apart lets them pass
        channels = torch.arange(1, graph.consts[bias].numel() + 1, dtype=torch.float64)
        if (moved := _Moved.through(graph, {node.name: channels}, ops)) is None or not moved.into:
            continue
        clips = [graph[name] for name in moved.values if graph[name].op in ("relu", "clamp")]
        limits = [limit for clip in clips if clip.op == "clamp" and (limit := upper_clip(clip.attrs)) is not None]
        found[node.name] = Passage(tuple(moved.values), bool(clips), min(limits, default=math.inf))
    return found


def absorbed(graph: Graph, stored: Mapping[str, Shifts], ops: Ops = OPS) -> Graph:
    """The graph with stored shifts applied.

    Raises:
        LogError: they do not fit the graph; names the node.
    """
    shifts = {}
    for name, shift in stored.items():
        where = f"at $.corrections.absorption[{name!r}]"
        bias = _own_bias(graph, graph[name]) if name in graph.by_name else None
        if bias is None:
            raise LogError(f"{where}: got a node that is no layer with a bias of its own; it was edited")
        if len(shift.steps) != (count := graph.consts[bias].numel()):
            raise LogError(f"{where}: got {len(shift.steps)} steps, expected {count}; it was edited")
        shifts[name] = shift.values()
    moved = _Moved.through(graph, shifts, ops)
    if moved is None:
        raise LogError("at $.corrections.absorption: got channels that not all of their readers can shift; edited")
    consts = dict(graph.consts)
    for name, taken in shifts.items():
        consts[graph[name].inputs[2]] = consts[graph[name].inputs[2]].to(torch.float64) - taken
    for name, channels in moved.into.items():
        bias = graph[name].inputs[2]
        consts[bias] = consts[bias].to(torch.float64) + _absorbed_by(graph, graph[name], channels)
    return replace(
        graph,
        consts={name: value.to(graph.consts[name].dtype) for name, value in consts.items()},
        corrected_from=graph.uncorrected,
    )


def _own_bias(graph: Graph, node: Node) -> str | None:
    """The bias by channel of a layer, norm or affine whose constants nothing else reads; None if it has none."""
    constants = node.inputs[1:]
    if len(constants) != 2 or not (node.op in LAYERS or node.op == "affine" or constants_of_norm(graph, node)):
        return None
    own = all(graph[s].op == CONST and len(graph.out_edges[s]) == 1 for s in constants)
    return constants[1] if own and graph[node.inputs[0]].op != CONST else None


@dataclass(slots=True)
class _Moved:
    """By how much values are larger without shifts; made by `through`.

    Args:
        values: of the nodes with shifts and those behind them, float64 at batch 1.
        into: by layer that reads such values, the shift of every channel that it reads.
    """

    values: dict[str, Tensor]
    into: dict[str, Tensor]

    @staticmethod
    def through(graph: Graph, shifts: Mapping[str, Tensor], ops: Ops) -> _Moved | None:
        """Follow shifts by channel; None where a node reads shifted values that can neither pass nor absorb them."""
        moved = _Moved({}, {})
        for node in graph:
            if any(source in moved.values for source in node.inputs) and not moved._visit(graph, node, ops):
                return None
            if node.name in shifts:
                shape = [1] * len(node.shape or ())
                shape[channel_axis(node)] = -1
                moved.values[node.name] = shifts[node.name].reshape(shape).expand(node.shape or ())
        return None if moved.values.keys() & set(graph.outputs) else moved

    def _visit(self, graph: Graph, node: Node, ops: Ops) -> bool:
        """Whether a node passes or absorbs the shifts of its operands, of which one at least has any."""
        if node.op in LAYERS:
            channels = _read_channels(graph, node, self.values.get(node.inputs[0]))
            if channels is not None:
                self.into[node.name] = channels
            return channels is not None
        if node.op not in ops or any(graph[source].shape is None for source in node.inputs):
            return False
        of_operands = [self._shift_of(graph, source) for source in node.inputs]
        if (value := _passed(node, of_operands, ops)) is not None:
            self.values[node.name] = value
        return value is not None

    def _shift_of(self, graph: Graph, source: str) -> Tensor:
        """The shift of a value, 0 where it has none; indices as they are."""
        if source in graph.consts and not graph.consts[source].is_floating_point():
            return graph.consts[source]
        return self.values.get(source, torch.zeros((), dtype=torch.float64)).expand(graph[source].shape or ())


def _passed(node: Node, shifts: Sequence[Tensor], ops: Ops) -> Tensor | None:
    """The shift of a node's value; None if that is not its operator of the shifts of its operands."""
    if node.op in ("relu", "clamp"):
        return shifts[0] if node.op == "relu" or node.attrs["min"] == 0.0 else None
    moves = ops[node.op].moves_values and node.op != "embedding" and not (node.op == "pad" and node.attrs.get("value"))
    if not moves and node.op not in _LINEAR:
        return None
    value: Any = ops[node.op].compute(node.attrs, *shifts)
    if not isinstance(value, Tensor):
        return None
    if node.op in _MAXIMA:
        # the largest of a window is shifted as the window is only if all of it is shifted alike
        least = -ops[node.op].compute(node.attrs, *(-shift for shift in shifts))
        return value if torch.equal(least, value) else None
    return value


def _read_channels(graph: Graph, node: Node, shift: Tensor | None) -> Tensor | None:
    """The shift of every channel that a layer reads, float64; None if its bias cannot take it."""
    if shift is None or _own_bias(graph, node) is None or LAYERS[node.op][0] == 1 or _pads(node):
        return None
    by_channel = shift.movedim(channel_axis(node), 0).flatten(1)
    channels = by_channel[:, 0]
    return channels if torch.equal(by_channel, channels.unsqueeze(1).expand_as(by_channel)) else None


def _absorbed_by(graph: Graph, node: Node, channels: Tensor) -> Tensor:
    """What a layer's bias takes of the shift of the channels that it reads, float64 by output."""
    weight, groups = graph.consts[node.inputs[1]].to(torch.float64), node.attrs.get("groups", 1)
    of_entries = channels.reshape(groups, 1, -1, 1).expand(-1, len(weight) // groups, -1, -1).flatten(0, 1)
    products = weight.reshape(len(weight), of_entries.shape[1], -1) * of_entries
    # exact products, since weights and steps have few bits, and an exactly rounded sum: the same on every machine
    return torch.tensor([math.fsum(row) for row in products.flatten(1).tolist()], dtype=torch.float64)


def _pads(node: Node) -> bool:
    """Whether a layer reads zeros around its operand, which no shift moves."""
    padding = node.attrs.get("padding", ())
    return padding == "same" or (padding != "valid" and any(padding))
