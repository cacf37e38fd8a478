"""make_searcher, the options of searchers, and budgets: accepted and refused arguments."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import TOY, make_space, run

from hago.errors import HagoError, InfeasibleBits
from hago.searchers.greedy import GreedyOptions
from hago.searchers.registry import SEARCHERS, make_searcher
from hago.study.budget import Budget
from hago.study.score import Score
from hago.study.searcher import Explains, point_key


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "greed"}, "unknown searcher 'greed'; known: default, gradient, random.* Did you mean 'greedy'"),
        ({"name": "greedy", "seed": -1}, "seed -1"),
        ({"name": "greedy", "seed": True}, "seed True"),
        ({"name": "greedy", "seed": 1.0}, "seed 1.0"),
        ({"name": "greedy", "options": {"tolerence": 1}}, "no option 'tolerence'.*Did you mean 'tolerance'"),
        ({"name": "default", "options": {"bits": 1}}, "no option 'bits'; it has none"),
        ({"name": "greedy", "options": {"max_passes": "two"}}, "'max_passes'.*got 'two', expected an int"),
        ({"name": "greedy", "options": {"max_passes": True}}, "got True, expected an integer"),
        ({"name": "greedy", "options": {"tolerance": None}}, "got None, expected a number"),
        ({"name": "greedy", "options": 5}, "got 5, expected GreedyOptions or a mapping"),
        ({"name": "annealing", "options": {"cooling": 1.0}}, "cooling 1.0"),
        ({"name": "annealing", "options": {"stop": 0}}, "temperature 0.5 to 0.0"),
        ({"name": "annealing", "options": {"step": 0}}, "step 0"),
        ({"name": "random", "options": {"trials": 0}}, "0 trials"),
        ({"name": "exhaustive", "options": {"batch": 0}}, "0 at once"),
        ({"name": "exhaustive", "options": {"limit": 47}}, "has 48 points, exhaustive .* at most 47"),
    ],
)
def test_invalid_arguments_of_make_searcher_are_refused(arguments, words: str) -> None:
    with pytest.raises(HagoError, match=words):
        make_searcher(space=TOY, **arguments)


def test_a_start_outside_the_space_is_refused() -> None:
    with pytest.raises(InfeasibleBits, match="no bits for edge 'conv:1'"):
        make_searcher("greedy", TOY, {"conv:0": 8})


def test_options_as_a_dataclass_or_a_mapping() -> None:
    a = make_searcher("greedy", TOY, options=GreedyOptions(tolerance=0.5))
    b = make_searcher("greedy", TOY, options={"tolerance": 0.5, "max_passes": 8.0})
    assert a.options == b.options == {"tolerance": 0.5, "max_passes": 8}
    assert type(b.options["max_passes"]) is int


@pytest.mark.parametrize("name", sorted(SEARCHERS))
def test_options_are_json_and_reasons_are_given(name: str) -> None:
    searcher = make_searcher(name, TOY)
    assert json.loads(json.dumps(searcher.options)) == searcher.options
    assert isinstance(searcher, Explains)
    assert searcher.name == name
    first = searcher.ask()
    assert first == searcher.ask()
    assert searcher.why


def test_the_default_start_is_the_widest() -> None:
    assert make_searcher("default", TOY).ask() == (TOY.widest(),)


def test_random_ends_where_everything_was_seen() -> None:
    space = make_space({"a:0": (8, 4), "b:0": (8, 4)})
    searcher = make_searcher("random", space, options={"batch": 3})
    asked = []
    while points := searcher.ask():
        for bits in points:
            asked.append(point_key(bits))
            searcher.tell(bits, Score(0.0))
    assert len(asked) == len(set(asked)) == 4


def test_random_covers_every_choice() -> None:
    seen = {(k, b) for t in run("random", options={"trials": 40}).trials for k, b in t.bits.items()}
    assert seen == {(k, b) for k, g in TOY.groups.items() for b in g.choices}


# ---------------------------------------------------------------- budget
@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (None, Budget()),
        (5, Budget(trials=5)),
        ("5", Budget(trials=5)),
        ("200 trials", Budget(trials=200)),
        ("1 trial", Budget(trials=1)),
        ("50 forwards", Budget(forwards=50.0)),
        ("0.5 forward", Budget(forwards=0.5)),
        ("10m", Budget(seconds=600.0)),
        ("10 min", Budget(seconds=600.0)),
        ("1h 30min, 3 trials", Budget(3, 5400.0)),
        ("1h30m", Budget(seconds=5400.0)),
        ("1h 30 m", Budget(seconds=5400.0)),
        ("2d", Budget(seconds=172800.0)),
        ("1.5s", Budget(seconds=1.5)),
        ("200 trials, 10m, 7 forwards", Budget(200, 600.0, 7.0)),
        (Budget(trials=3), Budget(trials=3)),
    ],
)
def test_budgets(text, budget: Budget) -> None:
    assert Budget.parse(text) == budget


@pytest.mark.parametrize(
    "text",
    [
        *(0, -1, 1.5, True),
        *("0 trials", "0s", "", "ten", "5 tries", "1.5 trials", "5m, 6m", "5 trials, 6", "-5", "inf"),
        "9" * 400 + " forwards",
    ],
)
def test_budgets_that_are_refused(text) -> None:
    with pytest.raises(HagoError, match="budget"):
        Budget.parse(text)


@pytest.mark.parametrize("text", ["1 hour", "5 tries", "10 trials 5m"])
def test_every_form_of_a_budget_that_a_refusal_names_is_taken(text: str) -> None:
    with pytest.raises(HagoError) as caught:
        Budget.parse(text)
    got, *forms = re.findall("'([^']*)'", str(caught.value))
    units = re.search(r"a time in ([^']*), as in", str(caught.value))
    assert got == text and len(forms) == 5 and units is not None
    for form in (*forms, ", ".join(forms[1:3]), *(f"2 {unit}" for unit in units[1].split(", "))):
        assert Budget.parse(form) != Budget()


@given(st.text(max_size=12) | st.from_regex(r"[0-9. ]{0,6}[smhdtrialsforwards,]{0,8}"))
def test_any_text_is_a_budget_or_refused(text: str) -> None:
    try:
        budget = Budget.parse(text)
    except HagoError:
        return
    assert any(x is not None for x in (budget.trials, budget.seconds, budget.forwards))


@pytest.mark.parametrize(
    ("spent", "reason"),
    [((4, 9.0, 4.0), None), ((5, 0, 0), "trials"), ((0, 10.0, 0), "seconds"), ((0, 0, 4.5), "forwards")],
)
def test_a_limit_is_spent_when_it_is_reached(spent, reason) -> None:
    assert Budget(5, 10.0, 4.5).spent(*spent) == reason
