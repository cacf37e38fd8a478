"""Samples of the op rules as one-op graphs.

The samples of one op are exported together, as parts of one module: an export costs half a second
whatever it holds. Each graph is then cut out of the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from hago.graph.execute import infer_shape
from hago.graph.frontend import from_torch
from hago.graph.graph import CONST, INPUT, Graph, Node
from hago.ops import OPS, Ops
from hago.ops._rule import Sample

from .one_op import Case, draw, internal, model_of

#: Every (op, sample), and ops that no torch call means, at each rank.
KEYS = [(n, i) for n, r in OPS.items() for i in range(len(r.samples))]
INTERNAL_KEYS = [(name, rank) for name in ("affine", "channel_clamp") for rank in (2, 3, 4)]


def at_batch(sample: Sample, batch: int, seed: int) -> list[Tensor]:
    """Random tensors for every position of a sample, its inputs at that batch size."""
    shapes = tuple(s if p in sample.consts else (batch, *s[1:]) for p, s in enumerate(sample.shapes))
    resized = Sample(sample.fn, shapes, sample.consts, sample.low, sample.high, sample.indices)
    return draw(resized, seed)


def inputs_of(sample: Sample, tensors: list[Tensor]) -> list[Tensor]:
    return [t for p, t in enumerate(tensors) if p not in sample.consts]


class _Together(nn.Module):
    """Every sample of an op; takes a tuple of inputs for each."""

    def __init__(self, samples: tuple[Sample, ...]) -> None:
        super().__init__()
        made = [model_of(s, draw(s, i)) for i, s in enumerate(samples)]
        self.parts = nn.ModuleList(model for model, _ in made)
        self.examples = tuple(tuple(inputs) for _, inputs in made)

    def forward(self, groups: tuple[tuple[Tensor, ...], ...]) -> tuple[Tensor, ...]:
        return tuple(part(*group) for part, group in zip(self.parts, groups, strict=True))


@functools.cache
def _imported(name: str) -> tuple[_Together, Graph]:
    model = _Together(OPS[name].samples).eval()
    return model, from_torch(model, (model.examples,), fold=False, attention="whole")


def _cut(graph: Graph, output: str, inputs: tuple[str, ...]) -> Graph:
    """What `output` is computed from."""
    needed = {output, *inputs}
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed |= set(node.inputs)
    nodes = tuple(n for n in graph if n.name in needed)
    return Graph(nodes, inputs, (output,), {n.name: graph.consts[n.name] for n in nodes if n.op == CONST})


def model_and_graph(name: str, index: int) -> tuple[nn.Module, Graph]:
    """One sample as a module in eval mode, and the Graph it imports as."""
    model, whole = _imported(name)
    counts = [len(group) for group in model.examples]
    start = sum(counts[:index])
    return model.parts[index], _cut(whole, whole.outputs[index], whole.inputs[start : start + counts[index]])


def graph_of(name: str, index: int) -> Graph:
    """The one-op graph of a sample; of an op that no torch call means, `index` is the rank."""
    return _internal(name, index) if (name, index) in INTERNAL_KEYS else model_and_graph(name, index)[1]


def _internal(name: str, rank: int) -> Graph:
    generator = torch.Generator().manual_seed(rank)
    case = internal(name, rank)
    shape = (1, 3, 4, 5)[:rank]
    consts = {f"const{slot}": torch.randn(case.shapes[slot], generator=generator) for slot in case.consts}
    nodes = (
        Node("x", INPUT, (), {"dtype": "float32"}, shape),
        *(Node(n, CONST, (), {}, tuple(t.shape)) for n, t in consts.items()),
        Node(name, name, ("x", *consts), case.attrs, shape),
    )
    return Graph(nodes, ("x",), (name,), consts)


def compute_nodes(graph: Graph) -> list[Node]:
    return [n for n in graph if n.op not in (INPUT, CONST)]


@functools.cache
def imported(name: str, index: int) -> Case:
    """The node that sample `index` of op `name` imports as."""
    graph = graph_of(name, index)
    (node,) = compute_nodes(graph)
    assert node.op == name
    shapes, consts = [], {}
    for slot, source in enumerate(node.inputs):
        shape = graph[source].shape
        assert shape is not None
        if source in graph.consts:
            whole = graph.consts[source]
            consts[slot] = None if whole.is_floating_point() else whole
        else:
            shape = (2, *shape[1:])
        shapes.append(shape)
    return Case(OPS[name], node.attrs, tuple(shapes), consts)


def float_inputs(graph: Graph) -> Iterator[str]:
    return (n for n in graph.inputs if graph[n].dtype == "float32")


# ---------------------------------------------------------------- integers before and after
def _convolution(name: str, source: str, shape: tuple[int, ...], consts: dict[str, Tensor]) -> list[Node]:
    """A convolution of kernel 1 (for rows a linear) that keeps the shape."""
    rank, channels = len(shape), shape[1]
    dims = rank - 2
    generator = torch.Generator().manual_seed(channels)
    if dims:
        consts[f"{name}.weight"] = 0.5 + torch.rand((channels, 1, *[1] * dims), generator=generator)
        attrs = {"stride": [1] * dims, "padding": [0] * dims, "dilation": [1] * dims, "groups": channels}
    else:
        consts[f"{name}.weight"] = torch.eye(channels) + 0.1 * torch.randn(channels, channels, generator=generator)
        attrs = {}
    weight = Node(f"{name}.weight", CONST, (), {}, tuple(consts[f"{name}.weight"].shape))
    op = f"conv{dims}d" if dims else "linear"
    return [weight, Node(name, op, (source, weight.name), attrs, shape)]


def among_integers(graph: Graph, ops: Ops = OPS) -> Graph:
    """A one-op graph whose op reads the accumulators of convolutions and is read by one.

    Where a value has no rank that a convolution takes, it is read as it is.
    """
    consts, fed = dict(graph.consts), {}
    nodes: list[Node] = []
    for node in graph:
        nodes.append(replace(node, inputs=tuple(fed.get(s, s) for s in node.inputs)))
        shape = node.shape or ()
        if node.name in set(float_inputs(graph)) and 2 <= len(shape) <= 5:
            nodes += _convolution(f"{node.name}.before", node.name, shape, consts)
            fed[node.name] = nodes[-1].name
    last = graph.outputs[0]
    shape = graph[last].shape or ()
    outputs = [last]
    if 2 <= len(shape) <= 5:
        nodes += _convolution("after", last, shape, consts)
        outputs.append("after")
    made = Graph(tuple(nodes), graph.inputs, tuple(outputs), consts)
    for node in compute_nodes(made):
        assert infer_shape(node, [made[s].shape or () for s in node.inputs], ops) == node.shape
    return made
