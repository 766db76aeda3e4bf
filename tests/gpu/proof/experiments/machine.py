"""On what machine all of this is asked: the GPU's name for the book, the libraries, and whether the provider loads."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

from tests.gpu.proof.experiment import Bench, Judgement, NotMeasurable, Ran
from tests.gpu.proof.experiments import networks
from tests.gpu.proof.experiments.cudart import open_runtime
from tests.gpu.proof.experiments.sessions import PROVIDER, Way, load_onnxruntime, on_cpu, opened, relative_error
from tests.gpu.proof.fat_binaries import architectures

_LIBRARIES = re.compile(r"lib(cudart|cublas|cublasLt|cudnn|cufft|nvrtc|cuda|onnxruntime_providers_cuda)\b.*\.so")


def identify(bench: Bench) -> None:
    """The first GPU's name, as the results' file bears it."""
    name = open_runtime().cudaGetDeviceProperties(0).name
    bench.fact("gpu", (name.decode(errors="replace") if isinstance(name, bytes) else name).rstrip("\0"))


def describe(bench: Bench) -> None:
    """Device, driver, clocks and every library's version."""
    from convoy.app.engines.cuda.device import open_devices
    from tests.gpu.proof import environment

    open_runtime()  # which says so where there is no GPU
    device = open_devices()[0]
    found = environment.describe(device)
    for name in ("gpu", "compute_capability", "memory_gib", "driver", "cuda", "cpu", "cores", "python"):
        bench.fact(name.replace("_", " "), getattr(found, name))
    for name, version in found.libraries.items():
        bench.fact(name, version)
    state = environment.Nvml.of(device.properties.pci_bus_id).state(0.0)
    if state is not None:
        bench.fact("clocks", f"{state.sm_mhz} MHz, memory {state.memory_mhz} MHz, {state.temperature_c} °C")


def judge_description(ran: Ran) -> Judgement:
    """A GPU with a driver, and something that computes on it."""
    libraries = ("onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "torch")
    there = [f"{name} {version}" for name in libraries if (version := ran.facts.get(name, "none")) != "none"]
    told = (
        f"{ran.facts['gpu']}, driver {ran.facts['driver']}, CUDA {ran.facts['cuda']}; {', '.join(there) or 'nothing'}"
    )
    return Judgement.of(bool(there), f"{told} to compute with")


def provider_loads(bench: Bench) -> None:
    """A small network, with nothing left to the CPU; then, whose libraries the process has mapped."""
    runtime, ort = open_runtime(), load_onnxruntime()
    bench.fact("onnxruntime", f"{ort.__version__} from {Path(str(ort.__file__)).parent}")
    model = networks.resnet(bench.folder / "small.onnx", half=False, side=64, blocks=(1, 1, 1, 1), width=16)
    batch = networks.pictures(2, 64)
    bench.step("opening a session")
    try:
        with opened(runtime, ort, model, Way(tf32=False), may_use_cpu=True) as session:
            bench.figure("loads", True)
            bench.step("running it")
            session.bind(batch)
            bench.figure("error", relative_error(session.answer(2), on_cpu(ort, model, batch)))
    except NotMeasurable:
        bench.figure("loads", False)
        bench.fact("loader", _loader_says(Path(str(ort.__file__)).parent / "capi"))
    mapped = {line.rpartition("/")[2].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    bench.fact("mapped", ", ".join(sorted(name for name in mapped if _LIBRARIES.match(name))))


def _loader_says(folder: Path) -> str:
    """Why the libraries do not load, which ONNX Runtime tells its log only."""
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return "nothing: the libraries are all there"


def judge_provider(ran: Ran) -> Judgement:
    """It opens and answers as the CPU does."""
    if not ran.figures["loads"]:
        return Judgement("otherwise", f"{ran.facts['onnxruntime']} does not load it: {ran.facts['loader']}")
    error = ran.figures["error"]
    return Judgement.of(error < 1e-3, f"{PROVIDER} of {ran.facts['onnxruntime']}: error {error:.1e}")


def provider_architectures(bench: Bench) -> None:
    """For which GPUs the provider's library holds machine code, read from its file."""
    runtime = open_runtime()
    spec = importlib.util.find_spec("onnxruntime")
    library = Path(str(spec and spec.origin)).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if not library.exists():
        raise NotMeasurable("this onnxruntime has no CUDA provider; CARRY=DIR can bring one along")
    found = runtime.cudaGetDeviceProperties(0)
    bench.figure("capability", found.major * 10 + found.minor)
    bench.step("reading the library")
    for name, kernels in architectures(library.read_bytes()).items():
        bench.figure(name, kernels)


def judge_architectures(ran: Ran) -> Judgement:
    """There is machine code of this GPU's generation, and none that a driver would have to compile."""
    capability = int(ran.figures["capability"])
    own = [int(n.removeprefix("sm_")) for n, count in ran.figures.items() if n.startswith("sm_") and count]
    # Machine code runs on later chips of the same generation, never on another one's.
    runs = any(one // 10 == capability // 10 and one <= capability for one in own)
    held = ", ".join(f"{name} {count:.0f}" for name, count in ran.figures.items() if name != "capability")
    return Judgement.of(runs, f"this GPU is sm_{capability}; the library holds {held}")
