"""Does the simulator say what the server does? `python -m tests.simulation.against_server`, on a quiet machine.

The same open loop of Poisson arrivals goes to a real server, through HTTP and the load tester, and to the policy in
virtual time. Goodput, the requests answered within the objective a second, must agree within 10 %: the median of five
runs at each load. Without options the server has a fake engine; `--store DIR --model NAME` takes a model of a store.

What the server costs beside the engine is measured, in closed loops, where nothing depends on how batches are formed:
while one batch runs the other clients wait, so that N clients get N answers every `2 a + c N`. Several N give the line
through whatever a batch costs, its gathering, its hand-over and its answers with it; and what one client waits beyond
`a + c` is the edge's. Both are measured anew before each run, because a machine's speed drifts. The load
generator goes before everything else where it may; on two cores it would be late otherwise. What decodes images there
takes time from the engine, which the simulator does not know: `--body binary` sends their tensors. A benchmark: it
asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from tests.simulation.virtual_policy import SimulationResult, run_policy
from tests.simulation.workload import SINGLE_NS, Scenario, VirtualDevice, draw
from tests.support.servers import Server, start_fake_server, start_server
from tests.support.stores import ROOT

RUNS = 5
MAX_BATCH = 64
# How many clients are in the closed loops, and for how long.
CLIENTS = (4, 16, 64)
CLOSED_S = 2.0
# A run in which the load generator was late says nothing; so many are tried for one that is not.
_TRIES = 5
# Slow enough that the edge and the load generator are no bottleneck on two cores.
FAKE_FIXED_MS, FAKE_PER_SAMPLE_MS = 10.0, 1.0
# In units of the bound for the objective.
LOADS = (0.5, 0.8, 0.95, 1.5)
# So much less than the objective is what the server is told: it counts from the arrival of a request to its answer,
# and in overload it answers in the last moment.
ALLOWANCE_MS = 5.0
DURATION_S = 8.0
_LIMIT = 0.1


@dataclass(frozen=True, slots=True)
class Line:
    """A batch of b takes `fixed_ms + per_sample_ms * b`, and an answer is at the client `edge_ms` later."""

    fixed_ms: float
    per_sample_ms: float
    edge_ms: float

    @property
    def single_ms(self) -> float:
        return self.fixed_ms + self.per_sample_ms

    def scenario(self, objective_ms: float) -> Scenario:
        return Scenario(VirtualDevice(self.fixed_ms / self.per_sample_ms, MAX_BATCH), objective_ms / self.single_ms)

    def virtual_ns(self, real_ms: float) -> int:
        """In the simulator one sample takes SINGLE_NS, whatever it takes in truth."""
        return round(real_ms / self.single_ms * SINGLE_NS)


@dataclass(frozen=True, slots=True)
class Run:
    """Goodput a second, of the server and of the simulator on the line that was measured just before."""

    line: Line
    server: float
    simulator: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """At one load, in requests a second."""

    offered: float
    runs: list[Run]

    @property
    def ratio(self) -> float:
        return statistics.median(run.server / run.simulator for run in self.runs)


class _Disturbed(Exception):
    """The load generator was late, time and again."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for what, and how."""

    server: Server
    model: str
    body: str

    def load(self, duration_s: float, *options: str) -> dict:
        """The load test's figures. Raises _Disturbed where no run was what it should have been."""
        for _ in range(_TRIES):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "load.json"
                where = ("--url", self.server.url, "--model", self.model, "--body", self.body, "--json", str(file))
                # In overload requests are refused, and the load tester's exit code says so.
                subprocess.run(
                    (
                        "nice",
                        "-n",
                        "-15",
                        sys.executable,
                        "-m",
                        "loadtest",
                        *where,
                        "--duration",
                        str(duration_s),
                        *options,
                    ),
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    check=False,
                )
                figures: dict = json.loads(file.read_text())
            if figures["void"] is None:
                return figures
        raise _Disturbed(figures["void"])


def main() -> None:
    wishes = _wishes()
    with _serving(wishes.store, timeout_ms=0) as server:
        plain = Target(server, wishes.model, wishes.body)
        line = _measured(plain)
        objective_ms = wishes.objective * line.single_ms
        print(f"{_shown(line)}; objective {objective_ms:.1f} ms", flush=True)
        found = []
        with _serving(wishes.store, timeout_ms=_timeout_ms(objective_ms)) as other:
            limited = replace(plain, server=other)
            for load in wishes.loads:
                per_second = load * line.scenario(objective_ms).bound / line.per_sample_ms * 1000
                try:
                    found.append(_compare(plain, limited, per_second, objective_ms))
                    print(_in_words(found[-1]), flush=True)
                except _Disturbed as reason:
                    print(f"at {load:g} of the bound nothing could be measured: {reason}", flush=True)
    document = {
        "model": wishes.model if wishes.store else "fake engine",
        "body": wishes.body,
        "line": asdict(line),
        "objective_ms": objective_ms,
        "loads": [asdict(one) | {"ratio": one.ratio} for one in found],
    }
    wishes.out.parent.mkdir(parents=True, exist_ok=True)
    wishes.out.write_text(json.dumps(document, indent=1) + "\n")


