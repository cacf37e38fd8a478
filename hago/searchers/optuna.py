"""Storages of Optuna's studies: opened by URL, with what goes wrong in them as one line.

A storage may be far away, and what it raises is its driver's own. Passwords are neither logged nor shown.
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
from hago.plan.space import Bits, Space
from hago.searchers.knapsack import Knapsack
from hago.searchers.sensitivity import EvaluationHistory
from hago.searchers.surrogate import Surrogate
from hago.study.searcher import GeneratorSearcher, Score, ScoresByPoint, Searcher, Steps, generator, point_key

#: Seconds to wait for a database server, unless the URL says `connect_timeout`.
PATIENCE: Final = 15


def open_storage(url: str) -> Any:
    """Optuna's storage for a URL: `sqlite:///FILE`, `postgresql://...`, `journal:FILE`; None for memory."""
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if url.startswith("journal:"):
        return JournalStorage(JournalFileBackend(url.removeprefix("journal:")))
    return _retried(lambda: RDBStorage(full(url))) if url else None


def _retried(make: Callable[[], Any]) -> Any:
    """What `make` makes; of processes that open a new database at the same time, all but one may find that its
    tables have come into being while they were making them."""
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
    """Give back what an opened storage holds: a database's connections."""
    engine = getattr(storage, "engine", None)
    if engine is not None:
        storage.remove_session()
        engine.dispose()


def full(url: str) -> str:
    """A database's URL with what is left to chance where it is not said: the driver, and how long to wait."""
    scheme, found, rest = url.partition("://")
    if not found or not scheme.startswith("postgres"):
        return url
    if scheme in ("postgres", "postgresql"):
        # SQLAlchemy's own choice changes with its version
        has_old = importlib.util.find_spec("psycopg") is None and importlib.util.find_spec("psycopg2") is not None
        scheme = "postgresql+psycopg2" if has_old else "postgresql+psycopg"
    if "connect_timeout=" not in rest:
        rest += f"{'&' if '?' in rest else '?'}connect_timeout={PATIENCE}"
    return f"{scheme}://{rest}"


def hidden(url: str) -> str:
    """A URL without its password."""
    return re.sub(r"(://[^/@:]*):.*@", r"\1:***@", url)


@contextlib.contextmanager
def speaking(url: str, doing: str) -> Iterator[None]:
    """While this lasts, Optuna's notes on new studies and experimental parts are not shown, and what a storage
    raises becomes one line.

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
        raise HagoError(f"storage {hidden(url)!r} needs a package: {error}{extra}") from None
    except Exception as error:  # whatever the storage's driver raises
        if not url:
            raise
        root = error.__cause__ or error.__context__ or error
        said = next(iter(str(root).strip().splitlines()), type(root).__name__)
        raise HagoError(
            f"cannot {doing} storage {hidden(url)!r}: {said}; a log of the search holds all that was evaluated"
        ) from None
    finally:
        logger.setLevel(level)


# ---------------------------------------------------------------- optuna search
# Optuna's samplers behind ask and tell: TPE, NSGA-II and a Gaussian process, in memory or on a storage.
# In memory a search is as reproducible as any other. On a storage (SQLite, PostgreSQL, a journal file) many machines
# may work on one study, and what one asks depends on the others; each needs a log of its own. One that is continued
# asks what its log holds again, the study is told what it does not know yet, and then goes on from the study as it
# is.

#: So many proposals in a row that were all seen before end the search.
_REPEATS: Final = 50
_CONSTRAINTS: Final = "hago_constraints"
#: Makes a sampler from (seed, startup, constraints).
Make = Callable[[int, int, Callable[[Any], Sequence[float]]], Any]


@dataclass(frozen=True, slots=True)
class OptunaOptions:
    """Options of all searchers that Optuna samples for.

    Args:
        trials: after how many it ends, the start included.
        startup: so many are drawn at random before the sampler's model is used; the population of
            NSGA-II.
        warm: so many points along the front that is expected are tried first.
        batch: how many points are asked at once, for evaluation side by side.
        storage: where the study is kept: sqlite:///FILE, postgresql://..., journal:FILE; empty for memory.
        study: its name there; empty for one made of the space.
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


