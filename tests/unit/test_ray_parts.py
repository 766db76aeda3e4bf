"""What stands between Ray Serve and a core, without Ray: arguments, connections, the application under a prefix."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvicorn.config
from pydantic import ValidationError
from starlette.types import Message, Receive, Scope, Send
from test_connection import ROWS, House, rows, shift
from test_connection import workshop as workshop  # a fixture

from convoy.app.http.connection import guarded_protocol
from convoy.app.ray.arguments import AppArguments, replica_settings
from convoy.app.ray.connections import HotPaths, Ingress, Ways, take_connections
from convoy.app.server.acceptor import ConnectionLimits
from convoy.models.errors import UsageError
from tests.support.fake_devices import Workshop, in_workshop, until


def test_options_of_the_server_are_arguments_and_reach_a_replica(tmp_path: Path) -> None:
    given = AppArguments.model_validate({"store": str(tmp_path), "max_batch": "8", "engine": "cpu", "num_cpus": "2"})
    settings = replica_settings(given.server_options())
    assert (settings.store, settings.max_batch, settings.engine, settings.threads) == (
        str(tmp_path),
        8,
        "cpu",
        2,
    )
    assert settings.grpc_port == -1


@pytest.mark.parametrize(
    ("given", "threads"), [({"num_cpus": 3}, 3), ({"num_cpus": 3, "threads": 1}, 1), ({"num_cpus": 0}, None)]
)
def test_threads_are_the_cpus_that_ray_sets_aside_unless_they_are_given(
    given: dict[str, Any], threads: int | None
) -> None:
    assert AppArguments.model_validate(given).server_options().get("threads") == threads


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_batch": "-1"}, "--max-batch"),
        ({"engine": "abacus"}, "choose from"),
        ({"min_replicas": 1}, "needs max_replicas"),
        ({"num_replicas": 2, "max_replicas": 3}, "not both"),
        ({"min_replicas": 4, "max_replicas": 3}, "above"),
        ({"router": "random"}, "expected-finish"),
        ({"num_cpus": "many"}, "valid number"),
        *(({name: 1}, f"Ray sets '{name}'") for name in ("port", "grpc_port", "edges", "host")),
        ({"stor": "/models"}, "unknown argument 'stor'; did you mean 'store'?"),
        ({"max_btach": 3}, "unknown argument 'max_btach'; did you mean 'max_batch'?"),
        ({"num_replica": 2}, "num_replicas"),
    ],
)
def test_a_wrong_value_is_an_error_before_anything_is_started(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AppArguments.model_validate(given)
    assert words in str(caught.value)


def test_texts_of_the_command_line_may_be_json() -> None:
    given = AppArguments.model_validate({"resources": '{"a100": 1}', "placement_bundles": '[{"CPU": 1}, {"CPU": 2}]'})
    assert given.resources == {"a100": 1}
    assert given.placement_bundles == [{"CPU": 1}, {"CPU": 2}]


def test_a_store_that_is_on_no_node_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be reachable from every node"):
        replica_settings({"store": str(tmp_path / "away")})


# Connections


@pytest.fixture(autouse=True)
def usual_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))


class Behind(House):
    """A house whose connections Ray's server would make; `serve` is what Ray has in front of the application."""

    def __init__(self, workshop: Workshop, prefix: str = "", root_path: str = "") -> None:
        super().__init__(workshop)
        self.ways = Ways()
        take_connections(guarded_protocol(ConnectionLimits()), HotPaths(self._app, self.hot, self.ways))
        self.ingress = Ingress(self._app, self.ways, _nothing)
        self._prefix = prefix

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            body = await _whole(receive)  # Ray has read it before the application is called
            await self.ingress({**scope, "root_path": prefix}, _once(body), send)

        self._config = uvicorn.Config(
            serve,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            root_path=root_path,
        )
        self._config.load()
        self._kind = self._config.http_protocol_class  # type: ignore[assignment]


async def _nothing() -> None:
    pass


async def _whole(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


def _once(body: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    return receive


@pytest.mark.parametrize("prefix", ["", "/cnn", "/v2"])
def test_the_first_request_teaches_the_prefix_and_all_that_follow_go_direct(workshop: Workshop, prefix: str) -> None:
    async def scenario() -> None:
        house = Behind(workshop, prefix)
        connection = house.connect()
        for number in range(5):
            assert shift(await connection.ask(rows(float(number), path=prefix + ROWS))) == number + 100
        assert (house.ways.by_asgi, house.ways.direct) == (1, 4)

    in_workshop(workshop, scenario)


TIMEOUT = {"x-request-timeout-seconds": "5"}


@pytest.mark.parametrize(
    ("prefix", "root_path", "path", "headers"),
    [
        ("", "", ROWS, TIMEOUT),
        ("/cnn", "", "/cnn" + ROWS, TIMEOUT),
        ("/cnn", "", ROWS, {}),
        ("", "/all", ROWS, {}),
    ],
)
def test_requests_without_the_prefix_or_with_rays_timeout_or_under_a_root_go_by_ray(
    workshop: Workshop, prefix: str, root_path: str, path: str, headers: dict[str, str]
) -> None:
    async def scenario() -> None:
        house = Behind(workshop, prefix, root_path)
        house.ways.prefix = prefix
        reply = await house.connect().ask(rows(7.0, path=path, headers=headers))
        assert (house.ways.by_asgi, house.ways.direct) == (1, 0)
        assert not headers or shift(reply) == 107

    in_workshop(workshop, scenario)


def test_a_connection_on_another_loop_than_the_core_is_rays_own(workshop: Workshop) -> None:
    async def scenario() -> None:
        house = Behind(workshop)
        make = uvicorn.config.HTTP_PROTOCOLS["auto"]

        async def elsewhere() -> str:
            return type(make(config=house._config, server_state=house.state, app_state={})).__module__  # type: ignore[operator]

        here, there = await elsewhere(), await asyncio.to_thread(asyncio.run, elsewhere())
        assert here == "convoy.app.ray.connections"
        assert there.startswith("uvicorn.")

    in_workshop(workshop, scenario)


def test_a_server_that_ends_lets_a_direct_call_finish(workshop: Workshop) -> None:
    async def scenario() -> None:
        house = Behind(workshop)
        house.ways.prefix = ""
        connection = house.connect()
        request = rows(3.0)
        connection.send(request[:-4])
        await until(lambda: house.core.open_calls == 1)
        connection.protocol.shutdown()
        reply = await connection.ask(request[-4:])
        assert shift(reply) == 103
        assert reply.headers["connection"] == "close"

    in_workshop(workshop, scenario)


def test_an_answer_has_one_id_where_ray_adds_its_own(workshop: Workshop) -> None:
    async def scenario() -> None:
        house = Behind(workshop)
        started: list[Message] = []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)

        scope = {"type": "http", "method": "GET", "path": "/nowhere", "headers": [(b"x-request-id", b"one")]}
        await house.ingress({**scope, "query_string": b"", "root_path": ""}, _once(b""), send)
        assert not [name for name, _ in started[0]["headers"] if name == b"x-request-id"]

    in_workshop(workshop, scenario)
