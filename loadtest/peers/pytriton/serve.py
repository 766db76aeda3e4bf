"""The network in PyTriton: Triton's own front, its dynamic batcher, and a Python function behind them.

Runs in PyTriton's own environment, whose interpreter must have a shared libpython.
"""

from __future__ import annotations

import numpy as np
from peer_side import Network, settings
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

MODEL = "cnn"


def main() -> None:
    asked = settings()
    network = Network()

    @batch
    def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
        (samples,) = inputs.values()
        return {network.output_name: network(samples)}

    config = ModelConfig(
        batching=True,
        max_batch_size=asked.max_batch,
        batcher=DynamicBatcher(max_queue_delay_microseconds=int(asked.window_ms * 1e3))
        if asked.max_batch > 1
        else None,
    )
    ports = TritonConfig(
        http_address="127.0.0.1",
        http_port=asked.port,
        grpc_port=asked.grpc_port,
        metrics_port=asked.metrics_port,
        log_verbose=0,
    )
    with Triton(config=ports) as triton:
        triton.bind(
            model_name=MODEL,
            infer_func=infer,
            inputs=[Tensor(name=network.input_name, dtype=network.dtype, shape=network.sample_shape)],
            outputs=[Tensor(name=network.output_name, dtype=np.float32, shape=(-1,))],
            config=config,
            strict=False,
        )
        triton.serve()


if __name__ == "__main__":
    main()
