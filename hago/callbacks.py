"""Ready-made callbacks of searches and of training, for `callbacks=[...]`.

A callback is any callable of two arguments: of a search, the `RunningSearch` and each new `Trial`; of training, the
`RunningTraining` and each `TrainingStep`. It is called in the main process, in order. It may call `stop()` of the first
argument; an exception that it raises ends the run, after what there is was saved. The classes here serve both.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Protocol

from hago.errors import HagoError


class Event(Protocol):
    """A trial of a search, or a step of training."""

    @property
    def index(self) -> int:
        """Its number, from 0."""
        ...


class Running(Protocol):
    """A search or a training run, as callbacks get it."""

    def figures(self, event: Any, /) -> Mapping[str, float]:
        """The figures of an event, by names for charts."""
        ...

    def stop(self) -> None:
        """End the run."""
        ...


class TensorBoard:
    """Writes the figures of every trial or step as scalars for TensorBoard, which `tensorboard --logdir FOLDER` shows.

    The user makes it; the search or the training run calls it. It is a context manager, which closes its file.

    Args:
        folder: where its event file is written; each run needs a folder of its own.

    Raises:
        HagoError: TensorBoard is not installed, or the folder cannot be written.

    >>> import tempfile
    >>> board = TensorBoard(tempfile.mkdtemp())
    >>> board.close()
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise HagoError("TensorBoard needs the package tensorboard: pip install 'hago[tensorboard]'") from None
        writer: Any = SummaryWriter  # which has types only where TensorBoard is installed
        try:
            self._writer = writer(fspath(folder))
        except OSError as error:
            raise HagoError(f"cannot write to the folder {fspath(folder)}: {error}") from None

    def __call__(self, running: Running, event: Event) -> None:
        """Write the figures of one trial or step."""
        for name, value in running.figures(event).items():
            self._writer.add_scalar(name, value, event.index)
        self._writer.flush()  # so that a run that is killed has written all of them

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class WeightsAndBiases:
    """Logs the figures of every trial or step to a run of Weights & Biases.

    The user makes it; the search or the training run calls it. It is a context manager, which finishes its run.

    Args:
        project: the project that the run belongs to.
        settings: further arguments of `wandb.init`, such as `name`, `config`, or `mode="offline"`.

    Raises:
        HagoError: the package wandb is not installed.
    """

    def __init__(self, project: str, **settings: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise HagoError("WeightsAndBiases needs the package wandb: pip install 'hago[wandb]'") from None
        self._run: Any = wandb.init(project=project, **settings)

    def __call__(self, running: Running, event: Event) -> None:
        """Log the figures of one trial or step."""
        self._run.log(dict(running.figures(event)), step=event.index)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()

    def __enter__(self) -> WeightsAndBiases:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class EarlyStopping:
    """Ends a search when its best trial has not changed for a number of trials.

    The user makes it; the search calls it.

    Args:
        patience: number of new trials without a better one after which the search ends, at least 1.

    Raises:
        HagoError: the patience is no whole number above 0.
    """

    def __init__(self, patience: int) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise HagoError(f"patience is {patience!r}; expected a whole number above 0")
        self.patience = patience

    def __call__(self, search: Any, trial: Event) -> None:
        """Look at the search after one trial."""
        best = search.best
        if best is not None and trial.index - best.index >= self.patience:
            search.stop()
