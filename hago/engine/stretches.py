"""Stretches: a pass whose samples do not meet, cut so that values stay in the processor's cache.

The first layers of a network make much of every sample from few weights, and the last ones little from many: so
the former run on a few samples at a time, and the latter on all of them, for which weights are read once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hago.steps import Name, Step, last_uses, run_steps

#: A stretch ends where all that comes after takes so many times less room.
SMALLER: Final = 4


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that follow one another.

    Args:
        takes: the values that vary with the sample and were there before.
        gives: those that it makes and that are read after it.
        drops: the values that nothing reads after it.
        done: what no step of it reads any more, by step.
        at_once: the most samples that are run together.
    """

    steps: tuple[Step, ...]
    takes: tuple[Name, ...]
    gives: tuple[Name, ...]
    drops: tuple[Name, ...]
    done: Mapping[Name, tuple[Name, ...]]
    at_once: int

    def run(self, values: MutableMapping[Name, Any], size: int) -> None:
        """Make what it gives, of `size` samples.

        Args:
            values: what it takes, and what is the same for all samples; what it gives afterwards.
        """
        parts = max(1, -(-size // self.at_once))
        cut = {name: values[name].tensor_split(parts) for name in self.takes}
        shared = {name: value for name, value in values.items() if name not in cut}
        found = []
        for part in range(parts):
            here = {**shared, **{name: pieces[part] for name, pieces in cut.items()}}
            run_steps(self.steps, here, self.gives, done=self.done)
            found.append([here[name] for name in self.gives])
        whole = found[0] if parts == 1 else [torch.cat(each) for each in zip(*found, strict=True)]
        values.update(zip(self.gives, whole, strict=True))
        for name in self.drops:
            del values[name]


def stretches(
    steps: Sequence[Step], sizes: Sequence[int], inputs: Collection[Name], ends: Collection[Name], room: int
) -> tuple[Stretch, ...]:
    """The stretches of a pass.

    Args:
        sizes: bytes of the largest value that each step makes of a sample.
        inputs: the values that it starts from and that vary with the sample.
        room: bytes that a value of the samples that are run together may take.
    """
    left = [*itertools.accumulate(reversed(sizes), max)][::-1]  # the largest from each step on
    found: list[Stretch] = []
    there, first = set(inputs), 0
    while first < len(steps):
        after = next((i for i in range(first, len(steps)) if SMALLER * left[i] <= left[first]), len(steps))
        some = tuple(steps[first:after])
        made = {name for step in some for name in step.outputs}
        later = {name for step in steps[after:] for name in step.inputs} | set(ends)
        read = {name for step in some for name in step.inputs}
        takes, gives, drops = (tuple(sorted(names)) for names in (there & read, made & later, there - later))
        at_once = max(1, room // max(1, left[first]))
        found.append(Stretch(some, takes, gives, drops, last_uses(some, gives), at_once))
        there, first = (there | made) & later, after
    return tuple(found)
