"""The server under test: how it is started, what it says of itself, what is done to it, and its store.

What has to hold is the business of `checks`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
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
import tritonclient.grpc as triton_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.campaign.asks import SHIFT_STEP
from tests.campaign.plan import Fault
from tests.support.servers import free_port
from tests.support.stores import ROOT, StoreFolder

READY_S, STOP_S, LOOK_S = 60.0, 40.0, 3.0
# A few for the listeners and the engines; the rest for some twenty connections.
FEW_DESCRIPTORS = 64
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
    """What the server's process holds. Memory is its own, without what it shares with others."""

    pid: int
    own_bytes: int
    descriptors: int
    threads: int


class CampaignServer:
    """One server at a time, on the same ports all along."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.http_port, self.grpc_port = folder, free_port(), free_port()
        self.setting, self.log_path, self._starts = "", folder / "log-0.txt", 0
        self.process: psutil.Popen | None = None
        self.store = StoreFolder(folder / "store")
        self.sound_versions = {1}  # of `shift`
        for add in (self.store.add_digits, self.store.add_add_sub, self.store.add_mean):
            add()
        self.store.add_shift(SHIFT_STEP)
        self.store.add_identity("FP32")

    # Starting and stopping

    def start(self, setting: str) -> None:
        """A new server, ready. Raises AssertionError when it does not come up."""
        self.setting, self._starts = setting, self._starts + 1
        control = {"poll": ("poll", "--poll-interval-s", "0.3"), "explicit": ("explicit", "--load-model", "*")}
        command = [
            *(sys.executable, "-m", "convoy", "serve", "--host", "127.0.0.1", "--port", str(self.http_port)),
            *("--grpc-port", str(self.grpc_port), "--store", str(self.store.root), "--access-log", "errors"),
            *("--max-body-mb", "4", "--max-inflight-mb", "48", "--max-queue", "64", "--drain-timeout-s", "10"),
            *("--model-control", *control.get(setting, ("none",))),
        ]
        if setting == "descriptors":
            command = ["sh", "-c", f'ulimit -n {FEW_DESCRIPTORS} && exec "$@"', "sh", *command]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CONVOY_")}
        environment |= {"XDG_CACHE_HOME": str(self.folder / "cache")}
        self.log_path = self.folder / f"log-{self._starts}.txt"
        with self.log_path.open("wb") as out:
            self.process = psutil.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
        self.wait(self.is_ready, "it is ready", READY_S)

    def stop(self) -> int:
        """SIGTERM; the exit code. Raises AssertionError when it does not end."""
        assert self.process is not None, "there is no server"
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except psutil.TimeoutExpired:
            raise AssertionError(f"after SIGTERM the server did not end within {STOP_S:g} s") from None
        self.process = None
        return int(code)

    def kill(self) -> None:
        """End it, whatever state it is in."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process = None

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float) -> None:
        """Until it is so. Raises AssertionError after the time, or when the server has ended."""
        until_s = time.monotonic() + timeout_s
        while not condition():
            ended = self.process is None or self.process.poll() is not None
            if ended or time.monotonic() > until_s:
                end = " / ".join(self.log_path.read_text(errors="replace").splitlines()[-3:])
                why = "the server ended" if ended else f"{timeout_s:g} s passed in vain"
                raise AssertionError(f"{why} while waiting until {what}; its log ends: {end}")
            time.sleep(0.02)

    # Looking

    def get(self, path: str, timeout_s: float = LOOK_S) -> httpx.Response | None:
        """What it answers; None where nothing came."""
        with suppress(httpx.TransportError), httpx.Client(trust_env=False, verify=False, timeout=timeout_s) as client:
            return client.get(f"http://127.0.0.1:{self.http_port}{path}")
        return None

    def document(self, path: str) -> Any:
        """The JSON of an answer of 200; None of any other, or where nothing came."""
        answer = self.get(path, 10.0)
        return answer.json() if answer is not None and answer.status_code == 200 else None

    def is_ready(self) -> bool:
        answer = self.get("/v2/health/ready")
        return answer is not None and answer.status_code == 200

    def held(self) -> tuple[int, int, int] | None:
        """Samples that wait, requests that are not finished, bytes that are held; None where it does not say."""
        stats = self.document("/stats")
        if stats is None:
            return None
        waiting = sum(model["waiting_samples"] for model in stats["models"])
        return waiting, stats["unfinished_requests"], stats["inflight_bytes"]

    def books(self) -> Calls:
        """The server's own count of calls since its start."""
        counts: Calls = Counter()
        for sample in self._samples():
            if sample.name == "convoy_requests_total":
                counts[sample.labels["protocol"], sample.labels["model"], sample.labels["outcome"]] += int(sample.value)
        return counts

    def readers(self) -> Readers:
        """What each reader of the server's ledger says of its answered requests, by reader and model."""
        counts: Readers = Counter()
        for sample in self._samples():
            word = _ANSWERED.get(sample.name)
            if word is not None and sample.labels.get("outcome", word) == word:
                counts[sample.name, sample.labels["model"]] += int(sample.value)
        for one in (self.document(_STATISTICS) or {"model_stats": []})["model_stats"]:
            counts[_STATISTICS, one["name"]] += one["inference_stats"]["success"]["count"]
        return counts

    def _samples(self) -> Iterator[Any]:
        answer = self.get("/metrics", 10.0)
        if answer is not None and answer.status_code == 200:
            for family in text_string_to_metric_families(answer.text):
                yield from family.samples

    def state(self) -> ProcessState | None:
        """None where it has ended."""
        with suppress(psutil.Error, OSError):
            if self.process is not None and self.process.poll() is None:
                memory = self.process.memory_info()
                own = memory.rss - memory.shared
                return ProcessState(self.process.pid, own, self.process.num_fds(), self.process.num_threads())
        return None

    # What is done to it. Each returns what it did, in words, and raises AssertionError where the server does not obey.

    def do(self, fault: Fault) -> str:
        if fault.kind == "store":
            return self._change_store(fault.which)
        if fault.kind == "load":
            return self._load(fault.which)
        if fault.kind == "hoard":
            return self._hoard(fault.lasts_s)
        assert self.process is not None, "there is no server"
        if fault.kind == "pause":
            self.process.suspend()
            time.sleep(fault.lasts_s)
            self.process.resume()
            return f"stopped for {fault.lasts_s:g} s"
        if fault.kind == "kill":
            self.kill()
        else:
            code = self.stop()
            assert code == 0, f"after SIGTERM the server ended with {code}"
        self.start(self.setting)
        return f"{fault.kind}, and started again"

    def put_back(self) -> None:
        """The store as the next period expects it. Raises AssertionError where the server does not come to it."""
        for folder in (self.store.root / "shift").iterdir():
            if int(folder.name) not in self.sound_versions:
                shutil.rmtree(folder)
        if self.setting == "explicit":
            for model in ("shift", "mean"):
                self._tell("HTTP", "load", model, {})
        if self.setting in ("poll", "explicit"):
            newest = str(max(self.sound_versions))
            self.wait(lambda: newest in self._served(), f"shift {newest}, the newest that is sound, serves", 15.0)

    def _served(self) -> list[str]:
        return list((self.document("/v2/models/shift") or {"versions": []})["versions"])

    def _load(self, which: int) -> str:
        """The repository extension over either wire."""
        steps = (
            ("unload", "shift", {}),
            ("load", "shift", {}),
            ("load", "shift", {"config": '{"max_batch_size": 4}'}),
            ("unload", "mean", {}),
            ("load", "mean", {}),
            ("load", "nowhere", {}),
        )
        order, model, options = steps[which % len(steps)]
        wire = "gRPC" if which % 2 else "HTTP"
        if (is_done := self._tell(wire, order, model, options)) == (model == "nowhere"):
            raise AssertionError(f"{order} {model} over {wire} was {'done' if is_done else 'refused'}")
        return f"{order} {model} over {wire} {options or ''}"

    def _tell(self, wire: str, order: str, model: str, options: dict[str, str]) -> bool:
        """Whether the order was obeyed."""
        if wire == "HTTP":
            url = f"http://127.0.0.1:{self.http_port}/v2/repository/models/{model}/{order}"
            return httpx.post(url, json={"parameters": options}, trust_env=False, timeout=READY_S).status_code == 200
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{self.grpc_port}") as client:
            try:
                getattr(client, f"{order}_model")(model, **options)
            except triton_grpc.InferenceServerException:
                return False
        return True

    def _hoard(self, lasts_s: float) -> str:
        held = [socket.socket() for _ in range(3 * FEW_DESCRIPTORS)]
        for one in held:
            one.settimeout(0.5)
            with suppress(OSError):
                one.connect(("127.0.0.1", self.http_port))
        time.sleep(lasts_s)
        for one in held:
            one.close()
        return f"{len(held)} idle connections for {lasts_s:g} s, and {FEW_DESCRIPTORS} descriptors"

    def _change_store(self, which: int) -> str:
        """One change, which leaves version 1 of every model sound."""
        shift, sound = self.store.root / "shift", self.sound_versions
        newest = max(int(one.name) for one in shift.iterdir()) + 1
        match which % 4:
            case 1 if len(sound) > 1:
                gone = max(sound)
                sound.discard(gone)
                shutil.rmtree(shift / str(gone))
                return f"shift {gone} removed"
            case 2:
                self.store.add_shift(SHIFT_STEP * max(sound), max(sound))
                return f"shift {max(sound)} replaced"
            case 3:
                (shift / str(newest)).mkdir()
                (shift / str(newest) / "model.onnx").write_bytes((shift / "1" / "model.onnx").read_bytes()[:-20])
                return f"shift {newest} added, cut off"
        self.store.add_shift(SHIFT_STEP * newest, newest)
        sound.add(newest)
        return f"shift {newest} added"
