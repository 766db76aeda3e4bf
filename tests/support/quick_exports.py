"""Exports that are not about how fast the files are, and so look at that for a moment only."""

from __future__ import annotations

import pytest

from convoy.app.engines.measure import Pace


def measure_little(patches: pytest.MonkeyPatch) -> None:
    pace = Pace(budget_s=0, limit_s=10, warm_up=1, fewest=2, most=2)
    patches.setattr("convoy.export.profiling.profile.PACE", pace)
    patches.setattr("convoy.export.profiling.roofline._BUDGET_S", 0)
