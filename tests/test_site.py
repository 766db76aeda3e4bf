"""The site of the documents: it builds without a warning, has every page, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import PAGES, name_of
from tests.support.stores import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` makes it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder, "-f", "docs/site/mkdocs.yml"],
        *(), cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = [name_of(page).removeprefix("docs/") for page in PAGES if page.name != "README.md"]
    places = [site / name if (ROOT / "docs" / name).exists() else site / "project" / name for name in pages]
    assert [place for place in (*places, site / "index") if not place.with_suffix(".html").is_file()] == []


def test_every_page_is_in_the_navigation_once(site: Path) -> None:
    named = re.findall(r"[\w./-]+\.md$", (ROOT / "docs" / "site" / "mkdocs.yml").read_text(), re.MULTILINE)
    made = {one.relative_to(site).with_suffix(".md").as_posix() for one in site.rglob("*.html")} - {"404.md"}
    assert sorted(re.sub(r"README\.md$", "index.md", name) for name in named) == sorted(made)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loading = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    loaded = {tag for page in site.rglob("*.html") for tag in loading.findall(page.read_text())}
    imported = {
        url for sheet in site.rglob("*.css") for url in re.findall(r"url\([\"']?https?:[^)]*", sheet.read_text())
    }
    assert (loaded, imported) == (set(), set())


def test_what_is_linked_beside_the_documents_comes_along(site: Path) -> None:
    assert (site / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    links = {
        (page, link)
        for page in site.rglob("*.html")
        for link in re.findall(r'<a href="([^"#:]+)(?:#[^"]*)?"', page.read_text())
        if page.name != "404.html"
    }
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
