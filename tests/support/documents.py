"""The documents as their readers use them: pages, the blocks in them, the commands and examples in those."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support.stores import ROOT, digit

PAGES = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
SHELLS = ("bash", "sh", "console")
# In a line of its own before a block: `name`: or <!-- name -->. The block is that file.
_BLOCK = re.compile(
    r"(?:^(?:`([\w./-]+)`:\n\n|<!-- ([\w./-]+\.\w+) -->\n))?^( *)```(\w*)[^\n]*\n(.*?)^\3```$", re.DOTALL | re.MULTILINE
)


class Block(NamedTuple):
    """A fenced block. `shown` is the block right behind it, which is what its last command prints."""

    page: Path
    line: int
    language: str
    text: str
    file: str
    shown: str

    @property
    def commands(self) -> list[str]:
        """The lines of a shell's block without comments, and those that end in a backslash put together."""
        if self.language not in SHELLS:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [said for line in lines if (said := re.sub(r"(?:^|\s)#.*$", "", line).strip())]


def name_of(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """The page's blocks in their order."""
    text = page.read_text()
    found = list(_BLOCK.finditer(text))
    made = []
    for one, following in zip(found, [*found[1:], None], strict=False):
        adjacent = following and not text[one.end() : following.start()].strip()
        shown = following[5] if following and adjacent and following[4] in ("", "json", "text") else ""
        line = text[: one.start(4)].count("\n") + 1
        made.append(Block(page, line, one[4], textwrap.dedent(one[5]), one[1] or one[2] or "", shown))
    return tuple(made)


def all_blocks() -> Iterator[Block]:
    """Those of all pages."""
    for page in PAGES:
        yield from blocks(page)


def parts(line: str) -> list[list[str]]:
    """The commands of a line, in words: those that |, && or ; divide, without variables before them and redirections.

    `.venv/bin/convoy` is `convoy`.
    """
    split = shlex.shlex(line, posix=True, punctuation_chars=True)
    split.whitespace_split = True
    split.commenters = ""
    found: list[list[str]] = [[]]
    for word in split:
        if re.fullmatch(r"[<>]+", word):
            next(split)
        elif re.fullmatch(r"[&|;()]+", word):
            found.append([])
        elif found[-1] or not re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", word):
            found[-1].append(word if found[-1] else word.removeprefix(".venv/bin/"))
    return [one for one in found if one]


def run_example(code: str, folder: Path, program: tuple[str, ...] = (sys.executable, "-W", "error", "-c")) -> None:
    """In a folder with images of digits; what its comments say that it prints must be printed."""
    for word in ("one", "two", "seven"):
        (folder / f"{word}.png").write_bytes(digit(word))
    done = subprocess.run(
        [*program, code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = re.findall(r"(?:#|//) prints (.*)", code)
    assert [line for line in expected if line not in done.stdout.splitlines()] == []
