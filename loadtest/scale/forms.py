"""The forms that are measured: `convoy serve`, and Ray Serve with its proxies, as a user would start them.

Ray's are started from the command line, with `convoy.ray:build_app`, in a folder of their own.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from convoy.loadtest.scale.processes import MARK, end_marked
from convoy.models.errors import JobError

_READY_WITHIN_S = 120.0
# What docs/ray.md tells people to set on every node.
FAST = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "10",
}
# HAProxy can send again only what had come whole before it passed anything on. Ray has no variable for that option; it
# writes this one's value into HAProxy's file as it is, under `defaults`.
WHOLE_BODIES = {
    "RAY_SERVE_HAPROXY_RETRY_ON": f"{FAST['RAY_SERVE_HAPROXY_RETRY_ON']}\n    option http-buffer-request",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(1 << 20),
}
LEAN = {"RAY_SERVE_HAPROXY_METRICS_ENABLED": "0", "RAY_SERVE_HAPROXY_NBTHREAD": "2"}
# By a time-out of Ray's, which only its ASGI heeds, a request goes that way.
_BY_ASGI = (("x-request-timeout-seconds", "60"),)


@dataclass(frozen=True, slots=True)
class ScaleForm:
    """A form, and what its requests say beside their bodies."""

    name: str
    title: str
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ScaleStart:
    """What is started once, for the forms that can be asked of it. `env` None: no Ray."""

    forms: tuple[ScaleForm, ...]
    env: Mapping[str, str] | None


PLAIN = ScaleForm("plain", "`convoy serve`")
STARTS = (
    ScaleStart((PLAIN,), None),
    ScaleStart((ScaleForm("python", "Ray's Python proxy"),), {}),
    ScaleStart(
        (
            ScaleForm("asgi", "Ray's HAProxy, Ray's ASGI", _BY_ASGI),
            ScaleForm("direct", "Ray's HAProxy, the direct way"),
        ),
        FAST,
    ),
    ScaleStart((ScaleForm("lean", "the same, HAProxy without metrics, 2 threads"),), FAST | LEAN),
)
FORMS = tuple(form for start in STARTS for form in start.forms)


@dataclass(frozen=True, slots=True)
class Standing:
    """A form that answers at `url`; its processes have `mark` in their environment."""

    url: str
    mark: str


@contextmanager
def standing(start: ScaleStart, store: Path) -> Iterator[Standing]:
    """Started, ready, and ended afterwards with all that it has started.

    Raises JobError where it does not come up; the log is in the error.
    """
    mark, port = uuid.uuid4().hex, free_port()
    # A short path: Ray puts sockets into it, whose names have a limit.
    folder = Path(tempfile.mkdtemp(prefix="cv", dir="/tmp"))
    env = environment(folder, mark, start.env or {})
    # Since 2.60 a head that `ray start` began wants a token from whoever comes.
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    log = folder / "log"
    try:
        with log.open("wb") as output:
            for command, is_last in _commands(start, store, port, folder):
                process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
                if not is_last and process.wait(_READY_WITHIN_S):
                    raise _did_not_come_up(command[0], log)
        _await_ready(f"http://127.0.0.1:{port}", process, log)
        yield Standing(f"http://127.0.0.1:{port}", mark)
    finally:
        end_marked(mark)
        shutil.rmtree(folder, ignore_errors=True)


def environment(folder: Path, mark: str, more: Mapping[str, str]) -> dict[str, str]:
    """For a cluster of Ray's that shares neither files nor ports with any other on this machine."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CONVOY_"))}
    own |= {MARK: mark, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    own |= {f"RAY_SERVE_HAPROXY_{name}": str(folder / "ha" / path) for name, path in _HAPROXY_FILES.items()}
    own |= {name: str(free_port()) for name in _OWN_PORTS}
    return own | {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2", **more}


def free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


_HAPROXY_FILES = {
    "CONFIG_FILE_LOC": "haproxy.cfg",
    "SOCKET_PATH": "admin.sock",
    "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "server-state",
    "METRICS_SOCKET_PATH": "metrics.sock",
}
_OWN_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)


def _commands(start: ScaleStart, store: Path, port: int, folder: Path) -> Iterator[tuple[list[str], bool]]:
    """One after the other; only the last one stays."""
    place = str(store.absolute())
    if start.env is None:
        serve = [sys.executable, "-P", "-m", "convoy", "serve", "--host", "127.0.0.1", "--port", str(port)]
        yield [*serve, "--grpc-port", "-1", "--threads", "1", "--engine", "cpu", "--store", place], True
        return
    programs, head_port = Path(sys.executable).parent, free_port()
    head = ["start", "--head", "--port", str(head_port), "--num-cpus", "4", "--include-dashboard", "false"]
    yield [str(programs / "ray"), *head, "--object-store-memory", "80000000", "--disable-usage-stats"], False
    application = {
        "name": "convoy",
        "route_prefix": "/",
        "import_path": "convoy.ray:build_app",
        "args": {"store": place, "engine": "cpu", "threads": 1},
    }
    config = folder / "config.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}))
    yield [str(programs / "serve"), "run", "--address", f"127.0.0.1:{head_port}", str(config)], True


def _did_not_come_up(what: str, log: Path) -> JobError:
    return JobError(f"{what} did not come up: {log.read_text(errors='replace')[-3000:]}")


def _await_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while True:
        try:
            if httpx.get(f"{url}/v2/health/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise _did_not_come_up(url, log)
        time.sleep(0.1)
