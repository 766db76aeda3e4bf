"""Which engines may run here, which variant of a bundle each of them takes, and why not the others.

The engines are a table; a new one is a file beside this and a row here. Every row that is
passed over leaves its reason, for the log, `/stats`, the metrics and `convoy doctor`. Opens nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from convoy.app.engines import cpu
from convoy.app.engines.machine import Machine
from convoy.app.engines.speedup import best_per_sample_ms, is_worthwhile
from convoy.app.engines.tensorrt_library import RTX, TENSORRT, TensorRt
from convoy.models.bundle import Bundle, Precision, Target, Variant
from convoy.models.errors import BundleError

# What runs a model, as --engine names it.
Runner = Literal["tensorrt", "rtx", "cuda", "cpu"]
EngineChoice = Literal["auto", "tensorrt", "rtx", "cuda", "cpu"]
PrecisionChoice = Literal["auto", "fp32", "fp16", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether an engine can run here at all; `reason` says why it cannot, or what it would use."""

    engine: str
    runner: Runner
    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The variants worth trying, best first, with the reason of the first and of all that were passed over."""

    variants: tuple[Variant, ...]
    reason: str
    skipped: tuple[str, ...]


def _tensorrt(machine: Machine) -> Availability:
    return _of_plans(machine, TENSORRT, "tensorrt")


def _rtx(machine: Machine) -> Availability:
    return _of_plans(machine, RTX, "rtx")


def _of_plans(machine: Machine, library: TensorRt, runner: Runner) -> Availability:
    found = machine.runs(library)
    if not machine.gpus:
        return Availability(library.name, runner, False, machine.no_gpu)
    if found.module is None:
        return Availability(library.name, runner, False, found.reason)
    what = f"{library.title} {found.module.__version__} on {_gpu_names(machine)}"
    return Availability(library.name, runner, True, what)


def _cuda(machine: Machine) -> Availability:
    if not machine.gpus:
        return Availability("onnxruntime-cuda", "cuda", False, machine.no_gpu)
    if machine.onnxruntime.module is None:
        return Availability("onnxruntime-cuda", "cuda", False, machine.onnxruntime.reason)
    without = [why for why in map(machine.why_no_code, machine.gpus) if why]
    if len(without) == len(machine.gpus):
        return Availability("onnxruntime-cuda", "cuda", False, without[0])
    reason = "; but ".join((_gpu_names(machine), *dict.fromkeys(without)))
    return Availability("onnxruntime-cuda", "cuda", True, reason)


def _cpu(machine: Machine) -> Availability:
    if importlib.util.find_spec("onnxruntime") is None:
        return Availability("onnxruntime-cpu", "cpu", False, "onnxruntime is not installed; install convoy-serve[cpu]")
    return Availability("onnxruntime-cpu", "cpu", True, f"{cpu.cpu_budget()} cores of {cpu.cpu_model()}")


def _gpu_names(machine: Machine) -> str:
    return ", ".join(gpu.properties.name for gpu in machine.gpus)


# On a GPU what is fastest there serves; this is the order in which they are tried and told.
ENGINES: tuple[Callable[[Machine], Availability], ...] = (_tensorrt, _rtx, _cuda, _cpu)


def availabilities(machine: Machine) -> tuple[Availability, ...]:
    """Every engine that Convoy knows, and whether it can run here."""
    return tuple(probe(machine) for probe in ENGINES)


def runners(machine: Machine, engine: EngineChoice) -> tuple[tuple[Runner, ...], tuple[str, ...]]:
    """What to try, and why the others are passed over.

    Raises BundleError where the one that was asked for cannot run here.
    """
    everything = availabilities(machine)
    if engine == "auto":
        unusable = tuple(f"{a.engine}: {a.reason}" for a in everything if not a.usable)
        return tuple(a.runner for a in everything if a.usable), unusable
    (wanted,) = (a for a in everything if a.runner == engine)
    if not wanted.usable:
        raise BundleError(f"--engine {engine}: {wanted.reason}; or serve with --engine auto")
    return (wanted.runner,), (f"every engine but {wanted.engine}: --engine {engine}",)


def choose_on_gpu(bundle: Bundle, precision: PrecisionChoice, target: Target) -> Choice:
    """The variants to serve from a GPU, most exact first; what of them is fastest there is for the caller to measure.

    TensorRT takes what was made for GPUs; ONNX Runtime the same without INT8, for which it has no kernels.
    Empty where none fits.
    """
    candidates = [v for v in bundle.manifest.variants if fits_gpu(v, target)]
    if precision != "auto":
        named = tuple(v for v in candidates if v.precision == precision)
        reason = "asked for by name" + "".join(f", although: {v.reason}" for v in named if not v.serve)
        return Choice(named, reason, () if named else (f"{target}: there is no {precision} variant for it",))
    refused = tuple(f"{v.file}: {v.reason}" for v in candidates if not v.serve and v.target != "cpu")
    reduced = tuple(v for v in candidates if v.serve and v.precision != "fp32")
    exact = tuple(v for v in candidates if v.precision == "fp32")
    if reduced:
        return Choice(reduced, "made for this kind of device", refused)
    return Choice(exact, "no variant in reduced precision may serve", refused)


def fits_gpu(variant: Variant, target: Target) -> bool:
    """Whether a GPU may run the variant, by ONNX Runtime ("cuda") or as a plan ("tensorrt")."""
    if variant.precision == "fp32":
        return True
    return variant.target == "cuda" or (variant.target == "tensorrt" and target == "tensorrt")


def choose_on_cpu(bundle: Bundle, precision: PrecisionChoice, device_fingerprint: str) -> Choice:
    """The variants of a bundle to serve from a CPU.

    Where latencies were measured on this very device the fastest comes first; elsewhere all that may
    serve are returned and the caller measures them. Raises BundleError when none fits.
    """
    on_cpu = [variant for variant in bundle.manifest.variants if variant.target == "cpu"]
    if precision != "auto":
        return _by_name(bundle, on_cpu, precision)
    servable = [variant for variant in on_cpu if variant.serve]
    skipped = tuple(f"{variant.file}: {variant.reason}" for variant in on_cpu if not variant.serve)
    if not servable:
        raise BundleError(f"{bundle.folder}: no variant may be served on a CPU ({'; '.join(skipped)}); export it again")
    if not all(measured_here(variant, device_fingerprint) for variant in servable):
        return Choice(
            tuple(servable),
            "measured at start-up, because this device is not the one it was exported on",
            skipped,
        )
    fastest = _fastest(servable)
    return Choice((fastest,), f"fastest on this device when it was exported: {fastest.reason}", skipped)


def _fastest(variants: list[Variant]) -> Variant:
    """Of variants that were measured here: the fastest beyond doubt, else the first, which is the most exact."""
    faster = [(v, v.latency) for v in variants if v.latency is not None and is_worthwhile(v.latency)]
    return min(faster, key=lambda pair: best_per_sample_ms(pair[1]))[0] if faster else variants[0]


def _by_name(bundle: Bundle, variants: list[Variant], precision: Precision) -> Choice:
    for variant in variants:
        if variant.precision == precision:
            reason = "asked for by name" + ("" if variant.serve else f", although: {variant.reason}")
            return Choice((variant,), reason, ())
    have = ", ".join(variant.precision for variant in variants) or "none"
    raise BundleError(
        f"{bundle.folder}: there is no {precision} variant for the CPU (there is: {have}); export it with --precisions"
    )


def measured_here(variant: Variant, device_fingerprint: str) -> bool:
    """Whether export measured the variant on this very device, and against fp32 if it is not fp32 itself."""
    table = variant.latency
    if table is None or table.device_fingerprint != device_fingerprint:
        return False
    return variant.precision == "fp32" or table.speedup is not None
