"""A web page of somebody else's, shown by a browser on the server's own machine, must change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tritonclient.utils.shared_memory as shm

from convoy.app.config.settings import read_settings
from tests.support.servers import Server, run_convoy, start_server
from tests.support.stores import StoreFolder
from tests.support.wire import Wire

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

LOAD, UNLOAD = "/v2/repository/models/digits/load", "/v2/repository/models/digits/unload"
OPTIONS = ("--host", "127.0.0.1", "--model-control", "explicit", "--allow-shared-memory")
PLAIN = {"Content-Type": "text/plain"}  # what a form sends without asking first


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = StoreFolder(tmp_path_factory.mktemp("store"))
    store.add_digits()
    options = (*OPTIONS, "--allowed-host", "ops.example, Other.example")
    with start_server(*options, "--load-model", "digits", store=store.root) as server:
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
        assert status == 403
        assert "--allowed-host" in error
    assert server.get("/v2/models/digits/ready").status_code == 200


def test_others_may_still_look(server: Server) -> None:
    """What changes nothing is as before; a browser shows no answer to a page that may not read it."""
    assert server.get("/v2", headers={"Origin": "https://evil.example", "Host": "evil.example"}).status_code == 200


def test_a_page_may_not_register_memory_on_a_server_that_others_reach(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(start_server("--allow-shared-memory"))
        region = shm.create_shared_memory_region("page", "/convoy-foreign-page", 64)
        stack.callback(shm.destroy_shared_memory_region, region)
        path, body = "/v2/systemsharedmemory/region/page/register", {"key": "/convoy-foreign-page", "byte_size": 64}
        rebound = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
        assert server.post(path, json=body, headers=rebound).status_code == 403
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
    assert "--allowed-host" in run_convoy("serve", "--help").stdout
    allowed = read_settings({"allowed_host": "Box:8000, [2001:db8::1]:80"}).serve_options().allowed_hosts
    assert allowed == ("box", "2001:db8::1")
    for wrong in ("https://ops.example", "a b", "ops.example/path"):
        refused = run_convoy("serve", "--allowed-host", wrong)
        assert (refused.returncode, "allowed_host must be names" in refused.stderr) == (2, True)
