"""A schedule: one pass over a network as a list of steps, each computing values from others.

The simulator and the native engine make a schedule once per Plan and run it for every batch. A schedule can be cut
short: a caller that already has some of the values, such as `simulation.value_cache`, runs only the steps that the
wanted values still depend on.

Invariants: a step comes after those that make its inputs; `compute` modifies none of its inputs; equal digests and
equal inputs mean equal outputs.

`execute.run_graph` has a loop of its own. It takes a new node function with every call, so that its steps would have to
be made anew each time: a float pass over a network of 30 nodes then takes 1.09 times as long at batch 16, and 1.27 at
batch 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

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


#: Called with every step and its outputs.
OnStep = Callable[[Step, Sequence[Any]], None]


def last_uses(steps: Sequence[Step], ends: Collection[Name]) -> Mapping[Name, tuple[Name, ...]]:
    """By step, the values whose last use it is, those at `ends` aside."""
    last: dict[Name, Name] = {}
    for step in steps:
        last.update(dict.fromkeys((*step.outputs, *step.inputs), step.name))
    by_step: dict[Name, list[Name]] = {}
    for name, reader in last.items():
        if name not in ends:
            by_step.setdefault(reader, []).append(name)
    return {reader: tuple(names) for reader, names in by_step.items()}


def run_steps(
    steps: Sequence[Step],
    values: MutableMapping[Name, Any],
    ends: Collection[Name],
    *,
    on_step: OnStep | None = None,
    done: Mapping[Name, tuple[Name, ...]] | None = None,
) -> None:
    """Run steps in order, and drop each value after its last use.

    Args:
        values: the values that the steps start from, by name; afterwards it holds those at `ends`.
        on_step: called after every step.
        done: `last_uses(steps, ends)`, if the caller has it.
    """
    done = last_uses(steps, ends) if done is None else done
    for step in steps:
        outputs = step.compute([values[name] for name in step.inputs])
        values.update(zip(step.outputs, outputs, strict=True))
        if on_step is not None:
            on_step(step, outputs)
        del outputs
        for name in done.get(step.name, ()):
            values.pop(name, None)
