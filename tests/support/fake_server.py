"""The real host over fake engines, as a process: `python -m tests.support.fake_server`.

Settings come from `CONVOY_*`, as for `uvicorn convoy.app.server.main:app`. Two models are served: `rows` gives its FP32
rows of four back, `images` takes any image and gives ten sums. With `"echo": true` there are more, which give
back what they get: for each dtype `echo_<dtype>`, [batch, any size], and `scalar_<dtype>`, one element without
a batch; BYTES may be any bytes. What a sample of `rows` starts with says
what its engine does: POISON fails its batch, HANG never returns, DIE is fatal for the engine.

With `"gpu": true` only `rows` is there, an ONNX file that is really loaded, onto a fake GPU by ONNX Runtime's engine;
LOSE_GPU breaks the GPU for the process. The GPU tells its figures, by an NVML that is not there, either.

`FAKE_OPTIONS` is JSON: `latency_ms`, `per_sample_ms`, `max_batch`, `reload_ms` (how long it takes to replace an
engine), `patience_s` (after how long a waiting request is overdue), `health` (arguments of HealthOptions),
`hang_from_start` (what to put into the switch `hang_load`), `tells_runs` (whether the file `runs` among the switches
grows by a byte for each run that begins).
`FAKE_SWITCHES` is a folder; a file in it changes at once every engine that is there, and none that is loaded later:
    wrong       answers are wrong, so the canary fails
    hang        every run hangs, the canary's too
    break       every run fails
    hold        every run waits until the file is gone; a number in it is how many of them need not
Two concern loading: with `fail_load` nothing can be loaded any more, with `hang_load` loading does not end before the
file is gone. Where `hang_load` has text, it is the name of the only model that it concerns. `bug` raises in every
route and method, as a mistake in it would; it is looked at only with `"bugs": true` among the options.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fastapi.routing import APIRoute
from starlette.routing import Route

from convoy.app.config.settings import read_settings
from convoy.app.core import Core, CoreOptions
from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.machine import Machine
from convoy.app.engines.memory import check_batch
from convoy.app.http.gate import HotRoute
from convoy.app.lifecycle.health import HealthOptions
from convoy.app.loading.load import LoadedModel, LoadOptions
from convoy.app.loading.proving import CanaryCheck, ProvedEngine
from convoy.app.scheduling import policy
from convoy.app.server import logs
from convoy.app.server.http_server import listen
from convoy.app.server.main import Host
from convoy.app.server.runtime import raise_file_limit, run
from convoy.models.bundle import LatencyPoint
from convoy.models.errors import BundleError
from convoy.models.spec import NUMPY_DTYPES, ImageSpec, ModelSpec, TensorSpec
from convoy.models.store import StoredVersion
from tests.support.fake_engine import Arrays, FakeEngine

POISON, HANG, DIE, LOSE_GPU = 666.0, -1.0, -2.0, -3.0
_SIDE = 8
_IMAGE = ImageSpec(_SIDE, _SIDE, 3, "exact", _SIDE, "nearest", False, (0.0,) * 3, (1.0,) * 3, "uint8_nhwc")


class Fakes:
    """Makes the engines, and decides at every run what they do."""

    def __init__(self, options: dict[str, Any], switches: Path) -> None:
        self._latency_s = options.get("latency_ms", 0.0) / 1e3
        self._per_sample_s = options.get("per_sample_ms", 0.0) / 1e3
        self._max_batch = options.get("max_batch", 16)
        self._tells_runs = options.get("tells_runs", False)
        self._reload_s = options.get("reload_ms", 0.0) / 1e3
        self._switches = switches
        self._loaded: set[str] = set()
        self._released = 0  # runs that the number in `hold` let go

    def load(self, stored: StoredVersion, options: LoadOptions) -> LoadedModel:
        if stored.name in self._loaded:
            time.sleep(self._reload_s)
        self._loaded.add(stored.name)
        while self._text("hang_load") in ("", stored.name):
            time.sleep(0.01)
        if (self._switches / "fail_load").exists():
            raise BundleError(f"{stored.folder}: the switch says that nothing can be loaded")
        spec = self._spec(stored.name)
        check_batch(spec.inputs, spec.outputs, options.configured_batch or spec.max_batch_size)
        engine = FakeEngine(
            spec.inputs,
            spec.outputs,
            max_batch_size=spec.max_batch_size,
            latency_s=self._expected_s,
            sleep=self._tell_and_sleep if self._tells_runs else time.sleep,
        )
        if stored.name.startswith(("echo_", "scalar_")):
            return self._loaded_model(stored, spec, engine)
        born_ns = time.time_ns()
        plain = engine.echo_or_sum
        engine._run_rows = lambda arrays: self._run(arrays, plain(arrays), born_ns)
        engine.is_poisonous = lambda arrays: bool((arrays[0].reshape(-1) == POISON).any())
        return self._loaded_model(stored, spec, engine)

    def _text(self, switch: str) -> str | None:
        """What is in it; None while it is off."""
        try:
            return (self._switches / switch).read_text()
        except FileNotFoundError:
            return None

    def _loaded_model(self, stored: StoredVersion, spec: ModelSpec, engine: FakeEngine) -> LoadedModel:
        sizes = (1, max(1, spec.max_batch_size))
        return LoadedModel(
            stored=stored,
            spec=spec,
            engines=(
                ProvedEngine(
                    engine=engine,
                    canary=CanaryCheck.of_first_answer(engine),
                    latency=tuple(
                        LatencyPoint(size, max(ms, 0.01), ms, ms)
                        for size in sizes
                        for ms in [self._expected_s(size) * 1e3]
                    ),
                    reason="fake",
                    platform="fake",
                ),
            ),
            skipped=(),
            load_s=0.0,
        )

    def _tell_and_sleep(self, seconds: float) -> None:
        with (self._switches / "runs").open("ab") as told:
            told.write(b".")
        time.sleep(seconds)

    def _expected_s(self, samples: int) -> float:
        return self._latency_s + samples * self._per_sample_s

    def _run(self, arrays: Arrays, results: Sequence[np.ndarray], born_ns: int) -> Sequence[np.ndarray]:
        first = arrays[0].reshape(len(arrays[0]), -1)[:, 0]
        if self._is_on("hang", born_ns) or (first == HANG).any():
            threading.Event().wait()
        if (first == DIE).any():
            raise EngineFailure("the device fell off the bus", FailureScope.ENGINE)
        while self._holds(born_ns):
            time.sleep(0.005)
        if self._is_on("break", born_ns):
            raise EngineFailure("the switch says that every run fails")
        return [result + 1 for result in results] if self._is_on("wrong", born_ns) else results

    def _holds(self, born_ns: int) -> bool:
        text = self._text("hold") if self._is_on("hold", born_ns) else None
        if text is None:
            self._released = 0
            return False
        if self._released >= int(text or 0):
            return True
        self._released += 1
        return False

    def _is_on(self, switch: str, born_ns: int) -> bool:
        try:
            return (self._switches / switch).stat().st_mtime_ns > born_ns
        except FileNotFoundError:
            return False

    def _spec(self, name: str) -> ModelSpec:
        if name == "rows":
            x, y = TensorSpec("x", "FP32", (4,)), TensorSpec("y", "FP32", (4,))
            return ModelSpec(name, (x,), (y,), self._max_batch, None, "none", ())
        kind, _, dtype = name.partition("_")
        if kind in ("echo", "scalar"):
            shape, batch = ((-1,), self._max_batch) if kind == "echo" else ((), 0)
            x, y = TensorSpec("x", dtype.upper(), shape), TensorSpec("y", dtype.upper(), shape)
            return ModelSpec(name, (x,), (y,), batch, None, "none", ())
        images, sums = TensorSpec("images", "UINT8", (_SIDE, _SIDE, 3)), TensorSpec("sums", "FP32", (10,))
        return ModelSpec(name, (images,), (sums,), self._max_batch, _IMAGE, "none", ())


def make_core(core_options: CoreOptions, **own: Any) -> Core:
    """A core over fake engines; what they do is in the environment."""
    options = json.loads(os.environ.get("FAKE_OPTIONS", "{}"))
    switches = Path(os.environ["FAKE_SWITCHES"])
    fakes = Fakes(options, switches)
    if "patience_s" in options:
        policy.PATIENCE_NS = int(options["patience_s"] * 1e9)
    # A run that is held hangs only where a test says so, and no canary is held before it, however slow the machine is.
    calm = {"hang_after_s": 600.0, "canary_after_s": 3600.0}
    health = HealthOptions(**{**calm, **options.get("health", {})})
    if options.get("gpu"):
        load_options = replace(core_options.load, machine=_machine_that_can_be_lost())
        return Core(replace(core_options, health=health, load=load_options), **own)
    kind = Core
    if options.get("bugs"):
        kind = _with_bugs(switches / "bug")
        _put_bugs_into_routes(switches / "bug")
    return kind(replace(core_options, health=health), load_version=fakes.load, **own)


# What answers a call whose handler fails, or is asked at times when there is no call.
_NO_HANDLERS = (
    "http.gate",
    "grpc.gate",
    "grpc.opening",
    "grpc.server",
    "http.application",
    "http.connection",
    "calls.access",
    "calls.call",
)
_HANDLERS = tuple(f"convoy.app.{name}." for name in ("http", "grpc", "protocol", "pictures", "calls"))


def _with_bugs(switch: Path) -> type[Core]:
    """A core that cannot be used by any handler of either wire while the switch is on."""
    sound = {f"convoy.app.{name}" for name in _NO_HANDLERS}
    assert all(importlib.util.find_spec(name) for name in sound)

    class CoreWithBugs(Core):
        def __getattribute__(self, name: str) -> Any:
            frame = sys._getframe(1)
            user = frame.f_globals["__name__"]
            is_handler = user not in sound or frame.f_code.co_qualname.startswith("GrpcServices._")
            if user.startswith(_HANDLERS) and is_handler and switch.exists():
                raise RuntimeError("the switch says that there is a bug")
            return super().__getattribute__(name)

    return CoreWithBugs


def _put_bugs_into_routes(switch: Path) -> None:
    """Those routes, too, that do not need the core; the framework's own pages among them."""
    for kind, name in ((Route, "handle"), (APIRoute, "handle"), (HotRoute, "reply")):
        sound: Any = getattr(kind, name)

        async def handle(self: Any, *args: Any, sound: Any = sound) -> Any:
            if os.path.exists(switch):  # noqa: ASYNC240, PTH110 - of a temporary folder
                raise RuntimeError("the switch says that there is a bug")
            return await sound(self, *args)

        setattr(kind, name, handle)


