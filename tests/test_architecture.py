"""The walls of the house: who may import whom, and what is never imported.

Every import counts, wherever it stands in a file, whether it runs or only helps the type checker. A room is listed
above the rooms that may import it, and the rooms inside of one are rooms of their own. No two modules import each
other, by whatever way round.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODELS, EXPORT, LOADTEST, APP = "convoy.models", "convoy.export", "convoy.loadtest", "convoy.app"
# Rooms inside `models` that train, or read weights for a network; everything else there is vocabulary.
TRAINING = tuple(
    f"{MODELS}.{name}"
    for name in (
        "zoo",
        "annotations",
        "datasets",
        "glyphs",
        "shapes",
        "train",
        "train_command",
        "fit",
        "augment",
        "training",
        "weights",
    )
)
VOCABULARY_LIBRARIES = {"numpy", "PIL", "safetensors", "simplejpeg", "yaml"}


def app(*rooms: str) -> tuple[str, ...]:
    return tuple(f"{APP}.{room}" for room in rooms)


OF_CALLS = ("calls.open_calls", "calls.shared_memory")
SERVED = ("lifecycle", "core", "calls", "protocol", "pictures")
# What each room may import of ours beside itself, from the bottom up. The first row that fits a module counts.
WALLS: dict[str, tuple[str, ...]] = {
    MODELS: (),
    f"{APP}.version": (),
    f"{APP}.server.main": (MODELS, APP),
    f"{APP}.server": (f"{MODELS}.errors", f"{MODELS}.files", f"{MODELS}.tls"),
    f"{APP}.engines.batch": (),
    f"{APP}.scheduling": app("engines.batch"),
    f"{APP}.engines": (MODELS, *app("engines.batch")),
    f"{APP}.loading": (MODELS, *app("engines.batch", "engines")),
    f"{APP}.telemetry": (MODELS, *app("engines.batch", "engines", "scheduling", "version")),
    f"{APP}.lifecycle": (
        MODELS,
        *app("server", "engines.batch", "scheduling", "engines", "loading", "telemetry"),
    ),
    # What a core has of calls: their table, and registered shared memory.
    f"{APP}.calls.open_calls": (MODELS, *app("telemetry")),
    f"{APP}.calls.shared_memory": (MODELS,),
    f"{APP}.core": (
        MODELS,
        *app("server", "scheduling", "engines", "loading", "telemetry", "lifecycle", "version", *OF_CALLS),
    ),
    f"{APP}.calls": (
        MODELS,
        *app("server", "engines.batch", "scheduling", "telemetry", "lifecycle", "core", *OF_CALLS),
    ),
    f"{APP}.protocol": (
        MODELS,
        *app("engines.batch", "scheduling", "telemetry", *SERVED[:3], "calls.shared_memory", "version"),
    ),
    f"{APP}.pictures": (MODELS, *app("engines.batch", "scheduling", "telemetry", *SERVED[:4])),
    # The two wires do not know each other.
    f"{APP}.http": (
        MODELS,
        *app("server", "scheduling", "loading", "telemetry", "version", "calls.shared_memory", *SERVED),
    ),
    f"{APP}.grpc": (MODELS, *app("server", "scheduling", "telemetry", "calls.shared_memory", *SERVED)),
    f"{APP}.config.sources": tuple(f"{MODELS}.{name}" for name in ("errors", "option", "yaml_file")),
    f"{APP}.config": (MODELS, APP),
    f"{APP}.ray": (MODELS, APP),
    f"{APP}.python.values": (MODELS,),
    # It is also packaged alone, as convoy-client: it imports nothing that needs more than httpx and numpy.
    f"{APP}.client": (MODELS, *app("python.values")),
    f"{APP}.commands": (MODELS, APP),
    f"{APP}.python": (MODELS, APP),
    f"{APP}.batch": (MODELS, APP),
    f"{APP}.__main__": (MODELS, APP),
    EXPORT: (MODELS, *app("engines.batch", "engines")),
    # The bound that a server is held against is made of that server's own parts.
    f"{LOADTEST}.peers.bare": (MODELS, *app("engines.batch", "engines")),
    LOADTEST: (
        *(f"{MODELS}.{name}" for name in ("checkout", "errors", "option", "page", "tls")),
        *(f"{LOADTEST}.peers.bare", *app("engines.batch", "scheduling", "engines.onnx_session")),
    ),
    "convoy": (MODELS, EXPORT, LOADTEST, APP),
}


# What a wall may allow beside the very rooms that have one: with all of their rooms, or a part of one.
WHOLE = {other for others in WALLS.values() for other in others} - WALLS.keys()


def in_room(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted([*(ROOT / "convoy").glob("*.py"), *(ROOT / "convoy").glob("*/**/*.py")]):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


ALL = dict(modules())
# The `python -m` doors lead to the command, which leads everywhere.
ROOMS = {name: path for name, path in ALL.items() if not name.endswith("__main__")}
PACKAGES = {name for name, path in ALL.items() if path.name == "__init__.py"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module a file imports, and every name that it takes from one."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


@cache
def uses(name: str) -> frozenset[str]:
    """The modules of ours that a module imports; a package only where something that it defines itself is taken."""
    found = imports(ROOMS[name])
    inside = {f"{package}.{one.rpartition('.')[2]}" for one in found for package in [one.rpartition(".")[0]]}
    return frozenset(used for used in found | inside if used in ROOMS and used not in PACKAGES) - {name}


def room_of(name: str) -> str:
    return next(room for room in WALLS if in_room(name, room))


def may_import(name: str, used: str) -> bool:
    room = room_of(name)
    return any(in_room(used, other) and other in (*WHOLE, room_of(used)) for other in (room, *WALLS[room]))


def circle() -> list[str]:
    """Modules that import each other, directly or not; empty where none do."""
    try:
        TopologicalSorter({name: uses(name) for name in ROOMS}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_two_modules_import_each_other_whatever_way_round() -> None:
    assert circle() == []


def test_a_room_imports_only_what_its_walls_allow() -> None:
    wrong = [f"{name} -> {used}" for name in ROOMS for used in uses(name) if not may_import(name, used)]
    assert not wrong, "\n".join(sorted(wrong))


def test_rooms_do_not_know_each_other_mutually() -> None:
    """Arrows between rooms go one way."""
    arrows = {(room_of(name), room_of(used)) for name in ROOMS for used in uses(name)}
    assert not [(one, other) for one, other in arrows if one != other and (other, one) in arrows]


def test_everything_is_imported_by_the_name_that_no_project_has() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {used}"
        for path in [*ALL.values(), *(ROOT / "tests").rglob("*.py")]
        for used in imports(path)
        if used in ("app", "export", "models", "loadtest") or in_room(used, "app", "export", "models", "loadtest")
    }
    assert not wrong


def test_torch_stays_in_training_in_the_child_of_export_and_in_what_the_matrix_makes() -> None:
    torch = {name for name in ROOMS if any(in_room(used, "torch", "torchvision") for used in imports(ROOMS[name]))}
    others = f"{EXPORT}.sources.torch_child", f"{EXPORT}.matrix.made"
    assert not [name for name in torch if not in_room(name, *TRAINING, *others)]


def test_the_vocabulary_needs_few_libraries() -> None:
    for name in ROOMS:
        if in_room(name, MODELS) and not in_room(name, *TRAINING):
            roots = {used.partition(".")[0] for used in imports(ROOMS[name])}
            assert roots - set(sys.stdlib_module_names) - {"convoy"} <= VOCABULARY_LIBRARIES, name


def test_the_policy_knows_no_clock_no_await_and_no_io() -> None:
    forbidden = {"time", "asyncio", "threading", "os", "io", "socket", "logging", "random"}
    scheduling = f"{APP}.scheduling"
    pure = {name for name in ROOMS if in_room(name, scheduling)} - {f"{scheduling}.scheduler", f"{scheduling}.slab"}
    assert f"{scheduling}.policy" in pure
    for name in pure:
        assert not forbidden & {used.partition(".")[0] for used in imports(ROOMS[name])}, name


def test_what_is_installed_needs_no_development_program() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        left_out = tomllib.load(file)["tool"]["setuptools"]["packages"]["find"]["exclude"]
    development = [pattern.removesuffix("*") for pattern in left_out]
    assert development
    for one in development:
        assert f"{one}.__main__" in ALL, f"{one} is no program"
    installed = [name for name in ROOMS if not in_room(name, *development)]
    assert not [f"{name} -> {used}" for name in installed for used in uses(name) if in_room(used, *development)]


def calls(path: Path) -> set[str]:
    """The last part of the name of everything that a file calls."""
    functions = [node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    return {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in functions}


def opens_sessions(path: Path) -> bool:
    return bool(calls(path) & {"InferenceSession", "SessionOptions"})


def test_sessions_of_onnx_runtime_are_opened_in_one_place() -> None:
    """So that no session optimises a graph in a way that is known to be wrong."""
    place, peers = f"{APP}.engines.onnx_session", f"{LOADTEST}.peers.beside"
    found = {name for name, path in ROOMS.items() if opens_sessions(path)}
    assert place in found
    # A peer's own process has no Convoy to import.
    assert not {name for name in found - {place} if not in_room(name, peers)}
    helpers = {path.name for path in (ROOT / "tests" / "support").glob("*.py") if opens_sessions(path)}
    assert helpers <= {"fake_onnxruntime.py"}, "these play the library itself"


def test_a_library_does_not_optimise_graphs_by_itself() -> None:
    """Where ONNX Runtime's own tools open a session, nothing can be switched off in it."""
    optimising = {"quant_pre_process": "skip_optimization", "optimize_model": ""}
    for name, path in ROOMS.items():
        for node in ast.walk(parsed(path)):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and called in optimising:
                assert optimising[called] in {keyword.arg for keyword in node.keywords}, f"{name}: {called}"


def test_no_pickle_is_read() -> None:
    for name, path in ROOMS.items():
        assert not {"pickle", "joblib", "dill", "cloudpickle"} & imports(path), name


def test_a_module_says_what_it_is() -> None:
    for name, path in ROOMS.items():
        assert ast.get_docstring(parsed(path)), f"{name} has no docstring"


def test_the_docstring_test_and_the_circle_test_can_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, other in (("one", "two"), ("two", "one")):
        text = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from convoy.app.{other} import X\n"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setitem(ROOMS, f"convoy.app.{name}", tmp_path / f"{name}.py")
    uses.cache_clear()
    try:
        assert {"convoy.app.one", "convoy.app.two"} == set(circle())
    finally:
        uses.cache_clear()
