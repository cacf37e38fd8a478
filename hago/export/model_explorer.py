"""Files for Model Explorer: the graph of a Plan, and figures of its nodes that are overlaid on the graph.

`hago.export.formats` writes them. The first file is a graph collection with one graph. Every node is in the layers that
its name tells (`block1.conv1` is in `block1`), and its side panel shows what the Plan says of it: signature,
accumulator, and of every operand and the output bits, scale, zero point and threshold. The others are node data, one
figure each, which Model Explorer shows as colors on the graph.

References:
    https://github.com/google-ai-edge/model-explorer, `graph_builder.py` and `node_data_builder.py`: the fields.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from torch import Tensor

from hago.arithmetic.types import Edge, QParams
from hago.graph import CONST, Graph
from hago.plan import Plan, bits_of

#: The id of the graph, which node data names.
GRAPH_ID: Final = "main"
#: Colors from the least to the largest of a figure of which more is worse, and of one of which more is better.
_WORSE: Final = ("#FFFFFF", "#D55E00")
_BETTER: Final = ("#D55E00", "#FFFFFF")
#: The colors of words.
_WORD_COLORS: Final[Mapping[str, str]] = {
    **{"proved": "#CDEBDF", "possible": "#FBE3B3", "seen": "#F4C7B0", "float": "#EEEEEE"},
    **{"rounding": "#CFE8F7", "constants": "#A9CCE3", "saturation": "#FBE3B3", "overflow": "#F4C7B0"},
    "inherited": "#EEEEEE",
}
#: Of how many channels scales are listed.
_LISTED: Final = 4


def graph_collection(plan: Plan, label: str, model_hash: str) -> dict[str, Any]:
    """The graph of a Plan as JSON values: a GraphCollection.

    Args:
        label: the name of the collection.
        model_hash: of the graph, which that of a stored model cannot say, without its float weights.
    """
    graph = plan.graph
    attributes = {"hardware": plan.hardware.name, "weights": plan.weight_sizes.text(), "model_hash": model_hash}
    layers = {node.name.rpartition(".")[0] for node in graph}
    nodes = [_node(plan, graph, node.name, layers) for node in graph]
    main = {"id": GRAPH_ID, "nodes": nodes, "groupNodeAttributes": {"": attributes}}
    return {"label": label, "graphs": [main], "graphSorting": "node_count_desc"}


def plan_figures(plan: Plan) -> dict[str, dict[str, float | str]]:
    """The figures that a Plan itself gives, by name, of the nodes that have them: the fewest bits of an operand, and
    whether overflow of the accumulator is proved absent."""
    bits, verdicts = dict[str, float | str](), dict[str, float | str]()
    for node in plan.graph.computed:
        own = [target for edge in node.edges if (target := plan.target(edge)) is not None and not _is_bias(plan, edge)]
        if own:
            bits[node.name] = min(bits_of(target) for target in own)
        verdicts[node.name] = plan.nodes[node.name].verdict if node.name in plan.nodes else "float"
    return {"bits": bits, "accumulator": verdicts}


def node_data(name: str, values: Mapping[str, float | str]) -> dict[str, Any]:
    """A figure of nodes as JSON values: node data of the graph.

    Args:
        name: of the figure. SQNR and bits are better where they are larger; other numbers are better where smaller.
        values: by node; infinite ones and NaN are left out.
    """
    finite = {node: value for node, value in values.items() if isinstance(value, str) or math.isfinite(value)}
    numbers = [value for value in finite.values() if not isinstance(value, str)]
    results = {node: _result(value) for node, value in finite.items()}
    data: dict[str, Any] = {"name": name, "results": results}
    if numbers:
        low, high = _BETTER if name.startswith(("SQNR", "bits")) else _WORSE
        data["gradient"] = [{"stop": 0, "bgColor": low}, {"stop": 1, "bgColor": high}]
    return {GRAPH_ID: data}


def _result(value: float | str) -> dict[str, Any]:
    if not isinstance(value, str):
        return {"value": float(f"{value:.6g}")}
    return {"value": value, **({"bgColor": _WORD_COLORS[value]} if value in _WORD_COLORS else {})}


# ---------------------------------------------------------------- nodes
def _node(plan: Plan, graph: Graph, name: str, layers: Collection[str]) -> dict[str, Any]:
    node = graph[name]
    layer, _, last = name.rpartition(".")
    return {
        "id": name,
        "label": node.op if last == node.op else f"{last}: {node.op}",
        # a layer's weight is in a layer of its name, so that the node that reads it is there, too
        "namespace": (name if name in layers else layer).replace(".", "/"),
        "attrs": _pairs(_attributes(plan, graph, name)),
        "incomingEdges": [
            {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(slot)}
            for slot, source in enumerate(node.inputs)
        ],
        "inputsMetadata": [
            {"id": str(edge.slot), "attrs": _pairs(_edge(plan, edge, target))}
            for edge in node.edges
            if (target := plan.target(edge)) is not None
        ],
        "outputsMetadata": [{"id": "0", "attrs": _pairs(_output(plan, graph, name))}],
    }


def _attributes(plan: Plan, graph: Graph, name: str) -> Iterator[tuple[str, str]]:
    node = graph[name]
    yield "name", name
    yield from ((key, str(value)) for key, value in sorted(node.attrs.items()))
    if node.op == CONST:
        return
    if name not in plan.nodes:
        stored = any(edge in plan.weights for edge in node.edges)
        yield "runs in", "float, with stored integer weights" if stored else "float"
        return
    own = plan.nodes[name]
    yield "runs in", "integers"
    yield "signature", str(own.desc)
    yield "accumulator", f"{own.desc.register.dtype.name}, {own.desc.register.overflow} on overflow"
    yield "overflow", {"proved": "proved absent"}.get(own.verdict, own.verdict)
    yield "largest |accumulator|", f"{own.bound:.0f} of {own.desc.register.dtype.max}"


def _edge(plan: Plan, edge: Edge, target: QParams) -> Iterator[tuple[str, str]]:
    """What the Plan says of an in-edge that is quantized."""
    yield "edge", str(edge)
    yield from _qparams(plan, str(edge), target)


def _output(plan: Plan, graph: Graph, name: str) -> Iterator[tuple[str, str]]:
    node, own = graph[name], plan.nodes.get(name)
    shape = "" if node.shape is None else "x".join(map(str, node.shape)) or "scalar"
    yield "tensor_shape", shape if own is None else f"{own.out.dtype.name}[{shape}]"
    if own is not None:
        yield from _qparams(plan, f"{name}:out", own.out)


def _qparams(plan: Plan, key: str, target: QParams) -> Iterator[tuple[str, str]]:
    yield "bits", str(bits_of(target))
    yield "dtype", target.dtype.name
    yield "scale", _numbers(target.scale)
    yield "zero_point", _numbers(target.zero_point)
    if key in plan.thresholds:
        low, high = plan.thresholds[key]
        yield "threshold", f"{float(low.min()):.6g} to {float(high.max()):.6g}"


def _numbers(values: Tensor) -> str:
    """One number, or those of the first channels and how many there are."""
    shown = ", ".join(f"{value:.6g}" for value in values.flatten()[:_LISTED].tolist())
    return shown if values.numel() <= _LISTED else f"{shown}, ... ({values.numel()} channels)"


def _pairs(attributes: Any) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in attributes]


def _is_bias(plan: Plan, edge: Edge) -> bool:
    op = plan.graph[edge.dst].op
    form = plan.ops[op].integer if op in plan.ops else None
    return form is not None and form.slot(edge.slot) == "bias"
