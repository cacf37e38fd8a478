"""The value cache: admission, eviction, and values that come back unchanged."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hago.simulation.free_memory import free_bytes
from hago.simulation.value_cache import StepDigests, ValueCache, pack_value

KB = 1 << 10


def digest(name: str) -> bytes:
    return name.encode()


def block(kilobytes: int = 1) -> torch.Tensor:
    return torch.zeros(kilobytes * KB // 4)


def chain(*names: str) -> list[StepDigests]:
    """Steps that each read what the one before made."""
    made = [*map(digest, names)]
    return [StepDigests((one,), tuple(made[max(0, i - 1) : i])) for i, one in enumerate(made)]


def parts(*names: str) -> list[StepDigests]:
    """Steps without inputs, and one that reads all that they made, and was never seen before."""
    made = tuple(map(digest, names))
    return [*(StepDigests((one,), ()) for one in made), StepDigests((os.urandom(8),), made)]


def turn(cache: ValueCache, *names: str, times: int = 1) -> None:
    """A turn in which so many blocks are made, and read by something new."""
    for _ in range(times):
        cache.begin(parts(*names))
        for name in names:
            cache.put((digest(name), 0), block())


def held(cache: ValueCache, *names: str) -> set[str]:
    """Which of `names` the cache has; looks without touching."""
    return {n for n in names if (digest(n), 0) in cache._entries}


# ---------------------------------------------------------------- what comes back
@given(
    st.sampled_from([(-128, 127), (0, 255), (-200, 100), (0, 1), (-(2**15), 2**15 - 1), (-(2**31), 2**31 - 1)]),
    st.sampled_from([torch.float32, torch.float64]),
    st.randoms(),
)
def test_integers_come_back_as_they_were(span: tuple[int, int], dtype: torch.dtype, draw: random.Random) -> None:
    low, high = span if dtype == torch.float64 else (max(span[0], -(2**24)), min(span[1], 2**24))
    value = torch.tensor([low, high, 0, *(draw.randint(low, high) for _ in range(9))], dtype=dtype)
    packed = pack_value(value, span)
    assert packed.value().equal(value) and packed.value().dtype == dtype
    needed = 1 if span[1] - span[0] < 256 and span[1] - (span[0] < 0) * 128 <= 255 and span != (-200, 100) else 2
    assert packed.bytes <= value.numel() * (needed if span[1] < 2**15 else 4)


def test_real_values_come_back_as_they_were() -> None:
    for value in (torch.randn(5), torch.tensor([0.1], dtype=torch.float64), torch.tensor([3]), torch.tensor([True])):
        assert pack_value(value, None).value().equal(value) and pack_value(value, None).value().dtype == value.dtype


def test_layout_is_kept() -> None:
    x = torch.randn(2, 3, 4, 4).round().contiguous(memory_format=torch.channels_last)
    assert pack_value(x, (-10, 10)).value().is_contiguous(memory_format=torch.channels_last)


def test_a_view_does_not_keep_its_base_alive() -> None:
    whole = torch.randn(1000)
    assert pack_value(whole[:10], None).tensor.untyped_storage().nbytes() == 40
    assert pack_value(whole, None).tensor is whole


# ---------------------------------------------------------------- what comes in
def test_a_value_is_kept_when_it_is_computed_again() -> None:
    cache = ValueCache(9 * KB)
    turn(cache, "a", "b")
    assert not held(cache, "a", "b")
    turn(cache, "b", "c")
    assert held(cache, *"abc") == {"b"}


def test_values_are_kept_where_two_passes_diverge() -> None:
    cache = ValueCache(9 * KB)
    for names in ("abcd", "abxy", "apqr"):
        cache.begin(chain(*names))
        for name in names:
            cache.put((digest(name), 0), block())
    assert held(cache, *"abcdxypqr") == {"a", "b"}


def test_a_value_is_kept_if_any_of_its_readers_is_new() -> None:
    """A residual: a's reader b was seen before, and c, which reads both, was not."""
    cache = ValueCache(9 * KB)
    for last in (b"c", b"d"):
        cache.begin([StepDigests((b"a",), ()), StepDigests((b"b",), (b"a",)), StepDigests((last,), (b"a", b"b"))])
        for name in (b"a", b"b", last):
            cache.put((name, 0), block())
    assert held(cache, *"abcd") == {"a", "b"}


