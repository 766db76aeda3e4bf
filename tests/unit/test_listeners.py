"""The listeners: what the gRPC port costs before it is needed and how it ends, and connections that come together."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from convoy.app.grpc.opening import GrpcHost
from convoy.app.http.connection import GuardedProtocol
from convoy.app.server.acceptor import Acceptor, ConnectionLimits
from convoy.app.server.http_server import HttpServer, take_port
from convoy.models.errors import JobError, UsageError


def test_starting_a_server_does_not_wait_for_grpc_and_leaves_no_half_of_numpy_to_threads() -> None:
    modules = ("grpc", "tritonclient", "numpy.ma")
    script = f"import convoy.app.server.main, sys; print([name in sys.modules for name in {modules}])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[False, False, True]"


def test_a_port_that_is_taken_is_a_wrong_call_and_the_library_can_take_one_that_is_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf":{port} .*--grpc-port"):
            take_port("127.0.0.1", port)
    with take_port("127.0.0.1", 0) as holder, socket.socket() as library:
        library.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        library.bind(holder.getsockname())
        library.listen()


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which this process would be ended beside a thread that hangs, as another test may leave one."""
    codes: list[int] = []
    monkeypatch.setattr("convoy.app.grpc.opening.end_if_held_up", codes.append)
    return codes


class Library:
    """A gRPC server whose library is there when `is_loaded` is set, and that loses its port to `thief`.

    `start_turns`: so many turns of the loop are between the beginning of its start and the end of it.
    """

    def __init__(self, *, is_loaded: bool = False, thief: str = "", bug: str = "", start_turns: int = 0) -> None:
        self.is_loaded = asyncio.Event()
        self.is_starting = asyncio.Event()
        self._start_turns = start_turns
        if is_loaded:
            self.is_loaded.set()
        self.steps: list[str] = []
        self._thief, self._bug = thief, bug

    async def make(self) -> Library:
        self.steps.append("loading")
        await self.is_loaded.wait()
        if self._bug:
            raise ImportError(self._bug)
        return self

    async def start(self, host: str, port: int) -> None:
        if self._thief:
            raise RuntimeError(self._thief)
        self.is_starting.set()
        for _ in range(self._start_turns):
            await asyncio.sleep(0)
        self.steps.append("started")

    async def stop(self, grace_s: float) -> None:
        self.steps.append("stopped")


class Unused(Acceptor):
    """Accepts nothing; `then` is called soon after it is opened."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self._then = then

    def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        asyncio.get_running_loop().call_later(0.01, self._then)

    def close(self) -> None:
        pass


async def unasked(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody asks this server")


def serve(library: Library, when_http_is_open: Callable[[HttpServer], None]) -> tuple[int, socket.socket]:
    """The exit code of a server that does so, and the socket that held its port."""

    async def scene() -> int:
        http = HttpServer(unasked, GuardedProtocol, Unused(lambda: when_http_is_open(http)), lifespan="off")
        async with asyncio.timeout(60):
            code = await GrpcHost(holder, library.make).serve_beside(http)
        library.is_loaded.set()
        await asyncio.sleep(0.01)
        return code

    holder = take_port("127.0.0.1", 0)
    return asyncio.run(scene()), holder


@pytest.mark.parametrize(
    ("library", "code", "steps", "words"),
    [
        ({}, 0, ["loading"], ""),  # the server ends before the library is there
        ({"is_loaded": True}, 0, ["loading", "started", "stopped"], ""),
        (
            {"is_loaded": True, "thief": "somebody has it"},
            UsageError.exit_code,
            ["loading"],
            "(somebody has it); choose another with --grpc-port",
        ),
        ({"is_loaded": True, "bug": "a broken wheel"}, JobError.exit_code, ["loading"], "--grpc-port -1"),
    ],
)
def test_the_listener_ends_with_the_server_and_the_server_where_it_has_none(
    library: dict[str, Any], code: int, steps: list[str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = Library(**library)
    ended, holder = serve(given, (lambda http: None) if words else HttpServer.stop)
    assert (ended, given.steps, holder.fileno()) == (code, steps, -1)
    told = [record for record in caplog.records if record.levelno >= logging.CRITICAL]
    assert [words in record.getMessage() for record in told] == [True] * bool(words)
    assert library.get("bug", "") in str(told and told[0].exc_info)


def test_a_listener_that_is_just_opening_opens_whole_and_is_stopped() -> None:
    async def scene() -> list[str]:
        library = Library(is_loaded=True, start_turns=20)
        host = GrpcHost(holder, library.make)
        http = HttpServer(unasked, GuardedProtocol, Unused(), lifespan="off")
        closing = asyncio.ensure_future(_close_when(library.is_starting, host, http))
        async with asyncio.timeout(60):
            await host.serve_beside(http)
            await closing
        return library.steps

    holder = take_port("127.0.0.1", 0)
    assert asyncio.run(scene()) == ["loading", "started", "stopped"]


async def _close_when(is_starting: asyncio.Event, host: GrpcHost, http: HttpServer) -> None:
    await is_starting.wait()
    await host.close()
    http.stop()


def test_the_first_exit_code_that_is_not_0_stays(ends: list[int]) -> None:
    library = Library(is_loaded=True)

    def end(http: HttpServer) -> None:
        for code in (2, 1, 0):
            http.stop(code)

    assert serve(library, end)[0] == 2
    assert ends == [2], "and it is the one beside threads that hold up the end"


CLIENTS = 100


def test_those_who_connect_together_do_not_wait_for_a_turn_of_the_loop_each() -> None:
    async def scenario() -> int:
        """In how many turns all of them have a connection."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=CLIENTS)
        connected = [socket.create_connection(listener.getsockname()) for _ in range(CLIENTS)]
        made: list[asyncio.Protocol] = []

        def make() -> asyncio.Protocol:
            made.append(asyncio.Protocol())
            return made[-1]

        acceptor = Acceptor(listener, ConnectionLimits(max_connections=4), tls=lambda: None)
        acceptor.open(make)
        turns = 0
        while len(made) < CLIENTS:
            await asyncio.sleep(0)
            turns += 1
        acceptor.close()
        for one in connected:
            one.close()
        return turns

    assert asyncio.run(scenario()) < 10
