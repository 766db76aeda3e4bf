"""What the gRPC port costs a server before it is needed, and what its thread may touch."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from convoy.app.edge.grpc.host import take_port
from convoy.models.errors import UsageError


def test_starting_a_server_does_not_wait_for_grpc_and_leaves_no_half_of_numpy_to_threads() -> None:
    script = (
        "import convoy.app.main, sys; print([name in sys.modules for name in ('grpc', 'tritonclient', 'numpy.ma')])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[False, False, True]"


def test_a_port_that_is_taken_is_a_wrong_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf":{port} .*--grpc-port"):
            take_port("127.0.0.1", port)


def test_a_port_that_is_held_can_be_listened_on_by_the_library() -> None:
    with take_port("127.0.0.1", 0) as holder, socket.socket() as library:
        library.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        library.bind(holder.getsockname())
        library.listen()
