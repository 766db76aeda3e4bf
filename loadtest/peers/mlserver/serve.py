"""The network in MLServer: a runtime of its own kind, with MLServer's batching and JSON bodies.

Runs in MLServer's own environment. The runtime computes in the server's process (`parallel_workers` 0): a network
this small costs less than handing its tensors to another process.
"""

from __future__ import annotations

import asyncio

import numpy as np
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from peer_side import Network, settings

MODEL = "cnn"


class Classifier(MLModel):
    """One float32 tensor [batch, ...] to one of logits."""

    async def load(self) -> bool:
        self._network = Network()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        # JSON numbers arrive as float64 where nothing says FP32 to numpy.
        samples = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32, copy=False)
        # The same blocking call that its own runtimes make; it is over in tens of microseconds a sample.
        logits = self._network(samples)
        return InferenceResponse(
            model_name=self.name, outputs=[NumpyCodec.encode_output(self._network.output_name, logits)]
        )


async def main() -> None:
    asked = settings()
    server = MLServer(
        Settings(
            host="127.0.0.1",
            http_port=asked.port,
            grpc_port=asked.grpc_port,
            metrics_port=asked.metrics_port,
            parallel_workers=0,
            debug=False,
            load_models_at_startup=False,
        )
    )
    model = ModelSettings(
        name=MODEL,
        implementation=Classifier,
        # 0 switches batching off.
        max_batch_size=asked.max_batch if asked.max_batch > 1 else 0,
        max_batch_time=asked.window_ms / 1e3 if asked.max_batch > 1 else 0,
    )
    await server.start([model])


if __name__ == "__main__":
    asyncio.run(main())
