"""What a peer is: the folder with its definition, its pinned environment and its server, read into a record.

Knows `peer.toml`. Knows nothing of starting anything.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.loadtest.peers.forms import FORMS, Form

from convoy.loadtest.peers.results import BodyKind, Setting
from convoy.models.errors import UsageError

HERE = Path(__file__).parent
DEFINITION, REQUIREMENTS, SERVER = "peer.toml", "requirements.txt", "serve.py"
# The order in which they are of interest, which is also the table's.
KNOWN = ("mosec", "litserve", "pytriton", "bentoml", "mlserver", "ray")
# Stands in `window_ms` for a framework that decides by itself how long to wait.
OWN_WINDOW = "own"
READY_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Route:
    """Where and how a server takes one kind of body."""

    form: Form
    path: str


@dataclass(frozen=True, slots=True)
class Peer:
    """One server to compare with. `package` is the one in its requirements whose version names it.

    `python` None: any version will do, so the one that runs this is taken. `shared_libpython`: the interpreter must
    have been built with a shared library.
    """

    name: str
    folder: Path
    title: str
    package: str
    note: str
    python: str | None
    shared_libpython: bool
    ready_within_s: float
    routes: Mapping[BodyKind, Route]
    settings: tuple[Setting, ...]
    environment: Mapping[str, str]

    def versions(self) -> dict[str, str]:
        """Of its framework, the engine and numpy, as pinned."""
        pinned = dict(
            line.strip().split("==", 1)
            for line in (self.folder / REQUIREMENTS).read_text().splitlines()
            if "==" in line and not line.startswith("#")
        )
        return {name: pinned[name] for name in (self.package, "onnxruntime", "numpy") if name in pinned}


def find_peers(names: Sequence[str], more: Path | None) -> list[Peer]:
    """The peers of these names, looked for in `more` first. Raises UsageError."""
    return [read_peer(_folder(name, more)) for name in names]


def read_peer(folder: Path) -> Peer:
    """Raises UsageError for a definition that cannot be used."""
    try:
        raw = tomllib.loads((folder / DEFINITION).read_text())
        return Peer(
            name=folder.name,
            folder=folder,
            title=raw["title"],
            package=raw["package"],
            note=raw.get("note", ""),
            python=raw.get("python"),
            shared_libpython=raw.get("shared_libpython", False),
            ready_within_s=float(raw.get("ready_within_s", READY_WITHIN_S)),
            routes={kind: Route(FORMS[body["form"]], body["path"]) for kind, body in raw["bodies"].items()},
            settings=_settings(raw["batching"]),
            environment=raw.get("environment", {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise UsageError(
            f"{folder / DEFINITION} is no peer's definition ({type(error).__name__}: {error}); "
            f"compare it with those in {HERE}"
        ) from error


def _folder(name: str, more: Path | None) -> Path:
    for home in (more, HERE):
        if home is not None and (home / name / DEFINITION).is_file():
            return home / name
    raise UsageError(f"there is no peer {name!r}; known are {', '.join(KNOWN)}, and the folders of --peers-from")


def _settings(batching: dict[str, Any]) -> tuple[Setting, ...]:
    windows = [None if window == OWN_WINDOW else float(window) for window in batching["window_ms"]]
    sizes = [int(size) for size in batching["max_batch"]]
    batched = [(1, 0.0), *((size, window) for size in sizes for window in windows)]
    return tuple(Setting(*one, decoders) for decoders in batching.get("decoders", [0]) for one in batched)
