"""The table "Where does my change go" of CONTRIBUTING.md names files and names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def rows(page: str) -> dict[str, str]:
    """The rows of the table, by the change that each is about."""
    table = page[page.index("## Where does my change go") : page.index("**What is not supported")]
    found = re.findall(r"^\| (\w.*?) \| (.*) \|$", table, re.M)
    return {change: cells for change, cells in found if change != "change"}


def absent(cells: str) -> list[str]:
    """The paths of a row that do not exist, and the names that none of its files holds."""
    quoted = re.findall(r"`([^`]+)`", cells)
    paths = [ROOT / name.replace("<name>.py", "").replace("<target>.py", "") for name in quoted if "/" in name]
    paths = [path.parent if "<name>" in path.name else path for path in paths]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        return missing
    folders = [path for path in paths if path.is_dir()]
    files = [*(path for path in paths if path.is_file()), *(file for f in folders for file in f.glob("*.py"))]
    text = "\n".join([*(entry.name for f in folders for entry in f.iterdir()), *(f.read_text("utf-8") for f in files)])
    return [name for name in quoted if "/" not in name and not re.search(rf"\b{re.escape(name)}\b", text)]


ROWS = rows((ROOT / "CONTRIBUTING.md").read_text("utf-8"))


@pytest.mark.parametrize("change", ROWS)
def test_every_file_and_name_of_the_table_exists(change: str) -> None:
    assert absent(ROWS[change]) == []


def test_a_name_or_a_file_that_is_gone_is_noticed() -> None:
    assert len(ROWS) > 20
    assert absent("`METRICS` of `hago/cost/cost.py`") == []
    assert absent("`METRICS_OF_OLD` of `hago/cost/cost.py`") == ["METRICS_OF_OLD"]
    assert absent("`METRICS` of `hago/cost/old.py`") == [str(ROOT / "hago/cost/old.py")]
