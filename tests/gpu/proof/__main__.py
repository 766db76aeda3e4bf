"""`python -m tests.gpu.proof`: what `make gpu-proof` runs. Parts in their order, each within eight minutes.

exit 0    everything that was asked in this call came out as expected, could not be measured here, or ran out of the
          part's time and is left for the next call
     1    there is no GPU, or something came out otherwise; the page says what
     2    the command line is wrong
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.gpu.proof import carry

if TYPE_CHECKING:
    from tests.gpu.proof.book import Book, Outcome
    from tests.gpu.proof.schedule import Run

NEEDED = "a plain checkout needs numpy, scipy, Pillow, safetensors, onnx, onnxruntime and cuda-python (cuda.bindings)"


def main(arguments: list[str]) -> int:
    options = _parsed(arguments)
    site = None
    if options.carry is not None:
        try:
            site = carry.unpack(options.carry)
        except carry.CarryError as error:
            print(f"gpu-proof: {error}", file=sys.stderr)
            return 1
        sys.path.insert(0, str(site.resolve()))
    try:
        from convoy.models.errors import JobError
        from tests.gpu.proof import parts
        from tests.gpu.proof.children import Children
        from tests.gpu.proof.page import write_page
    except ImportError as error:
        print(f"gpu-proof: {error}; {NEEDED}", file=sys.stderr)
        return 1
    if options.part not in (None, *parts.PARTS):
        print(f"gpu-proof: there is no part {options.part}, only {', '.join(map(str, parts.PARTS))}", file=sys.stderr)
        return 2
    if options.only not in (None, *(one.name for one in parts.EXPERIMENTS)):
        names = ", ".join(one.name for one in parts.EXPERIMENTS)
        print(f"gpu-proof: there is no experiment {options.only}, only {names}", file=sys.stderr)
        return 2
    try:
        if options.page:
            write_page(options.out)
            return 0
        run = Children(options.out, carry.environment(site)).run
        told = run(parts.IDENTIFY, parts.IDENTIFY.limit_s)
        gpu = told.facts.get("gpu")
        if gpu is None:
            reason = told.not_measurable or told.how
            print(f"gpu-proof: there is no GPU here, so nothing can be proved: {reason}", file=sys.stderr)
            return 1
        return _prove(options, gpu, run)
    except JobError as error:
        print(f"gpu-proof: {error}", file=sys.stderr)
        return 1


def _parsed(arguments: list[str]) -> argparse.Namespace:
    from tests.gpu.proof.budget import PART_BUDGET_S

    parser = argparse.ArgumentParser(prog="gpu-proof", description="Prove Convoy on this machine's GPU.")
    parser.add_argument("--part", type=int, help="only this part; without it, all of them in their order")
    parser.add_argument("--only", help="only this experiment")
    parser.add_argument("--fresh", action="store_true", help="ask again what was answered before")
    parser.add_argument("--carry", type=Path, help="a folder of wheels and .tar.xz to unpack and use")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where results/ and gpu-proof.md are written")
    parser.add_argument("--budget-s", type=float, default=PART_BUDGET_S, help="seconds that each part may take")
    parser.add_argument("--page", action="store_true", help="only write the page again, from the results")
    return parser.parse_args(arguments)


def _prove(options: argparse.Namespace, gpu: str, run: Run) -> int:
    from tests.gpu.proof import parts
    from tests.gpu.proof.book import open_book, write_book
    from tests.gpu.proof.budget import Budget, Journal
    from tests.gpu.proof.page import write_page
    from tests.gpu.proof.schedule import run_part

    book = open_book(options.out, gpu)

    def keep(now: Book) -> None:
        write_book(now, options.out)
        write_page(options.out)

    outcomes: list[Outcome] = []
    left: list[str] = []
    for part in parts.PARTS if options.part is None else (options.part,):
        budget = Budget(options.budget_s)
        journal = Journal(budget)
        asked = [one for one in parts.of_part(part) if options.only in (None, one.name)]
        if not asked:
            continue
        journal.tell(f"part {part}: {parts.TITLES[part]}")
        book, done = run_part(asked, book, budget, journal, run, keep, fresh=options.fresh)
        outcomes += done.outcomes
        left += done.left
    for outcome in outcomes:
        print(f"{outcome.verdict:24}{outcome.experiment}: {outcome.told}")
    if left:
        print(f"left for the next call: {', '.join(left)}")
    if not outcomes and not left:
        print("everything was answered before; FRESH=1 (--fresh) asks again")
    return 1 if any(outcome.verdict == "otherwise" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
