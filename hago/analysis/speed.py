"""The time of an integer model against that of the float model, on this machine.

The float model is the imported graph, with batch norms folded, run node by node by eager torch in float32, activations
and weights in channels_last. Both models run in interleaved rounds, so that other load on the machine meets both; the
ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hago.analysis.hardware_timing import SLICE
from hago.data import Batches
from hago.errors import HagoError
from hago.graph import channels_last, compute_real, run_graph
from hago.plan import Plan
from hago.runtime.native import NativeIntegerModel, processor_name
from hago.serialization.text_table import table, wrapped

#: The batch sizes that are timed by default.
BATCH_SIZES: Final = (1, 32)
#: The number of rounds, unless they take too long.
ROUNDS: Final = 11
#: The least number of rounds, and the seconds after which no further round begins.
LEAST_ROUNDS: Final = 3
MOST_SECONDS: Final = 20.0
#: What `KernelTable` says of nodes that need no call.
NO_CALL: Final = "none"
#: Ratios are uncertain if their third quartile is so many times the first.
NOISY: Final = 1.5


@dataclass(frozen=True, slots=True)
class BatchSpeed:
    """The times of one batch size.

    Args:
        batch: number of samples.
        float_seconds, integer_seconds: of one call, the medians of the rounds.
        ratio: the median of the rounds' ratios, integer to float; less than 1 if the integer model is faster.
        quartiles: the first and the third quartile of these ratios.
        rounds: their number.
    """

    batch: int
    float_seconds: float
    integer_seconds: float
    ratio: float
    quartiles: tuple[float, float]
    rounds: int


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """The time of an integer model against the float model. `time_against_float` makes it; prints as a table.

    Args:
        machine: the name of the processor.
        threads: with which both models ran.
        torch_version: of the float model's kernels.
        kernels: the number of nodes that each kernel of the integer model runs.
        exact_kernels: which kernels are exact on this machine, and why the others are not used.
        batches: one per batch size.
    """

    machine: str
    threads: int
    torch_version: str
    kernels: Mapping[str, int]
    exact_kernels: str
    batches: tuple[BatchSpeed, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "kernels": dict(self.kernels), "batches": [asdict(b) for b in self.batches]}

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        titles = ("batch", "float", "integer", "integer / float", "quartiles", "float samples/s", "integer samples/s")
        kernels = ", ".join(f"{count} x {name}" for name, count in self.kernels.items() if name != NO_CALL)
        noisy = [str(b.batch) for b in self.batches if b.quartiles[1] > NOISY * b.quartiles[0]]
        return "\n".join(
            [
                f"on {self.machine}, {threads}; float32 in torch {self.torch_version}, medians of interleaved rounds",
                *table(titles, [_row(b) for b in self.batches], titles),
                *([f"uncertain at batch {', '.join(noisy)}: other load disturbed the rounds"] if noisy else []),
                *wrapped(f"kernels of the integer model: {kernels}"),
                *wrapped(f"on this machine: {self.exact_kernels}"),
            ]
        )


def time_against_float(
    plan: Plan, batches: Batches, batch_sizes: Sequence[int] = BATCH_SIZES, rounds: int = ROUNDS
) -> SpeedReport:
    """Time the integer model of a Plan and its float model on samples of the data.

    Args:
        batches: the data; batches that are larger than it repeat its samples.
        batch_sizes: numbers of samples of a call.
        rounds: of every batch size; fewer if they take longer than MOST_SECONDS.

    Raises:
        HagoError: a batch size or the number of rounds is no positive integer, or the model takes no such batch.
    """
    for what, number in (("rounds", rounds), *(("a batch size", size) for size in batch_sizes)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise HagoError(f"{what} is {number!r}; expected an integer, 1 or more")
    model = NativeIntegerModel(plan)
    consts = {name: channels_last(value) for name, value in plan.graph.consts.items()}

    def run_float(inputs: Sequence[Tensor]) -> Any:
        with torch.no_grad():
            return run_graph(plan.graph, inputs, lambda n, v: compute_real(n, v, plan.ops), consts=consts)

    measured = []
    for size in batch_sizes:
        inputs = [channels_last(x) for x in _samples(batches, size)]
        pairs = _interleaved(lambda x=inputs: run_float(x), lambda x=inputs: model.run(x), rounds)  # type: ignore[misc]
        measured.append(_summary(size, pairs))
    explained = model.explain()
    return SpeedReport(
        processor_name(),
        torch.get_num_threads(),
        str(torch.__version__),
        explained.kernels,
        explained.head,
        tuple(measured),
    )


def _samples(batches: Batches, size: int) -> list[Tensor]:
    """The inputs of the first samples of the data, repeated if there are fewer."""
    parts: list[Sequence[Tensor]] = []
    for batch in batches:
        parts.append(batch.inputs)
        if sum(len(part[0]) for part in parts) >= size:
            break
    inputs = [torch.cat(values) for values in zip(*parts, strict=True)]
    return [torch.cat([x] * -(-size // len(x)))[:size].contiguous() for x in inputs]


def _interleaved(
    run_float: Callable[[], Any], run_integer: Callable[[], Any], rounds: int
) -> list[tuple[float, float]]:
    """The seconds of one call of both, in every round. Short calls are repeated within a round."""
    repeats = [_repeats(run) for run in (run_float, run_integer)]
    pairs: list[tuple[float, float]] = []
    started = time.perf_counter()
    while len(pairs) < rounds:
        spent = [_seconds(run, n) for run, n in zip((run_float, run_integer), repeats, strict=True)]
        pairs.append((spent[0], spent[1]))
        if len(pairs) >= LEAST_ROUNDS and time.perf_counter() - started > MOST_SECONDS:
            break
    return pairs


def _repeats(run: Callable[[], Any]) -> int:
    run()
    return max(1, int(SLICE / max(_seconds(run, 1), 1e-7)))


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


def _summary(size: int, pairs: Sequence[tuple[float, float]]) -> BatchSpeed:
    """The medians of the rounds.

    Args:
        pairs: seconds of the float and of the integer model in every round.
    """
    ratios = [integer / reference for reference, integer in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    floats, integers = (statistics.median(column) for column in zip(*pairs, strict=True))
    return BatchSpeed(size, floats, integers, middle, (low, high), len(pairs))


def _row(speed: BatchSpeed) -> tuple[str, ...]:
    low, high = speed.quartiles
    each = [speed.batch / seconds for seconds in (speed.float_seconds, speed.integer_seconds)]
    times = [f"{1e3 * seconds:.3g} ms" for seconds in (speed.float_seconds, speed.integer_seconds)]
    return (str(speed.batch), *times, f"{speed.ratio:.3f}", f"{low:.3f} to {high:.3f}", *(f"{n:,.0f}" for n in each))
