"""What layers read and give in the float model on the samples that they are corrected on: `FloatLayers`.

The points of a search differ in bits, and so do attempts to correct one point; what the float model does is the same
for all. `hago.search.layer_correction` compares a simulation with it, which runs as the float model does as long as no
node before is an integer one.

Passes over the samples hold each value in `Parts` of some samples. The C library returns larger buffers to the system
as soon as they are freed, and convolutions on fresh pages take up to four times as long.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.caching import LRU
from hago.correction import LAYERS
from hago.graph import Graph, Node, compute_real, over_samples
from hago.graph.schedule import Schedule, Step, run_schedule
from hago.ops import Ops, WindowsOf

#: The most bytes of a part of the largest value; glibc keeps buffers of up to 32 MiB.
PART_BYTES: Final = 1 << 24
#: The most bytes that are kept of the float model, for points that are corrected later.
KEPT_BYTES: Final = 1 << 28
#: The most bytes that are kept of what the first steps of simulations leave.
LEFT_BYTES: Final = 1 << 26
#: The most bytes of indices of windows that are kept.
INDEX_BYTES: Final = 1 << 26
#: Windows that are seen of a layer: at least this many, and WINDOWS_PER_WEIGHT for every weight of a window.
LEAST_WINDOWS: Final = 512
WINDOWS_PER_WEIGHT: Final = 8
#: The most bytes of windows that are seen of a layer.
WINDOW_BYTES: Final = 1 << 28
#: The most weights of a window that make up for each other's errors: their moments are a matrix of this size.
MOST_TOGETHER: Final = 4096


class Parts(tuple[Any, ...]):
    """A value, in parts of equally many samples."""

    __slots__ = ()

    @staticmethod
    def of(value: Any) -> Parts:
        """The parts of a value that a pass holds; one where it does not depend on the samples."""
        return value if isinstance(value, Parts) else Parts((value,))

    def mean(self) -> Tensor:
        """The mean over the samples, float64 with one sample."""
        sums = (over_samples(part, torch.sum).to(torch.float64) for part in self)
        return functools.reduce(torch.add, sums) / sum(map(len, self))


def in_parts(compute: Callable[[Sequence[Any]], Sequence[Any]], read: Sequence[Any]) -> Sequence[Any]:
    """What a step gives for the values that it reads, in as many parts as these have."""
    count = max((len(v) for v in read if isinstance(v, Parts)), default=0)
    if not count:
        return compute(read)
    given = [compute([v[i] if isinstance(v, Parts) else v for v in read]) for i in range(count)]
    return [Parts(outputs) for outputs in zip(*given, strict=True)]


@dataclass(frozen=True, slots=True)
class FloatLayer:
    """A layer in the float model.

    Args:
        windows: of what it reads, as `FloatLayers.windows` takes them; None where nobody asked for them, or its weights
            cannot be rounded for windows.
        mean: the mean of what it gives over the samples, float64 with one sample.
    """

    windows: Tensor | None
    mean: Tensor

    @property
    def bytes(self) -> int:
        """The size of what is kept of it."""
        return _bytes((self.windows, self.mean))


def _bytes(value: Any) -> int:
    """The size of the tensors of a value, or of values."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0


@dataclass(frozen=True, slots=True)
class _Taken:
    """What takes the windows of a layer.

    Args:
        of_parts: the numbers of the parts that windows are taken of, and what takes them.
        bytes: of its indices, int64 for each place and place of the kernel.
    """

    of_parts: Sequence[tuple[int, WindowsOf]]
    bytes: int


def largest_value_bytes(graph: Graph) -> int:
    """The size of the largest float32 value that a network computes for one sample."""
    return 4 * max([1, *(math.prod(node.shape or ()) for node in graph.computed)])


