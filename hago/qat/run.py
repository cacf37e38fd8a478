"""A training run: optimizer steps of a QatModel on samples in memory, with a cosine schedule and checkpoints.

A step depends only on its number and on the state of the model and the optimizer: the order of the samples of an epoch
is drawn by a generator made of (seed, epoch). A run that is resumed therefore ends as if it had never stopped, unless
it has a time limit: the learning rate then depends on the time that steps take.

A checkpoint is JSON and tensors in one file, which is replaced atomically, so that a run that is killed leaves the last
one intact. Nothing is unpickled; the layout is that of safetensors, with a checksum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hago.data import CACHE_BYTES, Batches, StatusLine, duration
from hago.errors import (
    LONGEST_QUOTE,
    DataError,
    HagoError,
    LogError,
    ModelFileError,
    StrategyMismatch,
    shortened,
    shortened_to,
)
from hago.graph import Graph, run_real
from hago.ops import Ops
from hago.plan import Plan
from hago.qat.losses import Loss
from hago.qat.model import QatModel
from hago.qat.optimizer import RelativeAdam, load_optimizer, optimizer_tensors
from hago.serialization.json_text import check_version, read_file, replace_file
from hago.serialization.tensor_file import from_bytes, to_bytes
from hago.simulation import Simulator
from hago.study import Interrupts

CHECKPOINT_VERSION: Final = 1
_KIND: Final = "hago checkpoint"
#: The learning rate of the first step, relative to the largest; with a rate of 0 the step would change nothing.
_FIRST_RATE: Final = 1e-3
#: The fraction of a run in which the learning rate rises to the largest.
_WARM_UP: Final = 0.05
#: One of so many samples is kept aside for validation: it is not trained on, and tells whether training helped.
VALIDATION_EVERY: Final = 10


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Samples in memory: inputs, the float model's outputs and labels, each one tensor with a row per sample.

    Args:
        inputs: in the order of the graph's inputs.
        reference: the float model's outputs.
        labels: None unless every batch has labels.
    """

    inputs: tuple[Tensor, ...]
    reference: tuple[Tensor, ...]
    labels: Tensor | None

    @property
    def count(self) -> int:
        return len(self.inputs[0])

    def take(self, index: Tensor) -> Samples:
        """The samples at `index`, a tensor of int64."""
        return Samples(
            tuple(t[index] for t in self.inputs),
            tuple(t[index] for t in self.reference),
            None if self.labels is None else self.labels[index],
        )

    @staticmethod
    def of(graph: Graph, batches: Batches, ops: Ops) -> Samples:
        """Read a data set into memory, and run the float model on it.

        Raises:
            DataError: they do not fit into memory, or an output is not one row per sample.
        """
        inputs, reference, labels, used_bytes = [], [], [], 0
        for batch in batches:
            outputs = run_real(graph, batch.inputs, ops=ops)
            for slot, output in enumerate(outputs):
                if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != batch.size:
                    raise DataError(f"output {slot} of the model is not one row per sample; it cannot be trained on")
            used_bytes += sum(t.numel() * t.element_size() for t in (*batch.inputs, *outputs))
            if used_bytes > 2 * CACHE_BYTES:
                raise DataError(f"samples and outputs take more than {2 * CACHE_BYTES} bytes; train on fewer samples")
            inputs.append(batch.inputs)
            reference.append(outputs)
            labels.append(batch.labels)
        present = [t for t in labels if t is not None]
        return Samples(
            tuple(torch.cat(parts) for parts in zip(*inputs, strict=True)),
            tuple(torch.cat(parts) for parts in zip(*reference, strict=True)),
            torch.cat(present) if len(present) == len(labels) else None,
        )


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """The length of a run and its learning rate: a linear warm-up, then a cosine to 0.

    Args:
        steps: number of steps of the whole run; None for a run that ends only by its time.
        seconds: wall time of the whole run. It ends when either is used up.

    References:
        Loshchilov and Hutter, arXiv:1608.03983.
    """

    steps: int | None
    seconds: float

    def completed(self, step: int, seconds: float) -> float:
        """The completed fraction of the run, from 0 to 1: of its steps or of its seconds, whichever is larger."""
        of_steps = 0.0 if self.steps is None else step / self.steps
        return min(1.0, max(of_steps, seconds / self.seconds))

    def rate(self, completed: float) -> float:
        """The learning rate, relative to the largest, after a fraction of the run is completed."""
        if completed < _WARM_UP:
            return completed / _WARM_UP + _FIRST_RATE
        return 0.5 * (1.0 + math.cos(math.pi * (completed - _WARM_UP) / (1.0 - _WARM_UP)))


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The state of a training run, as it is stored in a file. TrainingRun writes and reads it.

    Args:
        settings: everything that determines the run, as JSON values. A run with other settings cannot resume from it.
        step: number of completed steps.
        seconds: wall time of all sessions together.
        tensors: the states of the model and of the optimizer, by name.
    """

    settings: Mapping[str, Any]
    step: int
    seconds: float
    tensors: Mapping[str, Tensor]

    def save(self, path: Path) -> None:
        """Replace the file at `path` atomically.

        Raises:
            LogError: it could not be written; an existing file is not changed.
        """
        document = {
            "version": CHECKPOINT_VERSION,
            "settings": dict(self.settings),
            "step": self.step,
            "seconds": self.seconds,
        }
        replace_file(path, to_bytes(_KIND, document, self.tensors))

    @staticmethod
    def load(path: Path, settings: Mapping[str, Any]) -> Checkpoint | None:
        """Read the checkpoint at `path`; None if there is none.

        Raises:
            LogError: it cannot be read.
            ModelFileError: it is not a checkpoint of hago, or was truncated or changed.
            StrategyMismatch: it is of a run with other settings; the message names the first that differs.
        """
        try:
            content = read_file(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise LogError(f"cannot read checkpoint {path}: {error}") from None
        document, tensors = from_bytes(content, _KIND, f"checkpoint {path}")
        check_version(document, CHECKPOINT_VERSION, str(path))
        _check_settings(document.get("settings"), settings, path)
        step, seconds = document.get("step"), document.get("seconds")
        if type(step) is not int or step < 0 or type(seconds) not in (int, float) or seconds < 0:
            raise ModelFileError(
                f"checkpoint {path}: got step {shortened(step)} and seconds {shortened(seconds)}, expected a count and "
                "a time; remove it to train from the start"
            )
        return Checkpoint(settings, step, float(seconds), tensors)


def _check_settings(stored: Any, settings: Mapping[str, Any], path: Path) -> None:
    stored = stored if isinstance(stored, Mapping) else {}
    for name in sorted({*stored, *settings}):
        if stored.get(name) != settings.get(name):
            raise StrategyMismatch(
                f"checkpoint {path} is of a run with {shortened_to(name, LONGEST_QUOTE)} "
                f"{shortened(stored.get(name))}, this one has {shortened(settings.get(name))}; "
                "give this run its own checkpoint, or remove that one"
            )


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One completed step of a training run, as callbacks get it.

    Args:
        index: from 0, over all sessions of the run.
        loss: of the step's samples, before its update.
        rate: the learning rate of the step, relative to the largest.
        seconds: wall time of all sessions together.
    """

    index: int
    loss: float
    rate: float
    seconds: float


