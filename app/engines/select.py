"""Which engine and which variant of a bundle serve here, and why not the others.

The engines are a table, best first; a new one is a file beside this and a row here. Every row that is
passed over leaves its reason, for the log, `/stats`, the metrics and `convoy doctor`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from app.engines import cpu
from app.engines.speedup import best_per_sample_ms, is_worthwhile
from models.bundle import Bundle, Precision, Target, Variant
from models.errors import BundleError

EngineChoice = Literal["auto", "cpu"]
PrecisionChoice = Literal["auto", "fp32", "int8"]


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether an engine can run here at all; `reason` says why it cannot, or what it would use."""

    engine: str
    target: Target
    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The variants worth trying, best first, with the reason of the first and of all that were passed over."""

    variants: tuple[Variant, ...]
    reason: str
    skipped: tuple[str, ...]


def _tensorrt() -> Availability:
    return Availability("tensorrt", "tensorrt", False, "this version of Convoy has no TensorRT engine yet")


def _cuda() -> Availability:
    return Availability("onnxruntime-cuda", "cuda", False, "this version of Convoy has no CUDA engine yet")


def _cpu() -> Availability:
    if importlib.util.find_spec("onnxruntime") is None:
        return Availability("onnxruntime-cpu", "cpu", False, "onnxruntime is not installed; install convoy-serve[cpu]")
    return Availability("onnxruntime-cpu", "cpu", True, f"{cpu.cpu_budget()} cores of {cpu.cpu_model()}")


# Best first.
ENGINES: tuple[Callable[[], Availability], ...] = (_tensorrt, _cuda, _cpu)


def availabilities() -> tuple[Availability, ...]:
    """Every engine that Convoy knows, best first, and whether it can run here."""
    return tuple(probe() for probe in ENGINES)


def choose(bundle: Bundle, precision: PrecisionChoice, device_fingerprint: str) -> Choice:
    """The variants of a bundle to serve from a CPU.

    Where latencies were measured on this very device the fastest comes first; elsewhere all that may
    serve are returned and the caller measures them. Raises BundleError when none fits.
    """
    skipped = [f"{a.engine}: {a.reason}" for a in availabilities() if not a.usable]
    on_cpu = [variant for variant in bundle.manifest.variants if variant.target == "cpu"]
    if precision != "auto":
        return _by_name(bundle, on_cpu, precision, skipped)
    servable = [variant for variant in on_cpu if variant.serve]
    skipped += [f"{variant.file}: {variant.reason}" for variant in on_cpu if not variant.serve]
    if not servable:
        raise BundleError(f"{bundle.folder}: no variant may be served on a CPU ({'; '.join(skipped)}); export it again")
    if not all(measured_here(variant, device_fingerprint) for variant in servable):
        return Choice(
            tuple(servable),
            "measured at start-up, because this device is not the one it was exported on",
            tuple(skipped),
        )
    fastest = _fastest(servable)
    return Choice((fastest,), f"fastest on this device when it was exported: {fastest.reason}", tuple(skipped))


def _fastest(variants: list[Variant]) -> Variant:
    """Of variants that were measured here: the fastest beyond doubt, else the first, which is the most exact."""
    faster = [(v, v.latency) for v in variants if v.latency is not None and is_worthwhile(v.latency)]
    return min(faster, key=lambda pair: best_per_sample_ms(pair[1]))[0] if faster else variants[0]


def _by_name(bundle: Bundle, variants: list[Variant], precision: Precision, skipped: list[str]) -> Choice:
    for variant in variants:
        if variant.precision == precision:
            reason = "asked for by name" + ("" if variant.serve else f", although: {variant.reason}")
            return Choice((variant,), reason, tuple(skipped))
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
