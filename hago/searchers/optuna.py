"""Searchers that propose points with Optuna's samplers: TPE, NSGA-II and a Gaussian process.

In memory, a search is as reproducible as any other. On a storage (SQLite, PostgreSQL, a journal file), several machines
may work on one study: the points that one asks depend on the others, and each machine needs a log of its own. A search
on a storage that is continued first asks the points of its log, adds those that the study lacks, and continues from the
study as it then is.

Errors of a storage's driver, e.g. of a remote database, are raised as a HagoError of one line. Passwords are neither
logged nor shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import logging
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hago.errors import HagoError
from hago.plan import Bits, Space
from hago.searchers.evaluation_history import EvaluationHistory
from hago.searchers.knapsack import Knapsack
from hago.searchers.surrogate import Surrogate
from hago.study import GeneratorSearcher, Score, ScoresByPoint, Searcher, Steps, point_key, random_generator

#: Seconds to wait for a database server, unless the URL says `connect_timeout`.
CONNECT_SECONDS: Final = 15
#: The search ends after so many batches of proposals in a row without a new point.
_REPEATS: Final = 50
_CONSTRAINTS: Final = "hago_constraints"
#: (seed, startup, constraints) -> one of Optuna's samplers.
MakeSampler = Callable[[int, int, Callable[[Any], Sequence[float]]], Any]


# ---------------------------------------------------------------- storages


def open_storage(url: str) -> Any:
    """Open Optuna's storage at a URL: `sqlite:///FILE`, `postgresql://...` or `journal:FILE`; None for an empty URL."""
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if url.startswith("journal:"):
        return JournalStorage(JournalFileBackend(url.removeprefix("journal:")))
    return _retry_creation(lambda: RDBStorage(complete_url(url))) if url else None


def _retry_creation(make: Callable[[], Any]) -> Any:
    """`make()`, repeated while tables "already exist": of processes that open a new database at the same time, all but
    one may find that another has just created its tables."""
    from sqlalchemy.exc import DBAPIError

    for wait in (0.1, 0.3, 1.0, 3.0):
        try:
            return make()
        except DBAPIError as error:
            if "already exists" not in str(error):
                raise
            time.sleep(wait)
    return make()


def close_storage(storage: Any) -> None:
    """Close the connections of a storage on a database."""
    engine = getattr(storage, "engine", None)
    if engine is not None:
        storage.remove_session()
        engine.dispose()


def complete_url(url: str) -> str:
    """The URL of a PostgreSQL database with driver and connection timeout, where it does not give them; other URLs
    unchanged."""
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme.startswith("postgres"):
        return url
    if scheme in ("postgres", "postgresql"):
        # SQLAlchemy's default driver depends on its version
        has_old = importlib.util.find_spec("psycopg") is None and importlib.util.find_spec("psycopg2") is not None
        scheme = "postgresql+psycopg2" if has_old else "postgresql+psycopg"
    if "connect_timeout=" not in rest:
        rest += f"{'&' if '?' in rest else '?'}connect_timeout={CONNECT_SECONDS}"
    return f"{scheme}://{rest}"


def hide_password(url: str) -> str:
    """A URL without its password."""
    return re.sub(r"(://[^/@:]*):.*@", r"\1:***@", url)


@contextlib.contextmanager
def storage_errors(url: str, doing: str) -> Iterator[None]:
    """A context manager that turns errors of a storage into a HagoError of one line, and hides Optuna's messages on new
    studies and experimental features.

    Args:
        doing: the action in words, for the message.

    Raises:
        HagoError: the storage cannot be reached, or refuses, or a package that it needs is missing.
    """
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except HagoError:
        raise
    except ImportError as error:
        extra = "; pip install 'hago[postgres]'" if "psycopg" in str(error) else ""
        raise HagoError(f"storage {hide_password(url)!r} needs a package: {error}{extra}") from None
    except Exception as error:  # whatever the storage's driver raises
        if not url:
            raise
        root = error.__cause__ or error.__context__ or error
        message = next(iter(str(root).strip().splitlines()), type(root).__name__)
        where = f"storage {hide_password(url)!r}"
        raise HagoError(
            f"cannot {doing} {where}: {message}; a log of the search holds all that was evaluated"
        ) from None
    finally:
        logger.setLevel(level)


# ---------------------------------------------------------------- searchers
@dataclass(frozen=True, slots=True)
class OptunaOptions:
    """Options of the searchers that use Optuna's samplers.

    Args:
        trials: the number of trials, the start included.
        startup: the number of random trials before the sampler's model is used; the population size of NSGA-II.
        warm: the number of points along the expected front that are tried first.
        batch: points that are asked at once, for parallel evaluation.
        storage: URL of the study's storage: sqlite:///FILE, postgresql://..., journal:FILE; empty for memory.
        study: name of the study there; empty for a name that is derived from the space.
    """

    trials: int = 200
    startup: int = 10
    warm: int = 8
    batch: int = 1
    storage: str = ""
    study: str = ""

    def __post_init__(self) -> None:
        if min(self.trials, self.batch) < 1 or self.startup < 2 or self.warm < 0:
            raise HagoError(
                f"optuna search of {self.trials} trials, {self.batch} at once, {self.startup} at first, {self.warm} "
                "warm; expected 1 or more trials at once, 2 or more at first, 0 or more warm"
            )


