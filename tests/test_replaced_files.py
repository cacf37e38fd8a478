"""Files are replaced, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hago.errors import LogError
from hago.serialization.json_text import replace_file


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(LogError, match="it is no regular file; give a path of its own"):
            replace_file(path, "{}")
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"] and Path("/dev/null").is_char_device()


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "new.json"
    target.write_text("old")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "later.json")
    replace_file(link, "new")
    replace_file(dangling, "made")
    assert link.is_symlink() and target.read_text() == "new"
    assert dangling.is_symlink() and (tmp_path / "later.json").read_text() == "made"
