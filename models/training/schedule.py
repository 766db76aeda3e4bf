"""The learning rate over a run, as a factor of its peak. Pure.

Sources: one cycle, Smith and Topin (2018); cosine, Loshchilov and Hutter (2017); steps after a warm-up, Goyal et al.
(2017).
"""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["one_cycle", "cosine", "step"]

# The default share of the run in which the rate rises.
WARM_UP_SHARES: dict[Schedule, float] = {"one_cycle": 0.25, "cosine": 0.05, "step": 0.05}
START_FACTOR = 0.04
# Three equal stages after the warm-up, each at a tenth of the previous rate.
STAGES = 3


def factor(schedule: Schedule, fraction: float, warm_up: float) -> float:
    """The factor when `fraction` of all steps is done; it rises over the first `warm_up` of them. Both are from 0 to 1.

    "one_cycle" rises in a cosine, the others linearly. Then "one_cycle" and "cosine" fall in a cosine to 0.
    """
    if fraction < warm_up:
        risen = fraction / warm_up
        bent = (1 - math.cos(math.pi * risen)) / 2 if schedule == "one_cycle" else risen
        return START_FACTOR + (1 - START_FACTOR) * bent
    if schedule == "step":
        stage = int((fraction - warm_up) / (1 - warm_up) * STAGES)
        return 0.1 ** min(stage, STAGES - 1)
    return (1 + math.cos(math.pi * (fraction - warm_up) / (1 - warm_up))) / 2