def _tpe(seed: int, startup: int, constraints: Callable[[Any], Sequence[float]]) -> Any:
    import optuna

    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, constraints_func=constraints)


def _nsga2(seed: int, startup: int, constraints: Callable[[Any], Sequence[float]]) -> Any:
    import optuna

    return optuna.samplers.NSGAIISampler(seed=seed, population_size=startup, constraints_func=constraints)


def _gp(seed: int, startup: int, constraints: Callable[[Any], Sequence[float]]) -> Any:
    import optuna

    return optuna.samplers.GPSampler(
        seed=seed, n_startup_trials=startup, deterministic_objective=True, constraints_func=constraints
    )


def _searcher(name: str, make: MakeSampler, both: bool = False) -> Callable[..., Searcher]:
    def searcher(history: EvaluationHistory, start: Bits, seed: int, options: OptunaOptions) -> Searcher:
        study = _Study(name, make, both, history.space, seed, options, history.surrogate)
        # the options are written to the log, which must not hold the password
        public = replace(options, storage=hide_password(options.storage))
        recalled: list[Bits] = []
        steps = _steps(study, history, start, recalled)
        if not options.storage:
            return GeneratorSearcher(name, public, steps)
        return _StoredSearcher(name, public, steps, recalled)

    searcher.__doc__ = f"A searcher that asks `start`, points of the expected front, and then what {name} samples."
    return searcher


#: References: Bergstra et al., NeurIPS 2011 (TPE); Deb et al., IEEE Trans. Evol. Comp. 6, 2002 (NSGA-II);
#: Akiba et al., Optuna, KDD 2019.
tpe: Final = _searcher("tpe", _tpe)
nsga2: Final = _searcher("nsga2", _nsga2, both=True)
gp: Final = _searcher("gp", _gp)


class _StoredSearcher(GeneratorSearcher):
    """A searcher on a storage, which first asks the points that an earlier session asked.

    Args:
        recalled: filled by `recall`, read by the steps.
    """

    def __init__(self, name: str, options: Any, steps: Steps[None], recalled: list[Bits]) -> None:
        super().__init__(name, options, steps)
        self._recalled = recalled

    def recall(self, points: Sequence[Bits]) -> None:
        """See `Recalls`."""
        self._recalled += points


@dataclass(slots=True)
class _Study:
    """Optuna's study of one search. It is opened when the searcher is first asked.

    Args:
        make: makes the sampler.
        both: whether the cost is a second objective of the study.
    """

    name: str
    make: MakeSampler
    both: bool
    space: Space
    seed: int
    options: OptunaOptions
    surrogate: Surrogate
    storage: Any = None
    study: Any = None
    distributions: Any = None

    def open(self) -> None:
        """Create or join the study.

        Raises:
            HagoError: the storage cannot be reached, or a package that it needs is missing.
        """
        import optuna

        self.distributions = {
            key: optuna.distributions.IntDistribution(min(shown), max(shown), step=step)
            for key, group in self.space.groups.items()
            for shown, step in [study_numbers(group.choices)]
        }
        seed = int(random_generator(self.seed, 0).integers(1 << 31))
        with storage_errors(self.options.storage, "open"):
            self.storage = open_storage(self.options.storage)
            self.study = optuna.create_study(
                storage=self.storage,
                sampler=self.make(seed, self.options.startup, lambda trial: trial.user_attrs[_CONSTRAINTS]),
                study_name=self.options.study or f"hago-{self.name}-{_digest(self.space)}",
                directions=["maximize", "minimize"] if self.both else ["maximize"],
                load_if_exists=bool(self.options.storage),
            )

    def propose(self) -> tuple[Any, dict[str, int]]:
        """A new trial of the study, and its point."""
        with storage_errors(self.options.storage, "ask"):
            trial = self.study.ask(self.distributions)
        groups = self.space.groups
        return trial, {k: g.choices[study_numbers(g.choices)[0].index(trial.params[k])] for k, g in groups.items()}

    def enqueue(self, bits: Bits) -> None:
        """Make the study propose a point, unless it is queued or scored already. A point that was asked and not
        scored may have been lost, and is proposed again."""
        import optuna

        states, shown = optuna.trial.TrialState, self._params_of(bits)
        with storage_errors(self.options.storage, "write to"):
            trials = self.study.get_trials(deepcopy=False, states=(states.WAITING, states.COMPLETE, states.FAIL))
            if not any({**t.system_attrs.get("fixed_params", {}), **t.params} == shown for t in trials):
                self.study.enqueue_trial(shown)

    def tell(self, trial: Any, bits: Bits, score: Score) -> None:
        """Tell the study the score of one of its trials."""
        import optuna

        with storage_errors(self.options.storage, "write to"):
            trial.set_user_attr(_CONSTRAINTS, _constraint_values(score))
            if _has_no_value(score):
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                self.study.tell(trial, self._values(bits, score))

    def learn(self, points: Sequence[tuple[Bits, Score]]) -> None:
        """Add scored points to the study that it has no finished trials of, as it has none of those that were scored
        after its storage became unreachable."""
        import optuna

        states = optuna.trial.TrialState
        with storage_errors(self.options.storage, "write to"):
            ended = self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.FAIL))
            finished = {tuple(sorted(t.params.items())) for t in ended}
            for bits, score in points:
                shown = self._params_of(bits)
                if tuple(sorted(shown.items())) not in finished:
                    outcome = trial_outcome(score, self._values(bits, score))
                    trial = optuna.trial.create_trial(params=shown, distributions=self.distributions, **outcome)
                    self.study.add_trial(trial)

    def _params_of(self, bits: Bits) -> dict[str, int]:
        """The study's parameters that stand for a point."""
        return {k: study_numbers(g.choices)[0][g.choices.index(bits[k])] for k, g in self.space.groups.items()}

    def _values(self, bits: Bits, score: Score) -> list[float]:
        return [score.value, self.surrogate.cost_of(bits, score)][: 1 + self.both]


