"""Rotations: channels of values multiplied by an orthogonal matrix, and the constants that make and read them with it,
so that a network computes the same with channels that are mixed, none of which is much larger than the others.

A layer whose outputs are to be rotated has its weight and bias rotated, one that reads them has its weight rotated
back. Between them, a rotation passes sums, whatever moves vectors of channels as a whole, products with one factor for
a vector, and norms along the channels: root mean squares do not change, and means do not, either, if the rotation keeps
the vector of ones. Gains and biases of norms do not commute with it, so the layers behind them take them. That covers:

- *residual streams* of transformers with norms before their layers, from the embeddings to the last norm;
- *heads*: what attention weighs, from one projection to the next, and queries with keys, whose product stays as it is;
- other layers with nothing but sums and moves between, as the bottlenecks of MobileNetV2 are.

All vectors of a rotation are multiplied by the same matrix: signs, a Walsh-Hadamard transform, and where ones are kept
a reflection. Its sums have a fixed order, so that constants are equal on every machine, to the last bit. What is stored
is the number that signs are drawn with.

References:
    S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", NeurIPS 2024; Z. Liu et al., "SpinQuant:
    LLM Quantization with Learned Rotations", arXiv:2405.16406 (there R1 and R2; those that would have to be computed
    while the network runs are left out); S. Ashkboos et al., "SliceGPT", ICLR 2024, for the gains of norms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hago.arithmetic.types import Edge
from hago.correction.channels import LAYERS, POOLINGS, is_norm
from hago.correction.disjoint_sets import DisjointSets
from hago.errors import LogError
from hago.graph import CONST, Graph, Node
from hago.ops import OPS, Ops

#: Vectors of fewer channels are not rotated.
LEAST_WIDTH: Final = 4
#: A norm that keeps its bias has it divided by its gains; no quotient may be larger.
MOST_QUOTIENT: Final = 64.0
#: The call that repeats a constant for every sample, where the number of samples is not fixed.
_EXPAND: Final = "aten.expand.default"
#: A reflection that moves the vector of ones by less, squared, is left out.
_NO_REFLECTION: Final = 1e-24


# ---------------------------------------------------------------- rotating
@dataclass(frozen=True, slots=True)
class Rotation:
    """An orthogonal matrix.

    Args:
        width: of the vectors that it multiplies.
        seed: signs are drawn with it.
        keeps_ones: whether it leaves the vector of ones as it is.
    """

    width: int
    seed: int
    keeps_ones: bool

    def along(self, values: Tensor, axis: int) -> Tensor:
        """Values, float64, of which the vectors along an axis are multiplied by the matrix from the right.

        Args:
            axis: its size is a multiple of the width; every `width` neighbours are a vector.
        """
        rows = values.movedim(axis, -1)
        vectors = rows.reshape(*rows.shape[:-1], -1, self.width)
        turned = self._transformed(vectors)
        if self.keeps_ones:
            turned = self._reflected(turned)
        return turned.reshape(rows.shape).movedim(-1, axis)

    def _transformed(self, vectors: Tensor) -> Tensor:
        """Signs and a Walsh-Hadamard transform of the first channels, as many as the largest power of two, and of the
        last, where that leaves some."""
        part = 1 << (self.width.bit_length() - 1)
        drawn = np.random.PCG64(self.seed).random_raw(2 * self.width)
        signs = torch.from_numpy(1.0 - 2.0 * (drawn >> np.uint64(63)).astype(np.float64)).reshape(2, -1)
        vectors = vectors * signs[0]
        vectors = torch.cat([_walsh_hadamard(vectors[..., :part]), vectors[..., part:]], -1)
        if part < self.width:
            rest, vectors = self.width - part, vectors * signs[1]
            vectors = torch.cat([vectors[..., :rest], _walsh_hadamard(vectors[..., rest:])], -1)
        return vectors

    def _reflected(self, vectors: Tensor) -> Tensor:
        """Transformed vectors reflected so that the vector of ones is itself again."""
        ones = torch.full((self.width,), 1.0 / math.sqrt(self.width), dtype=torch.float64)
        normal = self._transformed(ones) - ones
        square = float(halved_sum(normal * normal))
        if square < _NO_REFLECTION:
            return vectors
        return vectors - (halved_sum(vectors * normal) * (2.0 / square)).unsqueeze(-1) * normal


def _walsh_hadamard(vectors: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform along the last axis, whose size is a power of two."""
    shape, half = vectors.shape, 1
    while half < shape[-1]:
        first, second = vectors.reshape(*shape[:-1], -1, 2, half).unbind(-2)
        vectors = torch.stack([first + second, first - second], -2).reshape(shape)
        half *= 2
    return vectors * (1.0 / math.sqrt(shape[-1]))


