"""What Convoy relies on of uvicorn's inside, by name: nothing that uvicorn promises, so its releases are bounded.

Before the upper bound in pyproject.toml is raised, these must hold with that release, and the tests of connections,
of slow clients and of the forms on the wire, too.
"""

from __future__ import annotations

import asyncio
import inspect
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

import httptools
import pytest
import uvicorn
from packaging.requirements import Requirement
from starlette.types import Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from convoy.app.http.connection import GuardedProtocol
from convoy.app.http.replies import Reply, send_reply
from convoy.app.server.acceptor import Acceptor
from convoy.app.server.http_server import HttpServer
from tests.support.stores import ROOT
from tests.support.wire import head
from tests.unit.test_connection import Connection

# What a connection of ours changes of uvicorn's, and what it calls there itself.
REPLACED = {
    *("connection_made", "connection_lost", "data_received", "shutdown", "pause_writing", "resume_writing"),
    *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
    *("on_response_complete", "_start_asgi_task"),
}
KEPT_BY_A_CONNECTION = {
    *("config", "loop", "parser", "timeout_keep_alive", "server_state", "connections", "transport", "flow", "client"),
    *("pipeline", "scope", "headers", "expect_100_continue", "cycle"),
}
KEPT_BY_A_CYCLE = {
    *("scope", "flow", "message_event", "on_response", "disconnected", "keep_alive", "waiting_for_100_continue"),
    *("body", "more_body", "response_started", "response_complete", "transport"),
}


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send_reply(send, Reply(200, (b"{}",)))


class Meeting:
    """A connection of uvicorn's own kind or of ours, and what it does with bytes."""

    def __init__(self, kind: type[HttpToolsProtocol] = HttpToolsProtocol) -> None:
        config = uvicorn.Config(answer, http=kind, ws="none", lifespan="off", log_config=None, access_log=False)
        config.load()
        self.state = ServerState()
        loop = asyncio.get_running_loop()
        self.connection = Connection(lambda: kind(config, self.state, {}, _loop=loop))  # type: ignore[arg-type, return-value]
        self.protocol: Any = self.connection.protocol


def missing(thing: object, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not hasattr(thing, name))


def test_a_connection_calls_and_keeps_what_ours_replaces_and_reads() -> None:
    async def scene() -> None:
        met = Meeting()
        assert not missing(met.protocol, REPLACED | KEPT_BY_A_CONNECTION)
        assert not missing(met.protocol.flow, ("write_paused", "read_paused", "pause_reading", "resume_reading"))
        assert met.protocol.connections is met.state.connections == {met.protocol}
        assert met.protocol.client == ("192.0.2.7", 5000)
        met.connection.send(head("/", {"Content-Length": "0"}))
        assert (met.protocol.url, met.protocol.headers) == (b"/", [*met.protocol.scope["headers"]])
        assert not missing(met.protocol.cycle, KEPT_BY_A_CYCLE)
        assert met.protocol.cycle.flow is met.protocol.flow
        assert met.protocol.cycle.on_response == met.protocol.on_response_complete
        assert isinstance(met.protocol.cycle.body, bytearray)
        await met.connection.reply()
        assert met.state.total_requests == 1

    asyncio.run(scene())


def test_everything_that_a_connection_of_ours_replaces_is_uvicorns() -> None:
    own = {
        name for name in vars(GuardedProtocol) if hasattr(asyncio.Protocol, name) or hasattr(HttpToolsProtocol, name)
    }
    assert {name for name in own if callable(getattr(GuardedProtocol, name)) and not name.startswith("__")} == REPLACED


def test_a_request_that_waits_is_in_the_pipeline_newest_first_and_all_begin_in_one_place_which_ours_replaces() -> None:
    """Before uvicorn 0.45 there was no such place, and those that had waited got no answer."""

    async def scene() -> None:
        begun: list[bytes] = []

        class Watched(HttpToolsProtocol):
            def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
                begun.append(cycle.scope["raw_path"])
                super()._start_asgi_task(cycle, app)

        met = Meeting(Watched)
        met.connection.send(b"".join(head(path, {"Content-Length": "0"}) for path in ("/1", "/2", "/3")))
        assert [cycle.scope["path"] for cycle, _ in met.protocol.pipeline] == ["/3", "/2"]
        assert all(app is met.protocol.app for _, app in met.protocol.pipeline)
        assert met.protocol.flow.read_paused
        await met.connection.reply(3)
        assert begun == [b"/1", b"/2", b"/3"]

    asyncio.run(scene())


@pytest.mark.parametrize("kind", [HttpToolsProtocol, GuardedProtocol])
def test_a_cycle_knows_whether_the_client_wants_the_connection_closed(kind: type[HttpToolsProtocol]) -> None:
    """The guard closes by it. Before uvicorn 0.53 it knew so of HTTP/1.0 alone."""

    async def scene() -> None:
        met = Meeting(kind)
        met.connection.send(head("/", {"Content-Length": "0", "Connection": "close"}))
        assert not met.protocol.cycle.keep_alive
        (reply,) = await met.connection.reply()
        assert reply.headers["connection"] == "close"
        assert met.connection.is_closing()

    asyncio.run(scene())


def test_who_asks_behind_a_proxy_is_told_by_the_middleware_around_the_application() -> None:
    config = uvicorn.Config(answer, lifespan="off", log_config=None)
    config.load()
    assert isinstance(config.loaded_app, ProxyHeadersMiddleware)
    hosts = config.loaded_app.trusted_hosts
    assert "127.0.0.1" in hosts
    assert "192.0.2.7" not in hosts
    assert hosts.get_trusted_client_address("198.51.100.9, 127.0.0.1") == ("198.51.100.9", 0)


def test_a_server_calls_what_ours_replaces_and_keeps_what_ours_reads() -> None:
    async def scene() -> None:
        steps: list[str] = []

        class Watched(Acceptor):
            def __init__(self) -> None:
                pass

            def open(self, make_protocol: Callable[[], Any]) -> None:
                steps.append("started")
                assert make_protocol().server_state is server.server_state
                assert not server.server_state.connections
                server.stop()

            def close(self) -> None:
                steps.append("stopping")

        server = HttpServer(answer, GuardedProtocol, Watched(), lifespan="off")
        own = {name for name in vars(HttpServer) if hasattr(uvicorn.Server, name) and not name.startswith("__")}
        assert own == {"capture_signals", "startup", "shutdown"}
        async with asyncio.timeout(60):
            await server.serve(sockets=[])
        assert steps == ["started", "stopping"]

    asyncio.run(scene())
    assert [*inspect.signature(HttpToolsProtocol).parameters] == ["config", "server_state", "app_state", "_loop"]
    assert inspect.signature(FlowControl).bind(None)
    httptools.HttpRequestParser(object()).set_dangerous_leniencies(lenient_data_after_close=True)


def test_the_releases_that_are_allowed_have_an_upper_bound_and_the_one_that_is_pinned_is_among_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (need,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "uvicorn")
    assert any(bound.operator == "<" for bound in need.specifier)
    (pin,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("uvicorn=="))
    assert all(need.specifier.contains(version) for version in (pin.removeprefix("uvicorn=="), uvicorn.__version__))
