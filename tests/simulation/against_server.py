"""Does the simulator say what the server does? `python -m tests.simulation.against_server`, on a quiet machine.

The same open loop of Poisson arrivals goes to a real server, through HTTP and the load tester, and to the policy in
virtual time. Goodput, the requests answered within the objective a second, must agree within 10 %: the median of five
runs at each load. Without options the server has a fake engine; `--store DIR --model NAME` takes a bundle's line
through its measured latencies. The edge's cost is measured: what a single request takes beyond its batch.
A benchmark: it prints and writes, and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from loadtest.simulation.convoy import run_policy
from loadtest.simulation.run import Result
from loadtest.simulation.workload import SINGLE_NS, Device, Scenario, draw
from models.bundle import read_manifest
from models.store import Store
from tests.support.servers import Server, start_fake_server, start_server
from tests.support.stores import ROOT

RUNS = 5
MAX_BATCH = 64
# Slow enough that the edge and the load generator are no bottleneck on two cores.
FAKE_FIXED_MS, FAKE_PER_SAMPLE_MS = 10.0, 1.0
# In units of what one sample takes alone; loads in units of the bound for that objective.
OBJECTIVE = 10.0
LOADS = (0.5, 0.8, 0.95, 1.5)
# So much less than the objective is what the server is told: it counts from the arrival of a request to its answer,
# and in overload it answers in the last moment.
ALLOWANCE_MS = 5.0
DURATION_S = 12.0
_LIMIT = 0.1


@dataclass(frozen=True, slots=True)
class Line:
    """A batch of b takes `fixed_ms + per_sample_ms * b`."""

    fixed_ms: float
    per_sample_ms: float

    @property
    def single_ms(self) -> float:
        return self.fixed_ms + self.per_sample_ms

    @property
    def scenario(self) -> Scenario:
        return Scenario(Device(self.fixed_ms / self.per_sample_ms, MAX_BATCH), OBJECTIVE)

    @property
    def objective_ms(self) -> float:
        return OBJECTIVE * self.single_ms

    @property
    def timeout_ms(self) -> int:
        return round(self.objective_ms - ALLOWANCE_MS)

    def per_second(self, rho: float) -> float:
        return rho / self.per_sample_ms * 1000


@dataclass(frozen=True, slots=True)
class Comparison:
    """Goodput a second at one load: the server's in each run, and the simulator's on as many seeds."""

    offered_per_second: float
    server: list[float]
    simulator: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.server) / statistics.median(self.simulator)


def main() -> None:
    wishes = _wishes()
    line = _line_of(wishes.store, wishes.model) if wishes.store else Line(FAKE_FIXED_MS, FAKE_PER_SAMPLE_MS)
    with _serving(wishes.store, line) as server:
        edge_ms = max(0.0, _single_ms(server, wishes.model) - line.single_ms)
        print(f"l(b) = {line.fixed_ms:.3f} + {line.per_sample_ms:.3f} b ms, edge {edge_ms:.2f} ms", flush=True)
        found = []
        for load in LOADS:
            found.append(_compare(server, wishes.model, line, edge_ms, load * line.scenario.bound))
            print(_in_words(found[-1]), flush=True)
    document = {
        "line": asdict(line),
        "edge_ms": edge_ms,
        "objective_ms": line.objective_ms,
        "loads": [asdict(one) | {"ratio": one.ratio} for one in found],
    }
    wishes.out.write_text(json.dumps(document, indent=1) + "\n")


def _wishes() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.against_server")
    parser.add_argument("--store", type=Path, help="a store with a bundle of one input; a fake engine otherwise")
    parser.add_argument("--model", default="rows", help="the bundle's name")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "simulation-agreement.json")
    return parser.parse_args()


def _line_of(store: Path, model: str) -> Line:
    """The line of the variant that the server will choose on a CPU: the one that is fastest alone."""
    manifest = read_manifest(Store.at(store).versions(model)[0].folder)
    tables = [variant.latency for variant in manifest.variants if variant.latency and variant.latency.fixed_ms]
    best = min(tables, key=lambda table: table.points[0].median_ms)
    assert best.fixed_ms is not None
    assert best.per_sample_ms is not None
    return Line(best.fixed_ms, best.per_sample_ms)


@contextmanager
def _serving(store: Path | None, line: Line) -> Iterator[Server]:
    if store is None:
        fake = {"latency_ms": line.fixed_ms, "per_sample_ms": line.per_sample_ms, "max_batch": MAX_BATCH}
        with start_fake_server(fake=fake, access_log="off", default_timeout_ms=line.timeout_ms) as server:
            yield server
    else:
        wishes = ("--default-timeout-ms", str(line.timeout_ms), "--max-batch", str(MAX_BATCH), "--access-log", "off")
        with start_server(*wishes, store=store) as server:
            yield server


def _compare(server: Server, model: str, line: Line, edge_ms: float, rho: float) -> Comparison:
    per_second = line.per_second(rho)
    real = []
    for run in range(RUNS):
        slo = ("--slo-ms", f"{line.objective_ms:g}")
        figures = _load(server, model, "--rate", f"{per_second:.1f}", *slo, "--seed", str(run))
        if figures["void"] is not None:
            raise SystemExit(f"the machine is not quiet enough: {figures['void']}")
        real.append(figures["offered_rps"] * figures["goodput"])
    return Comparison(per_second, real, [_simulated(line, edge_ms, rho, seed) for seed in range(RUNS)])


def _simulated(line: Line, edge_ms: float, rho: float, seed: int) -> float:
    """The policy sees the server's deadline; the client sees the answer an edge's cost later."""
    scenario = line.scenario
    workload = replace(draw(scenario, rho, seed), within_ns=_virtual_ns(line, line.timeout_ms))
    result = run_policy(workload, scenario.device)
    seen = Result(replace(workload, within_ns=_virtual_ns(line, line.objective_ms - edge_ms)), result.ended_ns)
    return line.per_second(rho) * seen.good_share


def _virtual_ns(line: Line, real_ms: float) -> int:
    """In the simulator one sample takes SINGLE_NS, whatever it takes in truth."""
    return round(real_ms / line.single_ms * SINGLE_NS)


def _single_ms(server: Server, model: str) -> float:
    figures = _load(server, model, "--concurrency", "1")
    return float(figures["latency_ms"]["p50"])


def _load(server: Server, model: str, *options: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "load.json"
        command = (sys.executable, "-m", "loadtest", "--url", server.url, "--model", model, *options)
        duration = ("--duration", str(DURATION_S), "--json", str(file))
        # In overload requests are refused, and the load tester's exit code says so.
        subprocess.run([*command, *duration], cwd=ROOT, env=os.environ, stdout=subprocess.DEVNULL, check=False)
        return json.loads(file.read_text())


def _in_words(found: Comparison) -> str:
    verdict = "agrees" if abs(found.ratio - 1) <= _LIMIT else "DIFFERS"
    server, simulator = statistics.median(found.server), statistics.median(found.simulator)
    return (
        f"{found.offered_per_second:7.0f}/s offered: server {server:7.1f}/s, simulator {simulator:7.1f}/s good, "
        f"ratio {found.ratio:.3f} {verdict}"
    )


if __name__ == "__main__":
    main()
