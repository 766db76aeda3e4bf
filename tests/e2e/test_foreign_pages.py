"""Web pages of somebody else's change nothing on the server's own machine, and read what `--cors-origins` allows."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from convoy.app.config.settings import read_settings
from tests.support.servers import (
    FakeServer,
    Server,
    check_ended,
    rows_request,
    run_convoy,
    start_fake_server,
    start_server,
    wait_until,
)
from tests.support.wire import Wire, check_refused
from tests.support.wire_forms import Region

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

LOAD, UNLOAD = "/v2/repository/models/digits/load", "/v2/repository/models/digits/unload"
OPTIONS = ("--host", "127.0.0.1", "--model-control", "explicit", "--allow-shared-memory")
PLAIN = {"Content-Type": "text/plain"}  # what a form sends without asking first


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = (*OPTIONS, "--allowed-host", "ops.example, Other.example")
    with start_server(*options, "--load-model", "digits") as server:
        yield server


def ask(server: Server, path: str, *headers: tuple[str, str]) -> tuple[int, str]:
    """The status and the error; `{port}` in a header becomes the server's. Each header is sent as it stands."""
    lines = "".join(f"{name}: {value.format(port=server.port)}\r\n" for name, value in (*headers, *PLAIN.items()))
    with Wire(server.port) as wire:
        wire.send(f"POST {path} HTTP/1.1\r\n{lines}Content-Length: 2\r\n\r\n{{}}".encode())
        reply = wire.reply()
    return reply.status, "" if reply.status == 200 else reply.error


OWN = (
    [("Host", "localhost:{port}")],
    [("Host", "127.0.0.1:{port}")],
    [("Host", "[::1]:{port}")],
    [("Host", "127.1.2.3")],
    [("Host", "localhost:{port}"), ("Origin", "http://localhost:{port}")],  # the page that this server shows
    [("Host", "ops.example"), ("Origin", "https://ops.example")],
    [("Host", "localhost"), ("Origin", "https://other.example:8443")],
)
FOREIGN = (
    [("Host", "localhost:{port}"), ("Origin", "https://evil.example")],
    [("Host", "evil.example:{port}")],  # a name that was made to mean 127.0.0.1
    [("Host", "evil.example:{port}"), ("Origin", "http://evil.example:{port}")],
    [("Host", "localhost:{port}"), ("Origin", "null")],  # a page in a frame, or from a file
    [("Host", "localhost:{port}"), ("Origin", "http://localhost:3000")],  # another server's page on this machine
    [("Host", "localhost:{port}"), ("Host", "evil.example")],
    [("Host", "localhost.evil.example")],
    [("Host", "127.0.0.1.evil.example")],
    [("Host", "evil.example@localhost:x")],
    [("Host", "[::1")],
    [("Host", "")],
    [],
)


@pytest.mark.parametrize("headers", OWN, ids=str)
@pytest.mark.parametrize("path", [LOAD, "/v2/systemsharedmemory/unregister"])
def test_own_pages_and_programs_may(server: Server, path: str, headers: list[tuple[str, str]]) -> None:
    assert ask(server, path, *headers) == (200, "")


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_others_may_not(server: Server, headers: list[tuple[str, str]]) -> None:
    region = "/v2/systemsharedmemory/region/stolen/register"
    for path in (LOAD, UNLOAD, region, "/v2/systemsharedmemory/unregister"):
        status, error = ask(server, path, *headers)
        assert (status, "--allowed-host" in error) == (403, True)
    assert server.get("/v2/models/digits/ready").status_code == 200


def test_others_may_still_look(server: Server) -> None:
    """What changes nothing is as before; a browser shows no answer to a page that may not read it."""
    assert server.get("/v2", headers={"Origin": "https://evil.example", "Host": "evil.example"}).status_code == 200


def test_a_page_may_not_register_memory_on_a_server_that_others_reach() -> None:
    with start_server("--allow-shared-memory") as server, closing(Region(b"", 64)) as place:
        path, body = "/v2/systemsharedmemory/region/page/register", {"key": place.key, "byte_size": 64}
        rebound = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
        check_refused(server.post(path, json=body, headers=rebound), 403, code="forbidden")
        # A program on another machine calls the server by whatever name it has there.
        assert server.post(path, json=body, headers={"Host": "gpu-node-7:8000"}).status_code == 200