def _part_count(samples: int, most: int) -> int:
    """The number of equal parts of at most `most` samples that leaves the fewest out, and is at most twice the least
    number."""
    least = -(-samples // most)
    return min(range(least, min(samples, 2 * least) + 1), key=lambda count: samples % count)


class FloatLayers:
    """The layers of a model in floats, on some samples. The model runs when they are first read, and they are kept. If
    they take more than KEPT_BYTES together, none are kept, and the model runs whenever they are read. Kept are also the
    indices of the windows that are taken, and what the first steps of simulations leave.

    Args:
        graph, inputs: the model and the samples, of which a few are left out where they do not make equal parts.
        multiple: how many times WINDOWS_PER_WEIGHT are seen.
        numbers: of the samples, in the data that they are of; by default from 0.

    Attributes:
        numbers: of those that are not left out.
    """

    def __init__(
        self,
        graph: Graph,
        ops: Ops,
        inputs: Sequence[Tensor],
        multiple: int = 1,
        numbers: Sequence[int] | None = None,
    ) -> None:
        count = _part_count(len(inputs[0]), max(1, PART_BYTES // largest_value_bytes(graph)))
        size = len(inputs[0]) // count
        self.graph, self.samples = graph, size * count
        self.numbers = (range(self.samples) if numbers is None else numbers)[: self.samples]
        #: Of all inputs, by part.
        self.parts = tuple(zip(*(torch.split(x[: self.samples], size) for x in inputs), strict=True))
        self._ops, self.multiple = ops, multiple
        self._taken: LRU[str, _Taken] = LRU(INDEX_BYTES, lambda taken: taken.bytes)
        self._kept: dict[str, FloatLayer] = {}
        self._keeps = True
        self._left: LRU[tuple[object, ...], Mapping[str, Any]] = LRU(LEFT_BYTES, lambda left: _bytes([*left.values()]))

    def run(
        self,
        schedule: Schedule[Step],
        floats: int,
        values: MutableMapping[str, Any],
        compute: Callable[[Step, list[Any]], Sequence[Any]],
    ) -> None:
        """Run a simulation. What its first steps leave to the others is kept, and they are not run again.

        Args:
            schedule, values, compute: of `run_schedule`.
            floats: the number of first steps that are nodes in float and are not corrected.
        """
        begun = tuple((entry.step.digest, entry.inputs) for entry in schedule[:floats])
        known = next((count for count in range(floats, 0, -1) if self._left.get(begun[:count]) is not None), 0)
        values.update(self._left.get(begun[:known]) or {})
        run_schedule(schedule[known:floats], values, compute)
        names = {name for entry in schedule[:floats] for name in entry.outputs}
        left = {name: value for name, value in values.items() if name in names}
        if _bytes([*left.values()]) <= LEFT_BYTES:
            self._left.put(begun, left)
        run_schedule(schedule[floats:], values, compute)

    def windows(self, node: Node, value: Any) -> Tensor:
        """Some windows (groups, places, K) of what a layer reads, from samples and places all over the data; float32.

        Args:
            value: what it reads, in parts, of the shape that it has in the float model; windows are taken at the same
                places.
        """
        parts = Parts.of(value)
        taken = self._taken.get_or_make(node.name, lambda: self._windows_of(node, parts))
        windows = [take(parts[number]) for number, take in taken.of_parts]
        return (torch.cat(windows, 1) if len(windows) > 1 else windows[0]).to(torch.float32)

    def _windows_of(self, node: Node, parts: Parts) -> _Taken:
        """What takes the windows of a layer, which reads these parts."""
        weight, rule, attrs = self.graph.consts[node.inputs[1]], self._ops[node.op], node.attrs
        assert rule.integer is not None and rule.integer.addends is not None
        windows_at, groups = rule.integer.addends.windows_at, attrs.get("groups", 1)
        assert windows_at is not None
        length = weight[0].numel()
        shape = list(rule.compute(attrs, parts[0].to("meta", torch.float32), weight.to("meta")).shape)
        del shape[rule.integer.addends.bias_axis]
        of_part = math.prod(shape)
        places = len(parts) * of_part
        wanted = max(LEAST_WINDOWS, self.multiple * WINDOWS_PER_WEIGHT * min(length, MOST_TOGETHER))
        count = max(1, min(wanted, places, WINDOW_BYTES // (4 * groups * length)))
        chosen = torch.randperm(places, generator=torch.Generator().manual_seed(0))[:count]
        # every other sample in the first half, so that the halves do not share samples
        half, part = chosen // (of_part // len(parts[0])) % 2, chosen // of_part
        chosen = chosen[torch.sort(half * len(parts) + part, stable=True).indices]
        numbers, sizes = torch.unique_consecutive(chosen // of_part, return_counts=True)
        of_parts = [
            (number, windows_at(attrs, parts[number].shape, weight, torch.unravel_index(of % of_part, shape)))
            for number, of in zip(numbers.tolist(), torch.split(chosen, sizes.tolist()), strict=True)
        ]
        return _Taken(of_parts, 8 * count * weight[0, 0].numel())

    def of(self, layers: Collection[str], *, windows: bool) -> Iterator[tuple[str, FloatLayer]]:
        """These layers with their names, in the order in which they run: as they were kept, or else from a run of the
        float model, whose values are freed after their last reader.

        Args:
            windows: whether windows are asked for.
        """
        with_windows = {name for name in layers if windows and self._rounds(name)}
        kept = self._kept
        if all(name in kept and (name not in with_windows or kept[name].windows is not None) for name in layers):
            yield from ((node.name, kept[node.name]) for node in self.graph if node.name in layers)
            return
        inputs = map(Parts, zip(*self.parts, strict=True))
        values: dict[str, Any] = {**self.graph.consts, **dict(zip(self.graph.inputs, inputs, strict=True))}
        for entry in self.graph.schedule:
            read, name = [values[each] for each in entry.inputs], entry.step.name
            given = in_parts(functools.partial(self._compute, entry.step), read)
            run_schedule((entry,), values, lambda *_, given=given: given)
            if name in layers:
                seen = self.windows(self.graph[name], read[0]) if name in with_windows else None
                layer = FloatLayer(seen, Parts.of(given[0]).mean())
                self._keep(name, layer)
                yield name, layer

    def _compute(self, node: Node, read: Sequence[Any]) -> tuple[Any]:
        return (compute_real(node, read, self._ops),)

    def _rounds(self, name: str) -> bool:
        """Whether the weights of a layer can be rounded for its windows."""
        return LAYERS[self.graph[name].op][0] == 0

    def _keep(self, name: str, layer: FloatLayer) -> None:
        if self._keeps and (layer.windows is not None or name not in self._kept):
            self._kept[name] = layer
            if sum(of.bytes for of in self._kept.values()) > KEPT_BYTES:  # a part would not save a run
                self._keeps = False
                self._kept.clear()
