"""What is asked of a GPU, one function a step. Each runs in a process of its own and tells `Report` what it found.

In a dry run there is no GPU: the fakes of the tests stand for CUDA and for ONNX Runtime's provider, and everything is
small. That shows that a step starts and ends, nothing else.
"""

from __future__ import annotations

import http.client
import importlib
import importlib.util
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from tests.gpu.proof.networks import INPUT, OUTPUT, SMALL, Size, images, torch_network, write_onnx

ROOT = Path(__file__).resolve().parents[3]
PROVIDER = "CUDAExecutionProvider"
_LIBRARIES = ("torch", "triton", "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "cuda-bindings", "pytest")
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Rounding in FP16 over fifty layers, and of two orders of summing in FP32.
_FP16_ERROR, _FP32_ERROR = 2e-2, 1e-3


class NotMeasurable(Exception):
    """Something is missing here; the message says what."""


@dataclass(frozen=True, slots=True)
class Report:
    """Takes what a step finds. `folder` is for its files, `limit_s` what it may take, `is_dry` a run without a GPU."""

    write: Callable[[dict[str, Any]], None]
    folder: Path
    limit_s: float
    is_dry: bool

    def check(self, name: str, expected: str, found: str, passes: bool) -> None:
        self.write({"check": name, "expected": expected, "found": found, "verdict": "pass" if passes else "fail"})

    def tell(self, name: str, found: str) -> None:
        """A figure that nothing is expected of."""
        self.write({"check": name, "expected": "", "found": found, "verdict": "measured"})

    @property
    def size(self) -> Size:
        return SMALL if self.is_dry else Size()


class Gpu(NamedTuple):
    """The first GPU: Convoy's device, the CUDA bindings below it, and ONNX Runtime with the CUDA provider."""

    device: Any
    bindings: Any
    onnxruntime: Any


def open_gpu(report: Report, *, needs_provider: bool = True) -> Gpu:
    """Raises NotMeasurable."""
    from convoy.app.engines.cuda import driver
    from convoy.app.engines.cuda.device import Device, open_devices

    if report.is_dry:
        from tests.support.fake_cuda import FakeCuda
        from tests.support.fake_onnxruntime import FakeRuntime

        fake = FakeCuda()
        return Gpu(Device(driver.Cuda(fake), 0), fake, FakeRuntime(fake))
    try:
        devices = open_devices()[0]
    except driver.CudaUnavailable as error:
        raise NotMeasurable(f"no usable GPU: {error}") from error
    return Gpu(devices[0], driver.load_runtime(), _load_onnxruntime() if needs_provider else None)


def _load_onnxruntime() -> Any:
    module: Any = importlib.import_module("onnxruntime")
    if PROVIDER not in module.get_available_providers():
        raise NotMeasurable(f"{module.__file__} has no {PROVIDER}; --carried names the folder that brings one")
    with redirect_stdout(io.StringIO()):  # it prints each library that it leaves to the loader
        module.preload_dlls()
    return module


class Way(NamedTuple):
    """The provider's options that are asked about."""

    tf32: bool = True
    nhwc: bool = True
    fuse_bias: bool = False
    graphs: bool = False

    def __str__(self) -> str:
        return " ".join(f"{name}={value:d}" for name, value in self._asdict().items())


class Session:
    """ONNX Runtime by itself: one session of the CUDA provider, each batch size bound to its own device memory."""

    def __init__(self, model: Path, way: Way, is_dry: bool) -> None:
        import onnxruntime

        self._ort, self._way = onnxruntime, way
        self._place = "cpu" if is_dry else "cuda"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        chosen = {
            "cudnn_conv_algo_search": "HEURISTIC",
            "prefer_nhwc": f"{way.nhwc:d}",
            "use_tf32": f"{way.tf32:d}",
            "fuse_conv_bias": f"{way.fuse_bias:d}",
            "enable_cuda_graph": f"{way.graphs:d}",
        }
        providers = ["CPUExecutionProvider"] if is_dry else [(PROVIDER, chosen)]
        self._session = onnxruntime.InferenceSession(str(model), options, providers=providers)
        if not is_dry and self._session.get_providers()[0] != PROVIDER:
            raise NotMeasurable(f"{PROVIDER} does not load; the step machine says why")
        self._bound: dict[int, tuple[Any, Any, Any]] = {}

    def bind(self, batch: np.ndarray) -> None:
        """Put a batch on the device; `run` names it by its size."""
        binding, run_options = self._session.io_binding(), self._ort.RunOptions()
        value = self._ort.OrtValue.ortvalue_from_numpy(batch, self._place, 0)
        classes = self._session.get_outputs()[0].shape[1]
        answer = self._ort.OrtValue.ortvalue_from_shape_and_type([len(batch), classes], np.float32, self._place, 0)
        binding.bind_ortvalue_input(INPUT, value)
        binding.bind_ortvalue_output(OUTPUT, answer)
        if self._way.graphs and self._place == "cuda":
            run_options.add_run_config_entry("gpu_graph_id", str(1 + len(self._bound)))
        self._bound[len(batch)] = (binding, run_options, answer)

    def run(self, size: int) -> np.ndarray:
        """Run a bound batch and wait for it."""
        binding, run_options, answer = self._bound[size]
        self._session.run_with_iobinding(binding, run_options)
        result: np.ndarray = answer.numpy()
        return result

    def run_copying(self, batch: np.ndarray) -> np.ndarray:
        """A plain `run`: from the host and back."""
        (answer,) = self._session.run([OUTPUT], {INPUT: batch})
        return np.asarray(answer)


def _median_ms(run: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        run()
        times.append((time.perf_counter() - began_s) * 1e3)
    return median(times)


def _error(answer: np.ndarray, expected: np.ndarray) -> float:
    """||a - b|| / ||b||; 1e9 for what is no number."""
    error = float(np.linalg.norm(answer.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))
    return error if np.isfinite(error) else 1e9


def _on_cpu(model: Path, batch: np.ndarray) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run([OUTPUT], {INPUT: batch})[0])


# The steps


def machine(report: Report) -> None:
    """The GPU, the driver, the libraries, and whether ONNX Runtime's CUDA provider loads and computes right."""
    report.tell("python", f"{platform.python_version()}, {os.cpu_count()} cores")
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            report.tell(name, metadata.version(name))
    gpu = open_gpu(report, needs_provider=False)
    properties = gpu.device.properties
    found = f"{properties.name}, compute capability {properties.compute_capability}, bus {properties.pci_bus_id!r}"
    report.check("gpu", "a device whose bus id holds no NUL", found, "\0" not in properties.pci_bus_id)
    report.tell("memory", f"{properties.total_bytes / 2**30:.1f} GiB, {gpu.device.cuda.free_bytes() / 2**30:.1f} free")
    report.tell("driver", f"CUDA {gpu.device.cuda.driver_version()}")
    if not report.is_dry:
        _load_onnxruntime()
    model = write_onnx(report.folder / "small.onnx", SMALL, half=False)
    batch = images(2, SMALL)
    session = Session(model, Way(tf32=False), report.is_dry)
    session.bind(batch)
    error = _error(session.run(2), _on_cpu(model, batch))
    report.check("provider", f"answers within {_FP32_ERROR:g} of the CPU's", f"{error:.1e}", error < _FP32_ERROR)
    for name in _mapped(r"lib(onnxruntime_providers_cuda|cudart|cudnn|cublas|cublasLt|cufft)\b.*\.so"):
        report.tell("library", name)


def _mapped(pattern: str) -> list[str]:
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return sorted(one for one in paths if re.match(pattern, one.rpartition("/")[2]))


def gpu_tests(report: Report) -> None:
    """The tests marked `gpu`, without those that train; in a dry run, those that run against the fakes."""
    command = [sys.executable, "-m", "pytest", "--noconftest", "-c", os.devnull, f"--rootdir={ROOT}", "-q", "-rfEs"]
    command += ["-p", "no:cacheprovider", "-W", "ignore", "-m", "not gpu" if report.is_dry else "gpu"]
    tests = [str(one) for one in sorted((ROOT / "tests" / "gpu").glob("test_*.py")) if "train" not in one.name]
    if importlib.util.find_spec("hypothesis") is not None and not report.is_dry:
        tests.append(str(ROOT / "tests" / "contract"))
    # None of the plugins that this Python may have is needed.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, *tests], cwd=ROOT, env=env, capture_output=True, text=True, timeout=report.limit_s)
    print(done.stdout[-20_000:], done.stderr[-4_000:])
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?)\b", last)}
    report.check("tests", "some pass, none fails", last, bool(counts.get("passed")) and done.returncode == 0)
    for line in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)[:20]:
        report.tell("test", line[:400])