def test_a_secret_says_enough(tmp_path: Path) -> None:
    for option, name in (("--admin-token-file", "token"), ("--api-key-file", "key")):
        (tmp_path / name).write_text("secret")
        with start_server(*OPTIONS, option, str(tmp_path / name), "--load-model", "digits") as server:
            from_afar = (("Host", "evil.example"), ("Origin", "https://evil.example"))
            assert ask(server, LOAD, *from_afar)[0] == 401
            for path in (LOAD, "/v2/systemsharedmemory/unregister"):
                assert ask(server, path, *from_afar, ("Authorization", "Bearer secret")) == (200, "")


def test_the_option_takes_hosts_with_and_without_ports_and_nothing_else() -> None:
    assert "--allowed-host" in run_convoy("serve", "--help-all").stdout
    allowed = read_settings({"allowed_host": "Box:8000, [2001:db8::1]:80"}).serve_options().allowed_hosts
    assert allowed == ("box", "2001:db8::1")
    for wrong in ("https://ops.example", "a b", "ops.example/path"):
        check_ended(run_convoy("serve", "--allowed-host", wrong), 2, "allowed_host must be names")


# What pages of other origins may read


PAGE, OTHER = "https://app.example", "https://elsewhere.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
ALLOW = "access-control-allow-origin"


@pytest.fixture(scope="module")
def cors_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("open sesame")
    with start_fake_server(cors_origins=f"{PAGE},http://localhost:3000", api_key_file=key) as server:
        yield server


def infer(client: httpx.Client, origin: str | None, key: str = "open sesame") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} | ({"Origin": origin} if origin else {})
    return client.post("/v2/models/rows/infer", json=rows_request(1.0), headers=headers)


def test_a_browser_is_told_beforehand_what_it_may_ask(cors_server: FakeServer) -> None:
    with cors_server.client() as client:
        for path in ("/v2/models/rows/infer", "/predictions/images", "/stats"):
            asked = client.options(path, headers={"Origin": PAGE, **PREFLIGHT})  # without a key
            assert (asked.status_code, asked.headers[ALLOW]) == (200, PAGE)
            assert "POST" in asked.headers["access-control-allow-methods"]
            assert "authorization" in asked.headers["access-control-allow-headers"]
        refused = client.options("/v2/models/rows/infer", headers={"Origin": OTHER, **PREFLIGHT})
        assert (refused.status_code, refused.headers.get(ALLOW)) == (400, None)
        check_refused(refused, 400, "--cors-origins", code="invalid_request")


def test_answers_say_which_page_may_read_them(cors_server: FakeServer) -> None:
    with cors_server.client() as client:
        answers = [infer(client, PAGE), infer(client, PAGE, "wrong"), client.get("/ping", headers={"Origin": PAGE})]
        answers.append(client.post("/nowhere", headers={"Origin": PAGE}))
        assert [answer.status_code for answer in answers] == [200, 401, 200, 401]
        for answer in answers:
            assert answer.headers.get_list(ALLOW) == [PAGE]
            assert answer.headers.get_list("vary") == ["Origin"]
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["x-request-id"]
        for answer in (infer(client, OTHER), infer(client, None)):
            assert answer.status_code == 200
            assert ALLOW not in answer.headers
            assert answer.headers.get_list("vary") == ["Origin"]


def test_without_the_option_nothing_is_said_and_sighup_brings_it(tmp_path: Path) -> None:
    config = tmp_path / "convoy.yaml"
    config.write_text("")
    with start_fake_server(config=config) as server, server.client() as client:
        answer = infer(client, PAGE)
        assert (answer.status_code, answer.headers.get(ALLOW), answer.headers.get("vary")) == (200, None, None)
        assert client.options("/v2/models/rows/infer", headers={"Origin": PAGE, **PREFLIGHT}).status_code == 405
        config.write_text("cors_origins: ['*']")
        server.signal(signal.SIGHUP)
        wait_until(lambda: "reloaded the settings; changed: cors_origins" in server.log_so_far, "the log has it")
        assert infer(client, OTHER).headers[ALLOW] == "*"
        assert client.options("/v2/models/rows/infer", headers={"Origin": OTHER, **PREFLIGHT}).status_code == 200
