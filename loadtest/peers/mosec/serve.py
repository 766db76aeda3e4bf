"""The network in Mosec, as its documentation would have it: one worker that unpacks bytes and batches in Rust.

Runs in Mosec's own environment. Body and answer are the tensors' bytes, the leanest form that Mosec offers; to a
picture's bytes, JSON is answered. Who decodes it is the worker that computes, or workers before it.
"""

from __future__ import annotations

import os

import numpy as np
from mosec import Server, Worker
from peer_pictures import decode
from peer_side import Network, settings

ASKED = settings()


class Classifier(Worker):
    """Bytes of one sample to bytes of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self._network = Network()

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, self._network.dtype).reshape(self._network.sample_shape)

    def forward(self, data: np.ndarray | list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
        # Mosec gives a list only where batching is on.
        if isinstance(data, list):
            return list(self._network(np.stack(data)))
        return self._network(data[None])[0]

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()


class PictureClassifier(Classifier):
    """A picture's bytes to logits as JSON."""

    def deserialize(self, data: bytes) -> np.ndarray:
        return decode(data, ASKED.resize_px, ASKED.crop_px)

    def serialize(self, data: np.ndarray) -> bytes:
        return Worker.serialize(self, {"output": data.tolist()})


class Decoder(Worker):
    """A picture's bytes to pixels."""

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> np.ndarray:
        return decode(data, ASKED.resize_px, ASKED.crop_px)


if __name__ == "__main__":
    os.environ |= {"MOSEC_PORT": str(ASKED.port), "MOSEC_ADDRESS": "127.0.0.1", "MOSEC_LOG_LEVEL": "warning"}
    server = Server()
    if ASKED.decoders:
        server.append_worker(Decoder, num=ASKED.decoders)
    # Mosec knows whole milliseconds from 1 on; 0 means its default of 10.
    server.append_worker(
        PictureClassifier if ASKED.crop_px else Classifier,
        num=1,
        max_batch_size=ASKED.max_batch,
        max_wait_time=int(ASKED.window_ms),
    )
    server.run()
