"""`python -m tests.gpu.proof [--out DIR] [--budget-s S]`: what `make gpu-proof` runs.

exit 0    every target that could be measured is met, and no test failed
     1    there is no GPU, or something that was measured fell short; the page says what
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DEFAULT_BUDGET_S = 460.0
NEEDED = "a plain checkout needs numpy, Pillow, safetensors, scipy, onnxruntime and cuda-python (cuda.bindings)"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu-proof", description="Prove Convoy on this machine's GPU.")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where results/ and gpu-proof.md are written")
    parser.add_argument("--budget-s", type=float, default=DEFAULT_BUDGET_S, help="seconds that all of it may take")
    options = parser.parse_args(arguments)
    try:
        from app.engines.machine import find_machine
        from tests.gpu.proof.budget import Budget, Journal
        from tests.gpu.proof.program import Ways, prove
    except ImportError as error:
        print(f"gpu-proof: {error}; {NEEDED}", file=sys.stderr)
        return 1
    budget = Budget(options.budget_s)
    machine = find_machine()
    if not machine.gpus:
        print(f"gpu-proof: there is no GPU here, so nothing can be proved: {machine.no_gpu}", file=sys.stderr)
        return 1
    findings = prove(machine, options.out, budget, Journal(budget), Ways())
    proof = findings.proof()
    for target in proof.targets:
        print(f"{target.verdict:8}  {target.engine}: {target.name} ({target.how})")
    fell_short = [target for target in proof.targets if target.passed is False]
    return 1 if fell_short or (proof.tests is not None and proof.tests.failed) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
