"""A bundle's fp32 file in a plain ONNX Runtime session, fed by the same decoder: what nothing around them can exceed.

The shape is that of one worker: threads read and decode files into one batch's memory while the session computes the
batch before. Nothing is scored, collected or written.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from convoy.app.engines.onnx_session import new_session, session_options
from convoy.models.bundle import open_bundle
from convoy.models.errors import ImageError
from convoy.models.image_files import read_image_file
from convoy.models.images import decode_image_into


def bare_rate(bundle_folder: Path, images: list[Path], threads: int, batch_size: int) -> float:
    """Images a second: so many threads compute, and as many decode. Raises BundleError."""
    bundle = open_bundle(bundle_folder)
    spec = bundle.manifest.spec
    image = spec.image
    assert image is not None, "only a model that takes images is labelled with"
    session = new_session(bundle.path("fp32.onnx"), session_options(threads=threads))
    name, shape = spec.inputs[0].name, spec.inputs[0].shape
    memory = [np.zeros((batch_size, *shape), spec.inputs[0].numpy_dtype) for _ in range(2)]
    batches = [images[start : start + batch_size] for start in range(0, len(images), batch_size)]

    def decode(path: Path, row: np.ndarray) -> None:
        try:
            decode_image_into(read_image_file(path), image, row.reshape(-1).view(np.uint8).data)
        except ImageError:
            row[:] = 0

    session.run(None, {name: memory[0]})
    with ThreadPoolExecutor(threads) as pool:
        started_s = time.perf_counter()
        decoding = [pool.submit(decode, path, memory[0][row]) for row, path in enumerate(batches[0])]
        for number, batch in enumerate(batches):
            for one in decoding:
                one.result()
            if number + 1 < len(batches):
                ahead = memory[(number + 1) % 2]
                decoding = [pool.submit(decode, path, ahead[row]) for row, path in enumerate(batches[number + 1])]
            session.run(None, {name: memory[number % 2][: len(batch)]})
        return len(images) / (time.perf_counter() - started_s)
