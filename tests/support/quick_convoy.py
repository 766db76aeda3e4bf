"""`convoy`, but its exports look only for a moment at how fast the files are."""

from __future__ import annotations

from convoy.app.engines.measure import Pace
from convoy.command import main
from convoy.export.profiling import profile, roofline

profile.PACE = Pace(budget_s=0, limit_s=10, warm_up=1, fewest=2, most=2)
roofline._BUDGET_S = 0

if __name__ == "__main__":
    main()