def _constraint_values(score: Score) -> list[float]:
    """The values of the study's constraints: excess bits, and the shortfall of limits."""
    return [float(sum(score.excess_bits.values()) or len(score.overflows)), min(score.shortfall, 1e30)]


def _has_no_value(score: Score) -> bool:
    """Whether a score has no finite value."""
    return bool(score.infeasible) or not math.isfinite(score.value)


def trial_outcome(score: Score, values: Sequence[float]) -> dict[str, Any]:
    """What `optuna.trial.create_trial` takes of a scored point: its values and constraints, or that it failed where the
    score or one of the values is not finite.

    Args:
        values: of the study's objectives.
    """
    import optuna

    if _has_no_value(score) or not all(map(math.isfinite, values)):
        return {"state": optuna.trial.TrialState.FAIL}
    return {"values": list(values), "system_attrs": {"constraints": _constraint_values(score)}}


def study_numbers(choices: Sequence[int]) -> tuple[Sequence[int], int]:
    """The numbers by which a study represents the choices of a group, and the step between them: the bits themselves if
    these are evenly spaced, else indices, the most bits having the highest."""
    steps = {more - less for more, less in itertools.pairwise(choices)}
    if len(steps) <= 1:
        return choices, min(steps, default=1)
    return range(len(choices) - 1, -1, -1), 1


def _digest(space: Space) -> str:
    text = json.dumps([[g.key, list(study_numbers(g.choices)[0]), list(g.choices)] for g in space.groups.values()])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _steps(study: _Study, history: EvaluationHistory, start: Bits, recalled: Sequence[Bits]) -> Steps[None]:
    """The search.

    Args:
        recalled: the points that an earlier session asked.
    """
    try:
        study.open()
        first = (start, *_warm_start_points(history, study))
        if recalled:
            yield from history.evaluate_all(recalled, "read from the log")
            study.learn(history.scored)
        for bits in first:
            study.enqueue(bits)
        yield from _sample(history, start, study)
    finally:
        close_storage(study.storage)


def _sample(history: EvaluationHistory, start: Bits, study: _Study) -> Steps[None]:
    """Ask for the points that the study proposes, until the trials are used up or proposals repeat."""
    left, repeats = study.options.trials - len(history.scored), 0
    while left > 0 and repeats < _REPEATS:
        # the start by itself first, so that the sampler knows its score when it proposes a batch
        count = min(left, study.options.batch) if history.scored else 1
        trials = [study.propose() for _ in range(count)]
        new = _new_points([bits for _, bits in trials], history.known_scores)
        repeats = 0 if new else repeats + 1
        left -= len(new)
        why = "start" if list(new) == [point_key(start)] else study.name
        yield from history.evaluate_all(list(new.values()), why)
        for trial, bits in trials:
            study.tell(trial, bits, history.known_scores[point_key(bits)])


def _new_points(points: Sequence[Bits], known_scores: ScoresByPoint) -> Mapping[str, Bits]:
    return {k: p for p in points if (k := point_key(p)) not in known_scores}


def _warm_start_points(history: EvaluationHistory, study: _Study) -> list[Mapping[str, int]]:
    """Points of the expected front, evenly spaced between its ends, from the most costly that the limit allows."""
    count = min(study.options.warm, study.options.trials - 1)
    if not count:
        return []
    program: Knapsack = history.program()
    ends = program.range
    if ends is None:
        return []
    (least, most), limit = ends, study.surrogate.limit
    most = most if limit is None else min(most, limit)
    limits = [most - (most - least) * i / max(1, count - 1) for i in range(count)]
    picked = (program.solve(x * (1 + 1e-9)) for x in limits)
    return [p.bits for p in picked if p is not None]
