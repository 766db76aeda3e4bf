"""`convoy serve` as its users start it, under the load tester: what a client gets of the engine.

Knows processes and bundles. The server chooses its engine itself, from the same files, and is asked which.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from convoy.export.assemble import publish
from convoy.loadtest.answers import AnswerCheck
from convoy.loadtest.bodies import Input, binary_payloads, infer_path, request_bytes
from convoy.loadtest.endpoint import find_endpoint
from convoy.loadtest.options import LoadTestOptions
from convoy.loadtest.peers.server import Launch, free_ports, serving
from convoy.loadtest.request_pool import RequestPool
from convoy.loadtest.runner import run
from convoy.loadtest.statistics import summarise
from convoy.models.bundle import Canary, Precision, Provenance, Target, Variant
from convoy.models.checkpoint import convoy_version
from convoy.models.store import Store
from tests.gpu.proof.agreement import Reference
from tests.gpu.proof.records import HttpRow
from tests.gpu.proof.subjects import ROOT, NotMade, Subject

REQUEST_IMAGES = 32
# A batch in each slot and as much waiting, in requests of 32.
_CLIENTS = 16
_CANARY_IMAGES = 16
_ANSWER_S = 2.0
_TARGETS: dict[Precision, Target] = {"fp32": "cpu", "fp16": "cuda", "int8": "tensorrt", "fp8": "tensorrt"}


@dataclass(frozen=True, slots=True)
class Server:
    """How `convoy serve` is started here. `edges` None: it has no edge processes."""

    store: Path
    plans: Path
    engine: str
    edges: int | None
    ready_within_s: float

    def command(self, port: int) -> tuple[str, ...]:
        edges = () if self.edges is None else ("--edges", str(self.edges))
        return (
            *(sys.executable, "-m", "convoy.app", "--store", str(self.store), "--plan-cache", str(self.plans)),
            *("--host", "127.0.0.1", "--port", str(port), "--grpc-port", "-1", "--engine", self.engine),
            *("--max-inflight-mb", "1024", "--access-log", "off", *edges),
        )


def edge_counts() -> tuple[int | None, ...]:
    """With how many edge processes the server can run here, the telling number first. Raises NotMade."""
    asked = subprocess.run(
        [sys.executable, "-m", "convoy.app", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise NotMade(f"`convoy serve` does not start here: {lines[-1]}")
    # Its imports come with the serving itself, not with the help.
    probe = subprocess.run(
        [sys.executable, "-c", "import convoy.app.main"], cwd=ROOT, capture_output=True, text=True, env=environment()
    )
    if probe.returncode:
        raise NotMade(f"the server's libraries are not all there: {probe.stderr.strip().splitlines()[-1]}")
    return (4, 1) if "--edges" in asked.stdout else (None,)


def publish_subject(subject: Subject, store: Path, reference: Reference) -> None:
    """The network as a bundle. Raises JobError when the disk is full."""
    made = next(iter(subject.files.values())).parent
    logits = reference.of(subject)["random"][:_CANARY_IMAGES]
    canary = Canary(
        {subject.spec.inputs[0].name: subject.random[:_CANARY_IMAGES]}, {subject.spec.outputs[0].name: logits}
    )
    variants = tuple(_variant(precision, path) for precision, path in subject.files.items())
    origin = Provenance(
        f"torchvision:{subject.name}", None, None, None, {"convoy": convoy_version()}, datetime.now(UTC).isoformat()
    )
    publish(Store.at(store), subject.spec, made, variants, canary, origin, None)


def _variant(precision: Precision, path: Path) -> Variant:
    tolerance = 0.0 if precision == "fp32" else 1e-2
    return Variant(path.name, precision, _TARGETS[precision], True, "made for a proof", tolerance, None, None)


def measure_over_http(server: Server, subject: Subject, folder: Path, row_s: float) -> HttpRow:
    """Start it, ask it, stop it. Raises JobError for a server that does not serve, NotMade for one on the CPU."""
    port = free_ports().http
    launch = Launch(server.command(port), environment(), server.ready_within_s)
    with serving("convoy serve", launch, port, folder, is_ready) as running:
        engine, precision = _served(running.url, subject.name)
        endpoint = find_endpoint(running.url)
        image = subject.spec.inputs[0]
        body = Input(image.name, image.dtype, (REQUEST_IMAGES, *image.shape))
        requests = [
            request_bytes(endpoint, infer_path(subject.name), payload, None) for payload in binary_payloads([body], 0)
        ]
        options = LoadTestOptions(running.url, concurrency=_CLIENTS, duration_s=row_s, warm_up_s=row_s / 4, processes=4)
        measurement = run(options, RequestPool(requests, AnswerCheck("plain", b"outputs")), endpoint)
    summary = summarise(measurement.records, measurement.window, None)
    latencies = {one.name: one.latency_ms or 0.0 for one in summary.percentiles}
    return HttpRow(
        network=subject.name,
        engine=engine,
        precision=precision,
        edges=server.edges,
        request_samples=REQUEST_IMAGES,
        images_per_s=summary.throughput_rps * REQUEST_IMAGES,
        p50_ms=latencies["50"],
        p99_ms=latencies["99"],
        failed=summary.failed,
    )


def _served(url: str, model: str) -> tuple[str, str]:
    """Which engine and precision serve the model. Raises NotMade where it is the CPU."""
    with urllib.request.urlopen(f"{url}/stats", timeout=_ANSWER_S) as answer:
        told = next(one for one in json.load(answer)["models"] if one["name"] == model)
    if told["engine"].endswith("-cpu"):
        raise NotMade(f"`convoy serve` chose the CPU: {'; '.join(map(str, told.get('why_not_others', [])))}")
    return told["engine"], told["precision"]


def is_ready(url: str) -> bool:
    """Whether it says so."""
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=_ANSWER_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def environment() -> dict[str, str]:
    """Ours, with this checkout on the path: the server runs in a folder of its own."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
