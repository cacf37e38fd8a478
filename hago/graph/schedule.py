"""Steps: one pass over a network as a list of calls, each making values from others.

This is the form in which a pass can be cut short: whoever holds some of the values already needs to
run only the steps that the wanted ones still ask for.

Invariants: a step stands after those that make its inputs; `compute` writes to none of them; equal
digests and equal inputs mean equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Of a value: a node's name, or an edge as text for what arrives there. No node has a colon in its name.
Name = str
#: The least and the greatest integer that a value can hold; None for real values, or integers that are
#: in their smallest type already.
Span = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a pass.

    Args:
        inputs: the values that `compute` takes, in order.
        outputs: the values that it makes, in order; at least one.
        compute: makes the outputs; pure.
        digest: equal for steps that make the same outputs of the same inputs.
        spans: of the outputs.
        watched: whether `compute` tells a watch what it saw, besides making the values.
    """

    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    digest: bytes
    spans: tuple[Span, ...]
    watched: bool = False

    @property
    def name(self) -> Name:
        """That of its first output, which no other step has."""
        return self.outputs[0]


#: Sees every step and what it made.
OnStep = Callable[[Step, Sequence[Any]], None]


def last_uses(steps: Sequence[Step], ends: Collection[Name]) -> Mapping[Name, tuple[Name, ...]]:
    """By step, the values that no later step and no end reads."""
    last: dict[Name, Name] = {}
    for step in steps:
        last.update(dict.fromkeys((*step.outputs, *step.inputs), step.name))
    found: dict[Name, list[Name]] = {}
    for name, reader in last.items():
        if name not in ends:
            found.setdefault(reader, []).append(name)
    return {reader: tuple(names) for reader, names in found.items()}


def run_steps(
    steps: Sequence[Step],
    values: MutableMapping[Name, Any],
    ends: Collection[Name],
    *,
    on_step: OnStep | None = None,
    done: Mapping[Name, tuple[Name, ...]] | None = None,
) -> None:
    """Run steps in order; a value goes after its last use.

    Args:
        values: what the steps start from; holds the values at `ends` afterwards.
        done: `last_uses(steps, ends)`, if the caller keeps it.
    """
    done = last_uses(steps, ends) if done is None else done
    for step in steps:
        made = step.compute([values[name] for name in step.inputs])
        values.update(zip(step.outputs, made, strict=True))
        if on_step is not None:
            on_step(step, made)
        del made
        for name in done.get(step.name, ()):
            values.pop(name, None)
