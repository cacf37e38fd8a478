"""Fixtures of the tests of the log."""

from __future__ import annotations

import pytest
from toys import run, without_relu


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A finished log with repeats; its clock is constant, so that its length is the same each time."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    run("exhaustive", path, plan_key=without_relu, budget=10, clock=lambda: 0.0)
    return path.read_bytes()
