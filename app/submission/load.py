"""How loaded a core is, for who chooses between several. Plain data, known at every edge."""

from __future__ import annotations

from typing import NamedTuple


class CoreLoad(NamedTuple):
    """Over the last seconds; all are 0 before there was a second.

    `utilisation` is the part of what the core could do at most that it does: the time that its samples would take in
    full batches, or the CPU time of its event loop, whichever is more. The time that engines are busy would be no
    measure: a few requests keep one busy with batches of one, and it could still do many times as much.
    `waiting_s` is how long what waits would keep all engines busy.
    """

    utilisation: float = 0.0
    requests_per_s: float = 0.0
    waiting_s: float = 0.0
