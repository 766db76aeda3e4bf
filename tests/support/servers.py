"""Servers as their users start them: processes with a port, a log and an exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support.forked import GIVE_BACK, ForkedProcess
from tests.support.stores import ROOT, digit

_LISTENING = re.compile(r"listening on (https?)://[^:]+:(\d+)")
_GRPC_LISTENING = re.compile(r"listening on grpc://[^:]+:(\d+)")
AnyProcess = subprocess.Popen[bytes] | ForkedProcess
START_S = 100.0
STOP_S = 60.0
# How long a log that is written stays the same, and how often that is looked at: a busy server never rests.
_LOG_RESTS_S, _MOST_LOOKS = 0.3, 10


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """What `condition` gives once it is true. Polls; never sleeps longer than it has to."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain until {what}"
        time.sleep(0.01)
    return value


class Server:
    """A running server. `log` is everything it has written so far."""

    def __init__(self, process: AnyProcess, log_path: Path) -> None:
        self.process, self._log_path = process, log_path
        self.port, self.scheme = 0, "http"

    @property
    def log_so_far(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def log(self) -> str:
        """The log once nothing is added for a moment, because a thread of the server writes it. Poll `log_so_far`."""
        before, log = "", self.log_so_far
        for _ in range(_MOST_LOOKS):
            if before == log or self.process.poll() is not None:
                return self.log_so_far
            time.sleep(_LOG_RESTS_S)
            before, log = log, self.log_so_far
        return log

    @property
    def log_in_brief(self) -> str:
        """What a failed test shows: the first stack trace, if there is one, and the end."""
        log = self.log_so_far
        trace = log.find("Traceback")
        return (log[max(0, trace - 300) : trace + 3000] + "\n[...]\n" if trace >= 0 else "") + log[-3000:]

    @property
    def grpc_address(self) -> str:
        """Where gRPC listens; a server that is ready listens there, and its line may come a moment later."""
        found = wait_until(lambda: _GRPC_LISTENING.search(self.log_so_far), "it listens for gRPC")
        return f"127.0.0.1:{found[1]}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def trimmed_bytes(self) -> int:
        """The memory that it holds once its heap has given back what it keeps for later: that much is chance."""
        self.signal(GIVE_BACK)
        self.get("/ping")  # answered by the thread that hears signals first
        return self.rss_bytes

    def client(self, **options: Any) -> httpx.Client:
        """A client that trusts no proxy and waits long enough for a busy machine."""
        # Without `verify=False` each client would first read all the certificates of the world.
        return httpx.Client(base_url=self.url, trust_env=False, verify=False, **{"timeout": 60.0, **options})

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, **options)

    def looked_at(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET, for what is asked again and again: a client of httpx's is not made in no time."""
        if self.scheme == "https":
            answer = self.get(path)
            return answer.status_code, answer.content
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60.0)) as connection:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read()

    def stats(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.looked_at("/stats")[1])
        return document

    def statistics(self, model: str) -> dict[str, Any]:
        """The protocol's statistics of the model's only version."""
        (document,) = self.get(f"/v2/models/{model}/stats").json()["model_stats"]
        assert isinstance(document, dict)
        return document

    def index(self) -> dict[str, tuple[str, str]]:
        """State and reason by `name/version`, or by name alone; empty while there is no core."""
        reply = self.post("/v2/repository/index")
        rows = reply.json() if reply.status_code == 200 else []
        places = ["/".join(filter(None, (row["name"], row.get("version")))) for row in rows]
        return {place: (row.get("state", ""), row.get("reason", "")) for place, row in zip(places, rows, strict=True)}

    def load(self, model: str, /, **config: Any) -> httpx.Response:
        """The answer to being asked to load a model, with these fields of its configuration."""
        body = {"parameters": {"config": json.dumps(config)}} if config else {}
        return self.post(f"/v2/repository/models/{model}/load", json=body)

    def unload(self, model: str) -> httpx.Response:
        return self.post(f"/v2/repository/models/{model}/unload")

    def seven(self, model: str = "digits") -> tuple[str, str]:
        """Which version of a model of digits answers now, and its label of a seven."""
        answer = self.post(f"/predictions/{model}", content=digit("seven")).json()
        return answer["version"], answer["predictions"][0]["label"]

    def shift(self, model: str = "shift") -> tuple[str, float | None]:
        """Which version of a model that adds a number answers now, and that number; neither where none does."""
        reply = self.post(f"/v2/models/{model}/infer", json=rows_request(0.0))
        if reply.status_code != 200:
            return "", None
        document = reply.json()
        return document["model_version"], document["outputs"][0]["data"][0]

    def is_ready(self) -> bool:
        return self.looked_at("/v2/health/ready")[0] == 200

    def is_at_rest(self) -> bool:
        """Whether nothing is open, waits, runs or holds memory."""
        stats = self.stats()
        waiting = sum(model["waiting_samples"] for model in stats["models"])
        return (waiting, *(stats[name] for name in ("open_calls", "unfinished_requests", "inflight_bytes"))) == (0,) * 4

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the server did not end within {timeout_s:g} s; its log:\n{self.log_in_brief}"
            ) from None

    def await_port(self) -> None:
        """Until it listens over HTTP; then `port` says where, and `scheme` how."""

        def place() -> re.Match[str] | None:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            return _LISTENING.search(self.log_so_far)

        found = wait_until(place, "the server listens", START_S)
        self.scheme, self.port = found[1], int(found[2])

    def await_ready(self) -> None:
        """Until it answers requests."""

        def ready() -> bool:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            try:
                return self.is_ready()
            except (httpx.TransportError, HTTPException, OSError):
                return False

        wait_until(ready, f"the server is ready; its log:\n{self.log_in_brief}", START_S)


