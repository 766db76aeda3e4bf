"""docs/your-own-cnn.md, typed: its files are written, its commands run, and what they say is what the page shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.documents import blocks
from tests.support.servers import Server, start_server
from tests.support.stores import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PAGE = ROOT / "docs" / "your-own-cnn.md"
COMMANDS = (
    *("python make_photos.py", "ls photos/test", "python train.py", "convoy export", "convoy inspect", "convoy serve"),
    *("convoy predict", "curl", "convoy train", "convoy export"),
)


class Step(NamedTuple):
    """A command, and what the page shows after the last of its block."""

    command: str
    shown: str


def steps() -> list[Step]:
    """The page's commands in their order."""
    shown = [(line, one.shown if line == one.commands[-1] else "") for one in blocks(PAGE) for line in one.commands]
    return [Step(*one) for one in shown]


def same_lines(shown: str, printed: str) -> None:
    assert printed.split() == shown.split()


def about_as_right(shown: str, printed: str) -> None:
    pattern = r"^([\d.]+) % (of .* images)"
    (was, of_what), (is_now, of_what_now) = re.findall(pattern, shown)[0], re.findall(pattern, printed)[0]
    assert abs(float(was) - float(is_now)) < 2.5
    assert of_what == of_what_now


def variants(text: str) -> dict[str, float]:
    """The top-1 by file; BF16 is made only where the processor has it."""
    found = re.findall(r"^(\w[\w-]*\.onnx) .*?([\d.]+) %", text, re.MULTILINE)
    return {file: float(percent) for file, percent in found if file != "bf16.onnx"}


def same_proof(shown: str, printed: str) -> None:
    expected, got = variants(shown), variants(printed)
    assert list(got) == list(expected)
    assert all(abs(got[file] - expected[file]) < 2.5 for file in got)
    said = r"^(?:weights|preprocessing|scores|published).*|All of it, drawn: .*|\w+ version 1: \S+,"
    for line in re.findall(said, shown, re.MULTILINE):
        assert line in printed


def published(shown: str, printed: str) -> None:
    assert shown.strip().splitlines()[-1] in printed


def same_class(shown: str, printed: str) -> None:
    pattern = r"\S+\.png │ (\w+) +│ (\d+)"
    assert re.findall(pattern, printed)[0] == re.findall(pattern, shown)[0]


def same_answer(shown: str, printed: str) -> None:
    expected, got = json.loads(shown), json.loads(printed)
    assert got.keys() == expected.keys()
    assert got["timing_ms"].keys() == expected["timing_ms"].keys()
    best, first = got["predictions"][0], expected["predictions"][0]
    assert (best["class_id"], best["label"]) == (first["class_id"], first["label"])
    assert best["score"] == pytest.approx(first["score"], abs=0.1)


CHECKS: dict[str, Callable[[str, str], None]] = {
    "ls": same_lines,
    "python train.py": about_as_right,
    "convoy train": lambda shown, printed: None,  # what is shown after it is the export's
    "convoy export my_net.py": same_proof,
    "convoy export zoo": published,
    "convoy inspect": same_proof,
    "convoy predict": same_class,
    "curl": same_answer,
    "python make_photos.py": lambda shown, printed: None,
}


def typed(command: str, folder: Path, server: Server | None) -> str:
    """What it prints, with this Python and the server's port in the place of the page's."""
    words = command.split()
    if words[0] in ("python", "convoy"):
        words = [sys.executable, *(["-m", "convoy"] if words[0] == "convoy" else []), *words[1:]]
    if command.startswith("convoy predict"):
        assert server is not None
        words += ["--url", f"http://localhost:{server.port}"]
    if words[0] == "curl":
        assert server is not None
        words = ["curl", "--silent", *(word.replace(":8000", f":{server.port}") for word in words[1:])]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "80"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for block in blocks(PAGE):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    return tmp_path


def test_what_the_page_says_happens(folder: Path) -> None:
    assert {one.name for one in folder.iterdir()} == {
        "my_net.py",
        "make_photos.py",
        "labels.txt",
        "train.py",
        "seen.json",
    }
    todo = steps()
    assert all(step.command.startswith(begin) for step, begin in zip(todo, COMMANDS, strict=True))
    served_from = [step.command for step in todo].index("convoy serve --store store &")
    for step in todo[:served_from]:
        check(step, typed(step.command, folder, None))
    assert (folder / "store" / "my_net" / "1" / "report.html").is_file()
    with start_server(store=folder / "store") as server:
        assert "ready: my_net/1" in server.log
        for step in todo[served_from + 1 :]:
            check(step, typed(step.command, folder, server))


def check(step: Step, printed: str) -> None:
    (judge,) = (judge for begin, judge in CHECKS.items() if step.command.startswith(begin))
    judge(step.shown, printed)
