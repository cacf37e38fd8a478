"""Tables that scripts write into documents, each between two marks."""

from __future__ import annotations

from pathlib import Path


def replace_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what a document has between the marks `begin` and `end`.

    Raises:
        SystemExit: the document lacks a mark.
    """
    document = path.read_text("utf-8")
    if begin not in document or end not in document:
        raise SystemExit(f"{path} has no {begin} and {end}")
    before, _, rest = document.partition(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", "utf-8")