def serve(report: Report) -> None:
    """`convoy serve` on ONNX Runtime CUDA: right answers to pictures and tensors, then the same under load."""
    store = report.folder / "store"
    (store / "resnet" / "1").mkdir(parents=True)
    (store / "digits").symlink_to(ROOT / "models" / "demo" / "digits")
    size = report.size
    model = write_onnx(store / "resnet" / "1" / "model.onnx", size, half=False)
    batch = images(4, size)
    expected = _on_cpu(model, batch)
    pictures = [(ROOT / "tests" / "data" / f"{word}.png").read_bytes() for word in _DIGITS]
    with _server(store, report) as port:
        engines = {one["name"]: one["engine"] for one in _get(port, "/stats")["models"]}
        wanted = "onnxruntime-cpu" if report.is_dry else "onnxruntime-cuda"
        report.check("engine", f"{wanted} for both models", str(engines), set(engines.values()) == {wanted})
        labels = [_predict(port, picture) for picture in pictures]
        report.check("pictures", "0 to 9", " ".join(labels), labels == [str(digit) for digit in range(10)])
        error = _error(_infer(port, batch), expected)
        report.check("tensors", f"within {_FP32_ERROR:g} of the CPU", f"{error:.1e}", error < _FP32_ERROR)
        report.check("load", "every answer right", *_under_load(port, pictures, 1.0 if report.is_dry else 8.0))
        report.tell("batches", json.dumps([_batches(one) for one in _get(port, "/stats")["models"]]))


