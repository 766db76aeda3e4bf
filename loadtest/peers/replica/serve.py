"""Convoy in one replica of Ray Serve behind Ray's HAProxy, in a cluster of its own.

Runs in the environment of the Convoy that is measured, and imports nothing else of it.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

# What docs/ray.md tells people to set on every node.
FAST = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "10",
}
# HAProxy can send again only what had come whole before it passed anything on. Ray has no variable for that option; it
# writes this one's value into HAProxy's file as it is, under `defaults`.
WHOLE_BODIES = {
    "RAY_SERVE_HAPROXY_RETRY_ON": f"{FAST['RAY_SERVE_HAPROXY_RETRY_ON']}\n    option http-buffer-request",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(1 << 20),
}
_HAPROXY_FILES = {
    "CONFIG_FILE_LOC": "haproxy.cfg",
    "SOCKET_PATH": "admin.sock",
    "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "server-state",
    "METRICS_SOCKET_PATH": "metrics.sock",
}
_OWN_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)


def cluster_environment(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """For a cluster of Ray's that shares neither files nor ports with any other on this machine."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CONVOY_"))}
    own |= {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    own |= {f"RAY_SERVE_HAPROXY_{name}": str(folder / "ha" / path) for name, path in _HAPROXY_FILES.items()}
    own |= {name: str(_free_port()) for name in _OWN_PORTS}
    return own | {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2", **more}


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


def main() -> None:
    from peer_side import settings

    asked = settings()
    os.environ.update(cluster_environment(Path.cwd(), FAST))

    import ray
    from ray import serve

    from convoy.ray import AppArguments, build_app

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80_000_000)
    serve.start(http_options={"host": "127.0.0.1", "port": asked.port})
    arguments = {"store": asked.store, "engine": "cpu", "threads": asked.threads}
    serve.run(build_app(AppArguments.model_validate(arguments)), name="convoy", route_prefix="/")
    signal.pause()


if __name__ == "__main__":
    main()
