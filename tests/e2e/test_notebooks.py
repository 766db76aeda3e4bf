"""The notebooks in docs run from top to bottom, and were committed with the output of such a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stores import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def sources(path: Path, kind: str) -> list[str]:
    """The text of the cells of a kind."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@by_notebook
def test_a_notebook_has_the_output_of_one_run(path: Path) -> None:
    text = path.read_text()
    book = json.loads(text)
    assert (book["nbformat"], book["nbformat_minor"], book["metadata"]["kernelspec"]["name"]) == (4, 5, "python3")
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert [one for one in outputs if one["output_type"] == "error" or one.get("name") == "stderr"] == []
    assert re.findall(r"/(?:tmp|home|root|work)/", text) == []
    assert len(text) < 100_000


@by_notebook
def test_every_link_of_a_notebook_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", "\n".join(sources(path, "markdown")))
    assert links
    assert [one for one in links if not (path.parent / one).exists()] == []


@pytest.mark.long
@pytest.mark.timeout(600)
@by_notebook
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("CONVOY_")}
    env |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = "\n\n".join(sources(path, "code"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        *(), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=590, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
