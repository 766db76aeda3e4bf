"""Everyone who takes part, Convoy among them: where to ask, and how to be started with a setting.

Knows the variables that a peer's script reads and Convoy's command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from convoy.loadtest.peers.definition import HERE, READY_WITHIN_S, SERVER, Peer, Route
from convoy.loadtest.peers.environment import own_libraries
from convoy.loadtest.peers.forms import FORMS
from convoy.loadtest.peers.results import BodyKind, Setting
from convoy.loadtest.peers.server import Launch, Ports

CONVOY = "convoy"
MODEL = "cnn"
# What peers' scripts import: one way to open the network for all of them.
_BESIDE = HERE / "beside"


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that can be started. `launch` takes the setting and the ports."""

    name: str
    title: str
    routes: Mapping[BodyKind, Route]
    launch: Callable[[Setting, Ports], Launch]


def peer_contender(peer: Peer, python: Path, model: Path, threads: int) -> Contender:
    """The peer's script, run by its own interpreter."""
    libraries = own_libraries(peer, python)

    def launch(setting: Setting, ports: Ports) -> Launch:
        asked = {
            "PYTHONPATH": str(_BESIDE),
            "PEER_MODEL": str(model.absolute()),
            "PEER_PORT": str(ports.http),
            "PEER_SPARE_PORT": str(ports.spare),
            "PEER_THREADS": str(threads),
            "PEER_MAX_BATCH": str(setting.max_batch),
            "PEER_WINDOW_MS": str(setting.window_ms or 0),
        }
        script = (peer.folder / SERVER).absolute()
        return Launch((str(python), str(script)), {**peer.environment, **libraries, **asked}, peer.ready_within_s)

    return Contender(peer.name, peer.title, peer.routes, launch)


def convoy_contender(build: Path | None, store: Path, threads: int, options: tuple[str, ...]) -> Contender:
    """Convoy, the same for every load: a setting is not even looked at. `build` as in `convoy_launch`."""
    path = f"/v2/models/{MODEL}/infer"

    def launch(_: Setting, ports: Ports) -> Launch:
        return convoy_launch(build, store, ports, ("--threads", str(threads), *options))

    routes: dict[BodyKind, Route] = {
        "binary": Route(FORMS["v2-binary"], path),
        "json": Route(FORMS["v2-json"], path),
    }
    return Contender(CONVOY, "Convoy", routes, launch)


def convoy_launch(build: Path | None, store: Path, ports: Ports, options: tuple[str, ...]) -> Launch:
    """`convoy serve` with nothing said but where, and `options`.

    `build` is the folder that it is installed in; None: wherever this program comes from.
    """
    where = ("--host", "127.0.0.1", "--port", str(ports.http), "--grpc-port", str(ports.spare))
    serve = ("-m", "convoy", "serve", "--store", str(store.absolute()), *where, *options)
    if build is None:
        return Launch((sys.executable, *serve), {}, READY_WITHIN_S)
    # -P: not what lies in the working directory, which may be a checkout.
    return Launch((sys.executable, "-P", *serve), {"PYTHONPATH": str(build)}, READY_WITHIN_S)
