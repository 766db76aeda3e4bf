"""The examples in a page of the documents, typed as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.stores import ROOT, digit


def examples(page: Path, language: str = "python") -> list[str]:
    """The blocks of code of that language, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def run_example(code: str, folder: Path) -> None:
    """In a folder with images of digits; what its comments say that it prints must be printed."""
    for word in ("one", "two", "seven"):
        (folder / f"{word}.png").write_bytes(digit(word))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = re.findall(r"# prints (.*)", code)
    assert [line for line in expected if line not in done.stdout.splitlines()] == []
