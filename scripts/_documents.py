"""Tables that scripts write into documents, each between two marks."""

from __future__ import annotations

from pathlib import Path


def check_marks(path: Path, begin: str, end: str) -> str:
    """The text of a document that has both marks.

    Raises:
        SystemExit: it lacks one.
    """
    document = path.read_text("utf-8")
    if begin not in document or end not in document:
        raise SystemExit(f"{path} has no {begin} and {end}")
    return document


def replace_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what a document has between the marks `begin` and `end`.

    Raises:
        SystemExit: the document lacks a mark; scripts that run for long call `check_marks` first.
    """
    document = check_marks(path, begin, end)
    before, _, rest = document.partition(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", "utf-8")
