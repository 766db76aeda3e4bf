"""How far from the limit? What the roofline model says a batch must take at least on this device.

Williams, Waterman & Patterson, CACM 52(4), 2009: a computation cannot be faster than its operations at the
device's arithmetic rate, nor than its bytes at the device's memory rate. Pure arithmetic over records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convoy.models.bundle import LatencyPoint, Precision, Roofline

_BYTES_RELATIVE_TO_FP32 = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": 0.25, "fp8": 0.25}


@dataclass(frozen=True, slots=True)
class Limit:
    """The least a batch can take, and which of the two ceilings says so.

    `flop_per_byte` is the arithmetic intensity: where the computation stands on the roofline's x axis.
    """

    batch_size: int
    least_ms: float
    bound_by: Literal["arithmetic", "memory"]
    flop_per_byte: float
    gflop: float


def limit(roofline: Roofline, precision: Precision, batch_size: int) -> Limit | None:
    """None where the device's rate was not measured for this precision.

    Weights and activations are taken to have the variant's precision throughout.
    """
    rate = device_rate(roofline, precision)
    if rate is None:
        return None
    gflop = roofline.gflop_per_sample * batch_size
    mb = (roofline.weights_mb + roofline.mb_per_sample * batch_size) * _BYTES_RELATIVE_TO_FP32[precision]
    arithmetic_ms, memory_ms = 1e3 * gflop / rate, mb / roofline.device_gb_per_s
    return Limit(
        batch_size=batch_size,
        least_ms=max(arithmetic_ms, memory_ms),
        bound_by="arithmetic" if arithmetic_ms >= memory_ms else "memory",
        flop_per_byte=1e3 * gflop / mb,
        gflop=gflop,
    )


def device_rate(roofline: Roofline, precision: Precision) -> float | None:
    """10^9 operations per second that the device attains in this precision; None where it was not measured."""
    return {"fp32": roofline.device_gflop_per_s, "int8": roofline.device_int8_gop_per_s}.get(precision)


def share_of_limit(roofline: Roofline, precision: Precision, point: LatencyPoint) -> float | None:
    """The least time over the measured time, 1 being the limit itself; None where the limit is not known."""
    least = limit(roofline, precision, point.batch_size)
    return least.least_ms / point.median_ms if least else None
