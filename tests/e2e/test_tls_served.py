"""TLS on both wires: who is let in, what a renewed certificate changes, and who asks how."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc as triton
import yaml
from cryptography import x509

import convoy
from convoy.models.errors import Unavailable
from convoy.models.tls import ClientTls
from tests.support.certificates import Authority, Signed
from tests.support.documents import blocks, run_example
from tests.support.grpc_calls import status_of
from tests.support.servers import (
    FakeServer,
    Server,
    check_ended,
    rows_request,
    run_convoy,
    start_fake_server,
    start_server,
)
from tests.support.servers import wait_until as until
from tests.support.stores import ROOT, digit

pytestmark = pytest.mark.slow


class Papers:
    """What an operator has: who signs, the server's certificate, and one of a client's."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.authority = Authority(folder, "own")
        self.server, self.client = self.authority.sign("server"), self.authority.sign("client")
        self.options = {"tls_cert_file": str(self.server.cert), "tls_key_file": str(self.server.key)}
        self.with_clients = {**self.options, "tls_client_ca_file": str(self.authority.file)}
        self.env = {f"CONVOY_{name.upper()}": value for name, value in self.with_clients.items()}

    def context(self, own: Signed | None = None) -> ssl.SSLContext:
        """How a client comes that trusts nobody else."""
        cert, key = (None, None) if own is None else own.pair
        return ClientTls(str(self.authority.file), cert, key).context()


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers(tmp_path)


@contextmanager
def secured(
    papers: Papers, options: dict[str, Any], own: Signed | None = None, **settings: Any
) -> Iterator[tuple[FakeServer, httpx.Client]]:
    """A server that is ready, and a client that trusts it."""
    with (
        start_fake_server(**options, **settings, wait_ready=False) as server,
        trusting(server, papers.context(own)) as client,
    ):
        until(lambda: client.get("/v2/health/ready").status_code == 200, "it is ready")
        yield server, client


def trusting(server: Server, context: ssl.SSLContext) -> httpx.Client:
    return httpx.Client(base_url=server.url, verify=context, trust_env=False, timeout=60.0)


@pytest.fixture
def others(tmp_path: Path) -> Papers:
    """What somebody else has."""
    return Papers(tmp_path / "elsewhere")


def infer(client: httpx.Client) -> list[float]:
    reply = client.post("/v2/models/rows/infer", json=rows_request(1.0, 2.0))
    assert reply.status_code == 200, reply.text
    outputs: list[float] = reply.json()["outputs"][0]["data"]
    return outputs


def by_grpc(server: Server, papers: Papers, own: Signed | None = None) -> str:
    """The status of one call on a connection of its own."""
    credentials = grpc.ssl_channel_credentials(
        papers.authority.file.read_bytes(), *((own.key.read_bytes(), own.cert.read_bytes()) if own else ())
    )
    # Else a client that comes later would be given the connection of the one before.
    alone = [("grpc.use_local_subchannel_pool", 1)]
    address = server.grpc_address
    with triton.InferenceServerClient(address, ssl=True, creds=credentials, channel_args=alone) as client:
        return status_of(client, client_timeout=20)


def shown(server: Server, own: ssl.SSLContext, port: int) -> int:
    """The number of the certificate that a new connection is shown."""
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        own.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        der = wrapped.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


def number(signed: Signed) -> int:
    return x509.load_pem_x509_certificate(signed.cert.read_bytes()).serial_number


def test_every_route_is_behind_it_on_both_wires_and_nobody_else_has_an_answer(papers: Papers, others: Papers) -> None:
    with secured(papers, papers.options) as (server, client):
        answer = infer(client)
        assert client.get("/metrics").status_code == 200
        large = json.dumps(rows_request(1.0, 2.0)).encode() + b" " * (4 << 20)  # many records of TLS
        assert client.post("/v2/models/rows/infer", content=large).json()["outputs"][0]["data"] == answer
        assert by_grpc(server, papers) == "OK"
        assert "listening on https://" in server.log
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/v2", trust_env=False)
        until(lambda: "TLS handshake with a client failed" in server.log_so_far, "the log tells of it")
        with trusting(server, others.context()) as other, pytest.raises(httpx.ConnectError):
            other.get("/v2")
        with pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(grpc.insecure_channel(server.grpc_address)).result(timeout=0.5)
        assert infer(client)


