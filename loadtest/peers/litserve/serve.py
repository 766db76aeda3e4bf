"""The network in LitServe: JSON or a form with a picture in, JSON out, because its bodies are JSON or forms.

Runs in LitServe's own environment.
"""

from __future__ import annotations

import litserve
import numpy as np
from peer_pictures import to_pixels
from peer_side import Network, settings
from PIL import Image


class Classifier(litserve.LitAPI):
    """`{"input": [...]}`, one sample flat, to `{"output": [...]}`."""

    def setup(self, device: str) -> None:
        self._network = Network()

    def decode_request(self, request: dict[str, list[float]]) -> np.ndarray:
        return np.array(request["input"], np.float32).reshape(self._network.sample_shape)

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, x: np.ndarray) -> np.ndarray:
        # LitServe stacks only where batching is on.
        return self._network(x) if x.ndim > len(self._network.sample_shape) else self._network(x[None])[0]

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict[str, list[float]]:
        return {"output": output.tolist()}


class PictureClassifier(Classifier):
    """A form whose field `image` is a picture's file."""

    def decode_request(self, request) -> np.ndarray:  # type: ignore[no-untyped-def]  # unnamed, it is the form
        asked = settings()
        return to_pixels(Image.open(request["image"].file), asked.resize_px, asked.crop_px)


if __name__ == "__main__":
    asked = settings()
    api = (PictureClassifier if asked.crop_px else Classifier)(
        max_batch_size=asked.max_batch, batch_timeout=asked.window_ms / 1e3
    )
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=asked.port, log_level="warning", generate_client_file=False)
