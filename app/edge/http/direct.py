"""A hot route's direct line to its connection, past ASGI's messages.

ASGI passes a body as copies, an answer in two writes, and the news that a client has left only to a task that
waits for it. For a small request each of these costs as much as the inference's own bookkeeping. Where our own
protocol class serves the connection, its requests carry this line among ASGI's extensions; on any other server
there is none, and the routes use plain ASGI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from starlette.types import Scope

from convoy.app.edge.http.replies import Headers, answer_head

EXTENSION = "convoy.direct"


class Connection(Protocol):
    """What a request asks of the connection that it came by: `GuardedProtocol`, most of it by what uvicorn keeps."""

    url: bytes
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    transport: Any
    config: Any

    def has_unread_bytes(self) -> bool: ...

    def on_response_complete(self) -> None: ...


class DirectLine:
    """One request on one connection. Used on the event loop, until the answer is complete."""

    __slots__ = ("_connection", "_cycle", "decorate", "on_client_gone")

    def __init__(self, connection: Connection, cycle: Any) -> None:
        self._connection: Any = connection
        self._cycle = cycle
        # Called once if the client leaves before its answer is complete.
        self.on_client_gone: Callable[[], None] | None = None
        # The gate's headers for an answer of this status; called once, when the answer goes.
        self.decorate: Callable[[int], Headers] = lambda status: []

    @property
    def client_is_gone(self) -> bool:
        return bool(self._cycle.disconnected)

    def has_unread_bytes(self) -> bool:
        """Whether the client has sent what nobody has read yet."""
        return bool(self._connection.has_unread_bytes())

    def hang_up(self) -> None:
        """The call is over. Here the references would go in a circle, which only the garbage collector undoes."""
        self._cycle = self._connection = None
        self.on_client_gone = None
        del self.decorate

    def whole_body(self) -> bytearray | None:
        """The body, if all of it has arrived and nobody has received a part of it; it is the caller's then."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        # A large body has stopped the reading, and only a connection that is read tells that its client has left.
        cycle.flow.resume_reading()
        body: bytearray = cycle.body
        cycle.body = bytearray()
        return body

    def reply(self, status: int, headers: Headers, pieces: Iterable[bytes | memoryview]) -> bool:
        """Send the whole answer in one write; whether it was sent.

        It is not where the client does not read what it already has: then somebody must wait for it, and that is
        the usual way's business. Headers are ours and not checked; `content-length` must be among them.
        """
        cycle, connection = self._cycle, self._connection
        if cycle.flow.write_paused or cycle.response_started or cycle.disconnected:
            return False
        headers = [*headers, *self.decorate(status)]
        if any(name == b"connection" for name, _ in headers):
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers.append((b"connection", b"close"))
        cycle.response_started = cycle.response_complete = True
        connection.transport.write(b"".join((answer_head(status, headers), b"\r\n", *pieces)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            connection.transport.close()
        cycle.on_response()
        return True


def direct_line(scope: Scope) -> DirectLine | None:
    """The request's direct line, where its server has one."""
    extensions = scope.get("extensions")
    return extensions.get(EXTENSION) if extensions else None
