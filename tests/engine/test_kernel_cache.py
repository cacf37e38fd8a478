"""The cache of built kernels: what is not as it was built is built again, and never loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hago.engine import native

LOAD = "from hago.engine import native; found = native.library(); print('calls' if found.calls else found.why)"

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library, and beside it a compiler that copies it and counts how often it was asked."""
    folder = tmp_path_factory.mktemp("compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HAGO_NATIVE", raising=False)
        shutil.copy(native.build(), folder / "kernels.so")
    script = folder / "c++"
    script.write_text(
        '#!/bin/sh\nfor last; do :; done\nif [ "$1" = --version ]; then echo copy 1.0; exit; fi\n'
        f'echo x >> "{folder}/count"\ncp "{folder}/kernels.so" "$last"\n'
    )
    script.chmod(0o755)
    return folder


@pytest.fixture
def cache(built: Path, tmp_path: Path) -> Path:
    """A cache that holds the library."""
    assert load(built, tmp_path) == "calls" and count(built, tmp_path) == 0
    return tmp_path


def load(built: Path, cache: Path) -> str:
    """What a process of its own gets from a cache."""
    env = {k: v for k, v in os.environ.items() if k != "HAGO_NATIVE"}
    env |= {"HAGO_CACHE": str(cache), "PATH": f"{built}:{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", LOAD], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    return done.stdout.strip()


def count(built: Path, cache: Path) -> int:
    """How often the compiler was asked while a process loaded from the cache."""
    (built / "count").write_text("")
    assert load(built, cache) == "calls"
    return len((built / "count").read_text().split())


def one(cache: Path, ending: str) -> Path:
    (found,) = cache.glob(f"kernels-*{ending}")
    return found


def written(path: Path, change: Callable[[bytes], bytes]) -> None:
    """The file with other bytes, in place as a crash leaves it."""
    content = path.read_bytes()
    path.write_bytes(change(content))


def linked(path: Path) -> None:
    elsewhere = path.with_name("elsewhere.so")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


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
    "manifest a list": lambda c: written(one(c, ".json"), lambda b: b"[1]"),
    "manifest a number for a name": lambda c: written(
        one(c, ".json"), lambda b: b'{"library": 3, "bytes": 1, "sha256": 2}'
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_what_is_damaged_is_built_again(damage: str, built: Path, cache: Path) -> None:
    DAMAGE[damage](cache)
    assert count(built, cache) == 1  # and no signal, and no slower kernels
    assert count(built, cache) == 0


def test_processes_that_build_at_once_do_not_disturb_each_other(built: Path, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "HAGO_NATIVE"}
    env |= {"HAGO_CACHE": str(tmp_path), "PATH": f"{built}:{os.environ['PATH']}"}
    running = [subprocess.Popen([sys.executable, "-c", LOAD], env=env, stdout=subprocess.PIPE) for _ in range(3)]
    assert [p.communicate()[0].strip() for p in running] == [b"calls"] * 3
    assert count(built, tmp_path) == 0


def test_a_build_that_was_killed_leaves_nothing_to_load(built: Path, tmp_path: Path) -> None:
    place = tmp_path / "tmpabc"  # of the killed one
    place.mkdir()
    shutil.copy(built / "kernels.so", place / "kernels.so")
    (tmp_path / "kernels-0123456789abcdef-0123.so").write_bytes(b"half")
    assert count(built, tmp_path) == 1
