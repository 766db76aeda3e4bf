"""What one replica costs those around it, and what tells how loaded it is: `python -m tests.support.replica_costs`.

Writes docs/results/replica-costs.json, from which docs/scaling.md computes. Two or three minutes, on a machine that has
nothing else to do. The rates are those of a stand-in for a GPU, which sleeps for as long as a batch would take.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers import Server, metric, run_convoy, start_fake_server, start_server
from tests.support.stores import ROOT, StoreFolder, digit

RESULTS = ROOT / "docs" / "results" / "replica-costs.json"
FIXED_MS, PER_SAMPLE_MS, MAX_BATCH = 5.0, 0.5, 32
# Of what the stand-in can do with full batches, in percent.
SHARES = (10, 25, 50, 75, 90)
_SECONDS = 10.0


def capacity_per_s() -> float:
    return MAX_BATCH / (FIXED_MS + MAX_BATCH * PER_SAMPLE_MS) * 1e3


def measured() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return {
            "cpus": psutil.cpu_count(),
            "processor": _processor(),
            "python": platform.python_version(),
            "start_to_ready_s": statistics.median(_start_s() for _ in range(5)),
            **_one_replica(),
            "series_per_further_model": _series_per_model(Path(folder)),
            "stand_in": {"fixed_ms": FIXED_MS, "per_sample_ms": PER_SAMPLE_MS, "max_batch": MAX_BATCH},
            "load": [_loaded(share) for share in SHARES],
        }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def _start_s() -> float:
    began = time.monotonic()
    with start_server("--host", "127.0.0.1"):
        return time.monotonic() - began


def _one_replica() -> dict[str, float]:
    with start_server("--host", "127.0.0.1", "--access-log", "off") as server:
        for word in ("seven", "three"):
            server.post("/predictions/digits", content=digit(word)).raise_for_status()
        process = psutil.Process(server.process.pid)
        status = Path(f"/proc/{process.pid}/status").read_text().split("\n")
        rss = {line.split()[0]: int(line.split()[1]) for line in status if line.startswith("Rss")}
        return {
            "resident_mib": (rss["RssAnon:"] + rss["RssFile:"]) / 1024,
            "series": _series(server),
            "scrape_bytes": len(server.get("/metrics").content),
            "cpu_us_per_scrape": _cpu_us(server, "/metrics", 300),
            "cpu_us_per_health_check": _cpu_us(server, "/v2/health/ready", 5000),
        }


def _series(server: Server) -> int:
    return sum(len(family.samples) for family in text_string_to_metric_families(server.get("/metrics").text))


def _series_per_model(folder: Path) -> float:
    store = StoreFolder(folder / "store")
    counts = []
    for models in (1, 11):
        for number in range(models):
            store.add_shift(1.0, name=f"shift{number}")
        with start_server("--host", "127.0.0.1", store=store.root) as server:
            for number in range(models):
                row = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0, 0, 0, 0]}]}
                assert server.post(f"/v2/models/shift{number}/infer", json=row).status_code == 200
            counts.append(_series(server))
    return (counts[1] - counts[0]) / 10


def _cpu_us(server: Server, path: str, count: int) -> float:
    """Of the server's process, for one request on a connection that stays open."""
    process = psutil.Process(server.process.pid)
    with server.client() as client:
        client.get(path)
        before = process.cpu_times()
        for _ in range(count):
            client.get(path)
        after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / count * 1e6


def _loaded(share: int) -> dict[str, float]:
    """What the metrics say at a share of what the stand-in can do."""
    rate = capacity_per_s() * share / 100
    fake = {"latency_ms": FIXED_MS, "per_sample_ms": PER_SAMPLE_MS, "max_batch": MAX_BATCH}
    options = ("--model", "rows", "--rate", f"{rate:.1f}", "--duration", str(_SECONDS), "--body", "binary")
    with (
        start_fake_server(fake=fake, access_log="off", host="127.0.0.1") as server,
        tempfile.TemporaryDirectory() as to,
    ):
        before = _sums(server)
        report = Path(to) / "report.json"
        done = run_convoy("loadtest", "--url", server.url, *options, "--warm-up", "0", "--json", str(report))
        # It calls its figures void where it was a millisecond late; what is asked here bears that.
        assert report.exists(), done.stdout + done.stderr
        after = _sums(server)
        calls = after["calls"] - before["calls"]
        # The programme's own start and end are no load.
        seconds = calls / rate
        return {
            "share_percent": share,
            "rate_per_s": rate,
            "utilisation": (after["compute"] - before["compute"]) / seconds,
            "waiting": (after["waiting"] - before["waiting"]) / seconds,
            "mean_batch": calls / (after["batches"] - before["batches"]),
        }


def _sums(server: Server) -> dict[str, float]:
    def seconds(stage: str) -> float:
        return metric(server, "convoy_stage_duration_seconds_sum", stage=stage, model="rows")

    return {
        "compute": seconds("compute"),
        "waiting": seconds("queue") + seconds("decode_wait"),
        "batches": metric(server, "convoy_batch_size_count", model="rows"),
        "calls": metric(server, "convoy_call_duration_seconds_count", model="rows", outcome="answered"),
    }


if __name__ == "__main__":
    RESULTS.write_text(json.dumps(measured(), indent=1) + "\n")
    print(RESULTS.read_text())
