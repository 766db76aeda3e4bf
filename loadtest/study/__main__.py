"""`python -m convoy.loadtest.study`: runs the study and writes it to `docs`. Hours on every core, nicely.

What it has found stays in `build/simulation`; a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import os

from convoy import IMPORT_ROOT
from convoy.loadtest.study import report
from convoy.loadtest.study.kept import Kept
from convoy.loadtest.study.small_cases import find_small, small_cases
from convoy.loadtest.study.study import SEEDS, find, scenarios

_DOCS = IMPORT_ROOT / "docs"
_FOUND = IMPORT_ROOT / "build" / "simulation"


def main() -> None:
    argparse.ArgumentParser("python -m convoy.loadtest.study", description=__doc__).parse_args()
    os.nice(19 - os.nice(0))
    chosen = scenarios()
    findings = []
    for finding in find(chosen, SEEDS, Kept(_FOUND, SEEDS)):
        findings.append(finding)
        print(f"{len(findings)} of {len(chosen)}: {report.row(finding)}", flush=True)
    small = [find_small(case, SEEDS // 3) for case in small_cases()]
    report.write(report.Study(findings, small), _DOCS)
    print(f"Written to {_DOCS / 'simulation.md'}")


if __name__ == "__main__":
    main()
