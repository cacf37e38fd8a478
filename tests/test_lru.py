"""LRU: it is bounded, and the least recently used value is evicted first."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from hago.caching import LRU


def test_the_least_recently_used_value_is_evicted() -> None:
    memory: LRU[str, int] = LRU(2)
    memory.put("a", 1)
    memory.put("b", 2)
    assert memory.get("a") == 1
    memory.put("c", 3)
    assert (memory.get("a"), memory.get("b"), memory.get("c")) == (1, None, 3)


def test_a_value_is_made_once_until_it_is_evicted() -> None:
    memory: LRU[str, int] = LRU(2)
    made: list[str] = []
    for key in ("a", "b", "a", "c", "b"):
        assert memory.get_or_make(key, lambda key=key: made.append(key) or ord(key)) == ord(key)  # type: ignore[misc]
    assert made == ["a", "b", "c", "b"]


def test_the_latest_value_is_kept_however_large() -> None:
    memory: LRU[str, str] = LRU(3, len)
    memory.put("small", "ab")
    memory.put("large", "abcdef")
    assert memory.get("small") is None and memory.get("large") == "abcdef" and len(memory) == 1


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 6)), max_size=40))
def test_against_a_model(capacity: int, steps: list[tuple[bool, int, int]]) -> None:
    memory: LRU[int, int] = LRU(capacity, lambda value: value)
    model: OrderedDict[int, int] = OrderedDict()
    for is_put, key, size in steps:
        if is_put:
            memory.put(key, size)
            model.pop(key, None)
            model[key] = size
            while sum(model.values()) > capacity and len(model) > 1:
                model.popitem(last=False)
        else:
            assert memory.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        assert memory.used == sum(model.values()) and len(memory) == len(model)
