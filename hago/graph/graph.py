"""Node and Graph: the small immutable form of a model that everything else reads.

Invariants, checked by the constructor: names are unique; a node stands after its inputs; weights
are nodes of op `const` whose tensors stand in `consts`; every graph input is a node of op `input`.
Shapes are those at batch 1; axis 0 is the batch, except for constants. A dtype that a node states is that of the
value that `execute.run_real` computes there.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from hago.arithmetic.types import Edge, torch_dtype
from hago.errors import GraphError, as_strings, did_you_mean
from hago.graph.schedule import Schedule, make_schedule
from hago.serialization.summary import Summarized, Summary, counts_text, wrapped_lines
from hago.serialization.tensor_file import dtype_name
from hago.serialization.text_table import bytes_text, count, counted

INPUT: Final = "input"
CONST: Final = "const"
#: The name that a graph's outputs consume under: the i-th output is the edge `output:i`.
OUTPUT: Final = "output"


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    Args:
        shape: of its value at batch 1; None where that is not a tensor.
        dtype: of its value, as torch calls it ("float32", "int64", "bool"); None where that is not a tensor, and where
            it is not stated: in a graph that was built by hand (see `execute.infer_dtypes`). Neither printed nor
            hashed, since the inputs and the ops decide it.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    edges: tuple[Edge, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", tuple(Edge(self.name, slot) for slot in range(len(self.inputs))))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The name of its value, as a schedule reads it."""
        return (self.name,)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of its value as an object of torch.

        Raises:
            HagoError: the node states no dtype, or one that torch does not have.
        """
        if self.dtype is None:
            raise GraphError(f"node {self.name!r} states no dtype; complete its graph with execute.infer_dtypes")
        return torch_dtype(self.dtype)

    def __str__(self) -> str:
        arguments = [*self.inputs, *(f"{k}={_plain(v)}" for k, v in sorted(self.attrs.items()))]
        shape = "" if self.shape is None else f" : {'x'.join(map(str, self.shape)) or 'scalar'}"
        return f"{self.name} = {self.op}({', '.join(arguments)}){shape}"


@dataclass(frozen=True, eq=False, repr=False)
class Graph(Summarized):
    """A model: nodes in topological order, named inputs and outputs, and constant tensors.

    Args:
        nodes: every node, each after its inputs. The dtypes of constants and inputs need not be given: they are those
            of the tensor and of the attribute "dtype" (float32 if it is missing).
        inputs: names of the input nodes, in calling order.
        outputs: names of the nodes whose values are returned.
        consts: the tensor of each `const` node.
        in_spec, out_spec: how arguments and results are nested, as torch's pytree writes it in
            JSON; None for plain positional tensors.
        corrected_from: the network that corrections were applied to; None for a network as it was imported.
        untrained: names of constants that training leaves as they are, since they are not made of parameters that take
            a gradient: buffers, frozen parameters, and numbers that stand in the code of a model.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    consts: Mapping[str, Tensor] = field(default_factory=dict)
    in_spec: str | None = None
    out_spec: str | None = None
    corrected_from: Graph | None = None
    untrained: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        for listed in ("inputs", "outputs"):
            object.__setattr__(self, listed, as_strings(getattr(self, listed), listed))
        object.__setattr__(self, "untrained", frozenset(as_strings(self.untrained, "untrained")))
        verify(self)
        object.__setattr__(self, "nodes", tuple(_with_stated_dtype(n, self.consts) for n in self.nodes))

    @functools.cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {n.name: n for n in self.nodes}

    def __getitem__(self, name: str) -> Node:
        if name not in self.by_name:
            raise GraphError(f"the graph has no node {name!r}.{did_you_mean(name, self.by_name)}")
        return self.by_name[name]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @functools.cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every consumer's slot, in node order; those of the graph's outputs last."""
        inner = tuple(e for n in self.nodes for e in n.edges)
        return inner + tuple(Edge(OUTPUT, i) for i in range(len(self.outputs)))

    def source(self, edge: Edge) -> str:
        """The name of the node whose value travels on `edge`."""
        return self.outputs[edge.slot] if edge.dst == OUTPUT else self[edge.dst].inputs[edge.slot]

    @functools.cached_property
    def out_edges(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges that each node's value travels on."""
        found: dict[str, list[Edge]] = {n.name: [] for n in self.nodes}
        for edge in self.edges:
            found[self.source(edge)].append(edge)
        return {name: tuple(edges) for name, edges in found.items()}

    @functools.cached_property
    def schedule(self) -> Schedule[Node]:
        """The nodes that are computed, in order, with the values that each is the last to read."""
        return make_schedule(self.computed, self.outputs)

    @property
    def uncorrected(self) -> Graph:
        """The network without corrections, to which results are compared: itself if it has none."""
        return self if self.corrected_from is None else self.corrected_from

    @functools.cached_property
    def model_hash(self) -> str:
        """The sha256 by which strategies, logs and stored models name the model they are for; a corrected network has
        that of the network without corrections.

        It covers the structure (see `hashed_text`), and the name, dtype, shape and bytes of every constant, whatever
        its layout in memory. It does not cover how arguments and results are nested. Equal models have equal hashes.
        Files name the hash of the graph after all passes, so a pass that changes a graph changes it (see
        `hago.graph.passes`).
        """
        if self.corrected_from is not None:
            return self.corrected_from.model_hash
        return self._content_hash()

    @functools.cached_property
    def correction_hash(self) -> str:
        """The sha256 of a corrected network, by which its values differ from those of the network without corrections;
        empty for a network as it was imported."""
        return "" if self.corrected_from is None else self._content_hash()

    def _content_hash(self) -> str:
        digest = hashlib.sha256(hashed_text(self).encode())
        for name in sorted(self.consts):
            if self.consts[name].is_meta:
                raise GraphError(
                    f"a stored model does not hold the float values of {name!r}, so its graph has no hash; its "
                    "provenance names that of the model"
                )
            tensor = self.consts[name].detach().cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def computed(self) -> tuple[Node, ...]:
        """The nodes that are computed: all but inputs and constants."""
        return tuple(n for n in self.nodes if n.op not in (INPUT, CONST))

    def summary(self) -> Summary:
        """Inputs, outputs, ops and the size of the constants."""
        values = list(self.consts.values())
        weights = f"{count(sum(t.numel() for t in values))} values in {counted(len(values), 'tensor')}"
        return Summary(
            f"Graph of {counted(len(self.computed), 'node')}",
            {
                "inputs": ", ".join(_value_text(self[name]) for name in self.inputs),
                "outputs": ", ".join(_value_text(self[name]) for name in self.outputs),
                "ops": counts_text(n.op for n in self.computed),
                "weights": f"{weights}, {bytes_text(sum(t.numel() * t.element_size() for t in values))}",
            },
        )

    def __str__(self) -> str:
        head = f"graph({', '.join(self.inputs)}) -> {', '.join(self.outputs)}, with shapes at batch 1"
        return "\n".join(part for line in (head, *(f"  {n}" for n in self.nodes)) for part in wrapped_lines(line))

    def with_nodes(
        self,
        nodes: Iterable[Node],
        *,
        outputs: tuple[str, ...] | None = None,
        consts: Mapping[str, Tensor] | None = None,
    ) -> Graph:
        """This graph with other nodes, and with other outputs and constant tensors where they are given; constants that
        neither a node nor an output reads are dropped."""
        nodes = tuple(nodes)
        outputs = self.outputs if outputs is None else outputs
        consts = self.consts if consts is None else consts
        read = {source for n in nodes for source in n.inputs} | set(outputs)
        kept = tuple(n for n in nodes if n.op != CONST or n.name in read)
        names = {n.name for n in kept}
        return replace(self, nodes=kept, outputs=outputs, consts={k: v for k, v in consts.items() if k in names})