def halved_sum(values: Tensor) -> Tensor:
    """The sum along the last axis in an order that is equal on every machine: the second half is added to the first."""
    while (size := values.shape[-1]) > 1:
        half = (size + 1) // 2
        second = torch.nn.functional.pad(values[..., half:], (0, 2 * half - size))
        values = values[..., :half] + second
    return values[..., 0]


# ---------------------------------------------------------------- what can be rotated
@dataclass(frozen=True, slots=True)
class Rotatable:
    """Values whose channels can be multiplied by one rotation.

    Args:
        width: of the vectors.
        keeps_ones: whether the rotation has to keep the vector of ones, since means are subtracted.
        constants: the edges of the constants that change, each with the axis along which its vectors lie.
        norms: by norm with gains, the layers that take them.
        values: the nodes whose values are rotated.
    """

    width: int
    keeps_ones: bool
    constants: tuple[tuple[Edge, int], ...]
    norms: Mapping[str, tuple[str, ...]]
    values: tuple[str, ...]


def find_rotatable(graph: Graph, ops: Ops = OPS) -> dict[str, Rotatable]:
    """What can be rotated, by the name of the first node whose value it is, in the order of the graph."""
    tracking = _Tracking(graph, ops)
    for node in graph:
        tracking.visit(node)
    for name in graph.outputs:
        tracking.fix(tracking.places.get(name))
    return tracking.finish()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the vectors of a value lie.

    Args:
        space: the number of what they are rotated with.
        axis: along which they lie.
        width: every so many neighbours are a vector, or several.
        norm: that made the value and whose gains the layers that read it take.
    """

    space: int
    axis: int
    width: int
    norm: str | None = None


@dataclass(slots=True)
class _Space:
    """What was found of values with one rotation; see `Rotatable`."""

    width: int
    fixed: bool = False
    keeps_ones: bool = False
    constants: list[tuple[Edge, int]] = field(default_factory=list)
    norms: dict[str, list[str]] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)

    def take(self, other: _Space) -> None:
        """What was found of further values with the same rotation."""
        self.width = math.gcd(self.width, other.width)
        self.fixed |= other.fixed
        self.keeps_ones |= other.keeps_ones
        self.constants += other.constants
        for norm, layers in other.norms.items():
            self.norms.setdefault(norm, []).extend(layers)
        self.values += other.values


@dataclass(slots=True)
class _Tracking:
    """The state of one `find_rotatable`: spaces by number, of which some were found to be the same, and the nodes
    that read rotated operands so that their values are as they were (`ends`)."""

    graph: Graph
    ops: Ops
    places: dict[str, _Place] = field(default_factory=dict)
    spaces: list[_Space] = field(default_factory=list)
    numbers: DisjointSets = field(default_factory=DisjointSets)
    ends: set[str] = field(default_factory=set)

    # ------------------------------------------------------------ spaces
    def fresh(self, width: int, *constants: tuple[Edge, int]) -> int:
        """The number of a new space that constants write."""
        self.spaces.append(_Space(width, constants=list(constants)))
        return self.numbers.add()

    def join(self, numbers: Sequence[int]) -> int:
        """Make spaces the same."""
        return functools.reduce(self.numbers.join, numbers)

    def fix(self, *places: _Place | None) -> None:
        """Leave spaces as they are."""
        for place in places:
            if place is not None:
                self.spaces[place.space].fixed = True

    # ------------------------------------------------------------ nodes
    def visit(self, node: Node) -> None:
        """Find the place of a node's value, and fix the operands that it reads otherwise."""
        if node.op == CONST:
            return
        place = None if node.shape is None else self._place(node)
        if place is not None:
            self.places[node.name] = place
            self.spaces[place.space].values.append(node.name)
        elif node.name not in self.ends:
            self.fix(*(self.places.get(s) for s in node.inputs))

    def _place(self, node: Node) -> _Place | None:
        """The place of a node's value; None if it is not rotated."""
        rule = self.ops.get(node.op)
        if is_norm(node):
            return self._norm(node)
        if node.op in LAYERS:
            return self._layer(node)
        if node.op == "embedding":
            return self._embedding(node)
        if node.op in ("add", "sub"):
            return self._sum(node)
        if node.op in ("neg", "mul", "div"):
            return self._multiplied(node)
        if node.op == "mean":
            return self._mean(node)
        if node.op == "matmul":
            return self._product(node)
        if node.op == "scaled_dot_product_attention":
            return self._attention(node)
        if node.op == "opaque" and node.attrs["target"] == _EXPAND:
            return self._repeated(node)
        return self._moved(node) if rule is not None and rule.moves_values and node.op not in POOLINGS else None

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.graph.consts[name].shape if self._is_const(name) else self.graph[name].shape or ())

    def _is_const(self, name: str) -> bool:
        return self.graph[name].op == CONST

    def _from_end(self, name: str) -> int:
        """The axis of a rotated value's vectors, counted from the end."""
        return self.places[name].axis - len(self._shape(name))

    def _layer(self, node: Node) -> _Place | None:
        weights = node.inputs[1:]
        if node.attrs.get("groups", 1) > 1 or not all(map(self._is_const, weights)) or self._is_const(node.inputs[0]):
            return None
        axis = len(node.shape or ()) - 1 if node.op == "linear" else 1
        out_axis, in_axis = LAYERS[node.op]
        read = self.places.get(node.inputs[0])
        if read is not None and read.axis == axis:
            space = self.spaces[read.space]
            space.constants.append((node.edges[1], in_axis))
            if read.norm is not None:
                space.norms.setdefault(read.norm, []).append(node.name)
        else:
            self.fix(read)
        written = [(node.edges[1], out_axis), *((edge, 0) for edge in node.edges[2:])]
        width = self.graph.consts[weights[0]].shape[out_axis]
        return _Place(self.fresh(width, *written), axis, width)

    def _embedding(self, node: Node) -> _Place | None:
        if not self._is_const(node.inputs[0]):
            return None
        width = (node.shape or ())[-1]
        return _Place(self.fresh(width, (node.edges[0], 1)), len(node.shape or ()) - 1, width)

    def _norm(self, node: Node) -> _Place | None:
        place = self.places.get(node.inputs[0])
        if place is None or place.norm is not None or place.axis != len(node.shape or ()) - 1:
            return None
        if not all(map(self._is_const, node.inputs[1:])):
            return None
        space, has_gains = self.spaces[place.space], len(node.inputs) > 1
        space.keeps_ones |= node.op == "layer_norm"
        if has_gains:
            space.norms[node.name] = []
        return replace(place, norm=node.name if has_gains else None)

    def _sum(self, node: Node) -> _Place | None:
        """Operands that are rotated alike, and constants that can be."""
        placed = [s for s in node.inputs if s in self.places]
        if not placed or any(self.places[s].norm is not None for s in placed):
            return None
        axis, size = self._from_end(placed[0]), self._shape(placed[0])[self.places[placed[0]].axis]
        added = list[tuple[Edge, int]]()
        for edge, source in zip(node.edges, node.inputs, strict=True):
            shape = self._shape(source)
            if len(shape) < -axis or shape[axis] != size:
                return None
            if self._is_const(source) and self.graph.consts[source].is_floating_point():
                added.append((edge, len(shape) + axis))
            elif source not in self.places or self._from_end(source) != axis:
                return None
        width = math.gcd(*(self.places[s].width for s in placed))
        space = self.join([self.places[s].space for s in placed])
        self.spaces[space].constants += added
        return _Place(space, len(node.shape or ()) + axis, width)

    def _multiplied(self, node: Node) -> _Place | None:
        """A value times a factor, or one for each vector."""
        rotated = node.inputs[1] if node.op == "mul" and node.inputs[0] not in self.places else node.inputs[0]
        factors = [s for s in node.inputs if s != rotated]
        if rotated not in self.places or self.places[rotated].norm is not None:
            return None
        axis = self._from_end(rotated)
        for source in factors:
            shape = self._shape(source)
            known = self._is_const(source) or self.graph[source].shape is not None
            if not known or source in self.places or (len(shape) >= -axis and shape[axis] != 1):
                return None
        if len(factors) + 1 < len(node.inputs):  # a square
            return None
        return replace(self.places[rotated], axis=len(node.shape or ()) + axis)

    def _mean(self, node: Node) -> _Place | None:
        place = self.places.get(node.inputs[0])
        axes = {axis % len(self._shape(node.inputs[0])) for axis in node.attrs["axes"]}
        if place is None or place.axis in axes:
            return None
        return place if node.attrs["keepdim"] else replace(place, axis=place.axis - sum(a < place.axis for a in axes))

    def _contracts(self, first: str, second: str, second_axis: int) -> bool:
        """Whether the vectors of two values are multiplied with each other."""
        places = [self.places.get(s) for s in (first, second)]
        if any(p is None or p.norm is not None for p in places):
            return False
        return self._from_end(first) == -1 and self._from_end(second) == second_axis

    def _product(self, node: Node) -> _Place | None:
        """A product of matrices has the columns of the second and the rows of the first."""
        first, second = node.inputs
        if min(len(self._shape(first)), len(self._shape(second))) < 2:
            return None
        if self._contracts(first, second, second_axis=-2):
            self.join([self.places[s].space for s in node.inputs])
            self.ends.add(node.name)
            return None
        for source, other, axis in ((second, first, -1), (first, second, -2)):
            place = self.places.get(source)
            if place is not None and place.norm is None and self._from_end(source) == axis and other not in self.places:
                return replace(place, axis=len(node.shape or ()) + axis)
        return None

    def _attention(self, node: Node) -> _Place | None:
        """Attention that is one node: queries and keys are multiplied, and values weighed."""
        query, key, value, *masks = node.inputs
        self.ends.add(node.name)
        if self._contracts(query, key, second_axis=-1):
            self.join([self.places[query].space, self.places[key].space])
        else:
            self.fix(self.places.get(query), self.places.get(key))
        self.fix(*(self.places.get(s) for s in masks))
        place = self.places.get(value)
        if place is None or place.norm is not None or self._from_end(value) != -1:
            self.fix(place)
            return None
        return replace(place, axis=len(node.shape or ()) - 1)

    def _repeated(self, node: Node) -> _Place | None:
        """A constant for every sample, as the class token of a vision transformer is."""
        shape, source = node.shape or (), node.inputs[0]
        if not self._is_const(source) or not self.graph.consts[source].is_floating_point() or not shape:
            return None
        axis, width = len(self._shape(source)) - 1, shape[-1]
        if self._shape(source)[-1:] != (width,):
            return None
        return _Place(self.fresh(width, (node.edges[0], axis)), len(shape) - 1, width)

    def _moved(self, node: Node) -> _Place | None:
        """What moves entries is run on their numbers, which show where the vectors are."""
        if node.op == "pad" and node.attrs.get("value"):
            return None
        placed = [self.places[s] for s in node.inputs if s in self.places]
        constants = [
            (edge, len(self._shape(s)) - 1)
            for edge, s in zip(node.edges, node.inputs, strict=True)
            if self._is_const(s) and self.graph.consts[s].is_floating_point() and self._shape(s)
        ]
        norms = {p.norm for p in placed} | ({None} if constants or node.op == "pad" else set())
        widths = [p.width for p in placed] + [self._shape(self.graph.source(e))[axis] for e, axis in constants]
        if not widths or len(norms) > 1 or (width := math.gcd(*widths)) < LEAST_WIDTH:
            return None
        axes = dict(constants)
        operands, seen = list[Tensor](), 1
        for edge, source in zip(node.edges, node.inputs, strict=True):
            axis = self.places[source].axis if source in self.places else axes.get(edge)
            if axis is not None:
                operands.append(_numbered(self._shape(source), axis, seen))
                seen += operands[-1].numel()
            elif self._is_const(source):
                operands.append(self.graph.consts[source])  # indices
            else:
                return None
        moved: Any = self.ops[node.op].compute(node.attrs, *operands)
        found = _vectors_of(moved.to(torch.int64), width) if isinstance(moved, Tensor) else None
        if found is None:
            return None
        axis, width = found
        spaces = [p.space for p in placed]
        if constants:
            spaces.append(self.fresh(width, *constants))
        space = self.join(spaces)
        self.spaces[space].width = math.gcd(self.spaces[space].width, width)
        return _Place(space, axis, width, *norms)

    # ------------------------------------------------------------ result
    def finish(self) -> dict[str, Rotatable]:
        """The spaces that can be rotated, by name."""
        whole: dict[int, _Space] = {}
        for number, space in enumerate(self.spaces):
            root = self.numbers.least(number)
            if root == number:
                whole[root] = space
            else:
                whole[root].take(space)
        order = {node.name: number for number, node in enumerate(self.graph)}
        found = {}
        for space in whole.values():
            free = not space.fixed and space.width >= LEAST_WIDTH and bool(space.values)
            if free and all(_gains_can_move(self.graph, self.graph[n], layers) for n, layers in space.norms.items()):
                values = tuple(sorted(space.values, key=order.__getitem__))
                norms = {name: tuple(layers) for name, layers in space.norms.items()}
                found[values[0]] = Rotatable(space.width, space.keeps_ones, tuple(space.constants), norms, values)
        return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def _numbered(shape: Sequence[int], axis: int, first: int) -> Tensor:
    """A number for every entry, that of its neighbour along an axis and one more."""
    last = [size for a, size in enumerate(shape) if a != axis]
    return torch.arange(first, first + math.prod(shape)).reshape(*last, shape[axis]).movedim(-1, axis)


