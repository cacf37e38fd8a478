"""The front: the trials that no other beats, in whatever order trials are added."""

from __future__ import annotations

import random
from dataclasses import replace

from hago.study.log import Trial
from hago.study.score import Score
from hago.study.trial_front import TrialFront


def trial(index: int, value: float, cost: float, **changes: object) -> Trial:
    score = Score(value, {"sqnr": value}, costs={"cycles": cost})
    return Trial(index, {"a:0": index}, replace(score, **changes))


def brute(trials: list[Trial]) -> set[tuple[float, float]]:
    pairs = {(t.results["sqnr"], t.score.costs["cycles"]) for t in trials if t.score.accepted}
    return {(v, c) for v, c in pairs if not any((w >= v and d <= c) and (w, d) != (v, c) for w, d in pairs)}


def test_the_front_is_that_of_all_trials() -> None:
    for seed in range(50):
        draw, front, seen = random.Random(seed), TrialFront("sqnr", "cycles"), []
        for i in range(30):
            refused = {"overflows": {"n": 1} if draw.random() < 0.2 else {}, "shortfall": draw.choice([0, 0, 1])}
            seen.append(trial(i, draw.randrange(8), draw.randrange(8), **refused))
            before = [t.index for t in front.trials]
            assert front.add(seen[-1]) == ([t.index for t in front.trials] != before)
            found = [(front.value_of(t), front.cost_of(t)) for t in front.trials]
            assert set(found) == brute(seen) and found == sorted(found) and len(front) == len(found)


def test_the_first_of_equals_stays_and_repeats_do_not_count() -> None:
    front = TrialFront("sqnr", "cycles")
    assert front.add(trial(0, 1.0, 1.0)) and not front.add(trial(1, 1.0, 1.0))
    assert not front.add(replace(trial(2, 9.0, 0.0), same_as=0))
    assert [t.index for t in front.trials] == [0]


def test_a_trial_without_the_figures_is_left_out() -> None:
    front = TrialFront("kl", "cycles")
    assert not front.add(trial(0, 1.0, 1.0)) and not TrialFront("sqnr", "energy").add(trial(0, 1.0, 1.0))