@contextmanager
def start_server(
    *options: str,
    store: Path | None = None,
    env: dict[str, str] | None = None,
    exit_code: int = 0,
    wait_ready: bool = True,
    clean_log: bool = True,
    rests: bool = False,
    under: tuple[str, ...] = (),
    cwd: Path = ROOT,
) -> Iterator[Server]:
    """`convoy serve` on a free port; ready when the body starts, ended with `exit_code` when it ends.

    `under` is a command that runs it, such as one that takes rights away. The engine is ONNX Runtime's on the CPU,
    unless a test is about the choice: a race of engines costs each start half a second.

    With `clean_log` a stack trace or an admitted bug in the log fails the test, whatever was answered; with `rests`
    something that is still held when the body ends does.
    """
    place = () if store is None else ("--store", str(store))
    command = ["convoy", "serve", "--port", "0", "--grpc-port", "0", *place, *options]
    given = {"CONVOY_ENGINE": "cpu", **(env or {})}
    checks = {"wait_ready": wait_ready, "clean_log": clean_log, "rests": rests}
    with _started(command, given, exit_code, under=under, cwd=cwd, **checks) as server:
        yield server


@contextmanager
def start_fake_server(
    *,
    fake: dict[str, Any] | None = None,
    exit_code: int = 0,
    clean_log: bool = True,
    wait_ready: bool = True,
    rests: bool = False,
    **settings: object,
) -> Iterator[FakeServer]:
    """The real host, core and edge over fake engines; `tests.support.fake_server` says what `fake` may hold.

    `settings` are those of `convoy serve`, such as `max_queue=4`.
    """
    with tempfile.TemporaryDirectory(prefix="convoy-fake-") as switches:
        command = ["tests.support.fake_server"]
        env = {f"CONVOY_{name.upper()}": str(value) for name, value in {"port": 0, "grpc_port": 0, **settings}.items()}
        env |= {"FAKE_OPTIONS": json.dumps(fake or {}), "FAKE_SWITCHES": switches}
        checks = {"wait_ready": wait_ready, "clean_log": clean_log, "rests": rests}
        with _started(command, env, exit_code, switches=Path(switches), **checks) as server:
            assert isinstance(server, FakeServer)
            yield server


