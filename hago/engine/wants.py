"""Wants: in which forms the readers of every value ask for it.

A node that stands for itself (not skipped by the wiring) is a *root*. Its value is wanted as it is (under the
node's name), requantized to a target (`name>1` and so on, one for each target), or real (`name!`).
"""

from __future__ import annotations

from collections.abc import Mapping

from hago.engine.choice import Choice
from hago.engine.wiring import Wiring
from hago.graph import CONST, OUTPUT, Node
from hago.types import Edge, SimQ


class Wants:
    """The forms of every value, and the name that every edge reads.

    Args:
        choices: how every root runs.
    """

    def __init__(self, wiring: Wiring, choices: Mapping[str, Choice]) -> None:
        self.wiring, self.plan, self.graph = wiring, wiring.plan, wiring.plan.graph
        self.choices = choices
        self.names: dict[Edge, str] = {}
        self._forms: dict[str, dict[str, SimQ | None]] = {}
        for edge in self.graph.edges:
            if edge.dst not in wiring.skipped:
                self._want(edge)

    def forms(self, root: str) -> Mapping[str, SimQ | None]:
        """What is made of a root's value, by name; None for the value as it is."""
        return self._forms.get(root, {})

    def readers(self, root: str) -> list[Edge]:
        """The edges that a root's value travels on, past skipped nodes."""
        found: list[Edge] = []
        for edge in self.graph.out_edges[root]:
            found += self.readers(edge.dst) if edge.dst in self.wiring.skipped else [edge]
        return found

    def sole(self, root: str) -> Node | None:
        """The node that alone reads a root, through one edge."""
        readers = self.readers(root)
        alone = len(readers) == 1 and readers[0].dst != OUTPUT
        return self.graph[readers[0].dst] if alone else None

    def is_own(self, edge: Edge) -> bool:
        """Whether an edge reads its root's value as it is."""
        return self.names[edge] == self.wiring.root(self.graph.source(edge))

    def _want(self, edge: Edge) -> None:
        root, simq = self.wiring.root(self.graph.source(edge)), self.plan.edges[edge]
        forms = self._forms.setdefault(root, {})
        name = root
        if edge.dst == OUTPUT or self._is_real(edge, simq):
            name = root if simq is None else f"{root}!"
        elif simq is not None and self.graph[root].op != CONST and self._moved_before(edge, simq):
            same = [k for k, s in forms.items() if s is not None and s.target is simq.target and s.via is simq.via]
            name = same[0] if same else f"{root}>{1 + len(forms)}"
        self.names[edge] = name
        forms.setdefault(name, None if name == root else simq)

    def _is_real(self, edge: Edge, simq: SimQ | None) -> bool:
        """Whether a float node reads the real value of integers, which need be made but once."""
        if simq is None or simq.source is None or simq.target is not None or simq.via is not None:
            return False
        return self.choices[edge.dst].kind == "float" and self.graph[self.graph.source(edge)].op != CONST

    def _moved_before(self, edge: Edge, simq: SimQ) -> bool:
        """Whether the reader takes what the edge makes, rather than doing it itself."""
        choice = self.choices[edge.dst]
        return choice.takes == "moved" or (choice.kind == "add" and simq.source is None)
