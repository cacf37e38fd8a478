"""The network: nodes and edges, import from torch.export, passes over it, and running it in float."""

from hago.graph.frontend import ModelLike, from_torch
from hago.graph.graph import Attrs, Graph, Node

__all__ = [
    "Attrs",
    "Graph",
    "ModelLike",
    "Node",
    "from_torch",
]