def _batches(model: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in model.items() if key in ("name", "engine", "precision", "requests", "batches")}


@contextmanager
def _server(store: Path, report: Report) -> Iterator[int]:
    """A server on a free port, ready; its log goes to this step's output."""
    log = report.folder / "serve.log"
    engine = "cpu" if report.is_dry else "cuda"
    command = [sys.executable, "-m", "convoy", "serve", "--store", str(store), "--engine", engine, "--host"]
    command += ["127.0.0.1", "--port", "0", "--grpc-port", "-1", "--access-log", "off"]
    command += ["--plan-cache", str(report.folder / "plans")]
    with log.open("wb") as out:
        child = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    try:
        yield _ready_port(child, log, report.limit_s * 0.6)
        child.send_signal(signal.SIGTERM)
        code = child.wait(timeout=30)
        report.check("stop", "exit code 0 after SIGTERM", str(code), code == 0)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        print(log.read_text()[-20_000:])


def _ready_port(child: subprocess.Popen[bytes], log: Path, patience_s: float) -> int:
    end_s = time.monotonic() + patience_s
    while time.monotonic() < end_s and child.poll() is None:
        found = re.search(r"listening on http://[^:]+:(\d+)", log.read_text())
        if found:
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
                connection.request("GET", "/v2/health/ready")
                if connection.getresponse().status == 200:
                    return int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"the server is not ready; its log ends with: {log.read_text()[-2000:]}")


def _get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return json.load(answer)


def _predict(port: int, picture: bytes, connection: http.client.HTTPConnection | None = None) -> str:
    connection = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/predictions/digits", picture, {"Content-Type": "image/png"})
    answer = connection.getresponse()
    told = json.loads(answer.read())
    return str(told["predictions"][0]["label"]) if answer.status == 200 else f"{answer.status} {told.get('error')}"


