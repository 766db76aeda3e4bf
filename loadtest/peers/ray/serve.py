"""The network in Ray Serve: one replica with `@serve.batch` behind Ray's HTTP proxy; bodies are plain bytes.

What is asked with tensors answers with tensors, and what is asked with pictures with JSON.

Runs in Ray's own environment.
"""

from __future__ import annotations

import os
import signal

import numpy as np
import ray
from peer_pictures import decode
from peer_side import Network, settings
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

ASKED = settings()


@serve.deployment(
    num_replicas=1,
    max_ongoing_requests=1024,
    ray_actor_options={"num_cpus": 1},
    logging_config={"enable_access_log": False},
)
class Classifier:
    """Bytes of one sample to bytes of its logits, a picture's to logits as JSON."""

    def __init__(self) -> None:
        self._network = Network()

    @serve.batch(max_batch_size=ASKED.max_batch, batch_wait_timeout_s=ASKED.window_ms / 1e3)
    async def classify(self, samples: list[np.ndarray]) -> list[np.ndarray]:
        return list(self._network(np.stack(samples)))

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        if ASKED.crop_px:
            sample = decode(body, ASKED.resize_px, ASKED.crop_px)
        else:
            sample = np.frombuffer(body, self._network.dtype).reshape(self._network.sample_shape)
        logits = self._network(sample[None])[0] if ASKED.max_batch == 1 else await self.classify(sample)
        if ASKED.crop_px:
            return JSONResponse({"output": logits.tolist()})
        return Response(logits.tobytes(), media_type="application/octet-stream")


def main() -> None:
    peer_variables = {name: value for name, value in os.environ.items() if name.startswith(("PEER_", "PYTHONPATH"))}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=True,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": peer_variables},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": ASKED.port}, logging_config={"enable_access_log": False})
    # The decorator made a deployment of the class.
    serve.run(Classifier.bind(), name="cnn", route_prefix="/")  # type: ignore[attr-defined]
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
