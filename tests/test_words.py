"""Plain English where users read: messages, help and guide have none of the words that made them hard to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy import command

ROOT = Path(__file__).parent.parent
WORDS = re.compile(r"\b(whence|whoever|for want of|in the place of|so many|so long|of which|likewise|nobody)\b", re.I)
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/internals/house.md")
GUIDE = [
    *(ROOT / page for page in PAGES),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/deploy").rglob("*.md")),
    *sorted((ROOT / "docs/notebooks").glob("*.ipynb")),
]


def strings(text: str) -> Iterator[tuple[int, str]]:
    """The string constants of a program that are no docstrings, with their lines."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _has_docstring(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def _has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return bool(node.body) and ast.get_docstring(node, clean=False) is not None


@pytest.mark.parametrize("folder", ["app", "export", "loadtest", "models", "convoy"])
def test_messages_are_in_plain_english(folder: str) -> None:
    files = [file for file in (ROOT / folder).rglob("*.py") if not any(one.is_symlink() for one in file.parents)]
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in files
        for line, text in strings(file.read_text(encoding="utf-8"))
        if WORDS.search(text) and " " in text
    ]
    assert found == []


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_the_guide_is_in_plain_english(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [f"{number}: {line}" for number, line in enumerate(lines, 1) if WORDS.search(line)] == []


def test_help_is_in_plain_english() -> None:
    def told(one: object) -> Iterator[str]:
        yield getattr(one, "help", None) or ""
        yield from (getattr(parameter, "help", None) or "" for parameter in getattr(one, "params", ()))
        for below in getattr(one, "commands", {}).values():
            yield from told(below)

    assert [text for text in told(command._command([])) if WORDS.search(text)] == []
