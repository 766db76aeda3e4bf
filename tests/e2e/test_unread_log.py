"""A log that nobody reads: the server answers as before, drops what does not fit, and says so when it is read again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.servers import STOP_S, wait_until
from tests.support.stores import ROOT

pytestmark = pytest.mark.slow
CALLS = 600
# Lines so long that what waits for a reader is soon more than may wait.
LONG_PATH = "/v2/models/" + "x" * 12_000


class Unread:
    """`convoy serve`, whose outputs are one pipe that nobody reads before `read_on`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url
        self._read = bytearray()
        self._reader = threading.Thread(target=self._read_all, daemon=True)

    def read_on(self) -> None:
        self._reader.start()

    @property
    def log(self) -> str:
        return bytes(self._read).decode()

    def whole_log(self) -> str:
        self._reader.join(STOP_S)
        return self.log

    def _read_all(self) -> None:
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 1 << 20):
            self._read += data

    def dropped(self, client: httpx.Client) -> int:
        found = re.search(r"^convoy_log_lines_dropped_total (\S+)$", client.get("/metrics").text, re.MULTILINE)
        assert found is not None
        return int(float(found[1]))


@contextmanager
def unread(folder: Path, *options: str) -> Iterator[Unread]:
    address = folder / "address"
    called = ["-m", "convoy", "serve", "--port", "0", "--grpc-port", "0", "--access-log", "all", "--engine", "cpu"]
    line = [sys.executable, *called, "--address-file", str(address), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CONVOY_")}
    process = subprocess.Popen(
        line, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        wait_until(lambda: address.exists() or process.poll() is not None, "it listens", 60)
        server = Unread(process, address.read_text().strip())

        def is_ready() -> bool:
            try:
                return httpx.get(f"{server.url}/v2/health/ready", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready, "it is ready", 60)
        yield server
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def flood(client: httpx.Client) -> None:
    for _ in range(CALLS):
        assert client.get(LONG_PATH).status_code == 404
    assert client.get("/v2/health/ready").status_code == 200


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_pipe_that_nobody_reads_stops_nothing_and_tells_what_is_missing(tmp_path: Path, form: str) -> None:
    with (
        unread(tmp_path, "--log-format", form) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        flood(client)
        dropped = server.dropped(client)
        assert dropped > 0
        server.read_on()
        wait_until(lambda: "lines of the log were dropped here" in server.log, "it says what is missing")
        for number in range(50):
            client.get(f"/v2/models/after-{number}")
        wait_until(lambda: "/v2/models/after-49 " in server.log, "the log goes on")
        server.process.terminate()
        assert server.process.wait(STOP_S) == 0
        log = server.whole_log()
    lines = log.splitlines()
    told = [int(count) for count in re.findall(r"(\d+) lines of the log were dropped here", log)]
    kept = sum(LONG_PATH in line for line in lines)
    assert sum(told) >= dropped
    assert kept + sum(told) >= CALLS, "each call has its line or is counted"
    assert "every accepted request was answered" in log
    if form == "json":
        told_of = [json.loads(line) for line in lines]
        assert not any("request_id" in line for line in told_of if "were dropped here" in line["message"])


def test_a_pipe_that_is_never_read_holds_up_no_end(tmp_path: Path) -> None:
    with (
        unread(tmp_path) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        flood(client)
        server.process.terminate()
        assert server.process.wait(STOP_S) == 0


def test_a_reader_that_has_gone_stops_nothing(tmp_path: Path) -> None:
    with (
        unread(tmp_path) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        assert server.process.stdout is not None
        server.process.stdout.close()
        for _ in range(20):
            assert client.get("/v2/models/nobody").status_code == 404
        wait_until(lambda: server.dropped(client) > 0, "what cannot be written is counted")
        server.process.terminate()
        assert server.process.wait(STOP_S) == 0