def _searcher(name: str, make: Make, both: bool = False) -> Callable[..., Searcher]:
    def searcher(explored: EvaluationHistory, start: Bits, seed: int, options: OptunaOptions) -> Searcher:
        owner = _Study(name, make, both, explored.space, seed, options, explored.guide)
        # what a log says of the options is for all who may read it
        said = replace(options, storage=hidden(options.storage))
        known: list[Bits] = []
        steps = _steps(owner, explored, start, known)
        return _Shared(name, said, steps, known) if options.storage else GeneratorSearcher(name, said, steps)

    searcher.__doc__ = f"A searcher that asks `start`, points of the expected front, and then what {name} samples."
    return searcher


#: References: Bergstra et al., NeurIPS 2011 (TPE); Deb et al., IEEE Trans. Evol. Comp. 6, 2002 (NSGA-II);
#: Akiba et al., Optuna, KDD 2019.
tpe: Final = _searcher("tpe", _tpe)
nsga2: Final = _searcher("nsga2", _nsga2, both=True)
gp: Final = _searcher("gp", _gp)


class _Shared(GeneratorSearcher):
    """A search on a storage, which asks what an earlier session asked before anything else.

    Args:
        known: filled by `recall`, read by the steps.
    """

    def __init__(self, name: str, options: Any, steps: Steps[None], known: list[Bits]) -> None:
        super().__init__(name, options, steps)
        self._known = known

    def recall(self, points: Sequence[Bits]) -> None:
        """See `Recalls`."""
        self._known += points


@dataclass(slots=True)
class _Study:
    """What makes the study, once it is needed, and talks to it.

    Args:
        both: whether the cost is an objective of its own.
    """

    name: str
    make: Make
    both: bool
    space: Space
    seed: int
    options: OptunaOptions
    guide: Surrogate
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
            for shown, step in [shown_as(group.choices)]
        }
        seed = int(generator(self.seed, 0).integers(1 << 31))
        with speaking(self.options.storage, "open"):
            self.storage = open_storage(self.options.storage)
            self.study = optuna.create_study(
                storage=self.storage,
                sampler=self.make(seed, self.options.startup, lambda trial: trial.user_attrs[_CONSTRAINTS]),
                study_name=self.options.study or f"hago-{self.name}-{_digest(self.space)}",
                directions=["maximize", "minimize"] if self.both else ["maximize"],
                load_if_exists=bool(self.options.storage),
            )

    def propose(self) -> tuple[Any, dict[str, int]]:
        """A trial of the study, and its point."""
        with speaking(self.options.storage, "ask"):
            trial = self.study.ask(self.distributions)
        groups = self.space.groups
        return trial, {k: g.choices[shown_as(g.choices)[0].index(trial.params[k])] for k, g in groups.items()}

    def enqueue(self, bits: Bits) -> None:
        """Have a point proposed, unless it is to be or was scored. One that only was asked may have been lost."""
        import optuna

        states, shown = optuna.trial.TrialState, self._shown(bits)
        with speaking(self.options.storage, "write to"):
            known = self.study.get_trials(deepcopy=False, states=(states.WAITING, states.COMPLETE, states.FAIL))
            if not any({**t.system_attrs.get("fixed_params", {}), **t.params} == shown for t in known):
                self.study.enqueue_trial(shown)

    def tell(self, trial: Any, bits: Bits, score: Score) -> None:
        """The score of a trial of the study."""
        import optuna

        with speaking(self.options.storage, "write to"):
            trial.set_user_attr(_CONSTRAINTS, _excess(score))
            if _failed(score):
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                self.study.tell(trial, self._values(bits, score))

    def learn(self, points: Sequence[tuple[Bits, Score]]) -> None:
        """Points that were scored already: those that the study did not finish, e.g. as it could not be reached any
        more, are added to it."""
        import optuna

        states = optuna.trial.TrialState
        with speaking(self.options.storage, "write to"):
            ended = self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.FAIL))
            finished = {tuple(sorted(trial.params.items())) for trial in ended}
            for bits, score in points:
                shown = self._shown(bits)
                if tuple(sorted(shown.items())) not in finished:
                    told = (
                        {"state": states.FAIL}
                        if _failed(score)
                        else {"values": self._values(bits, score), "system_attrs": {"constraints": _excess(score)}}
                    )
                    made = optuna.trial.create_trial(params=shown, distributions=self.distributions, **told)
                    self.study.add_trial(made)

    def _shown(self, bits: Bits) -> dict[str, int]:
        """A point as the study says it."""
        return {k: shown_as(g.choices)[0][g.choices.index(bits[k])] for k, g in self.space.groups.items()}

    def _values(self, bits: Bits, score: Score) -> list[float]:
        return [score.value, self.guide.cost_of(bits, score)][: 1 + self.both]


