"""The walls of the house: who may import whom, and what is never imported.

models <- convoy.app.engines <- export      convoy.app.scheduling <- nothing of ours
convoy.app.core -> engines, scheduling      convoy.app.edge -> core      loadtest -> scheduling and the fake engine
convoy.app.processes -> edge (the edge process, and no engine), core (the core process), next to nothing (the supervisor)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("app", "export", "models", "loadtest", "convoy", "tests")
# Rooms inside `models` that train; everything else there is vocabulary.
TRAINING = (
    "convoy.models.zoo",
    "convoy.models.datasets",
    "convoy.models.train",
    "convoy.models.train_command",
    "convoy.models.fit",
    "convoy.models.augment",
)
VOCABULARY_LIBRARIES = {"numpy", "PIL", "safetensors"}


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("app", "export", "models", "loadtest"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imports(path: Path) -> set[str]:
    """Every module a file imports, wherever in the file; type-checking imports do not run and do not count."""
    tree = ast.parse(path.read_text())
    only_typing = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in only_typing:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def in_room(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if in_room(name, *OURS)}


def in_app(name: str) -> bool:
    return name.startswith("app.")


ALL = dict(modules())
# What makes a process of it all: the single one, and the options of every kind.
HOSTS = ("convoy.app.main", "convoy.app.settings")
# The `python -m` doors lead to the command, which leads everywhere.
ROOMS = {name: path for name, path in ALL.items() if not name.endswith("__main__")}


def allowed(name: str) -> tuple[str, ...]:
    """What a module may import of ours."""
    if in_room(name, "models"):
        return ("models",)
    if in_room(name, "convoy.app.scheduling"):
        return ("convoy.app.scheduling",)
    if in_room(name, "convoy.app.engines"):
        return ("models", "convoy.app.engines")
    if in_room(name, "convoy.app.edge"):
        return ("models", *(room for room in ALL if in_app(room) and not in_room(room, "convoy.app.processes", *HOSTS)))
    if in_room(name, "convoy.app.processes", *HOSTS):
        return ("models", "app")
    if in_room(name, "app"):
        return (
            "models",
            *(r for r in ALL if in_app(r) and not in_room(r, "convoy.app.edge", "convoy.app.processes", *HOSTS)),
        )
    if in_room(name, "export"):
        return ("models", "convoy.app.engines", "export")
    if in_room(name, "convoy.loadtest.peers.bare"):
        # The bound that a server is held against is made of that server's own parts.
        return ("models", "convoy.app.engines", "loadtest")
    return ("convoy.models.errors", "convoy.app.scheduling", "convoy.app.engines.fake", "loadtest")


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_a_room_imports_only_what_its_walls_allow(name: str) -> None:
    packages = {"app", "models", "convoy.app.engines", "convoy.app.scheduling"}
    wrong = {used for used in ours(ROOMS[name]) if not in_room(used, *allowed(name)) and used not in packages}
    assert not wrong


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_torch_stays_in_training_and_in_the_child_of_export(name: str) -> None:
    uses_torch = any(in_room(used, "torch", "torchvision") for used in imports(ROOMS[name]))
    assert not uses_torch or in_room(name, *TRAINING, "convoy.export.sources.torch_child")


@pytest.mark.parametrize(
    "name", sorted(name for name in ROOMS if in_room(name, "models") and not in_room(name, *TRAINING))
)
def test_the_vocabulary_needs_no_library_but_its_three(name: str) -> None:
    import sys

    roots = {used.partition(".")[0] for used in imports(ROOMS[name])}
    assert roots - set(sys.stdlib_module_names) - set(OURS) <= VOCABULARY_LIBRARIES


def test_the_policy_knows_no_clock_no_await_and_no_io() -> None:
    forbidden = {"time", "asyncio", "threading", "os", "io", "socket", "logging", "random"}
    pure = {name for name in ROOMS if in_room(name, "convoy.app.scheduling")} - {
        "convoy.app.scheduling.scheduler",
        "convoy.app.scheduling.slab",
    }
    assert "convoy.app.scheduling.policy" in pure
    for name in pure:
        assert not forbidden & {used.partition(".")[0] for used in imports(ROOMS[name])}


def closure(name: str) -> set[str]:
    """A module of ours and every one that is imported with it."""
    found, new = {name}, {name}
    while new:
        new = {used for one in new for used in imports(ROOMS[one]) if used in ROOMS} - found
        found |= new
    return found


def test_an_edge_process_imports_no_engine_and_nothing_that_does() -> None:
    inside = closure("convoy.app.processes.edge_process")
    assert "convoy.app.edge.http.predictions" in inside
    assert not [
        one
        for one in inside
        if in_room(
            one, "convoy.app.engines", "convoy.app.core", "convoy.app.lifecycle.catalog", "convoy.app.telemetry.metrics"
        )
    ]
    libraries = {used.partition(".")[0] for one in inside for used in imports(ROOMS[one])}
    assert not libraries & {"fastapi", "onnxruntime", "prometheus_client", "pydantic", "grpc", "tritonclient"}


def test_the_supervisor_needs_nothing_that_could_fail() -> None:
    import sys

    libraries = {
        used.partition(".")[0] for one in closure("convoy.app.processes.supervisor") for used in imports(ROOMS[one])
    }
    assert libraries - set(sys.stdlib_module_names) == {"app", "models"}


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_no_pickle_is_read(name: str) -> None:
    assert not {"pickle", "joblib", "dill", "cloudpickle"} & imports(ROOMS[name])


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_a_module_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(ast.parse(ROOMS[name].read_text())), f"{name} has no docstring"
