"""Greedy search: the descent of the RFC, repeated passes, raises of bits, and the tolerance."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from toys import TOY, Counting, make_space, run, timeless

from hago.errors import HagoError
from hago.plan.space import Bits, Space
from hago.searchers.greedy import _Incumbent
from hago.study.score import Score

#: 24 groups in blocks of four: two operands of a convolution, an add on a 16-bit register, and a relu
#: whose bits do nothing.
BLOCKS = make_space(
    {
        f"{op}{i}:{slot}": tuple(range(widest, 3, -1))
        for i in range(6)
        for op, slot, widest in (("conv", 0, 8), ("conv", 1, 8), ("add", 0, 16), ("relu", 0, 16))
    }
)
INERT = frozenset(key for key in BLOCKS.groups if key.startswith("relu"))


def table(bits: Bits) -> float:
    """A made-up accuracy in steps of 1/128: every group has a liking of its own for fewer bits, up to
    a point; some pairs of neighbours get in each other's way."""
    right = 79
    live = [key for key in BLOCKS.groups if key not in INERT]
    for key in live:
        width, most = bits[key], BLOCKS.groups[key].choices[0]
        turn = most - hashlib.sha256(key.encode()).digest()[0] % 4
        right += (most - width) // 2 if width >= turn else (most - turn) // 2 - 3 * (turn - width)
    for a, b in itertools.pairwise(live):
        right -= (bits[a] + bits[b]) % 7 == 0
    return max(0, min(128, right)) / 128


def accuracy(bits: Bits) -> Score:
    return Score(table(bits), {"sim_acc": table(bits)}, total_bits=sum(bits.values()))


def rfc_greedy(space: Space) -> tuple[list[dict[str, int]], dict[str, int]]:
    """The RFC's greedy searcher, literally and with its repeats: the trials in order, and the point that it decided
    for.

    A trial is what is decided, one choice for the next group, and the widest choice for the rest.
    The best of all trials so far, by accuracy and then fewer bits, decides a group as soon as a trial
    falls short of the best accuracy or the choices run out.
    """
    keys = list(space.groups)
    trials: list[dict[str, int]] = []
    decided: list[int] = []
    best: tuple[float, int] | None = None
    best_bits: list[int] = []
    while len(decided) < len(keys):
        for choice in space.groups[keys[len(decided)]].choices:
            rest = [space.groups[k].choices[0] for k in keys[len(decided) + 1 :]]
            point = [*decided, choice, *rest]
            trials.append(dict(zip(keys, point, strict=True)))
            measure = (table(trials[-1]), -sum(point))
            worse = best is not None and measure[0] < best[0]
            if best is None or measure > best:
                best, best_bits = measure, point
            if worse:
                break
        decided.append(best_bits[len(decided)])
    return trials, dict(zip(keys, decided, strict=True))


def test_one_pass_is_the_descent_of_the_rfc_less_its_repeats() -> None:
    trials, decided = rfc_greedy(BLOCKS)
    unique = [t for i, t in enumerate(trials) if t not in trials[:i]]
    result = run("greedy", space=BLOCKS, evaluate=accuracy, options={"max_passes": 1})
    assert [t.bits for t in result.trials] == unique
    assert result.bits == decided
    # the figures of this table, so that a change of both implementations is noticed
    assert (len(trials), len(unique)) == GOLDEN["trials"]
    assert (sum(BLOCKS.widest().values()), sum(decided.values())) == GOLDEN["bits"]
    assert (table(BLOCKS.widest()) * 128, table(decided) * 128) == GOLDEN["right of 128"]


def test_equal_plans_save_the_trials_of_inert_groups() -> None:
    def plan_key(bits: Bits) -> str:
        return str(sorted((k, b) for k, b in bits.items() if k not in INERT))

    plain = run("greedy", space=BLOCKS, evaluate=accuracy, options={"max_passes": 1})
    counting = Counting(accuracy)
    masked = run("greedy", space=BLOCKS, evaluate=counting, options={"max_passes": 1}, plan_key=plan_key)
    assert len(counting.calls) == GOLDEN["masked"]
    assert {k: b for k, b in masked.bits.items() if k not in INERT} == {
        k: b for k, b in plain.bits.items() if k not in INERT
    }
    # equal Plans have equal scores, so lowering the bits of an inert group gains nothing
    live = Space({k: g for k, g in BLOCKS.groups.items() if k not in INERT})

    def without(bits: Bits) -> Score:
        return accuracy({**bits, **dict.fromkeys(INERT, 16)})

    unmasked = run("greedy", space=live, evaluate=without, options={"max_passes": 1})
    assert len(unmasked.trials) == GOLDEN["masked"]


GOLDEN: Mapping[str, object] = {
    "trials": (129, 106),
    "bits": (288, 201),
    "right of 128": (79, 82),
    "masked": 34,
}


