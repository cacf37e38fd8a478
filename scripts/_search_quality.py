"""The quality of Pareto search: its front of weight bytes and SQNR, compared with those of simple baselines.

Every search has the same calibration samples and the same space. The front of each on these samples is measured on
held-out samples, and the fronts are compared there. Random search and TPE have ten times as many evaluations as Pareto
search, including its pass for gradients.

Pareto search refines thresholds; the baselines have those of the estimator. In a second table some baselines are given
the refined thresholds, so that only the choice of points differs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from _assets import Asset, load
from _fronts import Point, Row, compared, listed, plot

from hago.data import Batches
from hago.plan import Bits, Space
from hago.search import Evaluator, GoalOptions, Prepared, SearchOptions, prepare, run_search
from hago.search.choice_refinement import refine_every_choice
from hago.search.goal import make_goal
from hago.search.gradients import GRADIENT_FORWARDS
from hago.search.objective import OBJECTIVES
from hago.search.proposed_thresholds import RefinementTask
from hago.search.redundancy import prune_redundant_choices
from hago.search.safe_bits import widest_safe_bits
from hago.search.scoring import GoalScorer
from hago.study import Ask, GeneratorSearcher, Score, Searcher, Steps, Trial, TrialFront, point_key, run_study, shifted

#: Tolerances of the plain greedy search, in dB.
TOLERANCES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
UNIFORM = (8, 6, 4)
#: Random search and TPE have this many times the evaluations of Pareto search.
MORE = 10
#: The searches that Pareto search is compared with, and those of them that are also run with its thresholds.
BASELINES = ("uniform", "greedy", "rfc_greedy", "random", "tpe", "descent")
REFINED = ("tpe", "descent")
#: A limit that nothing exceeds.
NO_LIMIT = "weight_bytes <= 1e15"
Make = Callable[[Space, Bits, int], Searcher]


# ---------------------------------------------------------------- baselines
@dataclass(frozen=True, slots=True)
class Nothing:
    """The options of a searcher that has none."""


def uniform(prepared: Prepared) -> list[Bits]:
    """The points with at most 8, 6 or 4 bits for all groups, or for weights alone."""
    space = prepared.space
    weights = {k for k, g in space.groups.items() if prepared.graph[g.source].op == "const"}
    points: list[Bits] = []
    for most in UNIFORM:
        for keys in (set(space.groups), weights):
            points.append({k: at_most(g.choices, most) if k in keys else g.choices[0] for k, g in space.groups.items()})
    return points


def at_most(choices: Sequence[int], most: int) -> int:
    """The largest choice of at most `most` bits, or the smallest choice if there is none."""
    return max((b for b in choices if b <= most), default=min(choices))


def listed_points(points: Sequence[Bits]) -> Make:
    """A searcher that asks for the start and then for these points."""

    def steps(start: Bits) -> Steps[None]:
        seen = set()
        for point in (start, *points):
            if point_key(point) not in seen:
                seen.add(point_key(point))
                yield Ask((dict(point),), "listed")

    return lambda space, start, seed: GeneratorSearcher("listed", Nothing(), steps(start))


def descent(space: Space, start: Bits, seed: int) -> Searcher:
    """Steepest descent: lower the weight by one choice that adds the least squared error per saved byte, and repeat
    until all weights have their fewest bits."""
    return GeneratorSearcher("descent", Nothing(), _descent(space, start))


def _descent(space: Space, start: Bits) -> Steps[None]:
    here = dict(start)
    (score,) = yield Ask((here,), "start")
    while True:
        near = [p for k in space.groups if (p := shifted(space, here, k, 1)) != here]
        scores = yield Ask(tuple(near), "every group one choice lower") if near else Ask((here,), "end")
        lower = [(p, s) for p, s in zip(near, scores, strict=False) if _bytes(s) < _bytes(score)]
        if not lower:
            return

        def price(pair: tuple[Bits, Score], now: Score = score) -> float:
            return (_noise(pair[1]) - _noise(now)) / (_bytes(now) - _bytes(pair[1]))

        chosen, score = min(lower, key=price)
        here = dict(chosen)


def _bytes(score: Score) -> float:
    return score.costs["weight_bytes"]


def _noise(score: Score) -> float:
    return float(10.0 ** (-float(score.results["sqnr"]) / 10))


def tpe(trials: int) -> Make:
    """Optuna's TPE for two objectives, which knows only the start and its own trials."""

    def steps(space: Space, start: Bits, seed: int) -> Steps[None]:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=seed)
        study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
        groups = space.groups
        study.enqueue_trial({k: g.choices.index(start[k]) for k, g in groups.items()})
        sizes = {k: optuna.distributions.IntDistribution(0, len(g.choices) - 1) for k, g in groups.items()}
        for _ in range(trials):
            trial = study.ask(sizes)
            (score,) = yield Ask(({k: g.choices[trial.params[k]] for k, g in groups.items()},), "tpe")
            study.tell(trial, [float(score.results.get("sqnr", -200.0)), score.costs.get("weight_bytes", 1e12)])

    return lambda space, start, seed: GeneratorSearcher("tpe", Nothing(), steps(space, start, seed))


