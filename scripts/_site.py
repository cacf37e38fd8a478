"""What mkdocs needs beside the pages of docs/: the pages of the root, the examples, the gallery of reports, the
reference, and links to them.

`mkdocs.yml` names this file as a hook. Pages are written for GitHub, with links relative to their place in the
repository; here such a link becomes one to the page of the site, or to a copy of the file. So the same text works in
both, and `mkdocs build --strict` finds links that lead nowhere.
"""

from __future__ import annotations

import html
import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import hago

ROOT: Final = Path(__file__).resolve().parent.parent
#: Pages of the site that are files of the root, by path in the repository.
ROOT_PAGES: Final = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/": "examples.md",
}
#: Files that pages link to and that are copied into the site.
COPIED: Final = ("LICENSE", "setup.cfg", "examples/first_hour.ipynb")
#: The chapters of the reference: a title, and names that mkdocstrings documents.
REFERENCE: Final = (
    ("Functions", tuple(f"hago.{name}" for name in hago.__all__ if name.islower())),
    ("Classes", tuple(f"hago.{name}" for name in hago.__all__ if not name.islower())),
    ("Callbacks", ("hago.callbacks", "hago.search.running.RunningSearch", "hago.qat.finetuning.RunningTraining")),
    ("Results", ("hago.search.pareto_front.ParetoFront", "hago.search.pareto_front.FrontPoint")),
    ("Trials", ("hago.study.loop.StudyResult", "hago.study.log.Trial", "hago.study.score.Score")),
    ("Training", ("hago.qat.finetuning.FinetuneOptions", "hago.qat.finetuning.Finetuned")),
    ("Inspection", ("hago.analysis.graph_statistic.GraphStatistic",)),
)
#: The chips of the gallery: what each is, and the question whose answer the page of the gallery gives.
GALLERY: Final = {
    "x86_vnni": (
        "products of 8 bits are summed in 32, and weights have a scale per channel",
        "What does it give, and what does it lose?",
    ),
    "int16_accumulator": (
        "a made-up chip that sums products of 8 bits in 16, so that wide operands overflow",
        "Can anything overflow?",
    ),
    "vta": (
        "an accelerator whose scales are powers of two, one for all channels of a weight",
        "What does it cost to go to 6 bits?",
    ),
}
_LINK: Final = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_BLOCK: Final = re.compile(r"^```.*?^```$", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are not in docs/."""
    for source, page in ROOT_PAGES.items():
        path = ROOT / source
        if path.is_file():
            files.append(File.generated(config, page, content=path.read_text("utf-8")))
    files.append(File.generated(config, "examples.md", content="\n".join(examples())))
    chips = tuple(config.extra["gallery"])
    pages, answers = gallery_reports(chips) if chips else ({}, {})
    files.append(File.generated(config, "gallery.md", content="\n".join(gallery(answers))))
    for chip, page in pages.items():
        files.append(File.generated(config, f"gallery/{chip}.html", content=page))
    files.append(File.generated(config, "reference.md", content="\n".join(reference())))
    for source in COPIED:
        files.append(File.generated(config, f"files/{source}", content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to the pages and files of the site."""
    sources = {target: source for source, target in ROOT_PAGES.items()}
    uri = page.file.src_uri
    folder = posixpath.dirname(sources.get(uri, f"docs/{uri}"))
    return in_text(markdown, lambda text: _LINK.sub(lambda link: retarget(link, folder), text))


def in_text(markdown: str, change: Any) -> str:
    """The page with its text changed, and its fenced blocks as they are."""
    texts, blocks = _BLOCK.split(markdown), _BLOCK.findall(markdown)
    return "".join(part for pair in zip(map(change, texts), [*blocks, ""], strict=True) for part in pair)


def retarget(link: re.Match[str], folder: str) -> str:
    """A link of a page in a folder of the repository, as a link between pages in one folder."""
    target = link[2]
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    slash = "/" if target.endswith("/") else ""
    path = posixpath.normpath(posixpath.join(folder, target)) + slash
    if path in ROOT_PAGES:
        path = ROOT_PAGES[path]
    elif path in COPIED:
        path = f"files/{path}"
    else:
        path = path.removeprefix("docs/")
    return f"{link[1]}{path}{link[3]}"


def examples() -> Iterator[str]:
    """The page of the examples: each with its source."""
    yield "# Examples\n\nShort programs that do one thing each, as they stand in the folder `examples`.\n"
    yield "[first_hour.ipynb](first_hour.ipynb) is a notebook:\n"
    cells = json.loads((ROOT / "examples/first_hour.ipynb").read_text("utf-8"))["cells"]
    yield from (f"- {line.strip()[3:]}" for c in cells for line in c["source"] if line.startswith("## "))
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield f"\n## {path.name}\n\n```python\n{path.read_text('utf-8').rstrip()}\n```"


@cache
def gallery_reports(chips: tuple[str, ...]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The pages of the gallery's reports, and what each answers by question, by chip.

    Raises:
        PluginError: they cannot be made, e.g. since a package is missing.
    """
    words = [sys.executable, str(ROOT / "scripts" / "_gallery.py"), *chips]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if made.returncode:
            raise PluginError(f"the reports of the gallery cannot be made: {made.stderr[-2000:]}")
        pages = {chip: Path(folder, f"{chip}.html").read_text("utf-8") for chip in chips}
    return pages, json.loads(made.stdout.splitlines()[-1])


def gallery(answers: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The page of the gallery: a link to each report, with what it answers first.

    Args:
        answers: by chip and question.
    """
    yield "# Gallery of reports\n"
    yield (
        "What [hago report](report.md) writes, made with these pages: a search of 12 trials on each chip, of the small "
        "network of `hago demo`, which was trained for seconds and calibrated on 100 images. Each is one file that "
        "needs no network.\n"
    )
    for chip, said in answers.items():
        what, question = GALLERY[chip]
        beginning = html.escape(_beginning(said[question]))
        yield f"- [DigitNet on {chip}](gallery/{chip}.html): {what}. *{question}* {beginning}"


def _beginning(answer: str) -> str:
    """The first two sentences of an answer."""
    return ". ".join(answer.removesuffix(".").split(". ")[:2]) + "."


def reference() -> Iterator[str]:
    """The page of the reference, which mkdocstrings fills."""
    yield "# Reference\n\nThe public names of hago, as `import hago` gives them, and the objects that they return.\n"
    for title, names in REFERENCE:
        yield f"\n## {title}\n"
        yield from (f"::: {name}\n    options:\n      heading_level: 3\n" for name in names)
