"""docs/numerics.md: every equation that the code names is there, its table holds, and its example runs."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch

import hago
from hago.arithmetic.rounding import ROUNDINGS

ROOT = Path(hago.__file__).parent
GUIDE = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text("utf-8")


def test_every_equation_that_the_code_cites_is_on_the_page() -> None:
    stated = set(re.findall(r"\*\*([NS]\d+)\b", GUIDE))
    assert stated == {f"N{i}" for i in range(1, 18)} | {f"S{i}" for i in range(1, 6)}
    named = set()
    for path in ROOT.rglob("*.py"):
        for listed in re.findall(r"\((N\d+(?:, N\d+)*|S\d+)\)|: (N\d+)\.", path.read_text("utf-8")):
            named |= set(re.findall(r"[NS]\d+", " ".join(listed)))
    assert {"N1", "N7", "S1"} <= named <= stated


def test_the_table_of_roundings() -> None:
    cells_of_row = f"(?: -?\\d+ \\|){{{len(ROUNDINGS)}}}"
    rows = re.findall(rf"^\| (-?\d+\.\d+) \|({cells_of_row})$", GUIDE, re.M)
    assert len(rows) == 8
    for x, cells in rows:
        found = [int(ROUNDINGS[mode](torch.tensor([float(x)]))) for mode in ROUNDINGS]
        assert [int(c) for c in cells.split("|")[:-1]] == found


def test_the_example_prints_the_shown_output() -> None:
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", GUIDE, re.S)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "docs/numerics.md", "exec"), {"__name__": "guide"})
    assert out.getvalue() == shown
