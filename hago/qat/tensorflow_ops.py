"""Op and OpGraph: a model as TensorFlow 1 spells it, which its graph rewrites are defined over.

Names are scopes joined by `/`; an op has one output, known by the op's name. The order of ops is the
order in which they were made, which decides between overlapping matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hago.errors import GraphError


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a TensorFlow graph: e.g. `Op("a/Conv2D", "Conv2D", ("x", "a/weights/read"))`."""

    name: str
    type: str
    inputs: tuple[str, ...] = ()


class OpGraph:
    """Ops by name, which rewrites add to and rewire; an op may read ops that stand after it.

    Raises:
        GraphError: two ops have one name, or an op reads one that is not there.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self._ops: dict[str, Op] = {}
        for op in ops:
            if op.name in self._ops:
                raise GraphError(f"two ops are called {op.name!r}; names must be unique")
            self._ops[op.name] = op
        for op in self:
            for source in op.inputs:
                if source not in self._ops:
                    raise GraphError(f"op {op.name!r} reads {source!r}, which is not in the graph")

    def __iter__(self) -> Iterator[Op]:
        """The ops that are there now, in order."""
        return iter(tuple(self._ops.values()))

    def __getitem__(self, name: str) -> Op:
        return self._ops[name]

    def inputs(self, op: Op) -> tuple[Op, ...]:
        """The ops that `op` reads."""
        return tuple(self._ops[name] for name in op.inputs)

    def consumers(self, name: str) -> tuple[Op, ...]:
        """The ops that read `name`, in order."""
        return tuple(op for op in self if name in op.inputs)

    def unique(self, name: str) -> str:
        """`name`, with `_1`, `_2` and so on where ops stand in that scope already."""
        found, number = name, 0
        while any(op.name == found or op.name.startswith(f"{found}/") for op in self):
            number += 1
            found = f"{name}_{number}"
        return found

    def add(self, name: str, kind: str, *inputs: str) -> str:
        """A further op under a unique name, which is returned."""
        made = Op(self.unique(name), kind, inputs)
        self._ops[made.name] = made
        return made.name

    def reroute(self, old: str, new: str, readers: Iterable[str]) -> None:
        """Let `readers` read `new` where they read `old`."""
        for name in readers:
            op = self._ops[name]
            self._ops[name] = replace(op, inputs=tuple(new if s == old else s for s in op.inputs))


def scope_of(name: str) -> str:
    """The scope that an op stands in: all but the last part of its name."""
    return name.rpartition("/")[0]


def within(scope: str, name: str) -> str:
    """A name in a scope; the root scope is empty."""
    return f"{scope}/{name}" if scope else name