def _vectors_of(numbers: Tensor, width: int) -> tuple[int, int] | None:
    """The axis along which whole vectors lie, or vectors of zeros, and the largest part of a width that they have; None
    if there is none.

    Args:
        numbers: those of `_numbered`, from 1 on, so that vectors of the width begin behind its multiples; 0 for zeros.
    """
    best: tuple[int, int] | None = None
    for axis in range(numbers.ndim):
        along = numbers.movedim(axis, -1)
        for part in range(width, LEAST_WIDTH - 1, -1):
            if width % part or numbers.shape[axis] % part or (best is not None and part <= best[1]):
                continue
            vectors = along.reshape(-1, part)
            first = vectors[:, :1]
            whole = ((vectors == first + torch.arange(part)) & ((first - 1) % part == 0)).all(1)
            if bool((whole | (vectors == 0).all(1)).all()):
                best = (axis, part)
                break
    return best


# ---------------------------------------------------------------- norms
def _gains_can_move(graph: Graph, norm: Node, layers: Sequence[str]) -> bool:
    """Whether the layers behind a norm can take its gains, and its bias if it has one."""
    if not _has_bias(graph, norm) or _take_bias(graph, layers):
        return True
    gain, bias = (graph.consts[s].to(torch.float64) for s in norm.inputs[1:3])
    return bool((bias.abs() <= MOST_QUOTIENT * gain.abs()).all())


