"""The pause of Python's collector ends in the state in which it began, whatever happens, and loses no garbage."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from hago.garbage_collection import garbage_collection_paused


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_pauses_and_goes_on() -> None:
    with garbage_collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="within"), garbage_collection_paused():
        raise ValueError("within")
    assert gc.isenabled()


def test_leaves_a_collector_off_that_was_off() -> None:
    gc.disable()
    with garbage_collection_paused(), garbage_collection_paused():
        pass
    assert not gc.isenabled()


def test_garbage_that_was_made_in_a_pause_is_freed_later() -> None:
    with garbage_collection_paused():
        freed = weakref.ref(_Cycle())
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert freed() is None


def test_objects_that_the_user_froze_stay_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    assert count
    with garbage_collection_paused():
        pass
    assert gc.get_freeze_count() > 0