def _with_stated_dtype(node: Node, consts: Mapping[str, Tensor]) -> Node:
    """A constant with the dtype of its tensor, and an input with that of its attribute; other nodes unchanged."""
    dtype = node.dtype
    if node.op == CONST:
        dtype = dtype_name(consts[node.name].dtype)
    elif node.op == INPUT:
        dtype = node.attrs.get("dtype", dtype or "float32")
    return node if dtype == node.dtype else replace(node, dtype=dtype)


def _value_text(node: Node) -> str:
    """The name of a node, and the dtype and shape of its value as far as they are known."""
    if node.shape is None:
        return " ".join(filter(None, (node.name, node.dtype)))
    first, *others = node.shape or ("scalar",)
    shape = f"({', '.join(map(str, ('batch' if first == 1 else first, *others)))})"
    return " ".join(filter(None, (node.name, node.dtype, shape)))


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


#: Ops that were renamed, and the names that they are hashed under; none so far.
_HASHED_AS: Final[Mapping[str, str]] = {}


def hashed_text(graph: Graph) -> str:
    """The structure of a graph as `Graph.model_hash` hashes it: a file format, which must never change.

    It covers the names of inputs and outputs in order, and of every node its name, op, inputs, attributes (as JSON,
    sorted by name) and shape at batch 1. It equals what `str(graph)` gave when the first strategies were written, and
    is apart from it so that a graph can be printed in another way. An op that is renamed goes into `_HASHED_AS`; a
    field that is added to `Node` or `Graph` is left out, or written only where it is not its default.
    """
    lines = [f"graph({', '.join(graph.inputs)}) -> {', '.join(graph.outputs)}"]
    for node in graph.nodes:
        attributes = (f"{k}={json.dumps(v, sort_keys=True, default=str)}" for k, v in sorted(node.attrs.items()))
        arguments = ", ".join(node.inputs) + "".join(f", {attribute}" for attribute in attributes)
        shape = "" if node.shape is None else f" : {'x'.join(map(str, node.shape)) or 'scalar'}"
        lines.append(f"  {node.name} = {_HASHED_AS.get(node.op, node.op)}({arguments}){shape}")
    return "\n".join(lines)


def verify(graph: Graph) -> None:
    """Check the invariants of a Graph.

    Raises:
        GraphError: which node breaks which one.
    """
    seen: dict[str, str] = {}
    for node in graph.nodes:
        if node.name in seen:
            raise GraphError(f"two nodes are called {node.name!r}; names must be unique")
        if node.name == OUTPUT or ":" in node.name or not node.name:
            raise GraphError(f"{node.name!r} cannot name a node: it is empty, 'output', or contains ':'")
        for source in node.inputs:
            if source not in seen:
                raise GraphError(f"node {node.name!r} reads {source!r}, which does not stand before it")
        if node.op == CONST and node.name not in graph.consts:
            raise GraphError(f"const node {node.name!r} has no tensor in consts")
        seen[node.name] = node.op
    for name in graph.inputs:
        if seen.get(name) != INPUT:
            raise GraphError(f"graph input {name!r} is not a node of op 'input'")
    for name in graph.outputs:
        if name not in seen:
            raise GraphError(f"graph output {name!r} is not a node")
