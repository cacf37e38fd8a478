"""The drawing of a network: where its nodes and the corners of its edges stand.

The layout is Sugiyama's, by grandalf: nodes stand in ranks below their inputs, and edges keep apart from the nodes that
they pass. grandalf is pure Python and small; the alternatives were igraph, a compiled library under the GPL, and
graphviz, a program of its own that is not everywhere. It lays out a network of 170 nodes in a tenth of a second.

References:
    K. Sugiyama, S. Tagawa, M. Toda, "Methods for visual understanding of hierarchical system structures", 1981.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hago.errors import HagoError
from hago.graph import CONST, Graph
from hago.report.document import Drawing, DrawnEdge, DrawnNode

#: Pixels of a node, between nodes, and around the drawing.
NODE_WIDTH: Final = 196
NODE_HEIGHT: Final = 44
BETWEEN: Final = (24, 40)
MARGIN: Final = 24
#: Pixels that an edge takes in the ranks that it passes.
_EDGE_WIDTH: Final = 6


@dataclass(slots=True)
class _View:
    """What grandalf wants of a node: its size, and later its position."""

    w: float
    h: float
    xy: tuple[float, float] = (0.0, 0.0)


def draw_network(graph: Graph) -> Drawing:
    """Lay out a network without its constants, inputs at the top.

    Raises:
        HagoError: grandalf is not installed.
    """
    try:
        from grandalf.graphs import Edge as LaidEdge
        from grandalf.graphs import Graph as LaidGraph
        from grandalf.graphs import Vertex
        from grandalf.layouts import SugiyamaLayout
        from grandalf.routing import EdgeViewer
    except ImportError:
        raise HagoError("drawing a network needs the package grandalf: pip install 'hago[report]'") from None
    nodes = [node for node in graph if node.op != CONST]
    vertices: dict[str, Any] = {node.name: Vertex(node.name) for node in nodes}
    slots: dict[tuple[str, str], list[int]] = {}
    for node in nodes:
        for slot, source in enumerate(node.inputs):
            if source in vertices:
                slots.setdefault((source, node.name), []).append(slot)
    edges: dict[tuple[str, str], Any] = {key: LaidEdge(*(vertices[name] for name in key)) for key in slots}
    laid = LaidGraph(list(vertices.values()), list(edges.values()))
    for vertex in vertices.values():
        vertex.view = _View(NODE_WIDTH, NODE_HEIGHT)
    for edge in edges.values():
        edge.view = EdgeViewer()
    left = 0.0
    for component in laid.C:
        layout = SugiyamaLayout(component)
        layout.dw, layout.dh = _EDGE_WIDTH, NODE_HEIGHT
        layout.xspace, layout.yspace = BETWEEN
        layout.init_all(optimize=True)
        layout.draw(6)
        own = [edge.view for edge in component.sE]
        xs = [v.view.xy[0] for v in component.sV] + [x for view in own for x, _ in view._pts]
        shift = left - min(xs)
        for vertex in component.sV:
            vertex.view.xy = (vertex.view.xy[0] + shift, vertex.view.xy[1])
        for view in own:
            view.setpath([(x + shift, y) for x, y in view._pts])
        left += max(xs) - min(xs) + NODE_WIDTH + BETWEEN[0]
    top = min(vertex.view.xy[1] for vertex in vertices.values())
    bottom = max(vertex.view.xy[1] for vertex in vertices.values())
    dx, dy = MARGIN + NODE_WIDTH / 2, MARGIN + NODE_HEIGHT / 2 - top

    def at(x: float, y: float) -> tuple[float, float]:
        return round(x + dx, 1), round(y + dy, 1)

    return Drawing(
        width=round(left - BETWEEN[0] + 2 * MARGIN, 1),
        height=round(bottom - top + NODE_HEIGHT + 2 * MARGIN, 1),
        node_width=NODE_WIDTH,
        node_height=NODE_HEIGHT,
        nodes=tuple(DrawnNode(n.name, n.op, tuple(n.shape or ()), *at(*vertices[n.name].view.xy)) for n in nodes),
        edges=tuple(
            DrawnEdge(*key, tuple(slots[key]), tuple(at(*corner) for corner in line))
            for key, line in _lines({key: edge.view._pts for key, edge in edges.items()}).items()
        ),
    )


def _lines(points: Mapping[tuple[str, str], Sequence[tuple[float, float]]]) -> dict[tuple[str, str], list[Any]]:
    """The corners of all edges, whose ends are spread over the widths of the nodes that they leave and enter."""
    ends = [dict.fromkeys(points, 0.0) for _ in range(2)]
    for end, (near, width) in enumerate(((1, 0.5), (-2, 0.8))):
        for name in {key[end] for key in points}:
            keys = sorted((key for key in points if key[end] == name), key=lambda key: points[key][near][0])
            for i, key in enumerate(keys):
                ends[end][key] = NODE_WIDTH * width * ((i + 1) / (len(keys) + 1) - 0.5)
    return {key: corners(line, ends[0][key], ends[1][key]) for key, line in points.items()}


def corners(
    points: Sequence[tuple[float, float]], leaves: float = 0.0, enters: float = 0.0
) -> list[tuple[float, float]]:
    """The corners of an edge: from below the node that it leaves to above the node that it enters, without points on a
    straight line between others.

    Args:
        points: the centres of both nodes, and between them one point for each rank that the edge passes.
        leaves, enters: pixels from the centre of the node at which the edge leaves and enters.
    """
    half = NODE_HEIGHT / 2
    (x, y), *passed, (to_x, to_y) = points
    through = [end for px, py in passed for end in ((px, py - half), (px, py + half))]
    line = [(x + leaves, y + half), *through, (to_x + enters, to_y - half)]
    kept = line[:1]
    for before, here, after in zip(line, line[1:], line[2:], strict=False):
        if not before[0] == here[0] == after[0]:
            kept.append(here)
    return [*kept, line[-1]]
