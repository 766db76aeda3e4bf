"""REGRESSIONS.md names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
_LINE = re.compile(r"- .+: `tests/([\w/]+\.py)::(test_\w+)`")


def test_every_fault_that_was_found_has_its_test() -> None:
    lines = [line for line in (TESTS / "REGRESSIONS.md").read_text().splitlines() if line.startswith("- ")]
    named = {line: _LINE.fullmatch(line) for line in lines}
    assert [line for line, match in named.items() if match is None] == []
    gone = [line for line, match in named.items() if match is not None and match[2] not in _tests(TESTS / match[1])]
    assert gone == [], "name the test that holds the fault now, or bring the old one back"


def _tests(path: Path) -> set[str]:
    """The names of the test functions of this file; none where it is not there."""
    if not path.is_file():
        return set()
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