def _infer(port: int, batch: np.ndarray) -> np.ndarray:
    tensor = {
        "name": INPUT,
        "shape": batch.shape,
        "datatype": "UINT8",
        "parameters": {"binary_data_size": batch.nbytes},
    }
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": OUTPUT, "parameters": {"binary_data": True}}]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/resnet/infer",
        data=head + batch.tobytes(),
        headers={"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        body, length = answer.read(), int(answer.headers["Inference-Header-Content-Length"])
    shape = json.loads(body[:length])["outputs"][0]["shape"]
    return np.frombuffer(body[length:], np.float32).reshape(shape)


def _under_load(port: int, pictures: list[bytes], duration_s: float) -> tuple[str, bool]:
    """What 32 clients got in so many seconds, and whether all of it was right."""
    end_s = time.monotonic() + duration_s

    def client(number: int) -> tuple[int, list[str]]:
        connection, right, wrong = http.client.HTTPConnection("127.0.0.1", port, timeout=30), 0, []
        while time.monotonic() < end_s:
            digit = (number + right) % 10
            label = _predict(port, pictures[digit], connection)
            right += label == str(digit)
            wrong += [] if label == str(digit) else [f"{digit}: {label}"]
        return right, wrong

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(client, range(32)))
    right, wrong = sum(one for one, _ in found), [word for _, words in found for word in words]
    return f"{right / duration_s:.0f} right answers a second, {len(wrong)} wrong {wrong[:3]}", right > 0 and not wrong


def replay(report: Report) -> None:
    """CUDA graphs of several batch sizes, replayed after all were captured, with and without fused bias."""
    size, sizes = report.size, (1, 3, 8)
    model = write_onnx(report.folder / "network.onnx", size, half=True)
    batch = images(max(sizes), size)
    plain = Session(model, Way(), report.is_dry)
    expected = {one: plain.run_copying(batch[:one]) for one in sizes}
    for fuse_bias in (False, True):
        session = Session(model, Way(graphs=True, fuse_bias=fuse_bias), report.is_dry)
        for one in sizes:
            session.bind(batch[:one])
            session.run(one)
        errors = [_error(session.run(one), expected[one]) for _ in range(3) for one in (*sizes, *reversed(sizes))]
        found = f"worst of {len(errors)} replays: {max(errors):.1e}"
        name = f"replay, fuse_conv_bias={fuse_bias:d}"
        report.check(name, f"within {_FP16_ERROR:g} of plain runs", found, max(errors) < _FP16_ERROR)
    gpu = open_gpu(report)
    with _engine(gpu, model, size, sizes) as run:
        errors = [_error(run(batch[:one]), expected[one]) for _ in range(3) for one in (*sizes, *reversed(sizes))]
    found = f"worst of {len(errors)}: {max(errors):.1e}"
    report.check("Convoy's engine", f"within {_FP16_ERROR:g} of plain runs", found, max(errors) < _FP16_ERROR)


@contextmanager
def _engine(
    gpu: Gpu, model: Path, size: Size, batch_sizes: tuple[int, ...], *, half: bool = True
) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    """Convoy's engine for ONNX Runtime on the GPU, warm: a batch to its logits."""
    from convoy.app.engines.base import run_arrays
    from convoy.app.engines.onnxruntime_cuda import ConvolutionTuning, OnnxRuntimeCudaEngine
    from convoy.models.spec import TensorSpec

    engine = OnnxRuntimeCudaEngine(
        model,
        gpu.device,
        gpu.onnxruntime,
        inputs=(TensorSpec(INPUT, "UINT8", (size.side, size.side, 3)),),
        outputs=(TensorSpec(OUTPUT, "FP32", (size.classes,)),),
        batch_sizes=batch_sizes,
        batched=True,
        precision="fp16" if half else "fp32",
        tuning=ConvolutionTuning(),
    )
    try:
        engine.warm_up()
        yield lambda batch: run_arrays(engine, {INPUT: batch})[OUTPUT]
    finally:
        engine.close()


