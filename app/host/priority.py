"""Which threads have the cores first where there are not enough: the event loop's.

It has little to do for each request, and everything waits for it. As one of several that compute at the same time it
would have its share of the cores and no more: with three times as many pictures as two cores could answer, most answers
were there in time and sent too late.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

# A third of the weight that Linux gives to the others. With 3 and with 10 less was answered in time.
_NICER = 5


def give_way() -> None:
    """This thread, and those that it starts, leave the cores to those that answer.

    Not to be taken back. Nothing where it would be the whole process that gives way, or where the system forbids it, as
    hardened services may have it.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _NICER)
