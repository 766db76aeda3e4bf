"""`python -m convoy.export.matrix [FOLDER [NAME...]]`: tries what is not in FOLDER, else `docs`, yet.

NAME tries those cases again whose names begin so, such as `timm` or `"timm: dla34"`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from convoy.export.matrix.cases import all_cases
from convoy.export.matrix.page import write_page
from convoy.export.matrix.rows import read_matrix, write_matrix
from convoy.export.matrix.trial import try_case
from convoy.export.zoo_table.kept import limit_memory


def main(arguments: Sequence[str]) -> None:
    limit_memory()
    folder, again = Path(arguments[0]) if arguments else Path("docs"), tuple(arguments[1:])
    cases = all_cases()
    names = [case.name for case in cases]
    matrix = read_matrix(folder).only(names)
    write_page(matrix, names, folder)
    for case in cases:
        if case.name.startswith(again) if again else matrix.find(case.name) is None:
            row = try_case(case)
            matrix = matrix.with_row(row).only(names)
            write_matrix(matrix, folder)
            write_page(matrix, names, folder)
            print(
                f"{row.seconds:6.1f} s  {row.verdict:7}  {row.name}  {row.said if row.error is None else row.error}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
