"""Ready-made callbacks, in searches and in training; and callbacks of training."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from building import residual_block, seeded
from networks import Small, randomized

import hago
from hago.callbacks import EarlyStopping, OptunaStudy, TensorBoard, WeightsAndBiases
from hago.errors import HagoError
from hago.qat import RunningTraining, TrainingStep
from hago.search import SearchOptions, run_search
from hago.searchers import close_storage, open_storage, trial_outcome
from hago.study import Score

DATA = [(seeded(4, 3, 8, 8, seed=s), torch.arange(4) % 5) for s in range(2)]
PIXELS = [torch.randn(32, 1, 6, 6, generator=torch.Generator().manual_seed(3))]


def search(*callbacks: Any, searcher: str = "random:trials=6,batch=3") -> Any:
    options = SearchOptions.of(searcher, estimator="max_range", progress=False, callbacks=callbacks)
    return run_search(residual_block(), "x86_vnni", DATA, options)


def train(*callbacks: Any, **options: Any) -> Any:
    graph = hago.from_torch(randomized(Small()), (PIXELS[0],))
    strategy = hago.quantize(graph, "x86_vnni", PIXELS, fix_bits={"body:1": 4}, corrections="none").strategy
    given = {"steps": 6, "batch_size": 8, "progress": False, **options}
    return hago.finetune(graph, "x86_vnni", strategy, PIXELS, callbacks=callbacks, **given)


# ---------------------------------------------------------------- training
class Looking:
    """A callback of training that uses all that it is given, and draws random numbers."""

    def __init__(self) -> None:
        self.steps = list[TrainingStep]()

    def __call__(self, training: RunningTraining, step: TrainingStep) -> None:
        assert training.strategy.thresholds and math.isfinite(training.figures(step)["training/loss"])
        self.steps.append(step)
        torch.rand(2), torch.manual_seed(1)


def same(a: Any, b: Any) -> bool:
    one, other = a.quantizer.strategy, b.quantizer.strategy
    return one.model_hash == other.model_hash and one.thresholds == other.thresholds and a.after == b.after


def test_training_is_the_same_with_callbacks() -> None:
    looking = Looking()
    assert same(train(looking), train())
    assert [step.index for step in looking.steps] == list(range(6))
    assert looking.steps[0].rate < looking.steps[1].rate


def test_stop_ends_training_after_the_step() -> None:
    result = train(lambda training, step: training.stop() if step.index == 2 else None)
    assert result.steps == 3


def test_training_goes_on_from_the_step_of_which_a_callback_failed(tmp_path: Path) -> None:
    def fail(training: RunningTraining, step: TrainingStep) -> None:
        if step.index == 3:
            raise ZeroDivisionError

    path = tmp_path / "run.safetensors"
    with pytest.raises(ZeroDivisionError):
        train(fail, checkpoint=path)
    looking = Looking()
    resumed = train(looking, checkpoint=path)
    assert [step.index for step in looking.steps] == [4, 5] and same(resumed, train())


def test_what_is_no_callback_of_training_is_refused() -> None:
    with pytest.raises(HagoError, match=r"callbacks\[0\] is 3"):
        train(3)


# ---------------------------------------------------------------- ready-made ones
def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads, by name: steps and values."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_every_trial_and_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with TensorBoard(tmp_path / "search") as board:
        outcome = search(board)
    written = scalars(tmp_path / "search")
    trials = outcome.result.trials
    expected = [(t.index, t.results["sqnr"]) for t in trials]
    assert [n for n, _ in written["trial/sqnr"]] == [n for n, _ in expected]
    assert all(math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(written["trial/sqnr"], expected, strict=True))
    assert {"best/sqnr", "cost/weight_bytes", "search/forwards"} <= written.keys()
    with TensorBoard(tmp_path / "training") as board:
        train(board)
    assert [n for n, _ in scalars(tmp_path / "training")["training/loss"]] == list(range(6))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_says_where_it_cannot_write(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(HagoError, match="cannot write to the folder"):
        TensorBoard(tmp_path / "file")


def test_weights_and_biases_gets_every_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    began: list[dict[str, Any]] = []
    run = SimpleNamespace(log=lambda figures, step: logged.append((step, figures)), finish=lambda: began.append({}))
    module = SimpleNamespace(init=lambda **settings: began.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with WeightsAndBiases("chips", mode="offline") as board:
        outcome = search(board)
    assert began == [{"project": "chips", "mode": "offline"}, {}]
    assert [step for step, _ in logged] == [t.index for t in outcome.result.trials]
    assert all("trial/sqnr" in figures for _, figures in logged)


@pytest.mark.parametrize("kind, package", [(TensorBoard, "tensorboard"), (WeightsAndBiases, "wandb")])
def test_a_package_that_is_missing_is_one_clear_line(
    kind: Any, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(HagoError, match=rf"pip install 'hago\[{package}\]'") as error:
        kind(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["sqlite:///{}/study.db", "journal:{}/study.log"])
def test_a_study_of_optuna_has_every_trial_and_the_front(kind: str, tmp_path: Path) -> None:
    import optuna
    from optuna.artifacts import FileSystemArtifactStore, download_artifact, get_all_artifact_meta

    url, store = kind.format(tmp_path), FileSystemArtifactStore(tmp_path / "files")
    with OptunaStudy(url, "chips", tmp_path / "files") as kept:
        outcome = search(kept, searcher="random:trials=9,batch=3")
    storage = open_storage(url)
    study, trials = optuna.load_study(study_name="chips", storage=storage), outcome.result.trials
    assert [dict(t.bits) for t in trials] == [t.params for t in study.trials]
    assert study.metric_names == ["sqnr", "weight_bytes"]
    for ours, theirs in zip(trials, study.trials, strict=True):
        assert theirs.user_attrs["why"] == ours.why
        if theirs.state == optuna.trial.TrialState.COMPLETE:
            assert theirs.values == [ours.results["sqnr"], ours.score.costs["weight_bytes"]]
    assert {t.number for t in study.best_trials} >= {p.trial for p in outcome.front}
    names = {meta.filename: meta.artifact_id for meta in get_all_artifact_meta(study, storage=storage)}
    strategies = {f"strategy-of-trial-{p.trial}.json" for p in outcome.front}
    assert names.keys() == {f"front-after-{len(trials)}-trials.json"} | strategies
    for name in names:
        download_artifact(artifact_store=store, artifact_id=names[name], file_path=str(tmp_path / name))
    front = hago.load_front(tmp_path / f"front-after-{len(trials)}-trials.json")
    assert [p.trial for p in front] == [p.trial for p in outcome.front]
    best = outcome.front[-1]
    assert hago.Strategy.load(tmp_path / f"strategy-of-trial-{best.trial}.json") == best.strategy
    close_storage(storage)


def test_a_study_has_overflow_and_limits_as_constraints_and_the_steps_of_bits(tmp_path: Path) -> None:
    import optuna

    url, spaces = f"journal:{tmp_path}/study.log", list[Any]()
    with OptunaStudy(url, "chips") as kept:
        how = {"estimator": "max_range", "progress": False, "keep": "sqnr >= 25", "corrections": "none"}
        options = SearchOptions.of("random:trials=30", **how)
        callbacks = [kept, lambda running, trial: spaces.append(running.choices)]
        outcome = run_search(residual_block(), "int16_accumulator", DATA, options.changed(callbacks=callbacks))
    study = optuna.load_study(study_name="chips", storage=open_storage(url))
    scores, seen = [t.score for t in outcome.result.trials], list[list[float]]()
    for score, trial in zip(scores, study.trials, strict=True):
        if trial.state == optuna.trial.TrialState.COMPLETE:
            seen.append(trial.system_attrs["constraints"])
            assert seen[-1] == [sum(score.excess_bits.values()) or len(score.overflows), min(score.shortfall, 1e30)]
        for key, distribution in trial.distributions.items():
            allowed = range(distribution.low, distribution.high + 1, distribution.step)
            assert set(spaces[0][key]) <= set(allowed) and trial.params[key] in allowed
    assert any(overflow > 0 for overflow, _ in seen) and any(shortfall > 0 for _, shortfall in seen)


def test_a_score_that_is_not_finite_is_a_failed_trial_and_constraints_are_finite() -> None:
    failed = {"state": optuna_state("FAIL")}
    assert trial_outcome(Score(-math.inf), [1.0, 2.0]) == trial_outcome(Score(1.0), [1.0, math.nan]) == failed
    assert trial_outcome(Score(1.0, infeasible="no signature"), [1.0]) == failed
    outcome = trial_outcome(Score(1.0, overflows={"a": 3}, shortfall=math.inf), [1.0])
    assert outcome == {"values": [1.0], "system_attrs": {"constraints": [1.0, 1e30]}}


def optuna_state(name: str) -> Any:
    import optuna

    return optuna.trial.TrialState[name]


def test_a_study_goes_on_with_the_log_and_refuses_another_search(tmp_path: Path) -> None:
    import optuna

    url = f"sqlite:///{tmp_path}/study.db"
    given: dict[str, Any] = {"log": tmp_path / "log", "estimator": "max_range", "progress": False}

    def run(budget: int, *callbacks: Any) -> None:
        options = SearchOptions.of("random:trials=9,batch=3", budget=budget, callbacks=callbacks, **given)
        run_search(residual_block(), "x86_vnni", DATA, options)

    def trials() -> int:
        storage = open_storage(url)
        (name,) = optuna.get_all_study_names(storage)
        assert name.startswith("hago-x86_vnni-")
        count = len(optuna.load_study(study_name=name, storage=storage).trials)
        close_storage(storage)
        return count

    run(2)
    for budget in (4, 6):
        with OptunaStudy(url) as kept:
            run(budget, kept)
        assert trials() == budget
    with pytest.raises(HagoError, match="has trials of another search"), OptunaStudy(url) as kept:
        search(kept, searcher="greedy")
    assert trials() == 6
    with OptunaStudy(url, "another") as kept:
        search(kept, EarlyStopping(1), searcher="greedy")


def test_a_storage_that_cannot_be_reached_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(HagoError, match="cannot open storage") as error:
        OptunaStudy(f"sqlite:///{tmp_path}/none/study.db")
    assert "\n" not in str(error.value)


def test_early_stopping_ends_a_search_that_improves_no_more() -> None:
    trials = search(EarlyStopping(2), searcher="random:trials=60,batch=3").result.trials
    best = max(range(len(trials)), key=lambda i: (trials[i].score.rank, -i))
    assert len(trials) - 1 - best == 2 and len(trials) < 60


@pytest.mark.parametrize("name", ["EarlyStopping", "OptunaStudy"])
def test_a_callback_of_searches_refuses_training(name: str, tmp_path: Path) -> None:
    made = EarlyStopping(2) if name == "EarlyStopping" else OptunaStudy(f"journal:{tmp_path}/study.log")
    with pytest.raises(HagoError, match=rf"^{name} serves searches.*RunningTraining here.*pass it to the search"):
        train(made)


@pytest.mark.parametrize("patience", [0, 1.5, True])
def test_a_wrong_patience_is_refused(patience: Any) -> None:
    with pytest.raises(HagoError, match="patience"):
        EarlyStopping(patience)
