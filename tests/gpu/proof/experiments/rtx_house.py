"""The house on TensorRT for RTX: its tests, and `convoy serve` from its first answer to the plan's takeover."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.gpu.proof.experiment import Bench, Judgement, NotMeasurable, Ran

if TYPE_CHECKING:
    from tests.gpu.proof.over_http import Server

_TESTS = ("tests/gpu/test_rtx_gpu.py", "tests/contract/test_engines.py")
_ENDING_S = 12.0
_POLL_S = 0.02
_ANSWER_S = 5.0
_ENGINE = "tensorrt-rtx"


def gpu_tests(bench: Bench) -> None:
    """Those of the tests marked `gpu` that are about this library."""
    from tests.gpu.proof.experiments.house import note_tests
    from tests.gpu.proof.run_tests import run_tests

    note_tests(bench, lambda: run_tests(bench.left_s - _ENDING_S, _TESTS, about="rtx"))


def takeover(bench: Bench, engines: str, wait_s: float) -> None:
    """The demo from an empty plan cache, and once more from the one that this has left."""
    from convoy.app.engines.machine import find_machine
    from tests.gpu.proof import over_http
    from tests.gpu.proof.subjects import DEMO_STORE, NotMade

    machine = find_machine()
    if not machine.gpus or machine.rtx.module is None:
        raise NotMeasurable(machine.no_gpu or machine.rtx.reason)
    for name, library in (("tensorrt", machine.tensorrt), ("onnxruntime-cuda", machine.onnxruntime)):
        bench.fact(f"beside it: {name}", "is here" if library.module is not None else library.reason)
    try:
        over_http.edge_counts()
    except NotMade as reason:
        raise NotMeasurable(str(reason)) from reason
    plans = bench.folder / "plans"
    plans.mkdir(mode=0o700)
    for how in ("cold", "warm"):
        bench.step(how)
        folder = bench.folder / how
        folder.mkdir()
        _watch(bench, how, over_http.Server(DEMO_STORE, plans, engines, None, bench.left_s), folder, wait_s)
    kept = [path for path in plans.rglob("*") if path.is_file()]
    for suffix in (".plan", ".kernels"):
        bench.figure(f"{suffix[1:]} MB", sum(one.stat().st_size for one in kept if one.suffix == suffix) / 1e6)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What serves, and why not something else."""

    engine: str
    precision: str
    why: str


def _watch(bench: Bench, how: str, server: Server, folder: Path, wait_s: float) -> None:
    """Start it, and ask it until this library answers, or `wait_s` are over."""
    from convoy.loadtest.peers.server import Launch, free_ports, serving
    from tests.gpu.proof import over_http

    port, began_s = free_ports().http, time.monotonic()
    launch = Launch(server.command(port), over_http.environment(), server.ready_within_s)
    failed = 0
    with serving("convoy serve", launch, port, folder, over_http.is_ready) as running:
        bench.figure(f"{how}: ready s", time.monotonic() - began_s)
        seen = first = _ask(running.url)
        bench.figure(f"{how}: first answer s", time.monotonic() - began_s)
        bench.fact(f"{how}: first", f"{first.engine} {first.precision}")
        end_s = time.monotonic() + wait_s
        while seen.engine != _ENGINE and time.monotonic() < end_s:
            time.sleep(_POLL_S)
            try:
                seen = _ask(running.url)
            except OSError:
                failed += 1
        bench.figure(f"{how}: takeover s", time.monotonic() - began_s)
        bench.fact(f"{how}: at last", f"{seen.engine} {seen.precision}")
        bench.fact(f"{how}: why not others", seen.why)
    bench.figure(f"{how}: failed", failed)


def _ask(url: str) -> _Seen:
    """A request is answered, and then the server tells by what. Raises OSError."""
    image = np.zeros((1, 32, 32, 3), np.uint8)
    body = {"inputs": [{"name": "images", "shape": image.shape, "datatype": "UINT8", "data": image.ravel().tolist()}]}
    request = urllib.request.Request(
        f"{url}/v2/models/digits/infer", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        json.load(answer)
    with urllib.request.urlopen(f"{url}/stats", timeout=_ANSWER_S) as answer:
        (told,) = json.load(answer)["models"]
    return _Seen(told["engine"], told["precision"], "; ".join(map(str, told.get("why_not_others", []))))


def judge_takeover(ran: Ran) -> Judgement:
    """Something else answers first and the plan takes over; the next start has it at once; nobody fails."""
    told = [f"{name} {value:.1f}" for name, value in ran.figures.items()]
    told += [f"{name} {text}" for name, text in ran.facts.items() if name.endswith((": first", ": at last"))]
    is_expected = (
        not ran.facts["cold: first"].startswith(_ENGINE)
        and ran.facts["cold: at last"].startswith(_ENGINE)
        and ran.facts["warm: first"].startswith(_ENGINE)
        and not ran.figures["cold: failed"] + ran.figures["warm: failed"]
    )
    if not ran.facts["cold: at last"].startswith(_ENGINE):
        told.append(ran.facts["cold: why not others"])
    return Judgement.of(is_expected, ", ".join(told))
