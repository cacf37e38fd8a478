"""Opening attention: `scaled_dot_product_attention` nodes as two matrix products with a softmax between them.

Kept whole, attention is float on every chip. Opened, the products of queries with keys and of probabilities with
values are `matmul` nodes, which run in integers where the chip has them. The scale is applied by the softmax, in
float: neither queries nor scores are rounded once more for it, and a chip that only shifts multiplies at any scale.
A mask is the softmax's as well: -inf has no place on a grid of integers.

What follows the names of the module stays: the last product has the name of the attention, the nodes before it
that name and a word. A graph with attention kept whole is what hago imported at first; `from_torch` still gives it
where a strategy or a log was made for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from hago.graph.execute import infer_shape
from hago.graph.graph import Graph, Node
from hago.ops import OPS, Ops

ATTENTION: Final = "scaled_dot_product_attention"
#: What attention is opened into, besides the products.
OPENED_INTO: Final = ("permute", "softmax", "masked_softmax")


def open_attention(graph: Graph, open_axes: Mapping[str, Sequence[int]], ops: Ops = OPS) -> Graph:
    """The graph with its attention opened; one that cannot be is left whole: keys or values of a shape that is not
    known, or shared heads that are no groups of equal size.

    Args:
        open_axes: by node, the axes whose size depends on the batch.
    """
    nodes: list[Node] = []
    for node in graph:
        opened = _Opening(graph, node, open_axes, ops).nodes() if node.op == ATTENTION else None
        nodes += [node] if opened is None else opened
    return graph.with_nodes(nodes)


class _Opening:
    """Opens one node. Lives for one call of `nodes`."""

    def __init__(self, graph: Graph, node: Node, open_axes: Mapping[str, Sequence[int]], ops: Ops) -> None:
        self.graph, self.node, self.open_axes, self.ops = graph, node, open_axes, ops
        self.made: list[Node] = []
        self.shapes = {name: graph[name].shape for name in node.inputs}
        self.dtypes = {name: graph[name].dtype for name in node.inputs}

    def nodes(self) -> list[Node] | None:
        """The nodes that take its place, or None where it stays whole."""
        q, k, v, *masks = self.node.inputs
        shapes = [self.shapes[name] for name in (q, k, v)]
        if self.node.shape is None or any(s is None or len(s) < 3 for s in shapes):
            return None
        query, key, value = (s for s in shapes if s is not None)
        scale = self.node.attrs["scale"]
        scale = 1 / math.sqrt(query[-1]) if scale is None else scale
        if not self.node.attrs["enable_gqa"] or query[-3] == key[-3] == value[-3]:
            self._products(q, k, v, masks, scale, "")
            return self.made
        groups = key[-3]
        batched = len(query) == len(key) == len(value) == 4 and groups == value[-3]
        if not batched or any(set(self.open_axes.get(name, (0,))) - {0} for name in (q, k, v)):
            return None
        if not all(self._is_shared(name) for name in masks):
            return None
        masks = [self._along_groups(name) for name in masks]
        # queries that share keys are a batch of their own
        grouped = [-1, groups, query[1] // groups, *query[2:]]
        q = self._add("queries_in_groups", "reshape", (q,), {"shape": grouped})
        k = self._add("keys_of_groups", "unsqueeze", (k,), {"axis": 2})
        v = self._add("values_of_groups", "unsqueeze", (v,), {"axis": 2})
        apart = self._products(q, k, v, masks, scale, "groups")
        self._add("", "reshape", (apart,), {"shape": [-1, *self.node.shape[1:]]})
        return self.made

    def _products(self, q: str, k: str, v: str, masks: Sequence[str], scale: float, word: str) -> str:
        """The products and the softmax between them; `word` names the last."""
        rank = len(self.shapes[k] or ())
        turned = self._add("keys_transposed", "permute", (k,), {"axes": [*range(rank - 2), rank - 1, rank - 2]})
        scores = self._add("scores", "matmul", (q, turned))
        causal = bool(self.node.attrs["is_causal"])
        if masks or causal:
            attrs = {"scale": scale, "is_causal": causal}
            shares = self._add("probabilities", "masked_softmax", (scores, *masks), attrs)
        else:
            shares = self._add("probabilities", "softmax", (scores,), {"axis": -1, "scale": scale})
        return self._add(word, "matmul", (shares, v))

    def _is_shared(self, mask: str) -> bool:
        """Whether a mask is the same for all heads."""
        shape = self.shapes[mask]
        return shape is not None and (len(shape) < 3 or shape[-3] == 1)

    def _along_groups(self, mask: str) -> str:
        """A mask of scores that have an axis of groups."""
        rank = len(self.shapes[mask] or ())
        return mask if rank < 3 else self._add("mask_of_groups", "unsqueeze", (mask,), {"axis": rank - 3})

    def _add(self, word: str, op: str, inputs: tuple[str, ...], attrs: Mapping[str, Any] | None = None) -> str:
        """A node that is called as the attention, and a word; its op keeps the dtype of its first operand."""
        name = f"{self.node.name}.{word}" if word else self.node.name
        while word and name in self.graph.by_name:
            name += "_"
        node = Node(name, op, inputs, attrs or {})
        self.shapes[name] = infer_shape(node, [self.shapes[s] or () for s in inputs], self.ops)
        self.dtypes[name] = self.dtypes[inputs[0]]
        self.made.append(replace(node, shape=self.shapes[name], dtype=self.dtypes[name]))
        return name
