"""A real Prometheus scrapes real servers under load: what dashboards, rules and the page ask for is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle

import pytest

from tests.support.fake_server import POISON
from tests.support.prometheus import Prometheus, start_prometheus
from tests.support.promql import alerts, asked_by_panels, asked_in_the_page, recorded, selectors
from tests.support.servers import FakeServer, Server, rows_request, start_fake_server, start_server, wait_until
from tests.support.stores import StoreFolder, digit

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
# Of a server with one GPU that is played, and of one that computes for a while.
WITH_GPU = {"fake": {"gpu": True}}
SLOW = {"fake": {"latency_ms": 2.0}}


@contextmanager
def asked_all_the_time(*servers: FakeServer, real: Server) -> Iterator[None]:
    """Each is asked by two clients, one request after the other; one in ten fails where a server can be told to.

    The one with a real model by one client, and not at full speed: it computes, on the processors of all the others.
    """
    is_over = threading.Event()

    def ask_for_a_digit() -> None:
        with real.client() as client:
            while not is_over.wait(0.1):
                client.post("/predictions/digits", content=digit("seven")).raise_for_status()

    def ask(server: FakeServer, rows: cycle[float]) -> None:
        with server.client() as client:
            while not is_over.is_set():
                client.post("/v2/models/rows/infer", json=rows_request(next(rows)))

    values = [1.0] * 9
    threads = [
        threading.Thread(target=ask, args=(server, cycle([*values, last])))
        for server, last in zip(servers, (1.0, POISON), strict=True)
        for _ in range(2)
    ]
    threads.append(threading.Thread(target=ask_for_a_digit))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`convoy serve` with the bundled model, beside which a version is broken."""
    store = StoreFolder(tmp_path_factory.mktemp("real") / "store")
    store.add_digits()
    (store.add_digits(version=2) / "fp32.onnx").write_bytes(b"nothing of a model")
    with start_server(store=store.root) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(real: Server) -> Iterator[Prometheus]:
    """With a history of at least one look before the load, from which rates begin."""
    with start_fake_server(**WITH_GPU) as with_gpu, start_fake_server(**SLOW) as slow:
        servers = [address(server) for server in (with_gpu, slow, real)]
        with start_prometheus(servers) as one:
            wait_until(lambda: one.targets() == dict.fromkeys(servers, "up"), "all servers were scraped")
            with asked_all_the_time(with_gpu, slow, real=real):
                yield one


def address(server: Server) -> str:
    """As Prometheus' label `instance` has it."""
    return f"127.0.0.1:{server.port}"


def unanswered(prometheus: Prometheus, asked: dict[str, str]) -> dict[str, str]:
    """Those that have no series now, or nothing but NaN, which is what 0 / 0 gives."""
    return {
        where: expr for where, expr in asked.items() if all(one["value"][1] == "NaN" for one in prometheus.ask(expr))
    }


def wait_for_series(prometheus: Prometheus, asked: dict[str, str]) -> None:
    assert asked
    left = dict(asked)

    def is_done() -> bool:
        nonlocal left
        left = unanswered(prometheus, left)
        return not left

    try:
        wait_until(is_done, "every expression has series", 60.0)
    except AssertionError as error:
        raise AssertionError(f"no series for {left}") from error


ASKED: dict[str, Callable[[], dict[str, str]]] = {
    "panels": lambda: {one.where: one.expr for one in asked_by_panels("10s")},
    # A model of its own stands there for a reader's.
    "page": lambda: {one.where: one.expr.replace('model="digits"', 'model="rows"') for one in asked_in_the_page()},
    "recorded": lambda: {name: name for name in recorded()},
    # With any value: whether the alert fires on it is another test's.
    "alerts": lambda: {one.metric: one.metric for alert in alerts().values() for one in selectors(alert["expr"])},
}


@pytest.mark.parametrize("kind", ASKED)
def test_every_expression_has_series(prometheus: Prometheus, kind: str) -> None:
    wait_for_series(prometheus, ASKED[kind]())
    wait_until(lambda: not prometheus.unhealthy_rules(), "all rules are evaluated")


def test_an_alert_fires_on_what_a_real_server_does(prometheus: Prometheus) -> None:
    """One call in ten fails at one server, which is far more than is promised."""
    expr = 'ALERTS{alertname="ConvoyAvailabilityBurnsFast", alertstate="firing"}'
    (firing,) = wait_until(lambda: prometheus.ask(expr), "the alert fires", 60.0)
    assert firing["metric"]["job"] == "convoy"


def test_values_are_those_of_the_servers(prometheus: Prometheus) -> None:
    processes = prometheus.ask("count by (process) (convoy_process_resident_memory_bytes)")
    assert {one["metric"]["process"]: one["value"][1] for one in processes} == {"core": "3"}
    (gpu,) = prometheus.ask("convoy_gpu_power_watts")
    assert (gpu["metric"]["device"], gpu["value"][1]) == ("cuda:0", "412.5")
    (share,) = wait_until(lambda: prometheus.ask("job:convoy_bad_calls:ratio_rate5m"), "a share was recorded")
    assert 0.0 < float(share["value"][1]) < 0.2


def test_the_bundled_model_is_seen_and_a_version_refused_at_the_start_is_told(
    prometheus: Prometheus, real: Server
) -> None:
    """It was refused before Prometheus looked for the first time."""
    here = f'instance="{address(real)}"'
    answered = f'convoy_call_duration_seconds_count{{{here}, model="digits", version="1", outcome="answered"}}'
    wait_until(lambda: prometheus.ask(f"rate({answered}[10s]) > 0"), "the bundled model answers", 60.0)
    fires = f'ALERTS{{alertname="ConvoyVersionRefused", alertstate="firing", {here}}}'
    wait_until(lambda: prometheus.ask(fires), "the alert fires", 60.0)


def test_alerts_fire_on_an_engine_that_goes_wrong() -> None:
    """Its canary fails for the first time ever, which a counter that begins with zero shows."""
    with start_fake_server(fake={"health": {"canary_after_s": 0.3, "watch_every_s": 0.05}}) as server:
        instance = f"127.0.0.1:{server.port}"
        with start_prometheus([instance]) as prometheus:
            passed = f'convoy_canary_runs_total{{instance="{instance}", model="rows", result="passed"}} > 0'
            wait_until(lambda: prometheus.ask(passed), "its canary has passed")
            assert prometheus.ask('ALERTS{alertname!~"ConvoyNotReady|ConvoyDown"}') == []
            server.switch_on("wrong")
            for alert in ("ConvoyCanaryFailed", "ConvoyEngineReplaced"):
                expr = f'ALERTS{{alertname="{alert}", alertstate="firing", model="rows", version="1"}}'
                wait_until(lambda expr=expr: prometheus.ask(expr), f"{alert} fires", 60.0)
