"""Files that a hosting site reads: workflows, issue templates, the citation, and the page on security."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hago.version import VERSION

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
#: The kinds of elements of an issue form, with the attributes that each must have.
FORM = {"textarea": {"label"}, "input": {"label"}, "dropdown": {"label", "options"}, "checkboxes": {"label", "options"}}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


@pytest.mark.parametrize("path", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_a_workflow_runs_scripts_that_are_there(path: Path) -> None:
    steps = [step for job in read(path)["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    for command in commands:
        assert (ROOT / command.removeprefix("bash ").split()[0]).is_file(), command
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)


@pytest.mark.parametrize(
    "path", sorted(set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {GITHUB / "ISSUE_TEMPLATE/config.yml"}), ids=str
)
def test_an_issue_form_has_what_github_expects(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    ids = [element["id"] for element in form["body"]]
    assert len(ids) == len(set(ids))
    for element in form["body"]:
        assert FORM[element["type"]] <= element["attributes"].keys(), element["id"]


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == VERSION and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
