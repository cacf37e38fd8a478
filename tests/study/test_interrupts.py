"""Handling of Ctrl-C: interrupts that Python drops, and handlers of the user."""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from toys import run, separable, timeless

from hago.study.interrupts import Interrupts, interruptible_job
from hago.study.log import read_log


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Install Python's handler, since a process that was started in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Thing:
    """Can be referred to weakly."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_finalizer_is_not_lost(tmp_path: Path) -> None:
    calls = []

    def evaluate(bits):
        calls.append(bits)
        if len(calls) == 4:
            thing = Thing()
            kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
            del thing  # the callback raises, and Python drops it
            assert kept() is None
        return separable(bits)

    with pytest.raises(KeyboardInterrupt):
        run("random", tmp_path / "log", evaluate, options={"trials": 9})
    assert len(read_log(tmp_path / "log").trials) == 4
    run("random", tmp_path / "log", options={"trials": 9})
    run("random", tmp_path / "whole", options={"trials": 9})
    assert timeless((tmp_path / "log").read_bytes()) == timeless((tmp_path / "whole").read_bytes())


def test_with_defer_the_first_interrupt_is_only_recorded() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Interrupts(defer=True) as interrupts:
        signal.raise_signal(signal.SIGINT)
        done.append("whole")
        interrupts.check()
    with pytest.raises(KeyboardInterrupt), Interrupts(defer=True):
        signal.raise_signal(signal.SIGINT)
        done.append("first")
        signal.raise_signal(signal.SIGINT)
        done.append("second")
    assert done == ["whole", "first"]


def test_the_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_user_is_not_replaced() -> None:
    def theirs(number: int, frame: FrameType | None) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGINT, theirs)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is theirs
        assert signal.getsignal(signal.SIGINT) is theirs
    finally:
        signal.signal(signal.SIGINT, before)


def test_no_handler_is_installed_in_other_threads() -> None:
    said = []

    def enter() -> None:
        with Interrupts() as interrupts:
            interrupts.check()
            said.append("fine")

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert said == ["fine"]


def test_an_interrupt_that_a_job_drops_is_raised_at_its_next_step() -> None:
    done = []

    def drop() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), interruptible_job("job", shown=False) as steps:
        steps("first")
        drop()
        done.append("first")
        steps("second")
        done.append("second")
    with pytest.raises(KeyboardInterrupt), interruptible_job("job", shown=False) as steps:
        drop()
        steps.on_batch(1, 2)
        done.append("batch")
    with pytest.raises(KeyboardInterrupt), interruptible_job("job", shown=False):
        drop()
        done.append("end")
    assert done == ["first", "end"]
