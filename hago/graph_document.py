"""Graph document: a Graph as JSON values, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from hago.errors import GraphError, HagoError
from hago.graph import CONST, Graph, Node
from hago.nesting import read_tree
from hago.ops import _opaque
from hago.stored_values import Reader, Writer
from hago.tensor_file import dtype_name, storable_dtype


def write_graph(graph: Graph, needed: Collection[str], write: Writer) -> dict[str, Any]:
    """The JSON values of a graph.

    Args:
        needed: the constants whose own values are written.

    Raises:
        GraphError: a node that cannot be stored, by name, and why.
    """
    consts = {n.name: graph.consts[n.name] for n in graph if n.op == CONST}
    return {
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "in_spec": graph.in_spec,
        "out_spec": graph.out_spec,
        "nodes": [
            {
                "name": n.name,
                "op": n.op,
                "inputs": list(n.inputs),
                "attrs": written(write, dict(n.attrs), n.name, f"{n.name}.attrs"),
                "shape": None if n.shape is None else list(n.shape),
            }
            for n in graph
        ],
        "consts": {n: written(write, t, n, n) for n, t in consts.items() if n in needed},
        "left_out": {n: [dtype_name(t.dtype), list(t.shape)] for n, t in consts.items() if n not in needed},
    }


def written(write: Writer, value: Any, node: str, name: str) -> Any:
    """The JSON values of a value of a node.

    Raises:
        GraphError: naming the node.
    """
    try:
        return write(value, name)
    except HagoError as error:
        raise GraphError(f"node {node!r} cannot be stored: {error}") from None


def read_graph(said: Mapping[str, Any], read: Reader) -> Graph:
    """The graph of JSON values; constants that were left out have a shape and no values.

    Raises:
        HagoError: a node that would run code.
    """
    consts = {name: read(t) for name, t in said["consts"].items()}
    for name, (kind, shape) in said["left_out"].items():
        consts[name] = torch.empty(shape, dtype=storable_dtype(kind), device="meta")
    nodes = tuple(
        Node(
            n["name"], n["op"], tuple(n["inputs"]), read(n["attrs"]), None if n["shape"] is None else tuple(n["shape"])
        )
        for n in said["nodes"]
    )
    for node in nodes:
        if not isinstance(node.attrs, dict):
            raise HagoError(f"node {node.name!r} has no attributes by name")
        why_not = _opaque.why_not_portable(node.attrs) if node.op == _opaque.NAME else None
        if why_not is not None:
            raise HagoError(f"node {node.name!r}: {why_not}")
    for text in (said["in_spec"], said["out_spec"]):
        if text is not None:
            read_tree(text)
    order = [n.name for n in nodes if n.op == CONST]
    return Graph(
        nodes,
        tuple(said["inputs"]),
        tuple(said["outputs"]),
        {name: consts[name] for name in order},
        said["in_spec"],
        said["out_spec"],
    )
