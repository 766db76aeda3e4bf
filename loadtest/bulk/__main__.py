"""`python -m convoy.loadtest.bulk STORE MODEL FOLDER`: the rate of `convoy batch` beside that of its parts alone.

Pairs in turns, each a process of its own, over every image of the folder: the ratio of each pair, their median and
their spread. Rates are those of labelling; loading is not among them.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from convoy.loadtest.bulk.bare import bare_rate

_RATE = re.compile(r"\(([\d,.]+)/s\)")


def main() -> None:
    asked = argparse.ArgumentParser("python -m convoy.loadtest.bulk", description=__doc__)
    asked.add_argument("store", type=Path)
    asked.add_argument("model")
    asked.add_argument("folder", type=Path)
    asked.add_argument("--pairs", type=int, default=5)
    asked.add_argument("--batch-size", type=int, default=64)
    asked.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked.add_argument("--workers", type=int, default=0, help="of the batch; 1 has the shape of the bare session")
    asked.add_argument("--bare-alone", action="store_true", help=argparse.SUPPRESS)  # the child of a pair
    given = asked.parse_args()
    images = sorted(path for path in given.folder.rglob("*") if path.is_file())
    if given.bare_alone:
        bundle = max((given.store / given.model).iterdir(), key=lambda folder: int(folder.name))
        print(f"({bare_rate(bundle, images, given.threads, given.batch_size):.1f}/s)")
        return
    own = [str(given.store), given.model, str(given.folder), "--batch-size", str(given.batch_size)]
    bare = ["-m", "convoy.loadtest.bulk", *own, "--threads", str(given.threads), "--bare-alone"]
    ratios = []
    for number in range(given.pairs):
        with tempfile.TemporaryDirectory(prefix="convoy-bulk-") as out:
            whole = ["-m", "convoy", "batch", given.model, str(given.folder), "--out", out, "--store", str(given.store)]
            whole += ["--engine", "cpu", "--precision", "fp32", "--batch-size", str(given.batch_size)]
            whole += ["--workers", str(given.workers)]
            order = [whole, bare] if number % 2 else [bare, whole]
            rates = {id(command): _rate(command) for command in order}
        ratios.append(rates[id(whole)] / rates[id(bare)])
        print(f"batch {rates[id(whole)]:,.1f}/s, bare {rates[id(bare)]:,.1f}/s, ratio {ratios[-1]:.3f}", flush=True)
    print(
        f"{len(images)} images, {given.threads} threads: ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


def _rate(command: list[str]) -> float:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    found = _RATE.findall(done.stdout)
    return float(found[-1].replace(",", ""))


if __name__ == "__main__":
    main()