def convolutions(report: Report) -> None:
    """use_tf32 in FP16 and FP32, and what a change of batch size costs without CUDA graphs and with them."""
    size, largest, rounds = report.size, 2 if report.is_dry else 32, 2 if report.is_dry else 15
    full = write_onnx(report.folder / "fp32.onnx", size, half=False)
    half = write_onnx(report.folder / "fp16.onnx", size, half=True)
    batch = images(largest, size)
    expected = _on_cpu(full, batch[:2])
    took: dict[tuple[bool, bool], float] = {}
    for is_half, tf32 in ((True, True), (True, False), (False, True), (False, False)):
        session = Session(half if is_half else full, Way(tf32=tf32), report.is_dry)
        session.bind(batch)
        error = _error(session.run(largest)[:2], expected)
        took[is_half, tf32] = _median_ms(partial(session.run, largest), rounds)
        most = _FP32_ERROR if not is_half and not tf32 else _FP16_ERROR
        found = f"{took[is_half, tf32]:.2f} ms at batch {largest}, error {error:.1e}"
        report.check(
            f"{'fp16' if is_half else 'fp32'}, use_tf32={tf32:d}", f"error below {most:g}", found, error < most
        )
    slower = took[True, False] / took[True, True]
    expects = "use_tf32=0 slows FP16 by 1.3 and more"
    report.check("tensor cores", expects, f"{slower:.2f} times as slow", slower > 1.3 or report.is_dry)
    for graphs in (False, True):
        session = Session(half, Way(graphs=graphs), report.is_dry)
        for one in (1, largest):
            session.bind(batch[:one])
            session.run(one)
        alone = sum(_median_ms(partial(session.run, one), rounds) for one in (1, largest))
        turns = _median_ms(lambda session=session: (session.run(1), session.run(largest)), rounds)
        expects = "no dearer in turns" if graphs else "dearer in turns"
        passes = turns < 1.2 * alone if graphs else turns > 1.2 * alone
        found = f"sizes 1 and {largest}: {alone:.2f} ms alone, {turns:.2f} ms in turns"
        report.check(f"size changes, graphs={graphs:d}", expects, found, passes or report.is_dry)


def captures(report: Report) -> None:
    """Captures of ONNX Runtime while another thread waits or allocates, and Convoy's engines two at a time."""
    gpu = open_gpu(report)
    model = write_onnx(report.folder / "network.onnx", SMALL, half=True)
    batch = images(1, SMALL)
    attempts = 1 if report.is_dry else 5
    for name, deed in (("nothing", None), ("waits", _wait), ("allocations", _allocate)):
        failed = []
        for _ in range(attempts):
            with _disturbing(gpu.bindings, deed):
                try:
                    session = Session(model, Way(graphs=True), report.is_dry)
                    session.bind(batch)
                    session.run(1)  # captures
                except NotMeasurable:
                    raise
                except Exception as error:  # onnxruntime's errors share no base class
                    failed.append(str(error).splitlines()[0][:200])
        found = f"{len(failed)} of {attempts} failed {sorted(set(failed))}"
        if deed is None:
            report.check("captures beside nothing", "none fails", found, not failed)
        else:
            report.tell(f"captures beside {name}", found)

    def open_and_run(_: int) -> float:
        with _engine(gpu, model, SMALL, (1, 2, 4)) as run:
            return _error(run(batch), expected)

    expected = Session(model, Way(), report.is_dry).run_copying(batch)
    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(open_and_run, range(2 if report.is_dry else 8)))
    found = f"{len(errors)} engines, worst error {max(errors):.1e}"
    report.check("Convoy's engines, two at a time", "all open and answer right", found, max(errors) < _FP16_ERROR)


@contextmanager
def _disturbing(bindings: Any, deed: Callable[[Any], None] | None) -> Iterator[None]:
    """Another thread does it again and again, from before the first run on."""
    is_over, is_running = threading.Event(), threading.Event()

    def disturb() -> None:
        bindings.cudaSetDevice(0)
        while not is_over.is_set():
            deed(bindings)  # type: ignore[misc]
            is_running.set()

    thread = threading.Thread(target=disturb, daemon=True)
    if deed is not None:
        thread.start()
        is_running.wait()
    try:
        yield
    finally:
        is_over.set()
        if deed is not None:
            thread.join()


