"""Ready-made callbacks of searches and of training, for `callbacks=[...]`.

A callback is any callable of two arguments: of a search, the `RunningSearch` and each new `Trial`; of training, the
`RunningTraining` and each `TrainingStep`. It is called in the main process, in order. It may call `stop()` of the first
argument; an exception that it raises ends the run, after what there is was saved. TensorBoard and WeightsAndBiases
serve both.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from hago.errors import HagoError
from hago.search import ParetoFront, RunningSearch
from hago.searchers import (
    close_storage,
    hide_password,
    open_storage,
    storage_errors,
    study_numbers,
    trial_outcome,
)
from hago.serialization.summary import number_values
from hago.study import Trial


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


def _check_search(running: Any, name: str) -> None:
    """Refuse a training run, which has no trials.

    Args:
        name: of the callback.
    """
    if not isinstance(running, RunningSearch):
        raise HagoError(
            f"{name} serves searches, and is a callback of {type(running).__name__} here; pass it to the search, as "
            "callbacks=[...]"
        )


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


class OptunaStudy:
    """Keeps the trials of a search, by any searcher, in a study of Optuna, which Optuna Dashboard shows:
    `optuna-dashboard URL --artifact-dir FOLDER`.

    The parameters of the study are the bits of the groups of edges, its objectives the measure and the cost of the
    front, and its constraints overflow and limits. The user makes it; the search calls it. It is a context manager. On
    leaving, the front and its strategies become artifacts of the study.

    Args:
        storage: the URL of the study's storage: sqlite:///FILE, postgresql://... or journal:FILE.
        study: the name of the study; by default one of the hardware and the hash of the model. A search that goes on
            from its log goes on with its study, too.
        artifacts: the folder of artifacts; None to keep none.

    Raises:
        HagoError: the storage cannot be reached, or the study has trials of another search.
    """

    def __init__(self, storage: str, study: str = "", artifacts: str | PathLike[str] | None = None) -> None:
        self._url, self._name = storage, study
        self._folder = None if artifacts is None else Path(artifacts)
        with storage_errors(storage, "open"):
            self._storage: Any = open_storage(storage)
        self._study: Any = None
        self._search: RunningSearch | None = None
        self._stored = 0

    def __call__(self, search: RunningSearch, trial: Trial) -> None:
        """Add a trial, and before the first those that were read from the log and that the study lacks.

        Raises:
            HagoError: the storage cannot be reached, the study has trials of another search, or it is a callback of
                training.
        """
        _check_search(search, "OptunaStudy")
        if self._study is None:
            self._open(search)
        self._search = search
        with storage_errors(self._url, "write to"):
            for new in search.trials[self._stored :]:
                self._study.add_trial(self._trial_of(search, new))
                self._stored += 1

    def _open(self, search: RunningSearch) -> None:
        """Create the study, or join the one that holds the first trials of this search."""
        import optuna

        name = self._name or f"hago-{search.hardware}-{search.model_hash[:8]}"
        with storage_errors(self._url, "open"):
            self._study = optuna.create_study(
                storage=self._storage, study_name=name, directions=["maximize", "minimize"], load_if_exists=True
            )
            stored = [trial.params for trial in self._study.get_trials(deepcopy=False)]
        if stored != [dict(trial.bits) for trial in search.trials[: len(stored)]]:
            raise HagoError(
                f"study {name!r} of storage {hide_password(self._url)!r} has trials of another search; "
                "give another name or storage"
            )
        with storage_errors(self._url, "write to"):
            self._study.set_metric_names([search.measure, search.cost])
        self._stored = len(stored)

    def _trial_of(self, search: RunningSearch, trial: Trial) -> Any:
        """A trial as Optuna keeps it: failed where it has no value."""
        import optuna

        score = trial.score
        values = [float(trial.results.get(search.measure, score.value)), score.costs.get(search.cost, math.nan)]
        figures = {**number_values(trial.results), **score.costs, "why": trial.why, "seconds": trial.seconds}
        distributions: dict[str, Any] = {
            key: optuna.distributions.IntDistribution(min(bits), max(bits), step=study_numbers(bits)[1])
            for key, bits in search.choices.items()
        }
        return optuna.trial.create_trial(
            params=dict(trial.bits), distributions=distributions, user_attrs=figures, **trial_outcome(score, values)
        )

    def close(self) -> None:
        """Store the front and its strategies as artifacts, and close the storage."""
        try:
            if self._folder is not None and self._search is not None:
                self._store_artifacts(self._search.front, self._folder)
        finally:
            close_storage(self._storage)

    def _store_artifacts(self, front: ParetoFront, folder: Path) -> None:
        from optuna.artifacts import FileSystemArtifactStore, upload_artifact

        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as made, storage_errors(self._url, "write to"):
                store = FileSystemArtifactStore(folder)
                files = [Path(made, f"front-after-{self._stored}-trials.json")]
                front.save(files[0])
                for point in front:
                    files.append(Path(made, f"strategy-of-trial-{point.trial}.json"))
                    point.strategy.save(files[-1])
                for file in files:  # of the study, since trials that have ended cannot be changed
                    upload_artifact(artifact_store=store, file_path=str(file), study_or_trial=self._study)
        except OSError as error:
            raise HagoError(f"cannot write to the folder {folder}: {error}") from None

    def __enter__(self) -> OptunaStudy:
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

    def __call__(self, search: RunningSearch, trial: Trial) -> None:
        """Look at the search after one trial.

        Raises:
            HagoError: it is a callback of training.
        """
        _check_search(search, "EarlyStopping")
        best = search.best
        if best is not None and trial.index - best.index >= self.patience:
            search.stop()