def _excess(score: Score) -> list[float]:
    """By how much a point overflows, and misses limits."""
    return [float(sum(score.excess_bits.values()) or len(score.overflows)), min(score.shortfall, 1e30)]


def _failed(score: Score) -> bool:
    """Whether there is no value to tell."""
    return bool(score.infeasible) or not math.isfinite(score.value)


def shown_as(choices: Sequence[int]) -> tuple[Sequence[int], int]:
    """What a study calls each choice of a group, and the step between them: the bits themselves where they are
    evenly spaced, as they mostly are, else their place, the most bits last."""
    steps = {more - less for more, less in itertools.pairwise(choices)}
    if len(steps) <= 1:
        return choices, min(steps, default=1)
    return range(len(choices) - 1, -1, -1), 1


def _digest(space: Space) -> str:
    said = json.dumps([[g.key, list(shown_as(g.choices)[0]), list(g.choices)] for g in space.groups.values()])
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def _steps(owner: _Study, explored: EvaluationHistory, start: Bits, known: Sequence[Bits]) -> Steps[None]:
    """The search.

    Args:
        known: what an earlier session asked.
    """
    try:
        owner.open()
        first = (start, *_warm(explored, owner))
        if known:
            yield from explored.look_at_all(known, "read from the log")
            owner.learn(explored.scored)
        for bits in first:
            owner.enqueue(bits)
        yield from _asked(explored, start, owner)
    finally:
        close_storage(owner.storage)


def _asked(explored: EvaluationHistory, start: Bits, owner: _Study) -> Steps[None]:
    left, repeats = owner.options.trials - len(explored.scored), 0
    while left > 0 and repeats < _REPEATS:
        # the start alone first: a batch is of points that the sampler chose knowing it
        count = min(left, owner.options.batch) if explored.scored else 1
        trials = [owner.propose() for _ in range(count)]
        new = _unseen([bits for _, bits in trials], explored.seen)
        repeats = 0 if new else repeats + 1
        left -= len(new)
        why = "start" if list(new) == [point_key(start)] else owner.name
        yield from explored.look_at_all(list(new.values()), why)
        for trial, bits in trials:
            owner.tell(trial, bits, explored.seen[point_key(bits)])


def _unseen(points: Sequence[Bits], seen: ScoresByPoint) -> Mapping[str, Bits]:
    return {k: p for p in points if (k := point_key(p)) not in seen}


def _warm(explored: EvaluationHistory, owner: _Study) -> list[Mapping[str, int]]:
    """Points of the expected front: under a limit its best first, then evenly between its ends."""
    count = min(owner.options.warm, owner.options.trials - 1)
    if not count:
        return []
    program: Knapsack = explored.program()
    ends = program.range
    if ends is None:
        return []
    (least, most), limit = ends, owner.guide.limit
    most = most if limit is None else min(most, limit)
    limits = [most - (most - least) * i / max(1, count - 1) for i in range(count)]
    picked = (program.solve(x * (1 + 1e-9)) for x in limits)
    return [p.bits for p in picked if p is not None]
