"""The server's own engine and its own decoder with nothing around them: what no server can exceed.

The one module here that imports what it measures: a bound is one only if it is made of the very same parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from convoy.app.engines.base import Engine
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.measure import batch_knots, make_probe
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.models.bundle import Bundle, open_bundle
from convoy.models.images import preprocess
from convoy.models.spec import ImageSpec

_TRIAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Bare:
    """Each rate is of all cores working on nothing else. `batch_size` is the one at which the engine is fastest."""

    engine: Engine
    batch_size: int
    image: ImageSpec | None

    def engine_rps(self, seconds: float) -> float:
        """Images a second through the engine, gathering and scattering included."""
        return _engine_rps(self.engine, self.batch_size, seconds)

    def decoder_rps(self, encoded: Sequence[bytes], seconds: float) -> float:
        """Images a second from their bytes to the engine's input, on as many threads as the server would take."""
        image = self.image
        assert image is not None, "only a network with an image specification decodes"
        end_s = time.perf_counter() + seconds
        threads = cpu_budget()

        def decode(_: int) -> int:
            return _count_until(end_s, lambda turn: preprocess(encoded[turn % len(encoded)], image))

        started_s = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            decoded = sum(pool.map(decode, range(threads)))
        return decoded / (time.perf_counter() - started_s)


def open_bare(folder: Path) -> Bare:
    """The bundle's fp32 engine on all cores, at the batch size that serves it best. Raises BundleError."""
    bundle = open_bundle(folder)
    engine = _open(bundle)
    engine.warm_up()
    sizes = batch_knots(bundle.manifest.spec.max_batch_size)
    best = max(sizes, key=lambda size: _engine_rps(engine, size, _TRIAL_S))
    return Bare(engine, best, bundle.manifest.spec.image)


def _open(bundle: Bundle) -> Engine:
    spec = bundle.manifest.spec
    return OnnxRuntimeCpuEngine(
        bundle.path("fp32.onnx"),
        inputs=spec.inputs,
        outputs=spec.outputs,
        max_batch_size=spec.max_batch_size,
        precision="fp32",
        threads=cpu_budget(),
    )


def _engine_rps(engine: Engine, batch_size: int, seconds: float) -> float:
    probe = make_probe(engine, batch_size)
    started_s = time.perf_counter()
    runs = _count_until(started_s + seconds, lambda _: probe.run_ms())
    return runs * batch_size / (time.perf_counter() - started_s)


def _count_until(end_s: float, work: Callable[[int], object]) -> int:
    """How often `work` was done; at least once."""
    turn = 0
    while turn == 0 or time.perf_counter() < end_s:
        work(turn)
        turn += 1
    return turn
