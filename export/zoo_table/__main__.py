"""`python -m convoy.export.zoo_table [FOLDER [MODEL...]]`: adds what is missing to the table in FOLDER, else `docs`."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from convoy.app.engines.cpu import cpu_budget
from convoy.export.zoo_table.table import make_table

# Enough for a graph of 2 GB that is held several times over; the largest are to fail and not to starve the machine.
_MOST_BYTES = 16 << 30


def main(arguments: Sequence[str]) -> None:
    _limit_memory(_MOST_BYTES)
    folder = Path(arguments[0]) if arguments else Path("docs")
    for row in make_table(folder, cpu_budget(), arguments[1:]):
        print(json.dumps(row.summary()), flush=True)


def _limit_memory(nbytes: int) -> None:
    """Let this process and its children have so much each, and fail where they want more."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard), hard))


if __name__ == "__main__":
    main(sys.argv[1:])
