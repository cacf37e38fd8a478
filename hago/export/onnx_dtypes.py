"""Dtypes: of the values of a graph, where they are no real numbers: indices, sizes and conditions."""

from __future__ import annotations

from functools import reduce
from typing import Any, Final

import torch

from hago.graph import CONST, INPUT, Graph, Node

_CONDITIONS: Final = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "isnan", "isinf"}
)
#: Calls that add up, which give int64 of whole numbers.
_SUMS: Final = frozenset({"cumsum", "sum"})
#: Calls that fill a tensor, and the dtype that they give where none is said.
_FILL: Final = {"zeros": torch.float32, "ones": torch.float32, "full": torch.float32, "arange": torch.int64}
_INDICES: Final = frozenset({"argmax", "argmin", "sym_size"})
#: Ops whose result has the dtype of what they read.
_MOVES: Final = frozenset(
    {"concat", "expand", "permute", "reshape", "select", "slice", "squeeze", "stack", "unsqueeze", "pad"}
)
#: Inputs that only say where or whether.
_PLACES: Final = {"gather": 1, "index": 1, "masked_fill": 1, "index_select": 1}


class Dtypes:
    """Dtypes of a graph's values, by node name; integer nodes count as real."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._known: dict[str, torch.dtype] = {}

    def __getitem__(self, name: str) -> torch.dtype:
        # in order: a graph may be deeper than Python recurses
        if name not in self._known:
            for node in self.graph:
                if node.name not in self._known:
                    self._known[node.name] = self._of(node)
                if node.name == name:
                    break
        return self._known[name]

    def _of(self, node: Node) -> torch.dtype:
        if node.op == CONST:
            return self.graph.consts[node.name].dtype
        if node.op in (INPUT, "to"):
            return _named(node.attrs.get("dtype", "float32"))
        # sizes have no shape
        read = [self._known[s] for s in node.inputs if self.graph[s].shape is not None]
        if node.op == "opaque":
            return _of_call(node, read)
        if node.op == "index":
            return read[0]
        return reduce(torch.promote_types, read) if node.op in _MOVES and read else torch.float32


def _of_call(node: Node, read: list[torch.dtype]) -> torch.dtype:
    space, _, rest = str(node.attrs["target"]).partition(".")
    name = rest.partition(".")[0]
    said: Any = node.attrs["kwargs"].get("dtype")
    if said is not None:
        return _named(said["torch"])
    if name in _CONDITIONS:
        return torch.bool
    if space in ("operator", "torch") or name in _INDICES:
        return torch.int64
    if name in _FILL:
        numbers = [a for a in node.attrs["args"] if isinstance(a, float)]
        return torch.float32 if numbers else _FILL[name]
    if name in ("where", "type_as"):
        read = read[1:]
    numbers = [a for a in node.attrs["args"] if isinstance(a, float)]
    read = read[: _PLACES.get(name)]
    found = reduce(torch.promote_types, read) if read else torch.float32
    if name in _SUMS and not found.is_floating_point:
        return torch.int64
    if numbers and not found.is_floating_point:
        return torch.float32
    has_integer = any(isinstance(a, int) and not isinstance(a, bool) for a in node.attrs["args"])
    return torch.int64 if has_integer and found == torch.bool and name in ("add", "sub", "mul") else found


def _named(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    assert isinstance(found, torch.dtype)
    return found