# ---------------------------------------------------------------- what is measured
@dataclass
class Contest:
    """The searches of one network on one hardware, and their points on held-out samples."""

    asset: Asset
    hardware: str
    seed: int
    prepared: Prepared
    held_out: Evaluator
    refined: Prepared
    seconds: dict[str, float] = field(default_factory=dict)
    trials: dict[str, int] = field(default_factory=dict)
    fronts: dict[str, list[Point]] = field(default_factory=dict)
    measured: dict[str, Point] = field(default_factory=dict)

    def run(self, name: str, searchers: Sequence[str | Make], given: bool = False) -> None:
        """Search, keep the front of all trials, and measure it.

        Args:
            given: whether a baseline is given the refined thresholds.
        """
        begun = time.perf_counter()
        kept = TrialFront("sqnr", "weight_bytes")
        self.trials[name] = 0
        for searcher in searchers:
            for trial in self._given(searcher) if given else self._searched(searcher):
                self.trials[name] += trial.same_as is None
                kept.add(trial)
        self.seconds[name] = time.perf_counter() - begun
        prepared = self.refined if given or "pareto" in searchers else self.prepared
        self.fronts[name] = [self.point(t, prepared) for t in kept.trials]

    def _searched(self, searcher: str | Make) -> Iterator[Trial]:
        # with a limit on the cost that nothing exceeds, every searcher has the same space
        limit = None if searcher == "pareto" else NO_LIMIT
        how = SearchOptions.of(searcher=searcher, progress=False, seed=self.seed, budget_cost=limit)
        yield from run_search(self.asset.module, self.hardware, self.asset.calibration, how).result.trials

    def _given(self, searcher: str | Make) -> Sequence[Trial]:
        """The trials of a search on refined thresholds."""
        resolver, space = self.refined.resolver, self.refined.space
        start = widest_safe_bits(resolver, self.refined.calibration.peaks)
        assert callable(searcher)
        scored = GoalScorer(make_goal(GoalOptions("sqnr", budget_cost=NO_LIMIT)), self.refined)
        return run_study(space, searcher(space, start, self.seed), scored, plan_key=lambda b: resolver(b).key).trials

    def point(self, trial: Trial, prepared: Prepared) -> Point:
        """A trial on held-out samples."""
        plan = prepared.resolver(trial.bits)
        if plan.key not in self.measured:
            found = self.held_out.measure(plan).contributions
            signal, noise = found["sqnr"].T
            right = found["accuracy"][:, 0] if "accuracy" in found else None
            self.measured[plan.key] = Point(0.0, signal, noise, right)
        cost = trial.score.costs["weight_bytes"]
        return replace(self.measured[plan.key], cost=cost, label=f"trial {trial.index}")


