"""What the gRPC port serves, without a start that waits for the gRPC library.

The library is imported in a thread while the models load, and the listener opens when it is there.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from typing import Any

# The client stubs register dtypes with numpy, and numpy reads that registry when it loads this part of itself, which
# it does at the first median. Both would happen in threads at the same time, and a model would be refused for it.
import numpy.ma  # noqa: F401

from convoy.app.calls.access import ServeOptions
from convoy.app.core import Core
from convoy.app.pictures.decoder import Decoder
from convoy.app.server.http_server import GrpcHost


def grpc_host(
    core: Core, options: ServeOptions, decoder: Decoder, holder: socket.socket | None, *, max_calls: int
) -> GrpcHost:
    """The listener of our services over a core, which is not ready before `GrpcServer` has started."""
    core.listeners_opening += holder is not None

    async def make_server() -> Any:
        library = await asyncio.to_thread(importlib.import_module, "convoy.app.grpc.server")
        return library.GrpcServer(core, options, decoder, max_calls=max_calls)

    return GrpcHost(holder, make_server)