def test_passes_are_repeated_until_nothing_changes() -> None:
    one = run("greedy", space=BLOCKS, evaluate=accuracy, options={"max_passes": 1})
    more = run("greedy", space=BLOCKS, evaluate=accuracy)
    assert more.score.rank >= one.score.rank
    assert more.stopped_because == "finished"
    for key, group in BLOCKS.groups.items():
        index = group.choices.index(more.bits[key])
        for near in (index - 1, index + 1):
            if 0 <= near < len(group.choices):
                neighbour = accuracy({**more.bits, key: group.choices[near]})
                assert neighbour.rank <= more.score.rank, key


def test_a_later_pass_makes_steps_that_an_earlier_one_made_worthwhile() -> None:
    space = make_space({"a:0": (8, 7, 6, 5), "b:0": (8, 7, 6, 5)})

    def evaluate(bits: Bits) -> Score:
        helped = bits["b:0"] <= 6
        value = 20 * abs(bits["b:0"] - 6) + (bits["a:0"] if helped else -bits["a:0"])
        return Score(-float(value), total_bits=sum(bits.values()))

    start = {"a:0": 7, "b:0": 8}
    once = run("greedy", space=space, evaluate=evaluate, options={"max_passes": 1}, start=start)
    assert once.bits == {"a:0": 8, "b:0": 6}
    more = run("greedy", space=space, evaluate=evaluate, start=start)
    assert more.bits == {"a:0": 5, "b:0": 6}
    assert any(t.why.startswith("pass 2") for t in more.trials)


def test_bits_are_raised_from_a_narrow_start() -> None:
    start = TOY.narrowest()
    result = run("greedy", start=start)
    assert result.bits == {"conv:0": 6, "conv:1": 6, "relu:0": 4, "add:1": 12}
    assert any("5 to 6 bits" in t.why for t in result.trials)


def test_why_names_the_pass_the_group_and_the_step() -> None:
    whys = [t.why for t in run("greedy").trials]
    assert whys[:2] == ["start", "pass 1: conv:0 8 to 7 bits"]


@pytest.mark.parametrize(("tolerance", "bits"), [(0.0, 12), (0.05, 11), (0.3, 10), (5.0, 4)])
def test_tolerance_trades_value_for_bits(tolerance: float, bits: int) -> None:
    space = make_space({"a:0": tuple(range(16, 3, -1))})
    values = {16: 1.0, 15: 1.0, 14: 1.0, 13: 1.0, 12: 1.0, 11: 0.96, 10: 0.75}

    def evaluate(point: Bits) -> Score:
        return Score(values.get(point["a:0"], -1.0), total_bits=sum(point.values()))

    result = run("greedy", space=space, evaluate=evaluate, options={"tolerance": tolerance})
    assert result.bits == {"a:0": bits}


def test_losses_within_the_tolerance_do_not_add_up() -> None:
    space = make_space({f"g{i}:0": (8, 7, 6, 5, 4) for i in range(5)})

    def evaluate(point: Bits) -> Score:
        lost = sum(8 - b for b in point.values())
        return Score(-0.1 * lost, total_bits=sum(point.values()))

    result = run("greedy", space=space, evaluate=evaluate, options={"tolerance": 0.35})
    assert result.score.value == pytest.approx(-0.3)


def test_ties_go_to_fewer_bits_and_never_back() -> None:
    """Also if the evaluation does not count bits."""
    result = run("greedy", evaluate=lambda bits: Score(0.0))
    points = [t.bits for t in result.trials]
    descent = sum(len(g.choices) - 1 for g in TOY.groups.values())
    assert points[descent] == TOY.narrowest()
    # The second pass finds that more bits are not better, one group at a time.
    for bits in points[descent + 1 :]:
        assert sum(bits[key] != b for key, b in TOY.narrowest().items()) == 1


def test_values_decide_while_every_point_overflows() -> None:
    def overflowing(value: float, bits: int) -> Score:
        return Score(value, overflows={"a": 1}, excess_bits={"a": 1}, total_bits=bits)

    incumbent = _Incumbent({}, overflowing(0.0, 10), tolerance=0.0)
    assert not incumbent.offer({}, overflowing(-1.0, 9), fewer_bits=True)
    assert incumbent.offer({}, overflowing(0.0, 9), fewer_bits=True)
    assert incumbent.offer({}, overflowing(1.0, 11), fewer_bits=False)
    assert incumbent.offer({}, Score(-9.0), fewer_bits=False)


def test_another_start_cannot_continue_the_log(tmp_path: Path) -> None:
    run("greedy", tmp_path / "a")
    run("greedy", tmp_path / "b", start=TOY.narrowest())
    assert timeless((tmp_path / "a").read_bytes())[1:] != timeless((tmp_path / "b").read_bytes())[1:]


@pytest.mark.parametrize(
    ("option", "value"),
    [*(("tolerance", bad) for bad in (-1, math.nan, math.inf)), ("max_passes", 0), ("max_passes", 1.5)],
)
def test_greedy_options_are_checked(option: str, value: float) -> None:
    with pytest.raises(HagoError, match=f"greedy.*{option}|{option}.*greedy"):
        run("greedy", options={option: value})
