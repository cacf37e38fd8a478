"""Fixtures of the tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from hago.api import make_report
from hago.report import Report

from .searched import CHIP, data, network, searched


@pytest.fixture(scope="session")
def search_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a small search."""
    folder = tmp_path_factory.mktemp("report")
    searched(folder)
    return folder


@pytest.fixture(scope="session")
def full_report(search_folder: Path) -> Report:
    """The report of a log, its strategy and its front, with data and held-out data."""
    records = [search_folder / name for name in ("net.jsonl", "net.json", "net.front.json")]
    return make_report(network(), CHIP, records, data(), held_out=data(2), points=4, progress=False)