def _wishes() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.against_server")
    parser.add_argument("--store", type=Path, help="a store; a fake engine otherwise")
    parser.add_argument("--model", default="rows", help="the model")
    parser.add_argument("--objective", type=float, default=10.0, help="in units of what one sample takes alone")
    parser.add_argument("--body", default="auto", help="as for `convoy loadtest`")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="in units of the bound")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "simulation-agreement.json")
    return parser.parse_args()


@contextmanager
def _serving(store: Path | None, timeout_ms: int) -> Iterator[Server]:
    if store is None:
        fake = {"latency_ms": FAKE_FIXED_MS, "per_sample_ms": FAKE_PER_SAMPLE_MS, "max_batch": MAX_BATCH}
        with start_fake_server(fake=fake, access_log="off", default_timeout_ms=timeout_ms) as server:
            yield server
    else:
        # One thread for the engine: the load generator needs a core of its own.
        wishes = ("--threads", "1", "--max-batch", str(MAX_BATCH), "--default-timeout-ms", str(timeout_ms))
        with start_server(*wishes, "--access-log", "off", store=store) as server:
            yield server


def _measured(target: Target) -> Line:
    cycles_ms = np.array([_cycle_ms(target, clients) for clients in CLIENTS])
    # Each cycle counts by its own length: the long ones would else settle the line alone.
    equations = np.array([(2.0, clients) for clients in CLIENTS]) / cycles_ms[:, None]
    (fixed_ms, per_sample_ms), *_ = np.linalg.lstsq(equations, np.ones(len(CLIENTS)), rcond=None)
    line = Line(max(0.0, float(fixed_ms)), float(per_sample_ms), 0.0)
    return replace(line, edge_ms=max(0.0, _cycle_ms(target, 1) - line.single_ms))


def _cycle_ms(target: Target, clients: int) -> float:
    """How long it takes until each of the clients has had an answer."""
    figures = target.load(CLOSED_S, "--concurrency", str(clients))
    return 1000 * clients / float(figures["throughput_rps"])


def _timeout_ms(objective_ms: float) -> int:
    """What the server is told."""
    return round(objective_ms - ALLOWANCE_MS)


def _compare(plain: Target, limited: Target, per_second: float, objective_ms: float) -> Comparison:
    """`plain` has no time limit, which a closed loop would come up against."""
    runs = []
    for seed in range(RUNS):
        line = _measured(plain)
        wishes = ("--rate", f"{per_second:.1f}", "--slo-ms", f"{objective_ms:g}", "--seed", str(seed))
        figures = limited.load(DURATION_S, *wishes)
        good = figures["offered_rps"] * figures["goodput"]
        runs.append(Run(line, good, _simulated(line, per_second, objective_ms, seed)))
    return Comparison(per_second, runs)


def _simulated(line: Line, per_second: float, objective_ms: float, seed: int) -> float:
    """The policy sees the server's deadline; the client sees the answer an edge's cost later."""
    rho = per_second * line.per_sample_ms / 1000
    scenario = line.scenario(objective_ms)
    workload = replace(draw(scenario, rho, seed), within_ns=line.virtual_ns(_timeout_ms(objective_ms)))
    result = run_policy(workload, scenario.device)
    seen = SimulationResult(replace(workload, within_ns=line.virtual_ns(objective_ms - line.edge_ms)), result.ended_ns)
    return per_second * seen.good_share


def _in_words(found: Comparison) -> str:
    verdict = "agrees" if abs(found.ratio - 1) <= _LIMIT else "DIFFERS"
    server = statistics.median(run.server for run in found.runs)
    simulator = statistics.median(run.simulator for run in found.runs)
    return (
        f"{found.offered:7.0f}/s offered: server {server:7.1f}/s, simulator {simulator:7.1f}/s good, "
        f"ratio {found.ratio:.3f} {verdict}"
    )


def _shown(line: Line) -> str:
    return f"l(b) = {line.fixed_ms:.3f} + {line.per_sample_ms:.3f} b ms, edge {line.edge_ms:.2f} ms"


if __name__ == "__main__":
    main()
