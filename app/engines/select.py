"""Choose which variants of a model an engine tries, best first, and say why not the others.

Pure: opens and measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from convoy.app.engines.measure import is_beyond_doubt, is_worthwhile
from convoy.models.bundle import Interval, LatencyTable, Precision, Variant
from convoy.models.errors import BundleError

PrecisionChoice = Literal["auto", Precision]


@dataclass(frozen=True, slots=True)
class Choice:
    """The variants to try, best first, with the reason for the first and for each that was left out."""

    variants: tuple[Variant, ...]
    reason: str
    skipped: tuple[str, ...]


def choose_on_gpu(candidates: Sequence[Variant], precision: PrecisionChoice, engine: str) -> Choice:
    """The variants for a GPU that the engine takes, most exact first; the caller measures them.

    Empty if none fits.
    """
    if precision != "auto":
        named = tuple(v for v in candidates if v.precision == precision)
        reason = "selected with --precision" + "".join(f", although: {v.reason}" for v in named if not v.serve)
        return Choice(named, reason, () if named else (f"{engine}: there is no {precision} variant",))
    refused = tuple(f"{v.file}: {v.reason}" for v in candidates if not v.serve and v.target != "cpu")
    reduced = tuple(v for v in candidates if v.serve and v.precision != "fp32")
    exact = tuple(v for v in candidates if v.precision == "fp32")
    if reduced:
        return Choice(reduced, "made for this type of device", refused)
    return Choice(exact, "no variant in reduced precision is verified", refused)


def choose_on_cpu(candidates: Sequence[Variant], precision: PrecisionChoice, device_fingerprint: str) -> Choice:
    """The variants for a CPU that the engine takes; `fingerprint` is the engine's.

    If export measured on this very device: those that beat the exact one, or else only the exact one. Otherwise all
    that may serve. If there are several, the caller measures them. Raises BundleError if none fits.
    """
    library = device_fingerprint.rpartition(" / ")[2]
    refused = tuple(f"{v.file}: {v.refused_by[library]}" for v in candidates if library in v.refused_by)
    candidates = [variant for variant in candidates if library not in variant.refused_by]
    if not candidates and refused:
        raise BundleError("; ".join(refused))
    if precision != "auto":
        return _by_name(candidates, precision)
    servable = [variant for variant in candidates if variant.serve]
    skipped = refused + tuple(f"{variant.file}: {variant.reason}" for variant in candidates if not variant.serve)
    if not servable:
        raise BundleError(f"no variant is verified for the CPU ({'; '.join(skipped)}); export the model again")
    tables = {variant.file: measured_here(variant, device_fingerprint) for variant in servable}
    unmeasured = next((variant for variant in servable if tables[variant.file] is None), None)
    if unmeasured is not None:
        why = _why_measured_again(unmeasured, device_fingerprint)
        return Choice(tuple(servable), f"measured at start, because {why}", skipped)
    faster = [
        variant
        for variant in servable
        if variant.precision != "fp32" and (table := tables[variant.file]) is not None and is_worthwhile(table)
    ]
    if len(faster) > 1:
        reason = "measured at start, together with all variants that were faster than fp32 at export"
        return Choice(tuple(faster), reason, skipped)
    (fastest,) = faster or servable[:1]
    return Choice((fastest,), f"fastest on this device at export: {fastest.reason}", skipped)


def _by_name(variants: Sequence[Variant], precision: Precision) -> Choice:
    named = [variant for variant in variants if variant.precision == precision]
    if not named:
        have = ", ".join(dict.fromkeys(variant.precision for variant in variants)) or "none"
        what = f"there is no {precision} variant for the CPU (available: {have})"
        raise BundleError(f"{what}; export it with --precisions")
    proved = [variant for variant in named if variant.serve] or named[:1]
    although = "" if proved[0].serve else f", although: {proved[0].reason}"
    return Choice(tuple(proved), f"selected with --precision{although}", ())


def measured_here(variant: Variant, device_fingerprint: str) -> LatencyTable | None:
    """Export's measurements on this very device and engine, against fp32 there."""
    table = next((one for one in variant.latencies if one.device_fingerprint == device_fingerprint), None)
    if table is None or (table.speedup is None and not (variant.precision == "fp32" and table is variant.latency)):
        return None
    return table


def _why_measured_again(variant: Variant, device_fingerprint: str) -> str:
    """Why the measurements are missing, for people."""
    library = device_fingerprint.rpartition(" / ")[2]
    engine = library.partition(" ")[0]
    alike = [one for one in variant.latencies if one.library.partition(" ")[0] == engine]
    if not alike:
        return f"export did not measure {variant.file} in {engine or 'this engine'}"
    if alike[0].device_fingerprint != device_fingerprint:
        return f"export measured it on {alike[0].device_fingerprint}, but this is {device_fingerprint}"
    return f"export did not measure {variant.file} against fp32"


def fastest_measured(tables: Sequence[LatencyTable]) -> int:
    """The first variant that is significantly faster than all before it, which are at least as exact; else the first.

    All were measured in turns, each against the same fp32.
    """
    best = 0
    for own, table in enumerate(tables):
        least = _speedup(tables[best]).median
        gain = _speedup(table)
        if is_beyond_doubt(Interval(gain.median / least, gain.low / least, gain.high / least)):
            best = own
    return best


def _speedup(table: LatencyTable) -> Interval:
    return table.speedup or Interval(1.0, 1.0, 1.0)