def test_clients_show_a_certificate_where_they_are_asked_for_one(papers: Papers, others: Papers) -> None:
    with secured(papers, papers.with_clients, papers.client) as (server, client):
        assert infer(client)
        for wrong in (None, others.client):
            with trusting(server, papers.context(wrong)) as other, pytest.raises(httpx.TransportError):
                other.get("/v2")
        found = [by_grpc(server, papers, own) for own in (papers.client, None, others.client)]
        assert found == ["OK", "UNAVAILABLE", "UNAVAILABLE"]


def test_a_renewed_certificate_is_shown_from_the_next_connection_on(
    papers: Papers, others: Papers, tmp_path: Path
) -> None:
    renewed, old_number = papers.authority.sign("renewed"), number(papers.server)
    file = tmp_path / "convoy.yaml"
    file.write_text(yaml.safe_dump(papers.with_clients))
    own = papers.context(papers.client)
    with secured(papers, {"config": file}, papers.client) as (server, client):
        grpc_port = int(server.grpc_address.rpartition(":")[2])
        ports = (server.port, server.port, grpc_port)
        assert [shown(server, own, port) for port in ports] == [old_number] * 3

        def hang_up(told: str) -> None:
            before = server.log_so_far.count(told)
            server.signal(signal.SIGHUP)
            until(lambda: server.log_so_far.count(told) > before, f"the log has {told!r}")

        papers.server.key.write_bytes(renewed.key.read_bytes())  # half of a renewal
        hang_up("does not match the first certificate")
        assert [shown(server, own, port) for port in ports] == [old_number] * 3
        papers.server.become(renewed)
        hang_up("new connections use the reloaded certificate")
        until(lambda: all(shown(server, own, port) == number(renewed) for port in (*ports, *ports)), "it is shown")
        assert infer(client), "connections that are open stay"

        # Clients whose signer is no longer trusted are not let in, and no earlier session helps them.
        file.write_text(yaml.safe_dump({**papers.with_clients, "tls_client_ca_file": str(others.authority.file)}))
        hang_up("new connections use the reloaded certificate")

        def is_let_in(who: Signed) -> bool:
            with trusting(server, papers.context(who)) as other:
                try:
                    return other.get("/v2").status_code == 200
                except httpx.TransportError:
                    return False

        until(lambda: [is_let_in(who) for who in (papers.client, others.client) * 2] == [False, True] * 2, "so")
        assert by_grpc(server, papers, others.client) == "OK"
        assert by_grpc(server, papers, papers.client) == "UNAVAILABLE"
        for less in ({}, papers.options):
            file.write_text(yaml.safe_dump(less))
            hang_up("restart the server to turn TLS or client certificates on or off")
        assert is_let_in(others.client)


def test_an_earlier_session_opens_nothing_to_who_is_trusted_no_more(
    papers: Papers, others: Papers, tmp_path: Path
) -> None:
    ca = tmp_path / "clients.pem"
    ca.write_bytes(papers.authority.file.read_bytes())
    own = papers.context(papers.client)
    own.maximum_version = ssl.TLSVersion.TLSv1_2  # its sessions are there as soon as the handshake is over

    def resumed(session: ssl.SSLSession | None) -> tuple[bool | None, ssl.SSLSession | None]:
        with (
            socket.create_connection(("127.0.0.1", server.port)) as plain,
            own.wrap_socket(plain, server_hostname="localhost", session=session) as wrapped,
        ):
            wrapped.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert wrapped.recv(4096).startswith(b"HTTP/1.1 200")
            return wrapped.session_reused, wrapped.session

    asked = {**papers.options, "tls_client_ca_file": str(ca)}
    with secured(papers, asked, papers.client) as (server, _):
        _, session = resumed(None)
        assert resumed(session)[0], "else this shows nothing"
        ca.write_bytes(others.authority.file.read_bytes())
        server.signal(signal.SIGHUP)
        until(lambda: "new connections use the reloaded certificate" in server.log_so_far, "it has been read")
        with pytest.raises(OSError, match=r"(?i)alert|reset|eof"):
            resumed(session)


def silent_clients(server: Server, stack: ExitStack, count: int) -> list[socket.socket]:
    """Clients that connect and say nothing."""
    place = ("127.0.0.1", server.port)
    return [stack.enter_context(socket.create_connection(place, timeout=60)) for _ in range(count)]


