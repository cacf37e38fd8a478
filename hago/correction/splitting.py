"""Splits: the same network with some nodes computed in parts or once more, so that integers suit each reader.

- *Norms apart.* The value of a norm that layers and other nodes read cannot be divided by factors, since the others
  (the residual sum behind the norm, say) need it as it is. Computed once more for the layers, with constants of its
  own, it can: this is what lets scales migrate between norms and layers where norms stand behind sums.
- *Channels in parts.* Between a layer and the next, operators such as GELU let no factor pass, and a few channels with
  large values decide the scale of all. The first layer, the operators and the second layer are computed in parts of the
  channels, each with scales of its own, and the results are added.

In float, both change the outputs by rounding only. Nodes of the first part keep their names.

References:
    G. Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", ICML
    2023: scales migrate from activations behind norms to weights. Z. Yuan et al., "RPTQ: Reorder-based Post-training
    Quantization for Large Language Models", arXiv:2304.01089: channels in parts with scales of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import Edge
from hago.correction.channels import COMMUTING, LAYERS, channel_axis, constants_of_norm
from hago.errors import LogError
from hago.graph import CONST, Graph, Node

#: Operators of one operand that work entry by entry.
_ENTRYWISE: Final = frozenset(
    {*("clamp", "elu", "gelu", "hardsigmoid", "hardswish", "leaky_relu", "neg", "relu", "sigmoid", "silu", "tanh")}
)
#: Layers whose channels can be computed in parts.
_PARTED: Final = frozenset({"conv1d", "conv2d", "conv3d", "linear"})
#: What the operands of these are called.
_WORDS: Final = ("data", "weight", "bias")


@dataclass(frozen=True, slots=True)
class Chain:
    """A layer, the operators behind it, and the layer that reads them; nothing else reads a value between."""

    first: str
    between: tuple[str, ...]
    last: str


@dataclass(frozen=True, slots=True)
class Splits:
    """What is split.

    Args:
        norms: the norms that are computed once more for the layers that read them.
        channels: by the last layer of a chain, the channels that it reads of each further part.
    """

    norms: tuple[str, ...] = ()
    channels: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.norms or self.channels)

    def apply(self, graph: Graph) -> Graph:
        """The network with the splits.

        Raises:
            LogError: they do not fit it.
        """
        norms, chains = {*norms_to_separate(graph)}, {chain.last: chain for chain in chains_of(graph)}
        for name in self.norms:
            if name not in norms:
                raise LogError(f"at $.corrections.splits.norms: {name!r} is no norm to be computed once more; edited")
        ends = [end for name in self.channels if name in chains for end in (chains[name].first, name)]
        if len({*ends}) < len(ends):
            raise LogError("at $.corrections.splits.channels: got chains of layers that overlap; it was edited")
        for name, parts in self.channels.items():
            where = f"at $.corrections.splits.channels[{name!r}]"
            if name not in chains:
                raise LogError(f"{where}: got a node that is no layer whose channels can be in parts; it was edited")
            _check_parts(where, parts, _channels(graph, chains[name]))
        original = graph
        for name in self.norms:
            graph = _with_norm_apart(graph, name)
        for name, parts in self.channels.items():
            graph = _with_parts(graph, chains[name], parts)
        return graph if graph is original else replace(graph, corrected_from=original.uncorrected)

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` gives the same splits back."""
        channels = {name: [list(part) for part in parts] for name, parts in self.channels.items()}
        return {k: v for k, v in (("norms", list(self.norms)), ("channels", channels)) if v}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Splits:
        """The splits that JSON values, checked by the schema, describe."""
        channels = {name: tuple(tuple(part) for part in parts) for name, parts in value.get("channels", {}).items()}
        return Splits(tuple(value.get("norms", ())), channels)


def _check_parts(where: str, parts: Sequence[Sequence[int]], count: int) -> None:
    seen = [channel for part in parts for channel in part]
    if not parts or not all(parts) or len({*seen}) < len(seen) or not all(0 <= c < count for c in seen):
        raise LogError(f"{where}: expected parts of different channels below {count}; it was edited")
    if len(seen) == count:
        raise LogError(f"{where}: got parts that leave no channel of {count}; it was edited")


# ---------------------------------------------------------------- what can be split
def norms_to_separate(graph: Graph) -> tuple[str, ...]:
    """The norms with constants that are read by layers and by other nodes, or are outputs."""
    found = []
    for node in graph:
        readers = [e.dst in graph.by_name and _is_data(graph, e.dst, e.slot) for e in graph.out_edges[node.name]]
        free = name_apart(node.name) not in graph.by_name
        if free and constants_of_norm(graph, node) and any(readers) and not all(readers):
            found.append(node.name)
    return tuple(found)


def _is_data(graph: Graph, name: str, slot: int) -> bool:
    """Whether a slot is that of a layer's data, and its weights are constants."""
    node = graph[name]
    return node.op in LAYERS and slot == 0 and all(graph[s].op == CONST for s in node.inputs[1:])


def name_apart(name: str) -> str:
    """The name of a norm, or of a constant of it, that is computed once more for layers."""
    return f"{name}.for_layers"


