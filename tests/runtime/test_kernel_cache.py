"""The cache of built kernels: a library that was changed is built again instead of loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hago.runtime.native.build import build
from hago.runtime.native.instruction_sets import largest_set

LOAD = (
    "from hago.runtime.native import library as native; "
    "found = native.library(); print('calls' if found.calls else found.why)"
)

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library, and beside it a compiler that copies it where objects are linked, and counts how often."""
    folder = tmp_path_factory.mktemp("compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HAGO_NATIVE", raising=False)
        shutil.copy(build(largest_set()).path, folder / "kernels.so")
    script = folder / "c++"
    script.write_text(
        '#!/bin/sh\nfor last; do :; done\nif [ "$1" = --version ]; then echo copy 1.0; exit; fi\n'
        'case " $* " in *" -c "*) : > "$last"; exit;; esac\n'
        f'case "$last" in *probe.so) cp "{folder}/kernels.so" "$last"; exit;; esac\n'
        f'echo x >> "{folder}/count"\ncp "{folder}/kernels.so" "$last"\n'
    )
    script.chmod(0o755)
    return folder


@pytest.fixture
def cache(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the library, which this process builds into."""
    monkeypatch.delenv("HAGO_NATIVE", raising=False)
    monkeypatch.setenv("HAGO_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{built}:{os.environ['PATH']}")
    assert count(built) == 1 and count(built) == 0
    return tmp_path


def load(built: Path, cache: Path) -> str:
    """What a process of its own gets from a cache."""
    env = {k: v for k, v in os.environ.items() if k != "HAGO_NATIVE"}
    env |= {"HAGO_CACHE": str(cache), "PATH": f"{built}:{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}
    how = {"env": env, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", LOAD], check=False, **how)  # type: ignore[call-overload]
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    return str(done.stdout).strip()


def count(built: Path) -> int:
    """How often the compiler was asked for a library, which is then as it should be."""
    (built / "count").write_text("")
    assert build(largest_set()).path.read_bytes() == (built / "kernels.so").read_bytes()
    return len((built / "count").read_text().split())


def one(cache: Path, ending: str) -> Path:
    (path,) = cache.glob(f"kernels-*{ending}")
    return path


def written(path: Path, change: Callable[[bytes], bytes]) -> None:
    """The file with other bytes, in place as a crash leaves it."""
    content = path.read_bytes()
    path.write_bytes(change(content))


def linked(path: Path) -> None:
    elsewhere = path.with_name("elsewhere.so")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def queued(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut in half": lambda c: written(one(c, ".so"), lambda b: b[: len(b) // 2]),
    "emptied": lambda c: written(one(c, ".so"), lambda b: b""),
    "one bit": lambda c: written(one(c, ".so"), lambda b: b[:5000] + bytes([b[5000] ^ 1]) + b[5001:]),
    "longer": lambda c: written(one(c, ".so"), lambda b: b + b"\0"),
    "zeros": lambda c: written(one(c, ".so"), lambda b: b"\0" * len(b)),
    "gone": lambda c: one(c, ".so").unlink(),
    "others may write": lambda c: one(c, ".so").chmod(0o777),
    "a link": lambda c: linked(one(c, ".so")),
    "manifest cut": lambda c: written(one(c, ".json"), lambda b: b[:20]),
    "manifest empty": lambda c: written(one(c, ".json"), lambda b: b""),
    "manifest of another path": lambda c: written(
        one(c, ".json"), lambda b: b.replace(b'"kernels-', b'"../../tmp/kernels-')
    ),
    "manifest a link": lambda c: linked(one(c, ".json")),
    "manifest of everybody": lambda c: one(c, ".json").chmod(0o666),
    "manifest a queue": lambda c: queued(one(c, ".json")),
    "manifest a list": lambda c: written(one(c, ".json"), lambda b: b"[1]"),
    "manifest a number for a name": lambda c: written(
        one(c, ".json"), lambda b: b'{"library": 3, "bytes": 1, "sha256": 2}'
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_libraries_are_built_again(damage: str, built: Path, cache: Path) -> None:
    DAMAGE[damage](cache)
    assert count(built) == 1
    assert count(built) == 0


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_library_crashes_no_process(part: float, built: Path, cache: Path) -> None:
    written(one(cache, ".so"), lambda b: b[: int(part * len(b))])
    assert load(built, cache) == "calls"  # no signal, and no slower kernels


def test_processes_that_build_at_once_do_not_disturb_each_other(built: Path, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "HAGO_NATIVE"}
    env |= {"HAGO_CACHE": str(tmp_path), "PATH": f"{built}:{os.environ['PATH']}"}
    running = [subprocess.Popen([sys.executable, "-c", LOAD], env=env, stdout=subprocess.PIPE) for _ in range(3)]
    assert [p.communicate()[0].strip() for p in running] == [b"calls"] * 3


def test_a_world_writable_folder_is_not_used(built: Path, cache: Path) -> None:
    cache.chmod(0o777)
    with pytest.raises(OSError, match="every user can write to"):
        build(largest_set())
    cache.chmod(0o1777)  # as /tmp is
    assert count(built) == 0


def test_a_killed_build_leaves_nothing_to_load(built: Path, cache: Path) -> None:
    place = cache / "build-abc"  # of one that was killed yesterday
    place.mkdir()
    shutil.copy(built / "kernels.so", place / "kernels.so")
    os.utime(place, (time.time() - 86400,) * 2)
    one(cache, ".json").unlink()
    one(cache, ".so").write_bytes(b"half")
    assert count(built) == 1 and not place.exists()
