"""`python -m convoy.export.zoo_table [FOLDER [MODEL...]]`: adds what is missing to the table in FOLDER, else `docs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from convoy.app.engines.cpu import cpu_budget
from convoy.export.zoo_table.kept import limit_memory
from convoy.export.zoo_table.table import make_table


def main(arguments: Sequence[str]) -> None:
    limit_memory()
    folder = Path(arguments[0]) if arguments else Path("docs")
    for row in make_table(folder, cpu_budget(), arguments[1:]):
        print(json.dumps(row.summary()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
