"""Nobody forks a Python process that may have threads: the copy has their locks and not the threads that release them.

In a copy of a process in which gRPC runs, the garbage collector alone waits for ever. A new process is started
(`subprocess`, or `multiprocessing` with "spawn"), or one that never had a thread is copied ("forkserver").
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("app", "export", "loadtest", "models", "tests", "docs", "convoy")  # the last one links to the first four
# Those of `multiprocessing` and of `torch.multiprocessing` that start no process.
HARMLESS = {
    *("active_children", "connection", "cpu_count", "current_process", "get_context", "parent_process"),
    *("resource_tracker", "shared_memory"),
}
COPIES = {
    *("os.fork", "os.forkpty", "pty.fork", "pty.spawn", "posix.fork", "posix.forkpty"),
    *(f"socketserver.{name}" for name in ("ForkingMixIn", "ForkingTCPServer", "ForkingUDPServer")),
}
# One of these words stands in every file that starts a process in such a way.
WORDS = re.compile("fork|pty|multiprocessing|ProcessPoolExecutor|DataLoader|preexec_fn", re.IGNORECASE)
# A program that forks to see that the copy is told what to do instead: what its users do.
ON_PURPOSE = {"tests/e2e/test_python_engine.py", "tests/test_processes.py"}


def forks(text: str) -> Iterator[str]:
    """What starts a process by a fork, or by a context of `multiprocessing` that is not named; each by its line."""
    if not WORDS.search(text):
        return
    tree = ast.parse(text)
    names = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = _full_name(node, names)
            module, _, last = name.rpartition(".")
            if name in COPIES:
                yield f"{node.lineno}: {name}"
            elif module in ("multiprocessing", "torch.multiprocessing") and last not in HARMLESS:
                yield f"{node.lineno}: {name}, of the default context"
        elif isinstance(node, ast.Call):
            yield from _in_call(node, _full_name(node.func, names))


def _in_call(call: ast.Call, name: str) -> Iterator[str]:
    given = {word.arg: word.value for word in call.keywords}
    last = name.rpartition(".")[2]
    if last in ("get_context", "set_start_method"):
        (method,) = [*call.args[:1], given.get("method")][:1]
        if not (isinstance(method, ast.Constant) and method.value in ("spawn", "forkserver")):
            yield f'{call.lineno}: {last}() without "spawn" or "forkserver"'
    elif last == "ProcessPoolExecutor" and len(call.args) < 2 and "mp_context" not in given:
        yield f"{call.lineno}: ProcessPoolExecutor() without mp_context"
    elif last == "DataLoader" and "num_workers" in given and "multiprocessing_context" not in given:
        yield f"{call.lineno}: DataLoader() with workers and without multiprocessing_context"
    elif "preexec_fn" in given:
        yield f"{call.lineno}: preexec_fn, which runs in a fork"


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What each imported name means."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)
        elif isinstance(node, ast.Import):
            yield from ((one.asname, one.name) for one in node.names if one.asname)


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    return f"{_full_name(node.value, names)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def test_nothing_is_started_by_a_fork() -> None:
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py" if folder == "convoy" else "**/*.py")):
            place, text = str(path.relative_to(ROOT)), path.read_text()
            found += [f"{place}:{one}" for one in forks(text)]
            if place not in ON_PURPOSE and "os.fork" in text:  # of a program in a string, too
                found.append(f"{place}: os.fork")
    assert not found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor(2)", 1),
        ("import concurrent.futures as cf\ncf.ProcessPoolExecutor(max_workers=2)", 1),
        ("import multiprocessing as mp\nmp.Process(target=print)", 1),
        ("from multiprocessing import Pool as P\nP()", 1),
        ("from torch.multiprocessing import Queue\nQueue()", 1),
        ("import multiprocessing\nmultiprocessing.get_context()", 1),
        ("import multiprocessing\nmultiprocessing.get_context('fork')", 1),
        ("import multiprocessing\nmultiprocessing.get_context(method='fork')", 1),
        ("import multiprocessing\nmultiprocessing.get_context(anything)", 1),
        ("from os import fork as f\nf()", 1),
        ("import os\nchild = os.forkpty()", 1),
        ("import socketserver\nclass A(socketserver.ForkingMixIn): pass", 1),
        ("import subprocess\nsubprocess.run(['true'], preexec_fn=print)", 1),
        ("from torch.utils.data import DataLoader\nDataLoader(data, num_workers=2)", 1),
        ("import multiprocessing as mp\nmp.get_context('spawn').Process(target=print)", 0),
        ("from multiprocessing import shared_memory\nshared_memory.SharedMemory()", 0),
        ("import multiprocessing as mp\nProcessPoolExecutor(2, mp.get_context('forkserver'))", 0),
        ("from torch.utils.data import DataLoader\nDataLoader(data)", 0),
    ],
)
def test_each_kind_of_fork_is_seen(text: str, count: int) -> None:
    assert len([*forks(text)]) == count


def test_a_library_that_forks_the_tests_process_fails_the_test(tmp_path: Path) -> None:
    """Whatever the names that lead there, as the suite's own `conftest.py` sees it."""
    test = "import os\ndef test_it():\n    if os.fork() == 0:\n        os._exit(0)\n    os.wait()\n"
    (tmp_path / "test_fork.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.no_forks", "-p", "no:cacheprovider", "-W", "error"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout
    assert "a process with threads was forked" in done.stdout


def test_no_test_imports_openvino_by_itself() -> None:
    """Its telemetry forks the process; `load_openvino` leaves it out."""
    names = re.compile(r"^\s*(import openvino\b|from openvino\b|.*importorskip\(.openvino)", re.MULTILINE)
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "test_processes.py"]
    assert [str(path) for path in paths if names.search(path.read_text())] == []