def chains_of(graph: Graph) -> Iterator[Chain]:
    """Pairs of layers whose channels can be computed in parts: those with operators between that let no factor pass."""
    for last in graph:
        if not _can_be_parted(graph, last):
            continue
        between: list[str] = []
        node = graph[last.inputs[0]]
        while node.op in _ENTRYWISE and len(node.inputs) == 1 and len(graph.out_edges[node.name]) == 1:
            between.insert(0, node.name)
            node = graph[node.inputs[0]]
        passes = all(graph[name].op in COMMUTING for name in between)
        if f"{last.name}.sum" in graph.by_name or any(f"{n}.part1" in graph.by_name for n in (node.name, last.name)):
            continue
        if not passes and _can_be_parted(graph, node) and len(graph.out_edges[node.name]) == 1:
            yield Chain(node.name, tuple(between), last.name)


def _can_be_parted(graph: Graph, node: Node) -> bool:
    whole = node.op in _PARTED and node.shape is not None and node.attrs.get("groups", 1) == 1
    return whole and graph[node.inputs[0]].op != CONST and all(graph[s].op == CONST for s in node.inputs[1:])


def _channels(graph: Graph, chain: Chain) -> int:
    return int(graph.consts[graph[chain.last].inputs[1]].shape[1])


# ---------------------------------------------------------------- splitting
def _with_norm_apart(graph: Graph, name: str) -> Graph:
    apart, consts = name_apart(name), dict(graph.consts)
    nodes: list[Node] = []
    for node in graph:
        if node.op != CONST and _is_data_of(graph, node, name):
            node = replace(node, inputs=(apart, *node.inputs[1:]))
        nodes.append(node)
        if node.name != name:
            continue
        for constant in node.inputs[1:]:
            consts[name_apart(constant)] = graph.consts[constant]
            nodes.append(replace(graph[constant], name=name_apart(constant)))
        nodes.append(replace(node, name=apart, inputs=(node.inputs[0], *map(name_apart, node.inputs[1:]))))
    return graph.with_nodes(nodes, consts=consts)


def _is_data_of(graph: Graph, node: Node, name: str) -> bool:
    return bool(node.inputs) and node.inputs[0] == name and _is_data(graph, node.name, 0)


def _with_parts(graph: Graph, chain: Chain, parts: Sequence[Sequence[int]]) -> Graph:
    taken = {channel for part in parts for channel in part}
    rest = [c for c in range(_channels(graph, chain)) if c not in taken]
    consts, replaced = dict(graph.consts), dict[str, list[Node]]()
    total = chain.last
    for number, channels in enumerate((rest, *parts)):
        index = torch.tensor(channels)
        suffix = f".part{number}" if number else ""

        def sliced(edge: Edge, axis: int, index: Tensor = index, suffix: str = suffix) -> tuple[str, Node]:
            """The channels of a constant; that of the first part has its name unless other nodes read it."""
            name = graph.source(edge)
            own = not suffix and len(graph.out_edges[name]) == 1
            new = name if own else f"{edge.dst}{suffix or '.part0'}.{_WORDS[edge.slot]}"
            consts[new] = graph.consts[name].index_select(axis, index)
            return new, replace(graph[name], name=new, shape=tuple(consts[new].shape))

        first, last = graph[chain.first], graph[chain.last]
        made = [sliced(e, 0) for e in first.edges[1:]]
        source = f"{first.name}{suffix}"
        into = (first.inputs[0], *(name for name, _ in made))
        replaced.setdefault(first.name, []).extend(
            [*(node for _, node in made), replace(first, name=source, inputs=into, shape=_narrowed(first, len(index)))]
        )
        for name in chain.between:
            node = graph[name]
            shape = _narrowed(node, len(index), channel_axis(first))
            replaced.setdefault(name, []).append(replace(node, name=f"{name}{suffix}", inputs=(source,), shape=shape))
            source = f"{name}{suffix}"
        weight, made_weight = sliced(last.edges[1], 1)
        bias = last.inputs[2:] if not number else ()
        behind = replaced.setdefault(last.name, [])
        behind += [made_weight, replace(last, name=f"{last.name}{suffix}", inputs=(source, weight, *bias))]
        if number:
            name = f"{last.name}.sum{number if number > 1 else ''}"
            behind.append(Node(name, "add", (total, f"{last.name}{suffix}"), {}, last.shape, last.dtype))
            total = name
    nodes: list[Node] = []
    fresh = {node.name for made in replaced.values() for node in made}
    for node in graph:
        if node.name in replaced:
            nodes += replaced[node.name]
        elif node.name not in fresh:
            nodes.append(replace(node, inputs=tuple(total if s == chain.last else s for s in node.inputs)))
    outputs = tuple(total if name == chain.last else name for name in graph.outputs)
    return graph.with_nodes(nodes, outputs=outputs, consts=consts)


def _narrowed(node: Node, channels: int, axis: int | None = None) -> tuple[int, ...]:
    shape = list(node.shape or ())
    shape[channel_axis(node) if axis is None else axis] = channels
    return tuple(shape)
