"""The server under test: how it is started for each setting, its processes, its store, and what it says of itself.

Knows how to look and how to start and stop. What is done to the server is `faults`; what has to hold is `checks`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.campaign.asks import SHIFT_STEP
from tests.support.servers import Server
from tests.support.stores import ROOT, StoreFolder

READY_S, STOP_S, LOOK_S = 60.0, 40.0, 3.0
# A few for the listeners, the lines between the processes and the engines; the rest for some twenty connections.
FEW_DESCRIPTORS = 64
SMALL_DISK = "256k"
_ROLES = ("core_process", "edge_process")
Calls = Counter[tuple[str, str, str]]  # by protocol, model and outcome
Readers = Counter[tuple[str, str]]  # by reader and model
# Metrics that count answered requests, and their word for it.
_ANSWERED = {
    "convoy_requests_total": "success",
    "convoy_call_duration_seconds_count": "answered",
    "nv_inference_request_success": "",
}
_STATISTICS = "/v2/models/stats"
READERS = (*_ANSWERED, _STATISTICS)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What one process holds. Memory is its own: the shared pages of the slab are left out."""

    pid: int
    role: str
    own_bytes: int
    descriptors: int
    threads: int


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def can_mount() -> bool:
    """Whether a disk of a few KiB can be had for one process: a mount namespace of its own."""
    with suppress(OSError):
        asked = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0
    return False


