"""The site of the documentation: mkdocs makes it without a warning, and a link that works on GitHub works there."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

import hago

ROOT = Path(__file__).resolve().parent.parent

for package in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers", "grandalf", "jinja2", "sklearn"):
    pytest.importorskip(package)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = build(ROOT / "mkdocs.yml", folder)
    assert made.returncode == 0 and "WARNING" not in made.stderr, made.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / "scripts" / "_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_guide_is_a_page_and_every_public_name_is_documented(site: Path) -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert (site / "index.html" if path.stem == "index" else site / path.stem / "index.html").is_file(), path.name
    text = (site / "reference" / "index.html").read_text("utf-8")
    anchors = set(re.findall(r'id="(hago\.[\w.]+)"', text))
    assert {f"hago.{name}" for name in hago.__all__} <= anchors
    assert {"hago.callbacks.TensorBoard", "hago.search.running.RunningSearch.stop"} <= anchors
    assert "Search for the bits and thresholds" in text
    assert (site / "search" / "search_index.json").stat().st_size > 10_000


def test_the_gallery_shows_reports_that_are_made_with_the_site(site: Path, hook: ModuleType) -> None:
    text = (site / "gallery" / "index.html").read_text("utf-8")
    for chip, (_, question) in hook.GALLERY.items():
        assert re.search(rf'href="(\.\./gallery/)?{chip}\.html"', text), chip
        page = (site / "gallery" / f"{chip}.html").read_text("utf-8")
        (document,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
        report = json.loads(document)
        assert report["title"] == f"DigitNet on {chip}" and report["points"][0]["verdicts"]
        (answer,) = (each["answer"] for each in report["points"][0]["short"] if each["question"] == question)
        assert answer.partition(".")[0] in html.unescape(text)
        # commands name files, and none of the folder that the site is made in
        assert f"{chip}.json" in page and tempfile.gettempdir() not in page


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    guide = tmp_path / "docs" / "zoo.md"
    guide.write_text(guide.read_text("utf-8") + "\n[lost](../lost.md) and [old](guide.md#no-such-part)\n", "utf-8")
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    config = tmp_path / "mkdocs.yml"
    text = text.replace("scripts/_site.py", f"{ROOT}/scripts/_site.py").replace("[.]", f"[{ROOT}]")
    config.write_text(re.sub(r"gallery: \[.*\]", "gallery: []", text), "utf-8")
    made = build(config, tmp_path / "site")
    assert made.returncode != 0 and "lost.md" in made.stderr and "no-such-part" in made.stderr


@pytest.mark.parametrize(
    ("folder", "link", "expected"),
    [
        ("", "[a](docs/guide.md#b)", "[a](guide.md#b)"),
        ("docs", "[a](../README.md)", "[a](readme.md)"),
        ("docs", "[a](guide.md)", "[a](guide.md)"),
        ("docs", "[a](../setup.cfg)", "[a](files/setup.cfg)"),
        ("", "[a](examples/)", "[a](examples.md)"),
        ("docs", "[a](https://x.org/docs/y.md)", "[a](https://x.org/docs/y.md)"),
        ("docs", "[a](#b)", "[a](#b)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(
    hook: ModuleType, folder: str, link: str, expected: str
) -> None:
    assert hook.in_text(link, lambda text: hook._LINK.sub(lambda m: hook.retarget(m, folder), text)) == expected


def test_blocks_of_code_are_left_alone(hook: ModuleType) -> None:
    page = "[a](docs/b.md)\n```python\nf(x)[0](docs/b.md)\n```\n[a](docs/b.md)\n"
    assert hook.in_text(page, str.upper).count("docs/b.md") == 1
