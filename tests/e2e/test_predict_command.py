"""`convoy predict` as people call it, and the health check that the image runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import Server, check_ended, free_port, run_convoy, start_server
from tests.support.stores import DATA, ROOT

# Many servers are started here, and much is waited for.
pytestmark = pytest.mark.slow

SEVEN = str(DATA / "seven.png")


def test_without_its_key_it_names_options_that_exist(locked: Server, tmp_path: Path) -> None:
    done = run_convoy("predict", "digits", SEVEN, "--url", locked.url)
    check_ended(done, 1, "--api-key-file", "CONVOY_API_KEY_FILE")
    assert done.stdout == ""
    key = tmp_path / "key"
    key.write_text("open sesame")
    for url in (locked.url, f"grpc://{locked.grpc_address}"):
        assert "0.99" in run_convoy("predict", "digits", SEVEN, "--url", url, "--api-key-file", str(key)).stdout


def health_check() -> list[str]:
    """The command that stands in the Dockerfile, for this Python."""
    _, _, rest = (ROOT / "Dockerfile").read_text().partition("HEALTHCHECK")
    _, _, command = rest.partition("CMD ")
    words: list[str] = json.loads(command.splitlines()[0])
    return [sys.executable, *words[1:]]


def check_health(**env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CONVOY_")}
    return subprocess.run(
        health_check(), cwd=ROOT, env={**inherited, **env}, capture_output=True, text=True, timeout=30, check=False
    )


def test_the_health_check_asks_the_port_that_is_served(tmp_path: Path) -> None:
    """Whatever the environment says of a port; here the command line has said that any free one will do."""
    address = tmp_path / "address"
    env = {"CONVOY_ADDRESS_FILE": str(address), "CONVOY_PORT": "1"}
    assert check_health(**env).returncode == 1
    with start_server(env=env) as server:
        assert address.read_text() == f"http://127.0.0.1:{server.port}\n"
        done = check_health(**env)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
    check_ended(check_health(**env), 1, str(server.port))


def test_the_health_check_says_what_is_not_ready() -> None:
    assert "refused" in check_health(CONVOY_PORT=str(free_port())).stdout


def test_a_server_that_cannot_write_its_address_serves_all_the_same(tmp_path: Path) -> None:
    """What is no file stays what it is, and nothing is left lying about."""
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    for place in ("/proc/nowhere/address", str(folder), str(pipe)):
        with start_server("--address-file", place) as server:
            assert f"--address-file {place} cannot be written" in server.log
            assert check_health(CONVOY_PORT=str(server.port)).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]
    assert pipe.is_fifo()


def test_the_health_check_takes_no_nonsense_for_an_address(demo: Server, tmp_path: Path) -> None:
    for told in (b"", b"\xff\xfe", b"nonsense"):
        (tmp_path / "told").write_bytes(told)
        env = {"CONVOY_ADDRESS_FILE": str(tmp_path / "told"), "CONVOY_PORT": str(demo.port)}
        assert check_health(**env).returncode == 0
