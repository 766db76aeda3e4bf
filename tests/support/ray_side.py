"""Ray's side of a test, in a process of its own: a cluster of raylets on this machine, and lines that say what to do.

A line is a JSON list, of a name and its arguments, and so is each answer: what it gave, and what was raised.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.cluster_utils import Cluster

import convoy.ray
from convoy.models.errors import RequestError


class Side:
    """What a test may ask for."""

    def __init__(
        self,
        nodes: int,
        cpus: float,
        port: int,
        runtime_env: dict[str, Any],
        dashboard: int,
    ) -> None:
        """`dashboard` is its port; 0: there is none."""
        cluster = Cluster()
        for number in range(nodes):
            cluster.add_node(
                num_cpus=cpus,
                object_store_memory=80_000_000,
                include_dashboard=dashboard > 0 and number == 0,
                dashboard_port=dashboard or None,
            )
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=runtime_env)
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="EveryNode")

    def deploy(self, arguments: dict[str, Any], route_prefix: str) -> None:
        serve.run(convoy.ray.build_app(convoy.ray.AppArguments.model_validate(arguments)), route_prefix=route_prefix)

    def states(self) -> dict[str, int]:
        """How many replicas are in each state."""
        applications = list(serve.status().applications.values())
        deployments = [one for application in applications for one in application.deployments.values()]
        if not deployments:
            return {}
        (deployment,) = deployments
        return {str(state): count for state, count in deployment.replica_states.items()}

    def message(self) -> str:
        """What Ray says of the application."""
        (application,) = serve.status().applications.values()
        return application.message

    def predict(self, images: list[str], model: str) -> list[list[str | None]]:
        """The best label of each file of an image, by a handle."""
        handle = serve.get_app_handle("default")
        found = handle.predict.remote([Path(one).read_bytes() for one in images], model=model, top_k=1).result()
        return [[one.label for one in image.predictions] for image in found]

    def infer(self, model: str, name: str, shape: list[int], dtype: str) -> dict[str, list[int]]:
        """The shapes that a handle gives for zeros."""
        handle = serve.get_app_handle("default")
        found = handle.infer.remote({name: np.zeros(shape, dtype)}, model=model).result()
        return {one: list(array.shape) for one, array in found.items()}

    def error_of_infer(self, *given: Any) -> str:
        """The class of what it raises."""
        try:
            self.infer(*given)
        except RequestError as error:
            return type(error).__name__
        return "nothing"


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr
    side = Side(*json.loads(sys.argv[1]))
    print(json.dumps([None, None]), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = [getattr(side, name)(*arguments), None]
        except Exception:
            answer = [None, traceback.format_exc()]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
