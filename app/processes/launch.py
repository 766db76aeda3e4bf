"""From settings to a server of several processes: what must outlive all of them is made here, once.

Then this process becomes the supervisor, with the same number, its parent's child as before.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from convoy.app.edge.options import EdgeOptions
from convoy.app.host import logs
from convoy.app.host.listening import take_port
from convoy.app.processes.balance import BOARD_BYTES
from convoy.app.processes.edge_process import EdgeProfile
from convoy.app.processes.orders import NO_SOCKET, FleetOrders, MemoryPart, command, environment
from convoy.app.settings import MIB, Settings
from convoy.models.errors import UsageError
from convoy.models.records import to_jsonable
from convoy.models.store import Store

CORE_MODULE = "convoy.app.processes.core_process"
SUPERVISOR_MODULE = "convoy.app.processes.supervisor"


def become_supervisor(
    settings: Settings, edges: int, listener: socket.socket, core_module: str = CORE_MODULE
) -> NoReturn:
    """Start the server in `edges` edge processes and one that runs `core_module`. Raises UsageError."""
    settings.signed_only()  # so would it of such a key
    place = settings.store_place()
    if isinstance(place, Path):
        Store.at(place, settings.model_name)  # the core would find out after the port has been announced
    parts = divide(settings.max_inflight_mb * MIB, edges + 1)
    grpc = take_port(settings.host, settings.grpc_port)
    memory = os.memfd_create("convoy-slab", 0)
    try:
        os.ftruncate(memory, parts[-1].offset + parts[-1].nbytes)
    except OSError as error:
        raise UsageError(
            f"the memory for requests cannot be had ({error.strerror}); lower --max-inflight-mb"
        ) from error
    orders = FleetOrders(
        listener_fd=listener.fileno(),
        memory_fd=memory,
        grpc_fd=NO_SOCKET if grpc is None else grpc.fileno(),
        parts=parts,
        scheme=settings.scheme,
        settings=settings.to_json(),
        edge=json.dumps(to_jsonable(edge_profile(settings, edges))),
        core_module=core_module,
        drain_delay_s=settings.drain_delay_s,
        drain_timeout_s=settings.drain_timeout_s,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    for kept in (orders.listener_fd, orders.memory_fd, *((orders.grpc_fd,) if grpc is not None else ())):
        os.set_inheritable(kept, True)
    line, _ = command(SUPERVISOR_MODULE, orders)
    logs.flush()
    os.execve(line[0], line, environment())


def divide(nbytes: int, parts: int) -> tuple[MemoryPart, ...]:
    """Equal parts of whole pages, one after another behind the edges' board, of at most `nbytes` together."""
    each = nbytes // parts // mmap.PAGESIZE * mmap.PAGESIZE
    return tuple(MemoryPart(BOARD_BYTES + number * each, each) for number in range(parts))


def decode_threads(options: EdgeOptions, edges: int) -> int:
    """Of each of so many edges, and of the core, which reads what comes over gRPC: no more than the cores together."""
    return max(1, options.decode_threads // (edges + 1))


def edge_profile(settings: Settings, edges: int) -> EdgeProfile:
    """What each of so many edges is told: its share of what all of them may do at once."""
    options, limits = settings.edge_options(), settings.connection_limits()
    return EdgeProfile(
        options=replace(
            options,
            decode_threads=decode_threads(options, edges),
            max_decoding=math.ceil(options.max_decoding / edges),
            processes=edges,
        ),
        limits=replace(limits, max_connections=math.ceil(limits.max_connections / edges)),
        # A region of shared memory is registered with the core, and only the core can hold it.
        infers=not settings.allow_shared_memory,
        traces=settings.tracing,
    )
