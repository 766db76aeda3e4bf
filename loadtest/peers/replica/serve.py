"""Convoy in one replica of Ray Serve behind Ray's HAProxy, in a cluster of its own.

Runs in the environment of the Convoy that is measured, and imports nothing else of it.
"""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path

# What docs/ray.md tells people to set on every node.
FAST = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "10",
}


def main() -> None:
    from peer_side import settings

    asked = settings()
    os.environ.update({**FAST, "RAY_TMPDIR": str(Path.cwd()), "RAY_USAGE_STATS_ENABLED": "0"})

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
