"""Lets MkDocs see the documents as they lie in the repository: README and its neighbours stand above `docs/`.

Every relative link is read as a path in the repository, as a code host reads it, and written as one on the site, where
`docs/` is the root. What a page links to outside of `docs/` comes along.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = "docs/"
# What stands beside `docs/`, by its place on the site. A SECURITY.html beside a security.html would not do everywhere.
BESIDE = {
    "README.md": "README.md",
    **{name: f"project/{name}" for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")},
}
_SOURCES = {place: name for name, place in BESIDE.items()}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands beside `docs/` and what is linked there."""
    for name, place in BESIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    for page in list(files.documentation_pages()):
        for path, _ in _LINK.findall(page.content_string):
            there = _in_repository(page.src_uri, path)
            if not there.startswith(DOCS) and (ROOT / there).is_file() and _on_site(there) not in files.src_uris:
                files.append(File.generated(config, there, abs_src_path=str(ROOT / there)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write each link as the site has it."""
    del config, files
    here = page.file.src_uri

    def on_site(link: re.Match[str]) -> str:
        there = _on_site(_in_repository(here, link[1]))
        return posixpath.relpath(there, posixpath.dirname(here) or ".") + (link[2] or "")

    return _LINK.sub(on_site, markdown)


def _in_repository(page: str, path: str) -> str:
    """Where the link of a page leads, from the repository's root; `page` is named as the site names it."""
    folder = posixpath.dirname(_SOURCES.get(page, DOCS + page))
    return posixpath.normpath(posixpath.join(folder, path))


def _on_site(path: str) -> str:
    """The place on the site of a path in the repository."""
    return BESIDE.get(path, path.removeprefix(DOCS))