def _wait(bindings: Any) -> None:
    bindings.cudaDeviceSynchronize()


def _allocate(bindings: Any) -> None:
    status, address = bindings.cudaMalloc(8 << 20)
    if not int(status):
        bindings.cudaFree(address)


def resnet50(report: Report) -> None:
    """ResNet-50 in FP16, from the host and back: Convoy's engine, ONNX Runtime by itself, and torch."""
    import torch

    size, sizes = report.size, (1, 2) if report.is_dry else (1, 2, 4, 8, 16, 32, 64)
    rounds, device = (2, "cpu") if report.is_dry else (30, "cuda")
    model = write_onnx(report.folder / "resnet50.onnx", size, half=True)
    full = write_onnx(report.folder / "fp32.onnx", size, half=False)
    batch = images(max(sizes), size)
    expected = _on_cpu(full, batch[:2])
    bare, network = (
        Session(model, Way(), report.is_dry),
        torch_network(torch, size, half=not report.is_dry, device=device),
    )

    def by_torch(pictures: np.ndarray) -> np.ndarray:
        answer: np.ndarray = network(torch.from_numpy(pictures).to(device)).cpu().numpy()
        return answer

    with _engine(open_gpu(report), model, size, sizes) as by_convoy:
        ways = {"convoy": by_convoy, "onnxruntime": bare.run_copying, "torch": by_torch}
        for name, run in ways.items():
            error = _error(run(batch[:2]), expected)
            report.check(name, f"within {_FP16_ERROR:g} of the CPU in FP32", f"{error:.1e}", error < _FP16_ERROR)
        for one in sizes:
            took: dict[str, list[float]] = {name: [] for name in ways}
            for run in ways.values():
                run(batch[:one])
            for index in range(3):  # pairs in turns, every other time backwards
                for name in list(ways)[:: 1 if index % 2 == 0 else -1]:
                    took[name].append(_median_ms(partial(ways[name], batch[:one]), rounds))
            ms = {name: median(times) for name, times in took.items()}
            found = ", ".join(f"{name} {value:.3f} ms ({one / value * 1e3:.0f}/s)" for name, value in ms.items())
            others = min(ms["onnxruntime"], ms["torch"])
            expects = "Convoy's engine is no slower than the others by a tenth"
            report.check(f"batch {one}", expects, found, ms["convoy"] < 1.1 * others or report.is_dry)


def rtx_answers(report: Report) -> None:
    """TensorRT for RTX: ResNet-50 as portable plans in FP32 and FP16, built here, and whether they answer right."""
    import pytest

    from convoy.app.engines.base import run_arrays
    from convoy.models.spec import TensorSpec
    from tests.support.gpu_engines import rtx_on_fake, rtx_on_gpu

    size, batch = report.size, images(2, report.size)
    inputs = (TensorSpec(INPUT, "UINT8", (size.side, size.side, 3)),)
    outputs = (TensorSpec(OUTPUT, "FP32", (size.classes,)),)
    full = write_onnx(report.folder / "fp32.onnx", size, half=False)
    half = write_onnx(report.folder / "fp16.onnx", size, half=True)
    expected = _on_cpu(full, batch)
    for model, most in ((full, _FP32_ERROR), (half, _FP16_ERROR)):
        try:
            engine = (rtx_on_fake if report.is_dry else rtx_on_gpu)(model, inputs, outputs, 2)
        except pytest.skip.Exception as reason:
            raise NotMeasurable(str(reason)) from reason
        try:
            engine.warm_up()
            error = _error(run_arrays(engine, {INPUT: batch})[OUTPUT], expected)
        finally:
            engine.close()
        report.check(f"answers of {model.stem}", f"within {most:g} of the CPU", f"{error:.1e}", error < most)
