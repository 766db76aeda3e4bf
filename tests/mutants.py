"""`make mutants`: do the tests notice when the code is changed?

cosmic-ray changes an operator, a number or a branch in a copy of the tree and runs the tests of that module; a change
that no test notices has survived. A seed draws a sample of the changes, because all of them take hours.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build/mutants"
LEAST_KILLED = 0.85
SHELL = ("tests/unit/test_scheduler.py",)
POLICY = (
    "tests/unit/test_policy.py",
    "tests/simulation/test_policy_properties.py",
    "tests/simulation/test_priorities.py",
    "tests/simulation/test_devices.py",
)
CALLS = (
    "tests/unit/test_calls.py",
    "tests/unit/test_decoder.py",
    "tests/unit/test_connection.py",
    "tests/unit/test_grpc_memory.py",
)
TESTS = {
    "app/scheduling/slab.py": ("tests/unit/test_slab.py", "tests/unit/test_extents.py", *SHELL),
    "app/scheduling/scheduler.py": SHELL,
    "app/scheduling/policy.py": POLICY,
    "app/scheduling/queues.py": ("tests/unit/test_queue_changes.py", "tests/unit/test_latency.py", *POLICY, *SHELL),
    "app/scheduling/latency.py": ("tests/unit/test_latency.py", *POLICY),
    "app/scheduling/decoding.py": ("tests/simulation/test_decoding_policy.py", "tests/unit/test_decoder.py"),
    "app/calls/call.py": CALLS,
    "app/calls/open_calls.py": CALLS,
}
CONFIG = """[cosmic-ray]
module-path = "{module}"
timeout = 120.0
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--modules", nargs="+", choices=TESTS, default=[*TESTS], metavar="FILE")
    parser.add_argument("--sample", type=int, default=40, help="changes of each module")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rates = {module: _killed(module, given.sample, given.seed) for module in given.modules}
    for module, (killed, total) in rates.items():
        print(f"{module}: {killed} of {total} changes noticed")
    killed, total = (sum(one[index] for one in rates.values()) for index in (0, 1))
    print(f"{killed / total:.0%} in all; {LEAST_KILLED:.0%} are wanted")
    return 0 if killed >= LEAST_KILLED * total else 1


def _killed(module: str, sample: int, seed: int) -> tuple[int, int]:
    """How many of the changes were noticed, and how many were made."""
    shutil.rmtree(COPY, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(COPY)], check=True)
    config = COPY / "mutants.toml"
    config.write_text(CONFIG.format(module=module, python=sys.executable, tests=" ".join(TESTS[module])))
    tool = Path(sys.executable).with_name("cosmic-ray")
    subprocess.run([tool, "baseline", config], cwd=COPY, check=True)
    subprocess.run([tool, "init", config, "mutants.sqlite"], cwd=COPY, check=True)
    with sqlite3.connect(COPY / "mutants.sqlite") as session:
        specs = sorted(
            session.execute(
                "SELECT start_pos_row, start_pos_col, operator_name, occurrence, job_id FROM mutation_specs"
            )
        )
        # "X | None" in an annotation is never computed, and a dataclass without slots does the same.
        lines = (COPY / module).read_text().splitlines()
        wanted = [
            job
            for row, _, operator, _, job in specs
            if "BinaryOperator_BitOr" not in operator and "slots=True" not in lines[row - 1]
        ]
        kept = set(random.Random(seed).sample(wanted, min(sample, len(wanted))))
        left_out = [(job,) for *_, job in specs if job not in kept]
        session.executemany("DELETE FROM mutation_specs WHERE job_id = ?", left_out)
        session.executemany("DELETE FROM work_items WHERE job_id = ?", left_out)
    subprocess.run([tool, "exec", config, "mutants.sqlite"], cwd=COPY, check=True)
    with sqlite3.connect(COPY / "mutants.sqlite") as session:
        results = session.execute("SELECT test_outcome, diff FROM work_results").fetchall()
    survivors = [diff for outcome, diff in results if str(outcome).lower().endswith("survived")]
    print("\n".join(survivors))
    return len(results) - len(survivors), len(results)


if __name__ == "__main__":
    sys.exit(main())
