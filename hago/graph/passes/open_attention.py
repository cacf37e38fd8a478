"""Opening attention: `scaled_dot_product_attention` nodes as two matrix products with a softmax between them.

Kept whole, attention is float on every chip. Opened, the products of queries with keys and of probabilities with
values are `matmul` nodes, which run in integers where the chip has them. The softmax applies the scale, in float: so
neither queries nor scores are rounded a second time, and a chip that requantizes by shifts alone, which could multiply
by 1 / sqrt(d) only where that is a power of two, runs the products all the same. The softmax applies masks, too: -inf
has no place on a grid of integers.

The last product keeps the attention's name, and the other nodes have that name and a word (`attn.scores`), so patterns
on names of modules match as before. `PASSES` applies this pass at import. Version 1 of the import kept attention whole;
`from_torch` still does where a strategy or a log was made for that graph (`made_for`).
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
#: The ops that attention is opened into, besides `matmul`.
OPENED_INTO: Final = ("permute", "softmax", "masked_softmax")
#: The ops that attention with shared heads is opened into besides those.
OPENED_INTO_GROUPS: Final = ("reshape", "unsqueeze")


def open_attention(
    graph: Graph, open_axes: Mapping[str, Sequence[int]], ops: Ops = OPS, *, shared_heads: bool = True
) -> Graph:
    """The graph with its attention opened.

    Attention whose shapes are unknown or have fewer than 3 axes is left whole. So is attention with shared heads
    (`enable_gqa`) that is not 4-dimensional, whose keys and values have different numbers of heads, which has an axis
    besides the first whose size depends on the batch, or whose masks differ between heads.

    Args:
        open_axes: by node, the axes whose size depends on the batch.
        shared_heads: whether attention with shared heads is opened at all.
    """
    nodes: list[Node] = []
    for node in graph:
        opened = _Opening(graph, node, open_axes, ops).nodes(shared_heads) if node.op == ATTENTION else None
        nodes += [node] if opened is None else opened
    return graph.with_nodes(nodes)


class _Opening:
    """Opens one node. Lives for one call of `nodes`."""

    def __init__(self, graph: Graph, node: Node, open_axes: Mapping[str, Sequence[int]], ops: Ops) -> None:
        self.graph, self.node, self.open_axes, self.ops = graph, node, open_axes, ops
        self.made: list[Node] = []
        self.shapes = {name: graph[name].shape for name in node.inputs}
        self.dtypes = {name: graph[name].dtype for name in node.inputs}

    def nodes(self, shared_heads: bool) -> list[Node] | None:
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
        if not shared_heads:
            return None
        groups = key[-3]
        batched = len(query) == len(key) == len(value) == 4 and groups == value[-3]
        # only the batch may be of unknown size
        if not batched or any(set(self.open_axes.get(name, (0,))) - {0} for name in (q, k, v)):
            return None
        if not all(self._is_shared(name) for name in masks):
            return None
        masks = [self._along_groups(name) for name in masks]
        # an axis of groups: the queries of one group share its keys
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
        transposed = self._add("keys_transposed", "permute", (k,), {"axes": [*range(rank - 2), rank - 1, rank - 2]})
        scores = self._add("scores", "matmul", (q, transposed))
        causal = bool(self.node.attrs["is_causal"])
        if masks or causal:
            attrs = {"scale": scale, "is_causal": causal}
            probabilities = self._add("probabilities", "masked_softmax", (scores, *masks), attrs)
        else:
            probabilities = self._add("probabilities", "softmax", (scores,), {"axis": -1, "scale": scale})
        return self._add(word, "matmul", (probabilities, v))

    def _is_shared(self, mask: str) -> bool:
        """Whether a mask is the same for all heads."""
        shape = self.shapes[mask]
        return shape is not None and (len(shape) < 3 or shape[-3] == 1)

    def _along_groups(self, mask: str) -> str:
        """A mask of scores that have an axis of groups."""
        rank = len(self.shapes[mask] or ())
        return mask if rank < 3 else self._add("mask_of_groups", "unsqueeze", (mask,), {"axis": rank - 3})

    def _add(self, word: str, op: str, inputs: tuple[str, ...], attrs: Mapping[str, Any] | None = None) -> str:
        """Append a node named `<attention>.<word>`, or as the attention itself if `word` is empty. It has the dtype of
        its first operand."""
        name = f"{self.node.name}.{word}" if word else self.node.name
        while word and name in self.graph.by_name:
            name += "_"
        node = Node(name, op, inputs, attrs or {})
        self.shapes[name] = infer_shape(node, [self.shapes[s] or () for s in inputs], self.ops)
        self.dtypes[name] = self.dtypes[inputs[0]]
        self.made.append(replace(node, shape=self.shapes[name], dtype=self.dtypes[name]))
        return name
