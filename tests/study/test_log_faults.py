"""Failing writes: a line is written completely or not at all, and no earlier line is lost."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toys import Counting, resumed, run, separable, timeless, without_relu

from hago.errors import LogError
from hago.study.log import Trial, read_log
from hago.study.score import Score


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A context in which files cannot exceed `size` bytes: writes are short and then fail, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("back", [1, 2, 100, 400])
def test_a_full_disk_loses_nothing(back: int, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = whole.splitlines(keepends=True)
    room = len(b"".join(lines[:6])) - back
    with file_size_limit(room), pytest.raises(LogError, match=r"cannot write log .*log: .*resume"):
        run("exhaustive", path, plan_key=without_relu, budget=10, clock=lambda: 0.0)
    assert timeless(path.read_bytes()) == timeless(whole)[:5]
    counting = Counting(separable)
    run("exhaustive", path, counting, plan_key=without_relu, budget=10)
    assert timeless(path.read_bytes()) == timeless(whole)
    assert len(counting.calls) < 6


def test_no_room_for_the_header(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    counting = Counting(separable)
    with file_size_limit(20), pytest.raises(LogError, match="cannot write log"):
        run("exhaustive", path, counting, plan_key=without_relu, budget=10)
    assert not path.exists()
    assert counting.calls == []
    assert timeless(resumed(path)) == timeless(whole)


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("failing", [3, 4, 9])
@pytest.mark.parametrize("truncates", [True, False])
def test_any_failing_write_is_recovered(
    call: str, failing: int, truncates: bool, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    real, calls = getattr(os, call), iter(range(10**6))

    def fault(fd: int, *rest: bytes) -> int:
        if next(calls) == failing:
            if rest:
                real(fd, rest[0][: len(rest[0]) // 2])
            raise OSError(errno.EIO, "the device failed")
        return real(fd, *rest)

    monkeypatch.setattr(os, call, fault)
    if not truncates:
        shrink = os.ftruncate

        def refuse(fd: int, size: int) -> None:
            if os.fstat(fd).st_size > size:
                raise OSError(errno.EIO, "the device failed")
            shrink(fd, size)

        monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(LogError, match="the device failed"):
        run("exhaustive", path, plan_key=without_relu, budget=10)
    monkeypatch.undo()
    assert timeless(resumed(path)) == timeless(whole)


def test_an_interrupt_while_writing_leaves_no_part(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, calls = tmp_path / "log", os.write, iter(range(10**6))

    def interrupted(fd: int, part: bytes) -> int:
        if next(calls) == 4:
            real(fd, part[:30])
            raise KeyboardInterrupt
        return real(fd, part)

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("exhaustive", path, plan_key=without_relu, budget=10)
    monkeypatch.undo()
    assert timeless(path.read_bytes()) == timeless(whole)[:4]


# ---------------------------------------------------------------- other processes that change the log
def remove(path: Path) -> None:
    path.unlink()


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replace(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.write_bytes(path.with_name("elsewhere").read_bytes())


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(200)


def lengthen(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"{}\n")


@pytest.mark.parametrize("at", [0, 3, 9])
@pytest.mark.parametrize("touch", [remove, rename, replace, truncate, lengthen])
def test_a_log_that_another_process_changes_ends_the_search_and_the_advice_helps(
    touch: Callable[[Path], None], at: int, whole: bytes, tmp_path: Path
) -> None:
    path, kept = tmp_path / "log", []

    def on_trial(trial: Trial, best: Trial | None, replayed: bool) -> tuple[str, ...]:
        if trial.index == at:
            touch(path)
        return ()

    with pytest.raises(LogError, match="was (removed|renamed|replaced|changed).* while it was written") as error:
        run("exhaustive", path, plan_key=without_relu, budget=10, on_trial=on_trial, on_best=kept.append)
    assert kept
    said = str(error.value)
    if "another path" in said:
        path = tmp_path / "another"
    elif "its name back" in said:
        path.with_name("elsewhere").rename(path)
    if "another path" not in said:
        # with the trial that was written after it happened, where there was one
        assert len(read_log(path).trials) == min(at + 2, 10)
    assert timeless(resumed(path)) == timeless(whole)


def test_every_line_is_synced_before_the_next_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events, real = tmp_path / "log", [], os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            events.append(("synced", path.read_bytes().count(b"\n")))

    def evaluate(bits) -> Score:
        events.append(("evaluated", 0))
        return separable(bits)

    monkeypatch.setattr(os, "fsync", fsync)
    run("exhaustive", path, evaluate, budget=3)
    assert events == [("synced", 1), *(e for n in (2, 3, 4) for e in (("evaluated", 0), ("synced", n)))]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no devices")
def test_a_path_that_is_no_file_is_refused() -> None:
    with pytest.raises(LogError, match="cannot open log /dev/zero: it is no regular file"):
        run("exhaustive", Path("/dev/zero"), budget=3)