class Field:
    """One server at a time, on the same ports all along."""

    def __init__(self, folder: Path, edges: int, http_port: int, grpc_port: int) -> None:
        self.folder, self.edges = folder, edges
        self.http_port, self.grpc_port = http_port, grpc_port
        self.setting = ""
        self.server: Server | None = None
        self.has_small_disk = can_mount()
        self.store = StoreFolder(folder / f"store-{edges}")
        self.shift_versions = {1}  # the sound ones
        self.ever: dict[int, float] = {}  # every process that was seen, and when it was made
        self.logs: list[Path] = []
        self._fill_store()

    # Starting and stopping

    def start(self, setting: str) -> None:
        """A new server, ready. Raises AssertionError when it does not come up."""
        self.setting = setting
        log = self.folder / f"log-{self.edges}-{len(self.logs)}.txt"
        disk = self.folder / "disk"
        disk.mkdir(exist_ok=True)
        (self.folder / "cache").mkdir(exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CONVOY_")}
        place = disk if setting == "disk" else self.folder / "cache"
        inherited |= {"XDG_CACHE_HOME": str(place), "TMPDIR": str(place)}
        command = self._command(setting)
        if setting == "disk":
            limit = f"mount -t tmpfs -o size={SMALL_DISK} none {disk}" if self.has_small_disk else "ulimit -f 64"
            shell = f'{limit} && exec "$@" >{disk}/log 2>&1'
            namespace = ["unshare", "-m"] if self.has_small_disk else []
            command = [*namespace, "sh", "-c", shell, "sh", *command]
        elif setting == "descriptors":
            command = ["sh", "-c", f'ulimit -n {FEW_DESCRIPTORS} && exec "$@"', "sh", *command]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=inherited, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        if setting == "disk":
            log = self.on_small_disk(process.pid, disk / "log")
        self.logs.append(log)
        self.server = Server(process, log)
        self.server.port = self.http_port
        self.wait(lambda: self.is_ready(), "it is ready", READY_S)
        self.processes()

    def on_small_disk(self, pid: int, path: Path) -> Path:
        """The same path as that process sees it."""
        return Path(f"/proc/{pid}/root{path}") if self.has_small_disk else path

    def _command(self, setting: str) -> list[str]:
        control = {"poll": ("poll", "--poll-interval-s", "0.3"), "explicit": ("explicit", "--load-model", "*")}
        return [
            *(sys.executable, "-m", "convoy", "serve", "--host", "127.0.0.1", "--port", str(self.http_port)),
            *("--grpc-port", str(self.grpc_port), "--store", str(self.store.root)),
            *("--allow-shared-memory", "--max-body-mb", "4", "--max-inflight-mb", "48", "--max-queue", "64"),
            *("--drain-timeout-s", "10", "--access-log", "all" if setting == "disk" else "errors"),
            *("--model-control", *control.get(setting, ("none",))),
        ]

    def stop(self) -> int:
        """SIGTERM; the exit code. Raises AssertionError when it does not end."""
        server = self.running()
        server.signal(signal.SIGTERM)
        code = server.wait(STOP_S)
        self.server = None
        return code

    def kill(self) -> None:
        """The end of it, whatever state it is in."""
        if self.server is None:
            return
        for one in self.processes():
            with suppress(psutil.Error):
                psutil.Process(one.pid).send_signal(signal.SIGCONT)
        if self.server.process.poll() is None:
            self.server.process.kill()
        self.server.process.wait()
        self.server = None

    def running(self) -> Server:
        """The server. Raises AssertionError when there is none, with the end of its log."""
        assert self.server is not None, "there is no server"
        return self.server

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float) -> None:
        """Until it is so. Raises AssertionError after the time, or when the server has ended."""
        until_s = time.monotonic() + timeout_s
        while not condition():
            code = self.running().process.poll()
            assert code is None, f"the server ended with {code} while waiting until {what}; {self.last_words()}"
            assert time.monotonic() < until_s, f"waited {timeout_s:g} s in vain until {what}; {self.last_words()}"
            time.sleep(0.02)

    def last_words(self) -> str:
        """The end of the log, in one line."""
        try:
            return "its log ends: " + " / ".join(self.running().log.splitlines()[-3:])
        except (OSError, AssertionError):
            return "its log cannot be read"

    def wait_for_nobody(self) -> None:
        """Until the last process of a server that was killed has gone; nothing else could have its ports."""
        until_s = time.monotonic() + LOOK_S
        while left := self.leftovers():
            assert time.monotonic() < until_s, f"processes {left} outlived the one that started them by {LOOK_S:g} s"
            time.sleep(0.02)

    # Looking

    def get(self, path: str, timeout_s: float = LOOK_S) -> httpx.Response | None:
        """What it answers; None where nothing came."""
        try:
            with httpx.Client(trust_env=False, verify=False, timeout=timeout_s) as client:
                return client.get(f"http://127.0.0.1:{self.http_port}{path}")
        except httpx.TransportError:
            return None

    def is_ready(self) -> bool:
        answer = self.get("/v2/health/ready")
        return answer is not None and answer.status_code == 200

    def stats(self) -> dict[str, Any] | None:
        answer = self.get("/stats")
        return answer.json() if answer is not None and answer.status_code == 200 else None

    def held(self) -> tuple[int, int, int] | None:
        """Samples that wait, requests that are not finished, bytes that are held; None where it does not say."""
        stats = self.stats()
        if stats is None:
            return None
        waiting = sum(model["waiting_samples"] for model in stats["models"])
        return waiting, stats["unfinished_requests"], stats["inflight_bytes"]

    def books(self) -> Calls:
        """The server's own count of calls since its start."""
        counts: Calls = Counter()
        for sample in self._samples():
            if sample.name == "convoy_requests_total":
                labels = sample.labels
                counts[labels["protocol"], labels["model"], labels["outcome"]] += int(sample.value)
        return counts

    def readers(self) -> Readers:
        """What each reader of the server's ledger says of its answered requests, by reader and model."""
        counts: Readers = Counter()
        for sample in self._samples():
            word = _ANSWERED.get(sample.name)
            if word is not None and sample.labels.get("outcome", word) == word:
                counts[sample.name, sample.labels["model"]] += int(sample.value)
        answer = self.get(_STATISTICS, 10.0)
        for one in [] if answer is None or answer.status_code != 200 else answer.json()["model_stats"]:
            counts[_STATISTICS, one["name"]] += one["inference_stats"]["success"]["count"]
        return counts

    def _samples(self) -> Iterator[Any]:
        answer = self.get("/metrics", 10.0)
        if answer is not None and answer.status_code == 200:
            for family in text_string_to_metric_families(answer.text):
                yield from family.samples

    def processes(self) -> list[ProcessState]:
        """Every process of the server as it is now."""
        if self.server is None:
            return []
        found = []
        with suppress(psutil.Error):
            first = psutil.Process(self.server.process.pid)
            for one in (first, *first.children(recursive=True)):
                with suppress(psutil.Error, OSError):
                    self.ever[one.pid] = one.create_time()
                    if one.status() != psutil.STATUS_ZOMBIE:
                        found.append(self._state(one, is_first=one.pid == first.pid))
        return found

    def pids(self, role: str) -> list[int]:
        return sorted(one.pid for one in self.processes() if one.role == role)

    def leftovers(self) -> list[int]:
        """Processes of servers that have ended, and yet live."""
        own = {one.pid for one in self.processes()}
        left = []
        for pid, made_s in self.ever.items():
            with suppress(psutil.Error):
                one = psutil.Process(pid)
                if pid not in own and one.create_time() == made_s and one.status() != psutil.STATUS_ZOMBIE:
                    left.append(pid)
        return left

    def _state(self, one: psutil.Process, *, is_first: bool) -> ProcessState:
        command = " ".join(one.cmdline())
        role = next((role.partition("_")[0] for role in _ROLES if role in command), "server" if is_first else "other")
        status = Path(f"/proc/{one.pid}/status").read_text()
        own_bytes = sum(int(kib) * 1024 for kib in re.findall(r"Rss(?:Anon|File):\s+(\d+) kB", status))
        return ProcessState(one.pid, role, own_bytes, one.num_fds(), one.num_threads())

    # The store

    def _fill_store(self) -> None:
        self.store.add_digits()
        self.store.add_add_sub()
        self.store.add_mean()
        self.store.add_shift(SHIFT_STEP)
        for dtype in ("FP32", "INT64", "BYTES"):
            self.store.add_identity(dtype)

    def shift_served(self) -> int | None:
        """The version of `shift` that answers; None where none does."""
        answer = self.get("/v2/models/shift")
        versions = [] if answer is None or answer.status_code != 200 else answer.json()["versions"]
        return max(map(int, versions), default=None)

    def change_store(self, which: int) -> str:
        """One change, which leaves version 1 of every model sound; what it was."""
        sound, newest = self.shift_versions, self._newest_shift() + 1
        match which % 5:
            case 1 if len(sound) > 1:
                gone = max(sound)
                sound.discard(gone)
                shutil.rmtree(self.store.root / "shift" / str(gone))
                return f"shift {gone} removed"
            case 2:
                version = max(sound)
                self.store.add_shift(SHIFT_STEP * version, version)
                return f"shift {version} replaced"
            case 3:
                path = self.store.root / "shift" / str(newest) / "model.onnx"
                path.parent.mkdir()
                path.write_bytes(self._shift_bytes()[:-20])
                return f"shift {newest} added, cut off"
            case 4:
                folder = self.store.root / "digits" / "2"
                if folder.exists():
                    shutil.rmtree(folder)
                    return "the corrupt digits 2 removed"
                self._add_corrupt_digits(folder)
                return "digits 2 added with one wrong byte"
        self.store.add_shift(SHIFT_STEP * newest, newest)
        sound.add(newest)
        return f"shift {newest} added"

    def tidy_store(self) -> None:
        """Take away what is not sound."""
        for folder in (self.store.root / "shift").iterdir():
            if int(folder.name) not in self.shift_versions:
                shutil.rmtree(folder)
        shutil.rmtree(self.store.root / "digits" / "2", ignore_errors=True)

    def _newest_shift(self) -> int:
        return max(int(one.name) for one in (self.store.root / "shift").iterdir())

    def _shift_bytes(self) -> bytes:
        return (self.store.root / "shift" / "1" / "model.onnx").read_bytes()

    def _add_corrupt_digits(self, folder: Path) -> None:
        aside = self.folder / "digits-aside"
        shutil.copytree(folder.parent / "1", aside)
        graph = next(aside.glob("*fp32*.onnx"))
        data = bytearray(graph.read_bytes())
        data[len(data) // 2] ^= 1
        graph.write_bytes(data)
        aside.rename(folder)
