"""The README tells the truth: its commands run, its files exist, its options are real."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from convoy.command import _command as convoy_command

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(document: Path) -> list[str]:
    """Every line of every bash block, comments cut off."""
    blocks = re.findall(r"```bash\n(.*?)```", document.read_text(), re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def convoy_commands() -> list[str]:
    found = [line for document in DOCUMENTS for line in commands(document)]
    return sorted({line.removeprefix(".venv/bin/") for line in found if "convoy " in line and "docker" not in line})


def test_the_first_two_commands_are_the_makefiles() -> None:
    first, second = commands(ROOT / "README.md")[:2]
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert first == "make serve"
    assert second == "make test"
    assert {"serve", "test", "check", "demo", "bench"} <= set(targets)


def leads_somewhere(folder: Path, link: str) -> bool:
    """Whether there is such a file and, behind a #, such a heading in it."""
    path, _, anchor = link.partition("#")
    target = folder / path
    if not target.exists() or not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_file_exists(document: Path) -> None:
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("http", "#"))]
    files = re.findall(r"@(tests/data/[\w.]+)", text)
    missing = [link for link in links if not leads_somewhere(document.parent, link)]
    missing += [name for name in files if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("command", convoy_commands())
def test_every_option_in_the_documents_is_real(command: str) -> None:
    words = command.split()
    help_text = subprocess.run(
        [sys.executable, "-m", "convoy", *words[1 : 3 if words[1] == "config" else 2], "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin", "TERM": "dumb"},
    ).stdout
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert [option for option in options if option not in help_text] == []


# Of docker and curl, and of the program that draws characters, which the pages name, too.
OTHERS = {"--build-arg", "--data-binary", "--gpus", "--read-only", "--shm-size", "--target", "--tmpfs", "--user"}
OTHERS |= {"--px", "--grey"}


@pytest.mark.parametrize("page", ["export", "serving", "training", "your-own-cnn"])
def test_every_option_that_a_page_speaks_of_is_one(page: str) -> None:
    command: Any = convoy_command([])
    known = {"--help"}
    known |= {name for one in command.commands.values() for option in one.params for name in option.opts}
    known |= {name for one in command.commands.values() for option in one.params for name in option.secondary_opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / "docs" / f"{page}.md").read_text()))
    assert len(named) > 5
    assert named - known - OTHERS == set()


@pytest.mark.long
@pytest.mark.timeout(600)  # it trains
def test_the_readmes_way_from_training_to_a_store_works(tmp_path: Path) -> None:
    steps = [line for line in commands(ROOT / "README.md") if line.startswith(".venv/bin/convoy")]
    train, export = steps[0], steps[1]
    assert (train.split()[1], export.split()[1]) == ("train", "export")
    (tmp_path / "store").mkdir()
    for step in (train, export):
        subprocess.run([sys.executable, "-m", "convoy", *step.split()[1:]], check=True, cwd=tmp_path, timeout=300)
    inspected = subprocess.run(
        [sys.executable, "-m", "convoy", "inspect", "digits", "--store", "store"],
        check=True, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "fp32.onnx" in inspected.stdout