def _machine_that_can_be_lost() -> Machine:
    from tests.support.fake_cuda import ILLEGAL_ADDRESS
    from tests.support.fake_nvml import FakeNvml, busy_device
    from tests.support.gpu_machine import FakeGpu, GpuBench

    bench = GpuBench.of(FakeGpu())
    (gpu,) = bench.machine.gpus
    sys.modules["pynvml"] = FakeNvml(busy_device(gpu.properties.pci_bus_id, "GPU-0"))  # type: ignore[assignment]

    def break_if_told(arrays: Mapping[str, np.ndarray]) -> None:
        if any((array == LOSE_GPU).any() for array in arrays.values()):
            bench.cuda.sticky = ILLEGAL_ADDRESS

    bench.onnxruntime.spoils = break_if_told
    return bench.machine


def main() -> int:
    options = json.loads(os.environ.get("FAKE_OPTIONS", "{}"))
    store = Path(os.environ["FAKE_SWITCHES"]) / "store"
    echoes = [f"{kind}_{dtype.lower()}" for dtype in NUMPY_DTYPES for kind in ("echo", "scalar")]
    if options.get("gpu"):
        from tests.support import onnx_models

        onnx_models.identity(store / "rows" / "1" / "model.onnx", dims=("batch", 4))
    for name in () if options.get("gpu") else ("rows", "images", *(echoes if options.get("echo") else ())):
        (store / name / "1").mkdir(parents=True, exist_ok=True)
    if hanging := options.get("hang_from_start"):
        (store.parent / "hang_load").write_text(hanging)
    settings = read_settings({"store": store})
    logs.configure(settings.log_level, settings.log_format)
    raise_file_limit()
    listener = listen(settings.host, settings.port)
    return run(Host(settings, listener, make_core).run())


if __name__ == "__main__":
    raise SystemExit(main())