class FakeServer(Server):
    """A server over fake engines, with switches that change how they behave from now on."""

    def __init__(self, process: AnyProcess, log_path: Path, switches: Path) -> None:
        super().__init__(process, log_path)
        self._switches = switches

    @property
    def store(self) -> Path:
        """What it serves from: a folder for each version, with nothing in it."""
        return self._switches / "store"

    def switch_on(self, name: str, text: str = "") -> None:
        whole = self._switches / f".{name}"
        whole.write_text(text)
        # The system's own time of a file is some milliseconds old, and a fake that was born in these would not see it.
        now_ns = time.time_ns()
        os.utime(whole, ns=(now_ns, now_ns))
        whole.replace(self._switches / name)

    def switch_off(self, name: str) -> None:
        (self._switches / name).unlink()

    @property
    def runs(self) -> int:
        """The runs that have begun, by the option `tells_runs`."""
        return len((self._switches / "runs").read_bytes())

    def infer(self, *rows: float, model: str = "rows", **options: Any) -> httpx.Response:
        """One request whose samples start with the given values."""
        return self.post(f"/v2/models/{model}/infer", json=rows_request(*rows), **options)


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum over all series that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(server.looked_at("/metrics")[1].decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def peak_bytes(server: Server) -> int:
    """The most memory that the server's process has ever held."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def fresh_peak(server: Server) -> int:
    """The peak of its memory as of now; what it held before is forgotten."""
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    return peak_bytes(server)


@contextmanager
def on_one_cpu() -> Iterator[None]:
    """Who is started meanwhile decodes in one thread, however many processors the machine has."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def rows_request(*rows: float, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """The body for the fake model `rows`: each sample is its value four times."""
    tensor = {"name": "x", "shape": [len(rows), 4], "datatype": "FP32", "data": [[row] * 4 for row in rows]}
    return {"inputs": [tensor]} | ({"parameters": parameters} if parameters else {})


@contextmanager
def _started(
    command: list[str],
    env: dict[str, str],
    exit_code: int,
    *,
    wait_ready: bool,
    clean_log: bool,
    rests: bool,
    under: tuple[str, ...] = (),
    switches: Path | None = None,
    cwd: Path = ROOT,
) -> Iterator[Server]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CONVOY_")}
    with tempfile.TemporaryDirectory(prefix="convoy-log-") as folder:
        log_path = Path(folder) / "log"
        log_path.touch()
        process = _begin(command, under, {**inherited, **env}, log_path, cwd)
        server = Server(process, log_path) if switches is None else FakeServer(process, log_path, switches)
        try:
            server.await_port()
            if wait_ready:
                server.await_ready()
            yield server
            if rests:
                wait_until(server.is_at_rest, "nothing is held after all these requests")
            if process.poll() is None:
                server.signal()
            code = server.wait()
            assert code == exit_code, f"the server ended with {code}, not {exit_code}; its log:\n{server.log_in_brief}"
            if clean_log:
                bad = [word for word in ("Traceback", "this is a bug", "never retrieved") if word in server.log]
                assert not bad, f"{bad} in the log:\n{server.log_in_brief}"
        except BaseException:
            print(f"the server's log:\n{server.log_in_brief}")  # which pytest shows with what failed
            raise
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _begin(command: list[str], under: tuple[str, ...], env: dict[str, str], log_path: Path, cwd: Path) -> AnyProcess:
    """`command` is a module and its arguments."""
    if not under:
        module, *arguments = command
        return ForkedProcess(module, arguments, cwd=cwd, env=env, log_path=log_path)
    line = [*under, sys.executable, "-m", *command]
    with log_path.open("wb") as log:
        return subprocess.Popen(line, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def run_convoy(
    *arguments: str, timeout_s: float = 90.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A `convoy` command that is expected to end by itself. `env` is beside what is inherited."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CONVOY_")}
    environment = {**inherited, "COLUMNS": "200", **(env or {})}
    with tempfile.TemporaryDirectory(prefix="convoy-run-") as folder:
        said, wrong = Path(folder) / "stdout", Path(folder) / "stderr"
        process = ForkedProcess("convoy", arguments, cwd=ROOT, env=environment, log_path=said, error_path=wrong)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(["convoy", *arguments], code, said.read_text(), wrong.read_text())


def check_ended(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """The command ended with this code and without a stack trace, and said all of these words."""
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == code, said
    assert "Traceback" not in said
    missing = [word for word in words if word not in said]
    assert not missing, f"{missing} not in {said!r}"