def test_a_client_that_never_agrees_on_a_key_is_dropped(papers: Papers) -> None:
    with secured(papers, papers.options, header_timeout_s=2.0) as (server, client), ExitStack() as stack:
        for one in silent_clients(server, stack, 3):
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
        assert infer(client)


def test_no_more_may_be_about_it_than_there_may_be_connections(papers: Papers) -> None:
    """Nobody waits for the time limit here."""
    most = {"header_timeout_s": 300.0, "max_connections": 4}
    with start_fake_server(**papers.options, **most, wait_ready=False) as server, ExitStack() as stack:
        clients = silent_clients(server, stack, 12)

        def turned_away() -> int:
            return len(select.select(clients, [], [], 0)[0])

        until(lambda: turned_away() >= 12 - 4, "all but four have been turned away")
        assert turned_away() == 12 - 4


def test_the_health_check_and_the_address_file_know_of_it(papers: Papers, tmp_path: Path) -> None:
    address = tmp_path / "address"
    with start_server(env={**papers.env, "CONVOY_ADDRESS_FILE": str(address)}, wait_ready=False) as server:
        assert address.read_text() == f"https://127.0.0.1:{server.port}\n"

        def check(**more: str) -> int:
            env = {"CONVOY_ADDRESS_FILE": str(address), **more}
            line = [sys.executable, "-m", "convoy.app.commands.healthcheck"]
            return subprocess.run(line, env=env, check=False, cwd=ROOT, stdout=subprocess.DEVNULL).returncode

        cert, key = papers.client.pair
        until(lambda: check(CONVOY_CLIENT_CERT_FILE=cert, CONVOY_CLIENT_KEY_FILE=key) == 0, "it is healthy")
        assert check() == 1


def test_predict_loadtest_and_the_client_come_with_certificates(papers: Papers, tmp_path: Path) -> None:
    image, (cert, key) = digit("seven"), papers.client.pair
    picture = tmp_path / "digit.png"
    picture.write_bytes(image)
    shows = ("--ca-file", str(papers.authority.file), "--client-cert-file", cert, "--client-key-file", key)
    with start_server(env=papers.env, wait_ready=False) as server:
        with trusting(server, papers.context(papers.client)) as client:
            until(lambda: client.get("/v2/health/ready").status_code == 200, "it is ready")
        for url in (server.url, f"grpcs://{server.grpc_address}"):
            predict = ("predict", "digits", str(picture), "--url", url, "--json")
            check_ended(run_convoy(*predict, *shows), 0, '"label":"7"')
            check_ended(run_convoy(*predict, *shows[:2]), 1, "--client-cert-file")
            check_ended(run_convoy("loadtest", "--url", url, "--duration", "0.5", "--concurrency", "2", *shows), 0)

        (example,) = [one.text for one in blocks(ROOT / "docs" / "client.md") if "https://models" in one.text]
        for name, file in (("ca.crt", papers.authority.file), ("client.crt", cert), ("client.key", key)):
            (tmp_path / name).write_bytes(Path(file).read_bytes())
        for url in (server.url, f"grpcs://{server.grpc_address}"):
            run_example(example.replace("https://models.example:8000", url), tmp_path)
            check_client(url, papers, tmp_path)
        for trust in ({"verify": papers.context(papers.client)}, {"verify": False, "cert": papers.client.pair}):
            with convoy.Client(server.url, **trust) as program:  # type: ignore[arg-type]
                assert program.predict("digits", image).best.label == "7"


def check_client(url: str, papers: Papers, folder: Path) -> None:
    """Both clients come with a certificate and its key, in two files or in one, and without it nobody does."""
    image, trusted = digit("seven"), papers.authority.file
    both = folder / "both.pem"
    both.write_bytes(papers.client.key.read_bytes() + papers.client.cert.read_bytes())
    with convoy.Client(url, verify=trusted, cert=papers.client.pair) as program:
        assert program.predict("digits", image).best.label == "7"

    async def awaited() -> str | None:
        async with convoy.AsyncClient(url, verify=str(trusted), cert=both) as asynchronous:
            return (await asynchronous.predict("digits", image)).best.label

    assert asyncio.run(awaited()) == "7"
    for part, words in (
        ({"verify": trusted}, "certificate .*cert="),
        ({"cert": papers.client.pair}, r"certificate \(--ca-file, verify=\)"),
    ):
        with convoy.Client(url, retries=0, **part) as refused, pytest.raises(Unavailable, match=words):  # type: ignore[arg-type]
            refused.predict("digits", image)
