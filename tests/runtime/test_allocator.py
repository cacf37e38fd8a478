"""The allocator's setting is changed on request only, and its absence is no error."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from hago.runtime.native import allocator


class Setting:
    """A mallopt that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def __call__(self, name: int, value: int) -> int:
        self.told.append((name, value))
        return 1


def test_keep_freed_memory_sets_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=setting))
    assert allocator.keep_freed_memory()
    assert setting.told == [(-4, 0), (-1, 2**31 - 1)]


@pytest.mark.parametrize("variable", allocator.VARIABLES)
def test_what_the_user_sets_is_left(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=setting))
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert allocator.keep_freed_memory(unless_set=True) and setting.told
    setting.told.clear()
    monkeypatch.setenv(variable, "1")
    assert not allocator.keep_freed_memory(unless_set=True) and not setting.told
    assert allocator.keep_freed_memory() and setting.told


def test_other_c_libraries_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not allocator.keep_freed_memory()
