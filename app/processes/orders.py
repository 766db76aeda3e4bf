"""What a process of the server is told when it starts, and how: in memory that it inherits.

Not on the command line and not in the environment, which others may read: there are keys among it. Imports
next to nothing, because the supervisor lives on this and nothing else; what is only passed on stays text.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from convoy import IMPORT_ROOT
from convoy.app.host.logs import LogFormat
from convoy.models.records import from_jsonable, to_jsonable

Orders = TypeVar("Orders")
NO_SOCKET = -1


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """`nbytes` from `offset` of the shared memory; both whole pages."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FleetOrders:
    """To the supervisor; and what it passes on. Descriptors are inherited; there is a part of the memory per edge, and
    one for the core.

    `settings` and `edge` are the JSON of `Settings.to_json` and of `EdgeProfile`. `core_module` is what the core's
    process runs. `grpc_fd` holds the gRPC port, or is NO_SOCKET. `scheme` is what clients speak at the listener.
    """

    listener_fd: int
    memory_fd: int
    grpc_fd: int
    parts: tuple[MemoryPart, ...]
    scheme: str
    settings: str
    edge: str
    core_module: str
    drain_delay_s: float
    drain_timeout_s: float
    log_level: str
    log_format: LogFormat

    @property
    def edges(self) -> int:
        return len(self.parts) - 1


@dataclass(frozen=True, slots=True)
class EdgeOrders:
    """To the edge of this number. `folder` has the core's sockets; no other process ever has or had the same
    `incarnation`.
    """

    fleet: FleetOrders
    parent_pid: int
    control_fd: int
    number: int
    incarnation: int
    folder: str


@dataclass(frozen=True, slots=True)
class CoreOrders:
    """To the core: its own part is the last, the others are the edges'."""

    fleet: FleetOrders
    parent_pid: int
    control_fd: int
    channel_fd: int
    http_fd: int


def channel_socket(folder: str) -> Path:
    """Where the core takes requests whose tensors lie in the shared memory."""
    return Path(folder) / "channel"


def http_socket(folder: str) -> Path:
    """Where the core takes everything else."""
    return Path(folder) / "http"


def command(module: str, orders: object) -> tuple[list[str], int]:
    """The command line of a process of ours, and the descriptor that it must inherit; close it afterwards."""
    descriptor = os.memfd_create("convoy-orders", 0)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(json.dumps(to_jsonable(orders)).encode())
    os.set_inheritable(descriptor, True)
    # Without -P a folder called `convoy` where the user happens to be would be taken for ours.
    return [sys.executable, "-P", "-m", module, str(descriptor)], descriptor


def environment() -> dict[str, str]:
    """Ours, with the place where our modules are."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{IMPORT_ROOT}{os.pathsep}{known}" if known else str(IMPORT_ROOT)}


def own_orders(kind: type[Orders]) -> Orders:
    """What this process was told when it was started."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        file.seek(0)
        return from_jsonable(kind, json.loads(file.read()), "orders")
