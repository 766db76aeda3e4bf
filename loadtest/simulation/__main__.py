"""`python -m loadtest.simulation`: runs the study and writes it to `docs`. Some minutes on every core, nicely."""

from __future__ import annotations

from pathlib import Path

from loadtest.simulation import report
from loadtest.simulation.small_cases import find_small, small_cases
from loadtest.simulation.study import SEEDS, find, scenarios

_DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    chosen = scenarios()
    findings = []
    for finding in find(chosen):
        findings.append(finding)
        print(f"{len(findings)} of {len(chosen)}: {report.row(finding)}", flush=True)
    small = [find_small(case, SEEDS // 3) for case in small_cases()]
    report.write(report.Study(findings, small), _DOCS)
    print(f"Written to {_DOCS / 'simulation.md'}")


if __name__ == "__main__":
    main()