def test_all_batches_of_an_admitted_value_are_kept() -> None:
    cache = ValueCache(9 * KB)
    for expected in (0, 3):
        cache.begin(parts("a"))
        for batch in range(3):
            cache.put((b"a", batch), block())
        assert len(cache) == expected


def test_values_of_the_best_point_are_kept_at_once() -> None:
    cache = ValueCache(9 * KB)
    cache.prefer(frozenset({b"a"}))
    turn(cache, "a", "b")
    assert held(cache, "a", "b") == {"a"}


# ---------------------------------------------------------------- what is given up
def test_used_bytes_never_exceed_the_capacity() -> None:
    draw, cache, names = random.Random(0), ValueCache(10 * KB), "abcdefghijklmnop"
    for _ in range(50):
        cache.begin(parts(*names))
        for name in draw.sample(names, 6):
            cache.touch((digest(name), 0))
        for name in draw.sample(names, 6):
            cache.put((digest(name), 0), block(draw.choice([1, 2, 5, 20])))
            assert cache.used <= 10 * KB
        assert cache.used == sum(e.packed.bytes for e in cache._entries.values()) and len(cache) == len(cache._entries)


def test_the_least_recently_used_value_is_evicted_first() -> None:
    cache = ValueCache(3 * KB)
    turn(cache, "a", "b", "c", times=2)
    cache.begin(parts("a", "d"))
    assert cache.touch((b"a", 0)) is not None and cache.touch((b"z", 0)) is None
    turn(cache, "d")
    assert held(cache, *"abcd") == {"a", "c", "d"}


def test_values_that_the_turn_uses_are_not_evicted() -> None:
    """Values used in a cycle longer than the cache are kept in part, where least-recently-used alone
    would lose every one of them just before its next use."""
    cache, names, found = ValueCache(3 * KB), [*map(digest, "abcdef")], []
    for _ in range(5):
        cache.begin(parts(*"abcdef"))
        found.append(sum(cache.touch((n, 0)) is not None for n in names))
        for name in names:
            cache.put((name, 0), block())
    assert found == [0, 0, 3, 3, 3]


def test_only_tensors_that_fit_are_kept() -> None:
    cache = ValueCache(2 * KB)
    for _ in range(2):
        cache.begin(parts("t", "big"))
        cache.put((b"t", 0), (block(), block()))
        cache.put((b"big", 0), block(3))
    assert len(cache) == 0
    none = ValueCache(0)
    turn(none, "a", times=3)
    assert len(none) == 0 and none.touch((b"a", 0)) is None


# ---------------------------------------------------------------- memory
def test_by_default_the_capacity_is_a_quarter_of_the_free_memory_of_every_turn() -> None:
    free = [40 * KB]
    cache = ValueCache(free=lambda: free[0])
    assert cache.capacity == 10 * KB
    turn(cache, *map(str, range(9)), times=2)
    free[0] = 7 * KB  # others took memory
    cache.begin([])
    assert cache.capacity == (7 + 9) * KB // 4 and cache.used <= cache.capacity
    assert held(cache, *map(str, range(9))) == set("5678")


def test_free_bytes_is_plausible() -> None:
    assert 1 << 20 < free_bytes() < 1 << 50


def test_the_limit_of_a_control_group_counts(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("5000\n")
    (tmp_path / "current").write_text("3000\n")
    monkeypatch.setattr("hago.simulation.free_memory._GROUPS", ((tmp_path / "max", tmp_path / "current"),))
    assert free_bytes() == 2000
    (tmp_path / "max").write_text("max\n")
    assert free_bytes() > 1 << 20
