"""What every peer's server script needs: its settings and the network, in ONNX Runtime as Convoy configures it.

Runs in a peer's own environment, found through PYTHONPATH; knows the standard library, numpy and ONNX Runtime and
nothing of Convoy. Settings come from the environment, because every framework hands that on to the processes it
starts, while most of them read the command line themselves.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import get_type_hints

import numpy as np
import onnxruntime


@dataclass(frozen=True)
class PeerSettings:
    """`model` is the ONNX file, `store` has it for Convoy. `window_ms` is how long a batch may wait for others, and
    `max_batch` 1 is batching switched off; `decoders` are processes that only decode.

    Pictures' shorter side becomes `resize_px`, of which `crop_px` count; 0 and 0 where requests carry tensors.
    """

    model: str
    store: str
    resize_px: int
    crop_px: int
    port: int
    grpc_port: int
    metrics_port: int
    threads: int
    max_batch: int
    window_ms: float
    decoders: int


def settings() -> PeerSettings:
    """What the comparison asks of this server."""
    kinds = get_type_hints(PeerSettings)
    return PeerSettings(**{name: kind(os.environ[f"PEER_{name.upper()}"]) for name, kind in kinds.items()})


class Network:
    """Call it with [batch, *sample_shape] of `dtype`; it gives float32 [batch, ...]."""

    def __init__(self) -> None:
        asked = settings()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = asked.threads
        options.inter_op_num_threads = 1
        # Threads that spin while they wait would take the cores from the server around the engine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # It moves a Pad's zeros into the pads of a MaxPool, where they mean minus infinity.
        options.add_session_config_entry("optimization.disable_specified_optimizers", "Pad_Fusion")
        self._session = onnxruntime.InferenceSession(asked.model, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0]
        self.sample_shape = tuple(self._input.shape[1:])
        self.dtype = np.uint8 if self._input.type == "tensor(uint8)" else np.float32
        self.input_name = self._input.name
        self.output_name = self._session.get_outputs()[0].name
        self(np.zeros((1, *self.sample_shape), self.dtype))

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        (logits,) = self._session.run(None, {self._input.name: batch})
        return logits
