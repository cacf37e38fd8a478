"""Schedules: the steps of a pass over a network in order, the one loop that runs them, and when values are dropped.

A step computes values from others. `execute.run_graph` runs the nodes of a Graph, which keeps their schedule, by a
function that its caller gives. The simulator and the native engine make a list of `Step`s once per Plan and run it for
every batch. Such a list can be cut short: a caller that already has some of the values, such as
`simulation.value_cache`, runs only the steps that the wanted values still depend on.

Invariants: a step comes after those that make its inputs; a value is dropped after its last use, so that memory is that
of the widest cut of the network and not of all intermediate values. Of a `Step`, `compute` modifies none of its inputs,
and equal digests and equal inputs mean equal outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

#: The name of a value: a node's name, or, for the operand that arrives on an edge, the edge as text. No node's name has
#: a colon.
Name = str
#: The least and the greatest integer that a value can hold; None for real values, and for integers that are in their
#: smallest dtype already.
Span = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule.

    Args:
        inputs: names of the values that `compute` takes, in order.
        outputs: names of the values that it returns, in order; at least one.
        compute: a pure function from inputs to outputs.
        digest: equal for steps that give the same outputs for the same inputs.
        spans: the span of each output.
        watched: whether `compute` also reports an observation to a watch.
    """

    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    digest: bytes
    spans: tuple[Span, ...]
    watched: bool = False

    @property
    def name(self) -> Name:
        """The name of the first output, which no other step has."""
        return self.outputs[0]

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The values of the outputs, from those of the inputs."""
        return self.compute(inputs)


class Computation(Protocol):
    """What a schedule runs: a `Step`, or a node of a Graph."""

    @property
    def name(self) -> Name: ...
    @property
    def inputs(self) -> tuple[Name, ...]: ...
    @property
    def outputs(self) -> tuple[Name, ...]: ...


C = TypeVar("C", bound=Computation)


@dataclass(frozen=True, slots=True)
class Scheduled(Generic[C]):
    """An entry of a schedule. Made by `make_schedule`.

    Args:
        inputs, outputs: of the step.
        dropped: the values whose last use the step is.
    """

    step: C
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    dropped: tuple[Name, ...]


#: Steps in the order in which they are run.
Schedule = tuple[Scheduled[C], ...]


def make_schedule(steps: Sequence[C], ends: Collection[Name]) -> Schedule[C]:
    """The schedule of steps that stand in order; values at `ends` are never dropped."""
    last: dict[Name, Name] = {}
    for step in steps:
        last.update(dict.fromkeys((*step.outputs, *step.inputs), step.name))
    dropped: dict[Name, list[Name]] = {}
    for name, reader in last.items():
        if name not in ends:
            dropped.setdefault(reader, []).append(name)
    return tuple(Scheduled(s, s.inputs, s.outputs, tuple(dropped.get(s.name, ()))) for s in steps)


def run_schedule(
    scheduled: Schedule[C],
    values: MutableMapping[Name, Any],
    compute: Callable[[C, list[Any]], Sequence[Any]],
    on_outputs: Callable[[C, Sequence[Any]], None] | None = None,
) -> None:
    """Compute each step in order, and drop each value after its last use.

    Args:
        values: the values that the steps start from, by name; afterwards it holds those that are never dropped.
        compute: from a step and the values of its inputs to those of its outputs.
        on_outputs: called with every step and its outputs.
    """
    for entry in scheduled:
        computed = compute(entry.step, [values[name] for name in entry.inputs])
        for name, value in zip(entry.outputs, computed):  # noqa: B905 - strict takes a tenth of a pass over a small network
            values[name] = value
        if on_outputs is not None:
            on_outputs(entry.step, computed)
        del computed
        for name in entry.dropped:
            values.pop(name, None)