def contest(assets: str, net: str, hardware: str, options: Any) -> Contest:
    """Prepare the searches of a network on a hardware."""
    asset = load(assets, net, options.images, options.held_out)
    prepared = prune_redundant_choices(prepare(asset.module, hardware, asset.calibration), ("weight_bytes",))
    rows: Any = asset.test
    if asset.labels is not None:
        labels = asset.labels.split([len(b[0]) for b in asset.test])
        rows = [(*inputs, y) for inputs, y in zip(asset.test, labels, strict=True)]
    batches = Batches(rows, prepared.graph.inputs)
    held_out = Evaluator(prepared.graph, batches, OBJECTIVES["sqnr"], prepared.hardware.known_ops, cache_bytes=0)
    goal = make_goal(GoalOptions("sqnr"))
    evaluator = Evaluator(prepared.graph, prepared.batches, goal.objective, prepared.hardware.known_ops)
    refined = refine_every_choice(RefinementTask.of(prepared, goal, "weight_bytes", evaluator, options.seed)).prepared
    return Contest(asset, hardware, options.seed, prepared, held_out, refined)


def quality(options: Any) -> list[Row]:
    """Fronts of Pareto search and of every baseline."""
    if not options.assets:
        print("quality needs --assets")
        return []
    rows: list[Row] = []
    for net in options.nets or ("mlperf_resnet8", "cifar_resnet20"):
        for hardware in options.hardware[:1]:
            found = contest(options.assets, net, hardware, options)
            rows += _measured(found, net, options)
    return rows


def searchers(found: Contest) -> dict[str, list[str | Make]]:
    """Of every baseline."""
    more = math.ceil(MORE * (found.trials["pareto"] + GRADIENT_FORWARDS))
    return {
        "uniform": [listed_points(uniform(found.prepared))],
        "greedy": [f"greedy:tolerance={t:g}" for t in TOLERANCES],
        "rfc_greedy": ["rfc_greedy"],
        "random": [f"random:trials={more}"],
        "tpe": [tpe(more)],
        "descent": [descent],
    }


def _measured(found: Contest, net: str, options: Any) -> list[Row]:
    found.run("pareto", ["pareto"])
    baselines = searchers(found)
    names = options.baselines.split(",")
    for name, given in [*((n, False) for n in names), *((n, True) for n in REFINED if n in names)]:
        called = f"{name}, refined" if given else name
        found.run(called, baselines[name], given)
        print(f"  {called}: {found.trials[called]} trials in {found.seconds[called]:.1f} s", flush=True)
    samples = found.held_out.batches.samples
    print(f"{net} on {found.hardware}: {options.images} images to search on, {samples} held out")
    where = {"network": net, "hardware": found.hardware, "samples": samples}
    plain = {name: found.fronts[name] for name in ("pareto", *names)}
    given_too = {name: line for name, line in found.fronts.items() if name == "pareto" or name not in names}
    rows = [where | row for row in _table(found, plain, "the baselines with the estimator's thresholds")]
    if len(given_too) > 1:
        rows += [where | row for row in _table(found, given_too, "with the refined thresholds of pareto")[1:]]
    if options.out:
        path = Path(options.out) / f"fronts_{net}_{found.hardware}.png"
        print("  " + plot(found.fronts, path, f"{net}, {found.hardware}"))
    rows[0]["fronts"] = listed(found.fronts)
    for row in listed(found.fronts):
        low, high = row["interval"]
        top1 = "" if row["top1"] is None else f", top-1 {row['top1']:.4f}"
        print(f"    {row['front']:16} {row['bytes']:10.0f} B {row['sqnr']:7.2f} dB [{low:.2f}, {high:.2f}]{top1}")
    return rows


def _table(found: Contest, fronts: Mapping[str, Sequence[Point]], title: str) -> list[Row]:
    """Fronts beside that of Pareto search, printed."""
    print(f"  {title}:")
    rows = []
    for row in compared(fronts, "pareto"):
        name = row["front"]
        rows.append(row | {"trials": found.trials[name], "seconds": found.seconds[name]})
        print(
            f"  {name:16} {row['points']:3} points of {found.trials[name]:5} trials, {found.seconds[name]:7.1f} s; "
            f"hypervolume {row['hypervolume']:.4f} of pareto's; above it: {row['above']} (top-1: {row['top1_above']})",
            flush=True,
        )
        for said in row["above_said"]:
            print(f"      {said}")
    return rows
