"""docs/log-format.md agrees with the code."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

from toys import SCHEMAS

from hago.plan.strategy import Strategy
from hago.serialization.json_text import canonical
from hago.study import budget
from hago.study.log import best_trial, parse_log

TEXT = (Path(__file__).parents[2] / "docs" / "log-format.md").read_text("utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found
    return found[1]


def test_the_log_on_the_page_is_valid() -> None:
    shown = block("jsonl")
    log = parse_log(shown.encode(), "shown")
    assert log.header is not None
    assert log.torn_bytes == 0
    best = best_trial(log.trials)
    assert best is not None
    assert best.index == 1
    for line in shown.splitlines():
        assert line == canonical(json.loads(line))


def test_the_strategy_on_the_page_is_valid() -> None:
    shown = block("json")
    assert canonical(Strategy.from_json(json.loads(shown)).to_json()) + "\n" == shown


def test_every_field_is_described() -> None:
    for name in ("log_header", "trial", "strategy"):
        schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
        names = {k for k in schema["properties"] if k not in ("score", "$schema")}
        if name == "trial":
            names |= {f"score.{k}" for k in schema["properties"]["score"]["properties"]}
            names |= {f"strategy.{k}" for k in schema["properties"]["strategy"]["properties"]}
            names -= {"version", "strategy"}
        for field in names:
            assert f"`{field}`" in TEXT, field


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(budget).attempted == 1
    assert doctest.testmod(budget).failed == 0
