"""The network in BentoML: one service, one worker; arrays travel as JSON, pictures as forms.

Runs in BentoML's own environment. BentoML finds the service in this file, in processes of its own; started as a
script, the file starts BentoML. Its batcher decides for itself how long to wait.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import bentoml
import numpy as np
from peer_pictures import to_pixels
from peer_side import Network, settings
from PIL.Image import Image

ASKED = settings()


@bentoml.service(
    name="cnn", workers=1, traffic={"timeout": 10, "max_concurrency": 1024}, logging={"access": {"enabled": False}}
)
class Classifier:
    """`{"input": [batch of samples]}` to the batch's logits."""

    def __init__(self) -> None:
        self._network = Network()

    # A size of 1 is refused even where batching is off.
    @bentoml.api(batchable=ASKED.max_batch > 1, max_batch_size=max(2, ASKED.max_batch), max_latency_ms=1000)
    def classify(self, input: np.ndarray) -> np.ndarray:
        return self._network(input.astype(np.float32, copy=False))

    @bentoml.api(batchable=ASKED.max_batch > 1, max_batch_size=max(2, ASKED.max_batch), max_latency_ms=1000)
    def classify_image(self, image: list[Image]) -> np.ndarray:
        """A form whose field `image` is a picture's file."""
        return self._network(np.stack([to_pixels(one, ASKED.resize_px, ASKED.crop_px) for one in image]))


if __name__ == "__main__":
    here = Path(__file__)
    os.chdir(here.parent)
    command = [sys.executable, "-m", "bentoml", "serve", f"{here.stem}:Classifier"]
    os.execv(sys.executable, [*command, "--host", "127.0.0.1", "--port", str(ASKED.port)])