def _has_bias(graph: Graph, norm: Node) -> bool:
    return len(norm.inputs) > 2 and bool(graph.consts[norm.inputs[2]].any())


def _take_bias(graph: Graph, layers: Sequence[str]) -> bool:
    """Whether all layers have biases that can take a norm's: convolutions pad what they read with zeros."""
    return all(graph[name].op == "linear" and len(graph[name].inputs) > 2 for name in layers)


# ---------------------------------------------------------------- applying
def rotated(graph: Graph, seeds: Mapping[str, int], ops: Ops = OPS) -> Graph:
    """The network with rotations.

    A constant that its readers need differently is stored once for each.

    Args:
        seeds: by what can be rotated, the seed of its rotation; see `find_rotatable`.

    Raises:
        LogError: they do not fit the graph; names the node.
    """
    found = find_rotatable(graph, ops)
    for name in seeds:
        if name not in found:
            raise LogError(
                f"at $.corrections.rotations[{name!r}]: got a node whose channels cannot be rotated, expected one of "
                f"{', '.join(found) or 'none'}; it was edited"
            )
    changed = _Changed(graph)
    chosen = {name: rotatable for name, rotatable in found.items() if name in seeds}
    for rotatable in chosen.values():
        for norm, layers in rotatable.norms.items():
            changed.move_gains(graph[norm], layers)
    for name, rotatable in chosen.items():
        rotation = Rotation(rotatable.width, seeds[name], rotatable.keeps_ones)
        for edge, axis in rotatable.constants:
            changed[edge] = rotation.along(changed[edge], axis)
        for norm in rotatable.norms:
            for edge in graph[norm].edges[2:]:
                changed[edge] = rotation.along(changed[edge], 0)
    return changed.graph()