class TrainingRun:
    """One training run. `finetune` makes it, calls `resume` if the user allows it, then `train` once, and then
    `validation_loss`.

    Args:
        model: its parameters are trained in place.
        samples: all of them; one in VALIDATION_EVERY is kept aside for validation.
        loss: the function to minimize.
        rates: the largest relative learning rates, of weights and of ranges.
        seed: of the choice of the validation samples, and of the order of the others.
        settings: everything that determines the run, as JSON values.
        checkpoint: the file in which the state of the run is kept; None to keep none.
        every: steps between two writes of the checkpoint.

    Raises:
        HagoError: the model has no parameter to train.
    """

    def __init__(
        self,
        model: QatModel,
        samples: Samples,
        loss: Loss,
        schedule: TrainingSchedule,
        *,
        rates: tuple[float, float],
        batch_size: int,
        seed: int,
        settings: Mapping[str, Any],
        checkpoint: Path | None,
        every: int,
    ) -> None:
        self.model, self.loss, self.schedule = model, loss, schedule
        self.seed, self.settings, self.checkpoint, self.every = seed, settings, checkpoint, every
        order = torch.randperm(samples.count, generator=self._generator(-1))
        count = samples.count // VALIDATION_EVERY
        self.validation = samples.take(order[:count].sort().values) if count else samples
        self.samples = samples.take(order[count:].sort().values)
        self.batch_size = min(batch_size, self.samples.count)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.names = [n for n, _ in named]
        if not named:
            raise HagoError("nothing of the model can be trained: it has no float constants")
        self.optimizer = RelativeAdam([(p, model.size_of(n)) for n, p in named], lr=0.0)
        self.rates = [rates[1] if n.startswith("ranges.") else rates[0] for n in self.names]
        self.step, self.seconds = 0, 0.0
        self._consistent = True  # False while a step changes weights and optimizer, and where they gave no loss

    def resume(self) -> bool:
        """Load the checkpoint if there is one, and return whether there was."""
        stored = None if self.checkpoint is None else Checkpoint.load(self.checkpoint, self.settings)
        if stored is None:
            return False
        state = {n.removeprefix("model/"): t for n, t in stored.tensors.items() if n.startswith("model/")}
        try:
            self.model.load_state_dict(state)
            load_optimizer(self.optimizer, self.names, dict(stored.tensors))
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ModelFileError(
                f"checkpoint {self.checkpoint} holds other tensors than the model and its optimizer have ({error}); "
                "remove it to train from the start"
            ) from None
        self.step, self.seconds = stored.step, stored.seconds
        return True

    def save(self) -> None:
        """Write the checkpoint, if the run keeps one."""
        if self.checkpoint is not None:
            tensors = {f"model/{n}": t for n, t in self.model.state_dict().items()}
            tensors |= optimizer_tensors(self.optimizer, self.names)
            Checkpoint(self.settings, self.step, self.seconds, tensors).save(self.checkpoint)

    def train(self, *, progress: bool, on_step: Callable[[TrainingStep], bool] | None = None) -> None:
        """Train to the end of the schedule, from the current step.

        Args:
            on_step: called with every completed step; returns whether the run ends with it. After an exception of it,
                the checkpoint holds the step.

        Raises:
            HagoError: the loss is NaN or infinite.
            KeyboardInterrupt: the user interrupted. The current step is completed and the checkpoint holds it. A second
                interrupt aborts the step; the checkpoint then holds the one before.
        """
        self.model.train()
        clock_offset = self.seconds - time.monotonic()
        with StatusLine(progress) as line, Interrupts(defer=True) as interrupts:
            try:
                while (completed := self.schedule.completed(self.step, self.seconds)) < 1.0:
                    rate = self.schedule.rate(completed)
                    loss = self._step(rate)
                    self.step += 1
                    self._consistent = True
                    self.seconds = clock_offset + time.monotonic()
                    line.show(self._progress_text(loss))
                    if self.step % self.every == 0:
                        self.save()
                    interrupts.check()
                    done = TrainingStep(self.step - 1, loss, rate, self.seconds)
                    if on_step is not None:
                        with line.cleared():  # it may print
                            stops = on_step(done)
                        if stops:
                            break
            except BaseException:
                if self._consistent:
                    self.save()
                raise
        self.save()

    def _progress_text(self, loss: float) -> str:
        """The step, the loss, and the time left at the rate so far."""
        completed = self.schedule.completed(self.step, self.seconds)
        left = duration(self.seconds * (1.0 - completed) / completed) if completed else "some time"
        limit = "" if self.schedule.steps is None else f" of at most {self.schedule.steps}"
        return f"training: step {self.step}{limit}, loss {loss:.4g}, {left} left"

    def validation_loss(self, plan: Plan) -> float:
        """The mean loss of a plan on the validation samples, or on all if there are too few to keep any aside."""
        simulator, total = Simulator(plan), 0.0
        for index in torch.split(torch.arange(self.validation.count), self.batch_size):
            batch = self.validation.take(index)
            total += len(index) * float(self.loss(simulator.run(batch.inputs), batch.reference, batch.labels))
        return total / self.validation.count

    def _step(self, rate: float) -> float:
        """Take one optimizer step, and return its loss.

        Args:
            rate: the learning rate relative to the largest.
        """
        batch = self.samples.take(self._indices())
        outputs = self.model.run(batch.inputs)
        loss = self.loss(outputs, batch.reference, batch.labels)
        value = float(loss.detach())
        if not math.isfinite(value):
            self._consistent = False  # weights with such a loss do not replace those of the last checkpoint
            raise HagoError(f"the loss is {value} at step {self.step}; lower the learning rate")
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for group, largest in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = largest * rate
        self._consistent = False
        self.optimizer.step()
        return value

    def _indices(self) -> Tensor:
        """The indices of the samples of this step; every epoch has its own order, and drops an incomplete batch."""
        per_epoch = self.samples.count // self.batch_size
        epoch, batch = divmod(self.step, per_epoch)
        order = torch.randperm(self.samples.count, generator=self._generator(epoch))
        return order[batch * self.batch_size : (batch + 1) * self.batch_size]

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1_000_003 + epoch + 1) % (1 << 62))
