"""Tests with the mark `some_cases` run a part of their cases, the same in every run, unless they are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import conftest
import products
import pytest


class Item:
    """A collected test, as far as the rule asks it."""

    def __init__(self, nodeid: str, most: int | None) -> None:
        self.nodeid, self.most = nodeid, most

    def get_closest_marker(self, name: str) -> Any:
        assert name == "some_cases"
        return None if self.most is None else SimpleNamespace(args=(self.most,))


def left(patch: pytest.MonkeyPatch, *, whole: bool = False, keyword: str = "", args: Any = ("tests",)) -> list[str]:
    """The names of the cases that a run takes."""
    patch.setitem(products.asked, "whole", whole)
    items: Any = [Item(f"tests/a.py::test_many[{n}]", 3) for n in range(10)]
    items += [Item(f"tests/a.py::test_all[{n}]", None) for n in range(4)]
    gone: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    config: Any = SimpleNamespace(option=SimpleNamespace(keyword=keyword), args=list(args), hook=hook)
    total = len(items)
    conftest.pytest_collection_modifyitems(config, items)
    assert len(items) + len(gone) == total
    return [item.nodeid for item in items]


def test_some_cases_are_run_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = left(monkeypatch), left(monkeypatch)
    assert first == again and sum("test_many" in name for name in first) == 3
    assert sum("test_all" in name for name in first) == 4


@pytest.mark.parametrize("asked", [{"whole": True}, {"keyword": "many"}, {"args": ("tests/a.py::test_many",)}])
def test_all_are_run_if_they_are_asked_for(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(left(monkeypatch, **asked)) == 14
