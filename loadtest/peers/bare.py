"""A bundle's engine and decoder with nothing around them: what no server can exceed.

The one module here that imports what it measures. Decoding and computing share the cores, so an image costs the sum of
what each costs when it has all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.measure import batch_knots, make_probe
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.models.bundle import open_bundle
from convoy.models.images import preprocess
from convoy.models.spec import ImageSpec

_TRIAL_S = 0.5  # of a batch size


def bare_rate(bundle_folder: Path, pictures: Sequence[bytes]) -> Callable[[float], float]:
    """What gives images a second of the fp32 file on all cores, at the batch size that serves it best.

    With pictures, which are decoded on as many threads.
    """
    bundle, threads = open_bundle(bundle_folder), cpu_budget()
    spec = bundle.manifest.spec
    engine = OnnxRuntimeCpuEngine(
        bundle.path("fp32.onnx"),
        inputs=spec.inputs,
        outputs=spec.outputs,
        max_batch_size=spec.max_batch_size,
        precision="fp32",
        threads=threads,
    )
    engine.warm_up()
    probes = {size: make_probe(engine, size) for size in batch_knots(spec.max_batch_size)}
    best = max(probes, key=lambda size: size * _per_s(lambda _: probes[size].run_ms(), _TRIAL_S))

    def engine_rps(seconds: float) -> float:
        return best * _per_s(lambda _: probes[best].run_ms(), seconds)

    def decoder_rps(seconds: float) -> float:
        assert spec.image is not None, "only a network with an image specification decodes"
        decode = partial(_decode_one, pictures, spec.image)
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(lambda _: _per_s(decode, seconds), range(threads)))

    if not pictures:
        return engine_rps
    return lambda seconds: 1 / (1 / engine_rps(seconds / 2) + 1 / decoder_rps(seconds / 2))


def _decode_one(pictures: Sequence[bytes], image: ImageSpec, turn: int) -> None:
    preprocess(pictures[turn % len(pictures)], image)


def _per_s(work: Callable[[int], object], seconds: float) -> float:
    """How often `work` can be done in a second; it is done at least once."""
    started_s, turn = time.perf_counter(), 0
    while turn == 0 or time.perf_counter() < started_s + seconds:
        work(turn)
        turn += 1
    return turn / (time.perf_counter() - started_s)