@dataclass(slots=True)
class _Changed:
    """Constants as they change, float64, by the edge that reads them."""

    original: Graph
    constants: dict[Edge, Tensor] = field(default_factory=dict)

    def __getitem__(self, edge: Edge) -> Tensor:
        if edge not in self.constants:
            return self.original.consts[self.original.source(edge)].to(torch.float64)
        return self.constants[edge]

    def __setitem__(self, edge: Edge, value: Tensor) -> None:
        self.constants[edge] = value

    def move_gains(self, norm: Node, layers: Sequence[str]) -> None:
        """Leave a norm gains of 1; the layers behind it take its own, and its bias if all can."""
        gain = self[norm.edges[1]]
        biases = norm.edges[2:] if _has_bias(self.original, norm) else ()
        takes_bias = _take_bias(self.original, layers)
        for edge in biases:
            bias = self[edge]
            for name in layers if takes_bias else ():
                weight, own = self.original[name].edges[1:3]
                self[own] = self[own] + halved_sum(self[weight] * bias)
            # where they cannot, 0 / 0 stands for no bias
            self[edge] = torch.zeros_like(bias) if takes_bias else torch.where(bias == 0.0, bias, bias / gain)
        for name in layers:
            weight = self.original[name].edges[1]
            _, in_axis = LAYERS[self.original[name].op]
            shape = [-1 if a == in_axis else 1 for a in range(self[weight].ndim)]
            self[weight] = self[weight] * gain.reshape(shape)
        self[norm.edges[1]] = torch.ones_like(gain)

    def graph(self) -> Graph:
        """The graph with the changed constants, each rounded to the dtype that it had."""
        original, consts = self.original, dict(self.original.consts)
        inputs, added = dict[Edge, str](), dict[str, list[Node]]()
        for source in {original.source(e): None for e in self.constants}:
            edges, before = original.out_edges[source], original.consts[source]
            kept = next((before for e in edges if e not in self.constants), None)
            names = dict[str, Tensor]() if kept is None else {source: kept}
            for edge in (e for e in edges if e in self.constants):
                value = self.constants[edge].to(before.dtype)
                name = next((n for n, known in names.items() if torch.equal(known, value)), None)
                if name is None:
                    name = source if not names else _name_for(original, source, edge)
                    names[name] = consts[name] = value
                    if name != source:
                        added.setdefault(edge.dst, []).append(replace(original[source], name=name))
                inputs[edge] = name
        nodes: list[Node] = []
        for node in original:
            nodes += added.get(node.name, [])
            read = tuple(inputs.get(e, s) for e, s in zip(node.edges, node.inputs, strict=True))
            nodes.append(node if read == node.inputs else replace(node, inputs=read))
        return replace(original.with_nodes(nodes, consts=consts), corrected_from=original.uncorrected)


def _name_for(graph: Graph, source: str, edge: Edge) -> str:
    """The name of a constant that is stored once more for a reader."""
    name = f"{source}.for.{edge.dst}.{edge.slot}"
    while name in graph.by_name:
        name += "_"
    return name
