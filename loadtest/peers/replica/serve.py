"""Convoy in one replica of Ray Serve behind Ray's HAProxy, in a cluster of its own.

Runs in the environment of the Convoy that is measured, and imports nothing else of it.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
from pathlib import Path

# What docs/ray.md tells people to set on every node.
FAST = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "10",
}
_HAPROXY_FILES = {
    "CONFIG_FILE_LOC": "haproxy.cfg",
    "SOCKET_PATH": "admin.sock",
    "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "server-state",
    "METRICS_SOCKET_PATH": "metrics.sock",
}
_PORTS = ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT", "FALLBACK_PROXY_GRPC_PORT")


def cluster_environment(folder: Path) -> dict[str, str]:
    """For a cluster of Ray's that shares neither files nor ports with any other on this machine."""
    files = {f"RAY_SERVE_HAPROXY_{name}": str(folder / "ha" / path) for name, path in _HAPROXY_FILES.items()}
    ports = {f"RAY_SERVE_{name}": str(_free_port()) for name in _PORTS}
    own = {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    # Ray kills a proxy that is not up after 5 s, which takes longer on a busy machine.
    patience = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "50", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2"}
    return files | ports | own | patience


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


def main() -> None:
    from peer_side import settings

    asked = settings()
    os.environ.update(FAST | cluster_environment(Path.cwd()))

    import ray
    from ray import serve

    # By its name, because it is that of whatever Convoy is measured and not ours.
    own = importlib.import_module("convoy.ray")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80_000_000)
    serve.start(http_options={"host": "127.0.0.1", "port": asked.port})
    arguments = {"store": asked.store, "engine": "cpu"} | ({"threads": asked.threads} if asked.threads else {})
    serve.run(own.build_app(own.AppArguments.model_validate(arguments)), name="convoy", route_prefix="/")
    signal.pause()


if __name__ == "__main__":
    main()
