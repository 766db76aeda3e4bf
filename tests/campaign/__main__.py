"""`python -m tests.campaign --minutes 5 [--seed N] [--out DIR]`: what `make campaign` runs.

exit 0    every invariant held
     1    one did not; a line for each, and the command that draws the same plan again
     2    called wrongly
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from statistics import median

from convoy.models.checkpoint import write_whole
from tests.campaign.page import render
from tests.campaign.plan import draw_plan
from tests.campaign.program import wage
from tests.campaign.records import Records

_MOST_LINES = 40


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="campaign", description="A real server under clients and faults from a seed.")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long, over all numbers of edges")
    parser.add_argument("--seed", type=int, default=None, help="draws the plan; without it a new one is taken")
    parser.add_argument(
        "--out", type=Path, default=Path("build/campaign"), help="where page, plan and logs are written"
    )
    parser.add_argument("--edges", type=_numbers, default=(0,), help="numbers of edge processes; one process serves: 0")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error("--minutes must be above 0")
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    return _run(seed, options.minutes, options.edges, options.out)


def _run(seed: int, minutes: float, edges: tuple[int, ...], out: Path) -> int:
    edges_text = ",".join(map(str, edges))
    replay = f"python -m tests.campaign --minutes {minutes:g} --seed {seed} --edges {edges_text}"
    records = Records(draw_plan(seed, minutes, edges), replay)
    out = out.absolute()  # a disk of its own is looked for from the root of the server's file system
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "plan.json", json.dumps(records.plan.document(), indent=1).encode())
    print(f"seed {seed}; the same plan again: {replay}", flush=True)
    # Their libraries report on each connection that breaks off, and here that is the daily bread.
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="convoy-campaign-", dir=out) as folder:
        wage(records, Path(folder), lambda line: print(line, flush=True))
        breaches = records.breaches
        if breaches:
            _keep_logs(Path(folder), out)
    write_whole(out / "campaign.html", render(records).encode())
    print(f"written: {out / 'campaign.html'}")
    for kind, times_s in sorted(records.recoveries_s().items()):
        print(f"well again after {kind}: {median(times_s):.1f} s, at worst {max(times_s):.1f}, {len(times_s)} times")
    for line in breaches[:_MOST_LINES]:
        print(f"BROKEN {line}", file=sys.stderr)
    if breaches:
        more = f", of which the first {_MOST_LINES} are shown" if len(breaches) > _MOST_LINES else ""
        print(f"{len(breaches)} breaches{more}; replay: {replay}", file=sys.stderr)
    return 1 if breaches else 0


def _keep_logs(folder: Path, out: Path) -> None:
    for log in folder.glob("log-*.txt"):
        log.replace(out / log.name)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(one) for one in text.split(","))
    if any(one < 0 for one in numbers):
        raise ValueError(text)
    return numbers


if __name__ == "__main__":
    # Leaving in good order, as Ctrl-C does, so that no server stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
