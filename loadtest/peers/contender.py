"""Everyone who takes part, Convoy among them: where to ask, and how to be started with a setting.

Knows the variables that a peer's script reads and Convoy's command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from convoy.loadtest.peers.forms import FORMS

from convoy.loadtest.bodies import infer_path, predictions_path
from convoy.loadtest.peers.definition import HERE, READY_WITHIN_S, SERVER, Peer, Route
from convoy.loadtest.peers.environment import own_libraries
from convoy.loadtest.peers.network import ServedNetwork, network_of
from convoy.loadtest.peers.results import BodyKind, Setting
from convoy.loadtest.peers.server import Launch, Ports

CONVOY = "convoy"
# Convoy again, asked with requests that are all alike but for their tensors: what ids cost is seen beside it.
WITHOUT_IDS = "without-ids"
_FORM_OF: dict[BodyKind, str] = {
    "binary": "v2-binary",
    "json": "v2-json",
    "grpc": "grpc",
    "ids": "v2-binary-id",
    "ids150k": "v2-binary-id",
    "png": "predictions",
    "jpeg340": "predictions",
    "jpeg500": "predictions",
}
# What peers' scripts import: one way to open the network for all of them.
_BESIDE = HERE / "beside"


@dataclass(frozen=True, slots=True)
class Contender:
    """A server that can be started. `launch` takes the setting, the ports and what is to be served."""

    name: str
    title: str
    routes: Mapping[BodyKind, Route]
    launch: Callable[[Setting, Ports, ServedNetwork], Launch]


def peer_contender(peer: Peer, python: Path, threads: int) -> Contender:
    """The peer's script, run by its own interpreter."""
    libraries = own_libraries(peer, python)

    def launch(setting: Setting, ports: Ports, network: ServedNetwork) -> Launch:
        asked = {
            "PYTHONPATH": str(_BESIDE),
            "PEER_MODEL": str(network.file),
            "PEER_RESIZE_PX": str(network.resize_px),
            "PEER_CROP_PX": str(network.crop_px),
            "PEER_PORT": str(ports.http),
            "PEER_SPARE_PORT": str(ports.spare),
            "PEER_THREADS": str(threads),
            "PEER_MAX_BATCH": str(setting.max_batch),
            "PEER_WINDOW_MS": str(setting.window_ms or 0),
            "PEER_DECODERS": str(setting.decoders),
        }
        script = (peer.folder / SERVER).absolute()
        return Launch((str(python), str(script)), {**peer.environment, **libraries, **asked}, peer.ready_within_s)

    return Contender(peer.name, peer.title, peer.routes, launch)


def convoy_contender(build: Path | None, threads: int, options: tuple[str, ...]) -> Contender:
    """Convoy, the same for every load: a setting is not even looked at. `build` as in `convoy_launch`."""

    def launch(_: Setting, ports: Ports, network: ServedNetwork) -> Launch:
        return convoy_launch(build, network.store, ports, ("--threads", str(threads), *options))

    return Contender(CONVOY, "Convoy", {body: _route(body, form) for body, form in _FORM_OF.items()}, launch)


def without_ids(convoy: Contender) -> Contender:
    """The same server, as somebody to be compared with where requests carry ids."""
    routes = {body: _route(body, "v2-binary") for body, form in _FORM_OF.items() if form == "v2-binary-id"}
    return Contender(WITHOUT_IDS, "Convoy, no ids", routes, convoy.launch)


def _route(body: BodyKind, form: str) -> Route:
    path = predictions_path if form == "predictions" else infer_path
    return Route(FORMS[form], path(network_of(body)))


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
