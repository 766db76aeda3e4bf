"""Do the calibration images move the network as the images do that it is judged by?

An INT8 file cuts off what lies beyond the ranges of calibration, and rounds away what is far below them. Where many
tensors do the one or the other, the images are to blame and not the precision, and no budget mends that. Knows ranges.
"""

from __future__ import annotations

from convoy.export.variants.calibrate import Range, Ranges

# Held-out images of the same kind go beyond the range of as many others, in a few tensors and by a little; and they use
# most of it.
_BEYOND = 0.25
_UNUSED = 4.0
_SHARE = 0.25


def drift_of(calibrated: Ranges, seen: Ranges) -> str:
    """How the ranges that were `seen` fall out of the `calibrated` ones, for people; empty where they fit."""
    shared = [name for name in seen if name in calibrated and _width(calibrated[name]) > 0]
    beyond = {name: _beyond(calibrated[name], seen[name]) for name in shared}
    unused = {name: _width(calibrated[name]) / max(_width(seen[name]), 1e-30) for name in shared}
    over = [name for name in shared if beyond[name] > _BEYOND]
    under = [name for name in shared if unused[name] > _UNUSED]
    if len(over) < _SHARE * len(shared) and len(under) < _SHARE * len(shared):
        return ""
    if len(over) >= len(under):
        worst = max(over, key=lambda name: beyond[name])
        how = (
            f"go beyond the range of calibration (worst {worst}: {_shown(seen[worst])}, "
            f"calibrated for {_shown(calibrated[worst])})"
        )
    else:
        worst = max(under, key=lambda name: unused[name])
        how = (
            f"use less than a quarter of the range of calibration (worst {worst}: {_shown(seen[worst])} "
            f"of {_shown(calibrated[worst])})"
        )
    return (
        f"the images of --calibrate move the network unlike those of --evaluate: {max(len(over), len(under))} of "
        f"{len(shared)} tensors {how}; calibrate on images like those that will be served"
    )


def _beyond(calibrated: Range, seen: Range) -> float:
    return max(seen[1] - calibrated[1], calibrated[0] - seen[0], 0.0) / _width(calibrated)


def _width(limits: Range) -> float:
    return limits[1] - limits[0]


def _shown(limits: Range) -> str:
    return f"{limits[0]:.3g} to {limits[1]:.3g}"
